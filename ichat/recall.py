"""A gateway that was restarted asks the workers it remembers for a beat, so that none is away until its next one."""

import logging

import httpx
import trio

from ichat.registry import Registry, Worker

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How long a worker may take to answer."""
ASKED_AT_ONCE_MAX = 32


async def ask_to_beat(registry: Registry, token: str) -> None:
    """Ask every worker that has not beaten since the gateway's start. One that is not iChat's own is waited for.

    The token, if it is not empty, tells them that their gateway asks.
    """
    limit = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
    async with trio.open_nursery() as nursery:
        for worker in registry:
            if worker.is_stale or (worker.managed and worker.beat is None and worker.unix_socket):
                nursery.start_soon(_ask, worker, limit, token)


async def _ask(worker: Worker, limit: trio.CapacityLimiter, token: str) -> None:
    transport, url = None, "http://localhost/beat"
    if worker.unix_socket is not None:
        transport = httpx.AsyncHTTPTransport(uds=worker.unix_socket)
    elif worker.beat is not None:
        host = f"[{worker.beat.host}]" if ":" in worker.beat.host else worker.beat.host
        url = f"http://{host}:{worker.beat.port}/beat"
    async with limit:
        try:
            async with httpx.AsyncClient(timeout=ASK_S, trust_env=False, transport=transport) as client:
                await client.post(url, headers={"x-ichat-token": token} if token else {})
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            log.debug("worker %s was not reached: %s", worker.id, error)
