"""Broken set-ups, each named rightly by `ichat.pyz doctor`: real files, processes, sockets and file systems.

Only NVIDIA's driver is a stand-in. Each test prints what an operator would see.
"""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import trio
import trustme
from support.deployments import free_port
from support.nvml import GIB, Nvml
from support.programs import LIMIT_S, ROOT, ichat

from ichat.cli.client import Api
from ichat.cli.gateway_address import GatewayAddress
from ichat.cli.screen import Screen
from ichat.config import load as configuration
from ichat.config.process_marks import WORKER_VARIABLE
from ichat.doctor.examination import examine
from ichat.doctor.findings import Finding, show_report
from ichat.doctor.workers import find_in_workers, read_worker_facts

MACHINE = ("This machine", "GPUs")
"""What these groups find depends on where the tests run."""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory for a set-up: `site(toml)` writes its configuration, with a free port and a state directory."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "STATE_DIRECTORY", "ICHAT_ADMIN_KEY", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "state").mkdir(mode=0o700)

    def write(toml="", port=None, **settings):
        settings = {"port": port or free_port(), "state_directory": str(tmp_path / "state"), **settings}
        head = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        path = tmp_path / "ichat.toml"
        path.write_text(f"[server_settings]\n{head}\n{toml}")
        path.chmod(0o600)
        return path

    return write


