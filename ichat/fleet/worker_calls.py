"""The gateway's own requests to workers: for a heartbeat after its start, to sleep, to wake, and to end."""

import logging
from typing import Literal

import trio

from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.http import client
from ichat.http.pool import Upstream
from ichat.protocol.messages import PROOF_HEADER

log = logging.getLogger(__name__)

ASK_S = 5.0
"""The limit on a worker's answer to a request for a heartbeat."""
SLEEP_S = 120.0
"""The limit on an engine's freeing of its memory, in seconds."""
ANSWER_BYTES_MAX = 4096
"""The bytes that are read of a worker's reason for a refusal."""


async def request_heartbeats(table: WorkerTable, proof: bytes) -> None:
    """Ask every worker of iChat's own that has sent no heartbeat since the gateway's start, so that none is away.

    The proof, if it is not empty, shows them that their gateway asks.
    """
    silent = [
        worker
        for worker in table
        if worker.is_stale or (worker.managed and worker.heartbeat is None and worker.unix_socket)
    ]

    async def ask(worker: WorkerRecord) -> None:
        await _ask(worker, "/beat", table.proof_of(worker.id) or proof)

    await client.ask_each(silent, ask)


async def end_worker(worker: WorkerRecord, proof: bytes) -> None:
    """Ask a worker to drain and end; it is no error if it does not answer. `proof` is that of its own key."""
    await _ask(worker, "/end", proof)


async def _ask(worker: WorkerRecord, target: str, proof: bytes) -> None:
    try:
        with trio.fail_after(ASK_S):
            await _call(worker, target, proof)
    except client.FAILURES as error:
        log.debug("worker %s was not reached: %r", worker.id, error)


async def change_engine(
    table: WorkerTable, worker: WorkerRecord, proof: bytes, to: Literal["asleep", "ready"], within_s: float
) -> None:
    """Have a worker's engine free its memory, or allocate it again, and wait until the worker reports that.

    Raises one of `client.FAILURES` if the worker refuses, has ended, or does not do it in time.
    """
    with trio.fail_after(within_s):
        await _call(worker, "/sleep" if to == "asleep" else "/wake", proof)
        while worker.heartbeat is not None and worker.heartbeat.state != to:
            await table.changed.wait()
    if worker.heartbeat is None:
        raise ConnectionError("it has ended")


async def _call(worker: WorkerRecord, target: str, proof: bytes) -> None:
    """Send a request to a worker's socket, else to its address. Raises ValueError if it refuses."""
    upstream = Upstream(worker.id, worker.unix_socket or "", 0)
    if worker.unix_socket is None and worker.heartbeat is not None:
        upstream = Upstream(worker.id, worker.heartbeat.host, worker.heartbeat.port)
    headers = [(PROOF_HEADER, proof)] if proof else []
    async with await client.request(upstream, target, headers, method="POST") as response:
        text = b""
        async for piece in response:
            text = (text + piece)[:ANSWER_BYTES_MAX]
    if response.status != 200:
        raise ValueError(f"it answered {response.status}: {text.decode(errors='replace')}")
