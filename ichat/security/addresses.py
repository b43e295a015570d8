"""Where a request is sent from: its network addresses, and the other things that it shows of its sender."""

import functools
import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ichat import errors
from ichat.http.heads import RequestHead

FORWARDED = frozenset((
    b"forwarded", b"x-forwarded-for", b"x-real-ip", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port",
    b"x-forwarded-server", b"x-original-forwarded-for", b"via", b"x-client-ip", b"x-cluster-client-ip",
    b"true-client-ip", b"cf-connecting-ip", b"fastly-client-ip", b"x-envoy-external-address",
))  # fmt: skip
"""Headers in which proxies name their clients, or themselves."""
CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Headers in which a key is sent."""
_BESIDE_KEY = CREDENTIALS - {b"authorization"} | FORWARDED
"""Without these headers, a client's key and address are everything that is known of it."""
SELDOM = _BESIDE_KEY | {b"origin", b"sec-fetch-site"}
"""Without these headers, the key, the `Host` and the address are everything that is known of a sender."""
_JUDGED = SELDOM | {b"authorization", b"host"}
_ADDRESSES_MAX = 4096

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Sender(NamedTuple):
    """The facts by which `Auth` knows the sender of a request, without its connection: another process may have that.

    They are a string, bytes, and tuples of them.
    """

    address: str
    """At the other end of the connection; "" over a unix socket."""
    authorization: bytes = b""
    host: bytes = b""
    version: bytes = b"1.1"
    """Of HTTP."""
    judged: tuple[tuple[bytes, bytes], ...] = ()
    """All headers with facts about it, in their order, unless those are a single `Authorization` and `Host`."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers that say something of it, in their order; an empty value says nothing."""
        return self.judged or ((b"authorization", self.authorization), (b"host", self.host))

    @property
    def has_key_alone(self) -> bool:
        """Whether its address and its `Authorization` say everything, if that is a client's key."""
        names = [name for name, _ in self.judged]
        return names.count(b"authorization") < 2 and _BESIDE_KEY.isdisjoint(names)


def sender_of(head: RequestHead, peer: str) -> Sender:
    """Return the facts about the sender of a request with this head, over a connection from `peer`."""
    names, headers, judged = head.by_name, head.headers, ()
    if not SELDOM.isdisjoint(names) or len(names) < len(headers):
        judged = tuple([header for header in headers if header[0] in _JUDGED])
    return Sender(address_in(peer), names.get(b"authorization", b""), names.get(b"host", b""), head.version, judged)


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


def address_behind(forwarded: Sequence[bytes], proxies: Networks) -> str:
    """Return the last address that is no trusted proxy's, of those that proxies have added in turn."""
    for given in reversed(b",".join(forwarded).decode("latin-1").split(",")):
        word = given.strip()
        if word.startswith("["):
            word = word[1:].partition("]")[0]
        elif word.count(":") == 1:  # some add the port
            word = word.partition(":")[0]
        address = normalized(word)
        if not is_address(address) or "%" in address:
            break
        if address not in proxies:
            return address
    return "invalid"


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
