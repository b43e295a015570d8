"""The changes by another configuration, except those of workers, each as a line of the plan."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import attrs

from ichat.config.schema import Config
from ichat.config.strict import Reload, reload_of
from ichat.fleet.registered_servers import server_ids
from ichat.supervisor.reload_plan import (
    Action,
    ReloadStep,
    differences,
    hidden_differences,
    how_changed,
    python_of_engine,
    text_of,
)

_Tables = Mapping[str, list[Any]]
"""The tables of a kind, by the names that operators see; external routes may share a name."""
_WHEN: Mapping[Reload | None, tuple[Action, str]] = {
    "later": ("later", "; only with a restart of the gateway"),
    "workers": ("update", "; managed workers take it at their next start"),
}
"""The action for settings that a reload does not just put in force, and the words that say so."""


def steps_of_settings(old: Config, new: Config) -> list[ReloadStep]:
    """Return the steps for everything but the workers; unchanged settings have no step."""
    steps: list[ReloadStep] = []
    for section in attrs.fields(Config):
        if section.type is not None and attrs.has(section.type):
            before, after = attrs.asdict(getattr(old, section.name)), attrs.asdict(getattr(new, section.name))
            for name, how in differences(before, after, without=("keys",)).items():
                action, when = _WHEN.get(reload_of(section.type, name), ("update", ""))
                if section.name == "server_settings" and name == "relays" and 0 in (before[name], after[name]):
                    action, when = "later", "; only with a restart of the gateway, or a takeover (gateway --takeover)"
                steps.append(ReloadStep(action, f"{section.name}.{name}", how + when))
    for name in sorted({*old.engines, *new.engines}):
        before, after = python_of_engine(old.engines.get(name)), python_of_engine(new.engines.get(name))
        if before != after:
            why = f"{how_changed('python', before, after)}; for workers that start from now on"
            steps.append(ReloadStep("update", f"engines.{name}.python", why))
    for kind, tables_of in _TABLES.items():
        steps += _steps_of(kind, tables_of(old), tables_of(new))
    return steps


def _by(names: Callable[[Any], str], tables: Iterable[Any]) -> _Tables:
    found: dict[str, list[Any]] = {}
    for table in tables:
        found.setdefault(names(table), []).append(table)
    return found


def _alone(tables: Mapping[str, Any]) -> _Tables:
    return {name: [table] for name, table in tables.items()}


def _swap_sets(config: Config) -> _Tables:
    return _alone({", ".join(sorted(set(one.members))): attrs.evolve(one, members=[]) for one in config.swap_sets})


_TABLES: Mapping[str, Callable[[Config], _Tables]] = {
    "security.keys": lambda config: _by(attrgetter("name"), config.security.keys),
    "models": lambda config: _by(attrgetter("name"), config.models),
    "price of": lambda config: _alone(config.prices),
    "swap set of": _swap_sets,
    "registered server": lambda config: _alone(server_ids(config)),
    "external route": lambda config: _by(attrgetter("model_name"), config.external_routes),
}
"""The tables of each kind, by the words before their names."""


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
