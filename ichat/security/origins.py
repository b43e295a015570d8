"""Which `Host` and which page in a browser a request without a key may have.

A browser sends requests for any page that it shows. Such a page may be of another port of this machine, or have a
name that was made to point here after it was loaded (DNS rebinding). It says so in `Host`, `Origin` (RFC 6454)
and `Sec-Fetch-Site` (Fetch Metadata), which no script can write. Programs that are no browsers send a `Host` alone.
"""

import functools
import logging
import re
import socket
from collections.abc import Iterable, Sequence

import attrs

from ichat.config.schema import ServerSettings
from ichat.security.addresses import FORWARDED, is_address, is_loopback

_HOST = re.compile(rb"(?:\[([0-9a-fA-F:.]{2,45})\]|([^:\[\]/@\s]{1,253}))(?::\d{1,5})?")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HOSTS_MAX = 4096
TOLD_MAX = 20
"""How many names are logged that requests were refused for; a client can invent any number of names."""

log = logging.getLogger(__name__)


@attrs.frozen
class Page:
    """The claims of a request about the page that sent it."""

    objection: str = ""
    """Why it may ask for nothing without a key, as a sentence; empty: it may."""
    is_listed: bool = False
    """Whether it is of an origin that the configuration lists: it may use models, and nothing else."""


class Site:
    """The names and origins of a server."""

    def __init__(
        self, hosts: Sequence[str] = (), origins: Sequence[str] = (), *, host: str = "", tls: bool = False
    ) -> None:
        """`hosts` and `origins` are as the configuration has them; `host` is where the server listens."""
        self._names = own_names() | {name.lower() for name in hosts if not name.startswith("*")} | {host.lower()}
        self._suffixes = tuple(name[1:].lower() for name in hosts if name.startswith("*."))
        self._has_any = "*" in hosts
        self._origins = frozenset(origin.encode() for origin in origins)
        self._scheme = b"https://" if tls else b"http://"
        self._told = 0
        self._knows = functools.lru_cache(_HOSTS_MAX)(self._look)

    @property
    def names(self) -> list[str]:
        """The names that requests without a key may have as their `Host`, beside addresses; `*` for all."""
        return ["*"] if self._has_any else sorted({*filter(None, self._names), *(f"*{one}" for one in self._suffixes)})

    def __repr__(self) -> str:
        return f"<Site {', '.join(sorted(self._names))}>"

    def page(self, version: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Page:
        """Return the claims of a request of this version of HTTP about the page that sent it, if a page did."""
        host = b""
        is_proxied = is_strange = False
        origins: list[bytes] = []
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origins.append(value)
            elif name == b"sec-fetch-site":
                is_strange = is_strange or value not in (b"same-origin", b"none")
            elif name in FORWARDED:
                is_proxied = True
        if (host or version != b"1.0") and not self._knows(host):
            return Page(
                f"{_shown(host)} is not one of this gateway's names: add it to server_settings.hosts, or give clients"
                " keys (security.keys)."
            )
        listed = bool(origins) and (b"*" in self._origins or self._origins.issuperset(origins))
        schemes = (b"http://", b"https://") if is_proxied else (self._scheme,)
        is_own = all(origin in [scheme + host for scheme in schemes] for origin in origins)
        if listed and not is_own:
            return Page(is_listed=True)
        if is_strange or not is_own:
            whose = _shown(origins[0]) if origins else "another origin"
            return Page(
                f"A page of {whose} may not ask here without a key: add its origin to server_settings.cors_origins, if"
                " it is to use the models, or give clients keys (security.keys)."
            )
        return Page()

    def has_name(self, host: bytes) -> bool:
        """Return whether a `Host` is an address, which no name can be made to point away from, or a known name."""
        name, suffixes = name_of(host), (".localhost", *self._suffixes)
        return bool(name) and (is_address(name) or name in self._names or name.endswith(suffixes))

    def url_of(self, host: bytes) -> str:
        """Return the address of this server by the `Host` of a request; "" for a `Host` that it does not know."""
        return f"{self._scheme.decode()}{host.decode('latin-1')}" if self.has_name(host) else ""

    def _look(self, host: bytes) -> bool:
        """Return whether a `Host` is one of those by which this server is asked; log any other `Host`."""
        if self._has_any or self.has_name(host):
            return True
        if self._told < TOLD_MAX:
            self._told += 1
            log.warning("a request without a key asked for %s, which server_settings.hosts does not name", _shown(host))
        return False


def site_of(settings: ServerSettings) -> Site:
    """Return the names and origins of a gateway with these settings."""
    tls = settings.tls_certificate is not None
    return Site(settings.hosts, settings.cors_origins, host=settings.host, tls=tls)


@functools.cache
def own_names() -> frozenset[str]:
    """Return the names by which this machine is known, as far as it knows itself."""
    name = socket.gethostname().lower().rstrip(".")
    short = name.partition(".")[0]
    return frozenset(filter(None, ("localhost", name, short, f"{short}.local")))


def name_of(host: bytes) -> str:
    """Return the name or address in a `Host`, in lower case; "" if it is neither."""
    match = _HOST.fullmatch(host)
    name = (match[1] or match[2]).decode("latin-1").lower().removesuffix(".") if match else ""
    return name if _NAME.fullmatch(name) or is_address(name) else ""


@functools.lru_cache(_HOSTS_MAX)
def means_this_machine(host: bytes) -> bool:
    """Return whether a `Host` is a loopback address, or a name that means this machine only."""
    name = name_of(host)
    return name in own_names() or name.endswith(".localhost") or (is_address(name) and is_loopback(name))


def is_from_here(headers: Sequence[tuple[bytes, bytes]], address: str, page: Page) -> bool:
    """Return whether a request was sent from this machine, to it, through no visible proxy, and from no other's page.

    These are its headers, or those that name its `Host` and its proxies. A proxy that adds nothing looks like a program
    of this machine: such a caller may read, not more.
    """
    return (
        is_loopback(address)
        and not (page.objection or page.is_listed)
        and FORWARDED.isdisjoint(name for name, _ in headers)
        and means_this_machine(next((value for name, value in headers if name == b"host"), b""))
    )


def _shown(text: bytes) -> str:
    """Return a text of a request, as far as a sentence can hold it."""
    return re.sub(r"[^!-~]", "?", text[:100].decode("latin-1")) or "A request without a `Host`"
