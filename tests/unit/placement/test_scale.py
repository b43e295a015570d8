"""The number of copies follows the load, and changes seldom: simulated, with bugs that the simulation finds."""

import attrs
import pytest
from support import scale_simulation
from support.scale_simulation import Simulation, steady

from ichat.config.replicas import Replicas, Scale
from ichat.placement import scale
from ichat.placement.scale import CopyFacts, ScaleFacts, ScaleMemory

SEEDS = 60
MANY_SEEDS = 10_000


def simulate(seeds, decide=scale.decide):
    for seed in seeds:
        try:
            Simulation(seed, decide=decide).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_any_load_keeps_the_rules():
    simulate(range(SEEDS))


@pytest.mark.slow
def test_any_of_many_loads_keeps_the_rules():
    simulate(range(MANY_SEEDS))


def test_a_steady_load_causes_few_changes():
    """At most four in two hours, whatever the load."""
    for seed in range(30):
        changes = Simulation(seed, steady).run().changes
        assert len(changes) <= 4, (seed, changes)


def ends_too_soon(now, facts, settings, memory):
    """Forget when the last change was."""
    return scale.decide(now, facts, settings, attrs.evolve(memory, changed_at=-1e9, seen_since=-1e9))


def ignores_what_starts(now, facts, settings, memory):
    """Hide copies that start."""
    ready = [one for one in facts.copies if one.phase != "starting"]
    return scale.decide(now, attrs.evolve(facts, copies=ready or facts.copies), settings, memory)


def counts_lost_samples(now, facts, settings, memory):
    """Read a lost sample as an idle one."""
    copies = [attrs.evolve(one, busy=one.busy or 0.0) for one in facts.copies]
    return scale.decide(now, attrs.evolve(facts, copies=copies, is_whole=True), settings, memory)


def is_slow(now, facts, settings, memory):
    """Add copies late."""
    return scale.decide(now, facts, attrs.evolve(settings, up_s=40.0, wait_s=90.0), memory)


def knows_no_bound(now, facts, settings, memory):
    """Allow any number."""
    return scale.decide(now, attrs.evolve(facts, bounds=Replicas(1, 64)), settings, memory)


@pytest.mark.parametrize("bug", [ends_too_soon, ignores_what_starts, counts_lost_samples, is_slow, knows_no_bound])
def test_the_simulation_finds_bugs(bug):
    with pytest.raises(AssertionError):
        simulate(range(SEEDS), bug)


# Single decisions.

SETTINGS = Scale()


BOUNDS = Replicas(1, 4)


def facts(*phases, busy=0.0, bounds=BOUNDS, **more):
    copies = [
        CopyFacts(f"m-{number}", phase, busy if phase == "ready" else None) for number, phase in enumerate(phases)
    ]
    return ScaleFacts(copies, bounds, 16, **more)


def after(seconds, found, memory=None):
    """Return the last decision, and the memory, after these samples for this long."""
    memory, now, decision = memory or ScaleMemory(), 0.0, None
    while now <= seconds:
        decision, memory = scale.decide(now, found, SETTINGS, memory)
        if decision.direction != "stay":
            break
        now += scale.SAMPLE_S
    return now, decision, memory


def test_a_busy_copy_gets_company():
    now, decision, _ = after(60, facts("ready", busy=0.9))
    assert (now, decision.direction, decision.start, decision.reason) == (10.0, "up", 1, "busy")


def test_a_request_that_waits_is_enough():
    decision, _ = scale.decide(0.0, facts("ready", busy=1.0, waiting=3, waited_s=2.0), SETTINGS, ScaleMemory())
    assert (decision.start, decision.reason) == (1, "waiting")
    decision, _ = scale.decide(0.0, facts("ready", busy=1.0, waiting=3, waited_s=1.5), SETTINGS, ScaleMemory())
    assert (decision.start, decision.look_at) == (0, 0.5)


def test_a_copy_that_drains_is_used_before_a_new_copy_starts():
    _, decision, _ = after(60, facts("ready", "draining", busy=1.0))
    assert (decision.resume, decision.start) == (["m-1"], 0)


def test_an_idle_copy_goes_after_the_quiet_time_and_the_youngest_first():
    now, decision, _ = after(1000, facts("ready", "ready", "ready", busy=0.1))
    assert (now, decision.direction, decision.drain) == (300.0, "down", "m-2")
    now, decision, _ = after(1000, facts("ready", "ready", busy=0.1, load_s=200.0))
    assert now == 400.0


def test_the_holder_of_prefixes_and_the_busiest_stay():
    found = facts("ready", "ready", "ready", busy=0.1)
    copies = [
        attrs.evolve(found.copies[0], requests=1),
        found.copies[1],
        attrs.evolve(found.copies[2], prefix_work=3.0),
    ]
    assert after(1000, attrs.evolve(found, copies=copies))[1].drain == "m-1"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (facts("ready", "ready", busy=0.1, bounds=Replicas(2, 4)), "steady"),
        (facts("ready", "starting", busy=0.1), "steady"),
        (facts("ready", "ready", busy=0.1, waiting=1, waited_s=0.5), "steady"),
        (facts("ready", "ready", busy=0.1, is_whole=False), "unknown"),
        (facts("ready", "ready", busy=0.3), "steady"),
        (facts("ready", "ready", busy=1.0, bounds=Replicas(1, 2)), "steady"),
        (facts("ready", busy=None), "unknown"),
        (facts("ready", busy=0.9, may_start=0), "full"),
    ],
)
def test_nothing_changes(found, reason):
    _, decision, _ = after(2000, found)
    assert (decision.direction, decision.reason) == ("stay", reason)


def test_a_copy_that_cannot_start_is_given_up_and_holds_up_the_others():
    found = facts("ready", "starting", busy=1.0)
    failing = attrs.evolve(found, copies=[found.copies[0], attrs.evolve(found.copies[1], failures=3)])
    decision, memory = scale.decide(0.0, failing, SETTINGS, ScaleMemory())
    assert (decision.drain, decision.reason) == ("m-1", "failing")
    now, decision, _ = after(1000, facts("ready", busy=1.0), memory)
    assert (now, decision.direction) == (300.0, "up")


def test_a_gap_in_the_samples_begins_the_quiet_time_anew():
    idle = facts("ready", "ready", busy=0.1)
    _, _, memory = after(250, idle)
    lost = attrs.evolve(idle, is_whole=False)
    for now in range(255, 295, 5):
        _, memory = scale.decide(float(now), lost, SETTINGS, memory)
    decision, memory = scale.decide(310.0, idle, SETTINGS, memory)
    assert decision.direction == "stay"
    assert memory.seen_since == 310.0
    assert len(memory.peaks) <= scale.PEAKS_MAX + 2


def test_the_simulation_is_long_enough():
    assert scale_simulation.HOURS_S / scale.SAMPLE_S > 1000
