"""`[ray]`, and the workers on its nodes: a sentence for every value and every pair of keys that cannot be."""

import pytest

from ichat.config import load as configuration
from ichat.config.ray import RaySettings
from ichat.config.schema import Config
from ichat.errors import ApiError, Exit
from ichat.security.keys import ray_token

RAY = '[ray]\naddress = "http://127.0.0.1:8265"\n'
WORKER = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n'
HERE = 'is for workers on Ray, and this worker runs here: leave it out, or write on = "ray"'
ON_RAY = WORKER + 'on = "ray"\n'


def problems_of(text):
    with pytest.raises(Exit) as caught:
        configuration.parse(text, "x.toml")
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_a_worker_on_ray_is_read():
    """With every key that there is; labels have one value or several."""
    text = RAY + 'ports = "20000-20999"\nruntime_env = { pip = ["a"] }\n[ray.engines.vllm]\npython = "/opt/python"\n'
    labels = 'labels = { "ray.io/accelerator-type" = ["H100", "H200"], zone = "b" }\n'
    config = configuration.parse(text + ON_RAY + "gpus = 2\nreplicas = 3\nmemory_gib = 80\n" + labels, "x.toml")
    (worker,) = config.managed_workers
    assert worker.labels == {"ray.io/accelerator-type": ["H100", "H200"], "zone": "b"}
    assert (worker.on, worker.memory_gib, worker.backend_args) == ("ray", 80.0, {})
    assert config.ray.engines["vllm"].python == "/opt/python"
    assert config.ray.pending_s == 600


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('address = "ray://head:10001"', "address: 'ray://head:10001' is not Ray's dashboard: give http://HOST:8265"),
        ('address = "head:6379"', "address: 'head:6379' is not Ray's dashboard: give http://HOST:8265"),
        ('address = "http://a:1/?b"', "address: must be like https://host/v1 or http://host:8000/v1, without a user,"),
        ("pending_s = 3600", "pending_s: Ray gives up a job that has waited for 900 s: pending_s may be at most 840"),
        ("pending_s = 0", "pending_s: must be from 1 to 840, not 0"),
        ('ports = "20000"', 'ports: must be a range of ports, such as "20000-20999"'),
        ('ports = "3-2"', 'ports: must be a range of ports, such as "20000-20999"'),
        ('ports = "1-70000"', 'ports: must be a range of ports, such as "20000-20999"'),
        ('runtime_env = { working_dir = "." }', "runtime_env: the gateway sets working_dir itself: leave it out"),
        (
            "runtime_env = { env_vars = { A = 'b' } }",
            "runtime_env: put variables into env of the worker, and leave env_vars out: all readers of Ray's",
        ),
        ("runtime_env = { a = 2026-01-01 }", "runtime_env: must hold texts, numbers, lists and tables alone"),
        ("cpus = -1", "cpus: must be from 0 to 10000, not -1"),
        ("[ray.engines.vllm]\npython = ''", "engines.vllm.python: must not be empty"),
    ],
)
def test_a_cluster_that_cannot_be_has_its_sentence(keys, problem):
    address = "" if keys.startswith("address") else 'address = "http://127.0.0.1:8265"\n'
    (found,) = problems_of(f"[ray]\n{address}{keys}\n")
    assert found.startswith(f"ray.{problem}")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("gpus = 2\ngpu_ids = [0]", "gpu_ids: Ray chooses the GPUs: leave gpu_ids out, and write gpus = N"),
        ("gpus = 2\nshare_gpus = true", "share_gpus: Ray chooses the GPUs: leave share_gpus out, and write gpus = 0.5"),
        ('gpus = 2\nhost = "10.0.0.1"', "host: Ray chooses the node: leave host out"),
        ("gpus = 2\nport = 8001", "port: Ray chooses the node: leave port out; ray.ports limits the ports"),
        ("gpus = 2\ngpu_memory_gib = 3", "gpu_memory_gib: Ray books GPUs, not their memory: leave gpu_memory_gib out"),
        (
            'gpus = 2\nload = "on_demand"\nwhen_idle = "sleep"',
            'when_idle: Ray keeps the GPU booked for a worker that sleeps: write when_idle = "stop"',
        ),
        ("", "gpus: write how many GPUs Ray books for the worker; 0: none"),
        ('gpus = "auto"', "gpus: the gateway does not see the model's files on the nodes: write a number of GPUs"),
        (
            'gpus = 2\ndistributed_executor_backend = "ray"',
            "gpus: vLLM's Ray executor books its GPUs itself: leave gpus out",
        ),
        (
            'gpus = 1\nlabels = { a = "b c" }',
            'labels: "b c" is no label of Ray\'s: at most 63 letters, digits, dots, dashes and underscores',
        ),
        ("gpus = 1\nlabels = { a = [] }", "labels: a must name a value"),
        ("gpus = 1\nlabels = { 'a b' = 'c' }", "labels: 'a b' is no name of a label of Ray's"),
        ("gpus = 1\nlabels = { a = 3 }", 'labels.a: must be a text, or an array of texts, such as ["H100", "H200"]'),
    ],
)
def test_a_worker_on_ray_that_cannot_be_has_its_sentence(keys, problem):
    """In the file, and for a worker that is launched."""
    found = problems_of(RAY + ON_RAY + keys)
    assert any(one.startswith(f"managed_workers[0].{problem}") for one in found), found
    table = configuration.parse_toml(f'model_name = "m"\nmodel_path = "/m"\non = "ray"\n{keys}')
    with pytest.raises(ApiError) as refused:
        configuration.read_worker(table, configuration.parse(RAY, "x.toml"))
    assert problem in refused.value.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            ON_RAY + "gpus = 1",
            "managed_workers[0].on: the worker runs on Ray, and [ray] has no address: give that of Ray's dashboard",
        ),
        (
            WORKER + 'on = "gpu-7"',
            'managed_workers[0].on: "gpu-7" is no place for a worker: these are here and ray. Choose a node by labels',
        ),
        (
            WORKER + 'labels = { a = "b" }',
            f"managed_workers[0].labels: {HERE}",
        ),
        (
            WORKER + "memory_gib = 3",
            f"managed_workers[0].memory_gib: {HERE}",
        ),
        (
            '[ray]\naddress = "http://head:8265"\n' + ON_RAY + "gpus = 1",
            "ray: the nodes cannot reach 127.0.0.1:4000: set server_settings.host, or ray.gateway_address",
        ),
    ],
)
def test_a_place_that_cannot_be_has_its_sentence(text, problem):
    assert problems_of(text) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        '[ray]\naddress = "http://head:8265"\ngateway_address = "http://gw:4000"\n' + ON_RAY + "gpus = 1",
        '[server_settings]\nhost = "0.0.0.0"\n[ray]\naddress = "http://head:8265"\n' + ON_RAY + "gpus = 0.5",
        '[ray]\naddress = "http://head:8265"\n' + WORKER,
        RAY + ON_RAY + 'distributed_executor_backend = "ray"',
    ],
)
def test_a_cluster_that_can_be_is_accepted(text):
    """Nodes reach the gateway by its address or by another; Ray's own executor books its GPUs itself."""
    assert configuration.parse(text, "x.toml").ray.address


def test_a_token_that_is_not_there_is_missed(monkeypatch):
    monkeypatch.delenv("RAY_TEST_TOKEN", raising=False)
    with pytest.raises(Exit) as caught:
        ray_token(RaySettings(token_env="RAY_TEST_TOKEN"))
    assert str(caught.value) == "ray.token_env: the environment has no usable token in RAY_TEST_TOKEN."
    monkeypatch.setenv("RAY_TEST_TOKEN", "abc")
    assert ray_token(RaySettings(token_env="RAY_TEST_TOKEN")) == "abc"
    assert not ray_token(Config().ray)
