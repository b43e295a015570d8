"""Room for models: which on-demand workers are started, woken, drained, put to sleep or stopped.

`decide` is sync, has no clock and keeps nothing. The loader gathers its input, carries out its actions, and
asks again after every change, and at `look_at`.
A copy above the fewest of its model may be a candidate as well: it only goes, for good, for the first copy of another.

The models that are wanted have their turns, the oldest waiter first. Resources for each of them are kept from
the later models, so that models that need the same room are loaded in the order of the requests for them.

A worker leaves its room for another worker if it is not missed: it has answered everything, and for PAUSE_S no request
arrived. It also does if it had its time (`min_loaded_s`) and the other model has the older waiter. Nothing is evicted
while it has requests, or while it is being loaded.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Literal

from attrs import evolve, frozen

from ichat.preflight.claims import Claims, do_share_gpu, do_share_port, fit, overfull_gpus
from ichat.routing.queue import Demand
from ichat.supervisor.remote_wait import GivenRoom, RemoteRoom, RemoteWait

PAUSE_S = 1.0
"""A worker that has just answered keeps its room for this time: its clients often return at once."""

Phase = Literal["cold", "starting", "ready", "draining", "asleep", "waking", "ending", "down"]
"""`starting` has a process and is not ready; `draining` was drained by a decision. `ending` is being stopped or put to
sleep, for any reason, so its room is freed without an action; `down` has failed to load."""
_UP: frozenset[Phase] = frozenset(("ready", "starting", "waking"))
_HOLDS_NOTHING: frozenset[Phase] = frozenset(("cold", "down"))
_HOLDS_NO_GPU: frozenset[Phase] = frozenset(("cold", "down", "asleep"))


@frozen
class SwapCandidate:
    """An on-demand worker as it is now. Times are of the loader's clock."""

    worker_id: str
    model: str
    phase: Phase
    requests: int = 0
    """In progress there, by the gateway's own count and the worker's report."""
    ready_since: float = -math.inf
    idle_since: float = math.inf
    """When its last request ended, or when it became ready; `inf` while it has requests."""
    claims: Claims = Claims()
    """Its GPUs and its port, which it keeps while it sleeps. Workers that are no candidates are left out of account:
    the start itself finds them in its way."""
    places: Sequence[Claims] = ()
    """The places where it could be loaded, the best first, if the gateway chooses its GPUs and it has none yet."""
    idle_s: float = 0.0
    min_loaded_s: float = 30.0
    when_idle: Literal["stop", "sleep"] = "stop"
    """`stop` as well where its engine cannot sleep."""
    may_start_at: float = -math.inf
    """When it may be loaded again after a failure; `inf`: not before an operator asks for it."""
    remote: RemoteWait | None = None
    """Its wait for GPUs on a cluster; None: it has none."""
    is_spare: bool = False
    """Whether it is a copy above the fewest of its model, not loaded on demand: it may only end, for good."""


@frozen
class SwapSet:
    """Models of which only some may be loaded at once; each worker of theirs that has a process counts."""

    members: frozenset[str]
    loaded_max: int = 1


@frozen
class SwapAction:
    """An action for now. All of a decision's actions can be begun at once."""

    kind: Literal["start", "wake", "drain", "resume", "stop", "sleep", "end"]
    """`end` is for good, after a drain."""
    worker_id: str
    why: Literal["request", "room", "idle"]
    place: Claims | None = None
    """Of a start: where, if the gateway chooses the GPUs."""


@frozen
class Decision:
    """What to do, and when to decide again if nothing changes before."""

    actions: Sequence[SwapAction]
    look_at: float


@frozen
class LoadPlan:
    """How a model is loaded: by which worker, and after which actions."""

    worker: SwapCandidate
    evicts: Sequence[SwapCandidate]
    """The workers that have to go, or are going."""
    stops: frozenset[str]
    """The ids of those for which it is not enough to sleep."""
    older: Sequence[str]
    """The ids of workers that are loaded before, for older waiters, in room that this worker needs too."""
    at: float
    """When it may begin, as far as the time alone decides that; `inf` where it does not."""

    @property
    def waits_for(self) -> list[str]:
        """The ids of the workers that are loaded, end, or answer their last requests before this worker is loaded."""
        itself = [self.worker.worker_id] if self.worker.phase in ("draining", "ending") else []
        busy = [one.worker_id for one in self.evicts if one.requests or one.phase not in ("ready", "asleep")]
        return [*self.older, *itself, *busy]


