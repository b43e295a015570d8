"""How long models take to be loaded, learnt from their last loads."""

import attrs
import cattrs

from ichat.fleet.load_times import KNOWN_MAX, LoadTimes
from ichat.protocol.load_story import LoadStory, StoryPhase
from ichat.supervisor.state import SavedState


def load_of(*seconds):
    phases = [StoryPhase(f"phase {number}", one) for number, one in enumerate(seconds)]
    return LoadStory(sum(seconds), None, phases)


def test_the_median_of_the_last_loads_is_expected_and_each_phase_as_it_was_last_time():
    """Eight loads count; starts and wakes are apart."""
    times = LoadTimes()
    for seconds in (100.0, *range(1, 9)):
        times.add("a", "start", load_of(seconds - 0.5, 0.5))
    times.add("b", "wake", load_of(0.5))
    assert (times.expected("a", "start"), times.expected("b", "wake"), times.expected("b", "start")) == (4.5, 0.5, None)
    assert times.expected_load("a", "start").phases == {"phase 0": 7.5, "phase 1": 0.5}
    assert times.expected_load("b", "start").seconds is None


def test_times_are_known_to_the_next_gateway():
    """They are kept in the state directory, as JSON."""
    times, again = LoadTimes(), LoadTimes()
    times.add("a", "start", load_of(1.0, 2.0))
    times.add("a", "wake", load_of(0.5))
    seconds, phases = times.saved()
    state = SavedState(load_seconds=seconds, load_phases=phases)
    known = cattrs.structure(attrs.asdict(state), SavedState)
    again.restore(known.load_seconds, known.load_phases)
    assert again.saved() == times.saved()
    assert again.expected_load("a", "start") == times.expected_load("a", "start")
    again.restore({"b": {"start": [7.0]}}, {})
    assert again.expected_load("b", "start").seconds == 7, "an earlier version kept no phases"


def test_learnt_load_times_are_bounded():
    """The models that were loaded last are known."""
    times = LoadTimes()
    times.add("first", "start", load_of(1.0))
    for number in range(KNOWN_MAX - 1):
        times.add(f"m{number}", "start", load_of(1.0))
    times.add("first", "start", load_of(1.0))
    times.add("last", "start", load_of(1.0))
    assert len(times.saved()[0]) == KNOWN_MAX
    assert [times.expected(name, "start") for name in ("first", "m0", "last")] == [1, None, 1]
