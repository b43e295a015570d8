"""What goes to make room: which on-demand workers are started, woken, drained, put to sleep or stopped.

`decide` is sync, has no clock and keeps nothing. The loader gathers what it takes, carries out what it returns, and
asks again after every change, and at `look_at`.

The models that are wanted take their turns, the one with the oldest waiter first. What one of them needs is kept from
those after it, so that models that need the same room are loaded in the order in which they were asked for.

A worker leaves its room for another one if nobody misses it (it has answered everything, and no request has come for
PAUSE_S), or if it had its time (`min_loaded_s`) and the other model has the older waiter. Nothing is evicted while it
has requests, or while it is being loaded.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import frozen

from ichat.routing.queue import Demand

PAUSE_S = 1.0
"""A worker that has just answered keeps its room for so long: its clients often come back at once."""

Phase = Literal["cold", "starting", "ready", "draining", "asleep", "waking", "ending", "down"]
"""`starting` has a process and is not ready; `draining` was drained by a decision; `ending` is being stopped or put to
sleep, for whatever reason, so that nothing has to be done to get its room; `down` has failed to load."""
_UP: frozenset[Phase] = frozenset(("ready", "starting", "waking"))
_HOLDS_NOTHING: frozenset[Phase] = frozenset(("cold", "down"))
_HOLDS_NO_GPU: frozenset[Phase] = frozenset(("cold", "down", "asleep"))


@frozen
class SwapCandidate:
    """One on-demand worker as it is now. Times are of the loader's clock."""

    worker_id: str
    model: str
    phase: Phase
    requests: int = 0
    """In progress there, by the gateway's own count and the worker's report."""
    ready_since: float = -math.inf
    idle_since: float = math.inf
    """When its last request ended, or when it became ready; `inf` while it has requests."""
    conflicts: frozenset[str] = frozenset()
    """The ids of the workers that cannot stand beside it. Those that are no candidates are left out of account:
    the start itself finds them in its way."""
    port_conflicts: frozenset[str] = frozenset()
    """Those of them that have its port, which a worker keeps while it sleeps."""
    idle_s: float = 0.0
    min_loaded_s: float = 30.0
    when_idle: Literal["stop", "sleep"] = "stop"
    """`stop` as well where its engine cannot sleep."""
    may_start_at: float = -math.inf
    """When it may be loaded again after a failure; `inf`: not before an operator asks for it."""


@frozen
class SwapSet:
    """Models of which only some may be loaded at once; each worker of theirs that has a process counts."""

    members: frozenset[str]
    loaded_max: int = 1


@frozen
class SwapAction:
    """One thing to do now. All of a decision's actions can be begun at once."""

    kind: Literal["start", "wake", "drain", "resume", "stop", "sleep"]
    worker_id: str
    why: Literal["request", "room", "idle"]


@frozen
class Decision:
    """What to do, and when to decide again if nothing changes before."""

    actions: Sequence[SwapAction]
    look_at: float


@frozen
class LoadPlan:
    """How a model is loaded: by which worker, and what has to happen before that."""

    worker: SwapCandidate
    evicts: Sequence[SwapCandidate]
    """The workers that have to go, or are going."""
    stops: frozenset[str]
    """The ids of those for which it is not enough to sleep."""
    older: Sequence[str]
    """The ids of workers that are loaded before, for older waiters, in room that this one needs too."""
    at: float
    """When it may begin, as far as the time alone decides that; `inf` where it does not."""

    @property
    def waits_for(self) -> list[str]:
        """The ids of the workers that are loaded, end, or answer their last requests before this one is loaded."""
        itself = [self.worker.worker_id] if self.worker.phase in ("draining", "ending") else []
        busy = [one.worker_id for one in self.evicts if one.requests or one.phase not in ("ready", "asleep")]
        return [*self.older, *itself, *busy]


def decide(
    now: float, workers: Sequence[SwapCandidate], demand: Mapping[str, Demand], sets: Sequence[SwapSet]
) -> Decision:
    """Return what to do now. `demand` says by model who waits, commands that ask for a model included."""
    turns = _Turns(now, workers, demand, sets)
    for model in turns.wanted():
        turns.serve(model)
    turns.resume_others()
    turns.unload_idle()
    return Decision(turns.actions, turns.look_at)


