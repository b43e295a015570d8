"""Answers that clients do not read at once: how many of them wait, and for how long.

A client that asks for something and does not read it holds a connection and, unless many share them, the answer's
bytes. So only a few answers wait for a party, and not many in all: the newest is let in, and the oldest is cut. A
client is cut, too, that reads too little of its answer within `timeouts.unread_s`.
"""

import contextlib
from collections.abc import Generator

import trio

from ichat.http.server import Client

UNREAD_OF_ONE_MAX = 16
"""Answers that wait for a single party."""
UNREAD_MAX = 256
"""Answers that wait in all; fewer than the places for requests, so that they cannot occupy all of these."""
TAKEN_BYTES_MIN = 64 * 1024
"""Bytes of its answer, or the rest, that a client must read within `timeouts.unread_s`."""
WHOLE_BYTES_MAX = 256 * 1024
"""An answer up to this size is kept whole until its client reads it."""


class UnreadAnswers:
    """Clients that have not read their answers, the oldest first."""

    def __init__(self, of_one_max: int = UNREAD_OF_ONE_MAX, all_max: int = UNREAD_MAX) -> None:
        self._of_one_max, self._all_max = of_one_max, all_max
        self._parties: dict[Client, str] = {}
        self._by_party: dict[str, dict[Client, None]] = {}

    def __repr__(self) -> str:
        return f"<UnreadAnswers {len(self._parties)} of {len(self._by_party)} parties>"

    async def send(self, client: Client, party: str, data: bytes | memoryview, unread_s: float) -> None:
        """Send all of this to a client, as part of an answer; a client that hardly reads is cut (cancelled)."""
        rest = memoryview(data)
        rest = rest[client.send_some(rest) :]
        if not rest:
            return
        with self._noted(client, party):
            while rest:
                with trio.move_on_after(unread_s) as bound:
                    await client.send_all(rest[:TAKEN_BYTES_MIN])
                if bound.cancelled_caught:
                    client.cut()
                    await trio.sleep_forever()
                rest = rest[TAKEN_BYTES_MIN:]

    @contextlib.contextmanager
    def _noted(self, client: Client, party: str) -> Generator[None]:
        """Count a client while it reads an answer; cut the oldest client where there are too many."""
        mine = self._by_party.setdefault(party, {})
        if len(mine) >= self._of_one_max:
            self._cut_first(mine)
        elif len(self._parties) >= self._all_max:
            self._cut_first(self._parties)
        self._by_party.setdefault(party, mine)[client] = None
        self._parties[client] = party
        try:
            yield
        finally:
            self._forget(client)

    def _cut_first(self, clients: dict[Client, str] | dict[Client, None]) -> None:
        oldest = next(iter(clients))
        self._forget(oldest)
        oldest.cut()

    def _forget(self, client: Client) -> None:
        """Count a client no more; harmless for a client that is not counted."""
        party = self._parties.pop(client, None)
        if party is not None:
            del self._by_party[party][client]
            if not self._by_party[party]:
                del self._by_party[party]


class WholeAnswer:
    """Accepts an answer from a relay, and keeps it for its client until it is whole: then the relay's place is free.

    A longer answer than WHOLE_BYTES_MAX goes to the client as fast as it reads.
    """

    __slots__ = ("_client", "_kept", "_party", "_unread", "_unread_s")

    def __init__(self, client: Client, unread: UnreadAnswers, party: str, unread_s: float) -> None:
        self._client = client
        self._unread = unread
        self._party = party
        self._unread_s = unread_s
        self._kept: bytearray | None = bytearray()
        """None: the answer is longer, and goes on to the client."""

    def __repr__(self) -> str:
        return f"<WholeAnswer for {self._client.peer}>"

    @property
    def sock(self) -> "WholeAnswer":
        """The object to which a relay sends."""
        return self

    @property
    def peer(self) -> str:
        """The client's address."""
        return self._client.peer

    def send(self, data: bytes | memoryview, /) -> int:
        """Keep or send some bytes, and return how many. Raises OSError as a socket does, or where no more are kept."""
        if self._kept is None:
            return self._client.sock.send(data)
        if len(self._kept) + len(data) > WHOLE_BYTES_MAX:
            raise BlockingIOError  # the relay pauses its upstream, and calls `send_all`
        self._kept += data
        return len(data)

    def send_some(self, data: bytes | memoryview, /) -> int:
        """Keep or send some bytes, and return how many: as many as fit."""
        try:
            return self.send(data)
        except OSError as error:
            return self.not_sent(error)

    def not_sent(self, error: OSError, /) -> int:
        """Return how much was sent: 0."""
        return self._client.not_sent(error)

    async def send_all(self, data: bytes, /) -> None:
        """Send the kept bytes, and these, to the client, which gets the rest of the answer as fast as it reads."""
        await self._send_kept()
        await self._unread.send(self._client, self._party, data, self._unread_s)

    def response_is_whole(self) -> None:
        """Called when the relay has the whole answer; the client has it after `finish`."""

    async def finish(self) -> None:
        """Send the kept bytes to the client, now that the relay has ended."""
        await self._send_kept()
        self._client.response_is_whole()

    async def _send_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            await self._unread.send(self._client, self._party, memoryview(kept), self._unread_s)
