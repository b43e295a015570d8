"""What each route of the control plane asks for, and which route a request is for. Pure functions."""

import re
from collections.abc import Mapping
from typing import Literal, cast
from urllib.parse import unquote

from ichat.config.package_data import read_toml

Rule = Literal["open", "data", "models", "metrics", "read", "write", "join", "order"]
"""The key that a route asks for.

`open`: nothing. `data`: a client's key, if there are any. `models`: that, or the operator's. `write`: the operator's
key, or the gateway's own secret. `read`: the same, but nothing where no key of any kind is configured. `metrics`: as
`read`, unless `security.open_metrics`. `join`: the token, the secret, or a worker's own key. `order`: a code
in the body, which the route itself checks.
"""

ROUTES: Mapping[tuple[str, str], Rule] = {
    (method, path): cast("Rule", rule)
    for rule, routes in read_toml("ichat.security", "rules.toml").items()
    for method, path in (route.split(" ") for route in routes)
}
"""The control plane's routes by method and path, each with its rule; all others are refused."""


def _pattern_of(path: str) -> str:
    """Return an expression for a path, with a single group."""
    return f"({re.sub(r'<(path:)?[a-z_]+>', lambda found: '.+' if found[1] else '[^/]+', re.escape(path))})"


def _by_method() -> Mapping[str, tuple[re.Pattern[str], list[Rule]]]:
    """Return an expression and its rules, for each method; paths without a part that varies are first."""
    ordered = sorted(ROUTES.items(), key=lambda route: "<" in route[0][1])
    found: dict[str, tuple[re.Pattern[str], list[Rule]]] = {}
    for method in {method for (method, _), _ in ordered}:
        routes: list[tuple[str, Rule]] = [(path, rule) for (one, path), rule in ordered if one == method]
        patterns = "|".join(_pattern_of(path) for path, _ in routes)
        found[method] = re.compile(patterns, re.DOTALL), [rule for _, rule in routes]
    return found


_MATCHERS = _by_method()


def find_rule(method: bytes, path: bytes) -> Rule | None:
    """Return the rule of a route, by the method and path of a request as sent; None: there is no such route."""
    return _find(_method_of(method), unquote(path.decode("latin-1")))


def methods_of(path: bytes) -> list[str]:
    """Return the methods that a path accepts; none if there is no such route."""
    decoded = unquote(path.decode("latin-1"))
    found = [method for method in _MATCHERS if _find(method, decoded) is not None]
    return sorted([*found, "OPTIONS", *(["HEAD"] if "GET" in found else [])]) if found else []


def _method_of(method: bytes) -> str:
    return "GET" if method == b"HEAD" else method.decode("latin-1")


def _find(method: str, path: str) -> Rule | None:
    matcher = _MATCHERS.get(method)
    found = matcher[0].fullmatch(path) if matcher is not None else None
    if matcher is None or found is None or found.lastindex is None:
        return None
    return matcher[1][found.lastindex - 1]
