"""Before a worker starts: what the machine has, who holds it, and every reason why the worker would fail."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types

import attrs
import psutil
import pytest
import trio
from support.deployments import free_port
from support.nvml import GIB, Nvml, NVMLError, NVMLLibraryMismatchError
from support.programs import LIMIT_S

from ichat.config.schema import ManagedWorkerConfig
from ichat.hardware import gpus
from ichat.hardware import host as resources
from ichat.hardware.gpus import Gpu, GpuProcess, GpuReader, node_at
from ichat.preflight.facts import Facts, Holder, KnownPythons, collect_facts, read_facts
from ichat.preflight.obstacles import obstacles_of

UNKNOWN = 2**64 - 1


@pytest.fixture
def machine(monkeypatch):
    """Put GPUs into the machine."""

    def has(*args, **kwargs):
        nvml = Nvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return has


def worker_with(**more):
    return ManagedWorkerConfig(**{"model_name": "m", "model_path": "org/m", **more})


# GPUs.


def test_a_gpu_is_read_whole(machine):
    """Identity, memory, use and processes, by names that say their units; NVML is let go of afterwards."""
    nvml = machine()
    own = GpuProcess(os.getpid(), 30 * GIB, psutil.Process().name())
    assert GpuReader().read() == [
        Gpu(0, "GPU-1", "NVIDIA H100", 80 * GIB, 30 * GIB, 50 * GIB, use=0.75, processes=(own,)),
    ]
    assert (nvml.inits, nvml.shutdowns) == (1, 1)


def test_numbers_are_in_the_order_of_the_pci_bus(machine):
    """Whatever the order in which NVML tells of them, 0 is the one that CUDA calls 0 by PCI_BUS_ID."""
    machine(buses=(0x81, 0x01, 0x41))
    assert [(gpu.index, gpu.uuid) for gpu in GpuReader().read()] == [(0, "GPU-1"), (1, "GPU-65"), (2, "GPU-129")]


def test_gpus_that_nvlink_connects_are_an_island(machine):
    """Each GPU has the lowest number of its island; the driver is asked once, and again for other GPUs."""
    asked = []

    def linked():
        asked.append(1)
        return 0

    name = "nvmlDeviceGetP2PStatus"
    nvml = machine(buses=(1, 2, 3, 4), instead={(name, 1, 3, 2): linked, (name, 0, 1, 2): 5})
    reader = GpuReader()
    assert [[gpu.island for gpu in reader.read()] for _ in range(2)] == [[None, 1, None, 1]] * 2
    assert len(asked) == 1
    nvml.buses = (1, 2, 3, 5)
    assert [gpu.island for gpu in reader.read()] == [None, 1, None, 1]
    assert len(asked) == 2


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu_is_that_of_its_place(tmp_path, text, node):
    """A machine with a single node may say -1; elsewhere than on Linux there is no file."""
    directory = tmp_path / "sys/bus/pci/devices/0000:41:00.0"
    directory.mkdir(parents=True)
    if text is not None:
        (directory / "numa_node").write_text(text)
    place = types.SimpleNamespace(domain=0, bus=0x41, device=0)
    assert [node_at(one, str(tmp_path)) for one in (place, None)] == [node, None]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (None, None),
        (types.ModuleType("pynvml"), None),
        (Nvml(instead={"nvmlInit": NVMLError(9)}), None),
        (Nvml(instead={"nvmlInit": OSError("no library")}), None),
        (Nvml(instead={"nvmlDeviceGetCount": NVMLError(15)}), None),
        (Nvml(buses=()), []),
    ],
)
def test_a_machine_without_gpus(monkeypatch, module, found):
    """No package, another of that name, no library, no driver: None; a driver without a GPU: none."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert GpuReader().read() == found


@pytest.mark.parametrize(
    "error", [NVMLError(15), OSError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), RuntimeError("x")]
)
@pytest.mark.parametrize(
    "call",
    [
        "nvmlShutdown",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetComputeRunningProcesses",
    ],
)
def test_a_driver_that_fails_midway(machine, call, error):
    """Every GPU is still told of, with what is known, and NVML is let go of."""
    nvml = machine(buses=(1, 2), instead={call: error})
    found = GpuReader().read()
    assert [gpu.index for gpu in found] == [0, 1]
    assert (nvml.inits, nvml.shutdowns) == (1, call != "nvmlShutdown")
    if call == "nvmlDeviceGetMemoryInfo":
        assert (found[0].memory_free_bytes, found[0].name) == (None, "NVIDIA H100")


