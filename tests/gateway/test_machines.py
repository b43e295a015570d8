"""What machines have and who holds it: as workers tell of it, as the gateway puts it together and shows it."""

import json
import os
import sys
from types import SimpleNamespace

import attrs
import pytest
import trio
from support.exposition import heartbeat, known, own, shown
from support.nvml import GIB, Nvml, NVMLError
from support.peers import plain, until
from support.programs import LIMIT_S

from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.views import describe
from ichat.hardware import gpus
from ichat.hardware import machines as machine
from ichat.hardware.gpus import Gpu, GpuProcess, GpuReader
from ichat.hardware.host import CpuMeter
from ichat.hardware.machines import MachineMonitor, MachineReport, machines_of, read_machine, report_of
from ichat.protocol.messages import Heartbeat, Machine, MachineGpu, parse_heartbeat
from ichat.roles.heartbeat_sender import HeartbeatSender

NEEDED = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1}
FAR = Machine("boot-far", "far", 64, 0.25, 2**40, 2**39, [MachineGpu(0, "GPU-9", "H200", 2**37, 2**36, 0.5)])
OWN, NOBODY = os.getpid(), 2**40


# Looking.


def told(*processes, by="w"):
    """Tell of a machine with one GPU that these processes use."""
    gpu = Gpu(0, "GPU-1", "H\n100", 80 * GIB, 50 * GIB, 30 * GIB, use=0.75, processes=processes)
    return read_machine(CpuMeter(), [gpu], {OWN: "w"}, by)


@pytest.mark.parametrize(
    ("processes", "held"),
    [
        ([], 0),
        ([GpuProcess(OWN, 3 * GIB, "python")], 3 * GIB),
        ([GpuProcess(OWN, 3 * GIB, "python"), GpuProcess(NOBODY, GIB)], 3 * GIB),
        ([GpuProcess(OWN, None, "python")], None),
        ([GpuProcess(1, GIB, "init")], 0),
        ([GpuProcess(NOBODY, GIB)], None),
    ],
)
def test_a_worker_holds_the_gpu_memory_of_its_own_processes(processes, held):
    """The memory of its own processes; where the driver names processes that are not here, nothing is known."""
    report = told(*processes)
    assert report.machine.gpus[0] == MachineGpu(0, "GPU-1", "H?100", 80 * GIB, 50 * GIB, 0.75, held_bytes=held)
    assert report.held == {0: {"w": held} if held else {}}
    assert report_of("w", report.machine).held == ({0: {"w": held}} if held else {})
    assert (told(*processes, by="").machine.gpus[0].held_bytes, told(*processes, by="").held) == (None, report.held)


def test_facts_of_this_machine_fit_into_a_beat():
    """This machine as it is, with GPUs or without, is taken by a gateway as it was sent."""
    for found in (None, [], [Gpu(0, failure="GPU is lost")], GpuReader().read()):
        report = read_machine(CpuMeter(), found, {OWN: "w"}, "w")
        sent = json.loads(json.dumps(attrs.asdict(Heartbeat(**NEEDED, machine=report.machine))))
        assert parse_heartbeat(sent).machine == report.machine
        assert (report.machine.cpus or 0) > 0
        assert 0 <= report.machine.memory_available_bytes <= report.machine.memory_total_bytes


