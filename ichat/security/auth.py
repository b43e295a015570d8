"""Who asks, and what that one may do. Purely synchronous, but for the look at a worker's address.

Three kinds of keys, each for one thing: a client's for the data plane, the operator's for the control plane, the
workers' token for their beats. All come as ``Authorization: Bearer``, or as ``x-api-key`` and ``api-key`` do elsewhere.
Where the operator's key or the token is not configured, "here" takes its place: a connection from this machine itself.
"""

import functools
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import attrs
import trio

from ichat import errors
from ichat.config.schema import Security
from ichat.errors import EXIT_USAGE, Exit
from ichat.http.heads import Headers, RequestHead
from ichat.security.keys import digest_of, key_in, proof_of

Rule = Literal["open", "data", "models", "metrics", "read", "write", "join"]
"""What a route asks for.

`open`: nothing. `data`: a client's key, if there are any. `models`: that, or the operator's. `read`, `write`: the
operator's key, or to be here. `metrics`: the same, unless `security.open_metrics`. `join`: the token, or to be here.
"""
Kind = Literal["nobody", "unknown", "data", "admin", "worker"]
"""Whose key came: none, one that nobody has, a client's, the operator's, the workers'."""

ROUTES: Mapping[tuple[str, str], Rule] = {
    ("GET", "/health"): "open",
    ("GET", "/openapi.json"): "open",
    ("GET", "/metrics"): "metrics",
    ("GET", "/v1/models"): "models",
    ("GET", "/v1/models/<path:name>"): "models",
    ("POST", "/v1/workers/heartbeat"): "join",
    ("POST", "/register"): "join",
    ("GET", "/v1/logs/stream/<worker_id>"): "read",
    ("GET", "/v1/admin/workers"): "read",
    ("GET", "/v1/admin/workers/<worker_id>"): "read",
    ("POST", "/v1/admin/workers/launch"): "write",
    ("DELETE", "/v1/admin/workers/<worker_id>"): "write",
    ("GET", "/v1/admin/cluster/status"): "read",
    ("GET", "/v1/admin/cluster/version"): "read",
    ("POST", "/v1/admin/config/reload"): "write",
}
"""The control plane's routes; what is not in here is refused to everybody."""

CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Headers in which a key comes."""
FORWARDED = frozenset((
    b"forwarded", b"x-forwarded-for", b"x-real-ip", b"x-forwarded-host", b"x-forwarded-proto", b"via",
))  # fmt: skip
"""Headers in which proxies say for whom they ask."""
CHANGES_MODELS = frozenset((
    b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/load_lora_adapter", b"/unload_lora_adapter",
))  # fmt: skip
"""Routes of the engines that load and unload models: they are the operators'."""
RESOLVE_S = 5.0
_ADDRESSES_MAX = 4096
_OWN_NAMES = frozenset(("localhost", socket.gethostname().lower()))
_KINDS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}
_HOST = re.compile(rb"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]]+)(?::\d+)?")
_ORIGIN = re.compile(rb"https?://(.+)")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@attrs.frozen(eq=False)
class ClientKey:
    """A client's key, as it is known here."""

    name: str
    models: frozenset[str] | None
    """What it may ask for; None: every model."""
    metrics: bool = False
    """Whether it may read /metrics."""
    engine_control: bool = False
    """Whether workers get what steers their engines (`engine_control.py`)."""


@attrs.define(eq=False)
class Caller:
    """Who sent a request."""

    kind: Kind
    address: str
    """The client's, as far as proxies that are trusted say; "" over a unix socket."""
    is_local: bool
    """Whether it comes from this machine, by no proxy, and not from a page in a browser.

    Never where clients have keys: then a proxy that says nothing of its clients must not make each of them an operator.
    """
    key: ClientKey | None = None
    is_relayed: bool = False
    """Whether a proxy sent it that is not trusted to say for whom, so that the address is the proxy's."""
    is_managed_worker: bool = False
    """Whether it is a worker that this gateway has started, over the control plane's own socket."""

    @property
    def key_name(self) -> str:
        """The name of the client's key; empty: it has none, or needs none."""
        return self.key.name if self.key is not None else ""

    @property
    def fairness_key(self) -> str:
        """Whose share of a queue the request takes: its key's, or its address's."""
        return self.key_name or self.address


