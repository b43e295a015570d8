"""Findings of the jobs that `doctor --deep` runs on the nodes of a cluster of Ray."""

import attrs
import pytest

from ichat.config.ray import RayEngine, RaySettings
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.doctor.ray_nodes import NodeAnswer, find_on_nodes, question_for
from ichat.ray.values import RayJob, RayNode

GATEWAY = "http://10.0.0.9:4000"
NODE = RayNode("2" * 56, "10.0.0.2", True, False, {"GPU": 4.0}, {"zone": "b"})
WORKERS = [
    ManagedWorkerConfig("m", "/models/m", on="ray", gpus=1, labels={"zone": ["a", "b"]}),
    ManagedWorkerConfig("n", "/models/n", on="ray", gpus=1, labels={"zone": "a"}),
    ManagedWorkerConfig("s", "org/s", backend="sglang", on="ray", gpus=1),
    ManagedWorkerConfig("h", "/models/h"),
]
CONFIG = Config(
    ray=RaySettings(address="http://head:8265", engines={"vllm": RayEngine("/opt/vllm/bin/python")}),
    engines={"sglang": EngineSettings(python="/opt/sglang/bin/python")},
    managed_workers=WORKERS,
)
DONE = RayJob("j", "SUCCEEDED", exit_code=0)
FOUND = {"python": [3, 11], "engines": {"vllm": "there"}, "models": {"/models/m": True}, "gateway": ""}


def test_a_node_is_asked_about_the_workers_that_may_run_there():
    """A model of a hub is fetched there, and has no directory yet."""
    asked = question_for(CONFIG, NODE, GATEWAY)
    assert asked.engines == {"vllm": "/opt/vllm/bin/python", "sglang": "/opt/sglang/bin/python"}
    assert list(asked.models) == ["/models/m"]
    assert asked.entrypoint("/usr/bin/python 3").startswith("exec '/usr/bin/python 3' -I -S -c ")


def test_nodes_that_have_all_are_a_line():
    answers = [NodeAnswer(NODE, DONE, FOUND), NodeAnswer(attrs.evolve(NODE, ip="10.0.0.3"), DONE, FOUND)]
    [found] = find_on_nodes(CONFIG, answers, GATEWAY)
    assert (found.level, found.sentence) == (
        "ok", "2 nodes have all that workers need, and reach the gateway at http://10.0.0.9:4000.",
    )  # fmt: skip
    assert find_on_nodes(CONFIG, [], GATEWAY) == []


@pytest.mark.parametrize(
    ("answer", "level", "sentence"),
    [
        (NodeAnswer(NODE, DONE, {**FOUND, "python": [3, 8]}), "error",
         "Its python3 is Python 3.8: name Python 3.10 or newer in ray.python."),
        (NodeAnswer(NODE, DONE, {**FOUND, "engines": {"vllm": "missing"}}), "error",
         "It has no /opt/vllm/bin/python: set python in [ray.engines.vllm], or choose nodes that have it by labels."),
        (NodeAnswer(NODE, DONE, {**FOUND, "engines": {"sglang": "without"}}), "error",
         ("Its /opt/sglang/bin/python has no sglang: install it there, or set python in [ray.engines.sglang],"
          " or choose nodes that have it by labels.")),
        (NodeAnswer(NODE, DONE, {**FOUND, "engines": {"vllm": "silent"}}), "warning",
         "Its /opt/vllm/bin/python did not answer: see what holds it up."),
        (NodeAnswer(NODE, DONE, {**FOUND, "models": {"/models/m": False}}), "error",
         "It has no directory /models/m: choose nodes that have it by labels, or use a shared path."),
        (NodeAnswer(NODE, DONE, {**FOUND, "gateway": "timed out"}), "error",
         ("It cannot reach the gateway at http://10.0.0.9:4000 (timed out): open the way,"
          " or set ray.gateway_address.")),
        (NodeAnswer(NODE, RayJob("j", "FAILED", exit_code=127)), "error",
         "It has no python3: set ray.python, or choose nodes that have it by labels."),
        (NodeAnswer(NODE, RayJob("j", "FAILED", "The runtime environment failed.")), "warning",
         "Its job failed: The runtime environment failed."),
        (NodeAnswer(NODE, RayJob("j", "PENDING", "Job has not started yet.")), "warning",
         "It had no room for a job of 0.01 CPU within 30 s: Job has not started yet."),
        (NodeAnswer(NODE, RayJob("j", "RUNNING")), "warning", "Its job did not end within 30 s."),
        (NodeAnswer(NODE, why="no answer within 5 s"), "warning", "Its job could not be run: no answer within 5 s."),
    ],
)  # fmt: skip
def test_a_lack_on_a_node_is_a_sentence(answer, level, sentence):
    [found] = find_on_nodes(CONFIG, [answer], GATEWAY)
    assert (found.level, found.name, found.sentence) == (level, "10.0.0.2", sentence)
