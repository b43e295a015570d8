"""A relay: it accepts connections and moves bytes, and its owner decides.

The owner sends on the first socket, which the relay inherits, descriptors: that of the connection for frames, those of
the listeners, and those that are only held open for workers. On the connection for frames the owner sends settings,
and says when to accept, drain and end.

A relay outlives its owner (`owner_link.py`): it goes on accepting, and its streams go on. Requests wait for
the next owner, within the bounds of `ownerless.py`.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.http.accept_turns import Peers
from ichat.http.front_door import FrontDoor
from ichat.http.heads import Headers, RequestHead
from ichat.http.hub import Hub
from ichat.http.leaving import Retirement
from ichat.http.listeners import adopt_listeners
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.proxy.client_sink import SEALED
from ichat.proxy.planes import is_control, is_for_model
from ichat.relays.copies_at_relay import CopiesAtRelay
from ichat.relays.forwarding import INNER_SOCKET, InnerSocket
from ichat.relays.frame_desk import FrameDesk
from ichat.relays.owner_link import OwnerLink
from ichat.relays.ownerless import Ownerless
from ichat.relays.relay_asks import admit, asked_of, report_refusal
from ichat.relays.relay_exchange import RelayExchange
from ichat.relays.relay_request import RelayParts
from ichat.relays.relay_sockets import build_id, path_of
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.settings import OfferedSettings
from ichat.relays.values import HEAD_ONLY, UNKNOWN, Frame, MonotonicNs, Note, TalkError, TrioClock
from ichat.security.cors import Cors, cors_of
from ichat.supervisor.kept import KeptDescriptors

log = logging.getLogger(__name__)

LAST_S = 2.0
"""How long clients that follow a log have to get its last lines when the relay ends."""
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_EXEMPT = (b"/v1/logs/", b"/v1/admin/events")


def monotonic_now() -> MonotonicNs:
    """Return the time that all processes of this machine have in common."""
    return MonotonicNs(time.monotonic_ns())


class RelayProcess:
    """The parts of a relay, and the handling of its owner's frames."""

    def __init__(self, number: int, directory: str) -> None:
        """`directory` is the gateway's state directory."""
        self._about = {
            "identity": secrets.token_hex(8), "build": build_id(), "pid": os.getpid(), "number": number,
            "since": monotonic_now(),
        }  # fmt: skip
        self._hub = Hub()
        self._talk = RelayTalk()
        self._link = OwnerLink(self._hub, self, path_of(directory, os.getpid()))
        self._offered = OfferedSettings(self._talk, self.send)
        self._address = ""
        """The configured address that the listeners are for."""
        self._listeners: list[socket.socket] = []
        self.kept = KeptDescriptors()
        """Held open for workers until this process ends."""
        self._pool = Pool(self._hub, connect_s=5.0, idle_s=30.0)
        self._desk = FrameDesk(self._talk, self._link.send, monotonic_now)
        self._ownerless = Ownerless(self._talk, self._desk, monotonic_now, self._link.see_time)
        self._parts: RelayParts | None = None
        self._inner = InnerSocket(self._pool, os.path.join(directory, INNER_SOCKET), self._ownerless)
        self._cors: Cors | None = None
        self._door: FrontDoor[None] | None = None
        self._sent = (0, 0)
        """The requests in flight and the connections of the last pulse."""
        self._is_accepting = False
        self._has_drained = False
        self._ended = trio.Event()
        """Set when this process must end."""
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        return f"<RelayProcess {self._door!r}>"

    async def run(self, descriptors: socket.socket) -> None:
        """Serve until an owner says so, or there is none for too long. `descriptors` is the socket to the first."""
        async with trio.open_nursery() as outer:
            outer.start_soon(self._hub.run_forever)
            await outer.start(self._pool.run_forever)
            async with trio.open_nursery() as self._nursery:
                self._link.begin(descriptors)
                self._nursery.start_soon(self._obey_signals)
                self._nursery.start_soon(self._ownerless.refuse_forever)
                self._nursery.start_soon(self._give_up_without_owner)
                await self._ended.wait()
                if self._door is not None:
                    await self._door.wait_until_left(LAST_S)
                self._nursery.cancel_scope.cancel()
            self._pool.close_idle()
            self._link.close()
            outer.cancel_scope.cancel()

    async def _give_up_without_owner(self) -> None:
        """End in good order when there is no owner for too long."""
        await self._ownerless.wait_until_given_up()
        log.error("there was no owner for %g s: this relay ends", self._ownerless.timeouts.ownerless_s)
        await self._drain()
        if not self._talk.owner_term:
            self._ended.set()

    async def _obey_signals(self) -> None:
        """Retire at SIGTERM: the owner starts another relay."""
        import signal

        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            await anext(signals)
            if not self._is_accepting:
                self._ended.set()
                return
            log.info("stop signal: retiring")
            self.send(Note("retiring"))
            await self._retire()

    # The owner: see `FollowsOwner`.

    @property
    def term(self) -> int:
        """See `FollowsOwner`."""
        return self._talk.term

    def given(self, message: Note, descriptors: list[int]) -> None:
        """See `FollowsOwner`: use listeners, and hold descriptors open for workers. Raises TalkError."""
        if message.kind in ("keep", "drop"):
            try:
                self.kept.receive({"kind": message.kind, **message.content}, descriptors)
            except ValueError as error:
                raise TalkError(str(error)) from error
            return
        if message.kind != "listen" or not descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise TalkError(f"A message {message.kind!r} with {len(descriptors)} descriptors is unknown.")
        self._listeners += adopt_listeners(descriptors)
        self._address = str(message.content.get("address", ""))

    def descriptors_for_next(self) -> Sequence[tuple[Mapping[str, Any], Sequence[int]]]:
        """See `FollowsOwner`: hand over the listeners that are still open, and everything that is held for workers."""
        found = [one.fileno() for one in self._listeners if one.fileno() >= 0]
        listen = [({"kind": "listen", "address": self._address}, found)] if found else []
        return [*listen, *self.kept.messages()]

    def received(self, frame: Frame) -> None:
        """See `FollowsOwner`."""
        if not isinstance(frame, Note):
            self._desk.receive(frame, has_effect=self._talk.receives(frame, monotonic_now()))
        elif frame.kind == "hello" and not self._talk.owner_term:
            self._meet(frame)
        else:
            has_effect = self._talk.receives(frame, monotonic_now())
            if (handle := self._NOTES.get(frame.kind)) is not None:
                handle(self, frame)
            else:
                self._desk.receive(frame, has_effect=has_effect)

    def _meet(self, greeting: Note) -> None:
        """Report to a new owner. Raises TalkError."""
        door, phase = self._door, "accepting" if self._is_accepting else "starting"
        if door is not None and (door.draining or door.retirement is not None):
            phase = "retiring"
        self._talk.about = {**self._about, "phase": phase, "lost": self._ownerless.lost_at}
        self._desk.endpoints.clear()
        for answer in self._talk.meet_owner(greeting, monotonic_now()):
            self._link.send(answer)
        if self._ownerless.since is not None:
            log.info("the owner of term %d is there", self._talk.term)
        self._ownerless.meet_owner()
        if self._has_drained:
            self._report_drained()

    def lost_owner(self, why: str) -> None:
        """See `FollowsOwner`: streams go on, and requests wait for the next owner."""
        if self._ended.is_set():
            return
        if self._door is None or (self._has_drained and not self._talk.unsettled):
            self._ended.set()
            return
        log.warning("the owner has gone%s: requests wait for the next", f" ({why})" if why else "")
        self._offered.forget()
        self._ownerless.lose_owner()
        self._desk.drop_copies()

    def send(self, frame: Frame) -> None:
        """Send a frame to the owner, in the order of frames."""
        for one in self._talk.sends(frame, monotonic_now()):
            self._link.send(one)

    # Settings.

    def _on_commit(self, _frame: Note) -> None:
        settings, tls = self._offered.commit()
        if self._parts is None:
            clock = TrioClock.read(trio.current_time(), monotonic_now())
            copies = CopiesAtRelay(self._nursery, self._pool, self._desk, clock)
            self._parts = RelayParts(self._pool, self._desk, copies, clock, settings, self._link)
        self._parts.copies.copies_max = settings.shadows_max
        self._parts.settings, self._parts.session_header = settings, settings.session_header.encode()
        self._parts.without_prefixes.clear()
        self._ownerless.timeouts = settings.timeouts
        self._cors = cors_of(settings.cors_origins, is_control)
        self._pool.connect_s, self._pool.idle_s = settings.timeouts.connect_s, settings.timeouts.upstream_idle_s
        logging.getLogger("ichat").setLevel(settings.log_level.upper())
        if self._door is None:
            self._door = FrontDoor(
                b"gateway", self._answer, _admit_all, self._hub, settings.limits, settings.timeouts, tls, self._refused,
                more_headers=self._more_headers, admit=self._admit,
            )  # fmt: skip
        else:
            self._door.use_settings(settings.limits, settings.timeouts)
            self._door.use_certificate(tls)

    # Accepting, and the end.

    def _on_accept(self, _frame: Note) -> None:
        if self._door is None or not self._listeners:
            raise TalkError("Nothing can be accepted without settings and listeners.")
        self._is_accepting = True
        self._nursery.start_soon(self._door.serve_forever, self._listeners)

    def _on_pulse(self, frame: Note) -> None:
        if self._door is None:
            return
        numbers = [frame.content.get(name) for name in ("connections", "requests")]
        if all(isinstance(number, int | float) for number in numbers):
            means, is_fewest = cast("list[float]", numbers), frame.content.get("is_fewest") is True
            least = map(min, self._sent, _figures_of(self._door))  # some have ended since the means were made
            self._door.see_peers(Peers(*means, is_fewest=is_fewest), *least)
        self._send_pulse()

    def _send_pulse(self) -> None:
        assert self._door is not None
        self._sent = requests, connections = _figures_of(self._door)
        self.send(Note("pulse", 0, {
            "connections": connections, "requests": requests,
            "cpu_ms": time.process_time_ns() // 1_000_000, "rss": _own_rss(),
        }))  # fmt: skip
        if self._parts is None:
            return
        for note in (self._parts.gaps.note(), self._desk.told(self._parts.clock)):
            if note is not None:
                self.send(note)

    def _on_drain(self, _frame: Note) -> None:
        self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        """Accept nothing, and wait until the requests under way have ended."""
        if self._door is not None:
            await self._door.drain()
        await self._note_drained()

    def _on_retire(self, _frame: Note) -> None:
        self._nursery.start_soon(self._retire)

    async def _retire(self) -> None:
        """Leave new connections to other relays, answer the requests on kept connections, and report the end."""
        door = self._door
        if door is None or door.retirement is not None:
            return
        for client in [*door.clients]:
            if not client.blocks_drain:  # it follows a log, and connects again
                client.cut()
        overdue = partial(self._desk.end_all, errors.draining)
        await door.retire(Retirement(total_s=self._ownerless.timeouts.takeover_s, overdue=overdue))
        await self._note_drained()

    async def _note_drained(self) -> None:
        """Report to the owner that no request is left. Without an owner, end, or keep outcomes for the next."""
        if self._parts is not None:
            await self._parts.copies.end()
        is_first, self._has_drained = not self._has_drained, True
        if self._talk.owner_term and is_first:
            self._report_drained()
        elif not self._talk.owner_term and not self._talk.unsettled:
            self._ended.set()

    def _report_drained(self) -> None:
        if self._parts is not None and (sums := self._parts.gaps.note()) is not None:
            self.send(sums)
        self.send(Note("drained"))

    def _on_hurry(self, _frame: Note) -> None:
        if self._door is not None:
            self._door.hurry()

    def _on_end(self, _frame: Note) -> None:
        self._ended.set()

    _NOTES: ClassVar[dict[str, Callable[["RelayProcess", Note], None]]] = {
        "settings": lambda self, frame: self._offered.offer(frame, self._nursery),
        "forget": lambda self, _frame: self._offered.forget(), "commit": _on_commit,
        "accept": _on_accept, "pulse": _on_pulse, "retire": _on_retire, "drain": _on_drain, "hurry": _on_hurry,
        "end": _on_end, "bye": lambda self, _frame: self._link.leave_owner(),
    }  # fmt: skip

    # Requests.

    async def _admit(self, head: RequestHead, client: Client) -> None:
        """Raise ApiError for a body that the owner would not read."""
        assert self._parts is not None
        if self._link.is_behind:
            raise errors.owner_away()
        asked = asked_of(
            self._desk.new_number(), head, client.peer, session_header=self._parts.session_header, at=monotonic_now(),
            bits=HEAD_ONLY,
        )  # fmt: skip
        headers = asked.headers
        if head.by_name.get(b"content-type") == b"application/json":
            headers += ((b"content-type", b"application/json"),)
        length = UNKNOWN if head.length is None else min(head.length, UNKNOWN - 1)
        await admit(self._desk, asked._replace(body_bytes=length, headers=headers))

    async def _answer(self, request: Request, client: Client, _caller: None) -> None:
        """Have a request answered. Raises ApiError if nothing has been sent."""
        if self._link.is_behind:
            raise errors.owner_away()
        if is_for_model(request, self._cors):
            assert self._parts is not None
            await RelayExchange(self._parts, request, client).forward()
            return
        if request.path.startswith(_EXEMPT):
            client.exempt_from_drain()
        self._link.flush()  # the answer may be about requests that have just ended
        await self._inner.forward(request, client)

    def _more_headers(self, head: RequestHead) -> Headers:
        """Return the headers for browsers in the response to a request with this head."""
        sealed = () if is_control(head.path) else SEALED
        return [*sealed] if self._cors is None else [*sealed, *self._cors.headers_for(head.path, head.headers)]

    def _refused(self, error: ApiError, request_id: bytes, peer: str, head: RequestHead | None) -> None:
        """Report a refusal of bytes that were not yet a request: the owner counts and logs it, unless it is behind."""
        if not self._link.is_behind:
            report_refusal(self._desk, error, request_id, peer, head)


def _admit_all(_head: RequestHead, _peer: str) -> None:
    """Identify no client: only the owner knows keys."""


def _figures_of(door: FrontDoor[None]) -> tuple[int, int]:
    """Return how many requests are in flight at a door, and how many connections it has."""
    return sum(not client.idle for client in door.clients), door.counts.total


def _own_rss() -> int:
    """Return the memory of this process in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


async def run(descriptors: socket.socket, number: int, directory: str) -> None:
    """Run a relay until its owner ends it, or there is none for too long."""
    await RelayProcess(number, directory).run(descriptors)
