"""Waiting for the balancer: for a lease, and for circuits that can be tried again. No loop polls it."""

from collections.abc import Callable

import trio

from ichat.routing.availability import Loadable, Refusal
from ichat.routing.balancer import Balancer
from ichat.routing.queue import Waiter
from ichat.routing.request import Lease, RoutingRequest


async def wait_lease(
    balancer: Balancer, request: RoutingRequest, queue_s: float, loading: Callable[[Loadable], float]
) -> Lease | Refusal:
    """Wait for a lease in the queue of the request's model, or return why there is none after `queue_s`.

    `loading` is called when it begins to wait for the model to be loaded, and returns for how long it does so in all.
    """
    granted = trio.Event()
    waiter = balancer.wait(request, granted.set)
    if not isinstance(waiter, Waiter):
        return waiter
    try:
        if balancer.loadable(request.model) is None:
            with trio.move_on_after(queue_s):
                await granted.wait()
        if not granted.is_set() and (load := balancer.loadable(request.model)) is not None:
            with trio.move_on_at(waiter.since + loading(load)):
                await granted.wait()
    except trio.Cancelled:
        if waiter.lease is not None:
            waiter.lease.release()
        raise
    finally:
        balancer.withdraw(waiter)
    return waiter.lease or balancer.why_no_lease(waiter)


async def retry_forever(balancer: Balancer) -> None:
    """Let waiting requests try circuits as soon as these can be tried again."""
    while True:
        with trio.move_on_at(balancer.retry_at):
            await balancer.retry_changed.wait()
        if trio.current_time() >= balancer.retry_at:
            balancer.dispatch_waiting()
