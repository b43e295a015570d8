"""Learns from each load of a managed worker how much GPU memory its model needs.

The figures are kept in the state directory for the next gateway, for preflight and for the command `estimate`.
Workers that joined teach nothing: any caller may be such a worker.
"""

import contextlib
import logging
import pathlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import attrs
import trio
from prometheus_client import Metric

from ichat.config.engine_args import arguments_of
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.engines.kept_flags import version_of
from ichat.hardware.gpus import GpuReader
from ichat.hardware.machines import machine_gpus
from ichat.listeners import Listeners
from ichat.observability.prometheus_families import family
from ichat.placement.cache import bytes_of_blocks
from ichat.placement.estimate import estimate, taken_bytes
from ichat.placement.learnt import (
    LearntMemories,
    LearntMemory,
    MemoryLack,
    cache_flags_of,
    key_of,
    learnt_from,
    raised_by,
    version_in,
)
from ichat.placement.model_shape import UnknownShape
from ichat.placement.settings import SHARE, Arguments, number_of, settings_of
from ichat.placement.weights import DamagedFile
from ichat.preflight.facts import real_path_of
from ichat.preflight.learnt_file import LEARNT_FILE, read_learnt, write_learnt
from ichat.preflight.model_memory import describe_model
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import MachineGpu
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.launch import environment_of, python_of
from ichat.supervisor.managed_worker import ManagedWorker

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""The pause after each look at all workers."""
LACKS_MAX = 64
"""The most launches without enough memory that wait for a look."""
_OWN_CACHE = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""vLLM's arguments for the size of its KV cache itself, which it then does not derive from its share of the GPU."""


@attrs.frozen
class LoadReport:
    """The report on a launch."""

    spec: ManagedWorkerConfig
    gpus: Sequence[MachineGpu]
    """The GPUs that the worker uses."""
    version: str
    """Of the engine; "" if it is not known."""
    memory: EngineMemory = EngineMemory()
    effective: Arguments = attrs.field(factory=dict[str, object])
    """All arguments of the engine; empty if the worker has not reported them."""


@attrs.frozen
class LoadFacts:
    """The facts about a load, apart from the engine's own figures."""

    known: LearntMemory
    """Without the figures that the load itself has given."""
    taken_bytes: int | None
    """The part of each GPU that vLLM shares between KV cache and everything else; None: not known."""
    cache_bytes: int | None
    """The size of the KV cache, by the number of its blocks; None: not known."""


