"""A machine with on-demand workers in virtual time: what `swaps.decide` says is done, and every step is checked."""

import heapq
import itertools
import math
import operator

import attrs

from ichat.preflight.claims import Claims
from ichat.routing.queue import Demand
from ichat.supervisor import swaps
from ichat.supervisor.swaps import SwapCandidate

LOAD_S = 10.0
STOP_S = 1.0
SLEEP_S = 0.5
WAKE_S = 1.0
REQUEST_S = 0.2
FIRST_S, LONGEST_S, ATTEMPTS_MAX = 1.0, 60.0, 5
STEPS_MAX = 1_000_000
"""More than any simulation needs: a decision that never comes to rest fails instead of hanging."""


@attrs.frozen
class Apart(SwapCandidate):
    """A candidate that names the workers that cannot stand beside it; `with_claims` makes claims of that."""

    conflicts: frozenset[str] = frozenset()
    port_conflicts: frozenset[str] = frozenset()


def with_claims(workers):
    """Return the candidates with a GPU for each two that are apart, and a port for those that have one."""
    gpus, ports = {}, {}
    for one, other in itertools.combinations(workers, 2):
        first, second = one.worker_id, other.worker_id
        if first in other.conflicts or second in one.conflicts:
            number = len(gpus)
            gpus[first, second] = number
        if first in other.port_conflicts or second in one.port_conflicts:
            ports[first] = ports[second] = ports.get(first) or ports.get(second) or len(ports) + 1
    found = []
    for one in workers:
        claimed = {number: math.inf for pair, number in gpus.items() if one.worker_id in pair}
        port = ports.get(one.worker_id)
        found.append(attrs.evolve(one, claims=Claims(claimed, ("127.0.0.1", port) if port else None)))
    return found


def decide(now, workers, demand, sets):
    """Decide with claims instead of conflicts."""
    return swaps.decide(now, with_claims(workers), demand, sets)


def evictions_for(model, now, workers, demand, sets):
    """Return the plan with claims instead of conflicts."""
    return swaps.evictions_for(model, now, with_claims(workers), demand, sets)


_FACTS = operator.attrgetter(*(field.name for field in attrs.fields(Apart)))


@attrs.define(eq=False)
class SimulatedWorker:
    """A worker's table, and how it is now."""

    worker_id: str
    model: str
    conflicts: frozenset[str] = frozenset()
    port_conflicts: frozenset[str] = frozenset()
    idle_s: float = 0.0
    min_loaded_s: float = 30.0
    when_idle: str = "stop"
    failures_left: int = 0
    """How many of its next loads fail."""
    phase: str = "cold"
    requests: int = 0
    ready_since: float = -math.inf
    idle_since: float = math.inf
    may_start_at: float = -math.inf
    failures: int = 0
    has_gpus: bool = False
    claims: Claims = Claims()
    places: tuple = ()
    remote: None = None
    is_spare: bool = False

    def candidate(self):
        return Apart(*_FACTS(self))


@attrs.define(eq=False)
class SimulatedWaiter:
    model: str
    since: float
    done: object
    """Called with whether it was answered."""
    request_s: float
    older: int
    """How many other models were wanted before, when it came."""


@attrs.define
class Waited:
    """How long one request waited for its model, and how many other models were wanted before it."""

    model: str
    wait_s: float
    older: int


