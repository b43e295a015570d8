"""A restarted gateway asks the workers it remembers for a heartbeat, so that none is away until its next one."""

import logging
from collections.abc import Iterator

import trio

from ichat.http import client
from ichat.http.pool import Upstream
from ichat.protocol import PROOF_HEADER
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How long a worker may take to answer."""
ASKED_AT_ONCE_MAX = 32


async def request_heartbeats(registry: Registry, proof: bytes) -> None:
    """Ask every worker of iChat's own that has sent no heartbeat since the gateway's start.

    The proof, if it is not empty, shows them that their gateway asks.
    """
    silent = iter(
        [
            worker
            for worker in registry
            if worker.is_stale or (worker.managed and worker.heartbeat is None and worker.unix_socket)
        ]
    )
    async with trio.open_nursery() as nursery:
        for _ in range(ASKED_AT_ONCE_MAX):
            nursery.start_soon(_ask_each, silent, proof)


async def _ask_each(silent: Iterator[WorkerRecord], proof: bytes) -> None:
    for worker in silent:
        await _ask(worker, proof)


async def _ask(worker: WorkerRecord, proof: bytes) -> None:
    upstream = Upstream(worker.id, worker.unix_socket or "", 0)
    if worker.unix_socket is None and worker.heartbeat is not None:
        upstream = Upstream(worker.id, worker.heartbeat.host, worker.heartbeat.port)
    headers = [(PROOF_HEADER, proof)] if proof else []
    try:
        with trio.fail_after(ASK_S):
            async with await client.request(upstream, "/beat", headers, method="POST"):
                pass
    except client.FAILURES as error:
        log.debug("worker %s was not reached: %r", worker.id, error)
