"""A restarted gateway asks the workers it remembers for a heartbeat, so that none is away until the next heartbeat."""

import functools
import logging

import trio

from ichat.fleet.registry import Registry
from ichat.fleet.worker_record import WorkerRecord
from ichat.http import client
from ichat.http.pool import Upstream
from ichat.protocol.messages import PROOF_HEADER

log = logging.getLogger(__name__)

ASK_S = 5.0
"""The limit on a worker's answer."""


async def request_heartbeats(registry: Registry, proof: bytes) -> None:
    """Ask every worker of iChat's own that has sent no heartbeat since the gateway's start.

    The proof, if it is not empty, shows them that their gateway asks.
    """
    silent = [
        worker
        for worker in registry
        if worker.is_stale or (worker.managed and worker.heartbeat is None and worker.unix_socket)
    ]
    await client.ask_each(silent, functools.partial(_ask, proof))


def upstream_of(worker: WorkerRecord) -> Upstream:
    """Return where the gateway's own questions to a worker go: to its socket if there is any."""
    if worker.unix_socket is None and worker.heartbeat is not None:
        return Upstream(worker.id, worker.heartbeat.host, worker.heartbeat.port)
    return Upstream(worker.id, worker.unix_socket or "", 0)


async def _ask(proof: bytes, worker: WorkerRecord) -> None:
    headers = [(PROOF_HEADER, proof)] if proof else []
    try:
        with trio.fail_after(ASK_S):
            async with await client.request(upstream_of(worker), "/beat", headers, method="POST"):
                pass
    except client.FAILURES as error:
        log.debug("worker %s was not reached: %r", worker.id, error)
