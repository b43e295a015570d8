"""How far a request has got on the side that has its bytes: its body, its newest exchange and its end.

The side that decides is its desk. The record of the request's end is made of both.
"""

from collections.abc import Callable

import attrs

from ichat.errors import ApiError
from ichat.http.hub import Hub
from ichat.http.keepalive import KeepAlive
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY, RequestBody
from ichat.http.server import Client
from ichat.observability.request_record import UsedTokens
from ichat.proxy.leg import Leg
from ichat.proxy.steps import NO_EDITS, BodyEdits
from ichat.proxy.token_usage import tokens_used
from ichat.routing.prefix_chain import PrefixSums, sums_of
from ichat.routing.prompt_lengths import is_measurable


@attrs.define(eq=False, repr=False)
class RequestProgress:
    """A request on its way: its bytes, and the facts learnt about them. Times are Trio's clock.

    Only its exchange sets its attributes, beside its own methods. It is the `Asker` of its desk.
    """

    hub: Hub
    request: Request
    client: Client
    path: bytes
    """Its path, as it is counted."""
    bytes_in: int
    body: RequestBody = NO_BODY
    """As the current model gets it; freed when a response begins."""
    edits: BodyEdits = NO_EDITS
    """Those that its body has now."""
    prefix_sums: PrefixSums | None = None
    """The sums for its chains, after they were needed; freed when a response begins."""
    leg: Leg | None = None
    """The newest exchange with an endpoint."""
    keepalive: KeepAlive | None = None
    comment_s: float = 0.0
    """How often every stream gets a comment; 0: never."""

    is_stream: bool = False
    """Whether it asks for a stream."""
    usage: UsedTokens | None = None
    """The tokens that it used."""
    bytes_out: int = 0
    """Of a response of the gateway's own."""
    status: int = 500
    """Of the response; 499 if the client left, before or in the middle of it."""
    error: str = "internal_error"
    """The code of the error, if there was an error; of a bug, until there is a response."""

    def __repr__(self) -> str:
        return f"<RequestProgress {self.request.id.decode()} {self.status}>"

    # Its body.

    def read_plainly(self, path: bytes = b"") -> None:
        """Note its body without reading it, and its path as it is counted, if that differs."""
        self.body, self.path = RequestBody(self.request.body), path or self.path

    def read_prefix(self) -> PrefixSums | None:
        """See `Asker`. The body is read once only, unless it has no chain."""
        if self.prefix_sums is None:
            body = self.body.original
            self.prefix_sums = sums_of(self.request.path, body.data, body.names)
        return self.prefix_sums

    def prompt_bytes(self) -> int:
        """See `Asker`."""
        request = self.request
        return len(request.body) if is_measurable(request.path, self.body.names, request.body) else 0

    # Its comments. A client that can get no chunks has none: an error then ends the stream.

    def make_keepalive(self, interval_s: float) -> KeepAlive | None:
        """Have the stream get a comment after each interval, from `KeepAlive.start` on, if it can have any."""
        if self.request.version == b"1.1":
            self.keepalive = KeepAlive(self.hub, self.client, self.request.id, interval_s)
        return self.keepalive

    def announce_load(self, text: Callable[[], bytes], interval_s: float) -> None:
        """See `Asker`."""
        if not self.is_stream:
            return
        keepalive = self.keepalive or self.make_keepalive(interval_s)
        if keepalive is not None:
            keepalive.announce(text, min(interval_s, keepalive.interval_s or interval_s))

    def end_load(self) -> None:
        """See `Asker`."""
        keepalive, interval_s = self.keepalive, self.comment_s
        if keepalive is None:
            return
        keepalive.end_announcement(interval_s)
        if not interval_s and not keepalive.has_begun:
            self.keepalive = None

    # Its end.

    def ended(self, status: int, error: str, bytes_out: int = 0) -> None:
        """Note how it has ended; `bytes_out` is the size of a response of the gateway's own."""
        self.status, self.error, self.bytes_out = status, error, bytes_out

    def failed(self, error: ApiError) -> None:
        """Note an error; its status counts only if no response had begun."""
        self.error = error.code
        if not self.is_answered:
            self.status = error.status

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
        """How far it has got: `begun`, `connecting`, `waiting`, `first_token`, `streaming` or `plain`.

        `waiting` has been sent and has no answer yet. `first_token` has the head of a stream and nothing of its body.
        `plain` has the head of a response that is no stream.
        """
        leg = self.leg
        if leg is None or leg.asked_at is None:
            return "begun" if leg is None else "connecting"
        if leg.answered_at is None:
            return "waiting"
        if not leg.is_stream:
            return "plain"
        return "streaming" if leg.relay is not None and leg.relay.body.chunks else "first_token"

    def count_tokens(self, ticket: str = "") -> None:
        """Note the tokens that the request has used, as its response says, or an estimate.

        There is no estimate if its worker reports the rest later, under this ticket.
        """
        leg = self.leg
        if leg is None or leg.relay is None or leg.usage is None:
            return
        if ticket:
            self.usage = leg.usage.said()
            return
        is_good = leg.answered_at is not None and leg.status < 400
        self.usage = tokens_used(
            leg.usage, self.bytes_in, leg.relay.body.bytes_out, leg.relay.body.chunks,
            has_left=self.client.has_left, is_good=is_good, is_stream=leg.is_stream,
        )  # fmt: skip
