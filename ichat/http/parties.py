"""The parties of bounds by address: a machine may have any number of IPv6 addresses, but hardly more than a /64."""

import functools
import ipaddress

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