@pytest.fixture
def web():
    """Start a server that answers every request so: `port, seen = web(status, headers, body)`."""
    servers = []

    def start(status=200, headers=(), body=b"{}", tls=None):
        seen = []

        class Replies(BaseHTTPRequestHandler):
            def do_GET(self):
                seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                self.send_response_only(status)
                for name, value in {"content-length": str(len(body)), **dict(headers)}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_):
                """Write nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server.server_address[1], seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def interpreter(path, script="exit 0", version="0.32.0", backend="vllm", cuda="None"):
    """Make an environment: a `python` that does what the script says, an engine's package, and PyTorch's version."""
    library = path / "lib" / "python3.11" / "site-packages"
    (library / f"{backend}-{version}.dist-info").mkdir(parents=True)
    (library / "torch").mkdir()
    (library / "torch" / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {cuda}\n")
    (path / "bin").mkdir()
    python = path / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def model(path, *files, index=()):
    """Make a model's directory: these files, and an index that names others."""
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name in files:
        (path / name).write_bytes(b"\0" * 2000)
    if index:
        names = {f"layer.{number}": name for number, name in enumerate(index)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def worker(python, model_path, more=""):
    return f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "{model_path}"\npython = "{python}"\n{more}\n'


async def examined(path, gateway=None):
    """Examine a set-up, and print what is found."""
    api = Api(GatewayAddress(f"http://127.0.0.1:{gateway}"), None)
    groups = await examine(str(path), lambda: api, asks_gateway=gateway is not None, within_s=LIMIT_S)
    show_report(Screen(), groups, 0.0, "utf-8")
    return groups


def problems(groups, *, without=MACHINE):
    """Return everything but what is right, as level, name, sentence and command."""
    return [
        (finding.level, finding.name, finding.sentence, finding.command)
        for group in groups
        for finding in group.findings
        if finding.level != "ok" and group.title not in without
    ]


async def test_a_healthy_one(site, tmp_path, web):
    """Nothing is wrong with it, the exit code is 0, and what is examined is said."""
    port, seen = web(200, {"date": formatdate(usegmt=True)})
    python = interpreter(tmp_path / "vllm", cuda="'12.8'")
    toml = worker(python, model(tmp_path / "model", "model.safetensors"), "gpu_ids = []")
    toml += f'[[external_routes]]\nmodel_name = "r"\napi_base = "http://127.0.0.1:{port}/v1"\n'
    groups = await examined(site(toml))
    assert problems(groups) == []
    assert seen[0][0] == "/v1/models"
    assert [group.title for group in groups] == [
        "Configuration", "Keys and files", "This machine", "GPUs", "Engines", "Managed workers", "Gateway",
        "External routes",
    ]  # fmt: skip


async def test_no_toml(site):
    """The line that is no TOML is named, and the machine is examined all the same."""
    path = site("[limits\n")
    groups = await examined(path)
    [(level, name, sentence, _)] = problems(groups)
    assert (level, name) == ("error", "file")
    assert [group.title for group in groups] == ["Configuration", "This machine"]
    assert sentence.startswith(f"{path} is not valid TOML: ")
    assert "line 5" in sentence


async def test_no_file(tmp_path, site):
    """A configuration that is not there is said to be unreadable."""
    [(_, _, sentence, _)] = problems(await examined(tmp_path / "none.toml"))
    assert sentence == f"The configuration {tmp_path}/none.toml cannot be read: No such file or directory."


def certificate(directory, name, **more):
    """Write a certificate and its key, and return their paths."""
    made = trustme.CA().issue_cert("localhost", **more)
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    made.cert_chain_pems[0].write_to_path(str(paths[0]))
    made.private_key_pem.write_to_path(str(paths[1]))
    paths[1].chmod(0o600)
    return [str(path) for path in paths]


async def test_a_certificate_for_another_key(site, tmp_path):
    """That the two files do not belong together is said."""
    (cert, _), (_, key) = certificate(tmp_path, "one"), certificate(tmp_path, "other")
    [(level, name, sentence, _)] = problems(await examined(site(tls_certificate=cert, tls_key=key)))
    assert (level, name) == ("error", "certificate")
    assert "mismatch" in sentence.lower()


async def test_a_key_that_others_may_read(site, tmp_path):
    """The file's mode is corrected by what is to be typed."""
    cert, key = certificate(tmp_path, "one")
    os.chmod(key, 0o644)
    assert problems(await examined(site(tls_certificate=cert, tls_key=key))) == [
        ("error", "modes", f"{key} holds secrets, and other users of this machine may read or change it.",
         f"chmod 600 {key}"),
    ]  # fmt: skip


async def test_the_doctor_finds_a_taken_port(site):
    """The process that has the gateway's port is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [found] = problems(await examined(site(port=port)), without=(*MACHINE, "Keys and files"))[:1]
    assert found[:2] == ("error", "port")
    assert f"Port {port} of 127.0.0.1 is taken by" in found[2]
    assert f"(process {os.getpid()})" in found[2]
    assert found[3] == f"ps -fp {os.getpid()}"


async def test_an_interpreter_without_the_engine(site, tmp_path):
    """This interpreter runs, and says that it has no vLLM."""
    path = model(tmp_path / "model", "model.safetensors")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 73\n")
    python.chmod(0o755)
    groups = await examined(site(worker(python, path, "gpu_ids = []")))
    [found] = problems(groups)
    assert found[2].startswith(f"vLLM is not installed for {python}")
    assert "No managed worker needs an engine" not in str(groups)
    assert found[3] == "./build engine vllm"


def engine_problems(groups):
    """Return what is found about the engines, but for the processor here."""
    found = problems(groups, without=[group.title for group in groups if group.title != "Engines"])
    return [one for one in found if "AVX" not in one[2]]


async def test_an_interpreter_that_hangs(site, tmp_path):
    """What could not be known in time is a warning and not right; other workers are examined all the same."""
    python = interpreter(tmp_path / "vllm", "exec sleep 1000")
    path = model(tmp_path / "model", "model.safetensors")
    toml = worker(python, path, "gpu_ids = []") + worker("/no/python", path, "gpu_ids = []")
    config = configuration.load(site(toml))
    workers = await read_worker_facts(config, trio.current_time() + LIMIT_S, probe_s=0.3)
    found = find_in_workers(workers, 10**12)
    assert found[0] == Finding(
        "warning", "m-0", f"The interpreter {python} did not answer within 0.3 s: see what holds it up.",
        f"time {python} --version",
    )  # fmt: skip
    assert found[1].name == "m-1"
    assert found[1].sentence.startswith("There is no interpreter /no/python")


async def test_a_path_that_cannot_be(site, tmp_path):
    """A state directory that no system can have ends nothing: the rest is examined."""
    groups = await examined(site(state_directory=str(tmp_path / ("x" * 300) / "state")))
    assert [group.title for group in groups] == [
        "Configuration", "Keys and files", "This machine", "GPUs", "Engines", "Managed workers", "Gateway",
    ]  # fmt: skip


async def test_a_part_that_cannot_be_examined(site, monkeypatch):
    """It is a warning that says why."""

    def fails(_):
        raise OSError(116, "stale")

    monkeypatch.setattr("ichat.doctor.examination.read_machine_facts", fails)
    [found] = problems(await examined(site()), without=("GPUs",))
    assert found == ("warning", "part", "This part could not be examined (Stale file handle).", "")


def test_an_interrupt(site, tmp_path):
    """Ctrl-C ends it without a word, and an interpreter that it has started as well."""
    python = interpreter(tmp_path / "vllm", f"echo $$ >> {tmp_path}/pids\nexec sleep 1000")
    path = site(worker(python, model(tmp_path / "model", "model.safetensors"), "gpu_ids = []"))
    command = ichat("doctor", "-c", str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split() if is_running(int(pid))]
    assert left == []


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_an_engine_that_cannot_be_imported(site, tmp_path):
    """The last line of the attempt is said."""
    words = "ImportError: libcudart.so.13: cannot open shared object file"
    python = interpreter(tmp_path / "vllm", f'case "$2" in *entry_points*) exit 0;; esac\necho "{words}" >&2\nexit 1')
    path = model(tmp_path / "model", "model.safetensors")
    [found] = engine_problems(await examined(site(worker(python, path, "gpu_ids = []"))))
    assert found == (
        "error", "vLLM", f"{python} cannot import what vLLM needs ({words}): install the engine again.",
        "./build engine vllm",
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch):
    """Install a driver with such GPUs."""

    def install(buses=(1, 2), **instead):
        versions = {"nvmlSystemGetDriverVersion": "550.1", "nvmlSystemGetCudaDriverVersion": 12040}
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(buses, {**versions, **instead}))

    return install


async def test_a_driver_that_is_too_old(site, tmp_path, gpus):
    """The engine's CUDA and the driver's are named."""
    gpus(nvmlDeviceGetMemoryInfo=free_memory)
    python = interpreter(tmp_path / "vllm", cuda="'13.0'")
    path = model(tmp_path / "model", "model.safetensors")
    assert engine_problems(await examined(site(worker(python, path)))) == [
        ("error", "vLLM", (f"vLLM of {python} is built for CUDA 13.0, and the driver 550.1 runs CUDA 12.4 at most:"
         " install a newer driver, or an older build."), "nvidia-smi"),
    ]  # fmt: skip


def free_memory():
    """Return a GPU's memory as NVML does, with all of it free."""
    return type("Memory", (), {"total": 80 * GIB, "used": 0, "free": 80 * GIB})


async def test_gpus_that_are_not_there(site, tmp_path, gpus):
    """Those that are there are named."""
    gpus(nvmlDeviceGetMemoryInfo=free_memory, nvmlDeviceGetComputeRunningProcesses=list)
    python, path = interpreter(tmp_path / "vllm", cuda="'12.4'"), model(tmp_path / "model", "model.safetensors")
    groups = await examined(site(worker(python, path, "gpu_ids = [0, 7]\ntensor_parallel_size = 2")))
    found, unchecked = problems(groups)
    assert unchecked[2].startswith("Its arguments could not be checked")
    assert found[:2] == ("error", "m-0")
    assert found[2].startswith("There is no GPU 7: those here are 0, 1")


async def test_a_gpu_that_another_holds(site, tmp_path, gpus):
    """Who holds it is said where the GPU is shown, and why the worker cannot start; a GPU of no worker is no matter."""
    gpus()
    python, path = interpreter(tmp_path / "vllm", cuda="'12.4'"), model(tmp_path / "model", "model.safetensors")
    groups = await examined(site(worker(python, path, "gpu_ids = [0]")))
    found = problems(groups, without=("This machine",))
    assert [one[:2] for one in found] == [("warning", "GPU 0"), ("error", "m-0")]
    assert f"process {os.getpid()}" in found[0][2]
    assert "GPU 0 has 50.0 of 80.0 GiB free, and vLLM needs 72.0" in found[1][2]
    groups = await examined(site(worker(python, path, 'gpu_ids = [0]\nload = "on_demand"')))
    found = problems(groups, without=("This machine",))
    assert [one[:2] for one in found] == [("warning", "GPU 0")], "it may be free once the model is wanted"


async def test_a_gpu_that_does_not_answer(site, tmp_path, gpus):
    """What resets it is what to type."""
    error = sys.modules["support.nvml"].NVMLError(15)
    gpus((1,), nvmlDeviceGetMemoryInfo=error, nvmlDeviceGetComputeRunningProcesses=error)
    found = problems(await examined(site()), without=("This machine",))
    assert found == [
        ("error", "GPU 0", "It does not answer (GPU is lost): reset it, or the machine.",
         "sudo nvidia-smi --gpu-reset -i 0"),
    ]  # fmt: skip


async def test_a_model_without_all_its_files(site, tmp_path):
    """The first file that is missing is named."""
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    path = model(tmp_path / "model", files[0], files[2], index=files)
    [found] = problems(
        await examined(site(worker(interpreter(tmp_path / "v"), path, "gpu_ids = []"))), without=(*MACHINE, "Engines")
    )
    assert found[2].startswith(
        f"The model {path} is not whole (1 of 3 files that model.safetensors.index.json names are missing, {files[1]}"
    )


async def test_a_model_that_git_has_not_fetched(site, tmp_path):
    """A pointer in the place of a file is no weights."""
    path = model(tmp_path / "model")
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    [found] = problems(
        await examined(site(worker(interpreter(tmp_path / "v"), path, "gpu_ids = []"))), without=(*MACHINE, "Engines")
    )
    assert "model.safetensors is a pointer of Git LFS, not the file itself" in found[2]


async def test_a_model_that_may_not_be_fetched(site, tmp_path):
    """Without the hub, a model has to be in the cache."""
    toml = worker(interpreter(tmp_path / "v"), "org/model", 'gpu_ids = []\nenv = { HF_HUB_OFFLINE = "1" }')
    path = site(toml)
    [found] = problems(await examined(path), without=(*MACHINE, "Engines"))
    assert found == (
        "error", "m-0", f"org/model is not in {tmp_path}/hf/hub, and HF_HUB_OFFLINE keeps the engine from fetching it.",
        "HF_HUB_OFFLINE=0 hf download org/model",
    )  # fmt: skip
    (tmp_path / "hf/hub/models--org--model/snapshots/abc").mkdir(parents=True)
    assert problems(await examined(path), without=(*MACHINE, "Engines")) == []


@pytest.mark.parametrize(
    ("status", "token", "expected"),
    [
        (401, "", ("error", "asks for a token (HF_TOKEN) for org/model: accept the model's terms there")),
        (403, "hf_x", ("error", "refuses this token for org/model")),
        (404, "", ("error", "There is no model org/model on http")),
        (200, "", ("warning", "the first start fetches it")),
    ],
)  # fmt: skip
async def test_a_model_on_the_hub(site, tmp_path, web, monkeypatch, status, token, expected):
    """The hub is asked with the token that the engine would have."""
    port, seen = web(status)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    toml = worker(interpreter(tmp_path / "v"), "org/model", "gpu_ids = []")
    [found] = problems(await examined(site(toml)), without=(*MACHINE, "Engines"))
    assert (found[0], expected[1] in found[2]) == (expected[0], True), found
    path, headers = seen[0]
    assert path == "/org/model/resolve/main/config.json"
    assert headers.get("authorization") == (f"Bearer {token}" if token else None)


def route(base, more=""):
    return f'[[external_routes]]\nmodel_name = "r"\napi_base = "{base}"\n{more}\n'


async def test_a_route_without_a_host(site):
    """A name that cannot be resolved is told from a server that is not there."""
    [found] = problems(await examined(site(route("http://no-such-host.invalid/v1"))))
    assert found == (
        "error", "r", "The host no-such-host.invalid cannot be resolved: correct its name, or this machine's DNS.",
        "getent hosts no-such-host.invalid",
    )  # fmt: skip


async def test_a_route_without_a_server(site):
    """A port on which nothing listens refuses the connection."""
    port = free_port()
    [found] = problems(await examined(site(route(f"http://127.0.0.1:{port}/v1"))))
    assert found[2].startswith(f"127.0.0.1:{port} cannot be reached (Connection refused): ")


async def test_a_route_with_a_strange_certificate(site, web):
    """Why the certificate is not trusted is said."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    port, seen = web(tls=context)
    [found] = problems(await examined(site(route(f"https://127.0.0.1:{port}/v1"))))
    assert found[2].startswith(f"The certificate of 127.0.0.1:{port} is not trusted (")
    assert "certificate" in found[2].partition("(")[2]
    assert seen == []


async def test_a_route_that_refuses_the_key(site, web, monkeypatch):
    """The variable that has the key is named, the key is not."""
    monkeypatch.setenv("UPSTREAM", "sk-secret-of-the-upstream")
    port, seen = web(401)
    groups = await examined(site(route(f"http://127.0.0.1:{port}/v1", 'api_key_env = "UPSTREAM"')))
    [found] = problems(groups)
    assert found[2].startswith(f"127.0.0.1:{port} refuses the key in UPSTREAM (status 401)")
    assert found[3] == "export UPSTREAM=…"
    assert seen[0][1]["authorization"] == "Bearer sk-secret-of-the-upstream"
    assert "sk-secret" not in str(groups)


async def test_a_clock_that_is_wrong(site, web):
    """The difference to the other clock is said."""
    port, _ = web(200, {"date": formatdate(time.time() + 600, usegmt=True)})
    [found] = problems(await examined(site(route(f"http://127.0.0.1:{port}/v1"))))
    assert found[:2] == ("warning", "clock")
    assert " s behind that of 127.0.0.1" in found[2]


async def test_processes_without_a_gateway_are_found(site, tmp_path):
    """A worker's process without a gateway is found by its mark."""
    mark = f"{tmp_path}/state:m-0"
    left = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, WORKER_VARIABLE: mark},
    )  # fmt: skip
    try:
        assert left.stdout is not None
        left.stdout.readline()
        [found] = problems(await examined(site()))
        assert found[:2] == ("warning", "m-0")
        assert found[2].startswith(f"Its gateway is gone, and process {left.pid} of it still runs")
        assert found[3] == f"kill {left.pid}"
    finally:
        left.communicate(b"\n")


