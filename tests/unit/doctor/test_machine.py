"""Findings about a machine: planted disks, limits, memory and GPUs in, levels and commands out."""

import math

import pytest
from support.nvml import GIB

from ichat.config.schema import Config, ManagedWorkerConfig, ServerSettings
from ichat.doctor.machine import (
    DiskFacts,
    MachineFacts,
    cores_in,
    existing_part,
    find_gpus_and_holders,
    find_in_machine,
    is_on_cpu,
)
from ichat.hardware.gpus import Gpu, GpuProcess

MIB = 1024**2
OF_CPU = ManagedWorkerConfig("m", "/m", gpu_ids=[])
OF_FIRST = ManagedWorkerConfig("m", "/m", gpu_ids=[0])
OF_ALL = ManagedWorkerConfig("m", "/m")


def of(*workers):
    return Config(managed_workers=list(workers))


def test_narrow_limits_of_the_kernel_are_named():
    """What the kernel is set to is judged with the configuration."""
    spread = ManagedWorkerConfig(model_name="m", model_path="/m", backend_args={"tensor-parallel-size": 2})
    facts = MachineFacts(
        shm_bytes=64 * MIB, files_max=1024, processes_max=1000, processes=900, autogroup=True, overcommit=2,
        memory_bytes=8 * GIB, swap_use=0.8,
    )  # fmt: skip
    found = {one.name: (one.level, one.command) for one in find_in_machine(of(spread), facts)}
    assert found == {
        "/dev/shm": ("error", "sudo mount -o remount,size=8g /dev/shm"),
        "overcommit": ("error", "sudo sysctl -w vm.overcommit_memory=0"),
        "swap": ("warning", "free -h"),
        "memory": ("ok", ""),
        "files": ("warning", "sudo prlimit --pid $$ --nofile=17408"),
        "processes": ("warning", "sudo prlimit --pid $$ --nproc=unlimited"),
        "autogroup": ("warning", "sudo sysctl -w kernel.sched_autogroup_enabled=0"),
    }


@pytest.mark.parametrize(
    ("facts", "arguments", "name", "level"),
    [
        (MachineFacts(shm_bytes=512 * MIB), {"tp": 2}, "/dev/shm", "warning"),
        (MachineFacts(shm_bytes=8 * GIB), {"tp": 2}, "/dev/shm", None),
        (MachineFacts(shm_bytes=64 * MIB), {"tp": 1}, "/dev/shm", None),
        (MachineFacts(shm_bytes=None), {"tp": 2}, "/dev/shm", None),
        (MachineFacts(files_max=17407), {}, "files", "warning"),
        (MachineFacts(files_max=17408), {}, "files", None),
        (MachineFacts(processes_max=None, processes=10**6), {}, "processes", None),
        (MachineFacts(processes_max=2000, processes=976), {}, "processes", None),
        (MachineFacts(processes_max=2000, processes=977), {}, "processes", "warning"),
        (MachineFacts(swap_use=0.5), {}, "swap", None),
        (MachineFacts(overcommit=1), {}, "overcommit", None),
    ],
)
def test_a_limit_is_a_finding_only_below_its_bound(facts, arguments, name, level):
    """Facts that the system does not report are no findings."""
    found = find_in_machine(of(ManagedWorkerConfig("m", "/m", backend_args=arguments)), facts)
    assert next((one.level for one in found if one.name == name), None) == level


def test_the_memory_of_a_control_group_is_named():
    [memory, _] = find_in_machine(Config(), MachineFacts(memory_bytes=8 * GIB, memory_max_bytes=2 * GIB))
    assert memory.sentence == "The machine has 8.0 GiB, of which this control group may use 2.0."


@pytest.mark.parametrize(
    ("relays", "facts", "words"),
    [
        (0, MachineFacts(memory_bytes=GIB, cores=1), []),
        (4, MachineFacts(memory_bytes=8 * GIB, cores=4), []),
        (5, MachineFacts(memory_bytes=8 * GIB, cores=4.5), ["may use 4.5 cores"]),
        (2, MachineFacts(memory_bytes=8 * GIB, memory_max_bytes=GIB), ["up to 0.1 of 1.0 GiB"]),
    ],
)
def test_relays_need_cores_and_memory(relays, facts, words):
    """Each relay has a core of its own, and all have a small part of the memory."""
    config = Config(server_settings=ServerSettings(relays=relays))
    found = [one for one in find_in_machine(config, facts) if one.name == "relays"]
    assert [one.level for one in found] == ["warning"] * len(words)
    assert all(word in one.sentence for word, one in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("limit", "cores"), [("200000 100000", 2), ("150000 100000", 1.5), ("max 100000", math.inf), ("", math.inf)]
)
def test_a_control_group_has_a_part_of_the_cores(limit, cores):
    assert cores_in(limit) == cores


