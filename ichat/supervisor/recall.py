"""A gateway that was restarted asks the workers it remembers for a beat, so that none is away until its next one."""

import logging
import ssl

import httpx
import trio

from ichat.protocol import PROOF_HEADER
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How long a worker may take to answer."""
ASKED_AT_ONCE_MAX = 32


async def request_heartbeats(registry: Registry, proof: str) -> None:
    """Ask every worker that has not beaten since the gateway's start. One that is not iChat's own is waited for.

    The proof, if it is not empty, shows them that their gateway asks.
    """
    limit = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
    async with trio.open_nursery() as nursery:
        for worker in registry:
            if worker.is_stale or (worker.managed and worker.heartbeat is None and worker.unix_socket):
                nursery.start_soon(_ask, worker, limit, proof)


async def _ask(worker: WorkerRecord, limit: trio.CapacityLimiter, proof: str) -> None:
    verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used; httpx would read all authorities there are
    transport, url = httpx.AsyncHTTPTransport(verify, uds=worker.unix_socket), "http://localhost/beat"
    if worker.unix_socket is None and worker.heartbeat is not None:
        host = f"[{worker.heartbeat.host}]" if ":" in worker.heartbeat.host else worker.heartbeat.host
        url = f"http://{host}:{worker.heartbeat.port}/beat"
    async with limit:
        try:
            async with httpx.AsyncClient(timeout=ASK_S, trust_env=False, transport=transport) as client:
                await client.post(url, headers={PROOF_HEADER.decode(): proof} if proof else {})
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            log.debug("worker %s was not reached: %s", worker.id, error)
