"""External routes: models that are served elsewhere, and the changes to requests on the way there."""

import logging
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ichat.config.schema import Config, ExternalRoute
from ichat.fleet.registered_servers import read_access
from ichat.http.request_body import RequestBody
from ichat.proxy.drop_params import ParamRules
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint

log = logging.getLogger(__name__)

TOLD_MAX = 100
"""Kinds of dropping that are logged, for each route."""
_GATED = (b"/chat/completions", b"/completions", b"/embeddings")
"""The routes with OpenAI's parameters, so that `drop_params` has a meaning."""


@attrs.define(eq=False)
class Route:
    """The changes of an external route to requests."""

    name: str
    rules: ParamRules
    upstream_model: str | None
    health_path: str = ""
    """The path of its health check; empty if it has none."""
    _told: set[tuple[str, ...]] = attrs.field(factory=set[tuple[str, ...]], repr=False)

    def changes(self, body: RequestBody) -> bool:
        """Return whether the upstream may get another body."""
        return self.upstream_model is not None or not (body.is_form or self.rules.names.isdisjoint(body.names))

    async def rewrite(self, body: RequestBody, path: bytes) -> RequestBody:
        """Return the body for the upstream: its own name for the model, without the parameters to drop.

        The rules are not for forms. What need not change stays as it is, byte for byte. Raises ApiError 400 for a
        parameter that the upstream does not support.
        """
        replace = {} if self.upstream_model is None else {"model": body.text(self.upstream_model)}
        drop: Iterable[str] = ()
        found = {} if body.is_form else dict(await body.values(self.rules.names))
        if found:
            changes = self.rules.plan(found, gated=path.rstrip(b"/").endswith(_GATED))
            self._tell(changes.dropped)
            replace, drop = {**changes.replace, **replace}, changes.drop
        return await body.edited(replace, drop) if replace or drop else body

    def _tell(self, dropped: Iterable[str]) -> None:
        names = tuple(sorted(dropped))
        if names and names not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(names)
            log.info("the external route %s drops %s (said once)", self.name, ", ".join(names))


def _route_of(route: ExternalRoute, config: Config) -> Route:
    defaults = config.litellm_settings
    rules = ParamRules(
        drop_params=defaults.drop_params if route.drop_params is None else route.drop_params,
        additional_drop_params=[*defaults.additional_drop_params, *route.additional_drop_params],
        allowed_openai_params=[*defaults.allowed_openai_params, *route.allowed_openai_params],
        supported_openai_params=route.supported_openai_params,
    )
    return Route(route.model_name, rules, route.upstream_model, route.health_path or "")


def external_endpoints(config: Config) -> Mapping[str, Sequence[Endpoint]]:
    """Return the endpoints of the external routes, by model. Raises Exit 64 if a key is missing."""
    found: dict[str, list[Endpoint]] = {}
    for number, given in enumerate(config.external_routes):
        name = f"the external route {given.model_name}"
        access, upstream = read_access(given, f"external_routes[{number}]", name)
        same = found.setdefault(given.model_name, [])
        id_ = f"external:{urllib.parse.quote(given.model_name)}" + (f"#{len(same) + 1}" if same else "")
        in_flight_max = given.max_in_flight or config.routing.max_in_flight
        circuit = Circuit(config.circuit_breaker)
        route = _route_of(given, config)
        same.append(Endpoint(upstream, id_.encode(), in_flight_max, route, access, circuit=circuit))
    return found


def _settings_of_route(config: Config, name: str) -> Sequence[object]:
    """Return all settings on which the external routes of a name depend."""
    routes = [route for route in config.external_routes if route.model_name == name]
    defaults = config.litellm_settings
    return [
        *routes, defaults.drop_params, defaults.additional_drop_params, defaults.allowed_openai_params,
        config.routing.max_in_flight,
    ]  # fmt: skip


def with_kept_routes(
    new: Mapping[str, Sequence[Endpoint]], current: Mapping[str, Sequence[Endpoint]], before: Config, config: Config
) -> Mapping[str, Sequence[Endpoint]]:
    """Return the new endpoints of external routes; endpoints with unchanged settings keep their counts."""
    kept = {name for name in new if _settings_of_route(before, name) == _settings_of_route(config, name)}
    for name in kept:
        for endpoint, changed in zip(current[name], new[name], strict=True):
            endpoint.reconfigure(changed.upstream, changed.access, changed.route)
    for name in current.keys() - kept:
        for endpoint in current[name]:
            endpoint.forget_prefixes()  # or the index of prefixes would keep it for good
    return {name: current[name] if name in kept else endpoints for name, endpoints in new.items()}
