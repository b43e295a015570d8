"""Waiting for what the registry knows: no loop looks at it again and again."""

from collections.abc import Callable

import trio

from ichat.routing.balancer import Endpoint
from ichat.routing.registry import Registry
from ichat.routing.worker_record import State, WorkerRecord


async def wait_changed(registry: Registry) -> None:
    """Wait until something in the registry has changed, but for what only time changes."""
    changed = trio.Event()
    registry.add_listener(changed.set)
    try:
        await changed.wait()
    finally:
        registry.remove_listener(changed.set)


async def wait_state(registry: Registry, worker: WorkerRecord, wanted: Callable[[State], bool]) -> State:
    """Wait until a worker is in a state that is wanted, by what it says or by its silence, and return that state."""
    while not wanted(state := registry.state(worker)):
        with trio.move_on_at(registry.state_until(worker)):
            await wait_changed(registry)
    return state


async def wait_idle(endpoint: Endpoint) -> None:
    """Wait until an endpoint has no request in flight."""
    if endpoint.in_flight:
        idle = trio.Event()
        endpoint.when_idle.add(idle.set)
        try:
            await idle.wait()
        finally:
            endpoint.when_idle.discard(idle.set)
