"""The images of examples/Containerfile: what they hold, and how gateways and workers live and end in containers."""

import json
import os
import shutil
import signal
import socket
import time
import urllib.request
import zipfile

import psutil
import pytest
from support.deployments import free_port
from support.images import TARGETS, Images, why_not
from support.programs import LIMIT_S, alive
from support.real_engines import ENGINES, ENV, LOAD_S, MESSAGES, MODELS, flags_of
from support.releases import release_of_all

DRAIN_S = 3
USER = 10001
PYZ = ("python3", "/opt/ichat/ichat.pyz")
KEYS = {"ICHAT_ADMIN_KEY": "k" * 32, "ICHAT_JOIN_TOKEN": "t" * 32}
SECURITY = """
[security]
admin_key_env = "ICHAT_ADMIN_KEY"
join_token_env = "ICHAT_JOIN_TOKEN"
"""
TOKENS = 24
SMALL = {
    "vllm": ("--max-model-len=2048", "--enforce-eager"),
    "sglang": ("--context-length=2048", "--disable-cuda-graph"),
}
"""The arguments of a tiny model."""
SMALL = {
    "vllm": ("--max-model-len=2048", "--enforce-eager"),
    "sglang": ("--context-length=2048", "--disable-cuda-graph"),
}
"""The arguments of a tiny model."""
NOT_ON_THE_CPU = ("nvidia", "nvidia_cutlass_dsl", "flashinfer", "pyarrow", "tilelang")
"""Packages of the engines that only GPUs need: half of 11 GB."""

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]


@pytest.fixture(name="release", scope="module")
def release_fixture(tmp_path_factory):
    """Return the directory whose dist/ has a release."""
    return release_of_all(tmp_path_factory).parent


@pytest.fixture(name="images", scope="module")
def images_fixture(tmp_path_factory, release):
    images = Images(tmp_path_factory.mktemp("images"))
    try:
        images.make_base()
        for target in TARGETS:
            images.build(target, target, release)
        yield images
    finally:
        images.remove()


def until(program, condition, limit_s=LIMIT_S):
    """Wait for a condition while a program runs."""

    def holds():
        assert program.process.poll() is None, program.text()[-6000:]
        return condition()

    program.until(holds, limit_s)


def first_process(program):
    """Return the first process of a container, once it runs what the image says."""
    until(program, lambda: [one for one in program.family.children() if one.name().startswith("python")])
    return program.family.children()[0]


def start_gateway(images, start, directory, more):
    """Start the image of the gateway: read-only but for its volume, which its user does not own."""
    volume, config = directory / "volume", directory / "config"
    volume.mkdir()
    os.chown(volume, 0, USER)
    volume.chmod(0o2770)  # as Kubernetes' fsGroup leaves it
    config.mkdir()
    port = free_port()
    settings = f"[server_settings]\nport = {port}\nrelays = 1\n[timeouts]\ndrain_s = {DRAIN_S}\n"
    (config / "ichat.toml").write_text(settings + SECURITY + more)
    config.chmod(0o755)
    binds = {"/var/lib/ichat": volume, "/etc/ichat": config}
    container = images.container("ichat", binds=binds, variables=KEYS, is_read_only=True)
    program = start(container.start_command())
    until(program, lambda: "accepts connections" in program.text())
    program.port, program.key = port, KEYS["ICHAT_ADMIN_KEY"]
    return container, program


def test_the_image_of_the_gateway_says_how_it_is_run(images):
    """No root, its volume, the health check, and the keeper as the first process."""
    found = images.config_of("ichat")
    assert (found["User"], found["StopSignal"]) == (f"{USER}:{USER}", "SIGTERM")
    variables = dict(one.split("=", 1) for one in found["Env"])
    assert variables["STATE_DIRECTORY"].startswith("/var/lib/ichat/")
    assert [*found["Entrypoint"], *found["Cmd"]] == [*PYZ, "keep", "gateway", "-c", "/etc/ichat/ichat.toml"]
    assert found["Healthcheck"]["Test"][1:4] == [*PYZ, "health"]
    assert list(found["Volumes"]) == ["/var/lib/ichat"]


@pytest.mark.parametrize(("name", "engine"), [("ichat-vllm", "vLLM"), ("ichat-sglang", "SGLang")])
def test_an_image_without_its_engine_says_so(images, start, name, engine):
    """The entry point is the worker of that engine; on a base without it, a sentence and exit code 69."""
    program = start(images.container(name).start_command("--model", "x"))
    assert program.process.wait(LIMIT_S) == 69
    assert program.text().startswith(f"{engine} is not installed for /usr/bin/python3")


def test_an_image_for_another_machine_is_refused(images, release, tmp_path):
    """The release is for one architecture: the build ends with a sentence that names both."""
    (tmp_path / "dist").mkdir()
    machine = os.uname().machine
    with (
        zipfile.ZipFile(release / "dist/ichat.pyz") as made,
        zipfile.ZipFile(tmp_path / "dist/ichat.pyz", "w") as other,
    ):
        for member in made.infolist():
            data = made.read(member)
            is_start = member.filename == "__main__.py"
            other.writestr(member, data.replace(f'"{machine}"'.encode(), b'"riscv64"') if is_start else data)
    said = images.build("other", "ichat", tmp_path, is_refused=True)
    assert f"ichat.pyz was built for riscv64, and this machine is {machine}: build it here (`./build`)" in said


