"""The changes of workers by another configuration: decided as a whole, before anything is done.

A worker with unchanged keys keeps running, wherever it stands in the file.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from ichat.config.schema import EngineSettings, ExternalRoute, ManagedWorkerConfig
from ichat.config.strict import reload_of
from ichat.placement.place import EVERY_GPU
from ichat.preflight.claims import Claims, claims_of, do_share_port, overfull_gpus
from ichat.preflight.facts import VISIBLE
from ichat.security.redact import masked

Action = Literal["start", "stop", "restart", "update", "keep", "later", "add", "remove"]
"""Workers start, stop and restart; other things are added or removed.

`update` changes a running thing without a restart; `later` is only done at the next start of the gateway.
"""

Engines = Mapping[str, EngineSettings]

VALUE_CHARACTERS_MAX = 80
_STAYS_FAILED = "it has failed and nothing of it has changed, so it stays as it is; reload --restart-failed starts it"
_ROLLS = "without a gap: the copies are restarted in turn"


@frozen
class Running:
    """A managed worker that the gateway has, in any state."""

    worker_id: str
    spec: ManagedWorkerConfig
    is_launched: bool
    """Whether it was launched over the API: a reload never touches it."""
    has_failed: bool
    """Whether it is not restarted any more, after too many failures in a row."""
    is_cold: bool = False
    """Whether it is loaded on demand, and has no process now."""
    is_down: bool = False
    """Whether its process has ended by itself, and the next process has not begun."""
    replaced_by: str = ""
    """The id of the new worker that will replace it once that is ready; empty if none will."""
    placed: Sequence[int] = ()
    """The GPUs that the gateway has chosen for it."""
    serves: bool = True
    """Whether it serves its model, or has done so since its newest start and may do so again."""
    is_ready: bool = True
    """Whether it serves its model, or waits to be wanted."""
    requests: int = 0
    """Under way there."""

    @property
    def has_process(self) -> bool:
        """Whether it has a process, or will get a process without a command."""
        return not self.has_failed and not self.is_cold


@frozen
class Change:
    """The change of a worker."""

    action: Action
    worker_id: str
    """Empty for a worker that will be started."""
    spec: ManagedWorkerConfig | None
    """Its future table; None for a worker that will be stopped."""
    why: str
    """The differences, old value -> new value; secrets are masked."""
    new_first: bool = False
    """Of a restart: whether the new process may be started before the old process ends.

    It needs nothing that a restarted worker still has, and no started worker needs a resource of its old
    process; it may need a resource of a stopped worker.
    """
    rolls: bool = False
    """Of a restart of a copy: whether it waits until every other copy of its model serves."""
    gap: str = ""
    """Of a restart of a serving worker: whether the model is served all the while, and if not, why."""


@frozen
class ReloadStep:
    """A line of the plan, for operators."""

    action: Action
    what: str
    """A worker, an external route, or a path in the configuration."""
    why: str
    """The difference; secrets are masked. Of a restart also whether the model is served all the while."""


def changes_of_workers(
    running: Sequence[Running],
    wanted: Sequence[ManagedWorkerConfig],
    old_engines: Engines,
    new_engines: Engines,
    *,
    restart_failed: bool = False,
) -> list[Change]:
    """Decide each worker's change: first of the existing workers, in their order, then of the new, in theirs.

    A worker that has failed is started again if something of it has changed, or with `restart_failed`. A worker that
    will be replaced by a wanted worker has no change, if it is not wanted itself: it still goes then. If a process that
    is started needs its port or a GPU of it, it is stopped at once.
    """
    taken = _matched(running, wanted)
    changes: list[Change] = []
    for one in running:
        if one.is_launched:
            changes.append(Change("keep", one.worker_id, one.spec, "it was launched over the API"))
        elif one.worker_id in taken:
            spec = wanted[taken[one.worker_id]]
            engines = old_engines.get(spec.backend), new_engines.get(spec.backend)
            changes.append(_change(one, spec, *engines, restart_failed=restart_failed))
        else:
            changes.append(Change("stop", one.worker_id, None, _why_stopped(one, wanted)))
    used = set(taken.values())
    new = (spec for index, spec in enumerate(wanted) if index not in used)
    changes += [Change("start", "", spec, "it is in the configuration and does not run") for spec in new]
    return _with_new_first(changes, {one.worker_id: one for one in running}, old_engines, new_engines)


def in_order_of_stay(copies: Iterable[Running]) -> list[Running]:
    """Return copies of a worker in this order: those that stay longest if there are too many are first.

    Copies that do not serve go first, then those with the fewest requests, then the youngest.
    """
    return sorted(copies, key=lambda one: (one.has_failed, one.is_down, not one.is_ready, -one.requests))


def step_of(change: Change) -> ReloadStep:
    """Return a change of a worker as a line of the plan."""
    name = f" of {change.spec.model_name}" if change.spec else ""
    what = f"worker {change.worker_id}" if change.worker_id else f"a worker{name}"
    return ReloadStep(change.action, what, "; ".join(filter(None, (change.why, change.gap))))


def summary(steps: Sequence[ReloadStep]) -> str:
    """Return the counts of the steps, for example ``+1 start, ~1 restart, -0 stop, 2 update, 3 untouched``."""
    counts = Counter(step.action for step in steps)
    parts = [f"+{counts['start']} start", f"~{counts['restart']} restart", f"-{counts['stop']} stop"]
    for action, words in (("update", "update"), ("add", "added"), ("remove", "removed")):
        parts += [f"{counts[action]} {words}"] if counts[action] else []
    parts += [f"{counts['later']} only with a restart of the gateway"] if counts["later"] else []
    return ", ".join([*parts, f"{counts['keep']} untouched"])


# Workers.


def _matched(running: Sequence[Running], wanted: Sequence[ManagedWorkerConfig]) -> dict[str, int]:
    """Return the index in `wanted` for each worker that was not launched, so that few are disturbed.

    First the same, then those that need no restart, then those of the same model. Workers that have failed are last
    each time: of two that are alike, the working worker stays.
    """
    ours = [one for one in running if not one.is_launched]
    alike, in_file = in_order_of_stay(ours), sorted(ours, key=lambda one: one.has_failed)
    keys: list[tuple[Callable[[ManagedWorkerConfig], str], Sequence[Running]]] = [
        (text_of, alike),
        (_needs_of, alike),
        (lambda spec: spec.model_name, in_file),
    ]
    taken: dict[str, int] = {}
    for key, in_turn in keys:
        open_ones: dict[str, list[int]] = {}
        used = set(taken.values())
        for index, spec in enumerate(wanted):
            if index not in used:
                open_ones.setdefault(key(spec), []).append(index)
        for one in in_turn:
            indexes = open_ones.get(key(one.spec))
            if one.worker_id not in taken and indexes:
                taken[one.worker_id] = indexes.pop(0)
    return taken


def _why_stopped(one: Running, wanted: Sequence[ManagedWorkerConfig]) -> str:
    left = [spec for spec in wanted if spec.model_name == one.spec.model_name]
    if any(spec.replicas.max > 1 for spec in (one.spec, *left)) and left:
        return f"the configuration has fewer copies of {one.spec.model_name}: {len(left)}"
    return "the configuration has it no more"


def _change(
    one: Running,
    spec: ManagedWorkerConfig,
    old_engine: EngineSettings | None,
    new_engine: EngineSettings | None,
    *,
    restart_failed: bool,
) -> Change:
    needs_restart = _needs_of(one.spec) != _needs_of(spec)
    reasons = _how_worker_changed(one.spec, spec)
    if spec.python is None and one.spec.python is None and spec.backend == one.spec.backend:
        before, after = python_of_engine(old_engine), python_of_engine(new_engine)
        if before != after:
            needs_restart = True
            reasons.append(how_changed(f"engines.{spec.backend}.python", before, after))
    if one.has_failed and not reasons and not restart_failed:
        return Change("keep", one.worker_id, spec, _STAYS_FAILED)
    if one.has_failed:
        needs_restart = True
        reasons.insert(0, "it has failed")
    elif one.is_cold and needs_restart:
        needs_restart = False
        reasons.append("it is cold, and is loaded so the next time")
    action: Action = "restart" if needs_restart else "update" if reasons else "keep"
    return Change(action, one.worker_id, spec, "; ".join(reasons))


def _with_new_first(
    changes: Sequence[Change], running: Mapping[str, Running], old_engines: Engines, new_engines: Engines
) -> list[Change]:
    """Mark the restarts of which the old process may stay until the new process is ready.

    A worker that a wanted worker will replace is stopped only if a process that is started needs its port or GPU.
    """
    actions = {change.worker_id: change.action for change in changes} | {"": "stop"}
    replaced = {
        one.worker_id
        for one in running.values()
        if actions[one.worker_id] == "stop" and actions.get(one.replaced_by, "stop") != "stop"
    }
    held = {one.worker_id: _claims_of(one.spec, old_engines, one.placed) for one in running.values() if one.has_process}
    ending = {name: claims for name, claims in held.items() if actions[name] == "restart" or name in replaced}
    staying = [claims for name, claims in held.items() if actions[name] in ("keep", "update")]
    needs = _needs_between([*_started(changes, running, new_engines)], ending, staying)
    return [*_marked(changes, running, needs, replaced - needs.keys())]


def _started(
    changes: Sequence[Change], running: Mapping[str, Running], engines: Engines
) -> Iterator[tuple[Change, Claims]]:
    """Yield the changes that start a process, or give a cold worker another table, with the claims."""
    for change in changes:
        is_cold = change.action == "update" and running[change.worker_id].is_cold
        if change.spec is not None and (is_cold or change.action in ("start", "restart")):
            placed = running[change.worker_id].placed if change.worker_id else ()
            yield change, _claims_of(change.spec, engines, placed)


def _needs_between(
    started: Sequence[tuple[Change, Claims]], ending: Mapping[str, Claims], staying: Sequence[Claims]
) -> dict[str, str]:
    """Return why a process cannot stay until its successor is ready, by its worker's id; without those that can.

    Either its successor needs a resource of another process, or another process that is started needs a resource of it.
    """
    found: dict[str, str] = {}
    for change, other_id, what in _clashes(started, ending, staying):
        if change.worker_id in ending:
            who = "both need" if other_id == change.worker_id else f"worker {other_id} still has"
            found.setdefault(change.worker_id, what.format(who))
    left = {worker_id: claims for worker_id, claims in ending.items() if worker_id not in found}
    for change, other_id, what in _clashes(started, left, staying):
        who = f"worker {change.worker_id}" if change.worker_id else "a new worker"
        found.setdefault(other_id, what.format(f"{who} needs"))
    return found


def _clashes(
    started: Sequence[tuple[Change, Claims]], ending: Mapping[str, Claims], staying: Sequence[Claims]
) -> Iterator[tuple[Change, str, str]]:
    """Yield a change, the id of a worker that has a resource that the new process needs, and a text with it."""
    for change, new in started:
        others = [claims for other, claims in started if other is not change]
        overfull = overfull_gpus(new, [*ending.values(), *staying, *others])
        for other_id, old in ending.items():
            if text := _shared(new, old, overfull):
                yield change, other_id, text


def _shared(new: Claims, old: Claims, overfull: Collection[int]) -> str:
    """Return the port, or those of these GPUs, that both have, with a place for the words before it; empty if none."""
    if new.address is not None and do_share_port(new, old):
        return f"{{}} port {new.address[1]}"
    shared = sorted(number for number in overfull if number in old.gpus or EVERY_GPU in old.gpus)
    if shared and EVERY_GPU in {*new.gpus, *old.gpus}:
        return "without gpu_ids each may use every GPU"
    return f"{{}} GPU {', '.join(map(str, shared))}" if shared else ""


def _marked(
    changes: Sequence[Change], running: Mapping[str, Running], needs: Mapping[str, str], left_out: Collection[str]
) -> Iterator[Change]:
    """Yield the changes with the effect of the needs that keep processes from staying."""
    copies = _copies_that_stay(changes)
    for change in changes:
        one, need = running.get(change.worker_id), needs.get(change.worker_id, "")
        if change.action == "stop" and need:
            yield attrs.evolve(change, why=need)
        elif change.action == "restart" and change.spec is not None and one is not None and one.has_process:
            is_in_the_way = bool(one.spec.port and need)  # another process waits for its port
            rolls = one.is_ready and not is_in_the_way and copies[change.spec.model_name] > 1
            gap = _ROLLS if rolls else _gap(change.spec, need) if one.serves else ""
            yield attrs.evolve(change, new_first=not need and one.serves, rolls=rolls, gap=gap)
        elif change.worker_id not in left_out:
            yield change


def _copies_that_stay(changes: Sequence[Change]) -> Counter[str]:
    """Return the numbers of copies that the models have before and after the changes, by the models' names."""
    specs = (change.spec for change in changes if change.worker_id and change.spec is not None)
    return Counter(spec.model_name for spec in specs if spec.replicas.max > 1)