class MemoryLearner:
    """Keeps the memory of models at their last loads."""

    def __init__(
        self,
        context: SupervisorContext,
        workers: Mapping[str, ManagedWorker],
        directory: str,
        gpus: GpuReader,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`workers` are all managed workers; `directory` is the gateway's state directory."""
        self._context = context
        self._workers = workers
        self._directory = directory
        self._gpus = gpus
        self._pause_s = pause_s
        self._memories = context.learnt
        self._learnt: dict[str, str] = {}
        """The start of each worker from which it has learnt."""
        self._lacks: deque[tuple[ManagedWorkerConfig, MemoryLack]] = deque(maxlen=LACKS_MAX)
        self._is_due = True
        self._woken: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<MemoryLearner {self._memories!r}>"

    async def load(self) -> None:
        """Go on with the figures of an earlier gateway; a damaged file is put aside."""
        found = await trio.to_thread.run_sync(_read_or_put_aside, self._directory)
        self._memories.restore(list(found))

    async def learn_forever(self) -> None:
        """Learn from each load that ends well, and from each launch that ends for lack of memory."""
        self._context.table.changed.add(self._wake)
        self._context.lacked.add(self._note_lack)
        while True:
            await self._context.gate.wait_open()
            self._is_due = False
            try:
                await self._learn()
            except Exception:  # no worker may be affected by any error here
                log.exception("a bug in learning from loads")
            await trio.sleep(self._pause_s)
            while not self._is_due:
                await self._woken.wait()

    def families(self) -> Iterator[Metric]:
        """Return the families for Prometheus."""
        ratios = {one.name: one.error_ratio for one in self._memories}
        yield family("ichat_estimate_error_ratio", {name: ratio for name, ratio in ratios.items() if ratio is not None})

    def _wake(self) -> None:
        self._is_due = True
        self._woken()

    def _note_lack(self, spec: ManagedWorkerConfig, lack: MemoryLack) -> None:
        self._lacks.append((spec, lack))
        self._wake()

    async def _learn(self) -> None:
        self._learnt = {worker_id: start for worker_id, start in self._learnt.items() if worker_id in self._workers}
        found = [await self._learn_from(worker) for worker in list(self._workers.values())]
        while self._lacks:
            found.append(await self._raise(*self._lacks.popleft()))
        for one in filter(None, found):
            self._memories.add(one)
        if any(found):
            await self._save()

    async def _save(self) -> None:
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(write_learnt, self._directory, self._memories)
        except OSError as error:
            log.error("%s/%s cannot be written: %s", self._directory, LEARNT_FILE, error.strerror or error)

    async def _learn_from(self, worker: ManagedWorker) -> LearntMemory | None:
        """Return the figures of a load that has ended well; None: there is nothing new."""
        record, heartbeat = worker.record, worker.record.heartbeat
        if worker.holds.on != "here":
            return None
        if heartbeat is None or heartbeat.memory is None or record.machine is None or heartbeat.state != "ready":
            return None
        if self._learnt.get(worker.id) == heartbeat.start_id:
            return None
        self._learnt[worker.id] = heartbeat.start_id
        spec, version = worker.holds, heartbeat.versions.get(worker.holds.backend, "")
        effective = record.args.unpack() if record.args is not None else {}
        used = used_gpus(spec, record.machine.gpus or ())
        facts = await self._facts_of(LoadReport(spec, used, version, heartbeat.memory, effective))
        if facts is None:
            return None
        log.info("worker %s: its memory is known for later loads", worker.id)
        return learnt_from(heartbeat.memory, facts.known, taken_bytes=facts.taken_bytes, cache_bytes=facts.cache_bytes)

    async def _raise(self, spec: ManagedWorkerConfig, lack: MemoryLack) -> LearntMemory | None:
        """Return the figures after a launch that ended for lack of memory; None: nothing follows from it."""
        used = used_gpus(spec, machine_gpus(await self._gpus.find() or ()))
        version = await trio.to_thread.run_sync(_version_for, self._context.config, spec, abandon_on_cancel=True)
        facts = await self._facts_of(LoadReport(spec, used, version))
        if facts is None:
            return None
        now, known = facts.known, self._memories.find(facts.known.key, facts.known.version)
        known = now if known is None else attrs.evolve(known, at=now.at, estimated_bytes=now.estimated_bytes)
        return raised_by(lack, known, taken_bytes=facts.taken_bytes)

    async def _facts_of(self, report: LoadReport) -> LoadFacts | None:
        """Return the facts about a launch; None: its GPUs are of several kinds, or divided into instances (MIG)."""
        split = {gpu.index for gpu in await self._gpus.find() or () if gpu.is_split}
        kinds = {(gpu.name, gpu.memory_total_bytes) for gpu in report.gpus}
        if len(kinds) > 1 or any(gpu.index in split for gpu in report.gpus):
            return None
        return await trio.to_thread.run_sync(read_load, self._context.config, report, abandon_on_cancel=True)


def _version_for(config: Config, spec: ManagedWorkerConfig) -> str:
    """Return the version of a worker's engine, by its interpreter; "" if it is not known."""
    return version_of(spec.backend, python_of(config, spec)) or ""


def _read_or_put_aside(directory: str) -> LearntMemories:
    """Return the figures in a state directory; a file that cannot be read gets another name."""
    found, why = read_learnt(directory)
    if why:
        log.error("%s", why)
        path = pathlib.Path(directory, LEARNT_FILE)
        with contextlib.suppress(OSError):
            path.rename(path.with_suffix(".unread"))
    return found


def used_gpus(spec: ManagedWorkerConfig, gpus: Sequence[MachineGpu]) -> Sequence[MachineGpu]:
    """Return the GPUs of a worker: those that it holds memory of, or else those that it may use."""
    held = [gpu for gpu in gpus if gpu.held_bytes]
    return held or [gpu for gpu in gpus if spec.gpu_ids is None or gpu.index in spec.gpu_ids]


def read_load(config: Config, report: LoadReport) -> LoadFacts:
    """Return the facts about a launch, by the model's files here: it belongs in a thread.

    Its GPUs are of the same kind.
    """
    spec, memory, arguments = report.spec, report.memory, arguments_of(report.spec)
    gpu = report.gpus[0] if report.gpus else MachineGpu(0)
    total = gpu.memory_total_bytes or 0
    weights_bytes = estimated = cache_bytes = None
    try:
        settings = settings_of(spec.backend, arguments)
        model = describe_model(spec.model_path, arguments, environment_of(config, spec, ""))
        found = estimate(model.shape, model.weights(settings.element), settings, total or None)
        weights_bytes, estimated = found.parts[0].bytes, sum(part.bytes for part in found.parts)
        if memory.blocks is not None and memory.block_tokens is not None:
            settings = attrs.evolve(settings, block=memory.block_tokens)
            cache_bytes = bytes_of_blocks(model.shape, settings, memory.blocks)
    except (UnknownShape, DamagedFile, OSError):
        pass  # the engine's own figures count without a shape as well
    known, taken = {**arguments, **report.effective}, None
    if spec.backend == "vllm" and total and not any(known.get(name) for name in _OWN_CACHE):
        taken = taken_bytes(number_of(known, *SHARE, default=0.0) or None, total)
    facts = LearntMemory(
        key_of(real_path_of(spec.model_path), spec.backend, arguments, weights_bytes, (gpu.name, total)),
        version_in(report.version),
        spec.model_name,
        round(time.time(), 3),
        cache_flags=cache_flags_of(arguments),
        held_bytes=max((gpu.held_bytes or 0 for gpu in report.gpus), default=0) or None,
        estimated_bytes=estimated if total else None,
    )
    return LoadFacts(facts, taken, cache_bytes)
