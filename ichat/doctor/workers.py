"""The managed workers: preflight for all of them at once, and models that must still be fetched from the hub.

`gateway --check` shows the errors of the same findings.
"""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import attrs
import trio

from ichat.config.copies import each_copy
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.engines import UNCHANGED
from ichat.doctor.findings import Finding
from ichat.fleet.registered_servers import id_for
from ichat.hardware.gpus import Gpu
from ichat.placement.learnt import LearntMemories
from ichat.placement.place import NoPlace, Wish
from ichat.preflight.facts import ENGINES, VISIBLE, Facts, read_facts
from ichat.preflight.hub import HubFacts, ask_hub
from ichat.preflight.learnt_file import with_learnt
from ichat.preflight.model_files import weight_bytes
from ichat.preflight.obstacles import Obstacle, gib, obstacles_of
from ichat.preflight.placing import place_tables, read_wish, unbooked
from ichat.supervisor.engine_flags import EngineFlags
from ichat.supervisor.launch import devices_of, environment_of, python_of

PROBE_S = 5.0
"""The longest time in which an interpreter may find its engine, in seconds; a slower interpreter gets a warning."""
CHECKED_AT_ONCE_MAX = 8


@attrs.frozen
class WorkerCheckFacts:
    """The facts about a managed worker before it is started."""

    worker: ManagedWorkerConfig
    worker_id: str
    python: str
    facts: Facts | None
    """None: the system did not answer in time."""
    model_bytes: int | None = None
    """The size of its model's weights, if they are on this machine."""
    why_no_flags: str = ""
    """Why its interpreter has not reported the flags of its engine."""
    wish: Wish | None = None
    """Its wish for GPUs; None: its table names them, or says nothing of them."""
    no_place: str = ""
    """Why no GPUs are free for it, beside the workers before it."""
    probe_s: float = PROBE_S
    """The time that its interpreter was given to find its engine."""

    def beside(
        self, gpus: Sequence[Gpu] | None, running: Collection[str], learnt: LearntMemories
    ) -> "WorkerCheckFacts":
        """Return the same with these GPUs, and the memory of earlier loads.

        A running worker's own port and memory are no obstacles to it.
        """
        if self.facts is None:
            return self
        if self.worker_id in running:
            return attrs.evolve(self, facts=attrs.evolve(self.facts, port="free", port_holders=(), gpus=None))
        known = gpus if self.facts.devices == VISIBLE else None
        facts = with_learnt(attrs.evolve(self.facts, gpus=known), self.worker, learnt)
        return attrs.evolve(self, facts=facts, wish=self.wish and attrs.evolve(self.wish, memories=learnt))

    @property
    def has_unchecked_flags(self) -> bool:
        """Whether it has arguments, and nothing is known of the flags that its engine has."""
        facts = self.facts
        is_asked = facts is not None and facts.python == "right" and facts.flags is None
        return is_asked and bool(self.worker.backend_args)


def ids_of(config: Config) -> list[str]:
    """Return the ids that the gateway gives to the managed workers."""
    ids: list[str] = []
    for worker in each_copy(config.managed_workers):
        ids.append(id_for(worker.model_name, ids))
    return ids


async def ask_for_flags(config: Config) -> dict[str, str]:
    """Have the flags of the engines of workers on this machine kept; return why that failed, by the workers' ids."""
    engines, failed = EngineFlags(), dict[str, str]()
    for worker, worker_id in zip(each_copy(config.managed_workers), ids_of(config), strict=True):
        if worker.on != "here":
            continue
        if why := await engines.prepare(config, worker):
            failed[worker_id] = why
    return failed


