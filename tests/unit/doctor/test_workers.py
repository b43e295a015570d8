"""Findings about managed workers: planted answers of the system in, levels and commands out."""

import os

import attrs
import pytest
import trio
from support.nvml import GIB

from ichat.config import load as configuration
from ichat.config.schema import ManagedWorkerConfig
from ichat.doctor.findings import Finding
from ichat.doctor.workers import WorkerCheckFacts, find_in_workers, ids_of, read_worker_facts
from ichat.hardware.gpus import Gpu
from ichat.placement.learnt import LearntMemories
from ichat.preflight.facts import Facts, Holder
from ichat.preflight.hub import HubFacts

WORKER = ManagedWorkerConfig("m", "/m", gpu_ids=[])
LATER = attrs.evolve(WORKER, load="on_demand")
HUB = HubFacts("org/model", "/hub", is_cached=False, is_offline=False)


def found_in(worker, facts, **more):
    checked = WorkerCheckFacts(worker, "m-0", "/p/python", facts, **more)
    return [(one.level, one.sentence, one.command) for one in find_in_workers([checked], 4 * GIB)]


@pytest.mark.parametrize(
    ("worker", "facts", "level", "words", "command"),
    [
        (WORKER, Facts(), "ok", "/m can be loaded as it stands.", ""),
        (WORKER, None, "warning", "see what holds up /p/python", ""),
        (WORKER, Facts(python="silent"), "warning", "The interpreter /p/python did not answer within 5 s",
         "time /p/python --version"),
        (WORKER, Facts(python="missing"), "error", "There is no interpreter /p/python", "./build engine vllm"),
        (WORKER, Facts(python="without_engine"), "error", "vLLM is not installed for /p/python", "./build engine vllm"),
        (WORKER, Facts(python="broken"), "error", "The interpreter /p/python does not run", ""),
        (attrs.evolve(WORKER, backend="own"), Facts(python="missing"), "error", "There is no interpreter", ""),
        (WORKER, Facts(model="missing"), "error", "There is no model /m: correct model_path.", ""),
        (WORKER, Facts(model="unreadable"), "error", "The model /m may not be read", "sudo chmod -R a+rX /m"),
        (attrs.evolve(WORKER, port=80), Facts(port="taken", port_holders=[Holder(9, "nginx")]), "error",
         "is taken by nginx (process 9)", "ps -fp 9"),
        (attrs.evolve(LATER, port=80), Facts(port="taken", port_holders=[Holder(9, "nginx")]), "ok", "", ""),
        (attrs.evolve(WORKER, gpu_ids=[7]), Facts(gpus=[Gpu(0), Gpu(1)]), "error",
         "There is no GPU 7: those here are 0, 1", ""),
        (attrs.evolve(WORKER, gpu_ids=[7]), Facts(gpus=[]), "error", "no NVIDIA GPU answers", "gpu_ids = []"),
        (WORKER, Facts(hub=attrs.evolve(HUB, answer="there")), "warning",
         "org/model is not in /hub yet: the first start fetches it", "hf download org/model"),
        (WORKER, Facts(hub=attrs.evolve(HUB, is_cached=True, lack="1 of 2 files")), "warning",
         "org/model in /hub is not whole (1 of 2 files): the first start fetches the rest", "hf download org/model"),
        (WORKER, Facts(hub=attrs.evolve(HUB, is_cached=True)), "ok", "", ""),
        (WORKER, Facts(hub=attrs.evolve(HUB, is_offline=True)), "error", "HF_HUB_OFFLINE keeps the engine from",
         "HF_HUB_OFFLINE=0 hf download org/model"),
        (WORKER, Facts(hub=attrs.evolve(HUB, answer="gated")), "error", "asks for a token (HF_TOKEN)", "hf auth login"),
        (WORKER, Facts(hub=attrs.evolve(HUB, answer="absent")), "error", "There is no model org/model on",
         "hf auth login"),
        (WORKER, Facts(hub=attrs.evolve(HUB, answer="absent", token="hf_x")), "error", "There is no model org/model on",
         ""),
    ],
)  # fmt: skip
def test_an_obstacle_is_a_finding_with_its_command(worker, facts, level, words, command):
    """A worker on demand may find its port free once its model is wanted."""
    [found] = found_in(worker, facts)
    assert (found[0], found[2]) == (level, command)
    assert words in found[1]


