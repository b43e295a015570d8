"""A request for a model at its relay: the facts for the owner, and an attempt as the owner says."""

import attrs

from ichat.errors import ApiError
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY
from ichat.http.server import Client
from ichat.observability.request_record import RESPONSE_PATH, ROUTES, UsedTokens
from ichat.protocol.messages import DROPPED_HEADER
from ichat.protocol.usage import usage_wanted
from ichat.proxy.client_sink import ClientSink
from ichat.proxy.copies import copy_of
from ichat.proxy.engine_control import DropNotices
from ichat.proxy.leg import Leg
from ichat.proxy.model_request import Asked, read_model_request
from ichat.proxy.progress import RequestProgress
from ichat.proxy.steps import NO_EDITS
from ichat.proxy.targets import body_for
from ichat.proxy.token_usage import usage_reader
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.relays.copies_at_relay import CopiesAtRelay
from ichat.relays.frame_desk import FrameDesk
from ichat.relays.gaps import GapsHere
from ichat.relays.owner_link import OwnerLink
from ichat.relays.relay_asks import admit, asked_of, report_refusal
from ichat.relays.settings import RelaySettings
from ichat.relays.values import (
    BACKGROUND,
    HEAD_ONLY,
    HIDES_KEYS,
    IGNORES_PREFIX,
    IS_COPIED,
    MAY_STEER,
    STREAM,
    SUSPECT,
    TELLS_HEAD,
    HeadSeen,
    SentAsk,
    SentStep,
    TrioClock,
)
from ichat.routing.prefix_chain import PrefixSums
from ichat.security.grant import Grant

NAMES_MAX = 10_000
"""Of models of which it is noted that their requests need no sums of prefixes."""
_USAGE_WANTED = usage_wanted("")


@attrs.define(eq=False)
class RelayParts:
    """The objects that all exchanges of a relay share."""

    pool: Pool
    desk: FrameDesk
    copies: CopiesAtRelay
    clock: TrioClock
    settings: RelaySettings
    link: OwnerLink
    session_header: bytes = b""
    """The name of the header that names a session, as heads have it; empty: none does."""
    without_prefixes: set[str] = attrs.field(factory=set[str])
    """The names that need no sums of prefixes, as their newest steps say."""
    gaps: GapsHere = attrs.field(factory=GapsHere)
    notices: DropNotices = attrs.field(factory=DropNotices)

    def note_prefixes(self, name: str, bits: int) -> None:
        """Note by the bits of a step whether the next request for a name needs no sums of its prefix."""
        if not bits & IGNORES_PREFIX:
            self.without_prefixes.discard(name)
        elif len(self.without_prefixes) < NAMES_MAX:
            self.without_prefixes.add(name)