async def test_workers_that_are_lost(site, web):
    """The gateway's word on each worker, and the way to it, are findings."""
    closed = free_port()
    common = {"managed": False, "host": "127.0.0.1", "port": closed, "cause": None, "failure": None}
    workers = [
        {**common, "worker_id": "w1", "state": "unhealthy", "heartbeat_age_s": 41.5, "failure": "it missed heartbeats"},
        {**common, "worker_id": "w2", "state": "ready", "heartbeat_age_s": 0.5},
    ]
    port, _ = web(body=json.dumps({"data": workers}).encode())
    first, second, third = problems(await examined(site(), port))
    assert first == (
        "error", "w1", "It is unhealthy (it missed heartbeats); its last heartbeat arrived 41.5 s ago.",
        "./ichat.pyz workers w1",
    )  # fmt: skip
    assert {second[1], third[1]} == {"w1", "w2"}
    assert second[2].startswith(f"127.0.0.1:{closed} cannot be reached (Connection refused)")


async def test_a_gateway_with_another_state_directory(site, tmp_path):
    """It is probably the one that is meant, in systemd's environment: nobody is told to end it."""
    (tmp_path / "ichat.pyz").write_text(
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
        "    print(s.getsockname()[1], flush=True)\n    input()\n"
    )
    other = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(tmp_path / "ichat.pyz"), "gateway"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "STATE_DIRECTORY": "/var/lib/ichat"}, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        user = psutil.Process(other.pid).username()
        [found] = problems(await examined(site(port=port)))
    finally:
        other.communicate("\n")
    assert found[:2] == ("warning", "gateway")
    assert found[2].startswith(
        f"A gateway of {user} (process {other.pid}) listens on port {port} and has another state"
    )
    assert found[3] == f"sudo -u {user} env STATE_DIRECTORY=/var/lib/ichat ./ichat.pyz doctor -c FILE"