def evictions_for(
    model: str, now: float, workers: Sequence[SwapCandidate], demand: Mapping[str, Demand], sets: Sequence[SwapSet]
) -> LoadPlan | None:
    """Return how a model would be loaded for a request that came now; None if it is loaded or cannot be."""
    if model not in demand or demand[model].since == math.inf:
        demand = {**demand, model: Demand(1, now)}
    turns = _Turns(now, workers, demand, sets)
    plans = {name: turns.serve(name) for name in turns.wanted()}
    return plans.get(model)


class _Turns:
    """A decision while it is made. Each model that is served sees what those before it were given."""

    def __init__(
        self, now: float, workers: Sequence[SwapCandidate], demand: Mapping[str, Demand], sets: Sequence[SwapSet]
    ) -> None:
        self.now = now
        self.workers = workers
        self.demand = demand
        self.sets = sets
        self.reserved = set[str]()
        """Workers that older waiters get, now or as soon as there is room."""
        self.leaving = set[str]()
        """Workers that go, or are drained, for older waiters."""
        self.actions: list[SwapAction] = []
        self.look_at = math.inf

    def wanted(self) -> list[str]:
        """Return the models that have waiters and no worker that serves them or soon will, oldest waiter first."""
        up = {one.model for one in self.workers if one.phase in _UP}
        models = dict.fromkeys(one.model for one in self.workers if one.model not in up)
        return sorted((model for model in models if self._since(model) < math.inf), key=self._since)

    def serve(self, model: str) -> LoadPlan | None:
        """Do what can be done now so that this model is loaded, and keep the rest of what it needs from the others.

        It evicts nothing before everything that it needs may go: otherwise the room would stand empty.
        """
        plan = self._plan(model)
        if plan is None:
            return None
        self.reserved.add(plan.worker.worker_id)
        if plan.at > self.now:
            self._again_at(plan.at)
        elif plan.evicts:
            for one in plan.evicts:
                self._evict(one, is_end=one.worker_id in plan.stops)
        else:
            kind = "wake" if plan.worker.phase == "asleep" else "start"
            self.actions.append(SwapAction(kind, plan.worker.worker_id, "request"))
        return plan

    def resume_others(self) -> None:
        """Take back the drains that nobody needs any more."""
        for one in self.workers:
            if one.phase == "draining" and one.worker_id not in self.leaving:
                self.actions.append(SwapAction("resume", one.worker_id, "room"))

    def unload_idle(self) -> None:
        """Unload what has been idle for its `idle_s`."""
        for one in self.workers:
            if one.phase != "ready" or not one.idle_s or one.worker_id in self.leaving or self._is_needed(one):
                continue
            if one.idle_since + one.idle_s <= self.now:
                self.actions.append(SwapAction(one.when_idle, one.worker_id, "idle"))
            else:
                self._again_at(one.idle_since + one.idle_s)

    def _since(self, model: str) -> float:
        """Return when the oldest waiter for a model began to wait; `inf` if there is none."""
        return self.demand[model].since if model in self.demand else math.inf

    def _is_needed(self, one: SwapCandidate) -> bool:
        return one.requests > 0 or self._since(one.model) < math.inf

    def _again_at(self, time: float) -> None:
        self.look_at = min(self.look_at, time)

    def _plan(self, model: str) -> LoadPlan | None:
        """Return the best way to load a model; None if it has none now, or needs none since its drain is taken back."""
        mine = [one for one in self.workers if one.model == model]
        if any(one.phase == "draining" and one.worker_id not in self.leaving for one in mine):
            return None
        for one in mine:
            if one.may_start_at > self.now:
                self._again_at(one.may_start_at)
        plans = [self._plan_of(one) for one in mine if one.may_start_at <= self.now]
        return min(plans, key=self._effort, default=None)

    def _plan_of(self, worker: SwapCandidate) -> LoadPlan:
        since = self._since(worker.model)
        in_the_way = [one for one in self.workers if one is not worker and self._is_in_the_way(one, worker)]
        older = [one.worker_id for one in in_the_way if one.worker_id in self.reserved]
        evicts = [one for one in in_the_way if one.worker_id not in self.reserved]
        stops = {one.worker_id for one in evicts if _have_one_port(one, worker)}
        for one in self.sets:
            if worker.model not in one.members:
                continue
            others = [other for other in self.workers if other is not worker and self._counts(other, one)]
            going = [other for other in others if other.worker_id not in self.reserved]
            going.sort(key=lambda other: (other not in evicts, self._cost(other, since)))
            surplus = max(len(others) - one.loaded_max + 1, 0)
            if surplus > len(going):
                older += [other.worker_id for other in others if other.worker_id in self.reserved]
            stops.update(other.worker_id for other in going[:surplus])
            evicts += [other for other in going[:surplus] if other not in evicts]
        at = max((self._may_go_at(one, since) for one in evicts), default=-math.inf)
        if older or worker.phase in ("draining", "ending"):
            at = math.inf
        return LoadPlan(worker, evicts, frozenset(stops), list(dict.fromkeys(older)), at)

    def _is_in_the_way(self, one: SwapCandidate, worker: SwapCandidate) -> bool:
        """Return whether one has, or is to have, what a worker needs to be loaded."""
        if one.worker_id not in worker.conflicts and worker.worker_id not in one.conflicts:
            return False
        free = _HOLDS_NOTHING if _have_one_port(one, worker) else _HOLDS_NO_GPU
        return one.phase not in free or one.worker_id in self.reserved

    def _counts(self, one: SwapCandidate, swap_set: SwapSet) -> bool:
        return one.model in swap_set.members and (one.phase not in _HOLDS_NOTHING or one.worker_id in self.reserved)

    def _may_go_at(self, one: SwapCandidate, since: float) -> float:
        """Return when a worker may be drained or evicted for one who waits since then; `inf` if that is not known."""
        if one.phase in ("asleep", "ending") or one.worker_id in self.leaving:
            return -math.inf
        if one.phase in ("starting", "waking"):
            return math.inf
        when_idle = math.inf if self._is_needed(one) else one.idle_since + PAUSE_S
        had_its_time = one.ready_since + one.min_loaded_s if since < self._since(one.model) else math.inf
        return min(when_idle, had_its_time)

    def _cost(self, one: SwapCandidate, since: float) -> tuple[float, ...]:
        """Return what is lost if this one goes, to be compared: what goes soonest, and is missed least, comes first."""
        if one.phase == "ending" or one.worker_id in self.leaving:
            rank = 0
        elif one.phase == "asleep":
            rank = 1
        elif not self._is_needed(one):
            rank = 2
        else:
            rank = 3 if one.phase == "draining" else 4
        was_used = one.idle_since > one.ready_since
        return (max(self._may_go_at(one, since), self.now), rank, -self._since(one.model), was_used, one.idle_since)

    def _effort(self, plan: LoadPlan) -> tuple[object, ...]:
        """Return what a way to load a model takes, to be compared: the soonest, then what evicts least, comes first."""
        since, phase = self._since(plan.worker.model), plan.worker.phase
        costs = sorted((self._cost(one, since) for one in plan.evicts), reverse=True)
        return (max(plan.at, self.now), costs, phase != "asleep", phase == "down")

    def _evict(self, one: SwapCandidate, *, is_end: bool) -> None:
        is_new = one.worker_id not in self.leaving
        self.leaving.add(one.worker_id)
        if not is_new or one.phase == "ending":
            return
        if not one.requests:
            kind = "stop" if is_end or one.phase == "asleep" else one.when_idle
            self.actions.append(SwapAction(kind, one.worker_id, "room"))
        elif one.phase == "ready":
            self.actions.append(SwapAction("drain", one.worker_id, "room"))


def _have_one_port(one: SwapCandidate, other: SwapCandidate) -> bool:
    return other.worker_id in one.port_conflicts or one.worker_id in other.port_conflicts