def _gap(spec: ManagedWorkerConfig, needs: str) -> str:
    if spec.load == "on_demand":
        return "with a gap: it is loaded again once its model is wanted"
    return f"with a gap: {needs}" if needs else "without a gap: the new process starts beside it"


def _claims_of(spec: ManagedWorkerConfig, engines: Engines, placed: Sequence[int]) -> Claims:
    """Return the claims of a worker, by the variable of its engine for GPUs.

    A worker with `gpus` needs the GPUs again that were chosen for it: whether others are free is known at its start.
    A share of unknown size, as of SGLang, counts as the whole GPU: two processes of the worker may not fit there.
    """
    devices = engines.get(spec.backend, EngineSettings()).devices
    by_variable = {VISIBLE: spec.env[devices]} if devices in spec.env else {}
    claims = claims_of(attrs.evolve(spec, env=by_variable), has_gpus=True)
    if spec.gpus is not None:
        return attrs.evolve(claims, gpus=dict.fromkeys(placed, math.inf))
    return attrs.evolve(claims, gpus={number: share or math.inf for number, share in claims.gpus.items()})


def _needs_of(spec: ManagedWorkerConfig) -> str:
    """Return the facts that its process was started with, as text: if they differ, it must be restarted."""
    values = attrs.asdict(spec).items()
    return text_of({name: value for name, value in values if reload_of(ManagedWorkerConfig, name) != "now"})


