"""LiteLLM's `model_list` as external routes: each deployment becomes a route, and the same name shares requests."""

import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from ichat.config.models import ANY_TEXT
from ichat.config.openai_params import KNOWN
from ichat.config.package_data import read_toml
from ichat.convert.document import Document, sentence_for
from ichat.convert.yaml_text import table_in

DATA = read_toml("ichat.convert", "litellm.toml")
"""The providers, and sentences for settings."""
PROVIDERS: Mapping[str, Mapping[str, Any]] = DATA["providers"]
FROM_ENVIRONMENT = "os.environ/"
"""Begins a value that LiteLLM reads from its environment."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SETS = (KNOWN - {"stream", "user"}) | {"top_k", "min_p", "repetition_penalty", "chat_template_kwargs"}
"""Parameters of a deployment that become members of each request."""
_SAME = {
    "drop_params": bool, "additional_drop_params": list, "allowed_openai_params": list, "max_parallel_requests": int,
}  # fmt: skip
"""Settings of a deployment that a route has too, and their types."""
_RENAMED = {"max_parallel_requests": "max_in_flight"}
_READ = frozenset((
    "model", "custom_llm_provider", "api_base", "base_url", "api_key", "organization", "extra_headers", "headers",
    "extra_body", "ssl_verify", *_SAME,
))  # fmt: skip
"""Settings of a deployment that are read here, beside prices and parameters."""
_COSTS = {
    "input_cost_per_token": "input", "output_cost_per_token": "output", "cache_read_input_token_cost": "cached",
}  # fmt: skip
_PATTERNS = {"claude": "anthropic", "command-r": "cohere", "gemini": "vertex_ai"}
"""Beginnings of models' names, for which LiteLLM knows the provider."""
_TRANSLATED = "LiteLLM translates for {}. Here its own OpenAI-compatible API answers: some features are not in that."
_OWN_LISTS = "model_info is for LiteLLM's own lists: here /v1/models has the names alone"


class Routes(NamedTuple):
    """The routes that were made."""

    names: dict[str, list[dict[str, Any]]]
    """For each name of a model: the members that each of its deployments would set in a request."""
    patterns: dict[str, str]
    """For each name with a `*`: the name of the route that answers."""


def add_routes(models: Any, document: Document) -> Routes:
    """Write the routes of a `model_list` into a document, and their prices."""
    routes = Routes({}, {})
    if not isinstance(models, list):
        document.remark("model_list", "is no list, so that it has no models")
        return routes
    for number, entry in enumerate(cast("list[Any]", models)):
        where = f"model_list[{number}]"
        table = table_in(entry)
        params, name = table_in(table.get("litellm_params")), table.get("model_name")
        if not isinstance(name, str) or not isinstance(params.get("model"), str):
            document.remark(where, "needs a model_name and litellm_params with a model")
            continue
        params = {**_plain(table), **params}
        info = table_in(table.get("model_info"))
        _add_route(name, params, info, where=where, document=document, routes=routes)
    return routes


def variable_in(value: Any) -> str | None:
    """Return the variable of the environment that a value names; None: it is a literal."""
    if not isinstance(value, str) or not value.startswith(FROM_ENVIRONMENT):
        return None
    name = value.removeprefix(FROM_ENVIRONMENT)
    return name if _VARIABLE.fullmatch(name) else None


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("model_name", "litellm_params", "model_info")}


def _add_route(
    name: str, params: dict[str, Any], info: dict[str, Any], *, where: str, document: Document, routes: Routes
) -> None:
    provider, upstream = _provider_of(params)
    if ANY_TEXT in upstream:
        document.remark(f"{where} ({name})", "passes any name on: use an external route for each model, by its name")
        return
    notes: list[str] = []
    api_base, problem = _api_base(params, provider, notes)
    if problem:
        document.remark(f"{where} ({name})", problem)
        return
    route_name = name
    if ANY_TEXT in name:
        route_name = upstream
        routes.patterns[name] = upstream
    values: dict[str, Any] = {"model_name": route_name, "api_base": api_base}
    if upstream != route_name:
        values["upstream_model"] = upstream
    headers = _headers(params, where, document)
    if key := _key(params, provider, notes):
        if (variable := variable_in(key)) is not None:
            values["api_key_env"] = variable
        else:
            headers["Authorization"] = f"Bearer {key}"
            notes.append("The key belongs into a variable of the gateway's environment: name that in api_key_env.")
    if headers:  # any of them may hold a key
        values["headers"] = headers
        document.has_secrets = True
    values |= _same(params, where, document)
    if isinstance(certificates := params.get("ssl_verify"), str):
        values["ca_certificates"] = certificates
    document.add("external_routes", values, notes)
    _add_price(route_name, {**info, **params}, where, document)
    routes.names.setdefault(route_name, []).append(_members(params))
    _remark_rest(params, info, where, document)


