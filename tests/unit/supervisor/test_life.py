"""A managed worker's life as values: the next action by a table, and thousands of lives in virtual time."""

import math
import random
import types

import attrs
import pytest
import trio

from ichat.config.schema import Restart
from ichat.fleet.fleet import Fleet
from ichat.fleet.worker_facts import WorkerEnd
from ichat.supervisor import life
from ichat.supervisor.life import (
    Changing,
    Clearing,
    NoProcess,
    Serving,
    Sleeping,
    Starting,
    Wanted,
    begun,
    ended,
    next_action,
    observed,
    phase_of,
)
from ichat.supervisor.run_progress import RunResult
from ichat.supervisor.worker_life import WorkerLife

COLD, LOADED, ASLEEP, GONE = Wanted("cold"), Wanted("loaded"), Wanted("asleep"), Wanted("gone")
NEWER = Wanted("loaded", run=1)
FAILED = NoProcess(0, "failed", 1, may_start_at=10.0)
SEEDS = 10_000
EVENTS = 8
RESTART = Restart(first_s=4.0, longest_s=16.0, attempts_max=3)


@pytest.mark.parametrize(
    ("wanted", "actual", "now", "kind"),
    [
        (LOADED, NoProcess(), 0.0, "start"),
        (LOADED, NoProcess(kind="cold"), 0.0, "start"),
        (LOADED, FAILED, 9.0, "wait"),
        (LOADED, FAILED, 10.0, "start"),
        (NEWER, FAILED, 9.0, "start"),
        (NEWER, NoProcess(0, "failed", 3, math.inf), 9.0, "start"),
        (COLD, NoProcess(kind="cold"), 0.0, "wait"),
        (COLD, NoProcess(kind="stopped"), 0.0, "cool"),
        (COLD, FAILED, 9.0, "wait"),
        (COLD, FAILED, 10.0, "cool"),
        (ASLEEP, NoProcess(kind="stopped"), 0.0, "cool"),
        (GONE, FAILED, 0.0, "leave"),
        (LOADED, Starting(0), 0.0, "wait"),
        (LOADED, Serving(0), 0.0, "wait"),
        (LOADED, Sleeping(0), 0.0, "wake"),
        (LOADED, Changing(0, 0, "asleep"), 0.0, "wait"),
        (ASLEEP, Starting(0), 0.0, "wait"),
        (ASLEEP, Serving(0), 0.0, "sleep"),
        (ASLEEP, Sleeping(0), 0.0, "wait"),
        (NEWER, Serving(0), 0.0, "end"),
        (NEWER, Serving(1), 0.0, "wait"),
        *((wanted, kind(0), 0.0, "end") for wanted in (COLD, GONE) for kind in (Starting, Serving, Sleeping, Changing)),
        *((wanted, Clearing(0), 0.0, "wait") for wanted in (COLD, LOADED, ASLEEP, GONE, NEWER)),
    ],
)
def test_the_next_action(wanted, actual, now, kind):
    """Each pair of values has one next action; a wait for a time says until when."""
    action = next_action(wanted, actual, now)
    assert action.kind == kind
    assert action.until == (10.0 if actual is FAILED and kind == "wait" else math.inf)


@pytest.mark.parametrize(
    ("wanted", "actual", "state", "phase"),
    [
        (COLD, NoProcess(kind="cold"), "cold", "cold"),
        (GONE, NoProcess(kind="cold"), "cold", "cold"),
        (LOADED, FAILED, "restarting", "down"),
        (LOADED, NoProcess(kind="stopped"), "starting", "starting"),
        (COLD, NoProcess(kind="stopped"), "starting", "ending"),
        (LOADED, Starting(0), "loading", "starting"),
        (LOADED, Starting(0), "unhealthy", "starting"),
        (LOADED, Starting(0), "waking", "waking"),
        (LOADED, Starting(0), "draining", "ending"),
        (LOADED, Serving(0), "ready", "ready"),
        (Wanted("loaded", takes_requests=False), Serving(0), "ready", "draining"),
        (ASLEEP, Serving(0), "ready", "ending"),
        (LOADED, Changing(0, 0, "asleep"), "ready", "ending"),
        (ASLEEP, Sleeping(0), "asleep", "asleep"),
        (LOADED, Sleeping(0), "asleep", "waking"),
        (LOADED, Changing(0, 0, "ready"), "waking", "waking"),
        (COLD, Serving(0), "ready", "ending"),
        (NEWER, Serving(0), "ready", "ending"),
        (LOADED, Clearing(0), "ready", "ending"),
    ],
)
def test_the_phase_follows_from_both_values(wanted, actual, state, phase):
    """The loader decides by phases, and none of them is a flag of its own."""
    assert phase_of(wanted, actual, state) == phase


