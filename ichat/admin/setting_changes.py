"""The changes by another configuration, except those of workers, each as a line of the plan."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from ichat.config.schema import Config, ExternalRoute
from ichat.fleet.registered_servers import server_ids
from ichat.supervisor.reload_plan import (
    ReloadStep,
    differences,
    hidden_differences,
    how_changed,
    python_of_engine,
    text_of,
)

_SETTINGS = (
    "server_settings", "routing", "security", "limits", "timeouts", "circuit_breaker", "health", "restart", "history",
    "logs", "usage", "litellm_settings", "router_settings",
)  # fmt: skip
_LATER = frozenset((
    "server_settings.host", "server_settings.port", "server_settings.state_directory",
    "logs.access_log", "logs.format", "logs.access_lines_max", "logs.directory", "usage.enabled",
))  # fmt: skip
_WORKERS_TOO = frozenset((
    "limits.head_bytes_max", "limits.body_bytes_max", "limits.connections_max",
    "timeouts.client_stall_s", "timeouts.stop_s", "timeouts.orphan_after_s",
))  # fmt: skip
"""The settings that managed workers get at their start."""


def steps_of_settings(old: Config, new: Config) -> list[ReloadStep]:
    """Return the steps for everything but the workers; unchanged settings have no step."""
    steps: list[ReloadStep] = []
    for section in _SETTINGS:
        steps += _steps_of_section(section, getattr(old, section), getattr(new, section))
    for name in sorted({*old.engines, *new.engines}):
        before, after = python_of_engine(old.engines.get(name)), python_of_engine(new.engines.get(name))
        if before != after:
            why = f"{how_changed('python', before, after)}; for workers that start from now on"
            steps.append(ReloadStep("update", f"engines.{name}.python", why))
    steps += _steps_of("security.keys", _by_name(old.security.keys), _by_name(new.security.keys))
    steps += _steps_of("models", _by_name(old.models), _by_name(new.models))
    steps += _steps_of("price of", _by_key(old.prices), _by_key(new.prices))
    steps += _steps_of("swap set of", _swap_sets(old), _swap_sets(new))
    steps += _steps_of("registered server", _by_key(server_ids(old)), _by_key(server_ids(new)))
    return [*steps, *_steps_of("external route", _routes(old), _routes(new))]


def _steps_of_section(section: str, old: Any, new: Any) -> Iterator[ReloadStep]:
    for name, how in differences(attrs.asdict(old), attrs.asdict(new), without=("keys",)).items():
        path = f"{section}.{name}"
        if path in _LATER:
            yield ReloadStep("later", path, f"{how}; only with a restart of the gateway")
        elif path in _WORKERS_TOO:
            yield ReloadStep("update", path, f"{how}; managed workers take it at their next start")
        else:
            yield ReloadStep("update", path, how)


_Tables = Mapping[str, list[Any]]
"""The tables of a kind, by the names that operators see; external routes may share a name."""


def _by_name(tables: Iterable[Any]) -> _Tables:
    return {one.name: [one] for one in tables}


def _by_key(tables: Mapping[str, Any]) -> _Tables:
    return {name: [one] for name, one in tables.items()}


def _swap_sets(config: Config) -> _Tables:
    found = {frozenset(one.members): one for one in config.swap_sets}
    return {", ".join(sorted(members)): [attrs.evolve(one, members=[])] for members, one in found.items()}


def _routes(config: Config) -> _Tables:
    found: dict[str, list[ExternalRoute]] = {}
    for route in config.external_routes:
        found.setdefault(route.model_name, []).append(route)
    return found


def _steps_of(kind: str, old: _Tables, new: _Tables) -> Iterator[ReloadStep]:
    """Yield the steps of the tables of a kind."""
    for name in {**old, **new}:
        what = f"{kind} {name}"
        if name not in old:
            yield ReloadStep("add", what, "it is new in the configuration")
        elif name not in new:
            yield ReloadStep("remove", what, "the configuration has it no more")
        elif why := _how_tables_changed(old[name], new[name]):
            yield ReloadStep("update", what, why)


def _how_tables_changed(old: list[Any], new: list[Any]) -> str:
    """Return how the tables of a name differ, regardless of their order; empty if they are the same."""
    gone, come = Counter(map(_text, old)), Counter(map(_text, new))
    left = [table for table in old if _text(table) in gone - come]
    added = [table for table in new if _text(table) in come - gone]
    reasons = [f"{len(old)} of them -> {len(new)}"] if len(old) != len(new) else []
    for before, after in zip(left, added, strict=False):
        reasons += differences(attrs.asdict(before), attrs.asdict(after), without=("headers",)).values()
        reasons += hidden_differences("headers", getattr(before, "headers", {}), getattr(after, "headers", {}))
    return "; ".join(reasons)


def _text(table: Any) -> str:
    return text_of(attrs.asdict(table))
