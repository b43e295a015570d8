"""The doctor's part about Ray, on real clusters."""

import sys

import trio
from support.deployments import free_port

from ichat.config import load as configuration
from ichat.doctor.examination import EXAMINE_S
from ichat.doctor.ray import find_in_ray, read_ray_facts
from ichat.doctor.ray_nodes import find_from_within
from ichat.ray.api import RayApi
from ichat.security.keys import ray_token


async def problems(address, token_env=""):
    """Return what the doctor finds, and whether it is no problem."""
    token = f'token_env = "{token_env}"\n' if token_env else ""
    config = configuration.parse(f'[ray]\naddress = "{address}"\n{token}', "test.toml")
    api = RayApi(address, ray_token(config.ray))
    facts = await read_ray_facts(api, trio.current_time() + EXAMINE_S)
    return [(one.level, one.name) for one in find_in_ray(config, facts)], facts


async def test_a_whole_cluster_of_ray_is_examined(cluster):
    """Three raylets on an address have log services of their own; this cluster wants no token."""
    found, facts = await problems(cluster.address)
    assert found == [
        ("ok", "Ray"), ("warning", "token"), ("ok", "nodes"), ("ok", "logs"), ("ok", cluster.ip),
    ]  # fmt: skip
    assert cluster.ip in facts.own
    assert (facts.cluster.missing, facts.mute) == ({}, {})


async def test_a_token_of_ray_is_examined(fragile_cluster, monkeypatch):
    monkeypatch.setenv("RAY_TEST_TOKEN", fragile_cluster.token)
    found, _ = await problems(fragile_cluster.address, "RAY_TEST_TOKEN")
    assert found == [("ok", "Ray"), ("ok", "nodes"), ("ok", "logs"), ("ok", fragile_cluster.ip)]
    monkeypatch.setenv("RAY_TEST_TOKEN", "another-token-of-thirty-characters")
    found, facts = await problems(fragile_cluster.address, "RAY_TEST_TOKEN")
    assert found == [("error", "token")]
    assert facts.refusal == 403


async def test_a_cluster_of_ray_that_is_not_there_is_an_error():
    found, facts = await problems(f"http://127.0.0.1:{free_port()}")
    assert found == [("error", "Ray")]
    assert facts.why == "Connection refused"


async def test_nodes_of_ray_are_examined_from_within(cluster, tmp_path):
    """A job on each node with GPUs finds what workers there would lack; no job is left."""
    (tmp_path / "model").mkdir()
    python = sys.executable
    text = f"""
[ray]
address = "{cluster.address}"
python = "{python}"
[ray.engines.vllm]
python = "/nowhere/python"
[ray.engines.sglang]
python = "{python}"
[[managed_workers]]
model_name = "m"
model_path = "{tmp_path}/model"
on = "ray"
gpus = 1
labels = {{ zone = "a" }}
[[managed_workers]]
model_name = "n"
model_path = "{tmp_path}/no-model"
backend = "sglang"
on = "ray"
gpus = 1
labels = {{ zone = "b" }}
"""
    config, api = configuration.parse(text, "test.toml"), RayApi(cluster.address, ask_s=60)
    nodes = [node for node in await api.nodes() if node.is_alive]
    found = await find_from_within(config, api, nodes)
    assert {(one.level, one.sentence.partition(":")[0]) for one in found} == {
        ("error", "It has no /nowhere/python"),
        ("error", f"Its {python} has no sglang"),
        ("error", f"It has no directory {tmp_path}/no-model"),
    }
    assert [job.id for job in await api.jobs() if job.id.startswith("ichat-doctor-")] == []