def test_failures_in_a_row_delay_the_next_start_and_end_with_attempts_max():
    """A new run forgets them."""
    wanted, actual, waits = LOADED, NoProcess(), []
    for _ in range(3):
        result = RunResult(WorkerEnd("ended", 0.0))
        wanted, actual = ended(wanted, begun(wanted, actual), result, RESTART, 100.0, on_demand=False)
        waits.append(actual.may_start_at - 100.0)
    assert waits == [4.0, 8.0, math.inf]
    assert begun(NEWER, actual) == Starting(1, 0)


@attrs.define
class Process:
    """A process as the system has it."""

    run: int
    state: str = "loading"
    at: float = math.inf
    """When the next thing happens to it."""
    fails: bool = False
    was_up: bool = False
    is_ending: bool = False
    changes_to: str = ""
    by_others: bool = False
    """Whether somebody else has put its engine to sleep."""


class World:
    """One life: `life` decides, and this carries it out as a worker does, with a ledger of its own beside it."""

    def __init__(self, seed, rules):
        self.random = random.Random(seed)
        self.rules = rules
        self.now = 0.0
        self.on_demand = self.random.random() < 0.5
        self.begin_gateway()

    def begin_gateway(self, process=None):
        """Begin a gateway, which may find a process of the one before it."""
        self.process, self.left = process, False
        self.row, self.earliest = 0, -math.inf
        is_cold = process is None and self.on_demand
        self.wanted = Wanted("cold" if is_cold else "loaded")
        self.actual = Starting(0) if process else NoProcess(kind="cold" if is_cold else "new")

    @property
    def state(self):
        return self.process.state if self.process else "starting"

    def observe(self):
        self.wanted, self.actual = self.rules.observed(self.wanted, self.actual, self.state)

    def want(self, **more):
        self.observe()
        if self.wanted.state == "gone":
            more.pop("state", None)
        self.wanted = attrs.evolve(self.wanted, **more)

    def settle(self):
        """Carry out what follows until there is nothing to do but wait."""
        for _ in range(20):
            self.observe()
            action = self.rules.next_action(self.wanted, self.actual, self.now)
            self.check()
            if action.kind == "wait" or self.left:
                return action.until
            self.carry_out(action.kind)
        raise AssertionError("it never comes to rest")

    def carry_out(self, kind):
        if kind == "start":
            assert self.process is None, "two processes at once"
            assert self.wanted.state == "loaded", "a process that is not wanted"
            assert self.now >= self.earliest, "started before its time"
            self.actual = self.rules.begun(self.wanted, self.actual)
            self.process = Process(self.wanted.run, at=self.now + 3, fails=self.random.random() < 0.3)
        elif kind == "cool":
            self.actual = attrs.evolve(self.actual, kind="cold")
        elif kind == "leave":
            assert self.process is None, "forgotten while its process runs"
            self.left = True
        else:
            assert kind != "wake" or not self.process.by_others, "woken though it is not wanted"
            assert kind == "wake" or self.is_drained(), f"{kind} while it gets requests"
            if kind == "end":
                self.end()
            else:
                to = "asleep" if kind == "sleep" else "ready"
                self.actual = Changing(self.actual.run, self.actual.failures, to)
                self.process.changes_to, self.process.at = to, self.now + 2

    def is_drained(self):
        return self.rules.is_drained(self.wanted, self.actual, on_demand=self.on_demand)

    def end(self):
        self.actual = Clearing(self.actual.run, self.actual.failures)
        self.process.is_ending, self.process.at = True, self.now + 1

    def check(self):
        """What the outside sees is true."""
        phase = phase_of(self.wanted, self.actual, self.state)
        if phase == "ready":
            assert self.process.state == "ready"
            assert not self.is_drained()
        if phase in ("cold", "down"):
            assert self.process is None
        if self.process and self.process.run < self.wanted.run:
            assert phase == "ending"
            assert self.is_drained(), "an outdated process gets requests"

    def pass_time(self, until):
        """Let happen what happens by itself."""
        while True:
            at = min(self.settle(), self.process.at if self.process else math.inf)
            if at > until or at == math.inf:
                break
            self.now = max(at, self.now)
            if self.process and self.process.at <= self.now:
                self.happen(self.process)
        self.now = max(self.now, until) if until < math.inf else self.now

    def happen(self, process):
        process.at = math.inf
        if process.is_ending:
            self.clear(process)
        elif process.changes_to:
            self.change(process)
        elif process.fails:
            self.end()
        else:
            process.state, process.was_up = "ready", True

    def change(self, process):
        to, process.changes_to = process.changes_to, ""
        if self.random.random() < 0.7:
            process.state, process.by_others = to, False
            self.actual = (Sleeping if to == "asleep" else Serving)(self.actual.run, self.actual.failures)
        elif to == "ready":
            self.new_run("cold" if self.on_demand else "loaded")
        else:
            if self.wanted.state == "asleep":
                self.wanted = attrs.evolve(self.wanted, state="loaded")
            self.actual = Serving(self.actual.run, self.actual.failures)

    def clear(self, process):
        """Nothing is left of a process; the ledger counts failures by itself."""
        is_asked = self.wanted.state in ("cold", "gone") or process.run < self.wanted.run
        result = RunResult(None if is_asked else WorkerEnd("ended", 0.0), process.was_up)
        self.wanted, self.actual = self.rules.ended(
            self.wanted, self.actual, result, RESTART, self.now, on_demand=self.on_demand
        )
        self.process = None
        if is_asked:
            self.row, self.earliest = 0, -math.inf
        else:
            self.row += 1
            self.earliest = self.now + (math.inf if self.row >= 3 else 4.0 * 2 ** (self.row - 1))

    def new_run(self, state):
        if self.wanted.state != "gone":
            self.row, self.earliest = 0, -math.inf
            self.wanted = Wanted(state, self.wanted.run + 1)

    # Events.

    def load(self):
        if self.process:
            self.process.by_others = False
        self.want(state="loaded", takes_requests=True)
        if isinstance(self.actual, NoProcess) and self.actual.kind == "cold":
            self.actual = attrs.evolve(self.actual, kind="new")

    def unload(self):
        if self.wanted.state in ("loaded", "asleep") and self.on_demand:
            self.new_run("cold")

    def restart(self):
        self.unload() if self.on_demand else self.new_run("loaded")

    def sleep(self):
        self.observe()
        if phase_of(self.wanted, self.actual, self.state) == "ready" and self.on_demand:
            self.want(state="asleep", takes_requests=True)

    def pause(self):
        self.want(takes_requests=False)

    def remove(self):
        self.want(state="gone")

    def reload(self):
        was, self.on_demand = self.on_demand, not self.on_demand
        if was:
            self.new_run("loaded")
        elif self.process is None:
            self.new_run("cold")

    def crash(self):
        if self.process and not self.process.is_ending:
            self.end()

    def others_put_to_sleep(self):
        self.observe()
        if self.process and isinstance(self.actual, Serving) and self.wanted.state == "loaded":
            self.process.state, self.process.by_others = "asleep", True

    def end_of_gateway(self):
        process = self.process
        if process and not process.is_ending and not process.changes_to and self.wanted.state != "gone":
            process.run, process.by_others = 0, process.state == "asleep"
            self.begin_gateway(process)
        elif process is None:
            self.begin_gateway()

    def live(self):
        """Live through some events, and come to rest where it is wanted."""
        events = [
            self.load, self.load, self.unload, self.restart, self.sleep, self.pause, self.reload, self.crash,
            self.others_put_to_sleep, self.end_of_gateway,
        ]  # fmt: skip
        for _ in range(EVENTS):
            self.pass_time(self.now + self.random.choice((0, 1, 4, 30)))
            self.random.choice(events)()
        if self.random.random() < 0.3:
            self.remove()
        self.pass_time(math.inf)
        if self.wanted.state == "gone":
            assert self.left, "it has not left"
        elif self.wanted.state == "cold":
            assert self.process is None, "it has a process though it is cold"
        elif self.row < 3:
            assert self.process is not None, "it has no process"
            assert self.process.run == self.wanted.run, "an outdated process is left"
            assert self.process.state == ("ready" if self.wanted.state == "loaded" else "asleep")


