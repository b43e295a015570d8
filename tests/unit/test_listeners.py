"""How one object hears of another's changes."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ichat.listeners import Listeners


def test_listeners_are_called_in_their_order_and_once():
    """With the news; also where one of them removes itself or another while they are called."""
    listeners, heard = Listeners(), []

    def first(news):
        heard.append(("first", news))
        listeners.remove(first)

    second = lambda news: heard.append(("second", news))  # noqa: E731
    for one in (first, second, first):
        listeners.add(one)
    listeners(1)
    listeners(2)
    assert heard == [("first", 1), ("second", 1), ("second", 2)]
    with pytest.raises(KeyError):
        listeners.remove(first)


async def test_a_change_wakes_all_that_wait_and_none_that_comes_later(autojump_clock):
    """A task that waits after a change waits for the next one."""
    changed, woken = Listeners(), []

    async def wait(name):
        await changed.wait()
        woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a")
        nursery.start_soon(wait, "b")
        await wait_all_tasks_blocked()
        changed()
        nursery.start_soon(wait, "later")
        await wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        changed()
    assert woken[-1] == "later"


async def test_a_change_while_a_task_works_is_not_missed(autojump_clock):
    """The task looks at the state before it waits, and nothing runs between the two."""
    lines, added, written = [], Listeners(), []

    async def write_forever():
        while True:
            while not lines:
                await added.wait()
            batch = lines.copy()
            lines.clear()
            await trio.sleep(1)
            written.append(batch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_forever)
        for line, pause_s in (("a", 0.3), ("b", 0.3), ("c", 7.0), ("d", 2.0)):  # b and c arrive while a is written
            lines.append(line)
            added()
            await trio.sleep(pause_s)
        nursery.cancel_scope.cancel()
    assert written == [["a"], ["b", "c"], ["d"]]


async def test_a_task_hears_the_next_news_and_no_more(autojump_clock):
    """It goes on at the next call, and leaves nothing behind, even if it is cancelled."""
    listeners = Listeners()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listeners.wait)
        await wait_all_tasks_blocked()
        listeners("news")
    with trio.move_on_after(1):
        await listeners.wait()
    assert repr(listeners) == "<Listeners 0>"
