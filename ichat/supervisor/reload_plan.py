"""What another configuration would change in a running gateway: decided as a whole, before anything is done.

A worker whose keys are the same keeps running, wherever it stands in the file.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from ichat.config.schema import Config, EngineSettings, ExternalRoute, ManagedWorkerConfig, SwapSetConfig
from ichat.config.usage import Prices
from ichat.security.redact import masked

Action = Literal["start", "stop", "restart", "update", "keep", "later"]
"""`update` changes what runs without a restart of it; `later` is only done at the next start of the gateway."""

Engines = Mapping[str, EngineSettings]

VALUE_CHARACTERS_MAX = 80
_SETTINGS = (
    "server_settings", "routing", "security", "limits", "timeouts", "circuit_breaker", "health", "restart", "history",
    "logs", "usage", "litellm_settings", "router_settings",
)  # fmt: skip
_LATER = frozenset((
    "server_settings.host", "server_settings.port", "server_settings.state_directory",
    "logs.access_log", "logs.access_lines_max", "logs.directory", "usage.enabled",
))  # fmt: skip
_WORKERS_TOO = frozenset((
    "limits.head_bytes_max", "limits.body_bytes_max", "limits.connections_max",
    "timeouts.client_stall_s", "timeouts.stop_s", "timeouts.orphan_after_s",
))  # fmt: skip
"""What managed workers were told at their start."""


@frozen
class Running:
    """A managed worker that the gateway has, in whatever state."""

    worker_id: str
    spec: ManagedWorkerConfig
    is_launched: bool
    """Whether it was launched over the API: a reload never touches it."""
    has_failed: bool
    """Whether it is not restarted any more, after too many failures in a row."""


@frozen
class Change:
    """What happens to one worker."""

    action: Action
    worker_id: str
    """Empty for one that is to be started."""
    spec: ManagedWorkerConfig | None
    """What it is to be; None for one that is to be stopped."""
    why: str
    """What is different, old value -> new value; secrets are masked."""
    new_first: bool = False
    """Of a restart: whether the new process may be started before the old one ends.

    It needs nothing that a restarted worker still has, but may need what one that is stopped has.
    """


@frozen
class ReloadStep:
    """One line of the plan, for operators."""

    action: Action
    """`update` changes what runs without a restart of it; `later` waits for the gateway's next start."""
    what: str
    """A worker, an external route, or a path in the configuration."""
    why: str
    """What is different; secrets are masked."""


def changes_of_workers(
    running: Sequence[Running], wanted: Sequence[ManagedWorkerConfig], old_engines: Engines, new_engines: Engines
) -> list[Change]:
    """Decide what happens to each worker: first those there are, in their order, then the new ones, in theirs."""
    taken = _matched([one for one in running if not one.is_launched], wanted)
    changes: list[Change] = []
    for one in running:
        if one.is_launched:
            changes.append(Change("keep", one.worker_id, one.spec, "it was launched over the API"))
        elif one.worker_id in taken:
            spec = wanted[taken[one.worker_id]]
            changes.append(_change(one, spec, old_engines.get(spec.backend), new_engines.get(spec.backend)))
        else:
            changes.append(Change("stop", one.worker_id, None, "the configuration has it no more"))
    used = set(taken.values())
    new = (spec for index, spec in enumerate(wanted) if index not in used)
    changes += [Change("start", "", spec, "it is in the configuration and does not run") for spec in new]
    return _with_new_first(changes, {one.worker_id: one for one in running})


def steps_of_settings(old: Config, new: Config) -> list[ReloadStep]:
    """Return the steps for everything but the workers; what has not changed has no step."""
    steps: list[ReloadStep] = []
    for section in _SETTINGS:
        steps += _steps_of_section(section, getattr(old, section), getattr(new, section))
    for name in sorted({*old.engines, *new.engines}):
        before, after = _python(old.engines.get(name)), _python(new.engines.get(name))
        if before != after:
            why = f"{_how_changed('python', before, after)}; for workers that start from now on"
            steps.append(ReloadStep("update", f"engines.{name}.python", why))
    steps += _steps_of_named("security.keys", old.security.keys, new.security.keys)
    steps += _steps_of_named("models", old.models, new.models)
    steps += _steps_of_prices(old.prices, new.prices)
    steps += _steps_of_swap_sets(old.swap_sets, new.swap_sets)
    return [*steps, *_steps_of_routes(old.external_routes, new.external_routes)]


