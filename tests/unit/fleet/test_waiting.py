"""Waiting for changes of workers, in virtual time."""

import pytest
import trio
import trio.testing

from ichat.config.schema import CircuitBreaker, Routing
from ichat.fleet.fleet import Fleet
from ichat.fleet.waiting import LeaseWait, retry_forever, wait_lease
from ichat.http.pool import Upstream
from ichat.protocol.messages import Heartbeat
from ichat.routing.availability import Draining, Full, Loadable, QueueTimeout, Ready
from ichat.routing.balancer import Balancer
from ichat.routing.circuit_breaker import Circuit
from ichat.routing.endpoint import Endpoint
from ichat.routing.request import Lease, RoutingRequest


def heartbeat(state="ready", interval_s=10):
    return Heartbeat(
        worker_id="w", model_name="m", host="127.0.0.1", port=1, state=state, heartbeat_interval=interval_s
    )


async def wait_state(fleet, worker, wanted):
    """Wait as the supervisor does: for a change, or for the time at which silence is one."""
    while fleet.table.state(worker) != wanted:
        with trio.move_on_at(fleet.table.state_until(worker)):
            await fleet.table.changed.wait()


@pytest.fixture
async def fleet(autojump_clock):
    return Fleet({}, trio.current_time, max_in_flight=5)


async def test_a_state_is_waited_for_until_a_heartbeat_brings_it(fleet, autojump_clock):
    """The waiter goes on at the heartbeat that makes the worker ready, not before and not later."""
    worker = fleet.managed.expect("w", ["m"])
    began = trio.current_time()

    async def load():
        await trio.sleep(3)
        fleet.registry.record_heartbeat(heartbeat("loading"))
        await trio.sleep(4)
        fleet.registry.record_heartbeat(heartbeat())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load)
        await wait_state(fleet, worker, "ready")
        assert trio.current_time() - began == pytest.approx(7, abs=0.5)


async def test_silence_is_a_change_as_well(fleet, autojump_clock):
    """A worker that misses its heartbeats becomes unhealthy at a known time, and the waiter wakes then."""
    fleet.registry.record_heartbeat(heartbeat(interval_s=10))
    began = trio.current_time()
    await wait_state(fleet, fleet.table.get("w"), "unhealthy")
    assert trio.current_time() - began == pytest.approx(30, abs=0.5)


async def test_every_change_by_the_supervisor_wakes_waiters(fleet, autojump_clock):
    """Each method that changes a managed worker tells the listeners; a waiter that left is told no more."""
    worker = fleet.managed.expect("w", ["m"])
    changes = [
        lambda: fleet.managed.configure(worker, names=["n"], max_in_flight=1, settings={}),
        lambda: fleet.managed.drain(worker),
        lambda: fleet.managed.restart(worker),
        lambda: fleet.managed.set_piped(worker, is_piped=True),
        lambda: fleet.table.remove(worker),
    ]
    for change in changes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.table.changed.wait)
            await trio.testing.wait_all_tasks_blocked()
            change()
    with trio.move_on_after(1) as scope:
        await fleet.table.changed.wait()
    assert scope.cancelled_caught


async def test_an_endpoint_is_idle_after_its_last_request(fleet, autojump_clock):
    """Every waiter goes on when the last request ends, not when one of several does; an idle endpoint is not waited for."""
    fleet.registry.record_heartbeat(heartbeat())
    endpoint = fleet.table.endpoint_of(fleet.table.get("w"))
    await endpoint.wait_idle()
    endpoint.in_flight = 2
    done = []

    async def wait(name):
        await endpoint.wait_idle()
        done.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a")
        nursery.start_soon(wait, "b")
        await trio.testing.wait_all_tasks_blocked()
        endpoint.end_request()
        await trio.testing.wait_all_tasks_blocked()
        assert done == []
        endpoint.end_request()
    assert sorted(done) == ["a", "b"]
    assert repr(endpoint.idle) == "<Listeners 0>"