def bearer_of(value: bytes) -> bytes:
    """Give the key in an `Authorization` (RFC 6750), or the whole of it where it is of another kind."""
    scheme, _, given = value.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else value


def encode_caller(caller: Caller) -> bytes:
    """Write what the control plane has to know of a caller, for CALLER_HEADER."""
    where = "here" if caller.is_local else "relayed" if caller.is_relayed else "elsewhere"
    return f"{caller.kind} {where} {caller.key_name} {caller.address}".encode()


def address_in(peer: str) -> str:
    """Give the address in ``address:port``, without a zone, and IPv4 as such; "" of a unix socket."""
    return _address(peer.rpartition(":")[0])


@functools.lru_cache(maxsize=_ADDRESSES_MAX)
def _address(host: str) -> str:
    return _plain(host.strip("[]").partition("%")[0]) if host else ""


@functools.lru_cache(maxsize=_ADDRESSES_MAX)
def is_loopback(address: str) -> bool:
    """Say whether an address, as `address_in` gives it, is this machine's own; a unix socket is."""
    try:
        return not address or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _plain(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Networks:
    """Some networks, and which addresses are in them; what was asked for once is remembered."""

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
        if address.is_link_local:  # where clouds keep their secrets: only for those who mean it
            having = [network for network in having if network.is_link_local]
        return bool(having) and not (address.is_unspecified or address.is_multicast)


class Auth:
    """What the configuration says of who may do what."""

    def __init__(self, security: Security) -> None:
        """Read keys from the environment. Raises Exit 64 where one is missing."""
        self.proxies = Networks(security.trusted_proxies)
        self.worker_networks = Networks(security.worker_networks)
        self._open_metrics = security.open_metrics
        self._admin = _digest(security.admin_key_hash, security.admin_key_env, "security.admin_key_env")
        token = security.join_token_env
        self.token = key_in(token, "security.join_token_env").encode() if token is not None else b""
        """What workers say when they join; empty: there is none."""
        self.proof = proof_of(self.token) if self.token else b""
        """What shows them that a request comes from their gateway, and tells the token to nobody."""
        self._token = digest_of(self.token) if self.token else None
        self._keys: dict[bytes, ClientKey] = {}
        for index, key in enumerate(security.keys):
            digest = _digest(key.key_hash, key.key_env, f"security.keys[{index}].key_env")
            assert digest is not None, "the configuration was not checked"
            models = None if key.models is None else frozenset(key.models)
            self._keys[digest] = ClientKey(key.name, models, key.metrics, key.engine_control)
        known = [digest for digest in (*self._keys, self._admin, self._token) if digest is not None]
        if len(set(known)) < len(security.keys) + (self._admin is not None) + (self._token is not None):
            raise Exit(EXIT_USAGE, "security: the same key is given for two things; each has its own.")

    def __repr__(self) -> str:
        return f"<Auth {len(self._keys)} keys>"

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    @property
    def has_admin_key(self) -> bool:
        """Whether operators need a key."""
        return self._admin is not None

    @property
    def is_bare(self) -> bool:
        """Whether no key of any kind is configured."""
        return not self._keys and self._admin is None and self._token is None

    def caller(self, head: RequestHead, peer: str) -> Caller:
        """Say who sends a request with this head over a connection from `peer`."""
        credentials: list[bytes] = []
        forwarded: list[bytes] = []
        is_forwarded = is_relayed = False
        for name, value in head.headers:
            if name in CREDENTIALS:
                credentials.append(bearer_of(value) if name == b"authorization" else value)
            elif name in FORWARDED:
                is_forwarded = True
                if name == b"x-forwarded-for":
                    forwarded.append(value)
        address = address_in(peer)
        is_here = is_loopback(address) and not (is_forwarded or self._keys) and address not in self.proxies
        if is_here:
            is_here = head.version == b"1.1" and targets_this_host(head.headers) and comes_from_this_host(head.headers)
        elif is_forwarded and address in self.proxies:
            address = self._behind(forwarded)
        elif is_forwarded:
            is_relayed = True
        kind, key = self._kind(credentials)
        return Caller(kind, address, is_here, key, is_relayed)

    def _kind(self, credentials: Sequence[bytes]) -> tuple[Kind, ClientKey | None]:
        """Say whose keys these are: the first that is known counts."""
        for credential in credentials:
            kind, key = self._owner(credential)
            if kind != "unknown":
                return kind, key
        return ("unknown" if any(credentials) else "nobody"), None

    def _owner(self, credential: bytes) -> tuple[Kind, ClientKey | None]:
        """Say whose key this is.

        A client's is found by its digest, of which nobody can choose a single bit, and the others' digests are compared
        in constant time: how long that takes tells nothing about keys.
        """
        if not (credential and (self._keys or self._admin or self._token)):
            return "unknown", None
        digest = digest_of(credential)
        key = self._keys.get(digest)
        if key is not None:
            return "data", key
        if self._admin is not None and hmac.compare_digest(self._admin, digest):
            return "admin", None
        if self._token is not None and hmac.compare_digest(self._token, digest):
            return "worker", None
        return "unknown", None

    def _behind(self, forwarded: Sequence[bytes]) -> str:
        """Give the last address that no trusted proxy has, of those that proxies have added one after the other."""
        for given in reversed(b",".join(forwarded).decode("latin-1").split(",")):
            word = given.strip()
            if word.startswith("["):
                word = word[1:].partition("]")[0]
            elif word.count(":") == 1:  # some add the port
                word = word.partition(":")[0]
            address = _plain(word)
            if not _is_address(address) or "%" in address:
                break
            if address not in self.proxies:
                return address
        return "unknown"

    def decode_caller(self, text: str | None) -> Caller:
        """Read what `write_caller` wrote.

        Who comes without is a worker that this gateway has started: nobody else finds the control plane's own socket.
        """
        if text is None:
            return Caller("worker", "", is_local=False, is_managed_worker=True)
        kind, where, name, address = text.split(" ", 3)
        key = next((key for key in self._keys.values() if key.name == name), None) if name else None
        return Caller(_KINDS[kind], address, where == "here", key, where == "relayed")

    def check(self, rule: Rule, caller: Caller) -> None:
        """Let the caller pass, or raise ApiError: 401 where a right key would help, 403 where that is none."""
        if rule == "open":
            return
        if rule == "metrics" and (self._open_metrics or (caller.key is not None and caller.key.metrics)):
            return
        if rule in ("data", "models"):
            if self._keys and caller.kind != "data" and not (rule == "models" and caller.kind == "admin"):
                raise _refusal(caller, "a client's key (security.keys)")
        elif rule == "join":
            if caller.is_managed_worker or caller.kind == "worker":
                return
            if self._token is None and not caller.is_local:
                raise errors.forbidden(
                    f"{self._only_here(caller, 'Workers join')}, unless security.join_token_env names a token, which"
                    " the workers have in ICHAT_JOIN_TOKEN."
                )
            if self._token is not None:
                raise _refusal(caller, "the workers' token (ICHAT_JOIN_TOKEN)")
        elif self._admin is not None:
            if caller.kind != "admin":
                raise _refusal(caller, "the admin key (security.admin_key_env)")
        elif not caller.is_local and (rule == "write" or not self.is_bare or is_loopback(caller.address)):
            raise errors.forbidden(
                f"{self._only_here(caller, 'This is allowed')}, unless security.admin_key_env or admin_key_hash gives"
                " an admin key."
            )

    def _only_here(self, caller: Caller, what: str) -> str:
        if self._keys:
            return f"{what} to nobody without a key, where clients have keys"
        return (
            f"{what} only from the gateway's own machine, at 127.0.0.1 or `localhost` and through no proxy (this"
            f" request came from {caller.address or 'a socket'})"
        )

    def lets_steer(self, caller: Caller) -> bool:
        """Return whether workers get from this caller what steers their engines: an operator, or a key for it."""
        if caller.key is not None:
            return caller.key.engine_control
        return caller.kind == "admin" or (caller.is_local and self._admin is None)

    def check_model(self, caller: Caller, model: str) -> None:
        """Raise ApiError 403 where the caller's key is not for this model."""
        allowed = caller.key.models if caller.key is not None else None
        if allowed is not None and model not in allowed:
            names = ", ".join(sorted(allowed)) or "none"
            raise errors.forbidden(
                f"The key `{caller.fairness_key}` is not for the model `{model}`. Its models: {names}."
            )

    async def check_worker(self, host: str, caller: Caller) -> str:
        """Give the address at which a worker is reached that says it is at `host`.

        That must be where its beat came from, or in `security.worker_networks`: otherwise anybody who may join could
        have the gateway send requests to whatever only the gateway can reach. Raises ApiError 403.
        """
        found = [_plain(host)]
        if not _is_address(found[0]):
            found = await _resolve(host)
        for address in found:
            if address in self.worker_networks:
                return address
            is_same = address == caller.address or (is_loopback(address) and is_loopback(caller.address))
            if is_same and not caller.is_relayed:
                return address
        known = f"{host} ({', '.join(found) or 'no address'})" if [host] != found else host
        if caller.is_relayed:
            raise errors.forbidden(
                f"A worker at {known} is not accepted: its beat came through a proxy at {caller.address}. Name that"
                " in security.trusted_proxies, or the worker's network in security.worker_networks."
            )
        raise errors.forbidden(
            f"A worker at {known} is not accepted: its beat came from {caller.address}, and its address is not in"
            " security.worker_networks. Give the worker --advertise-host, or the gateway that network."
        )


async def _resolve(host: str) -> list[str]:
    with trio.move_on_after(RESOLVE_S):
        try:
            answers = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return [_plain(str(address[0])) for _, _, _, _, address in answers]
    return []


def _digest(hash_: str | None, variable: str | None, where: str) -> bytes | None:
    if hash_ is not None:
        return bytes.fromhex(hash_.partition(":")[2])
    return None if variable is None else digest_of(key_in(variable, where).encode())


def _refusal(caller: Caller, wanted: str) -> errors.ApiError:
    if caller.kind in ("nobody", "unknown"):
        what = "No key was sent" if caller.kind == "nobody" else "This key is not known"
        return errors.invalid_api_key(f"{what}: this route takes {wanted}, as `Authorization: Bearer`.")
    return errors.forbidden(f"This key is for something else: this route takes {wanted}.")


@functools.lru_cache(maxsize=_ADDRESSES_MAX)
def _address_of(host: bytes) -> str:
    """Give the address that a `Host` is or means; "" where it is a name, which others could let point here."""
    match = _HOST.fullmatch(host)
    name = (match[1] or match[2]).decode("latin-1").lower().rstrip(".") if match else ""
    if name in _OWN_NAMES or (name.endswith(".localhost") and all(name.split("."))):
        return "127.0.0.1"
    return name if _is_address(name) else ""


def targets_this_host(headers: Headers) -> bool:
    """Say whether a request names this machine as its host, and comes through no proxy that says so."""
    host = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name in FORWARDED:
            return False
    return bool(_address_of(host))


def comes_from_this_host(headers: Headers) -> bool:
    """Say whether the page that sends a request, if it is one, came from this machine."""
    for name, value in headers:
        if name == b"origin":
            match = _ORIGIN.fullmatch(value)
            address = _address_of(match[1]) if match else ""
            if not address or not is_loopback(address):
                return False
    return True
