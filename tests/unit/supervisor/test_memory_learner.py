"""What a gateway learns from loads: the facts about a load, the file, and the command that reads it."""

import contextlib
import json
import os
import pathlib
from types import SimpleNamespace

import attrs
import pytest
import trio
import trio.testing
from support.peers import until

from ichat.cli import estimate
from ichat.config import load as configuration
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.hardware.gpus import Gpu
from ichat.observability.tracing import open_tracing
from ichat.placement.learnt import LearntMemories, LearntMemory, MemoryLack, key_of
from ichat.preflight.learnt_file import LEARNT_FILE, read_learnt, write_learnt
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import Heartbeat, Machine, MachineGpu
from ichat.roles.gateway_components import build
from ichat.supervisor.memory_learner import LoadReport, MemoryLearner, read_load, used_gpus
from ichat.supervisor.state import open_state

GIB = 1024**3
SHAPE = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
TOKEN = 128 * 1024
H100 = "NVIDIA H100 80GB HBM3"
TOTAL = 81559 * 1024**2
GPU = MachineGpu(0, name=H100, memory_total_bytes=TOTAL, held_bytes=70 * GIB)
BLOCKS = 20_000
TOLD = EngineMemory(tokens=16 * BLOCKS, blocks=BLOCKS, block_tokens=16)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "Llama-8B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return directory


@pytest.fixture
def spec(model):
    return ManagedWorkerConfig(model_name="llama", model_path=str(model), backend_args={"max-model-len": 4096})


def report(spec, *gpus, memory=TOLD, **effective):
    return LoadReport(spec, gpus, "0.32.0+cu129", memory, effective)


