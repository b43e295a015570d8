"""Names of hosts that workers give for themselves, looked up so that no sender's names delay other senders.

A lookup occupies a thread until the resolver answers, perhaps much later than the caller waits. So lookups have threads
of their own, and each sender has a share of these and of all lookups. An address that was found is known for a minute,
and longer while it cannot be looked up again.
"""

import socket
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import cast

import attrs
import trio

from ichat import errors
from ichat.http.parties import party_of
from ichat.listeners import Listeners
from ichat.security.addresses import is_address, normalized

HOST_CHECK_S = 60.0
"""How long an address is known: a name is looked up no more often."""
FAILURE_S = 5.0
"""How long a name has no address that was not found."""
RESOLVE_S = 5.0
THREADS = 16
THREADS_OF_SENDER = 2
LOOKUPS_A_MINUTE = 30
"""Of a single sender, at once or in turn."""
NAMES_OF_SENDER_MAX = 64
"""At most this many names of a sender are known."""
SENDERS_MAX = 1024


@attrs.define
class _Name:
    """The facts about a name that a sender gives."""

    addresses: Sequence[str] = ()
    until: float = float("-inf")
    """When it is looked up again."""
    is_pending: bool = False
    """Whether a lookup is under way."""
    looked_up: Listeners[[]] = attrs.field(factory=Listeners[[]])
    """Called when a lookup has ended."""


class _Sender:
    """A sender's names, and its share of the threads and lookups. It is the limiter of its own threads."""

    def __init__(self, threads: trio.CapacityLimiter, now: float) -> None:
        self.names: OrderedDict[str, _Name] = OrderedDict()
        self._threads = threads
        self._own = trio.CapacityLimiter(THREADS_OF_SENDER)
        self._left = float(LOOKUPS_A_MINUTE)
        self._counted_at = now

    def __repr__(self) -> str:
        return f"<_Sender {len(self.names)} names, {self._own.borrowed_tokens} threads>"

    def name(self, host: str) -> _Name:
        """Return the entry of a name and make it the newest; the oldest is forgotten if there are many."""
        found = self.names.setdefault(host, _Name())
        self.names.move_to_end(host)
        while len(self.names) > NAMES_OF_SENDER_MAX:
            self.names.popitem(last=False)
        return found

    @property
    def is_idle(self) -> bool:
        """Whether none of its lookups is under way."""
        return not self._own.borrowed_tokens

    def may_look_up(self, now: float) -> bool:
        """Return whether it may look something up; then that counts."""
        rise = (now - self._counted_at) * LOOKUPS_A_MINUTE / 60
        self._left, self._counted_at = min(self._left + rise, float(LOOKUPS_A_MINUTE)), now
        may = self._left >= 1
        self._left -= may
        return may

    async def acquire_on_behalf_of(self, borrower: Hashable) -> None:
        """Wait for a thread; see `trio.to_thread.run_sync`, which gives it back when the resolver has answered."""
        await self._own.acquire_on_behalf_of(borrower)
        has_both = False
        try:
            await self._threads.acquire_on_behalf_of(borrower)
            has_both = True
        finally:
            if not has_both:
                self._own.release_on_behalf_of(borrower)

    def release_on_behalf_of(self, borrower: Hashable) -> None:
        """Release a thread."""
        self._threads.release_on_behalf_of(borrower)
        self._own.release_on_behalf_of(borrower)


class HostLookups:
    """Looks names up for senders of heartbeats."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(THREADS)
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def __repr__(self) -> str:
        return f"<HostLookups of {len(self._senders)} senders, {self._threads.borrowed_tokens} threads>"

    async def addresses_of(self, host: str, address: str) -> Sequence[str]:
        """Return the addresses of a host that a sender at `address` names; none if there are none within RESOLVE_S.

        Raises ApiError 429 where the sender names too many.
        """
        if is_address(host):
            return [normalized(host)]
        sender = self._sender(party_of(address))
        name = sender.name(host)
        with trio.move_on_after(RESOLVE_S):
            while name.is_pending:
                await name.looked_up.wait()
        if trio.current_time() < name.until or name.is_pending:
            return name.addresses
        if not sender.may_look_up(trio.current_time()):
            if name.addresses:
                return name.addresses
            sentence = (
                f"Workers that join from {address} name too many hosts: give them --advertise-host with an address."
            )
            raise errors.rate_limited(sentence, f"{LOOKUPS_A_MINUTE} lookups a minute", 5)
        name.is_pending = True
        try:
            found = await resolve(host, sender)
        finally:
            name.is_pending = False
            name.looked_up()
        name.addresses = found or name.addresses
        name.until = trio.current_time() + (HOST_CHECK_S if name.addresses else FAILURE_S)
        return name.addresses

    def _sender(self, party: str) -> _Sender:
        sender = self._senders.get(party)
        if sender is None:
            if len(self._senders) >= SENDERS_MAX:
                idle = next((one for one, known in self._senders.items() if known.is_idle), next(iter(self._senders)))
                del self._senders[idle]
            sender = self._senders[party] = _Sender(self._threads, trio.current_time())
        self._senders.move_to_end(party)
        return sender


async def resolve(host: str, limiter: _Sender) -> Sequence[str]:
    """Return the addresses of a host name; none if there are none within RESOLVE_S."""

    def look_up() -> list[str]:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return [normalized(str(address[0])) for _, _, _, _, address in answers]

    with trio.move_on_after(RESOLVE_S):
        return await trio.to_thread.run_sync(
            look_up, abandon_on_cancel=True, limiter=cast("trio.CapacityLimiter", limiter)
        )
    return []
