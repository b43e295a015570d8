"""The images of examples/Containerfile: what they hold, and how the gateway's lives and ends in a container."""

import contextlib
import os
import shutil
import signal
import socket
import time

import psutil
import pytest
from support.deployments import free_port
from support.images import ENVIRONMENT, USER, Images, in_container, start_command, why_not
from support.releases import ROOT, release_of_all

DRAIN_S = 3
CONTAINERFILE = ROOT / "examples/Containerfile"
PYZ = ("python3", "/opt/ichat/ichat.pyz")

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]


@pytest.fixture(name="images", scope="module")
def images_fixture(tmp_path_factory):
    images = Images(tmp_path_factory.mktemp("images"))
    images.make_base()
    dist = release_of_all(tmp_path_factory)
    for target, base in (("ichat", "PYTHON"), ("ichat-vllm", "VLLM"), ("ichat-sglang", "SGLANG")):
        words = ("--build-arg", f"{base}=localhost/base", "--target", target)
        images.build(target, dist.parent, CONTAINERFILE, *words)
    yield images
    with contextlib.suppress(OSError):
        shutil.rmtree(images.place)


def test_the_image_of_the_gateway_says_how_it_is_run(images):
    """No root, its variables, the health check, and the keeper as the first process."""
    found = images.config_of("ichat")
    assert (found["User"], found["StopSignal"]) == (f"{USER}:{USER}", "SIGTERM")
    assert (
        dict(one.split("=", 1) for one in found["Env"]).items()
        >= {name: value for name, value in ENVIRONMENT.items() if name != "PATH"}.items()
    )
    assert [*found["Entrypoint"], *found["Cmd"]] == [*PYZ, "keep", "gateway", "-c", "/etc/ichat/ichat.toml"]
    assert found["Healthcheck"]["Test"][1:4] == [*PYZ, "health"]
    assert list(found["Volumes"]) == ["/var/lib/ichat"]


@pytest.mark.parametrize(("name", "engine"), [("ichat-vllm", "vLLM"), ("ichat-sglang", "SGLang")])
def test_an_image_without_its_engine_says_so(images, name, engine):
    """The entry point is the worker of that engine; on a base without it, a sentence and exit code 69."""
    entry = images.config_of(name)["Entrypoint"]
    container = images.buildah("from", f"localhost/{name}")
    said = images.buildah("run", "--isolation", "chroot", container, "--", "sh", "-c",
                          f"{' '.join(entry)} --model x 2>&1; echo $?")  # fmt: skip
    sentence, code = said.splitlines()
    assert code == "69"
    assert sentence.startswith(f"{engine} is not installed for /usr/bin/python3")


def test_the_gateway_lives_and_ends_in_a_container(images, start, tmp_path):
    """Read-only but for its volume and without root: it answers, reaps what others leave, and drains at SIGTERM."""
    port, tree = free_port(), images.mounted("ichat")
    volume, config = tmp_path / "volume", tmp_path / "config"
    volume.mkdir()
    os.chown(volume, 0, USER)
    volume.chmod(0o2770)  # as Kubernetes' fsGroup leaves it
    config.mkdir()
    upstream = socket.create_server(("127.0.0.1", 0))
    (config / "ichat.toml").write_text(
        f"[server_settings]\nport = {port}\nrelays = 1\n[timeouts]\ndrain_s = {DRAIN_S}\n"
        f'[[external_routes]]\nmodel_name = "slow"\napi_base = "http://127.0.0.1:{upstream.getsockname()[1]}/v1"\n'
    )
    config.chmod(0o755)
    program = start(start_command(tree, volume, config, [*PYZ, "keep", "gateway", "-c", "/etc/ichat/ichat.toml"]))
    program.until(lambda: "accepts connections" in program.text())
    keeper = next(one for one in program.descendants() if one.uids().real == USER)
    program.port = port

    def health():
        return in_container(keeper.pid, tree, *PYZ, "health", "-c", "/etc/ichat/ichat.toml")

    assert health() == (0, "ok\n")
    assert program.get("/health") == (200, {"status": "ok"})
    assert {one.uids().real for one in [keeper, *keeper.children(recursive=True)]} == {USER}
    assert in_container(keeper.pid, tree, "touch", "/opt/ichat/x")[0] == 1
    assert (volume / "state/relays").is_dir()
    assert "Read-only" not in program.text()

    in_container(keeper.pid, tree, "sh", "-c", "sleep 0.1 & exit 0")
    program.until(lambda: all(one.status() != psutil.STATUS_ZOMBIE for one in keeper.children(recursive=True)))
    program.until(lambda: not [one for one in keeper.children() if "sleep" in one.name()])

    with socket.create_connection(("127.0.0.1", port)) as client:
        body = b'{"model": "slow", "messages": []}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        accepted, _ = upstream.accept()
        began = time.monotonic()
        keeper.send_signal(signal.SIGTERM)
        assert program.process.wait(60) == 0
        assert DRAIN_S <= time.monotonic() - began
        accepted.close()
    upstream.close()