@pytest.fixture(name="upstream")
def upstream_fixture():
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        yield upstream


def test_the_gateway_lives_and_ends_in_a_container(images, start, tmp_path, upstream):
    """Read-only but for its volume and without root: it answers, reaps what others leave, and drains at SIGTERM."""
    address = f"http://127.0.0.1:{upstream.getsockname()[1]}/v1"
    route = f'[[external_routes]]\nmodel_name = "slow"\napi_base = "{address}"\n'
    container, program = start_gateway(images, start, tmp_path, route)
    keeper = first_process(program)
    health = images.config_of("ichat")["Healthcheck"]["Test"][1:]
    assert container.run(keeper.pid, *health) == (0, "ok\n")
    assert program.get("/health") == (200, {"status": "ok"})
    family = [keeper, *keeper.children(recursive=True)]
    assert {one.uids() for one in family} == {(USER, USER, USER)}
    assert container.run(keeper.pid, "touch", "/var/lib/ichat/state/x")[0] == 0
    for place in ("/opt/ichat", "/etc/ichat", "/tmp", "/var/lib"):
        assert container.run(keeper.pid, "touch", f"{place}/x")[0] == 1, place
    assert (tmp_path / "volume/state/relays").is_dir()
    assert "Read-only" not in program.text()

    container.run(keeper.pid, "sh", "-c", "sleep 0.1 & exit 0")
    program.until(lambda: not [one for one in keeper.children() if "sleep" in one.name()])

    with socket.create_connection(("127.0.0.1", program.port)) as client:
        body = b'{"model": "slow", "messages": []}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        with upstream.accept()[0]:
            began = time.monotonic()
            keeper.send_signal(signal.SIGTERM)
            assert program.process.wait(LIMIT_S) == 0
            assert DRAIN_S <= time.monotonic() - began
    assert alive(family) == []


def test_the_health_check_fails_where_the_gateway_hangs(images, start, tmp_path):
    """The image's own check says in a sentence that there is no answer."""
    container, program = start_gateway(images, start, tmp_path, "")
    keeper = first_process(program)
    (gateway,) = [one for one in keeper.children() if "gateway" in one.cmdline()]
    gateway.suspend()
    said = container.run(keeper.pid, *images.config_of("ichat")["Healthcheck"]["Test"][1:])
    gateway.resume()
    assert said == (69, f"The gateway at http://127.0.0.1:{program.port} did not answer in time.\n")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_serves_and_ends_in_a_container(images, release, start, tmp_path, engine):
    """On a base with the engine: it joins by the token, a chat request is streamed, and at SIGTERM nothing is left.

    SGLang's packages of 11 GB are mounted over a base instead.
    """
    image, base, binds = f"serving-{engine}", "base", {"/models": MODELS}
    if engine == "vllm":
        base = images.make_engine_base(engine)
    else:
        packages, place = images.packages_of(engine)
        binds |= {place: packages, ENV[engine]["PYTHONPATH"]: ENV[engine]["PYTHONPATH"]}
    images.build(image, f"ichat-{engine}", release, base)
    (tmp_path / "gateway").mkdir()
    _, gateway = start_gateway(images, start, tmp_path / "gateway", "")
    variables = {**ENV[engine], "ICHAT_JOIN_TOKEN": KEYS["ICHAT_JOIN_TOKEN"]}
    container = images.container(image, binds=binds, variables=variables)
    worker = start(
        container.start_command(
            f"--gateway-address=http://127.0.0.1:{gateway.port}", "--worker-id=w", "--host=127.0.0.1", "--port=0",
            "--served-model-name=tiny", "--model=/models/chat", *SMALL[engine], *flags_of(engine),
        )
    )  # fmt: skip
    first = first_process(worker)
    until(worker, lambda: gateway.state("w") == "ready", LOAD_S)
    assert streamed(gateway, {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True}) > 1
    until(worker, lambda: not [one for one in first.children(recursive=True) if one.status() == psutil.STATUS_ZOMBIE])
    family = [first, *first.children(recursive=True)]
    first.send_signal(signal.SIGTERM)
    assert worker.process.wait(LIMIT_S) == 0
    assert alive(family) == []
    gateway.until(lambda: gateway.state("w") is None)
    first_process(gateway).send_signal(signal.SIGTERM)
    assert gateway.process.wait(LIMIT_S) == 0


def streamed(program, body):
    """Send a chat request whose answer is streamed, and return in how many pieces its text came."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json", "authorization": f"Bearer {program.key}"}
    url = f"http://127.0.0.1:{program.port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps({**body, **more}).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        lines = [line.decode().strip() for line in answer if line.startswith(b"data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[-1]["usage"]["completion_tokens"] == body["max_tokens"]
    return sum(1 for chunk in chunks for choice in chunk["choices"] if choice["delta"].get("content"))
