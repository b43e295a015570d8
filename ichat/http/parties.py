"""The bounds of connections, in all and by party: a machine may have any number of IPv6 addresses of a /64."""

import functools
import ipaddress
from collections.abc import Callable

import attrs

from ichat import errors
from ichat.config.schema import Limits
from ichat.errors import ApiError
from ichat.listeners import Listeners

_PARTIES_MAX = 4096


def party_of(address: str) -> str:
    """Return the party that has an address: the /64 of an IPv6 address; any other text stands for itself."""
    return _network_of(address) if ":" in address else address


@functools.lru_cache(maxsize=_PARTIES_MAX)
def _network_of(address: str) -> str:
    try:
        found = ipaddress.IPv6Address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


def _party_in(peer: str) -> str:
    """Return the party in ``address:port``; "" for a unix socket."""
    return party_of(peer.rpartition(":")[0])


@attrs.define(eq=False)
class ConnectionCounts:
    """How many connections a port has, with those in a handshake."""

    total: int = 0
    _by_party: dict[str, int] = attrs.field(factory=dict[str, int])
    _one_ended: Listeners[[]] = attrs.field(factory=Listeners[[]])

    def refusal(self, peer: str, limits: Limits, is_proxy: Callable[[str], bool]) -> ApiError | None:
        """Return the error for another connection of this peer beyond the limits; None within them."""
        if self.total >= limits.connections_max:
            return errors.too_many_connections()
        party = _party_in(peer)
        if self._by_party.get(party, 0) >= limits.connections_per_address_max and not is_proxy(peer):
            return errors.too_many_connections_of(party or peer, limits.connections_per_address_max)
        return None

    def begin(self, peer: str) -> None:
        """Count a connection."""
        party = _party_in(peer)
        self.total += 1
        self._by_party[party] = self._by_party.get(party, 0) + 1

    def end(self, peer: str) -> None:
        """Count a connection no more."""
        party = _party_in(peer)
        self.total -= 1
        self._by_party[party] -= 1
        if not self._by_party[party]:
            del self._by_party[party]
        self._one_ended()

    async def wait_for_end(self) -> None:
        """Wait until some connection has ended from now on."""
        await self._one_ended.wait()

    async def wait_until_none(self) -> None:
        """Wait until every connection has ended."""
        while self.total:
            await self.wait_for_end()
