"""The calls that have a worker's engine free its memory, and allocate it again, while the worker goes on."""

import trio

from ichat.config.schema import Config
from ichat.fleet.recall import upstream_of
from ichat.fleet.registry import Registry
from ichat.fleet.worker_record import WorkerRecord
from ichat.http import client
from ichat.protocol.messages import PROOF_HEADER
from ichat.security.keys import proof_of
from ichat.supervisor.launch import token_of

SLEEP_S = 120.0
"""The limit on an engine's freeing of its memory, in seconds."""
ANSWER_BYTES_MAX = 4096
"""The bytes that are read of a worker's reason for a refusal."""


async def put_to_sleep(config: Config, registry: Registry, worker: WorkerRecord) -> None:
    """Have a worker's engine free its memory.

    Raises one of `client.FAILURES` if the worker refuses, or does not do it in time.
    """
    with trio.fail_after(SLEEP_S):
        await _call(config, worker, "/sleep")
        await _wait_state(registry, worker, "asleep")


async def wake(config: Config, registry: Registry, worker: WorkerRecord) -> None:
    """Have a worker's engine allocate its memory again. Raises one of `client.FAILURES`."""
    with trio.fail_after(config.timeouts.load_s):
        await _call(config, worker, "/wake")
        await _wait_state(registry, worker, "ready")


async def _call(config: Config, worker: WorkerRecord, target: str) -> None:
    token = token_of(config).encode()
    headers = [(PROOF_HEADER, proof_of(token))] if token else []
    async with await client.request(upstream_of(worker), target, headers, method="POST") as response:
        text = b""
        async for piece in response:
            text = (text + piece)[:ANSWER_BYTES_MAX]
    if response.status != 200:
        raise ValueError(f"it answered {response.status}: {text.decode(errors='replace')}")


async def _wait_state(registry: Registry, worker: WorkerRecord, state: str) -> None:
    """Wait until a worker reports this state. Raises ConnectionError once it has ended."""
    while worker.heartbeat is not None and worker.heartbeat.state != state:
        await registry.changed.wait()
    if worker.heartbeat is None:
        raise ConnectionError("it has ended")