def test_the_hubs_command_is_that_of_the_interpreter(tmp_path):
    """An engine's environment usually has it, the shell's PATH seldom."""
    (tmp_path / "hf").touch(mode=0o755)
    checked = WorkerCheckFacts(WORKER, "m-0", f"{tmp_path}/python", Facts(hub=attrs.evolve(HUB, answer="there")))
    [found] = find_in_workers([checked], 0)
    assert found.command == f"{tmp_path}/hf download org/model"


@pytest.mark.parametrize(
    ("worker", "gpus", "level"),
    [
        (WORKER, None, "warning"),
        (ManagedWorkerConfig("m", "/m"), [], "warning"),
        (ManagedWorkerConfig("m", "/m"), None, "ok"),
    ],
)
def test_a_model_that_is_larger_than_the_memory_is_a_warning(worker, gpus, level):
    """Sizes of files are a guess; a model for GPUs, or for GPUs that are not known, is no matter."""
    [found] = found_in(worker, Facts(gpus=gpus), model_bytes=8 * GIB)
    assert found[0] == level


@pytest.mark.parametrize(
    ("arguments", "flags", "why", "level"),
    [
        ({"dtype": "auto"}, None, "the engine has not answered.", "warning"),
        ({"dtype": "auto"}, None, "", "ok"),
        ({}, None, "the engine has not answered.", "ok"),
    ],
)
def test_arguments_that_could_not_be_checked_are_a_warning(arguments, flags, why, level):
    [found] = found_in(attrs.evolve(WORKER, backend_args=arguments), Facts(flags=flags), why_no_flags=why)
    assert found[0] == level


def test_a_worker_is_an_obstacle_only_if_it_starts_with_the_gateway():
    """The second worker with a port is the one that cannot start; a worker on demand may wait."""
    first, second = (WorkerCheckFacts(attrs.evolve(WORKER, port=80), one, "/p", Facts()) for one in ("a", "b"))
    assert [(one.level, one.name) for one in find_in_workers([first, second], 0)] == [("ok", "a"), ("error", "b")]
    first = attrs.evolve(first, worker=attrs.evolve(LATER, port=80))
    assert [(one.level, one.name) for one in find_in_workers([first, second], 0)] == [("ok", "a"), ("ok", "b")]
    assert find_in_workers([], 0) == [
        Finding("ok", "workers", "The configuration has no managed workers on this machine.")
    ]


def test_a_running_worker_is_no_obstacle_to_itself():
    """Its port and the memory of its GPUs are its own; other workers are judged by the GPUs that they may see."""
    gpus = [Gpu(0)]
    one = WorkerCheckFacts(WORKER, "m-0", "/p", Facts(port="taken", port_holders=[Holder(1, "p")]))
    assert one.beside(gpus, {"m-0"}, LearntMemories()).facts == Facts()
    assert one.beside(gpus, (), LearntMemories()).facts == attrs.evolve(one.facts, gpus=gpus)
    other = attrs.evolve(one, facts=Facts(devices="HIP_VISIBLE_DEVICES"))
    assert other.beside(gpus, (), LearntMemories()).facts.gpus is None
    silent = attrs.evolve(one, facts=None)
    assert silent.beside(gpus, (), LearntMemories()) is silent


TABLE = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "{}"\npython = "/no/python"\ngpu_ids = []\n'


def test_workers_of_one_model_have_ids_of_their_own():
    assert ids_of(configuration.parse(TABLE.format("/m") * 2, "x.toml")) == ["m-0", "m-1"]


async def test_a_model_whose_disk_hangs_leaves_its_worker_unknown(tmp_path):
    """A file that cannot be read in time holds up nothing: here, a pipe that has no writer."""
    os.mkfifo(tmp_path / "config.json")
    config = configuration.parse(TABLE.format(tmp_path), "x.toml")
    try:
        [found] = await read_worker_facts(config, trio.current_time() + 0.05)
    finally:
        os.close(os.open(tmp_path / "config.json", os.O_RDWR))  # a thread that waits for a writer ends
    assert found == WorkerCheckFacts(config.managed_workers[0], "m-0", "/no/python", None)


async def test_a_worker_is_known_by_interpreter_model_and_size(tmp_path):
    """The size of a model counts if it is on this machine."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    config = configuration.parse(TABLE.format(tmp_path) + TABLE.format("/no/model"), "x.toml")
    first, second = await read_worker_facts(config, float("inf"), {"m-1": "It hangs."})
    assert (first.facts.python, first.facts.model, first.model_bytes) == ("missing", "right", 2000)
    assert (second.facts.model, second.model_bytes, second.why_no_flags) == ("missing", None, "It hangs.")
