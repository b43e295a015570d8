"""An entry of `/v1/models`, as gateway and workers write it."""

from typing import Any, Literal

import attrs

from ichat.protocol.messages import Count, ModelCard


@attrs.frozen(kw_only=True)
class ModelEntry(ModelCard):
    """An entry of `/v1/models`."""

    object: Literal["model"] = "model"
    created: Count
    """Seconds since 1970: when the server of the list started."""
    owned_by: str
    """The engine that serves the model, or `external`."""
    loaded: bool | None = None
    """Only of a model that is loaded on demand: whether it answers at once, or its requests wait for a load."""


def entry_of(model: ModelCard, created: int, owner: str, *, loaded: bool | None = None) -> dict[str, object]:
    """Return a model as an entry of `/v1/models`, as JSON can hold it."""
    known: dict[str, Any] = attrs.asdict(model) | {"root": model.root or model.id}
    entry = attrs.asdict(ModelEntry(**known, created=created, owned_by=owner, loaded=loaded))
    if loaded is None:
        del entry["loaded"]
    return entry
