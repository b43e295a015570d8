"""Nodes of a cluster of Ray as machines."""

import json

import attrs
import trio
from support.exposition import known
from support.peers import until

from ichat.fleet.ray_machines import RayMachines, reports_of
from ichat.hardware.machines import RayShare, machines_of, own_id, report_of
from ichat.protocol.messages import Machine
from ichat.ray.api import RayApi
from ichat.ray.reading import ClusterReading
from ichat.ray.values import RayGpu, RayHardware, RayNode, RayRoom

KIND = {"ray.io/accelerator-type": "H100"}
NODES = [
    RayNode("a", "10.0.0.1", True, True, {"CPU": 2.0}, {}),
    RayNode("b", "10.0.0.2", True, False, {"GPU": 4.0}, KIND),
    RayNode("c", "10.0.0.2", True, False, {"GPU": 4.0}, KIND),
]
ROOM = RayRoom({"a": {"CPU": 2.0}, "b": {"GPU": 1.5}, "c": {"GPU": 4.0}}, [], [])
HARDWARE = RayHardware("gpu-2", 64, 0.31, 1000, 333, [RayGpu(0, "H100", "GPU-0", 0.5, 1 << 30, 80 << 30)])
READING = ClusterReading(NODES, hardware={"b": HARDWARE, "c": HARDWARE}, room=ROOM)


def test_raylets_on_an_address_are_one_machine():
    """Their GPUs for jobs are added; a node without a report of its hardware has the address as its name."""
    head, node = machines_of(None, [], reports_of(READING, {}))
    assert (head.name, head.machine.id, head.gpus) == ("10.0.0.1", "ray-10.0.0.1", None)
    assert head.ray == RayShare(1, 0.0, 0.0)
    assert node.ray == RayShare(2, 8.0, 5.5, ("H100",))
    assert (node.name, node.machine.cpus, node.machine.cpu_use, node.workers) == ("gpu-2", 64, 0.3, [])
    assert [one.gpu.memory_total_bytes for one in node.gpus] == [80 << 30]
    assert not node.has_gateway


def test_a_machine_that_reports_itself_gets_the_share_of_ray():
    """The figures of its own report count: it is nearer."""
    own, told = report_of("", Machine("boot-1", "here")), [("w", Machine("boot-2", "there", cpus=9))]
    others = reports_of(READING, {"10.0.0.1": "boot-1", "10.0.0.2": "boot-2"})
    here, there = machines_of(own, told, others)
    assert (here.has_gateway, here.name, here.ray) == (True, "here", RayShare(1, 0.0, 0.0))
    assert (there.name, there.machine.cpus, there.workers) == ("there", 9, ["w"])
    assert there.ray == RayShare(2, 8.0, 5.5, ("H100",))
    assert there.describe()["ray"]["gpus_free"] == 5.5
    assert json.dumps(there.describe())


def test_free_gpus_of_ray_without_a_report_are_not_known():
    _, node = machines_of(None, [], reports_of(attrs.evolve(READING, room=None), {}, 7.0))
    assert (node.ray.gpus, node.ray.gpus_free, node.ray.unanswered_since) == (8.0, None, 7.0)


async def test_a_silent_ray_keeps_its_last_reading(serve, caplog):
    """The reading says since when Ray is silent; that is logged once."""
    rows = [
        {
            "node_id": "a",
            "node_ip": "127.0.0.1",
            "state": "ALIVE",
            "is_head_node": True,
            "resources_total": {"GPU": 2.0},
        }
    ]
    is_silent = False

    async def reply(stream, head, _):
        body = json.dumps({"data": {"result": {"result": rows}, "summary": [], "clusterStatus": None}}).encode()
        status = b"503 X" if is_silent else b"200 OK"
        await stream.send_all(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
        )
        return "close"

    upstream, port = await serve(reply)
    fleet, _ = known()
    machines = RayMachines(RayApi(f"http://127.0.0.1:{port}"), fleet.table)
    assert (list(machines.reports()), machines.is_answering) == ([], None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(machines.watch_forever, 0.01)
        await until(lambda: list(machines.reports()))
        [report] = machines.reports()
        assert (report.machine.id, report.ray) == (own_id(), RayShare(1, 2.0, None))
        assert machines.is_answering
        is_silent = True
        await until(lambda: [one for one in machines.reports() if one.ray.unanswered_since])
        assert not machines.is_answering
        before = len(upstream.requests)
        await until(lambda: len(upstream.requests) > before + 8)
        told = f"Ray at http://127.0.0.1:{port} does not report its nodes: it answers 503"
        assert [one.getMessage().startswith(told) for one in caplog.records].count(True) == 1
        is_silent = False
        await until(lambda: [one for one in machines.reports() if not one.ray.unanswered_since])
        nursery.cancel_scope.cancel()
