"""Workers with `gpus`: each gets a place of its own, waits for it with the reason, and gives it back. In virtual time."""

import attrs
import pytest
import trio

from ichat.config.engine_args import arguments_of
from ichat.config.schema import ManagedWorkerConfig
from ichat.observability.logs.lines import Line
from ichat.placement.estimate import GIB
from ichat.placement.learnt import LearntMemory, LoadCircumstances, cache_flags_of, key_of
from ichat.placement.place import Wish
from ichat.placement.placeable_gpus import PlaceableGpu
from ichat.placement.settings import TENSOR
from ichat.routing.availability import NotReady
from ichat.supervisor.books import REREAD_S, Books, objection_to
from ichat.supervisor.local_launcher import LocalLauncher
from ichat.supervisor.managed_worker import Earlier, ManagedWorker
from ichat.supervisor.reload_plan import Running, changes_of_workers
from tests.unit.supervisor.test_loader import LOAD_S, LogStore, Process, Rig


class Logs(LogStore):
    """The output of adopted workers, too; `text` is what each has written."""

    text = ""

    def tail(self, worker_id, count):
        return [Line(1, 0.0, self.text)] if self.text else []

    def is_piped(self, worker_id):
        return False


class Launcher(LocalLauncher):
    """A machine whose GPUs a test sets; models of which nothing is known."""

    def __init__(self, launcher, gpus):
        vars(self).update(vars(launcher))
        self.logs = Logs()
        self.machine = gpus
        self.readings = 0

    async def wish(self, config, spec):
        await trio.lowlevel.checkpoint()
        return Wish(spec.model_name, spec.gpus)

    async def placeable(self, config, spec):
        await trio.lowlevel.checkpoint()
        self.readings += 1
        return self.machine


class Site(Rig):
    """A rig with some GPUs, and workers that are started at once."""

    def __init__(self, nursery, tmp_path, count=2):
        super().__init__(nursery, tmp_path)
        self.launcher = Launcher(self.context.launcher, [PlaceableGpu(n, "H100", 80 * GIB) for n in range(count)])
        self.context.launcher = self.launcher

    def start(self, name, *, earlier=None, **table):
        spec = ManagedWorkerConfig(name, "/m", **table)
        worker = self.workers[name] = ManagedWorker(
            name, spec, self.context, self.workers, is_launched=False, earlier=earlier
        )
        self.nursery.start_soon(worker.run)
        return worker

    def state(self, worker):
        return self.fleet.table.state(worker.record)

    def places(self):
        return {process.record.id: process.spec.gpu_ids for process in self.alive}


@pytest.fixture(autouse=True)
def in_virtual_time(autojump_clock):
    """Let no test wait for real."""


@pytest.fixture
def site(nursery, tmp_path):
    return Site(nursery, tmp_path)


async def test_launches_at_the_same_moment_see_each_other(autojump_clock, site):
    """Of workers that are started together each gets its own GPU; with a GPU too few, the last of them waits."""
    first, second = site.start("a", gpus=1), site.start("b", gpus=1)
    await site.until(lambda: len(site.alive) == 2)
    assert sorted(site.places().values()) == [[0], [1]]
    worker = site.start("c", gpus=1)
    await site.until(lambda: site.state(worker) == "pending")
    on = {one.holds.gpu_ids[0]: one.id for one in (first, second)}
    sentence = (
        f"c needs a GPU of its own, which this machine has not free: GPU 0 is worker {on[0]}'s; GPU 1 is worker"
        f" {on[1]}'s. It gets a place once worker {on[0]} ends."
    )
    assert worker.record.lacks == sentence
    found = site.fleet.directory.availability("c")
    assert isinstance(found, NotReady)
    assert (found.told, found.reasons) == ("it waits until GPUs are free", f"worker c waits for GPUs: {sentence[:-1]}")


