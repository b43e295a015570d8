"""The examples for Kubernetes and compose: they fit the schemas, each other, the Containerfile and iChat's own flags."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from support.programs import LIMIT_S, ROOT

from ichat.config import load as configuration
from ichat.roles.worker_options import parser

EXAMPLES = ROOT / "examples"
CLUSTER = EXAMPLES / "kubernetes"
CONFIG = configuration.parse((CLUSTER / "ichat.toml").read_text(), "ichat.toml")
KEYS = {"ICHAT_ADMIN_KEY", "ICHAT_JOIN_TOKEN", "TEAM_A_KEY", "PROMETHEUS_KEY"}
TARGETS = set(re.findall(r"^FROM .* AS (\S+)$", (EXAMPLES / "Containerfile").read_text(), re.MULTILINE))
COMPOSE = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
KUSTOMIZATION = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
MARGIN_S = 10
"""Between the end that is asked for and the end that is forced."""

pytestmark = pytest.mark.one_process("starts no gateway")


def resources():
    """Return the manifests of the cluster by their kinds."""
    texts = [(CLUSTER / name).read_text() for name in KUSTOMIZATION["resources"]]
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}


def pod_of(kind):
    return resources()[kind]["spec"]["template"]["spec"]


def worker_options(words):
    """Parse the flags of a worker as the worker does; the rest is the engine's."""
    return parser().parse_known_args([re.sub(r"\$\(\w+\)", "x", word) for word in words])


def test_the_manifests_fit_the_schemas_of_kubernetes():
    """Strictly: no field is unknown. ServiceMonitor is a resource of an operator, without a schema here."""
    validate = pytest.importorskip("kubernetes_validate", reason="`./build test` installs kubernetes-validate")
    found = resources()
    for kind in found.keys() - {"ServiceMonitor"}:
        validate.validate(found[kind], validate.latest_version(), strict=True)
    assert found.keys() == {"Service", "StatefulSet", "Deployment", "PodDisruptionBudget", "ServiceMonitor"}


