"""Waiting for changes of the registry and the balancer: no loop polls them."""

from collections.abc import Callable

import trio

from ichat.fleet.registry import Registry
from ichat.routing.availability import Loadable, Refusal
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.queue import Waiter
from ichat.routing.request import Lease, RoutingRequest


async def wait_changed(registry: Registry) -> None:
    """Wait for a change in the registry, except changes by time alone."""
    changed = trio.Event()
    registry.add_listener(changed.set)
    try:
        await changed.wait()
    finally:
        registry.remove_listener(changed.set)


async def wait_idle(endpoint: Endpoint) -> None:
    """Wait until an endpoint has no request in flight."""
    if endpoint.in_flight:
        idle = trio.Event()
        endpoint.when_idle.add(idle.set)
        try:
            await idle.wait()
        finally:
            endpoint.when_idle.discard(idle.set)


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
        changed = trio.Event()
        balancer.on_retry_change = changed.set
        with trio.move_on_at(balancer.retry_at):
            await changed.wait()
        if trio.current_time() >= balancer.retry_at:
            balancer.dispatch_waiting()