class RelayRequest:
    """A request of a client."""

    __slots__ = ("_edits", "_name", "_parts", "_started_at", "is_suspect", "progress")

    def __init__(self, parts: RelayParts, request: Request, client: Client) -> None:
        hub = parts.pool.hub
        self._parts = parts
        self.progress = RequestProgress(hub, request, client, request.path, len(request.body))
        self._started_at = hub.update_clock()
        self._edits = NO_EDITS
        """Those that its body has now."""
        self._name = ""
        self.is_suspect = False

    def __repr__(self) -> str:
        return f"<RelayRequest {self.progress!r}>"

    async def read(self) -> SentAsk:
        """Return the ask for the owner. Raises ApiError if no upstream may get it."""
        progress, request = self.progress, self.progress.request
        if request.path.startswith(b"/v1/responses/") and not (request.method == b"POST" and request.path in ROUTES):
            progress.read_plainly(RESPONSE_PATH)
            return self._ask(bits=0)
        try:
            asked, progress.body = await read_model_request(request, b"")
        except ApiError as error:
            head = self._ask(bits=HEAD_ONLY)._replace(body_bytes=0)
            await admit(self._parts.desk, head)  # noqa: ASYNC120 then it has no answer
            self.record(error)
            raise
        return self._ask_for(asked)

    async def read_known(self) -> SentAsk | None:
        """Return the ask of a request to a known route; None for others. Raises ApiError."""
        request = self.progress.request
        if request.path not in ROUTES or request.method != b"POST":
            return None
        asked, self.progress.body = await read_model_request(request, b"")
        return self._ask_for(asked)

    def _ask_for(self, asked: Asked) -> SentAsk:
        parts, progress = self._parts, self.progress
        self.is_suspect, progress.is_stream = asked.is_suspect, asked.is_stream
        progress.comment_s = parts.settings.timeouts.sse_keepalive_s
        if asked.is_stream and progress.comment_s:
            progress.make_keepalive(progress.comment_s)
        bits = STREAM * asked.is_stream | BACKGROUND * asked.is_background | SUSPECT * asked.is_suspect
        self._name, sums = asked.model, None
        if parts.settings.sends_prefixes and asked.model not in parts.without_prefixes:
            sums = None if parts.session_header in progress.request.by_name else progress.read_prefix()
        prompt_bytes = progress.prompt_bytes() if parts.settings.sends_prompt_bytes else 0
        return self._ask(bits, asked.model, prompt_bytes, sums, asked.previous_response_id or "")

    def _ask(
        self, bits: int, model: str = "", prompt_bytes: int = 0, sums: PrefixSums | None = None, previous: str = ""
    ) -> SentAsk:
        parts, progress = self._parts, self.progress
        return asked_of(
            parts.desk.new_number(), progress.request, progress.client.peer, session_header=parts.session_header,
            at=parts.clock.ns_of(self._started_at), body_bytes=progress.bytes_in, bits=bits, model=model,
            prompt_bytes=prompt_bytes, sums=sums, previous=previous,
        )  # fmt: skip

    def record(self, error: ApiError) -> None:
        """Have the owner count and log a refusal of the relay itself."""
        parts, progress, request = self._parts, self.progress, self.progress.request
        about = {"at": parts.clock.ns_of(self._started_at), "bytes_in": progress.bytes_in}
        report_refusal(parts.desk, error, request.id, progress.client.peer, request, about=about)

    def comment(self, text: bytes) -> None:
        """Send a comment of the owner's in a stream that waits."""
        progress = self.progress
        if progress.keepalive is None:
            progress.make_keepalive(progress.comment_s)
        keepalive = progress.keepalive
        if keepalive is not None:
            interval_s = keepalive.interval_s or 3600.0
            keepalive.announce(lambda: text, interval_s)
            keepalive.end_announcement(progress.comment_s)

    def used_tokens(self, ticket: str) -> UsedTokens | None:
        """Return the tokens that the newest attempt has used; see `RequestProgress.count_tokens`."""
        self.progress.usage = None
        self.progress.count_tokens(ticket)
        return self.progress.usage

    async def make_leg(self, sent: SentStep) -> Leg:
        """Return the exchange of a new attempt. Raises ApiError for a request that the endpoint must not get."""
        parts, progress, request, step = self._parts, self.progress, self.progress.request, sent.step
        endpoint, ready_at = parts.desk.endpoint(sent), None
        if (self._name in parts.without_prefixes) != (sent.bits & IGNORES_PREFIX != 0):
            parts.note_prefixes(self._name, sent.bits)
        if step.edits != self._edits:
            progress.body = await body_for(progress.body, step.edits, self._name)
            self._edits = step.edits
        if parts.settings.overhead_header and endpoint.id:
            ready_at = self._started_at + sent.queued_s
        sink = ClientSink(progress, progress.client, request.version, [*step.response_head], ready_at)
        body, may_steer = progress.body, bool(sent.bits & MAY_STEER)
        guards = self.is_suspect and not may_steer
        if guards or (endpoint.route is not None and endpoint.route.changes(body)):
            body, dropped = await prepare_body(request, body, endpoint, is_suspect=guards)
            if dropped:
                parts.notices.log_dropped(sent.key, dropped)
                sink.added.insert(0, (DROPPED_HEADER, ", ".join(dropped).encode()))
        usage = usage_reader(progress.path, reports_usage=endpoint.reports_usage)
        added, keepalive = step.request_head, progress.keepalive
        if usage is not None and endpoint.reports_usage:
            added = (*added, usage_wanted(sent.ticket) if sent.ticket else _USAGE_WANTED)
        grant = Grant(sent.key, "", may_steer, bool(sent.bits & HIDES_KEYS))
        pieces = build_upstream_request(
            request,
            body.data,
            endpoint,
            grant=grant,
            added=added,
            reads_response=keepalive is not None or endpoint.route is not None,
        )

        def heard(leg: Leg) -> None:
            if sent.bits & TELLS_HEAD:
                parts.desk.send(HeadSeen(sent.number, leg.status))
            if sent.bits & IS_COPIED and leg.status < 400:
                parts.copies.start(sent.number, copy_of(request, progress.body, grant=grant, is_suspect=guards))
            request.release_body()
            progress.body, progress.prefix_sums = NO_BODY, None

        leg = progress.leg = Leg(
            parts.pool, endpoint, step, sink, pieces, request.method, usage, parts.gaps.of(step.model), keepalive, heard
        )
        return leg
