"""How far a request has got: the only object about it that changes. The record of its end is made of it."""

import attrs

from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY, RequestBody
from ichat.http.server import Client
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import LABELS, OTHER, RequestRecord, UsedTokens
from ichat.observability.tracing import Trace
from ichat.proxy.leg import Leg
from ichat.proxy.refusals import WaitBound
from ichat.proxy.steps import RequestRoute
from ichat.proxy.token_usage import tokens_used
from ichat.routing.prefix_chain import PrefixChain, PrefixSums, sums_of
from ichat.security.addresses import address_in
from ichat.security.auth import Caller
from ichat.security.grant import Grant

_NO_ROUTE = RequestRoute("")


@attrs.define(eq=False, repr=False)
class RequestProgress:
    """A request on its way: its content, its permissions, and the facts learnt about it. Times are Trio's clock.

    Its exchange owns it; the list of requests in flight only reads it.
    """

    request: Request
    client: Client
    caller: Caller
    path: bytes
    """Its path, as it is counted."""
    started_at: float
    bytes_in: int
    body: RequestBody = NO_BODY
    """As the current model gets it; freed when a response begins."""
    grant: Grant = attrs.field(init=False)
    """Its permissions, once they are known."""

    model: str = ""
    """The model that it asks for now, once that has been read."""
    route: RequestRoute = _NO_ROUTE
    """Its way through the models, once that has begun."""
    leg: Leg | None = None
    """The newest exchange with an endpoint."""
    worker: str = ""
    """The id of the endpoint that was found last."""
    prefix: PrefixChain | None = None
    """The beginning of its prompt, if its route may depend on that."""
    prefix_sums: PrefixSums | None = None
    """The sums for its chains, after they were needed; freed when a response begins."""
    keepalive: KeepAlive | None = None
    trace: Trace | None = None
    ticket: str = ""
    """Its worker reports the later usage under it; "" if there is none, or its upstream cannot report usage."""

    is_stream: bool = False
    """Whether it asks for a stream."""
    is_counted: bool = False
    """Whether it is a request to a model; see `RequestRecord`."""
    is_suspect: bool = False
    """Whether it may have members or headers that no worker gets from this caller."""
    is_background: bool = False
    """Whether its response is made after its end."""
    is_copied: bool = False
    """Whether it belongs to the share of requests that is copied to its name's shadow."""
    is_waiting: bool = False
    """Whether it waits in a queue."""
    prompt_bytes: int = 0
    """The bytes of its body, if models learn from them how long prompts are; else 0."""
    queued_s: float = 0.0
    load_waited_s: float = 0.0
    """How much of that its model was being loaded."""

    load_bound: WaitBound | None = None
    """The bound of its newest wait, if that is for a load."""

    usage: UsedTokens | None = None
    """The tokens that it used."""
    bytes_out: int = 0
    """Of a response of the gateway's own."""
    status: int = 500
    """Of the response; 499 if the client left, before or in the middle of it."""
    error: str = "internal_error"
    """The code of the error, if there was an error; of a bug, until there is a response."""

    def __repr__(self) -> str:
        return f"<RequestProgress {self.request.id.decode()} {self.model} {self.status}>"

    def read_prefix(self) -> PrefixSums | None:
        """Note and return the sums of its prefix, by its body as the client sent it; None if it has no chain."""
        body = self.body.original
        self.prefix_sums = sums_of(self.request.path, body.data, body.names)
        return self.prefix_sums

    def ended(self, status: int, error: str, bytes_out: int = 0) -> None:
        """Note how it has ended; `bytes_out` is the size of a response of the gateway's own."""
        self.status, self.error, self.bytes_out = status, error, bytes_out

    def note_end_of(self, leg: Leg) -> None:
        """Note how the newest exchange has ended, if its response had begun, and let the leg lead back to nothing.

        The garbage collector must have nothing to do.
        """
        del leg.sink, leg.heard
        if leg.answered_at is not None:
            self.status, self.error = leg.status, leg.error

    @property
    def is_answered(self) -> bool:
        """Whether a response has begun."""
        return self.leg is not None and self.leg.answered_at is not None

    @property
    def phase(self) -> str:
        """How far it has got: `begun`, `queued`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

        `waiting` has been sent and has no answer yet. `first_token` has the head of a stream and nothing of its body.
        `plain` has the head of a response that is no stream.
        """
        leg = self.leg
        if leg is None or leg.asked_at is None:
            return "queued" if self.is_waiting else "begun" if leg is None else "connecting"
        if leg.answered_at is None:
            return "waiting"
        if not leg.is_stream:
            return "plain"
        return "streaming" if leg.relay is not None and leg.relay.body.chunks else "first_token"

    @property
    def overhead_s(self) -> float | None:
        """How long the gateway itself needed before it asked the upstream: not the time in a queue."""
        asked_at = None if self.leg is None else self.leg.asked_at
        return None if asked_at is None else asked_at - self.started_at - self.queued_s

    def count_tokens(self) -> None:
        """Note the tokens that the request has used, as its response says, or an estimate."""
        leg = self.leg
        if leg is None or leg.relay is None or leg.usage is None:
            return
        if self.ticket:
            self.usage = leg.usage.said()
            return
        is_good = leg.answered_at is not None and leg.status < 400
        self.usage = tokens_used(
            leg.usage, self.bytes_in, leg.relay.body.bytes_out, leg.relay.body.chunks,
            has_left=self.client.has_left, is_good=is_good, is_stream=leg.is_stream,
        )  # fmt: skip

    def record(self, phase: str, now: float) -> RequestRecord:
        """Return the facts of the request that has ended; `phase` is how far it had got if it was cut off."""
        request, leg, route, trace = self.request, self.leg, self.route, self.trace
        received = None if leg is None or leg.relay is None else leg.relay.body
        return RequestRecord(
            id=request.id.decode(),
            client=client_address(self.caller, self.client.peer),
            method=request.method.decode("latin-1"),
            path=shown_path(request.path),
            route=LABELS.get(self.path, OTHER),
            key_name=self.caller.key_name,
            model=self.model,
            status=self.status,
            error=self.error,
            phase=phase,
            started_at=self.started_at,
            ended_at=now,
            queued_s=self.queued_s,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out if received is None else received.bytes_out,
            usage=self.usage,
            trace_id="" if trace is None else trace.id,
            span=None if trace is None else trace.span,
            is_counted=self.is_counted,
            prefix=self.prefix,
            worker=self.worker,
            answered_at=None if leg is None else leg.answered_at,
            first_at=None if received is None else received.first_at,
            overhead_s=self.overhead_s,
            chunks=0 if received is None else received.chunks,
            alias=route.name,
            passed=route.passed,
        )


def client_address(caller: Caller, peer: str) -> str:
    """Return the connection's address and port, or the address for which a trusted proxy asks."""
    own = peer.rpartition(":")[0] == caller.address or address_in(peer) == caller.address
    return peer if own else caller.address