def test_nothing_is_imported_without_a_driver(monkeypatch, tmp_path):
    """Where neither NVIDIA's driver nor a device of its is there, its module is left alone."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(gpus, "_DRIVER", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(gpus, "_VENDORS", f"{str(tmp_path)[1:]}/*/vendor")
    monkeypatch.setattr(gpus.importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    (tmp_path / "0").mkdir()
    (tmp_path / "0/vendor").write_text("0x8086\n")
    assert (gpus.has_nvidia(), GpuReader().read()) == (False, None)
    (tmp_path / "0/vendor").write_text("0x10de\n")
    assert gpus.has_nvidia()
    (tmp_path / "0/vendor").unlink()
    (tmp_path / "nvidiactl").touch()
    assert gpus.has_nvidia()


async def test_a_driver_that_hangs_holds_no_lookout_up(mock_clock):
    """The machine is told of without its GPUs, at each interval anew, and the first time is said."""
    calls, seen = [], []

    class Hanging(GpuReader):
        async def find(self):
            calls.append(trio.current_time())
            with trio.move_on_after(gpus.FIND_S):
                await trio.sleep_forever()

    lookout = MachineMonitor(SimpleNamespace(pids={}), "w", gpus=Hanging())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lookout.watch_forever, 10.0, lambda: seen.append(trio.current_time()))
        while len(calls) < 3:
            mock_clock.jump(1)
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            await trio.to_thread.run_sync(int)
        nursery.cancel_scope.cancel()
    assert len(seen) == 1
    assert lookout.report.machine.gpus is None


# Putting together.


def seen(*told, own=None):
    """Return names, and of each GPU its label, uuid and who holds it."""
    return {
        one.name: None if one.gpus is None else [(gpu.label, gpu.gpu.uuid, dict(gpu.held)) for gpu in one.gpus]
        for one in machines_of(own, told)
    }


def on(machine_id="a", by="w", name="host", held=0, gpus=(), **more):
    """Make what a worker tells; GPUs are pairs of index and uuid."""
    all_of_them = None if gpus is None else [MachineGpu(index, uuid, held_bytes=held) for index, uuid in gpus]
    return by, Machine(machine_id, name, gpus=all_of_them, **more)


def test_a_machine_with_several_workers_is_there_once():
    """Each GPU once as well, with all who hold it; the first who knows of something is believed."""
    gateway = MachineReport("", Machine("a", "host", 8), {0: {"w1": 7, "kept": 5}}, ["w1", "kept"])
    first, second = on(by="w1", held=3, gpus=[(0, "G0"), (1, "G1")]), on(by="w2", held=4, gpus=[(0, "G0")])
    assert seen(first, second, own=gateway) == {"host": [("0", "G0", {"w1": 3, "w2": 4}), ("1", "G1", {"w1": 3})]}
    own = attrs.evolve(gateway, machine=attrs.evolve(gateway.machine, gpus=[MachineGpu(0, "G0", "H100")]))
    [found] = machines_of(own, [first, second])
    assert (found.workers, found.has_gateway, found.machine.cpus) == (["kept", "w1", "w2"], True, 8)
    assert found.gpus[0].held == {"w1": 3, "w2": 4, "kept": 5}
    assert (found.gpus[0].gpu.name, len(found.gpus)) == ("H100", 2)
    assert seen(on(gpus=None), on(by="v", gpus=None)) == {"host": None}
    assert seen(on(gpus=None), on(by="v")) == {"host": []}


def test_containers_that_see_a_part_each():
    """Where two GPUs of a machine have the same number, their uuids tell them apart."""
    parts = on(by="w1", name="c1", held=1, gpus=[(0, "G5")]), on(by="w2", name="c2", held=2, gpus=[(0, "G7")])
    assert seen(*parts) == {"c1": [("G5", "G5", {"w1": 1}), ("G7", "G7", {"w2": 2})]}


def test_a_gpu_that_is_lost_is_still_the_same():
    """One that does not answer has no uuid, and is known by its number."""
    for told in ((on(gpus=[(0, "")]), on(by="v", gpus=[(0, "G0")])), (on(gpus=[(0, "G0")]), on(gpus=[(0, "")]))):
        assert len(seen(*told)["host"]) == 1


def test_names_and_labels_are_unique():
    """Whatever is told: two machines of one name, names that look like ours, GPUs that are told of twice."""
    same = [on(machine_id=f"{n}2345678-rest", by=f"w{n}") for n in range(3)]
    assert set(seen(*same)) == {"host-02345678", "host-12345678", "host-22345678"}
    assert len(seen(*same, on(machine_id="x", name="host-02345678"))) == 4
    assert len(seen(on(machine_id="12345678-a"), on(machine_id="12345678-b"))) == 2
    odd = [(0, "1"), (1, "G"), (1, "H"), (0, "1"), (0, "")]
    labels = [label for label, _, _ in seen(on(gpus=odd))["host"]]
    assert len(labels) == len(set(labels)) == 3


# Beats.


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""}, {"id": "a b"}, {"id": "x" * 129}, {"name": "a\nb"}, {"name": "x" * 257}, {"cpus": -1},
        {"cpu_use": 1.5}, {"memory_total_bytes": 2**70}, {"gpus": {}}, {"gpus": [{"index": 0}] * 65}, {"gpus": [{}]},
        {"gpus": [{"index": -1}]}, {"gpus": [{"index": 0, "use": 2}]}, {"gpus": [{"index": 0, "uuid": "\ud800"}]},
        {"gpus": [{"index": 0, "held_bytes": -1}]}, {"gpus": [{"index": 0, "memory_used_bytes": 1.5}]},
    ],
)  # fmt: skip
def test_impossible_machine_facts_are_refused(wrong):
    """A beat that tells of impossible things is 400, and says which; nothing is taken of it."""
    with pytest.raises(ApiError, match=rf"machine\.{next(iter(wrong))}") as caught:
        parse_heartbeat({**NEEDED, "machine": {"id": "a", "name": "b", **wrong}})
    assert caught.value.status == 400


def test_old_and_new_beats():
    """Without a machine, with nothing but its name, and with keys of newer workers: all are beats."""
    assert parse_heartbeat(NEEDED).machine is None
    assert parse_heartbeat({**NEEDED, "machine": {"id": "a", "name": "b"}}).machine == Machine("a", "b")
    more = {"id": "a", "name": "b", "fans": 4, "gpus": [{"index": 0, "fans": 2}]}
    assert parse_heartbeat({**NEEDED, "machine": more}).machine == Machine("a", "b", gpus=[MachineGpu(0)])


def test_machine_facts_hold_until_they_change():
    """Of a start of the worker, while it is heard of; the next start tells anew, and so it does the next gateway."""
    now = [1000.0]
    fleet = Fleet({}, lambda: now[0], 10)

    def hear(**more):
        fleet.registry.record_heartbeat(Heartbeat(**{**NEEDED, "start_id": "1", **more}))
        return [found for _, found in fleet.table.machines()], fleet.table.get("w").machine is None

    assert hear() == ([], True)
    assert hear(machine=FAR) == ([FAR], False)
    assert hear() == ([FAR], False)
    described = describe(fleet.table, fleet.table.get("w"))
    assert described["machine"] == "far"
    assert json.dumps(described)
    changed = attrs.evolve(FAR, cpu_use=0.5)
    assert hear(machine=changed) == ([changed], False)
    [(kept, _, _)] = fleet.registry.snapshot()
    assert kept.machine is None
    now[0] += 3600
    assert fleet.table.machines() == []
    assert hear(start_id="2") == ([], True)
    other = Fleet({}, lambda: now[0], 10)
    other.registry.restore(kept, 1.0)
    assert (other.table.machines(), other.table.get("w").machine) == ([], None)


async def test_a_machine_rides_in_beats_when_it_changes(serve, nursery):
    """It is told once, again when it is another one, and again to a gateway that asks for it."""
    knows = set()
    gateway_id = "a"

    async def take(stream, head, body):
        knows.update([gateway_id] if json.loads(body)["machine"] else [])
        answer = {"gateway_id": gateway_id, "wants_machine": gateway_id not in knows}
        await stream.send_all(plain(json.dumps(answer).encode()))

    upstream, port = await serve(take)
    now = Heartbeat(**NEEDED, heartbeat_interval=3600.0)
    reporter = HeartbeatSender(f"http://127.0.0.1:{port}", ca_file=None, host="h", now=lambda: now, lost=print)
    nursery.start_soon(reporter.send_forever)
    await until(lambda: len(upstream.requests) == 1)
    for machine_now in (None, FAR, FAR, attrs.evolve(FAR, cpu_use=0.5), attrs.evolve(FAR, cpu_use=0.5)):
        now = attrs.evolve(now, machine=machine_now)
        count = len(upstream.requests)
        reporter.changed()
        await until(lambda count=count: len(upstream.requests) > count)
    gateway_id = "b"
    reporter.changed()
    await until(lambda: "b" in knows)
    told = [(json.loads(body)["machine"] or {}).get("cpu_use") for _, body in upstream.requests]
    assert told == [None, None, 0.25, None, 0.5, None, None, 0.5]
    nursery.cancel_scope.cancel()


# What is shown.


@pytest.fixture
def nvml(monkeypatch):
    """Put two GPUs into the gateway's machine, of which one is lost."""
    module = Nvml(buses=(1, 2), instead={("nvmlDeviceGetHandleByIndex", 1): NVMLError(15)})
    monkeypatch.setitem(sys.modules, "pynvml", module)