def _provider_of(params: Mapping[str, Any]) -> tuple[str, str]:
    """Return the provider of a deployment, and the model's name there."""
    model, given = params["model"], params.get("custom_llm_provider")
    first, slash, rest = model.partition("/")
    if isinstance(given, str) and given:
        return given, rest if first == given and slash else model
    if slash:
        return first, rest
    return next((found for begin, found in _PATTERNS.items() if model.startswith(begin)), "openai"), model


def _api_base(params: Mapping[str, Any], provider: str, notes: list[str]) -> tuple[str, str]:
    """Return the URL of an upstream, or why there is none. Adds to the notes of its route."""
    known = PROVIDERS.get(provider)
    if known is None:
        return "", f"{provider!r} has no API in OpenAI's form that is known here, and iChat translates for none"
    given = params.get("api_base") or params.get("base_url")
    if (variable := variable_in(given)) is not None:
        given = os.environ.get(variable, "")
        if not given:
            return "", f"a URL is no secret here: write api_base, which {variable} has, into an external route"
        notes.append(f"api_base is the value that {variable} has now.")
    if given is None and "url" not in known:
        return "", f"needs an api_base: {provider!r} has none of its own"
    if known.get("translated"):
        notes.append(_TRANSLATED.format(provider))
    if given is None:
        return known["url"], ""
    url = str(given)
    return (_completed(url, known["adds"]) if "adds" in known else url), ""


def _completed(url: str, path: str) -> str:
    return url if urllib.parse.urlsplit(url).path.rstrip("/").endswith("/v1") else url.rstrip("/") + path


def _key(params: Mapping[str, Any], provider: str, notes: list[str]) -> str | None:
    """Return the key of an upstream, or the variable that has it, as LiteLLM writes both; None: there is none."""
    given = params.get("api_key")
    if given is not None and str(given):
        return str(given)
    known = PROVIDERS[provider]
    if known.get("local"):
        return None
    notes.append(f"LiteLLM reads the key from {known['key']} without being asked.")
    return FROM_ENVIRONMENT + known["key"]


def _headers(params: Mapping[str, Any], where: str, document: Document) -> dict[str, str]:
    found: dict[str, str] = {}
    given = {**table_in(params.get("headers")), **table_in(params.get("extra_headers"))}
    if params.get("organization"):
        given["OpenAI-Organization"] = params["organization"]
    for name, value in given.items():
        if variable_in(value) is not None:
            document.remark(f"{where}.{name}", "headers have no variables: write the value into headers of the route")
        else:
            found[name] = str(value)
    return found


def _same(params: Mapping[str, Any], where: str, document: Document) -> dict[str, Any]:
    """Return the settings that mean the same for a route."""
    found: dict[str, Any] = {}
    for key, kind in _SAME.items():
        if type(params.get(key)) is kind:
            found[_RENAMED.get(key, key)] = params[key]
        elif params.get(key) is not None:
            document.remark(f"{where}.{key}", f"is not of the type {kind.__name__}")
    return found


def _add_price(name: str, given: Mapping[str, Any], where: str, document: Document) -> None:
    costs = {mine: given[key] for key, mine in _COSTS.items() if type(given.get(key)) in (int, float)}
    for key in _COSTS.keys() & given.keys():
        if _COSTS[key] not in costs and given[key] is not None:
            document.remark(f"{where}.{key}", "is no number")
    section = f"prices\0{name}"
    if costs and document.has_section(section):
        document.remark(f"{where}, cost_per_token", f"a name has a single price: the first for {name!r} counts")
        return
    for key, cost in costs.items():
        document.set(section, key, round(cost * 1e6, 9))


def _members(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that a deployment adds to each request."""
    return {key: params[key] for key in params if key in _SETS} | table_in(params.get("extra_body"))


def _remark_rest(params: Mapping[str, Any], info: Mapping[str, Any], where: str, document: Document) -> None:
    for key in _unread(params):
        document.remark(f"{where}.{key}", sentence_for(key, DATA["litellm_params"]))
    if "ssl_verify" in params and not isinstance(params["ssl_verify"], str):
        document.remark(f"{where}.ssl_verify", "certificates are always verified: use ca_certificates of the route")
    if "access_groups" in info:
        document.remark(f"{where}.model_info.access_groups", "use models of [[security.keys]]")
    for key in info:
        if key not in _COSTS and key != "access_groups":
            document.remark(f"{where}.model_info.{key}", _OWN_LISTS)


def _unread(params: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in params if key not in _READ and key not in _SETS and key not in _COSTS)
