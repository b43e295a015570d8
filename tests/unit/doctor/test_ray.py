"""Findings about a cluster of Ray."""

import attrs
import pytest

from ichat.config.ray import RaySettings
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.ray import RayFacts, find_in_ray
from ichat.ray.reading import ClusterReading
from ichat.ray.values import RayGpu, RayHardware, RayNode, RayRoom, RayVersion

CONFIG = Config(ray=RaySettings(address="http://head:8265", token_env="RAY_AUTH_TOKEN"))
NO_TOKEN = Config(ray=RaySettings(address="http://head:8265"))
HEAD = RayNode("0" * 56, "10.0.0.1", True, True, {"CPU": 2.0}, {})
NODES = [HEAD, *(RayNode(str(one) * 56, f"10.0.0.{one}", True, False, {"GPU": 4.0}, {}) for one in (2, 3))]
ROOM = RayRoom({"2" * 56: {"GPU": 1.5}, "3" * 56: {"GPU": 4.0}}, [], [])
WHOLE = ClusterReading(NODES, room=ROOM)
GOOD = RayFacts(RayVersion("2.60.0", "session_1"), cluster=WHOLE, own=frozenset({"10.0.0.9"}))
CLOSE = [attrs.evolve(one, ip="10.0.0.2") for one in NODES]


def hardware(count):
    gpus = [RayGpu(one, "H100", f"GPU-{one}", 0.0, 0, 80 << 30) for one in range(count)]
    return RayHardware("gpu", 64, 0.1, 1 << 40, 1 << 39, gpus)


def problems(facts, config=CONFIG):
    return [(one.level, one.name, one.sentence) for one in find_in_ray(config, facts) if one.level != "ok"]


def test_a_sound_cluster_of_ray_has_no_problem():
    assert [one.sentence for one in find_in_ray(CONFIG, GOOD)] == [
        "Ray 2.60.0 answers at http://head:8265, and accepts the token.",
        "3 nodes are alive, with 8 GPUs for jobs, 5.5 free.",
        "The log services of all nodes answer.",
    ]


@pytest.mark.parametrize(
    ("config", "facts", "name", "sentence", "command"),
    [
        (CONFIG, RayFacts(why="403 Forbidden: Invalid authentication token", refusal=403), "token",
         "Ray refuses this gateway (403 Forbidden: Invalid authentication token): correct ray.token_env.",
         "export RAY_AUTH_TOKEN=…"),
        (NO_TOKEN, RayFacts(why="401 Unauthorized", refusal=401), "token",
         "Ray refuses this gateway (401 Unauthorized): set ray.token_env.", ""),
        (CONFIG, RayFacts(why="404 Not Found", refusal=404), "Ray",
         "http://head:8265 is not Ray's dashboard (404 Not Found): correct ray.address.", ""),
        (CONFIG, RayFacts(why="Connection refused"), "Ray",
         ("Ray at http://head:8265 does not answer (Connection refused): its workers go on, and launches wait;"
         " start its head, or correct ray.address."), "curl -v http://head:8265/api/version"),
    ],
)  # fmt: skip
def test_a_cluster_of_ray_that_is_not_known_has_one_finding(config, facts, name, sentence, command):
    [found] = find_in_ray(config, facts)
    assert (found.level, found.name, found.sentence, found.command) == ("error", name, sentence, command)


@pytest.mark.parametrize(
    ("changes", "level", "name", "sentence"),
    [
        ({"version": RayVersion("2.47.1", "s")}, "warning", "version",
         "Ray 2.47.1 is not tested with this iChat, Ray 2.60 is: try a launch before you rely on it."),
        ({"is_open": True}, "warning", "token",
         ("Ray wants no token: all programs that reach http://head:8265 may run anything on its nodes;"
         " set RAY_AUTH_MODE=token on all nodes, and ray.token_env.")),
        ({"cluster": ClusterReading(dead=2)}, "error", "nodes", "Ray has no node that is alive; 2 are dead."),
        ({"cluster": ClusterReading([HEAD], 1)}, "warning", "nodes", "1 node is alive, without a GPU for jobs; 1 is dead."),
        ({"cluster": ClusterReading(missing={"nodes": "no answer within 5 s"})}, "warning", "nodes",
         "Ray does not report its nodes (no answer within 5 s)."),
        ({"mute": {"2" * 56: "500 Agent for node id doesn't exist."}}, "warning", "logs",
         ("The log service of node 10.0.0.2 (22222222) does not answer (500 Agent for node id doesn't exist.):"
         " see dashboard_agent.log in its session's logs.")),
        ({"cluster": ClusterReading(CLOSE), "mute": {"3" * 56: "x"}}, "warning", "logs",
         ("The log service of node 10.0.0.2 (33333333) does not answer (x):"
         " give each raylet on it a --dashboard-agent-listen-port of its own.")),
        ({"cluster": ClusterReading(CLOSE, hardware={"2" * 56: hardware(4), "3" * 56: hardware(4)})}, "error", "10.0.0.2",
         "Ray gives away 8 GPUs of 10.0.0.2, and it has 4: start its raylets with fewer --num-gpus."),
    ],
)  # fmt: skip
def test_a_flaw_of_a_cluster_of_ray_is_a_sentence(changes, level, name, sentence):
    assert problems(attrs.evolve(GOOD, **changes)) == [(level, name, sentence)]


def test_raylets_on_an_address_are_one_machine_for_the_doctor():
    facts = attrs.evolve(GOOD, cluster=ClusterReading(CLOSE))
    assert problems(facts) == []
    assert "Ray has 3 raylets on this address, with 8 GPUs for jobs." in str(find_in_ray(CONFIG, facts))


@pytest.mark.parametrize(
    ("worker", "found"),
    [
        ({"gpus": 1}, ("error", ("Ray gives away 4 GPUs of this machine, and does not see the workers here (m): write"
                       ' on = "ray", or start Ray here with --num-gpus=0.'))),
        ({"gpu_ids": [0]}, ("warning", ("Ray gives away 4 GPUs of this machine, and does not see the workers here (m):"
                            ' see that they use other GPUs, or write on = "ray", or start Ray here with'
                            " --num-gpus=0."))),
        ({"gpu_ids": []}, None),
        ({"gpus": 1, "on": "ray"}, None),
    ],
)  # fmt: skip
def test_gpus_that_ray_and_the_gateway_both_give_away_are_found(worker, found):
    config = attrs.evolve(CONFIG, managed_workers=[ManagedWorkerConfig("m", "/m", **worker)])
    ours = attrs.evolve(GOOD, own=frozenset({"10.0.0.2", "127.0.0.1"}))
    assert problems(ours, config) == ([] if found is None else [(found[0], "GPUs", found[1])])
    assert problems(GOOD, config) == []
