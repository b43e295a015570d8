"""The balancer's knowledge about a request, and the lease that the request gets."""

from collections.abc import Callable, Collection

import attrs

from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PrefixChain


@attrs.define(eq=False)
class RoutingRequest:
    """A request for a model, as far as its route depends on it. Only the balancer changes it (`make_prefix`)."""

    model: str
    session: bytes = b""
    """Requests with the same session go to the same endpoint; empty: to any."""
    fairness_key: str = ""
    """Flows with different keys take turns in a queue."""
    excluded: Collection[Endpoint] = ()
    """Endpoints that have failed with it."""
    only: Endpoint | None = None
    """The only endpoint that can answer it: it keeps the response that the request continues."""

    prefix: PrefixChain | None = None
    """The beginning of its prompt, if its route may depend on that."""
    make_prefix: Callable[[], PrefixChain | None] | None = attrs.field(default=None, repr=False)
    """Returns `prefix`. The balancer calls it if its choice depends on that, and forgets it when the request is routed
    first: it holds the request's body."""
    ignores_prefix: bool = False
    """Whether its route did not depend on its prefix, for want of a choice."""
    skips_open: bool = False
    """Whether an endpoint with an open circuit is not asked even if it answers: another model can be asked instead."""

    @property
    def is_restricted(self) -> bool:
        """Whether a request behind it in the queue may be served while this request cannot."""
        return bool(self.excluded) or self.only is not None


class Lease:
    """A request's place at an endpoint."""

    __slots__ = ("_on_end", "_probe", "_request", "endpoint")

    def __init__(
        self,
        endpoint: Endpoint,
        request: RoutingRequest,
        on_end: Callable[[Endpoint, RoutingRequest, int], None],
        probe: int,
    ) -> None:
        """`on_end` is called once, with the number of the circuit's probe that the request is (0: it is none)."""
        self.endpoint = endpoint
        self._request = request
        self._on_end: Callable[[Endpoint, RoutingRequest, int], None] | None = on_end
        self._probe = probe

    def __repr__(self) -> str:
        return f"<Lease on {self.endpoint.id.decode()}{'' if self._on_end else ', released'}>"

    @property
    def is_probe(self) -> bool:
        """Whether its request shows whether the endpoint's circuit can close."""
        return self._probe != 0

    def move(self, endpoint: Endpoint) -> None:
        """Have the request count at another endpoint of the same worker; without effect after its end."""
        if self._on_end is not None:
            self.endpoint.end_request()
            self.endpoint = endpoint
            endpoint.start_request()

    def release(self) -> None:
        """End the lease, since the request has ended; harmless the second time."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self.endpoint, self._request, self._probe)