async def test_a_waiting_worker_starts_once_a_place_is_free(autojump_clock, site):
    """It is started when another worker has gone, or another program has ended, and not before."""
    first = site.start("a", gpus=2)
    await site.until(lambda: len(site.alive) == 1)
    second = site.start("b", gpus=1)
    await site.until(lambda: site.state(second) == "pending")
    readings = site.launcher.readings
    await trio.sleep(REREAD_S - 1)
    assert site.launcher.readings - readings <= 1
    await first.remove(0)
    await site.until(lambda: site.state(second) == "ready", LOAD_S + 2)
    assert site.places() == {"b": [0]}
    site.launcher.machine = [site.launcher.machine[0], attrs.evolve(site.launcher.machine[1], others_bytes=9 * GIB)]
    third = site.start("c", gpus=1)
    await site.until(lambda: site.state(third) == "pending")
    assert "other processes hold 9.0 GiB of GPU 1" in third.record.lacks
    site.launcher.machine = [PlaceableGpu(n, "H100", 80 * GIB) for n in range(2)]
    await site.until(lambda: site.state(third) == "ready", REREAD_S + LOAD_S + 2)
    assert site.places() == {"b": [0], "c": [1]}


class KnownLauncher(Launcher):
    """The same, of models with figures of earlier loads."""

    circumstances = LoadCircumstances("/m", "vllm", {}, "1")

    async def wish(self, config, spec):
        return attrs.evolve(await super().wish(config, spec), circumstances=self.circumstances)


async def test_a_waiting_worker_starts_by_another_figure_of_its_memory(autojump_clock, site):
    """A refusal rests on the figures of earlier loads, too: it counts until another load has given others."""
    key = key_of("/m", "vllm", {TENSOR[0]: 1}, None, ("H100", 80 * GIB))
    learnt = LearntMemory(key, "1", "m", 0.0, cache_flags_of({}), beside_bytes=90 * GIB)
    site.context.learnt.add(learnt)
    site.context.launcher = site.launcher = KnownLauncher(site.launcher, site.launcher.machine)
    worker = site.start("a", gpus=1)
    await site.until(lambda: site.state(worker) == "pending")
    assert "needs 87.3, as learnt" in worker.record.lacks
    readings = site.launcher.readings
    site.context.learnt.add(attrs.evolve(learnt, beside_bytes=30 * GIB))
    await site.until(lambda: site.places() == {"a": [0]})
    assert site.launcher.readings == readings, "it was asked again only when the GPUs were read again"


async def test_a_waiting_worker_is_not_restarted_or_counted(autojump_clock, site):
    """It has failed in no way: it waits for as long as it needs, and a removal ends the wait."""
    site.start("a", gpu_ids=[0, 1])
    worker = site.start("b", gpus=2)
    await trio.sleep(3600)
    assert (site.state(worker), worker.record.restarts, worker.record.end) == ("pending", 0, None)
    with trio.fail_after(1):
        await worker.remove(0)


async def test_named_gpus_are_not_given_away(autojump_clock, site):
    """A worker with `gpu_ids` keeps its GPU between its starts, whatever else waits for a place."""
    named = site.start("named", gpu_ids=[0])
    await site.until(lambda: site.state(named) == "ready")
    other = site.start("a", gpus=1)
    await site.until(lambda: site.state(other) == "ready")
    waiting = site.start("b", gpus=1)
    await site.until(lambda: site.state(waiting) == "pending")
    site.process("named").kill()
    await site.until(lambda: named.record.restarts == 1)
    assert site.state(waiting) == "pending"
    await site.until(lambda: site.state(named) == "ready")
    assert site.places() == {"named": [0], "a": [1]}


async def test_a_restarted_worker_gets_its_gpus_again(autojump_clock, site):
    """It gives them back once nothing of its process is left, and prefers them."""
    worker = site.start("a", gpu_ids=[0])
    placed = site.start("b", gpus=1)
    await site.until(lambda: site.state(placed) == "ready")
    await worker.remove(0)
    site.process("b").kill()
    assert placed.booking is not None
    await site.until(lambda: placed.booking is None)
    await site.until(lambda: site.state(placed) == "ready")
    assert site.places() == {"b": [1]}


async def test_a_lack_of_memory_is_reported_with_the_chosen_gpus(autojump_clock, site):
    """The place is given back with the end of the process; the report names the GPUs all the same."""
    found = []
    site.context.lacked.add(lambda *lack: found.append(lack))
    site.start("a", gpu_ids=[0])
    site.start("b", gpus=1)
    await site.until(lambda: len(site.places()) == 2)
    site.launcher.logs.text = "torch.OutOfMemoryError: CUDA out of memory. Tried"
    site.process("b").kill(70)
    await site.until(lambda: found)
    assert [table.gpu_ids for table, _ in found] == [[1]]