def rules(**changed):
    names = ("next_action", "begun", "ended", "observed", "is_drained")
    return types.SimpleNamespace(**{name: getattr(life, name) for name in names} | changed)


def live_all(rules):
    for seed in range(SEEDS):
        try:
            World(seed, rules).live()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_ten_thousand_lives():
    """No life has two processes, starts before its time, ends while it gets requests, or rests where it must not."""
    live_all(rules())


def impatient(wanted, actual, now):
    """Start again at once after a failure."""
    return next_action(wanted, attrs.evolve(actual, may_start_at=-math.inf) if isinstance(actual, NoProcess) else actual,
                       now)  # fmt: skip


def loyal(wanted, actual, now):
    """Keep a process whose table has changed."""
    return next_action(attrs.evolve(wanted, run=min(wanted.run, actual.run)), actual, now)


def forgetful(wanted, actual, result, settings, now, **more):
    """Count each failure as the first."""
    return ended(wanted, attrs.evolve(actual, failures=0), result, settings, now, **more)


def bossy(wanted, actual, state):
    """Wake what others have put to sleep."""
    return wanted, observed(wanted, actual, state)[1]


def open_door(wanted, actual, *, on_demand):
    """Send requests to a process that is about to end."""
    return False if isinstance(actual, Serving) else life.is_drained(wanted, actual, on_demand=on_demand)


