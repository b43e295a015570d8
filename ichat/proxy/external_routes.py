"""External routes: models that are served elsewhere, and what is changed in requests on the way there."""

import json
import logging
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ichat.config.schema import Config, ExternalRoute
from ichat.errors import EXIT_USAGE, Exit, not_found
from ichat.http.heads import Headers, form_type
from ichat.http.json_body import Body, members_of, rewrite_json
from ichat.http.multipart import fields_of, rewrite_form
from ichat.http.pool import Upstream
from ichat.http.request import Request
from ichat.http.tls import client_context
from ichat.proxy.drop_params import ParamRules
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint
from ichat.security.keys import read_key

log = logging.getLogger(__name__)

_AT_ROOT = re.compile(rb"/(v2/|tokenize|detokenize|pooling|classify)")
"""Paths of engines that stand beside `/v1`, not below it."""
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key", b"openai-organization", b"openai-project"))
"""Headers in which clients send credentials."""
TOLD_MAX = 100
"""Kinds of dropping that are logged, for each route."""
_INFERENCE = re.compile(
    rb"/(v1/)?(chat/completions|completions|embeddings|rerank|score|classify|pooling|responses|messages|tokenize|detokenize"
    rb"|moderations|images/[a-z]+|audio/[a-z]+)|/v2/rerank"
)
"""What a client may have done with the gateway's own key for an upstream: no files, no fine-tuning, no batches."""
_GATED = (b"/chat/completions", b"/completions", b"/embeddings")
"""The routes whose parameters are OpenAI's, so that `drop_params` has a meaning."""


@attrs.define(eq=False)
class Route:
    """What an external route changes in requests."""

    name: str
    rules: ParamRules
    upstream_model: str | None
    prefix: bytes
    """What stands at the upstream where the gateway has `/v1`."""
    has_key: bool
    health_path: str = attrs.field(kw_only=True, default="")
    """The path of its health check; empty if it has none."""
    _headers: Headers = attrs.field(repr=False, alias="headers")
    _left_out: frozenset[bytes] = attrs.field(init=False, repr=False)
    """Headers of the client that its upstream does not get."""
    _told: set[tuple[str, ...]] = attrs.field(factory=set[tuple[str, ...]], repr=False)

    def __attrs_post_init__(self) -> None:
        self._left_out = (_CREDENTIALS if self.has_key else frozenset[bytes]()).union(name for name, _ in self._headers)

    def target_for(self, target: bytes) -> bytes:
        """Return the request target for the upstream."""
        if target.startswith(b"/v1/"):
            return self.prefix + target[3:]
        if _AT_ROOT.match(target):
            return self.prefix.removesuffix(b"/v1") + target
        return self.prefix + target

    def headers_for(self, headers: Headers) -> Headers:
        """Return the headers of a request with the route's own in place of the client's of the same names.

        A client's credentials for the gateway do not go to the upstream; others pass if the route has no key.
        """
        left_out = self._left_out
        return [header for header in headers if header[0] not in left_out] + self._headers

    async def rewrite(self, request: Request, names: Iterable[str]) -> Body:
        """Return the body for the upstream: its own name for the model, without the parameters to drop.

        `names` are of the body's members.

        What need not change stays as it is, byte for byte. Raises ApiError 400 for a parameter that the upstream does
        not support, 404 for a route that the gateway's key there is not for.
        """
        if self.has_key and not _INFERENCE.fullmatch(request.path):
            raise not_found(request.path.decode("latin-1"))
        body = request.body
        content_type = form_type(request.by_name)
        if content_type:
            if self.upstream_model is None:
                return body
            return rewrite_form(body, await fields_of(body, content_type), {"model": self.upstream_model.encode()})
        if self.upstream_model is None and not self.rules.concerns(names):
            return body
        members = await members_of(body)
        changes = self.rules.plan(body, members, gated=request.path.rstrip(b"/").endswith(_GATED))
        self._tell(changes.dropped)
        replace = dict(changes.replace)
        if self.upstream_model is not None:
            replace["model"] = json.dumps(self.upstream_model).encode()
        return rewrite_json(body, members, replace, changes.drop) if replace or changes.drop else body

    def _tell(self, dropped: Iterable[str]) -> None:
        names = tuple(sorted(dropped))
        if names and names not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(names)
            log.info("the external route %s drops %s (said once)", self.name, ", ".join(names))


def read_route(route: ExternalRoute, config: Config, where: str) -> tuple[Route, Upstream]:
    """Return a route and its upstream by the configuration; `where` is its name in messages.

    Raises Exit 64 where the key is not in the environment, or the certificates are not usable.
    """
    headers = [(name.lower().encode(), value.encode()) for name, value in route.headers.items()]
    if route.api_key_env is not None:
        key = read_key(route.api_key_env)
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise Exit(EXIT_USAGE, f"{where}: the environment has no usable key in {route.api_key_env}.")
        headers.append((b"authorization", b"Bearer " + key.encode()))
    has_key = any(name in _CREDENTIALS for name, _ in headers)
    defaults = config.litellm_settings
    rules = ParamRules(
        drop_params=defaults.drop_params if route.drop_params is None else route.drop_params,
        additional_drop_params=[*defaults.additional_drop_params, *route.additional_drop_params],
        allowed_openai_params=[*defaults.allowed_openai_params, *route.allowed_openai_params],
        supported_openai_params=route.supported_openai_params,
    )
    url = urllib.parse.urlsplit(route.api_base)
    tls = client_context(route.ca_certificates) if url.scheme == "https" else None
    upstream = Upstream(
        f"the external route {route.model_name}", url.hostname or "", url.port or (443 if tls else 80), tls
    )
    prefix = url.path.rstrip("/").encode()
    health_path = route.health_path or ""
    found = Route(
        route.model_name, rules, route.upstream_model, prefix, has_key=has_key, headers=headers, health_path=health_path
    )
    return found, upstream


def external_endpoints(config: Config) -> Mapping[str, Sequence[Endpoint]]:
    """Return the endpoints of the external routes, by model. Raises Exit 64 if a key is missing."""
    found: dict[str, list[Endpoint]] = {}
    for number, given in enumerate(config.external_routes):
        route, upstream = read_route(given, config, f"external_routes[{number}]")
        same = found.setdefault(given.model_name, [])
        id_ = f"external:{urllib.parse.quote(given.model_name)}" + (f"#{len(same) + 1}" if same else "")
        in_flight_max = given.max_in_flight or config.routing.max_in_flight
        circuit = Circuit(config.circuit_breaker)
        same.append(Endpoint(upstream, id_.encode(), in_flight_max, route, circuit=circuit))
    return found
