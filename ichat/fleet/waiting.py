"""Waiting for the balancer: for a lease, and for circuits that can be tried again. No loop polls it."""

import math
from collections.abc import Callable

import trio

from ichat.routing.availability import Draining, Full, Loadable, Refusal
from ichat.routing.balancer import Balancer
from ichat.routing.queue import Waiter
from ichat.routing.request import Lease, RoutingRequest


class LeaseWait:
    """A request that waits for a lease. It needs no task, only a call at its `deadline`. Purely synchronous."""

    __slots__ = ("_balancer", "_loading", "_waiter", "_waits_for_load", "_woken", "deadline", "is_over")

    def __init__(
        self,
        balancer: Balancer,
        request: RoutingRequest,
        queue_s: float,
        loading: Callable[[Loadable], float],
        woken: Callable[[], None],
    ) -> None:
        """Join the queue of the request's model for `queue_s` at most.

        `loading` is called when it begins to wait for the model to be loaded, and returns for how long it does so in
        all. `woken` is called if the wait is over before its deadline, maybe at once. It must only note that, since the
        balancer is at work.
        """
        self._balancer = balancer
        self._loading = loading
        self._woken = woken
        self._waits_for_load = False
        self.is_over = False
        """Whether there is a lease, or there will be none."""
        self.deadline = -math.inf
        """When `expire` is called if it is not over until then, on the balancer's clock. It may change then."""
        self._waiter: Waiter | Full | Draining | None = balancer.wait(request, self._wake)
        if not isinstance(self._waiter, Waiter):
            self.is_over = True
        elif not self.is_over:
            self.deadline = self._waiter.since + queue_s
            self._wait_for_load(self._waiter)

    def __repr__(self) -> str:
        return f"<LeaseWait until {self.deadline:.3f}{', over' if self.is_over else ''}>"

    def expire(self) -> None:
        """Called at its deadline: from now on it waits for a load, if it did not, or it is over."""
        if not self.is_over and isinstance(self._waiter, Waiter):
            self.is_over = self._waits_for_load or not self._wait_for_load(self._waiter)

    def end(self) -> Lease | Refusal:
        """Leave the queue, and return the lease, or why there is none. It is called once, when the wait is over."""
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        if not isinstance(waiter, Waiter):
            return waiter
        self._balancer.withdraw(waiter)
        return waiter.lease or self._balancer.why_no_lease(waiter)

    def withdraw(self) -> None:
        """Leave the queue, and return a lease that was given: the client has gone. Harmless after `end`."""
        waiter, self._waiter = self._waiter, None
        if isinstance(waiter, Waiter):
            if waiter.lease is not None:
                waiter.lease.release()
            self._balancer.withdraw(waiter)

    def _wake(self) -> None:
        self.is_over = True
        self._woken()

    def _wait_for_load(self, waiter: Waiter) -> bool:
        """Wait for a load for as long as `loading` says, if the model can be loaded; return whether it can."""
        load = self._balancer.loadable(waiter.request.model)
        if load is not None:
            self._waits_for_load, self.deadline = True, waiter.since + self._loading(load)
        return load is not None


async def wait_lease(
    balancer: Balancer, request: RoutingRequest, queue_s: float, loading: Callable[[Loadable], float]
) -> Lease | Refusal:
    """Wait for a lease, or return why there is none; see `LeaseWait`."""
    woken = trio.Event()
    wait = LeaseWait(balancer, request, queue_s, loading, woken.set)
    try:
        await until_over(wait, woken)
        return wait.end()
    finally:
        wait.withdraw()


async def until_over(wait: LeaseWait, woken: trio.Event) -> None:
    """Wait until a wait is over that sets this event when it is."""
    while not wait.is_over:
        with trio.move_on_at(wait.deadline) as bound:
            await woken.wait()
        if bound.cancelled_caught:
            wait.expire()


async def retry_forever(balancer: Balancer) -> None:
    """Let waiting requests try circuits as soon as these can be tried again."""
    while True:
        with trio.move_on_at(balancer.retry_at):
            await balancer.retry_changed.wait()
        if trio.current_time() >= balancer.retry_at:
            balancer.dispatch_waiting()
