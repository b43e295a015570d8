"""Whether requests for a model can be served now, as values. What a client is told follows at the edge."""

import math
from collections.abc import Sequence

import attrs

from ichat.routing.endpoint import Endpoint
from ichat.routing.sessions import HashRing


@attrs.define(eq=False)
class Ready:
    """These endpoints can serve the model now."""

    endpoints: Sequence[Endpoint]
    ring: HashRing | None = attrs.field(default=None, repr=False)
    """Finds the endpoints of sessions, if there are many of them; made for the first session."""
    known: int = 0
    """How many the model has, with those that are not ready, where that is more."""
    _members: frozenset[Endpoint] | None = attrs.field(default=None, init=False, repr=False)

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Return whether an endpoint is one of them, without looking at all of many."""
        if self._members is None:
            self._members = frozenset(self.endpoints)
        return endpoint in self._members


@attrs.frozen
class Full:
    """All of them have as many requests as they may have."""

    waiting: int = 0
    """Requests in the model's queue."""


@attrs.frozen
class Loadable:
    """Nothing serves the model now, and its requests wait while it is loaded."""

    reasons: str
    ready_at: float | None
    """When it will probably be ready, by the registry's clock; None: not known."""
    known: int = 1
    """How many workers have the model."""

    def rest_s(self, now: float) -> int | None:
        """Return in how many seconds it will probably be ready, at least 1; None: not known."""
        return None if self.ready_at is None else max(1, math.ceil(self.ready_at - now))


@attrs.frozen
class NotReady:
    """The model is known, and nothing can serve it at the moment."""

    reasons: str
    retry_after_s: int
    limit: str = ""
    """The section of the configuration that says so, if one does."""
    is_final: bool = False
    """Whether those who wait are refused as well: a load has failed."""


@attrs.frozen
class Unknown:
    """No worker and no external route has the model."""


@attrs.frozen
class Draining:
    """The gateway shuts down, and no request can wait any more."""


@attrs.frozen
class QueueTimeout:
    """The request has waited for too long."""


@attrs.frozen
class TooManyWorkers:
    """A heartbeat of a new worker was not recorded: there are so many already."""

    workers_max: int


@attrs.frozen
class TooMuchRegistered:
    """A heartbeat was not recorded: the workers that joined have registered as much as a limit allows."""

    limit: str
    """Its name in `[limits]`."""
    allowed: int


Availability = Ready | Loadable | NotReady | Unknown
Refusal = Full | Loadable | NotReady | Unknown | Draining | QueueTimeout
"""Why a request has no lease."""


def without_ill(routes: Sequence[Endpoint], retry_after_s: int) -> Ready | NotReady:
    """Return the external routes of a model that do not fail their health checks."""
    if well := [route for route in routes if not route.health_failure]:
        return Ready(well, known=len(routes))
    reasons = (f"{route.upstream.name} fails its health checks: {route.health_failure}" for route in routes)
    return NotReady("; ".join(reasons), retry_after_s)
