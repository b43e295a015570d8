"""The beat: what a worker tells the gateway, at every change of its state and at intervals in between.

It is registration and heartbeat in one: the gateway learns everything from it, every time.
"""

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat import errors

WorkerState = Literal["starting", "loading", "ready", "draining", "gone"]
"""What a worker says of itself; `gone` is its good-bye."""

ModelNames = list[str]


@attrs.frozen
class Beat:
    """One beat. Of a worker that is not iChat's own, only the first four are needed."""

    worker_id: str
    """Made by the worker, unique for its life."""
    model_name: str
    host: str
    """Where the gateway reaches it."""
    port: int
    model_names: ModelNames = attrs.field(factory=list[str])
    """Every name that it serves, `model_name` included."""
    backend: str = ""
    model_path: str = ""
    state: WorkerState = "ready"
    phase: str = ""
    """What it is doing, in a few words."""
    heartbeat_interval: float = 30.0
    """Seconds until the next beat, at the latest."""
    pid: int = 0
    args: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    versions: Mapping[str, str] = attrs.field(factory=dict[str, str])
    progress: Mapping[str, float | None] = attrs.field(factory=dict[str, float | None])
    """`ichat.engines.Progress`."""


_converter = cattrs.Converter(detailed_validation=True)


def read_beat(body: object) -> Beat:
    """Make a beat of parsed JSON; keys that it does not know are left to newer gateways. Raises ApiError 400."""
    try:
        beat = _converter.structure(body, Beat)
    except BaseValidationError as error:
        raise errors.bad_request(f"This is not a beat: {'; '.join(cattrs.transform_error(error))}.") from error
    except (TypeError, AttributeError) as error:
        raise errors.bad_request("A beat is a JSON object.") from error
    if not beat.worker_id or not beat.host or not 0 < beat.port < 65536:
        raise errors.bad_request("A beat needs a worker_id, a host and a port from 1 to 65535.")
    return beat


def names_of(beat: Beat) -> list[str]:
    """Give every name that the worker serves."""
    return list(beat.model_names) or [beat.model_name]