def test_a_gpu_that_is_lost_keeps_its_number(machine):
    """It is in the list with its reason, which is not its neighbour's."""
    machine(buses=(1, 2, 3), instead={("nvmlDeviceGetHandleByIndex", 1): NVMLError(15)})
    assert [(gpu.index, gpu.failure) for gpu in GpuReader().read()] == [(0, ""), (1, "GPU is lost"), (2, "")]


def test_facts_that_a_gpu_lacks_are_no_failure(machine):
    """Memory that is the machine's own, a name in bytes, a process of unknown size, an older driver's calls."""
    compute = "nvmlDeviceGetComputeRunningProcesses"
    nvml = machine(
        instead={
            "nvmlDeviceGetMemoryInfo": NVMLError(3),
            "nvmlDeviceGetUtilizationRates": NVMLError(4),
            "nvmlDeviceGetName": b"NVIDIA GB10",
            "nvmlDeviceGetMigMode": [1, 1],
            compute: NVMLLibraryMismatchError(compute),
            "nvmlDeviceGetMPSComputeRunningProcesses": AttributeError(compute),
        }
    )
    nvml.nvmlDeviceGetComputeRunningProcesses_v2 = lambda handle: [
        types.SimpleNamespace(pid=2**40, usedGpuMemory=UNKNOWN),
        types.SimpleNamespace(pid=2**40 + 1, usedGpuMemory=None),
    ]
    nothing = (GpuProcess(2**40, None), GpuProcess(2**40 + 1, None))
    assert GpuReader().read() == [Gpu(0, "GPU-1", "NVIDIA GB10", processes=nothing, is_split=True)]


def test_a_process_that_computes_and_draws_is_listed_once(machine):
    """The largest comes first, and there is a bound to their number."""
    many = [types.SimpleNamespace(pid=2**40 + n, usedGpuMemory=n) for n in range(300)]
    machine(
        instead={
            "nvmlDeviceGetComputeRunningProcesses": many,
            "nvmlDeviceGetGraphicsRunningProcesses": [types.SimpleNamespace(pid=2**40, usedGpuMemory=GIB)],
        }
    )
    processes = GpuReader().read()[0].processes
    assert processes[:2] == (GpuProcess(2**40, GIB), GpuProcess(2**40 + 299, 299))
    assert len(processes) == len({process.pid for process in processes}) == gpus.PROCESSES_MAX


def test_a_slow_driver_is_left_alone_after_a_while(machine):
    """What was not read in time is not known, and the GPU says so."""
    reader = GpuReader(read_s=0.5)
    machine(instead={"nvmlDeviceGetPciInfo": lambda: threading.Event().wait(0.6)})
    assert reader.read() == [Gpu(0, failure="the driver has not answered everything within 0.5 s")]
    machine(instead={"nvmlInit": lambda: threading.Event().wait(0.6)})
    assert reader.read() is None


async def test_a_driver_that_hangs_delays_callers_within_a_bound(machine):
    """Who waits for it gets None after a while, and so does who comes later; when it goes on, all is well."""
    stuck, go_on = threading.Event(), threading.Event()

    def hang():
        stuck.set()
        go_on.wait(LIMIT_S)
        return 1

    reader, nvml = GpuReader(read_s=0.02, find_s=0.1), machine(instead={"nvmlDeviceGetCount": hang})
    try:
        assert await reader.find() is None
        assert stuck.wait(LIMIT_S)
        assert reader.read() is None
        assert nvml.inits == 1
    finally:
        go_on.set()
    nvml.instead.clear()
    with trio.fail_after(LIMIT_S):
        while not (found := await reader.find()) or found[0].failure:
            await trio.sleep(0.01)
    assert len(found) == 1


def test_with_the_real_module():
    """nvidia-ml-py where it is installed, on whatever machine this is: a list or None."""
    pytest.importorskip("pynvml")
    assert GpuReader().read() is None or isinstance(GpuReader().read(), list)


# Resources.