def _how_worker_changed(old: ManagedWorkerConfig, new: ManagedWorkerConfig) -> list[str]:
    return [
        *differences(attrs.asdict(old), attrs.asdict(new), without=("env", "backend_args")).values(),
        *differences(old.backend_args, new.backend_args).values(),
        *hidden_differences("env", old.env, new.env),
    ]


# Values.


def python_of_engine(engine: EngineSettings | None) -> str | None:
    """Return the interpreter that an engine's section names."""
    return engine.python if engine else None


def text_of(value: Any) -> str:
    """Return a text that is the same for two values only if they mean the same: 1, 1.0 and true do not."""
    plain = attrs.asdict(value) if isinstance(value, ManagedWorkerConfig | ExternalRoute) else value
    return json.dumps(plain, sort_keys=True, default=str)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, str]:
    """Return how each key has changed."""
    names = (name for name in {**old, **new} if name not in without)
    changed = (name for name in names if text_of(old.get(name)) != text_of(new.get(name)))
    return {name: how_changed(name, old.get(name), new.get(name)) for name in changed}


def hidden_differences(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys that have changed, without their values, which are secret."""
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            how = "is new" if name not in old else "is gone" if name not in new else "has changed"
            yield f"{section}.{name} {how}"


def how_changed(name: str, before: Any, after: Any) -> str:
    """Return how a value has changed, old -> new; secrets are masked."""
    old, new = _shown(name, before), _shown(name, after)
    return f"{name}: {old} -> {new}" if old != new else f"{name} has changed"


def _shown(name: str, value: Any) -> str:
    """Return a value for people: secrets are masked, long values are cut."""
    if value is None:
        return "not set"
    text = json.dumps(masked({name: value})[name], ensure_ascii=False, default=str)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"