async def test_a_hub_that_leads_elsewhere(site, tmp_path, web, monkeypatch):
    """A redirect is an answer: the token goes to the hub alone, and what stands in its address is not shown."""
    elsewhere, seen_elsewhere = web(200)
    port, seen = web(307, {"location": f"http://127.0.0.1:{elsewhere}/x"})
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    path = site(worker(interpreter(tmp_path / "v"), "org/model", "gpu_ids = []"))
    [found] = problems(await examined(path), without=(*MACHINE, "Engines"))
    assert found[0] == "warning"
    assert "the first start fetches it" in found[2]
    assert (len(seen), seen_elsewhere) == (1, [])
    monkeypatch.setenv("HF_ENDPOINT", "http://user:geheim@127.0.0.1:9")
    groups = await examined(path)
    assert "http://127.0.0.1:9 cannot be reached" in str(groups)
    assert "geheim" not in str(groups)


@pytest.mark.parametrize(("offline", "level"), [("1", "error"), ("0", "warning")])
async def test_a_model_that_was_fetched_in_part(site, tmp_path, offline, level):
    """What the cache lacks can only come from the hub."""
    cache = tmp_path / "hf/hub/models--org--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("abc")
    (cache / "snapshots").mkdir()
    model(cache / "snapshots/abc", index=["model-1.safetensors"])
    toml = worker(interpreter(tmp_path / "v"), "org/model", f'gpu_ids = []\nenv = {{ HF_HUB_OFFLINE = "{offline}" }}')
    [found] = problems(await examined(site(toml)), without=(*MACHINE, "Engines"))
    assert found[0] == level
    assert "is not whole (1 of 1 files that model.safetensors.index.json names are missing" in found[2]