@pytest.fixture
def family():
    """A process in a session of its own, its child, and its orphaned grandchild; the last two sleep."""
    orphan = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=sys.stderr).pid)"
    code = f"""
        import subprocess, sys
        child = subprocess.Popen(["sleep", "600"], stdout=sys.stderr)
        grandchild = subprocess.run([sys.executable, "-S", "-c", {orphan!r}], stdout=subprocess.PIPE).stdout
        print(child.pid, int(grandchild), flush=True)
        child.wait()
    """
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as first:
        try:
            yield (first.pid, *map(int, first.stdout.readline().split()))
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def test_the_machines_memory_is_attributed_to_workers(family):
    """Every process of a worker counts as the worker's, also one whose parent has ended; others are nobody's."""
    first, child, orphan = family
    assert first not in [parent.pid for parent in psutil.Process(orphan).parents()]
    pids = (first, child, orphan, os.getpid(), 2**40)
    held = [GpuProcess(pid, n * GIB, "python") for n, pid in enumerate(pids)]
    gpu = Gpu(0, "GPU-1", "NVIDIA H100", 80 * GIB, 30 * GIB, 50 * GIB, use=0.5, processes=held)
    told = resources.read_resources(resources.CpuMeter(), [gpu, Gpu(1, failure="GPU is lost")], {first: "a-0"})
    told = attrs.asdict(told)
    assert set(told) == {"cpu", "memory", "gateway", "gpus"}
    assert set(told["cpu"]) == {"count", "usable", "use", "load"}
    assert 0 < told["gateway"]["memory_bytes"] < told["memory"]["total_bytes"] > told["memory"]["available_bytes"]
    holders = told["gpus"][0].pop("held_by")
    assert [(one["pid"], one["worker_id"]) for one in holders] == list(zip(pids, ["a-0"] * 3 + [None] * 2, strict=True))
    assert holders[1] == {"pid": child, "program": "python", "memory_bytes": GIB, "worker_id": "a-0"}
    assert told["gpus"][0] == {
        "index": 0, "uuid": "GPU-1", "name": "NVIDIA H100", "memory_total_bytes": 80 * GIB, "memory_used_bytes": 30 * GIB,
        "memory_free_bytes": 50 * GIB, "use": 0.5, "failure": None,
    }  # fmt: skip
    assert (told["gpus"][1]["failure"], told["gpus"][1]["memory_total_bytes"]) == ("GPU is lost", None)
    assert resources.read_resources(resources.CpuMeter(), None, {}).gpus is None


def test_how_busy_the_processors_are(monkeypatch):
    """A share over a second at least: readers that come close together get the same one, and the first gets none."""
    now, seconds = [0.0], [10.0, 100.0]
    monkeypatch.setattr(resources, "_cpu_seconds", lambda: tuple(seconds))
    meter = resources.CpuMeter(lambda: now[0])
    assert meter.read() is None
    now[0], seconds[:] = 1.0, [11.0, 104.0]
    assert [meter.read(), meter.read()] == [0.75, 0.75]
    now[0], seconds[:] = 1.5, [999.0, 999.0]
    assert meter.read() == 0.75
    now[0] = 2.0
    assert meter.read() == 0.0
    assert repr(meter) == "<CpuMeter use=0.0>"


# Decisions.


def gpu_with(index, free, **more):
    return Gpu(index, f"GPU-{index}aa", "NVIDIA H100", 80 * GIB, (80 - free) * GIB, free * GIB, **more)


SHARED = {"gpu_ids": [0], "share_gpus": True}
TWO = [gpu_with(0, 79), gpu_with(1, 79)]
HELD = gpu_with(
    0, 30, processes=[GpuProcess(42, 40 * GIB, "python3"), GpuProcess(43, None), GpuProcess(44, 0), GpuProcess(45)]
)