async def read_worker_facts(
    config: Config, ends_at: float, why_no_flags: Mapping[str, str] | None = None, *, probe_s: float = PROBE_S
) -> list[WorkerCheckFacts]:
    """Ask the system about the workers on this machine, several at the same time, and once about all copies."""
    found: dict[str, WorkerCheckFacts] = {}
    turn, failed = trio.CapacityLimiter(CHECKED_AT_ONCE_MAX), why_no_flags or {}

    async def read(worker: ManagedWorkerConfig, worker_id: str) -> None:
        python, environment = python_of(config, worker), {**environment_of(config, worker, ""), **UNCHANGED}
        ask = partial(read_facts, worker, python, environment, devices_of(config, worker), probe_s=probe_s)
        found[worker_id] = WorkerCheckFacts(worker, worker_id, python, None, probe_s=probe_s)
        with trio.move_on_at(ends_at):
            async with turn:
                facts = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
                size = await trio.to_thread.run_sync(_model_bytes, worker, abandon_on_cancel=True)
            found[worker_id] = WorkerCheckFacts(
                worker, worker_id, python, facts, size, failed.get(worker_id, ""), probe_s=probe_s
            )
            if worker.gpus is not None:
                wish = await trio.to_thread.run_sync(read_wish, worker, environment, python, abandon_on_cancel=True)
                found[worker_id] = attrs.evolve(found[worker_id], wish=wish)
            if facts.hub is not None:
                asked = attrs.evolve(facts, hub=await ask_hub(facts.hub, environment))
                found[worker_id] = attrs.evolve(found[worker_id], facts=asked)

    ids, copies = ids_of(config), each_copy(config.managed_workers)
    first = {id(worker): worker_id for worker, worker_id in zip(reversed(copies), reversed(ids), strict=True)}
    async with trio.open_nursery() as nursery:
        for worker in config.managed_workers:
            if worker.on == "here":
                nursery.start_soon(read, worker, first[id(worker)])
    of_copies = [(worker, worker_id) for worker, worker_id in zip(copies, ids, strict=True) if worker.on == "here"]
    return [attrs.evolve(found[first[id(worker)]], worker_id=worker_id) for worker, worker_id in of_copies]


def _model_bytes(worker: ManagedWorkerConfig) -> int | None:
    """Return the size of a model's weights here; None: it is elsewhere, or cannot be read."""
    try:
        return weight_bytes(worker.model_path) if os.path.isdir(worker.model_path) else None
    except OSError:
        return None


def find_in_workers(workers: Sequence[WorkerCheckFacts], memory_bytes: int) -> list[Finding]:
    """Return the findings about obstacles to the start of each managed worker."""
    if not workers:
        return [Finding("ok", "workers", "The configuration has no managed workers on this machine.")]
    findings: list[Finding] = []
    others: dict[str, ManagedWorkerConfig] = {}
    for one in _placed(workers):
        stay = others if one.worker.load == "start" else {}
        problems = list(_check_worker(one, stay, memory_bytes))
        findings += problems or [Finding("ok", one.worker_id, f"{one.worker.model_path} can be loaded as it stands.")]
        if one.worker.load == "start":
            others[one.worker_id] = one.worker
    return findings


def _placed(workers: Sequence[WorkerCheckFacts]) -> Iterator[WorkerCheckFacts]:
    """Return the same with the places that all of them would have together; running workers have theirs."""
    wishes = {one.worker_id: one.wish for one in workers if one.wish is not None}
    if not wishes:
        return iter(workers)
    gpus = next((one.facts.gpus for one in workers if one.facts is not None and one.facts.gpus is not None), None)
    places = place_tables({one.worker_id: one.worker for one in workers}, wishes, unbooked(gpus))
    return (_with_place(one, places[one.worker_id]) if one.wish is not None else one for one in workers)


def _with_place(one: WorkerCheckFacts, found: ManagedWorkerConfig | NoPlace) -> WorkerCheckFacts:
    facts = one.facts
    is_unknown = facts is None or (facts.gpus is None and facts.devices == VISIBLE)
    if isinstance(found, NoPlace):
        return one if is_unknown else attrs.evolve(one, no_place=found.sentence)
    visible = ",".join(map(str, found.gpu_ids or ()))
    return attrs.evolve(one, worker=found, facts=None if facts is None else attrs.evolve(facts, visible=visible))


