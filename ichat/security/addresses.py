"""Network addresses: of a connection, of a proxy's client, of a worker; and whether they are this machine's."""

import functools
import ipaddress
from collections.abc import Iterable, Sequence

from ichat import errors

FORWARDED = frozenset((
    b"forwarded", b"x-forwarded-for", b"x-real-ip", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port",
    b"x-forwarded-server", b"x-original-forwarded-for", b"via", b"x-client-ip", b"x-cluster-client-ip",
    b"true-client-ip", b"cf-connecting-ip", b"fastly-client-ip", b"x-envoy-external-address",
))  # fmt: skip
"""Headers in which proxies name their clients, or themselves."""
_ADDRESSES_MAX = 4096

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def address_in(peer: str) -> str:
    """Return the address in ``address:port``, without a zone, and IPv4 as such; "" of a unix socket."""
    return _address(peer.rpartition(":")[0])


@functools.lru_cache(maxsize=_ADDRESSES_MAX)
def _address(host: str) -> str:
    return normalized(host.strip("[]").partition("%")[0]) if host else ""


@functools.lru_cache(maxsize=_ADDRESSES_MAX)
def is_loopback(address: str) -> bool:
    """Return whether an address, as `address_in` returns it, is this machine's own; a unix socket is."""
    try:
        return not address or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def normalized(text: str) -> str:
    """Return an address in its usual form; other texts as they are."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Networks:
    """Some networks, and which addresses are in them; answers are remembered."""

    def __init__(self, networks: Iterable[str]) -> None:
        self.all: Sequence[Network] = [ipaddress.ip_network(network, strict=False) for network in networks]
        self._known: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"<Networks {', '.join(map(str, self.all))}>"

    def __contains__(self, address: str) -> bool:
        if not self.all:
            return False
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= _ADDRESSES_MAX:
                self._known.clear()
            known = self._known[address] = self._look(address)
        return known

    def _look(self, text: str) -> bool:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        having = [network for network in self.all if address in network]
        if address.is_link_local:  # where clouds keep their secrets: only if configured
            having = [network for network in having if network.is_link_local]
        return bool(having) and not (address.is_unspecified or address.is_multicast)


def worker_address(host: str, found: Sequence[str], networks: Networks, sender: str, *, is_relayed: bool) -> str:
    """Return the address of a worker at `host`, of its addresses `found`, for a heartbeat that `sender` sent.

    It must be the sender's, or in `networks`: otherwise a client that may join could have the gateway send requests
    to addresses that only the gateway can reach. `is_relayed`: a proxy sent the heartbeat. Raises ApiError 403.
    """
    for address in found:
        is_same = address == sender or (is_loopback(address) and is_loopback(sender))
        if address in networks or (is_same and not is_relayed):
            return address
    known = f"{host} ({', '.join(found) or 'no address'})" if [host] != found else host
    if is_relayed:
        raise errors.forbidden(
            f"A worker at {known} is not accepted: its heartbeat arrived through a proxy at {sender}. Name"
            " that in security.trusted_proxies, or the worker's network in security.worker_networks."
        )
    raise errors.forbidden(
        f"A worker at {known} is not accepted: its heartbeat arrived from {sender}, and its address is not in"
        " security.worker_networks. Give the worker --advertise-host, or the gateway that network."
    )