@pytest.mark.parametrize(
    ("free_bytes", "inodes", "level", "words", "command"),
    [
        (8 * GIB, None, "ok", "/d b has 8.0 GiB left.", ""),
        (8 * GIB, 1000, "ok", "/d b has 8.0 GiB left.", ""),
        (1000 * MIB, 1000, "warning", "/d b has 1000 MiB left", "df -h '/d b'"),
        (63 * MIB, None, "error", "/d b has 63 MiB left", "df -h '/d b'"),
        (8 * GIB, 999, "warning", "/d b has 999 inodes left", "df -i '/d b'"),
        (63 * MIB, 0, "error", "/d b has 0 inodes left", "df -i '/d b'"),
    ],
)
def test_a_full_disk_has_one_finding(free_bytes, inodes, level, words, command):
    """A lack of inodes hides the lack of bytes, since one of them is enough to act."""
    disk = DiskFacts("state", "/d b", free_bytes, inodes)
    [found] = [one for one in find_in_machine(Config(), MachineFacts(disks=[disk])) if one.name == "state"]
    assert (found.level, found.command) == (level, command)
    assert found.sentence.startswith(words)


def gpu(index, *holders, **more):
    processes = [GpuProcess(pid, memory_bytes=1, program=program) for pid, program in holders]
    return Gpu(index, name="H100", memory_total_bytes=80 * GIB, memory_free_bytes=50 * GIB, processes=processes, **more)


@pytest.mark.parametrize(
    ("worker", "holders", "level", "words", "command"),
    [
        (OF_FIRST, (), "ok", "H100: 50.0 of 80.0 GiB are free.", ""),
        (OF_FIRST, ((7, "python"),), "ok", "H100: 50.0 of 80.0 GiB are free; used by m-0.", ""),
        (OF_FIRST, ((7, ""), (9, "blender")), "warning", "; process 9 (blender) uses it and is no worker", "ps -fp 9"),
        (OF_ALL, ((9, ""),), "warning", "; process 9 uses it", "ps -fp 9"),
        (OF_CPU, ((9, ""),), "ok", "; process 9 uses it", ""),
        (OF_ALL, ((1, ""), (2, ""), (3, ""), (4, "")), "warning", "process 3 and 1 more uses it", "ps -fp 1,2,3"),
    ],
)
def test_a_gpu_names_the_processes_that_hold_it(worker, holders, level, words, command):
    """A program that is no worker is a warning where a worker wants this GPU."""
    [found] = find_gpus_and_holders(of(worker), [gpu(0, *holders)], {7: "m-0"})
    assert (found.level, found.name, found.command) == (level, "GPU 0", command)
    assert words in found.sentence


def test_a_gpu_without_an_answer_is_an_error():
    lost = Gpu(1, failure="GPU is lost")
    [found] = find_gpus_and_holders(Config(), [lost], {})
    assert (found.level, found.command) == ("error", "sudo nvidia-smi --gpu-reset -i 1")


@pytest.mark.parametrize(
    ("worker", "has_driver", "is_silent", "words"),
    [
        (OF_CPU, True, False, ""),
        (OF_ALL, False, False, ""),
        (OF_ALL, True, False, "its library cannot be used"),
        (OF_ALL, True, True, "its library did not answer in time"),
    ],
)
def test_a_driver_without_gpus_matters_only_to_workers_that_want_gpus(
    monkeypatch, worker, has_driver, is_silent, words
):
    monkeypatch.setattr("ichat.doctor.machine.has_nvidia", lambda: has_driver)
    [found] = find_gpus_and_holders(of(worker), None, {}, is_silent=is_silent)
    assert (found.level, found.name) == (("error", "driver") if words else ("ok", "GPUs"))
    assert words in found.sentence


def test_a_worker_is_on_processors_by_its_gpus_or_its_arguments():
    by_argument = ManagedWorkerConfig("m", "/m", backend_args={"device": "cpu"})
    assert [is_on_cpu(one) for one in (OF_CPU, by_argument, OF_FIRST, OF_ALL)] == [True, True, False, False]


def test_the_existing_part_of_a_path_is_its_last_directory(tmp_path):
    assert existing_part(f"{tmp_path}/none/at/all") == str(tmp_path)
    assert existing_part(str(tmp_path)) == str(tmp_path)
    assert existing_part("/no/such/path") == "/"