@pytest.mark.parametrize(
    ("more", "facts", "others", "expected"),
    [
        ({}, {}, {}, []),
        ({}, {"gpus": TWO}, {}, []),
        ({"gpu_ids": [0, 1], "backend_args": {"tp": 2}}, {"gpus": TWO}, {}, []),
        ({"gpu_ids": []}, {"gpus": [gpu_with(0, 1)], "visible": ""}, {}, []),
        ({"gpu_ids": [7]}, {"gpus": None}, {}, []),
        # the port
        ({"port": 81}, {"port": "taken", "port_holders": [Holder(42, "nginx")]}, {},
         ["Port 81 of 127.0.0.1 is taken by nginx (process 42): end that, or choose another port"]),
        ({"port": 81}, {"port": "taken"}, {}, ["taken by a process that this user cannot see"]),
        ({"port": 81}, {"port": "forbidden"}, {}, ["Port 81 is not for this user to take: choose a port above 1023"]),
        ({"host": "10.9.9.9"}, {"port": "elsewhere"}, {}, ["The host 10.9.9.9 is no address of this machine"]),
        ({"host": "no"}, {"port": "unknown_host"}, {}, ["The host 'no' cannot be resolved"]),
        ({"port": 81}, {"port": "refused"}, {}, ["127.0.0.1:81 cannot be bound"]),
        ({"port": 81}, {"port": "taken"}, {"b-0": {"port": 81}}, ["Port 81 is worker b-0's as well"]),
        ({"port": 81, "host": "0.0.0.0"}, {}, {"b-0": {"port": 81}}, ["Port 81 is worker b-0's as well"]),
        ({"port": 81, "host": "127.0.0.2"}, {}, {"b-0": {"port": 81}, "c-0": {}}, []),
        ({}, {}, {"b-0": {}}, []),
        # the interpreter
        ({}, {"python": "missing"}, {},
         ["There is no interpreter /p: set python of this worker, or of [engines.vllm], or make one with `./build engine"]),
        ({}, {"python": "missing", "python_words": "/home/p"}, {}, ["There is no interpreter /p (/home/p may be meant):"]),
        ({}, {"python": "directory", "python_words": "/p/bin/python"}, {}, ["probably to /p/bin/python."]),
        ({}, {"python": "directory"}, {}, ["to the interpreter in it."]),
        ({}, {"python": "not_executable"}, {}, ["may not be executed by this user"]),
        ({}, {"python": "old"}, {}, ["The interpreter /p is older than Python 3.10, which iChat needs"]),
        ({"backend": "sglang"}, {"python": "without_engine"}, {}, ["SGLang is not installed for /p: set python"]),
        ({"backend": "fake"}, {"python": "without_engine"}, {}, ["or install the package that brings it there."]),
        ({}, {"python": "broken", "python_words": "no encodings"}, {}, ["/p does not run (no encodings): repair it"]),
        ({}, {"python": "silent"}, {}, ["did not answer within 30 s"]),
        # the model
        ({"model_path": "./m"}, {"model": "missing", "directory": "/srv"}, {},
         ["There is no model ./m (seen from /srv): correct model_path."]),
        ({"model_path": "~/m"}, {"model": "missing", "model_hint": "/home/m"}, {}, ["model_path; /home/m may be meant."]),
        ({"model_path": "/m"}, {"model": "unreadable"}, {}, ["The model /m may not be read by this user"]),
        ({"model_path": "/m"}, {"model": "without_config", "model_hint": "/m/a"}, {},
         ["The directory /m has no config.json: set model_path to a model's own directory; /m/a may be meant."]),
        ({"model_path": "/m"}, {"model": "not_a_model"}, {}, ["The file /m is no GGUF model"]),
        # which GPUs
        ({"gpu_ids": [0, 2, 2]}, {"gpus": TWO}, {},
         ["gpu_ids has a GPU twice (0, 2, 2)", "There is no GPU 2: those here are 0, 1 (as nvidia-smi numbers them)"]),
        ({"gpu_ids": [0]}, {"gpus": []}, {}, ["There is no GPU 0: no NVIDIA GPU answers on this machine; set gpu_ids = [] to use"]),
        ({"env": {"CUDA_VISIBLE_DEVICES": "5"}}, {"gpus": TWO, "visible": "5"}, {}, ["correct CUDA_VISIBLE_DEVICES."]),
        ({}, {"gpus": [HELD, gpu_with(1, 79)], "visible": "GPU-1a"}, {}, []),
        ({}, {"gpus": [HELD, gpu_with(1, 79)], "visible": "GPU-0a"}, {}, ["GPU 0 has 30.0 of 80.0 GiB free"]),
        ({}, {"gpus": [HELD], "visible": "MIG-1"}, {}, []),
        ({"gpu_ids": [1]}, {"gpus": [TWO[0], Gpu(1, failure="GPU is lost")]}, {}, ["GPU 1 does not answer (GPU is lost):"]),
        ({"gpu_ids": [0]}, {"gpus": [TWO[0], Gpu(1, failure="GPU is lost")]}, {}, []),
        # how many
        ({"gpu_ids": [0], "backend_args": {"tensor_parallel_size": 2}}, {"gpus": None}, {},
         ["The model is spread over 2 GPUs, and the worker has 1 (0): lower tensor_parallel_size"]),
        ({"backend_args": {"tp-size": "2", "pp": 2}}, {"gpus": TWO}, {}, ["spread over 4 GPUs, and the worker has 2 (0, 1)"]),
        ({"backend_args": {"tp": 8, "distributed_executor_backend": "ray"}}, {"gpus": TWO}, {}, []),
        ({"backend_args": {"tp": 8, "nnodes": 4}}, {"gpus": TWO}, {}, []),
        ({"backend_args": {"tp": "many"}}, {"gpus": TWO}, {}, []),
        ({"backend": "fake", "backend_args": {"tp": 8}}, {"gpus": TWO}, {}, []),
        # who else has them
        ({"gpu_ids": [0, 1]}, {}, {"b-0": {"gpu_ids": [1, 2]}, "c-0": {"gpu_ids": None}},
         ["GPU 1 is worker b-0's: choose other gpu_ids, or set share_gpus = true for both"]),
        ({"gpu_ids": [0], "share_gpus": True}, {}, {"b-0": {"gpu_ids": [0]}}, ["GPU 0 is worker b-0's"]),
        ({"gpu_ids": [0]}, {}, {"b-0": {"gpu_ids": [0], "share_gpus": True}}, ["GPU 0 is worker b-0's"]),
        ({"gpu_ids": [0], "share_gpus": True}, {}, {"b-0": {"gpu_ids": [0], "share_gpus": True}},
         ["The vLLM workers that share GPU 0 take 180 % of its memory together (this one and b-0)"]),
        ({**SHARED, "backend_args": {"gpu_memory_utilization": 0.4}}, {},
         {name: {**SHARED, "backend_args": {"gpu_memory_utilization": 0.4}} for name in ("b-0", "c-0")},
         ["The vLLM workers that share GPU 0 take 120 % of its memory together (this one and b-0, c-0)"]),
        ({"gpu_ids": [0], "share_gpus": True, "backend_args": {"gpu_memory_utilization": 0.1}}, {},
         {"b-0": {"gpu_ids": [0], "share_gpus": True}, "c-0": {"gpu_ids": [0], "share_gpus": True, "backend": "sglang"}}, []),
        # their memory
        ({"gpu_ids": [0]}, {"gpus": [HELD]}, {},
         [("GPU 0 has 30.0 of 80.0 GiB free, and vLLM needs 72.0 (gpu_memory_utilization 0.9): process 42 (python3) holds"
          " 40.0 GiB, process 43 holds some, process 44 holds 0.0 GiB, 1 more; end what holds it, lower"
          " gpu_memory_utilization to 0.37, or choose another GPU.")]),
        ({}, {"gpus": [gpu_with(0, 1)]}, {},
         ["what holds the rest cannot be seen from here; end what holds it, or choose another GPU."]),
        ({"backend_args": {"gpu_memory_utilization": 0.37}}, {"gpus": [HELD]}, {}, []),
        ({"backend_args": {"gpu_memory_utilization": 0.38}}, {"gpus": [HELD]}, {}, ["lower gpu_memory_utilization to 0.37"]),
        ({"backend_args": {"gpu_memory_utilization": [1]}}, {"gpus": TWO}, {}, []),
        ({"gpu_ids": [1, 0]}, {"gpus": [HELD, gpu_with(1, 79)]}, {}, []),
        ({}, {"gpus": [Gpu(0)]}, {}, []),
        ({}, {"gpus": [gpu_with(0, 1, is_split=True)]}, {}, []),
        ({"backend": "fake"}, {"gpus": [HELD]}, {}, []),
        ({"backend": "sglang", "backend_args": {"mem_fraction_static": 0.9}}, {"gpus": [HELD]}, {}, []),
        ({"backend": "sglang", "backend_args": {"tp": 2}}, {"gpus": [HELD, TWO[1]]}, {},
         ["GPU 0 has 30.0 GiB free and another of this worker's 79.0, and SGLang refuses GPUs that differ so much: process"]),
        ({"backend": "sglang", "backend_args": {"tp": 2, "base_gpu_id": 1}}, {"gpus": [HELD, *TWO[1:], gpu_with(2, 79)]}, {}, []),
    ],
)  # fmt: skip
def test_each_problem_is_a_sentence_that_says_what_to_do(more, facts, others, expected):
    """Every one is found, in the operator's words, and nothing else; what is not known is no problem."""
    others = {name: worker_with(**other) for name, other in others.items()}
    problems = [one.sentence for one in obstacles_of(worker_with(**more), "/p", others, Facts(**facts))]
    assert len(problems) == len(expected), problems
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem
        assert problem.endswith(".")
        assert ": " in problem


