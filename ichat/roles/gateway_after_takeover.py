"""A gateway after a takeover: the old process ends its connections, and the new process serves it meanwhile."""

import logging
import math
from collections.abc import AsyncIterator

import trio

from ichat.http.listeners import close_all, listening_at
from ichat.relays.owner import KILL_S
from ichat.roles.gateway_components import Components, begin_desks, inner_door, make_relays
from ichat.roles.gateway_takeover import GatewayGiver, HandedGateway
from ichat.service_manager import Notifier
from ichat.takeover.getting import Takeover
from ichat.takeover.giving import TakeoverServer

log = logging.getLogger(__name__)

FOLLOW_S, FOLLOW_AGAIN_S = 5.0, 0.05
"""How long the service manager may need to follow the new process, and the pause before the next message."""
REPORT_S = 5.0
"""How long the new process may need for the last reports."""


async def serve_old_process(giver: GatewayGiver, takeover: Takeover, handed: HandedGateway | None) -> None:
    """Answer the requests that the old process still gets, and its relays, until they have ended."""
    has_relays = giver.components.data.relays is not None
    with listening_at("" if has_relays else giver.state.inner_socket) as inner:
        async with trio.open_nursery() as nursery:
            if not has_relays:
                nursery.start_soon(inner_door(giver.components).serve_forever, inner)
            async with trio.open_nursery() as ends:
                if not has_relays and handed is not None and handed.has_relays:
                    ends.start_soon(_end_relays, giver)
                await takeover.follow_old(giver.components.others.receive)
                giver.components.others.end()
                log.info("the old process has ended")
                giver.state.starts.note_old_end()
            nursery.cancel_scope.cancel()


async def _end_relays(giver: GatewayGiver) -> None:
    """Adopt the relays of the old process, and have them retire: this process accepts connections itself."""
    components = giver.components
    config, handler = components.reloader.config, components.data.handler
    relays = make_relays(config, components.control, handler, giver.state)
    async with trio.open_nursery() as nursery:
        begin_desks(nursery, relays, handler, components.control.fleet.table)
        close_all(await relays.find())
        giver.relays.append(relays)
        components.data.figures.append(relays.figures)
        if components.control.ledger.enabled:
            await components.control.ledger.read_marks()
        await nursery.start(relays.run, [])
        try:
            nursery.start_soon(relays.open)
            for relay in [*relays.relays.values()]:
                await relay.gone.wait()
        finally:
            giver.relays.remove(relays)
            components.data.figures.remove(relays.figures)
            with trio.move_on_after(KILL_S, shield=True):
                await relays.kill_all()
        nursery.cancel_scope.cancel()


async def end_connections(
    components: Components, server: TakeoverServer[GatewayGiver], doors: trio.Nursery, signals: AsyncIterator[int]
) -> None:
    """End the connections of this process, now that another process has its gateway."""
    door = components.data.door
    giver = server.giver
    giver.follow()
    components.control.log_store.close_streams()
    components.events.close()
    doors.start_soon(_obey, signals, components, server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_manager, giver.notifier, server.new_pid)
        async with trio.open_nursery() as reports:
            reports.start_soon(giver.requests.report_forever, server.report)
            await door.retire(giver.retirement())
            await components.others.wait_end()
            reports.cancel_scope.cancel()
        with trio.move_on_after(REPORT_S):
            await giver.requests.report(server.report)
    log.info("this process has no connection any more, and ends")
    doors.cancel_scope.cancel()


async def tell_manager(notifier: Notifier, new_pid: int) -> None:
    """Have the service manager follow the new process."""
    with trio.move_on_after(FOLLOW_S):
        while not notifier.follow(new_pid):  # noqa: ASYNC110 nothing says when it can be sent
            await trio.sleep(FOLLOW_AGAIN_S)
        return
    log.error("the service manager does not know that process %d is the gateway: stop that process itself", new_pid)


async def _obey(signals: AsyncIterator[int], components: Components, server: TakeoverServer[GatewayGiver]) -> None:
    """Cut the connections at a signal; if the service manager may not know the new process yet, that stops, too."""
    rest_s = math.inf
    with trio.move_on_after(FOLLOW_S if server.giver.notifier.variables() else 0):
        await anext(signals)
        server.stop_new()
        rest_s = components.reloader.config.timeouts.drain_s
    with trio.move_on_after(rest_s):
        await anext(signals)
    components.data.door.hurry()
    components.others.end()