def undead(wanted, actual, now):
    """Start a removed worker again."""
    return next_action(attrs.evolve(wanted, state="loaded") if wanted.state == "gone" else wanted, actual, now)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("next_action", impatient),
        ("next_action", loyal),
        ("next_action", undead),
        ("ended", forgetful),
        ("observed", bossy),
        ("is_drained", open_door),
    ],
)
def test_a_planted_mistake_is_found(name, mistake):
    """The lives are worth something only if a wrong rule ends one of them."""
    with pytest.raises(AssertionError):
        live_all(rules(**{name: mistake}))


@pytest.mark.parametrize("on_demand", [False, True])
async def test_a_workers_record_shows_each_step_of_its_life(on_demand, autojump_clock):
    """Others see a worker cold or down exactly while it is, whatever is wanted and however its processes end."""
    for seed in range(200):
        chance, fleet = random.Random(seed), Fleet({}, trio.current_time, 8)
        record = fleet.managed.expect("w", ["m"])
        fleet.managed.configure(record, names=["m"], max_in_flight=None, settings={}, on_demand=on_demand)
        worker, starts = WorkerLife(fleet.table, fleet.managed, record, Wanted("loaded"), NoProcess()), 0
        for _ in range(20):
            actual = worker.actual
            if not isinstance(actual, NoProcess):
                end = chance.choice([None, WorkerEnd("ended", 0.0, exit_code=chance.choice([1, 64]))])
                worker.end_run(RunResult(end, chance.random() < 0.5), RESTART)
            elif (action := worker.next_action().kind) == "start":
                worker.begin()
                starts += 1
            elif action == "cool":
                worker.cool()
            else:
                await trio.sleep(100)
            chance.choice([worker.load, worker.unload, worker.forgive, lambda: None, lambda: None])()
            assert record.absence == {"cold": "cold", "failed": "down"}.get(life.absence_of(worker.actual), "")
            assert record.restarts <= starts


async def test_a_worker_that_is_started_anew_says_so_until_it_is_removed():
    """Requests wait for the next start of the former, and not for the latter."""
    fleet = Fleet({}, trio.current_time, 8)
    record = fleet.managed.expect("w", ["m"])
    worker = WorkerLife(fleet.table, fleet.managed, record, LOADED, Starting(0))
    worker.want(takes_requests=False)
    assert (record.is_drained, record.returns) == (True, False)
    worker.want_new_run()
    assert (record.is_drained, record.returns) == (True, True)
    worker.want("gone")
    assert (record.is_drained, record.returns) == (True, False)