def test_the_kustomization_names_every_file():
    """The manifests, the configuration, and the images that they use."""
    named = {*KUSTOMIZATION["resources"], *KUSTOMIZATION["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert {path.name for path in CLUSTER.iterdir()} == named
    used = {pod_of(kind)["containers"][0]["image"] for kind in ("StatefulSet", "Deployment")}
    assert {one["name"] for one in KUSTOMIZATION["images"]} == used
    assert used < TARGETS


def test_both_give_the_time_that_a_drain_needs():
    """Nobody kills a gateway or a worker that still drains as it was configured."""
    needed = CONFIG.timeouts.drain_s + CONFIG.timeouts.stop_s + MARGIN_S
    assert pod_of("StatefulSet")["terminationGracePeriodSeconds"] >= needed
    assert float(COMPOSE["gateway"]["stop_grace_period"].removesuffix("s")) >= needed
    pod = pod_of("Deployment")
    options, _ = worker_options(pod["containers"][0]["args"])
    assert pod["terminationGracePeriodSeconds"] >= options.drain_s + options.stop_s + MARGIN_S
    options, _ = worker_options(COMPOSE["worker"]["command"])
    assert (
        float(COMPOSE["worker"]["stop_grace_period"].removesuffix("s")) >= options.drain_s + options.stop_s + MARGIN_S
    )


def test_workers_find_the_gateway_and_join_it():
    """By the name of its service, its port and the token that both have."""
    container = pod_of("Deployment")["containers"][0]
    service = resources()["Service"]
    variables = {one["name"]: one for one in container["env"]}
    port = CONFIG.server_settings.port
    assert variables["ICHAT_GATEWAY"]["value"] == f"http://{service['metadata']['name']}:{port}"
    assert "--gateway-address=$(ICHAT_GATEWAY)" in container["args"]
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= variables.keys()
    assert f"--gateway-address=http://gateway:{port}" in COMPOSE["worker"]["command"]
    token = CONFIG.security.join_token_env
    assert variables[token]["valueFrom"]["secretKeyRef"] == {"name": "ichat-keys", "key": token}
    assert token in COMPOSE["worker"]["environment"]
    for words, number in (
        (container["args"], container["ports"][0]["containerPort"]),
        (COMPOSE["worker"]["command"], 8000),
    ):
        options, rest = worker_options(words)
        assert options.port == number
        assert [word.partition("=")[0] for word in rest] == ["--model", "--max-model-len"]


def test_ports_probes_and_labels_belong_together():
    """Each probe asks for /health on a port of its container; service, monitor and budget select what is there."""
    found = resources()
    for kind in ("StatefulSet", "Deployment"):
        container = pod_of(kind)["containers"][0]
        ports = {one["name"] for one in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] == "/health"
            assert container[probe]["httpGet"]["port"] in ports
        labels = found[kind]["spec"]["template"]["metadata"]["labels"].items()
        assert labels >= found[kind]["spec"]["selector"]["matchLabels"].items()
    (port,) = found["Service"]["spec"]["ports"]
    assert (
        port["port"]
        == CONFIG.server_settings.port
        == pod_of("StatefulSet")["containers"][0]["ports"][0]["containerPort"]
    )
    gateway = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert gateway >= found["Service"]["spec"]["selector"].items()
    worker = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert worker >= found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items()
    assert not worker >= found["Service"]["spec"]["selector"].items()
    monitor = found["ServiceMonitor"]["spec"]
    assert found["Service"]["metadata"]["labels"].items() >= monitor["selector"]["matchLabels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["authorization"]["credentials"] == {"name": "ichat-keys", "key": "PROMETHEUS_KEY"}


def test_the_keys_are_those_of_the_configuration():
    """The secret that is described, compose's variables, and what the configuration reads; nothing is written out."""
    read = {
        CONFIG.security.admin_key_env,
        CONFIG.security.join_token_env,
        *(one.key_env for one in CONFIG.security.keys),
    }
    assert read == KEYS
    assert set(re.findall(r"--from-literal=(\w+)=", (CLUSTER / "kustomization.yaml").read_text())) == KEYS
    assert COMPOSE["gateway"]["environment"] == {name: f"${{{name}:?}}" for name in KEYS}
    (key,) = [one for one in CONFIG.security.keys if one.key_env == "PROMETHEUS_KEY"]
    assert (list(key.models or ()), key.metrics) == ([], True)


def test_compose_mounts_files_that_are_there():
    """But for the key, which nobody shall find in a repository."""
    mounted = {volume.partition(":")[0] for one in COMPOSE.values() for volume in one.get("volumes", ())}
    files = {name for name in mounted if name.startswith("./")} - {"./compose/prometheus.key"}
    assert [name for name in files if not (EXAMPLES / name).is_file()] == []
    assert {f"./compose/{path.name}" for path in (EXAMPLES / "compose").iterdir()} <= files
    ours = {
        one["image"].removeprefix("localhost/") for one in COMPOSE.values() if one["image"].startswith("localhost/")
    }
    assert ours < TARGETS


@pytest.mark.skipif(not shutil.which("podman"), reason="podman-compose needs podman")
def test_compose_is_read_by_podman_compose(tmp_path):
    """With the keys; without them it names the first that is missing."""
    pytest.importorskip("podman_compose", reason="`./build test` installs podman-compose")
    keys = tmp_path / "keys"
    command = [
        sys.executable,
        "-m",
        "podman_compose",
        "--env-file",
        keys,
        "--file",
        EXAMPLES / "compose.yaml",
        "config",
    ]

    def config():
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=EXAMPLES)

    keys.write_text("".join(f"{name}=k-{name}\n" for name in KEYS))
    done = config()
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"]["gateway"]["environment"] == {name: f"k-{name}" for name in KEYS}
    keys.write_text("")
    assert config().returncode != 0
