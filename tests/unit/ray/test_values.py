"""Answers of Ray about machines that no test has: GPUs with a driver, and an autoscaler's nodes."""

import pytest

from ichat.ray.values import RayGpu, read_hardware, read_jobs, read_room

GPU = {
    "index": 1, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1", "utilizationGpu": 40, "memoryUsed": 1024,
    "memoryTotal": 81559, "processesPids": {},
}  # fmt: skip
NODE = {
    "hostname": "gpu-7", "ip": "10.0.0.17", "cpu": 12.5, "cpus": [64, 32], "mem": [1000, 400, 60.0, 600],
    "gpus": [GPU], "raylet": {"nodeId": "ab", "dashboardAgentListenPort": 52365},
}  # fmt: skip


def test_a_gpu_of_ray_has_its_memory_in_bytes():
    found = read_hardware({"data": {"summary": [NODE, {"raylet": {"nodeId": "cd"}}]}})
    assert list(found) == ["ab"]
    one = found["ab"]
    assert list(one.gpus) == [RayGpu(1, "NVIDIA H100 80GB HBM3", "GPU-1", 0.4, 1024 << 20, 81559 << 20)]
    assert (one.hostname, one.cpus, one.cpu_use, one.agent_port) == ("gpu-7", 64, 0.125, 52365)
    assert (one.memory_total_bytes, one.memory_available_bytes) == (1000, 400)


def test_nodes_that_an_autoscaler_starts_are_coming():
    report = {"pendingNodes": [["10.0.0.9", "gpu.large", "setting-up"]], "pendingLaunches": {"gpu.small": 2, "cpu": 0}}
    loads = {"usageByNode": {"ab": {"GPU": [1.5, 4.0]}}, "resourceDemand": [[{"GPU": 2.0, "CPU": 1.0}, 3]]}
    room = read_room({"data": {"clusterStatus": {"autoscalerReport": report, "loadMetricsReport": loads}}})
    assert list(room.coming) == ["gpu.large", "gpu.small"]
    assert room.free == {"ab": {"GPU": 2.5}}
    assert [(one.resources, one.count) for one in room.demand] == [({"GPU": 2.0, "CPU": 1.0}, 3)]


def test_a_cluster_without_a_report_has_no_room_yet():
    assert not read_room({"data": {"clusterStatus": None}}).free


def test_drivers_of_other_programs_are_no_jobs():
    driver = {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}
    assert not read_jobs([driver])


@pytest.mark.parametrize("wrong", [None, [], {"data": []}, {"data": {"summary": [1]}}])
def test_hardware_of_another_form_is_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        read_hardware(wrong)
