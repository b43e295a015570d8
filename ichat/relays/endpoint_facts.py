"""The facts by which a relay sends requests to an endpoint: sent once, and again when it has changed.

Keys are not among them: those that a request needs are sent with its step.
"""

from collections.abc import Mapping
from typing import Any

from ichat.errors import Exit
from ichat.http.pool import Upstream
from ichat.http.tls import client_context
from ichat.proxy.drop_params import ParamRules
from ichat.proxy.external_routes import Route
from ichat.proxy.steps import AttemptStep
from ichat.relays.values import TalkError
from ichat.routing.access import Access
from ichat.routing.endpoint import EndpointFacts

_RULES = ("drop_params", "additional_drop_params", "allowed_openai_params", "supported_openai_params")


def facts_of(endpoint: EndpointFacts) -> dict[str, Any]:
    """Return the facts about an endpoint, as JSON."""
    upstream, access, route = endpoint.upstream, endpoint.access, endpoint.route
    facts: dict[str, Any] = {
        "id": endpoint.id.decode(), "name": upstream.name, "host": upstream.host, "port": upstream.port,
        "tls": upstream.tls is not None, "ca": upstream.ca_certificates, "reports_usage": endpoint.reports_usage,
    }  # fmt: skip
    if access is not None:
        names = sorted(name.decode("latin-1") for name in access.names)
        facts["access"] = [access.prefix.decode("latin-1"), names]
    if isinstance(route, Route):
        rules = {name: getattr(route.rules, name) for name in _RULES}
        facts["route"] = {"name": route.name, "upstream_model": route.upstream_model, "rules": rules}
    return facts


def step_with_keys(step: AttemptStep, endpoint: EndpointFacts) -> AttemptStep:
    """Return a step with the headers that each request to an endpoint gets, keys too: for this request alone."""
    own_headers = () if endpoint.access is None else endpoint.access.own_headers
    return step._replace(request_head=(*own_headers, *step.request_head)) if own_headers else step


def endpoint_of(facts: Mapping[str, Any]) -> EndpointFacts:
    """Return an endpoint with these facts; it may read a file. Raises TalkError."""
    try:
        tls = client_context(facts["ca"]) if facts["tls"] else None
        upstream = Upstream(facts["name"], facts["host"], facts["port"], tls)
        access = route = None
        if "access" in facts:
            prefix, names = facts["access"]
            access = Access(prefix.encode("latin-1"), [], names=frozenset(name.encode("latin-1") for name in names))
        if "route" in facts:
            given = facts["route"]
            route = Route(given["name"], ParamRules(**given["rules"]), given["upstream_model"])
        return EndpointFacts(facts["id"].encode(), upstream, route, access, facts["reports_usage"] is True)
    except (KeyError, TypeError, ValueError, AttributeError, Exit) as error:
        raise TalkError(f"The facts about an endpoint are damaged: {error}.") from error
