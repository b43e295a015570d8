"""`[downloads]`, and the hubs from which the gateway downloads the models of managed workers (`hub`)."""

import re
from collections.abc import Iterable

from attrs import frozen

from ichat.config.strict import Between, checked

Hub = str
"""An element of `HUBS`: the Hugging Face hub or a mirror of it (`HF_ENDPOINT`), or ModelScope."""
HUBS: tuple[Hub, ...] = ("huggingface", "modelscope")
_HUB_NAME = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?", re.ASCII)


@frozen
class DownloadSettings:
    """`[downloads]`: downloads of models from a hub."""

    stall_s: float = checked(Between(1, 1e6), 120.0)
    """Seconds without a new byte after which a download has failed; the next download goes on where it ended."""


def is_hub_name(text: str) -> bool:
    """Return whether a text may be the name of a model on a hub, and no path."""
    return _HUB_NAME.fullmatch(text) is not None and not text.startswith((".", "-")) and "/." not in text


def contradictions_of_hub(hub: Hub | None, model_path: str, place: str) -> Iterable[str]:
    """Return why the gateway cannot download the model of a worker at a place (`on`), if its table has a hub."""
    if hub is None:
        return
    if place != "here":
        yield "hub: the gateway downloads models to its own machine: leave it out for a worker on Ray"
    if not is_hub_name(model_path):
        yield f"hub: model_path {model_path!r} is no name on a hub, like Qwen/Qwen3-0.6B: leave hub out"