class Machine:
    """On-demand workers, those who wait for them, and a loader that does what is decided."""

    def __init__(self, workers, sets=()):
        self.workers = {one.worker_id: one for one in workers}
        self.sets = sets
        self.now = 0.0
        self.waiting = {one.model: [] for one in workers}
        self.waited = []
        self.has_failed = False
        self.log = []
        """What was decided: time, kind, worker, why."""
        self._events = []
        self._order = itertools.count()
        self._look_at = math.inf

    def at(self, time, call, *args):
        """Have something called at a time."""
        heapq.heappush(self._events, (time, next(self._order), call, args))

    def after(self, delay_s, call, *args):
        self.at(self.now + delay_s, call, *args)

    def run(self, until=math.inf):
        """Let time pass until nothing is left to happen, or so far."""
        for _ in range(STEPS_MAX):
            self._decide()
            time = min(self._events[0][0] if self._events else math.inf, self._look_at)
            if time > until or time == math.inf:
                return
            self.now = time
            if self._events and self._events[0][0] == time:
                _, _, call, args = heapq.heappop(self._events)
                call(*args)
        raise AssertionError("the machine does not come to rest")

    def count(self, kind):
        return sum(1 for _, one, _, _ in self.log if one == kind)

    # What clients do.

    def ask(self, model, done=lambda is_answered: None, request_s=REQUEST_S):
        """Send a request, which waits where its model is not loaded."""
        ready = [one for one in self.workers.values() if one.model == model and one.phase == "ready"]
        if ready:
            self._begin(min(ready, key=lambda one: one.requests), request_s, done)
            return None
        wanted = [name for name, waiters in self.waiting.items() if waiters and name != model]
        waiter = SimulatedWaiter(model, self.now, done, request_s, len(wanted))
        self.waiting[model].append(waiter)
        return waiter

    def ask_for(self, model, patience_s):
        """Send a request whose client disconnects if it has waited so long."""
        self.after(patience_s, self.leave, self.ask(model))

    def leave(self, waiter):
        """A client disconnects; it may have been answered."""
        if waiter is not None and waiter in self.waiting[waiter.model]:
            self.waiting[waiter.model].remove(waiter)

    def _begin(self, worker, request_s, done):
        assert worker.phase == "ready"
        worker.requests += 1
        worker.idle_since = math.inf
        self.after(request_s, self._end, worker, done)

    def _end(self, worker, done):
        assert worker.phase in ("ready", "draining"), "a worker was evicted with a request"
        worker.requests -= 1
        if not worker.requests:
            worker.idle_since = self.now
        done(True)

    def _dispatch(self, worker):
        waiters, self.waiting[worker.model] = self.waiting[worker.model], []
        for waiter in waiters:
            self.waited.append(Waited(worker.model, self.now - waiter.since, waiter.older))
            self._begin(worker, waiter.request_s, waiter.done)

    # What the loader does.

    def demand(self):
        return {
            model: Demand(len(waiters), min((one.since for one in waiters), default=math.inf))
            for model, waiters in self.waiting.items()
        }

    def _decide(self):
        for _ in range(3):
            decision = decide(self.now, [one.candidate() for one in self.workers.values()], self.demand(), self.sets)
            assert decision.look_at > self.now
            if not decision.actions:
                break
            named = [action.worker_id for action in decision.actions]
            assert len(set(named)) == len(named), "two actions for one worker"
            for action in decision.actions:
                self._act(action)
            self._check()
        else:
            raise AssertionError(f"a decision changes its mind: {self.log[-6:]}")
        self._look_at = decision.look_at

    def _act(self, action):
        worker = self.workers[action.worker_id]
        self.log.append((self.now, action.kind, worker.worker_id, action.why))
        if action.kind in ("start", "wake"):
            assert worker.phase in (("asleep",) if action.kind == "wake" else ("cold", "down"))
            worker.phase, worker.has_gpus = "waking" if action.kind == "wake" else "starting", True
            self.after(WAKE_S if action.kind == "wake" else LOAD_S, self._loaded, worker)
        elif action.kind in ("stop", "sleep"):
            assert worker.phase in ("ready", "draining", "asleep")
            assert not worker.requests
            is_end = action.kind == "stop"
            worker.phase, worker.ready_since, worker.idle_since = "ending", -math.inf, math.inf
            self.after(STOP_S if is_end else SLEEP_S, self._unloaded, worker, "cold" if is_end else "asleep")
        elif action.kind == "drain":
            assert worker.phase == "ready"
            worker.phase = "draining"
        else:
            assert worker.phase == "draining"
            worker.phase = "ready"
            self._dispatch(worker)

    def _loaded(self, worker):
        if worker.failures_left:
            worker.failures_left -= 1
            worker.failures += 1
            worker.phase, worker.has_gpus = "down", False
            backoff_s = min(LONGEST_S, FIRST_S * 2.0 ** (worker.failures - 1))
            worker.may_start_at = math.inf if worker.failures >= ATTEMPTS_MAX else self.now + backoff_s
            waiters, self.waiting[worker.model] = self.waiting[worker.model], []
            self.has_failed = True
            for waiter in waiters:
                waiter.done(False)
            return
        worker.phase, worker.failures = "ready", 0
        worker.ready_since = worker.idle_since = self.now
        self._dispatch(worker)

    def _unloaded(self, worker, phase):
        worker.phase, worker.has_gpus = phase, False

    def _check(self):
        """No two workers have what only one can have."""
        holding = [one for one in self.workers.values() if one.phase not in ("cold", "down")]
        for one, other in itertools.permutations(holding, 2):
            assert one.worker_id not in other.port_conflicts, (one, other)
            assert one.worker_id not in other.conflicts or not (one.has_gpus and other.has_gpus), (one, other)
        for swap_set in self.sets:
            assert sum(one.model in swap_set.members for one in holding) <= swap_set.loaded_max


def machine_with(gpus_of, sets=(), **keys):
    """Return a machine with one worker for each model, which needs the given GPUs alone."""
    return Machine(
        [
            SimulatedWorker(
                f"{model}-0",
                model,
                conflicts=frozenset(
                    f"{other}-0" for other, others in gpus_of.items() if other != model and set(others) & set(gpus)
                ),
                **keys,
            )
            for model, gpus in gpus_of.items()
        ],
        sets,
    )


class Client:
    """A client that sends its requests one after another."""

    def __init__(self, machine, models, pause_s=lambda: 0.0, request_s=lambda: REQUEST_S):
        self.machine = machine
        self.left = iter(models)
        self.answered = self.refused = 0
        self._pause_s, self._request_s = pause_s, request_s

    def go_on(self):
        model = next(self.left, None)
        if model is not None:
            self.machine.ask(model, self._done, self._request_s())

    def _done(self, is_answered):
        self.answered += is_answered
        self.refused += not is_answered
        self.machine.after(self._pause_s(), self.go_on)
