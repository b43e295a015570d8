"""`[downloads]`, and the hubs from which the gateway downloads the models of managed workers (`hub`)."""

from collections.abc import Iterable

from attrs import frozen

from ichat.config.hubs import Hub, is_hub_name
from ichat.config.strict import Between, checked


@frozen
class DownloadSettings:
    """`[downloads]`: downloads of models from a hub."""

    stall_s: float = checked(Between(1, 1e6), 120.0)
    """Seconds without a new byte after which a download has failed; the next download goes on where it ended."""


def contradictions_of_hub(hub: Hub | None, model_path: str, place: str) -> Iterable[str]:
    """Return why the gateway cannot download the model of a worker at a place (`on`), if its table has a hub."""
    if hub is None:
        return
    if place != "here":
        yield "hub: the gateway downloads models to its own machine: leave it out for a worker on Ray"
    if not is_hub_name(model_path):
        yield f"hub: model_path {model_path!r} is no name on a hub, like Qwen/Qwen3-0.6B: leave hub out"