def test_all_problems_at_once():
    """Port, interpreter, model, sharing and GPUs, in this order."""
    worker = worker_with(port=81, model_path="/m", gpu_ids=[0, 3])
    facts = Facts(port="taken", python="missing", model="missing", gpus=[HELD])
    problems = [one.sentence for one in obstacles_of(worker, "/p", {"b-0": worker_with(gpu_ids=[3])}, facts)]
    assert [problem.split()[0] + problem.split()[1] for problem in problems] == [
        "Port81", "Thereis", "Thereis", "GPU3", "Thereis", "GPU0",
    ]  # fmt: skip


# The look.


def facts_of(python=sys.executable, environment=None, known=None, **more):
    environment = {"PATH": os.environ["PATH"]} if environment is None else environment
    return read_facts(worker_with(backend="fake", **more), str(python), environment, known=known)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_program_that_listens_on_a_port_is_named():
    """The program that listens is named; a free port, and none in particular, are free."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        facts = facts_of(port=port)
        assert (facts.port, facts.port_holders) == ("taken", [Holder(os.getpid(), psutil.Process().name())])
        assert facts_of(port=port, host="0.0.0.0").port == "taken"
    assert facts_of(port=port).port == "free"
    assert facts_of(port=0).port == "free"
    assert facts_of(host=None, port=None).port == "free"


@pytest.mark.parametrize(
    ("host", "state"), [("203.0.113.7", "elsewhere"), ("a..b", "unknown_host"), ("x" * 70, "unknown_host")]
)
def test_a_host_that_cannot_be_bound(host, state):
    """An address of another machine, and names that are none, are told apart."""
    assert facts_of(host=host).port == state


def test_interpreters(tmp_path, monkeypatch):
    """What is not there, cannot run, is broken, too old or without the engine is told apart."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    python = script(tmp_path / "env" / "bin" / "python", "exit 0")
    plain = tmp_path / "plain"
    plain.write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    states = {
        "/no/such/python": ("missing", ""),
        "no-such-python": ("missing", ""),
        "~/env/bin/python": ("missing", str(python)),
        tmp_path / "env": ("directory", str(python)),
        tmp_path: ("directory", ""),
        plain: ("not_executable", ""),
        script(tmp_path / "a", "echo one >&2; echo two >&2; echo; exit 1"): ("broken", "two"),
        script(tmp_path / "b", "exit 74"): ("old", ""),
        script(tmp_path / "c", "exit 73"): ("without_engine", ""),
        script(tmp_path / "d", "kill -9 $$"): ("broken", ""),
        python: ("right", ""),
    }
    for path, expected in states.items():
        facts = facts_of(path)
        assert (facts.python, facts.python_words) == expected, path
    assert facts_of("python", {"PATH": str(python.parent)}).python == "right"
    plain.chmod(0o755)
    assert facts_of(plain).python == "broken"