def test_facts_about_a_load_are_read_from_its_table_and_its_model(spec):
    """vLLM's share as it was effective; the blocks have a size; the worker's own GPU has a kind."""
    facts = read_load(Config(), report(spec, GPU, gpu_memory_utilization=0.5))
    assert (facts.taken_bytes, facts.cache_bytes) == ((TOTAL + 1) // 2, BLOCKS * 16 * TOKEN)
    known = facts.known
    assert (known.key.gpu, known.key.gpu_bytes, known.version, known.name) == (H100, TOTAL, "0.32.0", "llama")
    assert known.held_bytes == 70 * GIB
    assert 15 * GIB < known.estimated_bytes < 20 * GIB
    assert read_load(Config(), report(spec, GPU, kv_cache_memory_bytes=GIB)).taken_bytes is None
    sglang = read_load(Config(), report(attrs.evolve(spec, backend="sglang"), GPU))
    assert (sglang.taken_bytes, sglang.known.key.backend) == (None, "sglang")


def test_a_load_without_a_shape_or_a_gpu_leaves_figures_unknown(spec, model):
    """Unknown, never 0."""
    on_cpu = read_load(Config(), report(spec))
    assert (on_cpu.taken_bytes, on_cpu.known.held_bytes, on_cpu.known.estimated_bytes) == (None, None, None)
    assert (on_cpu.known.key.gpu, on_cpu.known.key.gpu_bytes) == ("", 0)
    (model / "config.json").write_text("{}")
    unknown = read_load(Config(), report(spec, GPU))
    assert (unknown.cache_bytes, unknown.known.estimated_bytes, unknown.known.held_bytes) == (None, None, 70 * GIB)


def test_a_workers_gpus_are_those_that_it_holds():
    """Or those that it may use, where the driver does not say who holds what."""
    spec = ManagedWorkerConfig(model_name="m", model_path="/m", gpu_ids=[1])
    idle, other = MachineGpu(1), MachineGpu(2)
    assert used_gpus(spec, [GPU, idle, other]) == [GPU]
    assert used_gpus(spec, [idle, other]) == [idle]
    assert used_gpus(attrs.evolve(spec, gpu_ids=None), [idle, other]) == [idle, other]
    assert used_gpus(attrs.evolve(spec, gpu_ids=[]), [idle]) == []


def test_the_file_is_read_as_it_was_written(tmp_path):
    """In the order of the loads, with figures that are not known."""
    memories = LearntMemories()
    for number in range(3):
        key = key_of("/m", "vllm", {}, number, (H100, TOTAL))
        memories.add(LearntMemory(key, "1", "m", float(number), tokens=number or None))
    write_learnt(str(tmp_path), memories)
    found, why = read_learnt(str(tmp_path))
    assert (list(found), why) == (list(memories), "")
    assert [one.name for one in tmp_path.iterdir()] == [LEARNT_FILE]
    assert [list(read_learnt(place)[0]) for place in (None, str(tmp_path / "no"))] == [[], []]


@pytest.mark.parametrize("text", ["{", "[]", '{"loads": [{}]}', '{"loads": 1}', "[" * 100_000, '{"version": 2}'])
def test_a_damaged_file_has_a_sentence_and_no_figures(tmp_path, text):
    """Also a file of a later version."""
    (tmp_path / LEARNT_FILE).write_text(text)
    found, why = read_learnt(str(tmp_path))
    assert list(found) == []
    assert why.startswith(f"{tmp_path}/{LEARNT_FILE} ")
    assert why.endswith(": the memory of earlier loads is not known.")


class Gpus:
    """Reads a GPU that is there, whole or divided into instances."""

    def __init__(self):
        self.is_split = False

    async def find(self):
        await trio.lowlevel.checkpoint()
        return [Gpu(0, name=H100, memory_total_bytes=TOTAL, is_split=self.is_split)]


class Site:
    """A worker of that model, as a gateway knows it, and learners that have the GPU."""

    def __init__(self, components, spec, directory):
        self.directory, self.spec, self.gpus = str(directory), spec, Gpus()
        self.context = components.control.supervisor._context
        self._registry = components.control.fleet.registry
        self.worker = SimpleNamespace(
            id="llama-0", record=self.context.managed.expect("llama-0", ["llama"]), holds=spec
        )

    @property
    def known(self):
        return list(self.context.learnt)

    @property
    def file(self):
        return pathlib.Path(self.directory, LEARNT_FILE)

    def damage(self):
        self.file.write_text("{")

    async def begin(self, nursery):
        """Start a learner that knows no more than the file, and return it."""
        self.context.learnt = LearntMemories()
        learner = MemoryLearner(self.context, {"llama-0": self.worker}, self.directory, self.gpus, pause_s=0)
        await learner.load()
        nursery.start_soon(learner.learn_forever)
        await trio.testing.wait_all_tasks_blocked()
        return learner

    async def beat(self, memory=TOLD, **known):
        """Send a heartbeat as the worker would, and wait until the learner has seen it."""
        machine = Machine("id", "host", gpus=[GPU])
        self._registry.record_heartbeat(Heartbeat(
            "llama-0", "llama", "127.0.0.1", 9, memory=memory, machine=machine,
            versions={"vllm": "0.32.0+cu129"}, **{"start_id": "1", **known},
        ))  # fmt: skip
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def site(spec, tmp_path):
    settings = f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}/state"\n'
    config = configuration.parse(settings, "test.toml")
    with open_state(config.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(config, None, state, tracing)
        yield Site(components, spec, state.path)
        components.control.log_store.close()


async def test_a_load_is_learnt_once_and_kept_for_the_next_gateway(site, nursery, caplog):
    """By the worker's memory and its machine; later heartbeats of the same start teach nothing."""
    caplog.set_level("INFO")
    learner = await site.begin(nursery)
    await site.beat()
    await until(lambda: site.known)
    (known,) = site.known
    taken = int(0.92 * TOTAL) + 1
    assert (known.tokens, known.version, known.held_bytes) == (16 * BLOCKS, "0.32.0", 70 * GIB)
    assert known.beside_bytes == taken - BLOCKS * 16 * TOKEN
    await until(lambda: list(read_learnt(site.directory)[0]) == [known])
    for _ in range(3):
        await site.beat(attrs.evolve(TOLD, tokens=1))
    await site.beat(attrs.evolve(TOLD, tokens=2), start_id="2")
    await until(lambda: site.known[-1].tokens == 2)
    assert caplog.text.count("its memory is known") == 2
    (known,) = site.known
    await until(lambda: list(read_learnt(site.directory)[0]) == [known])
    (family,) = learner.families()
    assert [(one.labels, one.value) for one in family.samples] == [({"model": "llama"}, known.error_ratio)]
    await site.begin(nursery)
    assert [attrs.evolve(one, at=known.at) for one in site.known] == [known]


async def test_a_worker_that_reports_no_memory_teaches_nothing(site, nursery):
    """Nor does a worker that is not ready, and there is no file."""
    await site.begin(nursery)
    await site.beat(None)
    await site.beat(state="loading")
    assert site.known == []
    assert LEARNT_FILE not in os.listdir(site.directory)


async def test_instances_of_a_gpu_teach_nothing(site, nursery, caplog):
    """Their memory is a part of the GPU's, and the driver reports the whole."""
    caplog.set_level("INFO")
    site.gpus.is_split = True
    await site.begin(nursery)
    await site.beat(attrs.evolve(TOLD, tokens=1))
    site.gpus.is_split = False
    await site.beat(start_id="2")
    await until(lambda: site.known)
    assert [one.tokens for one in site.known] == [16 * BLOCKS]
    assert caplog.text.count("its memory is known") == 1


async def test_a_damaged_file_is_put_aside_and_replaced(site, nursery, caplog):
    """With a sentence; the next load is in a new file."""
    file = site.file
    site.damage()
    await site.begin(nursery)
    assert f"{file} cannot be read (it is damaged)" in caplog.text
    assert file.with_suffix(".unread").read_text() == "{"
    await site.beat()
    await until(file.exists)
    assert len(list(read_learnt(site.directory)[0])) == 1


async def test_a_launch_without_enough_memory_is_learnt_as_well(site, nursery):
    """Its estimate rises by a tenth, and vLLM may name the rest for its cache; the next load corrects it."""
    await site.begin(nursery)
    site.context.lacked(site.spec, MemoryLack())
    await until(lambda: site.known)
    (raised,) = site.known
    assert raised.beside_bytes is None
    assert raised.raised_bytes == pytest.approx(1.1 * raised.estimated_bytes, abs=2)
    site.context.lacked(site.spec, MemoryLack(GIB))
    await until(lambda: site.known[-1].beside_bytes)
    assert (site.known[-1].beside_bytes, site.known[-1].raised_bytes) == (int(0.92 * TOTAL) + 1 - GIB, None)


async def test_the_estimate_of_a_model_shows_its_last_load(site, nursery, model, capsys, tmp_path):
    """By the gateway's state directory or its configuration, for a kind of GPU by its usual name; the flags count."""
    await site.begin(nursery)
    await site.beat()
    await until(lambda: os.path.exists(f"{site.directory}/{LEARNT_FILE}"))
    config = tmp_path / "ichat.toml"
    config.write_text(f'[server_settings]\nstate_directory = "{site.directory}"\n')
    asked = [str(model), "--gpu", "h100", "--max-model-len", "4096"]

    def shown(*words):
        assert estimate.run([*asked, *words]) == 0
        return capsys.readouterr().out

    text = shown("--state-directory", site.directory)
    rows = {line[:23].strip(): line[23:].split() for line in text.splitlines()}
    assert (rows["weights"][1], rows["everything else"][1], rows["least"][1]) == ("computed", "learnt", "learnt")
    assert f"{16 * BLOCKS} (learnt)" in text
    assert "from llama with vLLM 0.32.0, " in text
    assert "it held 70.0 GiB of a GPU" in text
    assert shown("-c", str(config)) == text
    found = json.loads(shown("-c", str(config), "--json"))
    assert (found["tokens"], found["tokens_known"]) == (16 * BLOCKS, "learnt")
    assert found["learnt"]["beside_bytes"] == site.known[0].beside_bytes
    assert "learnt" not in shown("-c", str(config), "--enforce-eager")
    asked[-1] = "2048"
    text = shown("-c", str(config))
    assert "(learnt)" not in text
    assert "everything else" in text
    asked[2] = "A100"
    assert "learnt" not in shown("-c", str(config))
