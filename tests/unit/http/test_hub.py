"""The hub: what it serves, where it waits, and that nobody starves."""

import contextlib
import signal
import socket
import threading

import pytest
import trio
import trio.testing
from support.peers import until
from support.programs import LIMIT_S

from ichat.http import trio_wait
from ichat.http.hub import READABLE, READY_MAX, SWEEP_S, Hub

WAYS = ["Trio's wait", "a task"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Where the hub waits: in Trio's place, or in a task, as under a Trio that does not allow the first."""
    if request.param == "a task":

        def private_parts():
            raise trio_wait.TrioDiffersError("it is another one")

        monkeypatch.setattr(trio_wait, "private_parts", private_parts)
    return request.param


@pytest.fixture
async def hub(way, nursery):
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    await trio.testing.wait_all_tasks_blocked()
    assert ("in a task" in repr(hub)) == (way == "a task")
    return hub


@pytest.fixture
def pair():
    """Return two ends of a connection that do not block."""
    with contextlib.ExitStack() as stack:

        def make():
            ends = socket.socketpair()
            for end in ends:
                stack.enter_context(end)
                end.setblocking(False)
            return ends

        yield make


def flood(hub, ends):
    """Make one event of the hub's cause the next, for ever; return the list of those that were served."""
    ours, theirs = ends
    served = []

    def ready(_events):
        served.append(ours.recv(1))
        theirs.send(b"x")

    hub.watch(ours.fileno(), READABLE, ready)
    theirs.send(b"x")
    return served


async def turns_forever():
    """Be runnable all the time."""
    while True:
        await trio.lowlevel.checkpoint()


def test_the_installed_trio_can_be_waited_for():
    """The hub waits in the place of the Trio that is installed: if not, Trio has changed, and `trio_wait.py` must."""

    async def main():
        trio_wait.private_parts()

    try:
        trio.run(main)
    except trio_wait.TrioDiffersError as error:
        pytest.fail(f"the hub cannot wait in Trio's place any more, so that every chunk costs more: {error}")


async def test_events_reach_plain_functions_and_wake_tasks(hub, pair):
    """A function is called for what arrives, while all tasks sleep, and may wake one of them."""
    ours, theirs = pair()
    seen, woken = [], trio.Event()

    def ready(_events):
        seen.append(ours.recv(100))
        if seen == [b"one"]:
            theirs.send(b"two")
        else:
            woken.set()

    hub.watch(ours.fileno(), READABLE, ready)
    threading.Timer(0.05, theirs.send, [b"one"]).start()
    with trio.fail_after(LIMIT_S):
        await woken.wait()
    assert seen == [b"one", b"two"]
    hub.forget(ours.fileno())
    theirs.send(b"unheard")
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert seen == [b"one", b"two"]


async def test_a_flood_of_events_leaves_all_others_their_turn(hub, pair):
    """While the hub is never without events, timers, tasks, threads, signals, sockets and new connections are served."""
    served = [flood(hub, pair()) for _ in range(READY_MAX + 1)]
    with trio.fail_after(LIMIT_S):
        before = sum(map(len, served))
        await trio.sleep(0.01)
        await until(lambda: sum(map(len, served)) > before)
        await trio.to_thread.run_sync(len, "")
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        ours, theirs = pair()
        theirs.send(b"x")
        await trio.lowlevel.wait_readable(ours)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            signal.raise_signal(signal.SIGUSR1)
            assert await anext(signals) == signal.SIGUSR1
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener, await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1]) as client:
            async with await listener.accept() as accepted:
                await accepted.send_all(b"x")
                assert await client.receive_some() == b"x"
        await until(lambda: all(served))


async def test_a_flood_of_tasks_leaves_the_hub_its_turn(hub, pair, nursery):
    """While a task is always runnable, the hub serves an event within two of the task's turns."""
    nursery.start_soon(turns_forever)
    served = flood(hub, pair())
    for _ in range(20):
        await trio.lowlevel.checkpoint()
    assert len(served) >= 10


async def test_sleeping_tasks_are_woken(hub, pair):
    """With no event of the hub's, timers, threads, signals and sockets end Trio's wait at once."""
    with trio.fail_after(LIMIT_S):
        await trio.sleep(0.01)
        await trio.to_thread.run_sync(threading.Event().wait, 0.01)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            threading.Timer(0.05, signal.raise_signal, [signal.SIGUSR1]).start()
            assert await anext(signals) == signal.SIGUSR1
        ours, theirs = pair()
        threading.Timer(0.05, theirs.send, [b"x"]).start()
        await trio.lowlevel.wait_readable(ours)