def _check_worker(
    one: WorkerCheckFacts, others: Mapping[str, ManagedWorkerConfig], memory_bytes: int
) -> Iterator[Finding]:
    facts = one.facts
    if facts is None:
        sentence = f"It could not be examined in time: see what holds up {one.python}, or the disk of its model."
        yield Finding("warning", one.worker_id, sentence)
        return
    if facts.python == "silent":
        sentence = f"The interpreter {one.python} did not answer within {one.probe_s:g} s: see what holds it up."
        yield Finding("warning", one.worker_id, sentence, f"time {shlex.quote(one.python)} --version")
        facts = attrs.evolve(facts, python="right")
    if one.no_place:
        yield Finding("error", one.worker_id, one.no_place)
    is_later = one.worker.load == "on_demand"
    for obstacle in obstacles_of(one.worker, one.python, others, facts, is_later=is_later):
        yield Finding("error", one.worker_id, obstacle.sentence, _command_for(obstacle, one, facts))
    if facts.hub is not None:
        yield from _check_fetch(one.worker_id, facts.hub, one.python)
    if one.has_unchecked_flags and one.why_no_flags:
        sentence = f"Its arguments could not be checked: {one.why_no_flags.rstrip('.')}."
        yield Finding("warning", one.worker_id, sentence)
    size = one.model_bytes or 0
    if size > memory_bytes and (one.worker.gpu_ids == [] or facts.gpus == []):  # a guess: weights may be there twice
        sentence = f"The model's files have {gib(size)} GiB, and this machine gives {gib(memory_bytes)} GiB"
        yield Finding("warning", one.worker_id, f"{sentence}: a smaller or quantized model may be needed.", "free -h")


def _command_for(obstacle: Obstacle, one: WorkerCheckFacts, facts: Facts) -> str:
    """Return the command to type, or the line for the worker's table; "" if the sentence is enough."""
    subject, path = obstacle.subject, one.worker.model_path
    if subject == "python" and facts.python in ("missing", "without_engine") and one.worker.backend in ENGINES:
        return f"./build engine {one.worker.backend}"
    if subject == "model" and facts.model == "unreadable":
        return f"sudo chmod -R a+rX {shlex.quote(path)}"
    if subject == "port" and facts.port == "taken" and facts.port_holders:
        return f"ps -fp {facts.port_holders[0].pid}"
    if subject == "gpus" and facts.gpus == [] and one.worker.gpu_ids:
        return "gpu_ids = []"
    if subject == "hub" and facts.hub is not None:
        return _command_for_hub(facts.hub, one.python)
    return ""


def _command_for_hub(hub: HubFacts, python: str) -> str:
    hf = _hf(python)
    if hub.is_offline:
        return f"HF_HUB_OFFLINE=0 {hf} download {shlex.quote(hub.name)}"
    if hub.answer in ("absent", "gated"):
        return "" if hub.answer == "absent" and hub.token else f"{hf} auth login"
    return f"{hf} download {shlex.quote(hub.name)}"


def _check_fetch(worker_id: str, hub: HubFacts, python: str) -> Iterator[Finding]:
    """Yield a warning if the first start must fetch a model."""
    if hub.is_cached and hub.lack and not hub.is_offline:
        sentence = f"{hub.name} in {hub.cache} is not whole ({hub.lack}): the first start fetches the rest."
    elif hub.answer == "there":
        sentence = f"{hub.name} is not in {hub.cache} yet: the first start fetches it, and is slow."
    else:
        return
    yield Finding("warning", worker_id, sentence, _command_for_hub(hub, python))


def _hf(python: str) -> str:
    """Return the hub's own command. An engine's environment usually has it, the shell's PATH seldom."""
    place = os.path.join(os.path.dirname(python), "hf")
    return shlex.quote(place) if os.path.dirname(python) and os.access(place, os.X_OK) else "hf"