def step_of(change: Change) -> ReloadStep:
    """Return a change of a worker as a line of the plan."""
    name = f" of {change.spec.model_name}" if change.spec else ""
    what = f"worker {change.worker_id}" if change.worker_id else f"a worker{name}"
    return ReloadStep(change.action, what, change.why)


def summary(steps: Sequence[ReloadStep]) -> str:
    """Return the counts of the steps, for example ``+1 start, ~1 restart, -0 stop, 2 update, 3 untouched``."""
    counts = Counter(step.action for step in steps)
    parts = [f"+{counts['start']} start", f"~{counts['restart']} restart", f"-{counts['stop']} stop"]
    parts += [f"{counts['update']} update"] if counts["update"] else []
    parts += [f"{counts['later']} only with a restart of the gateway"] if counts["later"] else []
    return ", ".join([*parts, f"{counts['keep']} untouched"])


# Workers.


def _matched(running: Sequence[Running], wanted: Sequence[ManagedWorkerConfig]) -> dict[str, int]:
    """Return the index in `wanted` for each worker, so that as few as possible are disturbed.

    First the same, then those that need no restart, then those of the same model. Workers that have failed come last
    each time: of two that are alike, the one that works stays.
    """
    keys: list[Callable[[ManagedWorkerConfig], str]] = [
        _text_of,
        _needs_of,
        lambda spec: spec.model_name,
    ]
    taken: dict[str, int] = {}
    for key in keys:
        open_ones: dict[str, list[int]] = {}
        used = set(taken.values())
        for index, spec in enumerate(wanted):
            if index not in used:
                open_ones.setdefault(key(spec), []).append(index)
        for one in sorted(running, key=lambda one: one.has_failed):
            indexes = open_ones.get(key(one.spec))
            if one.worker_id not in taken and indexes:
                taken[one.worker_id] = indexes.pop(0)
    return taken


def _change(
    one: Running, spec: ManagedWorkerConfig, old_engine: EngineSettings | None, new_engine: EngineSettings | None
) -> Change:
    needs_restart = _needs_of(one.spec) != _needs_of(spec)
    reasons = _how_worker_changed(one.spec, spec)
    if spec.python is None and one.spec.python is None and spec.backend == one.spec.backend:
        before, after = _python(old_engine), _python(new_engine)
        if before != after:
            needs_restart = True
            reasons.append(_how_changed(f"engines.{spec.backend}.python", before, after))
    if one.has_failed:
        needs_restart = True
        reasons.insert(0, "it has failed")
    action: Action = "restart" if needs_restart else "update" if reasons else "keep"
    return Change(action, one.worker_id, spec, "; ".join(reasons))


def _with_new_first(changes: Sequence[Change], running: Mapping[str, Running]) -> list[Change]:
    """Mark the restarts that need nothing that they themselves, or others that are restarted, still have."""
    ending = [running[change.worker_id] for change in changes if change.action == "restart"]
    held = [one.spec for one in ending if not one.has_failed]
    first = {one.worker_id for one in ending if not one.has_failed}
    return [
        attrs.evolve(
            change, new_first=change.worker_id in first and change.spec is not None and _is_free(change.spec, held)
        )
        for change in changes
    ]


def _is_free(spec: ManagedWorkerConfig, held: Sequence[ManagedWorkerConfig]) -> bool:
    return all(
        (not spec.port or spec.port != old.port)
        and spec.gpu_ids is not None
        and old.gpu_ids is not None
        and not set(spec.gpu_ids) & set(old.gpu_ids)
        for old in held
    )


def _needs_of(spec: ManagedWorkerConfig) -> str:
    """Return what its process was started with, as text: if this differs, it has to be restarted."""
    return _text_of(
        attrs.evolve(
            spec, max_in_flight=None, share_gpus=False, load="start", idle_s=0.0, when_idle="stop", min_loaded_s=0.0
        )
    )


def _how_worker_changed(old: ManagedWorkerConfig, new: ManagedWorkerConfig) -> list[str]:
    return [
        *_differences(attrs.asdict(old), attrs.asdict(new), without=("env", "backend_args")).values(),
        *_differences(old.backend_args, new.backend_args).values(),
        *_hidden_differences("env", old.env, new.env),
    ]


# Settings and routes.


def _steps_of_section(section: str, old: Any, new: Any) -> Iterator[ReloadStep]:
    for name, how in _differences(attrs.asdict(old), attrs.asdict(new), without=("keys",)).items():
        path = f"{section}.{name}"
        if path in _LATER:
            yield ReloadStep("later", path, f"{how}; only with a restart of the gateway")
        elif path in _WORKERS_TOO:
            yield ReloadStep("update", path, f"{how}; managed workers take it at their next start")
        else:
            yield ReloadStep("update", path, how)


