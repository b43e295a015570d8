"""A worker's engine gives its memory back, and takes it again, while the worker goes on: asked for by the gateway."""

import trio

from ichat.http import client
from ichat.protocol import PROOF_HEADER, WorkerState
from ichat.routing.registry import Registry
from ichat.routing.waiting import wait_changed
from ichat.routing.worker_record import WorkerRecord
from ichat.security.keys import proof_of
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.launch import token_of
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.recall import upstream_of

SLEEP_S = 120.0
"""How long an engine may take to give its memory back."""
ANSWER_BYTES_MAX = 4096
"""So much is read of what a worker says about why it refuses."""


async def put_to_sleep(context: SupervisorContext, worker: ManagedWorker, drain_s: float) -> None:
    """Drain a worker for this time at most, and have its engine give its memory back.

    Raises one of `client.FAILURES` where the worker refuses, or does not do it in time.
    """
    worker.transition = "ending"
    try:
        await worker.drain(drain_s)
        await _change(context, worker.record, "/sleep", "asleep", SLEEP_S)
    finally:
        worker.transition = ""
        if worker.phase == "draining":
            context.registry.resume(worker.record)


async def wake(context: SupervisorContext, worker: ManagedWorker) -> None:
    """Have a worker's engine take its memory again. Raises one of `client.FAILURES`."""
    worker.transition = "waking"
    try:
        await _change(context, worker.record, "/wake", "ready", context.config.timeouts.load_s)
    finally:
        worker.transition = ""


async def _change(
    context: SupervisorContext, worker: WorkerRecord, target: str, state: WorkerState, within_s: float
) -> None:
    """Ask a worker, and wait until its heartbeats say that it is in this state. Raises one of `client.FAILURES`."""
    token = token_of(context.config).encode()
    headers = [(PROOF_HEADER, proof_of(token))] if token else []
    with trio.fail_after(within_s):
        async with await client.request(upstream_of(worker), target, headers, method="POST") as response:
            text = b""
            async for piece in response:
                text = (text + piece)[:ANSWER_BYTES_MAX]
        if response.status != 200:
            raise ValueError(f"it answered {response.status}: {text.decode(errors='replace')}")
        await _wait_state(context.registry, worker, state)


async def _wait_state(registry: Registry, worker: WorkerRecord, state: WorkerState) -> None:
    """Wait until a worker says that it is in this state. Raises ConnectionError once it has ended."""
    while worker.heartbeat is not None and worker.heartbeat.state != state:
        await wait_changed(registry)
    if worker.heartbeat is None:
        raise ConnectionError("it has ended")
