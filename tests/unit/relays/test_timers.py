"""Calls at their times, from a single task, in virtual time."""

import trio

from ichat.relays.timers import Timers


async def test_calls_are_made_at_their_times_in_their_order(nursery, autojump_clock):
    """Each call is made at its time, also one that was added for an earlier time than all others."""
    timers, made = Timers(), []

    def note(name):
        return lambda: made.append((name, trio.current_time()))

    nursery.start_soon(timers.run_forever)
    start = trio.current_time()
    timers.at(start + 5, note("late"))
    await trio.sleep(1)
    timers.at(start + 2, note("early"))
    timers.soon(note("soon"))
    await trio.sleep(9)
    assert made == [("soon", start + 1), ("early", start + 2), ("late", start + 5)]


async def test_a_cancelled_timer_is_not_called_and_a_bug_ends_nothing(nursery, autojump_clock, caplog):
    """A call that fails is logged, and the next is made."""
    timers, made = Timers(), []

    def fail():
        raise RuntimeError("a bug")

    nursery.start_soon(timers.run_forever)
    start = trio.current_time()
    timers.at(start + 1, lambda: made.append("never")).cancel()
    timers.at(start + 2, fail)
    timers.at(start + 3, lambda: made.append("then"))
    await trio.sleep(4)
    assert made == ["then"]
    assert "a bug in a call" in caplog.text
