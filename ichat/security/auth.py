"""Authentication and authorisation. Purely synchronous.

Three kinds of keys, each for a single plane: a client's for the data plane, the operator's for the control plane, the
workers' token for their heartbeats and reports. All are sent as ``Authorization: Bearer``, ``x-api-key`` or
``api-key``. If the operator's key or the token is not configured, the secret of the gateway's own user replaces it. A
connection from this machine proves nothing, since any program, page and proxy of it can connect. Where clients need no
key, the `Host` and the page that asks must be right (`origins.py`).
"""

import heapq
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import attrs

from ichat import errors
from ichat.config.schema import Security
from ichat.errors import EXIT_USAGE, Exit
from ichat.http.heads import RequestHead
from ichat.http.parties import party_of
from ichat.security.addresses import (
    CREDENTIALS,
    FORWARDED,
    SELDOM,
    Networks,
    Sender,
    address_behind,
    address_in,
    is_loopback,
    sender_of,
    worker_address,
)
from ichat.security.keys import bearer_of, digest_in, digest_of, key_in, proof_of
from ichat.security.origins import Page, Site, is_from_here
from ichat.security.rules import Rule
from ichat.security.worker_keys import KnowsWorkerKeys, WorkerKey
from ichat.texts import NAMED_MAX, some_of

Kind = Literal["anonymous", "invalid", "data", "admin", "worker", "own"]
"""The kind of the sent key: none, an unknown key, a client's, the operator's, the workers', the gateway's secret."""

CALLERS_MAX = 4096
"""Callers that are remembered."""
SIGN_BYTES_MAX = 512
"""Of an `Authorization` and a `Host` that are remembered though no client needs a key."""
CHANGES_MODELS = frozenset((
    b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/load_lora_adapter", b"/unload_lora_adapter",
))  # fmt: skip
"""Routes of the engines that load and unload models: they are the operators'."""
_OF_OWN_USER = "the secret of the gateway's own user"
_KINDS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}


@attrs.frozen(eq=False)
class ClientKey:
    """A client's key, as it is known here."""

    name: str
    models: frozenset[str] | None
    """The models it may ask for; None: every model."""
    metrics: bool = False
    """Whether it may read /metrics."""
    engine_control: bool = False
    """Whether workers get what steers their engines (`engine_control.py`)."""


@attrs.frozen(eq=False)
class Caller:
    """The sender of a request; many requests may share it."""

    kind: Kind
    address: str
    """The client's, as far as proxies that are trusted say; "" over a unix socket."""
    is_local: bool
    """Whether it is sent from this machine, by no proxy that shows, and from no page but the gateway's own.

    Never where clients have keys: then a proxy that says nothing of its clients must not let each of them read.
    """
    key: ClientKey | None = None
    is_relayed: bool = False
    """Whether a proxy sent it that is not trusted to name its client, so that the address is the proxy's."""
    is_managed_worker: bool = False
    """Whether it is a worker that this gateway has started, over the control plane's own socket."""
    page: Page = attrs.field(factory=Page)
    """The page that sent it, if a page did, as far as it has no key that is known."""
    worker: WorkerKey | None = None
    """The worker with the key that it has sent; None: it has sent no key of a single worker."""

    key_name: str = attrs.field(init=False)
    """The name of the client's key; empty: it has none, or needs none."""
    fairness_key: str = attrs.field(init=False)
    """The owner of the queue share that the request uses: its key, or its address (`http/parties.py`)."""

    def __attrs_post_init__(self) -> None:
        name = self.key.name if self.key is not None else ""
        object.__setattr__(self, "key_name", name)
        object.__setattr__(self, "fairness_key", name or party_of(self.address))


def encode_caller(caller: Caller) -> bytes:
    """Return the facts that the control plane needs about a caller, for CALLER_HEADER.

    A worker's own key is valid for none of its routes: the front door answers those of workers.
    """
    kind = "invalid" if caller.worker is not None else caller.kind
    where = "here" if caller.is_local else "relayed" if caller.is_relayed else "elsewhere"
    page = "listed" if caller.page.is_listed else "any"
    return f"{kind} {where} {caller.key_name} {caller.address} {page} {caller.page.objection or '-'}".encode()


