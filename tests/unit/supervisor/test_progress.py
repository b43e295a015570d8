"""When a managed worker is ended by its gateway: decided by the states it has been in, with the time as an argument."""

import math

import attrs

from ichat.config.schema import Timeouts
from ichat.supervisor.run_progress import RunProgress

TIMEOUTS = attrs.evolve(Timeouts(), load_s=60.0, stuck_s=30.0)


def test_a_worker_that_loads_has_until_its_deadline():
    """It is ended exactly `load_s` after its start, unless it is ready by then."""
    progress = RunProgress(100.0)
    progress.record("loading", 110.0)
    assert progress.deadlines(TIMEOUTS) == (160.0, math.inf)
    assert progress.failure(TIMEOUTS, 159.9) == ""
    assert progress.failure(TIMEOUTS, 160.0) == "was not ready within 60 s"
    progress.record("ready", 150.0)
    assert progress.failure(TIMEOUTS, 1000.0) == ""
    assert progress.up_since == 150.0


def test_a_worker_is_stuck_from_the_first_moment_of_it():
    """Being silent and being wedged count together; one good moment in between starts the count anew."""
    progress = RunProgress(0.0)
    progress.record("ready", 0.0)
    progress.record("unhealthy", 10.0)
    progress.record("wedged", 20.0)
    assert progress.failure(TIMEOUTS, 39.9) == ""
    assert progress.failure(TIMEOUTS, 40.0) == "was wedged for 30 s"
    progress.record("ready", 39.0)
    progress.record("unhealthy", 50.0)
    assert progress.deadlines(TIMEOUTS) == (math.inf, 80.0)
    assert progress.failure(TIMEOUTS, 80.0) == "was silent for 30 s"
    assert progress.up_since == 0.0


def test_a_stuck_worker_goes_on_where_that_is_configured():
    """With `stuck_s` 0 no worker is ended for being stuck."""
    progress = RunProgress(0.0)
    progress.record("unhealthy", 10.0)
    assert progress.failure(attrs.evolve(TIMEOUTS, stuck_s=0.0), 1e9) == ""


def test_an_adopted_worker_that_sends_no_heartbeat_is_stuck():
    """A worker taken over from an earlier gateway has to be heard within `stuck_s`."""
    progress = RunProgress(0.0)
    progress.record("starting", 1.0, is_unheard=True)
    assert progress.failure(TIMEOUTS, 31.0) == "was silent for 30 s"
