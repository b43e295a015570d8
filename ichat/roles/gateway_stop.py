"""The ordered stop of a gateway: requests under way end first, then the workers.

Workers on other machines still reach the gateway meanwhile: a launch has ended when its guard has reported that.
"""

import logging
import socket
from collections.abc import AsyncIterator

import attrs
import trio

from ichat import errors
from ichat.errors import Exit
from ichat.http.front_door import FrontDoor
from ichat.http.heads import RequestHead
from ichat.http.listeners import close_all
from ichat.http.tls import server_context
from ichat.proxy.planes import WORKER_ROUTES
from ichat.roles.gateway_components import Components
from ichat.security.auth import Caller

log = logging.getLogger(__name__)

ANSWERS_END_S = 2.0
"""How long the last answers to workers on other machines may last, when all workers have ended."""


async def drain(
    components: Components, listeners: list[socket.socket], signals: AsyncIterator[int], doors: trio.Nursery
) -> FrontDoor[Caller] | None:
    """Let requests under way end, and begin to end the workers; after another of `signals` nothing is waited for.

    Return the door that stays open for workers on other machines, if there are any; its tasks are in `doors`.
    """
    data, supervisor = components.data, components.control.supervisor
    log.info("stop signal: draining; a second signal stops at once")
    data.context.balancer.close()
    doors.start_soon(_hurry_when_told, signals, components)
    left = None
    if components.control.orders.orders.of_managed():
        try:
            left = door_for_workers(components)
        except Exit as error:
            log.error("workers on other machines cannot report their ends: %s", error)
        else:
            doors.start_soon(left.serve_forever, [one.dup() for one in listeners])
    if data.relays is not None:
        close_all(listeners)
        await data.relays.drain()
    await data.door.drain()
    data.context.shadows.stop()
    supervisor.stop()
    return left


def door_for_workers(components: Components) -> FrontDoor[Caller]:
    """Return a door for the routes of workers; all other requests get 503.

    Raises Exit 64 if relays have the connections, and the certificate is not usable any more.
    """
    data, config = components.data, components.reloader.config
    handler, auth = data.handler, components.control.auth

    def authenticate(head: RequestHead, peer: str) -> Caller:
        if head.path not in WORKER_ROUTES:
            raise errors.draining()
        return handler.authenticate(head, peer)

    tls, settings = data.door.tls, config.server_settings
    if data.relays is not None and settings.tls_certificate is not None and settings.tls_key is not None:
        tls = server_context(settings.tls_certificate, settings.tls_key)
    timeouts = attrs.evolve(config.timeouts, drain_s=ANSWERS_END_S)
    return FrontDoor(
        b"gateway", handler.answer, authenticate, data.hub, config.limits, timeouts, tls, handler.refused,
        more_headers=handler.more_headers, is_proxy=auth.is_proxy,
    )  # fmt: skip


async def _hurry_when_told(signals: AsyncIterator[int], components: Components) -> None:
    await anext(signals)
    log.info("second signal: stopping now without waiting for requests")
    if components.data.relays is not None:
        components.data.relays.hurry()
    components.data.door.hurry()
    components.control.supervisor.hurry()
