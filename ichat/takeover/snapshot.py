"""Everything that the old process knows beyond files and relays, as JSON.

Unknown fields are ignored, and missing fields have defaults.
The clocks of two processes have nothing in common, so each time is an age: seconds before the snapshot, negative if the
time is still ahead.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs
import cattrs
from attrs import frozen
from cattrs.errors import BaseValidationError

from ichat.fleet.saved_records import SavedRecord
from ichat.routing.endpoint import Endpoint
from ichat.security.rate_limits import Quota, Window
from ichat.supervisor.life import Actual, NoProcess, Serving, Sleeping, Starting, Wanted

_LIVES: Mapping[str, type[Starting | Serving | Sleeping]] = {
    "starting": Starting, "serving": Serving, "sleeping": Sleeping,
}  # fmt: skip


@frozen
class SavedEndpoint:
    """The observations of an endpoint."""

    id: str
    failures: int = 0
    opened: int = 0
    open_age_s: float | None = None
    """Since when an open circuit is half open, usually negative; None: it is closed."""
    answers: bool = False
    avoid_s: float = 0.0
    """For how long it is still avoided."""
    unavailable_reason: str = ""
    probe_failures: int | None = None
    health_failure: str = ""


@frozen
class SavedQuota:
    """The use of a key in the last minute; "" stands for all requests together."""

    name: str
    used_age_s: float | None = None
    requests: list[tuple[float, int]] = attrs.field(factory=list[tuple[float, int]])
    tokens: list[tuple[float, int]] = attrs.field(factory=list[tuple[float, int]])


@frozen
class SavedLife:
    """The wanted and the actual state of a managed worker."""

    worker_id: str
    state: Literal["cold", "loaded", "asleep", "gone"] = "loaded"
    run: int = 0
    drain_s: float | None = None
    takes_requests: bool = True
    actual: Literal["new", "cold", "stopped", "failed", "starting", "serving", "sleeping"] = "new"
    """The kind of `NoProcess`, or `starting`, `serving`, `sleeping`."""
    actual_run: int = 0
    failures: int = 0
    start_in_s: float | None = None
    """When it may be started again; None: at any time, or never if it has failed."""
    failed_change: str = ""


@frozen
class SavedRequest:
    """A request under way at the old process itself, not at a relay."""

    id: str
    """The gateway's own."""
    key: str = ""
    endpoint: str = ""
    """The id of the endpoint at which it has a place; "" if it has none."""
    model: str = ""


@frozen
class Snapshot:
    """All of it."""

    workers: list[SavedRecord] = attrs.field(factory=list[SavedRecord])
    endpoints: list[SavedEndpoint] = attrs.field(factory=list[SavedEndpoint])
    quotas: list[SavedQuota] = attrs.field(factory=list[SavedQuota])
    lives: list[SavedLife] = attrs.field(factory=list[SavedLife])
    started: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    """The managed workers as `workers.json` has them, and those without a process as well."""
    requests: list[SavedRequest] = attrs.field(factory=list[SavedRequest])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Snapshot":
        """Read it. Raises ValueError, with the reason, for something else."""
        try:
            return cattrs.structure(content, cls)
        except (BaseValidationError, TypeError, ValueError) as error:
            raise ValueError(f"The snapshot cannot be read: {cattrs.transform_error(error)}") from error


# Endpoints.


def endpoint_of(name: str, endpoint: Endpoint, now: float) -> SavedEndpoint:
    """Return the knowledge about an endpoint, under a name that both processes give it."""
    circuit = endpoint.circuit
    return SavedEndpoint(
        name, circuit.failures, circuit.opened, None if circuit.open_until is None else now - circuit.open_until,
        circuit.answers, max(0.0, endpoint.avoid_until - now), endpoint.unavailable_reason, endpoint.probe_failures,
        endpoint.health_failure,
    )  # fmt: skip


def restore_endpoint(saved: SavedEndpoint, endpoint: Endpoint, now: float) -> None:
    """Set the knowledge about an endpoint."""
    open_until = None if saved.open_age_s is None else now - saved.open_age_s
    endpoint.circuit.restore(saved.failures, saved.opened, open_until, answers=saved.answers)
    avoid_until = now + saved.avoid_s if saved.avoid_s else -math.inf
    endpoint.restore(avoid_until, saved.unavailable_reason, saved.probe_failures, saved.health_failure)


# Limits.


def quota_of(quota: Quota, now: float) -> SavedQuota:
    """Return the use of a key."""
    used = None if quota.used_at is None else now - quota.used_at
    return SavedQuota(quota.name, used, quota.requests.ages(now), quota.tokens.ages(now))


def restore_quota(saved: SavedQuota, quota: Quota, now: float) -> None:
    """Set the use of a key that the old process has counted."""
    quota.used_at = None if saved.used_age_s is None else now - saved.used_age_s
    quota.requests, quota.tokens = Window.of_ages(saved.requests, now), Window.of_ages(saved.tokens, now)


# Managed workers.


def life_of(worker_id: str, wanted: Wanted, actual: Actual, failed_change: str, now: float) -> SavedLife:
    """Return the wanted and the actual state of a managed worker that is neither changing nor being cleared away."""
    in_s = None
    if isinstance(actual, NoProcess):
        kind = actual.kind
        in_s = actual.may_start_at - now if math.isfinite(actual.may_start_at) else None
    else:
        kind = "serving" if isinstance(actual, Serving) else "sleeping" if isinstance(actual, Sleeping) else "starting"
    return SavedLife(
        worker_id, wanted.state, wanted.run, wanted.drain_s, wanted.takes_requests, kind, actual.run, actual.failures,
        in_s, failed_change,
    )  # fmt: skip


def states_in(saved: SavedLife, now: float) -> tuple[Wanted, Actual]:
    """Return the wanted and the actual state."""
    wanted = Wanted(saved.state, saved.run, saved.drain_s, saved.takes_requests)
    if saved.actual in _LIVES:
        return wanted, _LIVES[saved.actual](saved.actual_run, saved.failures)
    never = math.inf if saved.actual == "failed" else -math.inf
    at = never if saved.start_in_s is None else now + saved.start_in_s
    kind = "new" if saved.actual in ("starting", "serving", "sleeping") else saved.actual
    return wanted, NoProcess(saved.actual_run, kind, saved.failures, at)


def names_of_external(external: Mapping[str, Iterable[Endpoint]]) -> dict[str, Endpoint]:
    """Return the endpoints of external routes, by names that another process with the same routes gives them too."""
    return {
        f"{model} {number} {endpoint.upstream.host}": endpoint
        for model, endpoints in external.items()
        for number, endpoint in enumerate(endpoints)
    }
