"""Managed workers with `hub`: the gateway downloads their model before their start."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from itertools import count

import pytest
from support.deployments import free_port
from support.model_hub import HubModel, ModelHub, has_part
from support.programs import LIMIT_S, ROOT, Program
from support.real_engines import LOAD_S, MODELS, PYZ, python_of, worker_table

MIB = 1024 * 1024
WEIGHTS = b"w" * (24 * MIB)
STOP = 12 * MIB
"""A part of the file is on the disk then: the library writes pieces of 10 MiB."""
NAME = "org/tiny.1"


@pytest.fixture(name="hub")
def hub_fixture():
    with ModelHub() as hub:
        hub.models[NAME] = HubModel({"config.json": b'{"architectures": ["A"]}', "model.safetensors": WEIGHTS})
        yield hub


class Site:
    """A gateway whose workers' models are on the hub of the tests, and the commands beside it."""

    def __init__(self, hub, directory):
        self.cache = directory / "models"
        self.env = hub.environment(self.cache) | {"PYTHONPATH": str(ROOT / "tests/support/fake_engine")}
        self.directory = directory
        self.config = directory / "ichat.toml"
        self.numbers = count()
        self.gateways = []

    def write(self, *lines):
        server = ["[server_settings]", f"port = {free_port()}", f'state_directory = "{self.directory}/state"']
        engines = [line for one in ("vllm", "sglang") for line in (f"[engines.{one}]", f'python = "{python_of(one)}"')]
        self.config.write_text("\n".join([*server, *engines, *lines]))

    def start(self):
        log = self.directory / f"gateway-{next(self.numbers)}.log"
        self.gateways.append(Program([sys.executable, PYZ, "gateway", "-c", self.config], log, self.env))
        return self.gateways[-1].wait_for_port()

    def command(self, *words):
        """Return the exit code, the output and the standard error of a command."""
        env = {**os.environ, **self.env}
        done = subprocess.run(
            [sys.executable, PYZ, *words, "-c", self.config], env=env, cwd=ROOT, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr.strip()

    def on_disk(self):
        return {one["model"]: one for one in json.loads(self.command("models", "--disk", "--json")[1])["data"]}

    def end(self):
        for gateway in self.gateways:
            gateway.end()


@pytest.fixture(name="site")
def site_fixture(hub, tmp_path):
    site = Site(hub, tmp_path)
    yield site
    site.end()


def table(name, model=NAME, **more):
    lines = ["[[managed_workers]]", f'model_name = "{name}"', f'model_path = "{model}"', 'backend = "fake"']
    return [
        *lines,
        'hub = "huggingface"',
        "gpu_ids = []",
        *(f"{key} = {json.dumps(value)}" for key, value in more.items()),
    ]


def phase(gateway, worker_id):
    load = gateway.get(f"/v1/admin/workers/{worker_id}")[1].get("load") or {"phases": [{"name": "", "detail": ""}]}
    return load["phases"][-1]


def test_workers_wait_for_one_download_of_their_model(hub, site):
    """Operators see per cent; nothing is removed that a worker uses; the next start asks the hub nothing."""
    hub.stop_at = STOP
    site.write(*table("a"), *table("b"))
    gateway = site.start()
    for worker_id in ("a-0", "b-0"):
        gateway.until(lambda worker_id=worker_id: " %" in phase(gateway, worker_id)["detail"])
        assert phase(gateway, worker_id)["name"] == "downloading"
    assert "downloading" in site.command("workers")[1]
    gateway.until(lambda: site.on_disk()[NAME]["state"].startswith("downloading 4"))
    assert sorted(site.on_disk()[NAME]["used_by"]) == ["a-0", "b-0"]
    hub.go.set()
    for worker_id in ("a-0", "b-0"):
        gateway.wait_until_ready(worker_id)
    assert hub.served["model.safetensors"] == len(WEIGHTS)
    worker = gateway.get("/v1/admin/workers/a-0")[1]
    assert worker["model_path"] == NAME
    words = pathlib.Path(f"/proc/{worker['pid']}/cmdline").read_text().split("\0")
    assert any(word.startswith(f"--model={site.cache}/models--org--tiny.1/snapshots/") for word in words)
    assert worker["last_load"]["phases"][0]["name"] == "downloading"
    code, _, errors = site.command("remove", NAME)
    assert (code, errors) == (1, f"{NAME} is the model of workers a-0, b-0: stop and remove that first.")
    before = len(hub.requests)
    gateway.stop()
    gateway = site.start().wait_until_ready("a-0")
    assert len(hub.requests) == before
    assert "downloading" not in [one["name"] for one in gateway.get("/v1/admin/workers/a-0")[1]["last_load"]["phases"]]
    gateway.stop()
    code, _, errors = site.command("remove", NAME)
    assert (code, errors) == (
        1,
        f"{NAME} is the model of workers a (configured), b (configured): stop and remove that first.",
    )
    site.write()
    assert site.command("remove", NAME)[0] == 0
    assert site.on_disk() == {}
    assert site.command("remove", NAME)[0] == 64


def test_a_gateway_that_stops_ends_its_download_and_the_next_goes_on(hub, site):
    """Nothing of it is left, and nothing that was received is received again."""
    hub.stop_at = STOP
    site.write(*table("a"))
    gateway = site.start()
    gateway.until(lambda: has_part(site.cache, 10 * MIB))
    family = gateway.descendants()
    assert any("download" in one.cmdline() for one in family)
    gateway.stop()
    assert not [one for one in family if one.is_running() and one.status() != "zombie"]
    hub.stop_at = None
    hub.go.set()
    site.start().wait_until_ready("a-0")
    assert any(begin >= 10 * MIB for _, begin in hub.ranges)


def test_a_gateway_that_is_killed_leaves_no_download(hub, site):
    """Its process ends with the gateway."""
    hub.stop_at = STOP
    site.write(*table("a"))
    gateway = site.start()
    assert hub.is_waiting.wait(LIMIT_S)
    (process,) = [one for one in gateway.descendants() if "download" in one.cmdline()]
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait()
    process.wait(LIMIT_S)


def test_a_model_that_cannot_be_downloaded_is_the_workers_failure(hub, site):
    """In the sentence of the download."""
    hub.models["org/gated"] = HubModel({"config.json": b"{}"}, refusal=403, headers={"X-Error-Code": "GatedRepo"})
    site.write("[restart]", "attempts_max = 1", *table("none", "org/none"), *table("gated", "org/gated"))
    gateway = site.start()
    for worker_id, sentence in (
        ("none-0", "There is no model org/none on"),
        ("gated-0", "asks for a token (HF_TOKEN)"),
    ):
        gateway.until(lambda worker_id=worker_id: gateway.state(worker_id) == "failed")
        assert sentence in gateway.get(f"/v1/admin/workers/{worker_id}")[1]["cause"]


def test_vllm_serves_a_model_that_the_gateway_has_downloaded(hub, site):
    """From a hub to an answer; vLLM asks the hub nothing."""
    files = {path.name: path.read_bytes() for path in (MODELS / "chat").iterdir()}
    hub.models["org/chat"] = HubModel(files)
    lines = worker_table("vllm", "chat", "chat", env=site.env, hub="huggingface", max_model_len=512)
    site.write(*(line if not line.startswith("model_path") else 'model_path = "org/chat"' for line in lines))
    gateway = site.start().wait_until_ready("chat-0", LOAD_S)
    asked = [path for _, path in hub.requests]
    status, answer = gateway.ask(
        "/v1/chat/completions",
        {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    )
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] > 0
    assert len([path for path in asked if path.startswith("/api/models")]) == 1
