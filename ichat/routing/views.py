"""What operators see of a worker."""

from collections.abc import Sequence
from typing import Annotated, Literal

from attrs import frozen

from ichat.config.strict import Between
from ichat.protocol import Count, PeerLoss
from ichat.routing.circuit_breaker import CircuitView
from ichat.routing.worker_record import State


@frozen
class WorkerView:
    """A worker as the gateway knows it, beside what the worker says in its heartbeats."""

    worker_id: str
    model_name: str
    model_names: Sequence[str]
    """Every name that the worker serves or will serve."""
    status: Literal["healthy", "unhealthy"]
    """`healthy`: the worker's `state` is `ready` or `following`. `unhealthy`: every other state."""
    state: State
    managed: bool
    """Whether this gateway starts and stops the worker."""
    machine: str | None
    """The host name of the worker's machine; None: not known."""
    in_flight: Count
    """Requests that this gateway has sent to the worker and that are not finished."""
    circuit: CircuitView | None
    """None: the worker has not sent a heartbeat yet."""
    restarts: Count
    """How often the gateway has restarted the worker."""
    failure: str | None
    """Why the worker is down or fails its health checks, in a few words; None: neither."""
    retry_in_s: Annotated[float, Between(0)] | None
    """Seconds until the worker is started again; None: the worker is not down, or stays down."""
    exit_code: int | None
    """The exit code of the last unexpected end; None: a signal ended the worker, or the code is not known."""
    signal: str | None
    """The signal that ended the worker, for example `SIGKILL`, or None."""
    oom_killed: bool
    """Whether the kernel killed a process of the worker because memory had run out."""
    cause: str | None
    """Why the worker last ended unexpectedly, in a sentence; None: not known, or never."""
    last_lines: Sequence[str]
    """The worker's last output before that end, oldest line first."""
    ended_at: float | None
    """When the worker last ended unexpectedly, in seconds since 1970; None: never."""
    lost: Sequence[PeerLoss]
    """Workers that the worker's group has lost."""
    beat_age_s: float | None
    """Seconds since the newest heartbeat; None: there was none yet."""
