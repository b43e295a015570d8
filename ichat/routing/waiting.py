"""Waiting for what the registry and the balancer know: no loop polls them."""

from collections.abc import Callable

import trio

from ichat.routing.availability import Refusal
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.queue import Waiter
from ichat.routing.registry import Registry
from ichat.routing.request import Lease, RoutingRequest


async def wait_changed(registry: Registry) -> None:
    """Wait until something in the registry has changed, but for what only time changes."""
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
    balancer: Balancer, request: RoutingRequest, queue_s: float, load_wait_s: float, loading: Callable[[], None]
) -> Lease | Refusal:
    """Wait for a lease in the queue of the request's model, or return why there is none after `queue_s`.

    While the model is being loaded, the request waits for `load_wait_s` in all; `loading` is called when that begins.
    """
    granted = trio.Event()
    waiter = balancer.wait(request, granted.set)
    if not isinstance(waiter, Waiter):
        return waiter
    try:
        if not balancer.is_loadable(request.model):
            with trio.move_on_after(queue_s):
                await granted.wait()
        if not granted.is_set() and balancer.is_loadable(request.model):
            loading()
            with trio.move_on_at(waiter.since + load_wait_s):
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