async def test_a_route_with_an_address(site, web):
    """IPv6 stands in brackets, and what to type can be typed."""
    port = free_port()
    [found] = problems(await examined(site(route(f"http://[::1]:{port}/v1"))))
    assert found[2].startswith(f"[::1]:{port} cannot be reached (")
    assert found[3] == f"curl -v http://[::1]:{port}"


def doctor(path, *words, wrapped=(), **more):
    """Run the command as operators do, in a terminal of 80 columns."""
    command = [*wrapped, *ichat("doctor", "-c", str(path), *words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, cwd=ROOT, **more
    )
    print(done.stdout, done.stderr)
    return done


def test_too_few_files(site):
    """The limit of the process that the doctor is, is that of a gateway started there."""
    done = doctor(site(), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)))
    assert "! files: A process may have 256 files open, and 8192 connections" in done.stdout
    assert done.returncode == 0, done


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a mount")
@pytest.mark.parametrize(
    ("options", "expected"),
    [("size=8m", "✗ state: {} has 8 MiB left"), ("size=2g,nr_inodes=20", "! state: {} has")],
)
def test_a_disk_without_room(site, tmp_path, options, expected):
    """A full file system, and one without inodes, are named with their directory."""
    mount = f'mount -t tmpfs -o {options},mode=700 none {tmp_path}/state && exec "$0" "$@"'
    done = doctor(site(), wrapped=("unshare", "-m", "sh", "-c", mount))
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this container may not mount")
    assert expected.format(tmp_path / "state") in done.stdout.replace("\n    ", " ")


def test_the_command(site, tmp_path):
    """It fits 80 columns, ends with 1 if there is an error, has JSON for programs and no colour elsewhere."""
    path = site(worker("/no/python", model(tmp_path / "model", "model.safetensors"), "gpu_ids = []"))
    done = doctor(path)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    prose = [line for line in done.stdout.splitlines() if "→" not in line and "/" not in line]
    assert max(map(len, prose)) <= 80
    assert "  ✗ m-0: There is no interpreter /no/python" in done.stdout
    told = json.loads(doctor(path, "--json").stdout)
    assert told["level"] == "error"
    [error] = [one for one in told["findings"] if one["level"] == "error"]
    assert set(error) == {"group", "level", "name", "sentence", "command"}
    assert (error["group"], error["name"]) == ("Managed workers", "m-0")