async def test_a_circuit_is_tried_as_soon_as_it_can_be(autojump_clock):
    """A waiting request gets its lease when the circuit is half open, without any other event."""
    endpoint = Endpoint(Upstream("a", "a", 1), b"a", 1, circuit=Circuit(CircuitBreaker(failures_max=1, open_s=5)))
    balancer = Balancer(
        lambda _model: Ready([endpoint]), trio.current_time, Routing(policy="least_loaded", queue_max=9)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(retry_forever, balancer)
        held = balancer.lease(RoutingRequest("m"))
        waiter = balancer.wait(RoutingRequest("m"), (granted := trio.Event()).set)
        endpoint.circuit.record_failure(trio.current_time())
        held.release()
        assert waiter.lease is None
        began = trio.current_time()
        await granted.wait()
        assert waiter.lease is not None
        assert trio.current_time() - began == pytest.approx(5, abs=0.5)
        nursery.cancel_scope.cancel()


class Model:
    """One model that can be loaded, with a balancer, and how often a request was told that it waits for a load."""

    def __init__(self):
        self.found = Loadable("worker w is cold", None)
        self.balancer = Balancer(
            lambda _model: self.found, trio.current_time, Routing(policy="least_loaded", queue_max=9)
        )
        self.endpoint = Endpoint(Upstream("a", "a", 1), b"a", 1)
        self.loads = 0

    def _count(self, load):
        assert load is self.found
        self.loads += 1
        return 600

    async def wait(self, queue_s=30):
        """Wait for a lease, and return it, or why there is none, with the seconds that took."""
        began = trio.current_time()
        lease = await wait_lease(self.balancer, RoutingRequest("m"), queue_s, self._count)
        return lease, trio.current_time() - began

    async def become(self, found, after_s):
        await trio.sleep(after_s)
        self.found = found
        self.balancer.dispatch_waiting()


@pytest.mark.parametrize("queue_s", [1, 30, 1000])
async def test_a_load_is_waited_for_longer_than_room(autojump_clock, queue_s):
    """A request waits `load_wait_s` for a load, whatever `queue_s` is, and then knows that it was the load."""
    model = Model()
    refusal, waited_s = await model.wait(queue_s)
    assert (refusal, model.loads, model.balancer.waiting) == (model.found, 1, 0)
    assert waited_s == pytest.approx(600, abs=0.5)


async def test_a_request_goes_on_once_its_model_is_loaded(autojump_clock):
    """It gets its lease then, after longer than a wait for room may take."""
    model = Model()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.become, Ready([model.endpoint]), 500)
        lease, waited_s = await model.wait()
        assert isinstance(lease, Lease)
        assert waited_s == pytest.approx(500, abs=0.5)


async def test_a_wait_for_room_goes_on_for_a_load(autojump_clock):
    """A worker that has to go while requests wait for room there comes again for them: until `load_wait_s` in all."""
    model = Model()
    model.found = Ready([model.endpoint])
    held = model.balancer.lease(RoutingRequest("m"))
    assert isinstance(model.balancer.lease(RoutingRequest("m")), Full)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.become, Loadable("worker w is draining", None), 20)
        refusal, waited_s = await model.wait()
        assert (isinstance(refusal, Loadable), model.loads) == (True, 1)
        assert waited_s == pytest.approx(600, abs=0.5)
    model.found = Ready([model.endpoint])
    refusal, waited_s = await model.wait()
    assert waited_s == pytest.approx(30, abs=0.5), "who waits for room alone waits `queue_s`"
    assert model.loads == 1
    held.release()


async def test_a_request_cancelled_while_it_gets_a_lease_returns_it(autojump_clock):
    """A request that is cancelled in the moment in which its model becomes ready holds no place there."""
    model = Model()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.wait)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        model.found = Ready([model.endpoint])
        model.balancer.dispatch_waiting()
        assert model.endpoint.in_flight == 1
    assert (model.endpoint.in_flight, model.balancer.waiting) == (0, 0)


class Waits:
    """Requests that wait at a single endpoint, without a task, on a clock of their own."""

    def __init__(self, queue_max=9):
        self.now, self.woken = 0.0, []
        self.endpoint = Endpoint(Upstream("a", "a", 1), b"a", 1)
        self.found = Ready([self.endpoint])
        self.balancer = Balancer(
            lambda _model: self.found, lambda: self.now, Routing(policy="least_loaded", queue_max=queue_max)
        )
        self.held = self.balancer.lease(RoutingRequest("m"))

    def begin(self, name):
        return LeaseWait(self.balancer, RoutingRequest("m"), 30, lambda _: 600, lambda: self.woken.append(name))


def test_ten_thousand_requests_wait_without_a_task():
    """Each gets its lease in its turn, by a call: no event loop runs."""
    waits = Waits(queue_max=10_000)
    waiting = [waits.begin(number) for number in range(10_000)]
    waits.held.release()
    for number, wait in enumerate(waiting):
        assert waits.woken[number:] == [number]
        assert wait.is_over
        wait.end().release()
    assert (waits.endpoint.in_flight, waits.balancer.waiting) == (0, 0)


def test_a_wait_without_a_task_ends_at_its_deadline():
    """It is over then, unless the model is loaded now: in that case it goes on, once."""
    waits = Waits()
    short, long = waits.begin("short"), waits.begin("long")
    assert (short.deadline, short.is_over) == (30, False)
    waits.now = 30
    short.expire()
    assert (short.is_over, short.end()) == (True, QueueTimeout())
    waits.found = Loadable("worker w is draining", None)
    long.expire()
    assert (long.deadline, long.is_over) == (600, False)
    long.expire()
    assert (long.is_over, long.end(), waits.woken, waits.balancer.waiting) == (True, waits.found, [], 0)


def test_a_client_that_leaves_returns_the_lease_that_it_just_got():
    waits = Waits()
    with_lease, without = waits.begin("a"), waits.begin("b")
    waits.held.release()
    assert (waits.woken, waits.endpoint.in_flight) == (["a"], 1)
    with_lease.withdraw()
    assert (waits.woken, waits.endpoint.in_flight) == (["a", "b"], 1)
    without.withdraw()
    without.withdraw()
    assert (waits.endpoint.in_flight, waits.balancer.waiting) == (0, 0)


def test_a_full_or_closed_queue_is_no_wait():
    waits = Waits(queue_max=0)
    refused = waits.begin("a")
    assert (refused.is_over, refused.end()) == (True, Full(0))
    waits.balancer.close()
    refused = waits.begin("a")
    assert (refused.is_over, refused.end(), waits.woken) == (True, Draining(), [])