def countdown(hub, ends, events=1000):
    """Make one event of the hub's cause the next, so often; return the list of those that are to come."""
    ours, theirs = ends
    left = list(range(events))

    def ready(_events):
        ours.recv(1)
        left.pop()
        if left:
            theirs.send(b"x")

    hub.watch(ours.fileno(), READABLE, ready)
    theirs.send(b"x")
    return left


async def test_a_moment_with_events_is_no_idle_one(hub, pair):
    """`wait_all_tasks_blocked` waits until the hub has nothing to do either."""
    left = countdown(hub, pair())
    await trio.testing.wait_all_tasks_blocked()
    assert left == []


async def test_virtual_time_does_not_pass_while_there_are_events(pair, nursery, autojump_clock):
    """Under a clock of the tests a task serves the hub, before time jumps."""
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    left = countdown(hub, pair())
    await trio.sleep(1)
    assert left == []
    assert "in a task" in repr(hub)


async def test_a_bug_costs_one_socket(hub, pair, caplog):
    """A function that raises is not called again; others are."""
    (bad, to_bad), good = pair(), pair()
    calls = []

    def ready(_events):
        calls.append(bad.recv(1))
        raise RuntimeError("a bug")

    hub.watch(bad.fileno(), READABLE, ready)
    served = flood(hub, good)
    to_bad.send(b"x")
    await until(lambda: calls)
    to_bad.send(b"x")
    seen = len(served)
    await until(lambda: len(served) > seen + 10)
    assert calls == [b"x"]
    assert "a bug moving bytes" in caplog.text


async def test_hubs_of_one_run_share_it(pair, nursery):
    """The first waits in Trio's place and the second in a task; when the first has ended, a third takes its place."""
    scopes, hubs = [], []
    ended = trio.Event()

    async def run(hub, scope):
        with scope:
            await hub.run_forever()
        ended.set()

    for is_first in (True, False):
        hubs.append(Hub())
        scopes.append(trio.CancelScope())
        nursery.start_soon(run, hubs[-1], scopes[-1])
        await trio.testing.wait_all_tasks_blocked()
        assert ("in a task" in repr(hubs[-1])) != is_first
    served = [flood(hub, pair()) for hub in hubs]
    await until(lambda: min(map(len, served)) > 100)
    scopes[0].cancel()
    await ended.wait()
    third = Hub()
    nursery.start_soon(third.run_forever)
    served = [served[1], flood(third, pair())]
    before = len(served[0])
    await until(lambda: len(served[0]) > before + 100)
    await until(lambda: len(served[1]) > 100)
    assert "in a task" not in repr(third)


async def test_trio_is_as_before_when_the_hub_has_ended(pair):
    """Trio waits on its own again, and nothing of the hub's is called any more."""
    ours, theirs = pair()
    async with trio.open_nursery() as nursery:
        hub = Hub()
        nursery.start_soon(hub.run_forever)
        served = flood(hub, (ours, theirs))
        await until(lambda: len(served) > 100)
        nursery.cancel_scope.cancel()
    seen = len(served)
    with trio.fail_after(LIMIT_S):
        await trio.sleep(0.01)
        await trio.to_thread.run_sync(len, "")
    assert len(served) == seen
    trio_wait.private_parts()


class Deadline:
    """Notes when it was noticed."""

    def __init__(self, deadline):
        self.deadline = deadline
        self.expired_at = None

    def expire(self):
        self.expired_at = trio.current_time()


async def test_a_bug_at_a_deadline_ends_no_other(nursery, autojump_clock, caplog):
    """It is called once; later deadlines are noticed."""
    hub, calls = Hub(), []

    class Bad(Deadline):
        def expire(self):
            calls.append(self)
            raise RuntimeError("a bug")

    nursery.start_soon(hub.run_forever)
    bad, good = Bad(trio.current_time() + 1), Deadline(trio.current_time() + 3)
    hub.time(bad)
    hub.time(good)
    await trio.sleep(5)
    assert calls == [bad]
    assert good.expired_at is not None
    assert "a bug at the deadline" in caplog.text


async def test_deadlines_are_noticed_and_cost_nothing_where_there_are_none(nursery, autojump_clock):
    """What has passed its deadline is told so once, not much later; without deadlines the hub sleeps for ever."""
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    for _ in range(2):
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        early, late, never = (Deadline(trio.current_time() + after_s) for after_s in (1, 2.1, 1))
        for deadline in (early, late, never):
            hub.time(deadline)
        hub.untime(never)
        await trio.sleep(4)
        for deadline in (early, late):
            assert deadline.deadline < deadline.expired_at <= deadline.deadline + SWEEP_S
        assert never.expired_at is None
