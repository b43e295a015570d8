"""The job of a launch on Ray, and the sentence about its wait."""

import pytest

from ichat.config import load as configuration
from ichat.ray.values import RayDemand, RayJob, RayNode, RayRoom
from ichat.supervisor.ray_jobs import (
    LaunchNames,
    address_for,
    entrypoint_of,
    lacking_on,
    place_on,
    submission_of,
    why_pending,
)
from ichat.supervisor.remote_wait import RemoteLack

WORKER = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\non = "ray"\n'
NAMES = LaunchNames("0123abcd", "m-0", 7)


def config_of(keys="gpus = 2", ray="", settings=""):
    address = '[ray]\naddress = "http://127.0.0.1:8265"\n'
    return configuration.parse(f"[server_settings]\n{settings}\n{address}{ray}\n{WORKER}{keys}\n", "x.toml")


def node(name, gpus, *, is_alive=True, **labels):
    found = {"ray.io/accelerator-type" if key == "kind" else key: value for key, value in labels.items()}
    return RayNode(name, f"10.0.0.{name}", is_alive, False, {"GPU": gpus}, found)


def test_a_job_has_the_resources_of_its_table():
    """And its labels as Ray writes them; Ray waits for as long as the worker may need to end."""
    keys = 'gpus = 0.5\nmemory_gib = 2\nlabels = { zone = "b", kind = ["H100", "H200"] }'
    config = config_of(keys, 'cpus = 3\nruntime_env = { pip = ["a"] }')
    job = submission_of(NAMES, config.managed_workers[0], config, entrypoint="guard", package="gcs://p.zip")
    assert job.describe() == {
        "submission_id": "0123abcd-m-0-7",
        "entrypoint": "guard",
        "metadata": {"ichat.owner": "0123abcd", "ichat.worker": "m-0", "ichat.launch": "7"},
        "entrypoint_num_gpus": 0.5,
        "entrypoint_num_cpus": 3.0,
        "entrypoint_memory": 2 << 30,
        "entrypoint_label_selector": {"zone": "b", "kind": "in(H100,H200)"},
        "runtime_env": {"pip": ["a"], "working_dir": "gcs://p.zip", "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "20"}},
    }


def test_the_command_of_a_job_is_quoted():
    """It runs the program from the package, or from the source of a gateway that runs from there."""
    ray = config_of(ray="python = '/opt/my python'").ray
    assert entrypoint_of(ray, "order-1", "http://gw:4000") == (
        "exec '/opt/my python' -I -S ichat.pyz worker --order order-1 --gateway-address http://gw:4000"
    )
    assert entrypoint_of(ray, "order-1", "http://gw:4000", source="/a b").startswith(
        "exec env PYTHONPATH='/a b' '/opt/my python' -m ichat worker --order order-1"
    )


@pytest.mark.parametrize(
    ("ray", "settings", "address"),
    [
        ('gateway_address = "https://gw.example/"', "", "https://gw.example"),
        ("", 'host = "10.0.0.9"', "http://10.0.0.9:4000"),
        ("", 'host = "::1"\nport = 4001', "http://[::1]:4001"),
        ("", 'host = "0.0.0.0"', "http://127.0.0.1:4000"),
    ],
)
def test_the_nodes_reach_the_gateway_where_it_listens(ray, settings, address):
    """If it listens everywhere, by its address on the way to a node."""
    assert address_for(config_of(ray=ray, settings=settings), "127.0.0.1") == address


@pytest.mark.parametrize(
    ("settings", "is_own", "senders", "address"),
    [
        ('host = "10.0.0.9"', False, ["10.0.0.7"], "10.0.0.7"),
        ('host = "10.0.0.9"', True, ["10.0.0.7", "127.0.0.0/8", "::1"], "10.0.0.7"),
        ("", True, ["10.0.0.7", "127.0.0.0/8", "::1"], ""),
    ],
)
def test_an_order_is_for_the_node_of_its_job(settings, is_own, senders, address):
    """A node on the gateway's machine may use loopback, as the gateway itself may."""
    place = place_on(config_of(ray='ports = "20000-20009"', settings=settings), "10.0.0.7", is_own=is_own)
    assert (place.senders, place.address, place.ports) == (senders, address, "20000-20009")
    assert place.ends_with_parent


NODES = [node("1", 0), node("2", 4, kind="A100", zone="a"), node("3", 2, kind="L4", zone="b")]


@pytest.mark.parametrize(
    ("keys", "nodes", "free", "coming", "sentence"),
    [
        ("gpus = 8", NODES, {}, [], "No node of Ray has 8 GPUs: the largest have 4 (10.0.0.2)."),
        (
            'gpus = 4\nlabels = { zone = "b" }', NODES, {}, [],
            "No node of Ray with the label zone = b has 4 GPUs: the largest have 2 (10.0.0.3).",
        ),
        ('gpus = 1\nlabels = { zone = "c" }', NODES, {}, [], "No node of Ray has the label zone = c."),
        (
            'gpus = 2\nlabels = { "ray.io/accelerator-type" = ["H100", "H200"] }', NODES, {}, [],
            "No node of Ray has the label ray.io/accelerator-type = H100 or H200; Ray has 4 A100, 2 L4.",
        ),
        (
            "gpus = 2", NODES, {"2": 1.0, "3": 0.5}, ["gpu_node"],
            "2 GPUs are wanted on a node, and at most 1 are free on any; Ray is starting gpu_node.",
        ),
        ("gpus = 2", NODES, {"2": 3.0}, [], "It waits."),
        ("gpus = 2", NODES, {"2": 1.0}, [], "It waits."),
        ("gpus = 2", NODES, None, [], "It waits."),
        ("gpus = 0", NODES, {}, [], "It waits."),
        ("gpus = 1", [node("2", 4, is_alive=False)], {}, [], "Ray has no node that is alive."),
    ],
)  # fmt: skip
def test_a_wait_has_its_reason(keys, nodes, free, coming, sentence):
    """What is not known is no reason."""
    (spec,) = config_of(keys).managed_workers
    room = None if free is None else RayRoom({name: {"GPU": count} for name, count in free.items()}, [], coming)
    assert why_pending(spec, RayJob("j", "PENDING", "It waits."), nodes, room) == sentence


@pytest.mark.parametrize(
    ("keys", "free", "demand", "lacking"),
    [
        ("gpus = 2", {"2": 1.0, "3": 0.5}, 2.0, {"2": 1.0, "3": 1.5}),
        ("gpus = 4", {"2": 1.0, "3": 0.5}, 4.0, {"2": 3.0}),
        ('gpus = 2\nlabels = { zone = "b" }', {"2": 0.0, "3": 0.0}, 2.0, {"3": 2.0}),
        ("gpus = 2", {"2": 1.0, "3": 0.5}, 1.0, {}),
        ("gpus = 2", {"2": 1.0}, 2.0, {}),
        ("gpus = 8", {"2": 0.0, "3": 0.0}, 8.0, {}),
        ("gpus = 0", {"2": 0.0, "3": 0.0}, 0.0, {}),
        ("gpus = 2", None, 2.0, {}),
    ],
)
def test_gpus_are_lacking_only_where_ray_waits_for_them(keys, free, demand, lacking):
    """On each node that is large enough: another demand, or a node that is not reported, is no lack."""
    (spec,) = config_of(keys).managed_workers
    rows = [RayDemand({"CPU": 1.0, "GPU": demand}, 2), RayDemand({"CPU": 8.0, "GPU": demand}, 1)]
    room = None if free is None else RayRoom({name: {"GPU": count} for name, count in free.items()}, rows, [])
    assert lacking_on(spec, NODES, room) == (RemoteLack(3, lacking) if lacking else RemoteLack())