async def test_gpus_are_in_the_metrics(gateway_to, connect, nvml):
    """Those of the gateway's machine and of the workers', each once, and what each worker holds beside."""
    gateway = await gateway_to({})
    held = {"id": machine.own_id(), "name": "container", "gpus": [{"index": 3, "uuid": "GPU-1", "held_bytes": GIB}]}
    await heartbeat(connect, gateway, 1, worker_id="near", machine=held)
    await heartbeat(connect, gateway, 1, worker_id="far", machine=attrs.asdict(FAR))
    await heartbeat(connect, gateway, 1, worker_id="other")
    with trio.fail_after(LIMIT_S):
        while len((now := await shown(connect, gateway)).labels("ichat_gpu_failed")) < 3:  # the gateway's come last
            await trio.sleep(0.05)
    [here] = {one["machine"] for one in now.labels("ichat_gpu_info")} - {"far"}
    lost, well, far = [{"machine": name, "gpu": gpu} for name, gpu in ((here, "1"), (here, "0"), ("far", "0"))]
    assert now.get("ichat_gpu_memory_used_bytes", **well) == 30 * GIB
    assert now.get("ichat_gpu_memory_total_bytes", **well) == 80 * GIB
    assert now.get("ichat_gpu_utilization_ratio", **well) == 0.75
    assert {**well, "uuid": "GPU-1", "name": "NVIDIA H100"} in now.labels("ichat_gpu_info")
    assert now.get("ichat_gpu_memory_worker_bytes", **well, worker="near") == GIB
    assert now.get("ichat_gpu_memory_used_bytes", **far) == 2**36
    assert (now.get("ichat_gpu_failed", **well), now.get("ichat_gpu_failed", **lost)) == (0, 1)
    assert now.get("ichat_gpu_memory_used_bytes", **lost) is None
    assert len(now.labels("ichat_gpu_failed")) == 3
    assert len(now.labels("ichat_gpu_memory_worker_bytes")) == 1

    status = json.loads((await (await connect(gateway)).get(b"/v1/admin/cluster/status"))[2])
    assert [one["name"] for one in status["machines"]] == [here, "far"]
    assert status["machines"][0]["workers"] == ["near"]
    assert status["machines"][0]["gpus"][0]["held_by"] == [{"worker_id": "near", "memory_bytes": GIB}]
    assert (status["machines"][0]["gpus"][1]["failure"], len(status["resources"]["gpus"])) == ("GPU is lost", 2)
    version = json.loads((await (await connect(gateway)).get(b"/v1/admin/cluster/version"))[2])
    assert {one["worker_id"] for one in version["workers"]} == {"near", "far", "other"}


async def test_without_gpus_there_is_nothing_of_them():
    """Not even the name of a metric, with machines known or without."""
    fleet, metrics = known("m", machine=MachineReport("", Machine("a", "b")))
    fleet.registry.record_heartbeat(Heartbeat(**NEEDED, machine=Machine("c", "d", gpus=[])))
    text = own(metrics).text
    assert "ichat_gpu" not in text
    fleet.registry.record_heartbeat(Heartbeat(**NEEDED, machine=FAR))
    assert own(metrics).get("ichat_gpu_failed", machine="far", gpu="0") == 0
