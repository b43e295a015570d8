"""Loads the models of on-demand workers when they are wanted, and makes room for them.

`swaps.decide` returns the actions. The loader gives it the facts, and has the actions carried out. It does so when a
worker changes, a request begins to wait, or a worker has become idle. Nothing here waits for a single worker only.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import trio

from ichat import errors
from ichat.errors import ApiError
from ichat.fleet.load_view import EvictionView, LoadView, ObstacleView
from ichat.fleet.waiting import wait_lease
from ichat.fleet.worker_load import LoadKind
from ichat.hardware.gpus import has_nvidia
from ichat.listeners import Listeners
from ichat.routing.availability import Draining, Full, NotReady, Ready, Refusal, Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.choice import RETRY_AFTER_S
from ichat.routing.queue import Demand
from ichat.routing.request import Lease, RoutingRequest
from ichat.supervisor.books import PossiblePlaces, is_placed_here
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.copies import Copies, is_scaled
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.remote_rooms import RemoteRooms
from ichat.supervisor.swaps import LoadPlan, SwapAction, SwapCandidate, SwapSet, decide, evictions_for
from ichat.supervisor.watched_worker import WatchedWorker

log = logging.getLogger(__name__)

GAP_S = 0.01
"""The shortest time between two decisions."""
BUG_S = 1.0
"""The pause after a bug in a decision, before the next decision."""
END_S = 30.0
"""How long a command waits for an unloaded process, beside the times for its requests and its end."""


class Loader:
    """Decides again and again which on-demand workers have a process."""

    def __init__(
        self, context: SupervisorContext, balancer: Balancer, workers: Mapping[str, ManagedWorker], copies: Copies
    ) -> None:
        """`workers` are all managed workers; of those that are not loaded on demand, spare `copies` may be ended."""
        self._copies = copies
        self.counts = context.counts
        self._times = context.managed.times
        self._context = context
        self._table = context.table
        self._directory = context.directory
        self._balancer = balancer
        self._workers = workers
        self._watched: dict[str, WatchedWorker] = {}
        self._commands: Counter[str] = Counter()
        """How many commands wait for each model to be loaded."""
        self._is_due = False
        """Whether it decides again soon."""
        self._woken: Listeners[[]] = Listeners()
        self._look_at = math.inf
        self.is_pressed = False
        """Whether requests wait for a model, by the newest decision."""
        self._has_gpus = has_nvidia()
        self._places = PossiblePlaces(workers, context)
        self._remote = RemoteRooms(workers, context.clusters)

    def __repr__(self) -> str:
        return f"<Loader {[watched.worker for watched in self._watched.values()]}>"

    def review(self) -> None:
        """Decide again soon: there may be other workers, or another configuration."""
        self._is_due = True
        self._woken()

    async def run_forever(self) -> None:
        """Decide, and have that carried out."""
        self._table.changed.add(self._on_worker_change)
        self._balancer.wanted.add(self._on_wanted)
        while True:
            await self._context.gate.wait_open()
            self._is_due = False
            pause_s = GAP_S
            try:
                await self._places.read(one for one in self._workers.values() if self._may_be_placed(one))
                self._look_at = self._decide(trio.current_time())
            except Exception:
                log.exception("a bug in deciding which models are loaded")
                self._look_at, pause_s = math.inf, BUG_S
            await trio.sleep(pause_s)
            with trio.move_on_at(self._look_at):
                while not self._is_due:
                    await self._woken.wait()

    def _may_be_placed(self, worker: ManagedWorker) -> bool:
        """Return whether requests wait for a worker with `gpus`."""
        needs_place = bool(worker.spec.gpus) and is_placed_here(worker.spec)
        return worker.is_on_demand and needs_place and self._is_wanted(worker)

    def _is_wanted(self, worker: ManagedWorker) -> bool:
        return bool(self._balancer.demand(*worker.record.names).waiting)

    def _on_worker_change(self) -> None:
        if self._watched:
            self.review()

    def _on_wanted(self, _model: str) -> None:
        self.review()

    def _on_idle(self, watched: WatchedWorker) -> None:
        """Decide again if it may change anything now that a worker has no request any more."""
        idle_s = watched.worker.spec.idle_s
        if self.is_pressed or watched.worker.phase != "ready" or (idle_s and watched.busy_at + idle_s < self._look_at):
            self.review()

    def _decide(self, now: float) -> float:
        """Decide and begin to carry that out; return when to decide again if nothing changes until then."""
        candidates = self._candidates(now)
        demand = self._demand()
        self.is_pressed = bool(demand)
        if not candidates:
            return math.inf
        decision = decide(now, candidates, demand, self._sets())
        for action in decision.actions:
            self._carry_out(action, now)
        for watched in self._watched.values():
            if watched.worker.phase == "cold" and watched.model in demand:
                self._expect(watched, "start", max(now, watched.worker.life.may_start_at))
        reports = (one.report_until() for one in self._watched.values())
        reports_until = math.nextafter(min((at for at in reports if at >= now), default=math.inf), math.inf)
        return min(decision.look_at, reports_until, self._remote.look_at)

    def _sets(self) -> list[SwapSet]:
        return [SwapSet(frozenset(one.members), one.loaded_max) for one in self._context.config.swap_sets]

    def _demand(self) -> dict[str, Demand]:
        """Return the demand for the models that requests wait for.

        If others serve a model, and its queue only waits for a place there, it wants no worker to be loaded.
        """
        found: dict[str, Demand] = {}
        for watched in self._watched.values():
            worker = watched.worker
            demand = self._balancer.demand(*worker.record.names)
            is_ours = worker.is_on_demand and not worker.is_leaving
            if not demand.waiting or not is_ours or self._places.is_unknown(worker):
                continue
            is_served = all(isinstance(self._directory.availability(name), Ready) for name in worker.record.names)
            if not (is_served and worker.phase in ("cold", "down", "asleep")):
                found[worker.spec.model_name] = demand
        return found

    def _candidates(self, now: float) -> list[SwapCandidate]:
        """Return the on-demand workers as they are now, and beside them the copies that may go for them."""
        on_demand = [
            one for one in self._workers.values() if one.is_on_demand and (one.has_process or not one.is_leaving)
        ]
        scaled = self._scaled() if on_demand else {}
        movable, waits = [worker_id for worker_id, may_go in scaled.items() if may_go], self._remote.waits(now)
        seen = [
            one.candidate(
                now,
                self._places.of(one.worker, movable),
                waits.get(one.worker.id),
                has_gpus=self._has_gpus,
                is_spare=one.worker.id in scaled,
            )
            for one in self._watch([*on_demand, *map(self._workers.__getitem__, scaled)], now)
        ]
        return [one for one in seen if scaled.get(one.worker_id, True)]

    def _scaled(self) -> dict[str, bool]:
        """Return the ids of the copies that hold room, each with whether the copy may go for another model."""
        spare = {one.id for one in self._copies.spare()}
        held = (one for one in self._workers.values() if is_scaled(one) and (one.pid or one.booking))
        return {one.id: one.is_leaving or one.id in spare for one in held}

    def _watch(self, workers: Sequence[ManagedWorker], now: float) -> list[WatchedWorker]:
        """Return the notes on these workers; those on others are forgotten."""
        for worker_id in self._watched.keys() - {one.id for one in workers}:
            self._watched.pop(worker_id).follow(None)
        watched = [self._watched.setdefault(one.id, WatchedWorker(one, self._on_idle)) for one in workers]
        for one in watched:
            one.follow(self._table.endpoint_of(one.worker.record))
            if (result := one.pop_result(now)) is not None:
                self.counts.loaded(one.model, *result)
        return watched

    # Actions.

    def _carry_out(self, action: SwapAction, now: float) -> None:
        watched = self._watched[action.worker_id]
        worker = watched.worker
        log.info("worker %s: %s (%s)", worker.id, action.kind, action.why)
        if action.why == "room" and action.kind in ("stop", "sleep", "end"):
            self.counts.swaps += 1
        if action.kind in ("start", "wake"):
            reason = "command" if self._commands[worker.spec.model_name] else "request"
            watched.begin_load(reason, now, action.place)
            worker.life.load()
            self._expect(watched, action.kind, now)
        elif action.kind == "drain":
            worker.life.want(takes_requests=False)
        elif action.kind == "resume":
            worker.life.want(takes_requests=True)
        elif action.kind == "end":
            self._copies.end_for_room(worker)
        elif action.kind == "stop":
            worker.life.unload()
        else:
            worker.life.sleep()

    def _expect(self, watched: WatchedWorker, kind: LoadKind, began_at: float) -> None:
        expected_s = self._times.expected(watched.model, kind)
        at = None if expected_s is None else began_at + expected_s
        self._context.managed.expect_ready(watched.worker.record, at)

    # Commands.

    async def load(self, model: str) -> str:
        """Return the id of a worker of this model once it is ready, after having it loaded if need be.

        Raises ApiError: 404 and 409 where no on-demand worker has the model, 503 where it is not loaded.
        """
        workers, timeouts = self._workers_of(model), self._context.config.timeouts
        found = self._directory.availability(model)
        if isinstance(found, Ready):
            return found.endpoints[0].id.decode()
        for worker in workers:
            worker.life.forgive()
        if isinstance(found := self._directory.availability(model), NotReady):
            raise _error_of(found, model, 0.0)
        name, within_s = workers[0].spec.model_name, timeouts.load_s + timeouts.load_wait_s
        self._commands[name] += 1
        try:
            lease = await wait_lease(self._balancer, RoutingRequest(model), within_s, lambda _: within_s)
        finally:
            self._commands -= Counter([name])  # without counts of 0
        if not isinstance(lease, Lease):
            raise _error_of(lease, model, within_s)
        lease.release()
        return lease.endpoint.id.decode()

    async def unload(self, model: str, drain_s: float) -> str:
        """Have the processes of this model drained for this time at most and ended; return the id of its worker.

        It goes on if the caller is cancelled. Raises ApiError 404 and 409, and 503 where they do not end.
        """
        workers = self._workers_of(model)
        for worker in workers:
            worker.life.unload(drain_s)
        with trio.move_on_after(drain_s + self._context.config.timeouts.stop_s + END_S):
            while any(one.phase == "ending" and not one.is_leaving for one in workers):
                await self._table.changed.wait()
            return workers[0].id
        raise errors.model_not_ready(model, f"worker {workers[0].id} does not end", RETRY_AFTER_S)

    async def sleep(self, model: str) -> str:
        """Have an engine of this model free its memory; return the id of its worker.

        It goes on if the caller is cancelled. Raises ApiError 404, and 409 where it is not loaded or cannot sleep.
        """
        workers = self._workers_of(model)
        if asleep := [one for one in workers if one.phase == "asleep"]:
            return asleep[0].id
        ready = [one for one in workers if one.phase in ("ready", "draining")]
        if not ready:
            raise _conflict("not_loaded", f"The model `{model}` is not loaded.")
        worker = ready[0]
        if worker.record.heartbeat is None or not worker.record.heartbeat.can_sleep:
            raise _conflict("cannot_sleep", f"The engine of worker {worker.id} cannot give its memory back: unload it.")
        worker.life.sleep()
        while worker.life.is_falling_asleep:
            await self._table.changed.wait()
        if worker.life.failed_change or not worker.has_process:
            raise _conflict("cannot_sleep", f"The engine of worker {worker.id} has not gone to sleep.")
        return worker.id

    async def wake(self, model: str) -> str:
        """Have an engine of this model that is asleep allocate its memory again; return the id of its worker.

        Raises ApiError as `load` does, and 409 where none is asleep.
        """
        if all(one.phase in ("cold", "down") for one in self._workers_of(model)):
            raise _conflict("not_asleep", f"The model `{model}` is not asleep: load it.")
        return await self.load(model)

    async def preview(self, model: str) -> LoadView | None:
        """Return the cost of loading this model now; None if there is nothing to load, or no way to do it."""
        ours = [one for one in self._workers.values() if one.is_on_demand and model in one.record.names]
        await self._places.read(one for one in ours if one.spec.gpus)
        now, candidates = trio.current_time(), self._candidates(trio.current_time())
        names = [one.model for one in candidates if model in self._workers[one.worker_id].record.names]
        plan = evictions_for(names[0], now, candidates, self._demand(), self._sets()) if names else None
        if plan is None:
            return None
        kind = "wake" if plan.worker.phase == "asleep" else "start"
        return _preview_of(plan, candidates, now, self._times.expected(plan.worker.model, kind))

    def _workers_of(self, model: str) -> list[ManagedWorker]:
        """Return the on-demand workers of this model. Raises ApiError 404, and 409 where none is loaded on demand."""
        found = [one for one in self._workers.values() if not one.is_leaving and model in one.record.names]
        on_demand = [one for one in found if one.is_on_demand]
        if not on_demand and not self._directory.has(model):
            raise errors.model_not_found(model, self._directory.names_near(model, self._directory.has))
        if not on_demand:
            raise _conflict("not_on_demand", f'The model `{model}` has no worker with load = "on_demand".')
        return on_demand


def _conflict(code: str, message: str) -> ApiError:
    """409: the model is not in the state that this needs."""
    return ApiError(409, code, message, param="model")


def _error_of(refusal: Refusal, model: str, waited_s: float) -> ApiError:
    """Return why a model was not loaded."""
    match refusal:
        case Draining():
            return errors.draining()
        case Unknown():
            return errors.model_not_found(model, ())
        case Full(waiting):
            return errors.queue_full(model, waiting, RETRY_AFTER_S)
        case NotReady(reasons, retry_after_s):
            return errors.model_not_ready(model, reasons, retry_after_s)
        case _:
            return errors.model_not_ready(model, f"it was not loaded within {waited_s:g} s", RETRY_AFTER_S)


def _preview_of(plan: LoadPlan, workers: Sequence[SwapCandidate], now: float, expected_s: float | None) -> LoadView:
    """Return the cost of loading a model, for operators."""
    evicts = [
        EvictionView(
            one.worker_id,
            one.model,
            "stop" if one.worker_id in plan.stops or one.phase == "asleep" or one.is_spare else one.when_idle,
            None if one.requests else max(0.0, round(now - one.idle_since, 3)),
        )
        for one in plan.evicts
    ]
    waits_for = [
        ObstacleView(one.worker_id, one.model, _state_of(one)) for one in workers if one.worker_id in plan.waits_for
    ]
    return LoadView(plan.worker.worker_id, evicts, waits_for, expected_s)


def _state_of(one: SwapCandidate) -> str:
    """Return the activity of a worker that others wait for, in a few words."""
    if one.requests:
        return f"has {one.requests} requests"
    return "is loaded first, for older requests" if one.phase in ("cold", "down", "asleep") else f"is {one.phase}"