def test_an_engine_is_looked_for_without_being_imported(tmp_path):
    """The package of an engine of ours, the entry point of another's; a directory of that name is no package."""
    (tmp_path / "vllm").mkdir()
    environment = {"PYTHONPATH": str(tmp_path)}
    worker = worker_with(backend="vllm")
    assert read_facts(worker, sys.executable, environment).python == "without_engine"
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    assert read_facts(worker, sys.executable, environment).python == "right"
    assert facts_of(environment=environment).python == "without_engine"
    plugins = str(pathlib.Path(__file__).parents[1] / "support/fake_engine")
    assert facts_of(environment={"PYTHONPATH": plugins}).python == "right"


def test_an_interpreter_is_asked_once_until_it_changes(tmp_path):
    """A good answer is remembered; one that lacks the engine is asked again, since it may be installed at any time."""
    count, known = tmp_path / "count", KnownPythons()
    python = script(tmp_path / "python", f"echo >> {count}; exit 73")
    for _ in range(2):
        assert facts_of(python, known=known).python == "without_engine"
    script(python, f"echo >> {count}; exit 0")
    for _ in range(3):
        assert facts_of(python, known=known).python == "right"
    assert len(count.read_text()) == 3
    os.utime(python, (1, 1))
    assert facts_of(python, known=known).python == "right"
    assert len(count.read_text()) == 4
    assert facts_of(python, known=KnownPythons()).python == "right"
    assert len(count.read_text()) == 5