async def test_shares_of_a_gpu_are_loaded_in_turn(autojump_clock, site):
    """Each engine measures the free memory at its start, so the second loads when the first is ready."""
    workers = {"a": site.start("a", gpus=0.75)}
    await site.until(lambda: workers["a"].booking is not None)
    workers["b"] = site.start("b", gpus=0.25, backend="sglang")
    await site.until(lambda: workers["b"].booking is not None)
    workers["c"] = site.start("c", gpus=0.5)
    await site.until(lambda: len(site.starts) == 2)
    assert site.places() == {"a": [0], "c": [1]}
    site.launcher.machine = [attrs.evolve(one, used_bytes=40 * GIB) for one in site.launcher.machine]
    await site.until(lambda: site.state(workers["b"]) == "ready")
    [begun] = [at for at, name in site.starts if name == "b"]
    assert begun >= LOAD_S
    shares = {name: arguments_of(one.holds) for name, one in workers.items()}
    assert shares["a"] == {"gpu_memory_utilization": 0.71}
    assert shares["b"] == {"mem_fraction_static": 0.427}  # 0.9 of 19 GiB, of the 40 GiB that are free


async def test_a_worker_on_demand_without_a_place_is_refused(autojump_clock, site):
    """Its request gets the state at once, and the operator the reason."""
    site.start("a", gpu_ids=[0, 1])
    worker = site.add("b", gpus=1, gpu_ids=None)
    lease = await site.lease("b")
    assert isinstance(lease, NotReady)
    assert "GPU 0 is worker a's" in lease.reasons
    assert worker.phase == "down"


async def test_the_next_gateway_knows_the_places(autojump_clock, site):
    """What is saved is the table without its place, and the place; an adopted worker has its claim at once."""
    worker = site.start("a", gpus=1)
    await site.until(lambda: site.state(worker) == "ready")
    saved = worker.saved()
    assert (saved.placed, saved.spec["gpus"], saved.spec.get("gpu_ids")) == ([0], 1, None)

    class Found:
        may_stay = True

        def adopt(self, config, spec):
            return Process(site, site.workers["b"].record, spec)

    await worker.remove(0)
    adopted = site.start("b", gpus=1, earlier=Earlier(Found(), None, 1, saved.placed))
    assert Books(site.workers).beside(None) == {"b": {0: float("inf")}}
    other = site.start("c", gpus=1)
    await site.until(lambda: site.state(other) == "ready" and site.state(adopted) == "ready")
    assert site.places() == {"b": [0], "c": [1]}


async def test_a_launch_is_refused_with_the_reason(autojump_clock, site):
    """A worker that would have no place now is not launched; on demand, only the GPUs as such count."""
    site.start("a", gpus=2)
    await site.until(lambda: len(site.alive) == 1)
    for spec, lacks in (
        (ManagedWorkerConfig("b", "/m", gpus=1), True),
        (ManagedWorkerConfig("b", "/m", gpus=1, load="on_demand"), False),
        (ManagedWorkerConfig("b", "/m", gpu_ids=[0]), False),
    ):
        is_later = spec.load == "on_demand"
        _, lack = await objection_to(spec, Books(site.workers), site.context, is_later=is_later)
        assert bool(lack) == lacks, spec
        assert "GPU 0 is worker a's" in lack or not lacks


def test_a_reload_frees_the_place_first():
    """A worker with `gpus` may need the GPUs again that it has; another new worker waits for a place anyway."""
    old = ManagedWorkerConfig("a", "/m", gpus=0.25)
    running = [Running("a-0", old, False, False, placed=[0])]
    [change, new] = changes_of_workers(
        running, [attrs.evolve(old, model_path="/n"), ManagedWorkerConfig("b", "/m", gpus=1)], {}, {}
    )
    assert (change.action, change.new_first, change.gap) == ("restart", False, "with a gap: both need GPU 0")
    assert new.action == "start"