def _steps_of_named(section: str, old: Sequence[Any], new: Sequence[Any]) -> Iterator[ReloadStep]:
    """Yield the steps of an array of tables of which each has a name."""
    before, after = {one.name: one for one in old}, {one.name: one for one in new}
    for name in {**before, **after}:
        what = f"{section} {name}"
        if name not in before:
            yield ReloadStep("start", what, "it is new in the configuration")
        elif name not in after:
            yield ReloadStep("stop", what, "the configuration has it no more")
        elif why := _differences(attrs.asdict(before[name]), attrs.asdict(after[name])):
            yield ReloadStep("update", what, "; ".join(why.values()))


def _steps_of_prices(old: Prices, new: Prices) -> Iterator[ReloadStep]:
    for name in {**old, **new}:
        what, before, after = f"price of {name}", old.get(name), new.get(name)
        if before is None:
            yield ReloadStep("start", what, "it is new in the configuration")
        elif after is None:
            yield ReloadStep("stop", what, "the configuration has it no more")
        elif why := _differences(attrs.asdict(before), attrs.asdict(after)):
            yield ReloadStep("update", what, "; ".join(why.values()))


def _steps_of_swap_sets(old: Sequence[SwapSetConfig], new: Sequence[SwapSetConfig]) -> Iterator[ReloadStep]:
    before, after = {frozenset(one.members): one for one in old}, {frozenset(one.members): one for one in new}
    for members in {**before, **after}:
        what = f"swap set of {', '.join(sorted(members))}"
        if members not in before:
            yield ReloadStep("start", what, "it is new in the configuration")
        elif members not in after:
            yield ReloadStep("stop", what, "the configuration has it no more")
        elif before[members].loaded_max != after[members].loaded_max:
            why = _how_changed("loaded_max", before[members].loaded_max, after[members].loaded_max)
            yield ReloadStep("update", what, why)


def _steps_of_routes(old: Sequence[ExternalRoute], new: Sequence[ExternalRoute]) -> Iterator[ReloadStep]:
    for name in dict.fromkeys(route.model_name for route in [*old, *new]):
        before = [route for route in old if route.model_name == name]
        after = [route for route in new if route.model_name == name]
        what = f"external route {name}"
        if not before:
            yield ReloadStep("start", what, "it is new in the configuration")
        elif not after:
            yield ReloadStep("stop", what, "the configuration has it no more")
        elif why := _how_routes_changed(before, after):
            yield ReloadStep("update", what, why)


def _how_routes_changed(old: Sequence[ExternalRoute], new: Sequence[ExternalRoute]) -> str:
    """Return how the routes of one model differ, whatever their order in the file; empty if they are the same."""
    gone, come = Counter(map(_text_of, old)), Counter(map(_text_of, new))
    left = [route for route in old if _text_of(route) in gone - come]
    added = [route for route in new if _text_of(route) in come - gone]
    reasons = [f"{len(old)} of them -> {len(new)}"] if len(old) != len(new) else []
    for before, after in zip(left, added, strict=False):
        reasons += _differences(attrs.asdict(before), attrs.asdict(after), without=("headers",)).values()
        reasons += _hidden_differences("headers", before.headers, after.headers)
    return "; ".join(reasons)


# Values.


def _python(engine: EngineSettings | None) -> str | None:
    return engine.python if engine else None


def _text_of(value: Any) -> str:
    """Return a text that is the same for two values only if they mean the same: 1, 1.0 and true do not."""
    plain = attrs.asdict(value) if isinstance(value, ManagedWorkerConfig | ExternalRoute) else value
    return json.dumps(plain, sort_keys=True, default=str)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, str]:
    """Return how each key has changed."""
    names = (name for name in {**old, **new} if name not in without)
    changed = (name for name in names if _text_of(old.get(name)) != _text_of(new.get(name)))
    return {name: _how_changed(name, old.get(name), new.get(name)) for name in changed}


def _hidden_differences(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys that have changed, without their values, which are secret."""
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            how = "is new" if name not in old else "is gone" if name not in new else "has changed"
            yield f"{section}.{name} {how}"


def _how_changed(name: str, before: Any, after: Any) -> str:
    old, new = _shown(name, before), _shown(name, after)
    return f"{name}: {old} -> {new}" if old != new else f"{name} has changed"


def _shown(name: str, value: Any) -> str:
    """Return a value for people: secrets are masked, long values are cut."""
    if value is None:
        return "not set"
    text = json.dumps(masked({name: value})[name], ensure_ascii=False, default=str)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"