def test_an_interpreter_that_says_nothing(tmp_path):
    """It is given up, and ended together with what it has started."""
    pid = tmp_path / "pid"
    silent = script(tmp_path / "python", f"sleep 3600 & echo $! > {pid}; wait")
    found = read_facts(worker_with(backend="fake"), str(silent), {"PATH": os.environ["PATH"]}, probe_s=5.0)
    assert found.python == "silent"
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid.read_text()))
        deadline = time.monotonic() + LIMIT_S
        while left.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_models(tmp_path, monkeypatch):
    """A path must lead to a model; a name on a hub, an address and an engine's own notions are not looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for directory in ("good", "mistral", "empty", "cache/snapshots/abc", "of-gguf", "above/model"):
        (tmp_path / directory).mkdir(parents=True)
    for file in ("good/config.json", "good/model.safetensors", "mistral/params.json", "cache/snapshots/abc/config.json",
                 "above/model/config.json", "text.gguf"):  # fmt: skip
        (tmp_path / file).write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "of-gguf" / "m.gguf").write_bytes(b"GGUF\x03")
    expected = {
        "good": ("right", ""),
        f"{tmp_path}/good": ("right", ""),
        "mistral": ("right", ""),
        "of-gguf/m.gguf": ("right", ""),
        "~/good": ("missing", f"{tmp_path}/good"),
        "/no/such/model": ("missing", ""),
        "./nothing": ("missing", ""),
        "a/path/of/three": ("missing", ""),
        "empty": ("without_config", ""),
        f"{tmp_path}/cache": ("without_config", f"{tmp_path}/cache/snapshots/abc"),
        "above": ("without_config", "above/model"),
        "of-gguf": ("without_config", "of-gguf/m.gguf"),
        "text.gguf": ("not_a_model", ""),
        "good/model.safetensors": ("not_a_model", "good"),
        "org/model": ("unchecked", ""),
        "model": ("unchecked", ""),
        "org/model:Q4_K_M": ("unchecked", ""),
        "org/model/file.gguf": ("unchecked", ""),
        "s3://bucket/a/b": ("unchecked", ""),
        "nul\0": ("missing", ""),
    }
    engine = script(tmp_path / "python", "exit 0")
    for path, found in expected.items():
        facts = read_facts(worker_with(model_path=path), str(engine), {})
        assert (facts.model, facts.model_hint) == found, path
    assert facts.directory == str(tmp_path)
    args = {"hf_config_path": "x"}
    assert read_facts(worker_with(model_path="empty", backend_args=args), str(engine), {}).model == "unchecked"
    assert facts_of(model_path="/no/such/model").model == "unchecked"


def test_a_model_that_may_not_be_read(tmp_path, monkeypatch):
    """Missing permissions are not taken for a missing model."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert read_facts(worker_with(model_path=str(tmp_path)), "/no", {}).model == "unreadable"


def test_an_environment_that_no_process_can_have(tmp_path):
    """That is not the interpreter's fault, and the start itself says so."""
    assert facts_of(script(tmp_path / "python", "exit 73"), {"A=B": "x"}).python == "right"


async def test_a_look_at_everything(machine, tmp_path):
    """The system and its GPUs at the same time, with the GPUs that the worker will see."""
    machine()
    engine = script(tmp_path / "python", "exit 0")
    facts = await collect_facts(worker_with(model_path="/no"), str(engine), {"CUDA_VISIBLE_DEVICES": "0"})
    assert (facts.model, facts.python, facts.visible, len(facts.gpus)) == ("missing", "right", "0", 1)


async def test_a_look_that_takes_too_long(machine, monkeypatch, caplog):
    """A name server that does not answer keeps no worker from starting: what is not known is no problem."""
    machine()
    go_on = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: go_on.wait(LIMIT_S))
    facts = await collect_facts(worker_with(port=0), sys.executable, {}, within_s=3.0)
    go_on.set()
    assert (facts.port, len(facts.gpus)) == ("free", 1)
    assert "needed more than 3 s" in caplog.text
