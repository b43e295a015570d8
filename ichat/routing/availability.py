"""Whether requests for a model can be served now, as values. The text for the client follows at the edge."""

import enum
import math
from collections.abc import Callable, Sequence

import attrs

from ichat.routing.endpoint import Endpoint
from ichat.routing.sessions import HashRing

NOT_NOW = "nothing can serve it at the moment"


class Prospect(enum.IntEnum):
    """When a model can answer a new request; the smaller, the sooner."""

    NOW = 0
    """A place that answers is there, even if the request has to wait for its turn."""
    LATER = 1
    """Nothing serves the model now, and its requests wait for a worker that is on its way, or will be."""
    NEVER = 2
    """By the present facts."""


@attrs.define(eq=False)
class Ready:
    """These endpoints can serve the model now."""

    endpoints: Sequence[Endpoint]
    ring: HashRing | None = attrs.field(default=None, repr=False)
    """Finds the endpoints of sessions, if there are many of them; made for the first session."""
    known: int = 0
    """How many endpoints the model has, with those that are not ready, if that is more."""
    _members: frozenset[Endpoint] | None = attrs.field(default=None, init=False, repr=False)

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Return whether an endpoint is one of them, without looking at all of many."""
        if self._members is None:
            self._members = frozenset(self.endpoints)
        return endpoint in self._members

    def home_of(self, session: bytes, is_free: Callable[[Endpoint], bool]) -> Endpoint | None:
        """Return the endpoint of a session, of those that are free; None if there are hardly any of these."""
        self.ring = self.ring or HashRing(self.endpoints)
        return self.ring.home_of(session, is_free)


@attrs.frozen
class Full:
    """All of them have as many requests as they may have."""

    waiting: int = 0
    """Requests in the model's queue."""


@attrs.frozen
class Loadable:
    """Nothing serves the model now, and its requests wait while it is loaded."""

    reasons: str
    """Of each of its workers, for operators."""
    ready_at: float | None
    """When it will probably be ready, in seconds of Trio's clock; None: not known."""
    known: int = 1
    """How many workers have the model."""
    is_coming: bool = False
    """Whether a worker starts by itself, whether the model is wanted or not: it starts, or is started again."""
    doing: str = ""
    """The current work of the worker that is expected first, in a few words."""
    told: str = attrs.field(default=NOT_NOW, eq=False, kw_only=True)
    """The text for clients: the state without the reasons, since these are the operators' own."""

    def words(self, now: float) -> str:
        """Return the worker's current work, and how long that will probably go on, as far as it is known."""
        if self.ready_at is None:
            return self.doing
        rest_s = self.ready_at - now
        return f"{self.doing}; about {math.ceil(rest_s)} s left" if rest_s > 0 else f"{self.doing}, longer than usual"

    def rest_s(self, now: float) -> int | None:
        """Return in how many seconds it will probably be ready, at least 1; None: not known."""
        return None if self.ready_at is None else max(1, math.ceil(self.ready_at - now))


@attrs.frozen
class NotReady:
    """The model is known, and nothing can serve it at the moment."""

    reasons: str
    """Of each of its endpoints, for operators."""
    retry_after_s: int
    limit: str = ""
    """The section of the configuration that sets this limit, if a section does."""
    is_final: bool = False
    """Whether waiting requests are refused as well: a load has failed."""
    told: str = attrs.field(default=NOT_NOW, eq=False, kw_only=True)
    """The text for clients, as for `Loadable`."""


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
    """A heartbeat of a new worker was not recorded: there are `workers_max` already."""

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
    return NotReady("; ".join(reasons), retry_after_s, told="the upstream that serves it fails its health checks")