class Auth:
    """The keys, networks and rules of the configuration in force: a single object for the gateway's life."""

    worker_keys: KnowsWorkerKeys | None = None
    """Knows the keys of single workers; a configuration does not change them."""

    def __init__(
        self,
        security: Security,
        made: Mapping[bytes, ClientKey] | None = None,
        *,
        needs_keys: bool = False,
        secret: str = "",
        site: Site | None = None,
    ) -> None:
        """Read keys from the environment. Raises Exit 64 if a key is missing.

        `made` are clients' keys that are not in the configuration, by their digests. With `needs_keys` clients need a
        key also where none of them is left. `secret` is the gateway's own (`config/own_secret.py`), "" for none.
        """
        self.site = site or Site()
        self.secret = secret
        self._secret = digest_of(secret.encode()) if secret else None
        self.proxies = Networks(security.trusted_proxies)
        self.worker_networks = Networks(security.worker_networks)
        self._open_metrics = security.open_metrics
        self._admin = digest_in(security.admin_key_hash, security.admin_key_env, "security.admin_key_env")
        token = security.join_token_env
        self.token = key_in(token, "security.join_token_env").encode() if token is not None else b""
        """The token that workers send when they join; empty: there is none."""
        self.proof = proof_of(self.token) if self.token else b""
        """Shows them that a request is sent by their gateway, without the token."""
        self._token = digest_of(self.token) if self.token else None
        self._keys: dict[bytes, ClientKey] = {}
        for index, key in enumerate(security.keys):
            digest = digest_in(key.key_hash, key.key_env, f"security.keys[{index}].key_env")
            assert digest is not None, "the configuration was not checked"
            models = None if key.models is None else frozenset(key.models)
            self._keys[digest] = ClientKey(key.name, models, key.metrics, key.engine_control)
        known = [digest for digest in (*self._keys, *(made or ()), self._admin, self._token) if digest is not None]
        given = len(security.keys) + len(made or ()) + (self._admin is not None) + (self._token is not None)
        if len(set(known)) < given:
            raise Exit(EXIT_USAGE, "security: the same key is given for two things; each has its own.")
        self._keys |= made or {}
        self._by_name = {key.name: key for key in self._keys.values()}
        self.has_keys = needs_keys or bool(self._keys)
        """Whether clients need a key."""
        self._callers: dict[tuple[bytes, bytes, str], Caller] = {}
        """Cache of plain callers, by their `Authorization` and address, and by `Host` if no client needs a key.

        Python's hash of them is keyed by a secret of this process, so the time of a look-up shows nothing about keys.
        """

    def __repr__(self) -> str:
        return f"<Auth {len(self._keys)} keys>"

    def replace(self, other: "Auth") -> None:
        """Go on with the keys, networks and rules of another object, made from another configuration."""
        self.__dict__.update(other.__dict__)

    def is_proxy(self, peer: str) -> bool:
        """Return whether a connection from `peer` is from a proxy that is trusted to name its clients."""
        return address_in(peer) in self.proxies

    def use_worker_keys(self, keys: KnowsWorkerKeys) -> None:
        """Know the keys of single workers from now on."""
        self.worker_keys = keys

    @property
    def has_admin_key(self) -> bool:
        """Whether operators need a key."""
        return self._admin is not None

    def is_operator(self, caller: Caller) -> bool:
        """Return whether a caller has the operator's key, or, while none is configured, the gateway's secret."""
        return caller.kind == "admin" or (caller.kind == "own" and self._admin is None)

    @property
    def is_bare(self) -> bool:
        """Whether no key of any kind is configured."""
        return not self.has_keys and self._admin is None and self._token is None

    def caller(self, head: RequestHead, peer: str) -> Caller:
        """Return the sender of a request with this head over a connection from `peer`: quickly, if it is known."""
        names = head.by_name
        if SELDOM.isdisjoint(names) and len(names) == len(head.headers) and head.version == b"1.1":
            host = b"" if self.has_keys else names.get(b"host", b"")
            known = self._callers.get((names.get(b"authorization", b""), host, address_in(peer)))
            if known is not None:
                return known
        return self.caller_by(sender_of(head, peer))

    def caller_by(self, sender: Sender) -> Caller:
        """Return the sender of a request by these facts about it; another process may have sent them."""
        address, authorization, host, version, judged = sender
        if self.has_keys:
            host, is_plain = b"", not judged or sender.has_key_alone
        else:  # local callers may do more, and the `Host` shows whether a page sends it
            is_plain = not judged and version == b"1.1"
        if not is_plain:
            return self._identify(sender)
        sign = authorization, host, address
        caller = self._callers.get(sign)
        if caller is None:
            caller = self._identify(sender)
            if self._may_remember(caller, len(authorization) + len(host)):
                if len(self._callers) >= CALLERS_MAX:
                    self._callers.clear()
                self._callers[sign] = caller
        return caller

    def _may_remember(self, caller: Caller, size: int) -> bool:
        """Return whether a caller with a sign of `size` bytes is remembered: clients, but no holders of other keys."""
        if self.has_keys:
            return caller.kind == "data"
        return caller.kind in ("anonymous", "invalid") and size <= SIGN_BYTES_MAX

    def _identify(self, sender: Sender) -> Caller:
        """Return the sender of a request by everything that it shows."""
        address, version, headers = sender.address, sender.version, sender.headers
        credentials: list[bytes] = []
        forwarded: list[bytes] = []
        is_forwarded = is_relayed = False
        for name, value in headers:
            if name in CREDENTIALS:
                credentials.append(bearer_of(value) if name == b"authorization" else value)
            elif name in FORWARDED:
                is_forwarded = True
                if name == b"x-forwarded-for":
                    forwarded.append(value)
        kind, key, worker = self._kind(credentials)
        page = self.site.page(version, headers) if kind in ("anonymous", "invalid") else Page()
        is_here = not self.has_keys and address not in self.proxies and version == b"1.1"
        is_here = is_here and is_from_here(headers, address, page)
        if is_forwarded and address in self.proxies:
            address = address_behind(forwarded, self.proxies)
        elif is_forwarded:
            is_relayed = True
        return Caller(kind, address, is_here, key, is_relayed, page=page, worker=worker)

    def _kind(self, credentials: Sequence[bytes]) -> tuple[Kind, ClientKey | None, WorkerKey | None]:
        """Return the kind and owner of these keys: the first that is known counts."""
        for credential in credentials:
            kind, key = self._owner(credential)
            if kind != "invalid":
                return kind, key, None
        if (worker := self._worker(credentials)) is not None:
            return "worker", None, worker
        return ("invalid" if any(credentials) else "anonymous"), None, None

    def _worker(self, credentials: Sequence[bytes]) -> WorkerKey | None:
        """Return the worker with a key of its own among these: the key is found by its digest, as a client's is."""
        keys = self.worker_keys
        found = [keys.key_of(digest_of(one)) for one in credentials] if keys is not None else []
        return next((one for one in found if one is not None), None)

    def _owner(self, credential: bytes) -> tuple[Kind, ClientKey | None]:
        """Return the kind and owner of a key.

        A client's key is found by its digest, of which an attacker cannot choose a single bit. The digests of the
        others are compared in constant time. So the time of a look-up shows nothing about keys.
        """
        if not (credential and (self._keys or self._admin or self._token or self._secret)):
            return "invalid", None
        digest = digest_of(credential)
        key = self._keys.get(digest)
        if key is not None:
            return "data", key
        if self._admin is not None and hmac.compare_digest(self._admin, digest):
            return "admin", None
        if self._token is not None and hmac.compare_digest(self._token, digest):
            return "worker", None
        if self._secret is not None and hmac.compare_digest(self._secret, digest):
            return "own", None
        return "invalid", None

    def decode_caller(self, text: str | None) -> Caller:
        """Return the caller that `encode_caller` has written.

        A request without the header is a managed worker's: only those know the control plane's own socket.
        """
        if text is None:
            return Caller("worker", "", is_local=False, is_managed_worker=True)
        kind, where, name, address, page, objection = text.split(" ", 5)
        key = self._by_name.get(name)
        known = _KINDS[kind] if key is not None or not name else "invalid"  # it may have been withdrawn just now
        asks_from = Page("" if objection == "-" else objection, is_listed=page == "listed")
        return Caller(known, address, where == "here", key, where == "relayed", page=asks_from)

    def check(self, rule: Rule, caller: Caller) -> None:
        """Raise ApiError if the caller may not pass: 401 if another key would help, else 403."""
        if caller.is_managed_worker and rule != "join":
            raise errors.forbidden("Processes on this socket may only send heartbeats and reports.")
        _CHECKS[rule](self, caller)

    def _check_data(self, caller: Caller) -> None:
        if self.has_keys and caller.kind != "data":
            raise _refusal(caller, "a client's key (security.keys)")
        if caller.page.objection:
            raise errors.forbidden(caller.page.objection)

    def _check_models(self, caller: Caller) -> None:
        if not self.is_operator(caller):
            self._check_data(caller)

    def _check_metrics(self, caller: Caller) -> None:
        if not (self._open_metrics or (caller.key is not None and caller.key.metrics)):
            self._check_read(caller)

    def _check_join(self, caller: Caller) -> None:
        if caller.worker is not None and caller.worker.is_ended:
            raise errors.launch_ended(caller.worker.worker_id, caller.worker.launch)
        if caller.is_managed_worker or caller.kind == "worker":
            return
        if self._token is not None:
            raise _refusal(caller, "the workers' token (ICHAT_JOIN_TOKEN)")
        if caller.kind != "own":
            raise _refusal(
                caller,
                _OF_OWN_USER,
                " A worker that the same user starts on this machine reads it by itself. For all others name a token in"
                " security.join_token_env, which they have in ICHAT_JOIN_TOKEN.",
            )

    def _check_read(self, caller: Caller) -> None:
        """If clients need no key, programs of this machine read without a key; if no key is configured, all do."""
        is_page = bool(caller.page.objection or caller.page.is_listed)
        reads_without = caller.is_local or (self.is_bare and not (is_page or is_loopback(caller.address)))
        if self._admin is not None or not reads_without:
            self._check_write(caller)

    def _check_write(self, caller: Caller) -> None:
        if self.is_operator(caller):
            return
        if self._admin is not None:
            raise _refusal(caller, "the admin key (security.admin_key_env)")
        if caller.page.objection:
            raise errors.forbidden(caller.page.objection)
        raise _refusal(
            caller,
            _OF_OWN_USER,
            " On the gateway's machine `./ichat.pyz` reads it by itself, and `./ichat.pyz console` prints a link with"
            " it. Or configure an admin key (security.admin_key_env or admin_key_hash).",
        )

    def check_model(self, caller: Caller, model: str, name: str) -> None:
        """Raise ApiError 403 if the caller's key is not for this model, or for the `name` of it that counts."""
        allowed = caller.key.models if caller.key is not None else None
        if allowed is not None and model not in allowed and name not in allowed:
            names = some_of(heapq.nsmallest(NAMED_MAX + 1, allowed), "GET /v1/models lists all") or "none"
            key = f"The key `{caller.fairness_key}`"
            raise errors.forbidden(f"{key} is not for the model `{model}`. Its models: {names}.")

    def check_worker(self, host: str, found: Sequence[str], caller: Caller) -> str:
        """Return the address of a worker that says it is at `host`, of its addresses `found`. Raises ApiError 403."""
        return worker_address(host, found, self.worker_networks, caller.address, is_relayed=caller.is_relayed)


_CHECKS: Mapping[Rule, Callable[[Auth, Caller], None]] = {
    "open": lambda _auth, _caller: None,
    "data": Auth._check_data,
    "models": Auth._check_models,
    "metrics": Auth._check_metrics,
    "read": Auth._check_read,
    "write": Auth._check_write,
    "join": Auth._check_join,
    "order": lambda _auth, _caller: None,
}


def _refusal(caller: Caller, wanted: str, more: str = "") -> errors.ApiError:
    if caller.kind in ("anonymous", "own", "invalid"):
        what = "This key is not known" if caller.kind == "invalid" else "No key was sent"
        return errors.invalid_api_key(f"{what}: this route takes {wanted}, as `Authorization: Bearer`.{more}")
    return errors.forbidden(f"This key is for something else: this route takes {wanted}.{more}")