def decide(
    now: float, workers: Sequence[SwapCandidate], demand: Mapping[str, Demand], sets: Sequence[SwapSet]
) -> Decision:
    """Return the actions for now. `demand` has the waiters by model, commands that ask for a model included."""
    turns = _Turns(now, workers, demand, sets)
    for model in turns.wanted():
        turns.serve(model)
    turns.free_elsewhere()
    turns.resume_others()
    turns.unload_idle()
    return Decision(turns.actions, turns.look_at)


def evictions_for(
    model: str, now: float, workers: Sequence[SwapCandidate], demand: Mapping[str, Demand], sets: Sequence[SwapSet]
) -> LoadPlan | None:
    """Return how a model would be loaded for a request at this moment; None if it is loaded or cannot be."""
    if model not in demand or demand[model].since == math.inf:
        demand = {**demand, model: Demand(1, now)}
    turns = _Turns(now, workers, demand, sets)
    plans = {name: turns.serve(name) for name in turns.wanted()}
    return plans.get(model)


class _Rank(IntEnum):
    """How much is lost if a worker goes, among those that may go at the same time."""

    GOING = 0
    SPARE = 1
    ASLEEP = 2
    UNNEEDED = 3
    BUSY_SPARE = 4
    DRAINING = 5
    NEEDED = 6


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
        self.chosen: dict[str, Claims] = {}
        """The claims of reserved workers, where they will be loaded."""
        self.given = GivenRoom()
        """The room on clusters that older waiters get."""
        self.leaving = set[str]()
        """Workers that go, or are drained, for older waiters."""
        self.actions: list[SwapAction] = []
        self.look_at = math.inf

    def wanted(self) -> list[str]:
        """Return the models that have waiters and no worker that serves them or soon will, oldest waiter first."""
        up = {one.model for one in self.workers if one.phase in _UP}
        models = dict.fromkeys(one.model for one in self.workers if one.model not in up and not one.is_spare)
        return sorted((model for model in models if self._since(model) < math.inf), key=self._since)

    def serve(self, model: str) -> LoadPlan | None:
        """Do all that can be done now so that this model is loaded, and keep its other needs from the other models.

        It evicts nothing before everything that it needs may go: otherwise the room would stand empty.
        """
        plan = self._plan(model)
        if plan is None:
            return None
        self.reserved.add(plan.worker.worker_id)
        self.chosen[plan.worker.worker_id] = plan.worker.claims
        if plan.at > self.now:
            self._again_at(plan.at)
        elif plan.evicts:
            for one in plan.evicts:
                self._evict(one, is_end=one.worker_id in plan.stops)
        else:
            kind = "wake" if plan.worker.phase == "asleep" else "start"
            place = plan.worker.claims if plan.worker.places else None
            self.actions.append(SwapAction(kind, plan.worker.worker_id, "request", place))
        return plan

    def free_elsewhere(self) -> None:
        """Evict workers on clusters for workers that wait there and are wanted, the oldest waiter first."""
        for worker in sorted(self.workers, key=lambda one: self._since(one.model)):
            if worker.remote is not None and self._since(worker.model) < math.inf:
                self._free_for(worker, worker.remote)

    def _free_for(self, worker: SwapCandidate, wait: RemoteWait) -> None:
        plans = [(plan, room) for room in self.given.rooms_for(wait) if (plan := self._plan_at(worker, room))]
        if not plans:
            return
        best, room = min(plans, key=lambda one: self._effort(one[0]))
        if best.at < math.inf:
            going = {one.worker_id for one in best.evicts}
            self.given.give(wait, room, going)
            self.reserved |= going
        begins_at = max(wait.evict_at, best.at)
        if begins_at > self.now:
            self._again_at(begins_at)
        for one in best.evicts:
            if begins_at <= self.now:
                self._evict(one, is_end=True)
            elif one.phase == "draining":
                self.leaving.add(one.worker_id)

    def _plan_at(self, worker: SwapCandidate, room: RemoteRoom) -> LoadPlan | None:
        """Return which workers would go from a node, those that cost least; None if all together are too few."""
        since, missing, evicts = self._since(worker.model), self.given.missing(room), list[SwapCandidate]()
        holders, _ = self._apart([one for one in self.workers if one.worker_id in room.holders])
        for one in sorted(holders, key=lambda one: self._cost(one, since)):
            if missing > 0:
                evicts.append(one)
                missing -= room.holders[one.worker_id]
        if missing > 0:
            return None
        at = max((self._may_go_at(one, since) for one in evicts), default=-math.inf)
        return LoadPlan(worker, evicts, frozenset(), [], at)

    def resume_others(self) -> None:
        """Reverse the drains that are not needed any more."""
        for one in self.workers:
            if one.phase == "draining" and one.worker_id not in self.leaving and not one.is_spare:
                self.actions.append(SwapAction("resume", one.worker_id, "room"))

    def unload_idle(self) -> None:
        """Unload workers that have been idle for their `idle_s`."""
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
        """Return the best way to load a model; None if it has none now, or needs none since its drain is reversed."""
        mine = [one for one in self.workers if one.model == model and not one.is_spare]
        if any(one.phase == "draining" and one.worker_id not in self.leaving for one in mine):
            return None
        for one in mine:
            if one.may_start_at > self.now:
                self._again_at(one.may_start_at)
        loadable = [placed for one in mine if one.may_start_at <= self.now for placed in _at_each_place(one)]
        return min(map(self._plan_of, loadable), key=self._effort, default=None)

    def _plan_of(self, worker: SwapCandidate) -> LoadPlan:
        """Return how this worker would be loaded.

        A worker goes if its claims do not fit beside the new worker's. If the rest does not fit together either, those
        go that cost least, GPU by GPU, and then those that are too many for a swap set. Workers that are reserved for
        older waiters do not go: the new worker waits for them.
        """
        since = self._since(worker.model)
        evicts, older = self._apart(self._in_the_way(worker, since))
        stops = {one.worker_id for one in evicts if do_share_port(one.claims, worker.claims)}
        for swap_set in self.sets:
            if worker.model in swap_set.members:
                surplus, reserved = self._surplus(worker, swap_set, evicts, since)
                stops.update(one.worker_id for one in surplus)
                evicts += [one for one in surplus if one not in evicts]
                older += reserved
        waits = bool(older) or worker.phase in ("draining", "ending")
        at = math.inf if waits else max((self._may_go_at(one, since) for one in evicts), default=-math.inf)
        return LoadPlan(worker, evicts, frozenset(stops), list(dict.fromkeys(older)), at)

    def _apart(self, found: Sequence[SwapCandidate]) -> tuple[list[SwapCandidate], list[str]]:
        """Return the workers that may go, and the ids of the others, which are reserved for older waiters."""
        going = [one for one in found if one.worker_id not in self.reserved]
        return going, [one.worker_id for one in found if one.worker_id in self.reserved]

    def _in_the_way(self, worker: SwapCandidate, since: float) -> list[SwapCandidate]:
        """Return the workers with claims that must go, or be waited for, before a worker can be loaded."""
        others = ((one, self._held(one)) for one in self.workers if one.worker_id != worker.worker_id)
        rest = [(one, held) for one, held in others if held is not None]
        found = [one for one, held in rest if not fit(worker.claims, held)]
        rest = [(one, held) for one, held in rest if one not in found]
        while overfull_gpus(worker.claims, [held for _, held in rest]):
            sharing = [one for one, held in rest if do_share_gpu(worker.claims, held)]
            goes = self._cheapest(sharing, since)
            found += goes
            rest = [(one, held) for one, held in rest if one not in goes]
        return found

    def _cheapest(self, sharing: Sequence[SwapCandidate], since: float) -> Sequence[SwapCandidate]:
        """Return the worker that costs least; all of them if all are reserved, since each is waited for then."""
        going, _ = self._apart(sharing)
        return [min(going, key=lambda one: self._cost(one, since))] if going else sharing

    def _held(self, one: SwapCandidate) -> Claims | None:
        """Return the claims that a worker has now, or will have since it is reserved; None if there are none."""
        if one.worker_id in self.reserved or one.phase not in _HOLDS_NO_GPU:
            return self.chosen.get(one.worker_id, one.claims)
        return None if one.phase in _HOLDS_NOTHING else one.claims.without_gpus()

    def _surplus(
        self, worker: SwapCandidate, swap_set: SwapSet, evicts: Sequence[SwapCandidate], since: float
    ) -> tuple[list[SwapCandidate], list[str]]:
        """Return the workers that have to stop for a worker of this set, and the ids of those to wait for."""
        going, reserved = self._apart(
            [one for one in self.workers if one.worker_id != worker.worker_id and self._counts(one, swap_set)]
        )
        going.sort(key=lambda one: (one not in evicts, self._cost(one, since)))
        surplus = max(len(going) + len(reserved) - swap_set.loaded_max + 1, 0)
        return going[:surplus], reserved if surplus > len(going) else []

    def _counts(self, one: SwapCandidate, swap_set: SwapSet) -> bool:
        is_member = one.model in swap_set.members and not one.is_spare
        return is_member and (one.phase not in _HOLDS_NOTHING or one.worker_id in self.reserved)

    def _may_go_at(self, one: SwapCandidate, since: float) -> float:
        """Return when a worker may be drained or evicted for a waiter since then; `inf` if that is not known."""
        if one.phase in ("asleep", "ending") or one.worker_id in self.leaving:
            return -math.inf
        if one.is_spare and one.phase != "ready":
            return -math.inf
        if one.phase in ("starting", "waking"):
            return math.inf
        when_idle = math.inf if self._is_needed(one) else one.idle_since + PAUSE_S
        had_its_time = one.ready_since + one.min_loaded_s if since < self._since(one.model) else math.inf
        return min(when_idle, had_its_time)

    def _cost(self, one: SwapCandidate, since: float) -> tuple[float, ...]:
        """Return the loss if this worker goes, for sorting: the soonest to go and the least missed sorts first."""
        was_used = one.idle_since > one.ready_since
        may_go_at = max(self._may_go_at(one, since), self.now)
        return (may_go_at, self._rank(one), -self._since(one.model), was_used, one.idle_since)

    def _rank(self, one: SwapCandidate) -> _Rank:
        if one.phase == "ending" or one.worker_id in self.leaving:
            return _Rank.GOING
        if one.is_spare:
            return _Rank.BUSY_SPARE if one.requests else _Rank.SPARE
        if one.phase == "asleep":
            return _Rank.ASLEEP
        if not self._is_needed(one):
            return _Rank.UNNEEDED
        return _Rank.DRAINING if one.phase == "draining" else _Rank.NEEDED

    def _effort(self, plan: LoadPlan) -> tuple[object, ...]:
        """Return the effort of a way to load a model, for sorting: the soonest, then the fewest evictions, first."""
        since, phase = self._since(plan.worker.model), plan.worker.phase
        costs = sorted((self._cost(one, since) for one in plan.evicts), reverse=True)
        return (max(plan.at, self.now), costs, phase != "asleep", phase == "down")

    def _evict(self, one: SwapCandidate, *, is_end: bool) -> None:
        is_new = one.worker_id not in self.leaving
        self.leaving.add(one.worker_id)
        if not is_new or one.phase == "ending":
            return
        if one.is_spare:
            self.actions.append(SwapAction("end", one.worker_id, "room"))
        elif not one.requests:
            kind = "stop" if is_end or one.phase == "asleep" else one.when_idle
            self.actions.append(SwapAction(kind, one.worker_id, "room"))
        elif one.phase == "ready":
            self.actions.append(SwapAction("drain", one.worker_id, "room"))


def _at_each_place(one: SwapCandidate) -> Sequence[SwapCandidate]:
    """Return a worker with the claims that it would have at each of its places."""
    return [evolve(one, claims=place) for place in one.places] or [one]
