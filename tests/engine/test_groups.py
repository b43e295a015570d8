"""A model on two machines: two workers with one rank each on loopback, which register with one gateway."""

import json
import sys
import urllib.request

import pytest
from support.deployments import free_port
from support.programs import LIMIT_S, Program, alive
from support.real_engines import ENGINES, ENV, LOAD_S, MODELS, PYZ, flags_of, python_of

NODES = {
    "vllm": [{"VLLM_CPU_OMP_THREADS_BIND": rank} for rank in "01"],
    "sglang": [{"SGLANG_CPU_OMP_THREADS_BIND": rank, "SGLANG_NCCL_SO_PATH": "none"} for rank in "01"],
}


class Pair:
    """A gateway, and the two workers of a group, which know each other by a port of the first."""

    def __init__(self, engine, directory):
        self.engine = engine
        config = directory / "ichat.toml"
        config.write_text("[server_settings]\nport = 0\n")
        command = [sys.executable, PYZ, "gateway", "-c", config]
        self.gateway = Program(command, directory / "gateway.log", {"PYTHONPATH": ""}).wait_for_port()
        meeting = str(free_port())
        self.nodes = [
            Program(
                [
                    python_of(engine), PYZ, "worker", "--backend", engine, "--worker-id", f"node-{rank}", "-n", "tiny",
                    "--gateway-address", f"http://127.0.0.1:{self.gateway.port}", "--port", "0",
                    "--model", MODELS / "chat", "--max-model-len", "2048", "--enforce-eager",
                    "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank),
                    "--master-addr", "127.0.0.1", "--master-port", meeting, *flags_of(engine),
                ],
                directory / f"node-{rank}.log",
                {"PYTHONPATH": "", **ENV[engine], **NODES[engine][rank]},
            )
            for rank in range(2)
        ]  # fmt: skip

    def wait(self):
        def ready():
            for node in self.nodes:
                assert node.process.poll() is None, node.text()[-4000:]
            return (self.gateway.state("node-0"), self.gateway.state("node-1")) == ("ready", "following")

        self.gateway.until(ready, LOAD_S)
        return self

    def end(self):
        for node in self.nodes:
            node.end()
        self.gateway.end()


@pytest.fixture(params=ENGINES)
def pair(request, room, tmp_path):
    room.make(2)
    pair = Pair(request.param, tmp_path)
    try:
        yield pair.wait()
    finally:
        pair.end()


def test_two_machines(pair):
    """Both are seen, one answers; when the other is killed, the group is reported broken and nobody hangs."""
    group = [pair.gateway.get(f"/v1/admin/workers/node-{rank}")[1]["group"] for rank in range(2)]
    assert [(one["rank"], one["size"]) for one in group] == [(0, 2), (1, 2)]
    assert group[0]["id"] == group[1]["id"]
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    for _ in range(6):
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{pair.gateway.port}/v1/completions", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            assert answer.headers["x-ichat-worker"] == "node-0"
            assert json.load(answer)["usage"]["completion_tokens"] == 12
    leader, follower = pair.nodes
    follower.wait_for_port()
    assert follower.get("/health") == (200, {"status": "ok"})
    families = [*leader.descendants(), *follower.descendants()]
    follower.process.kill()
    follower.process.wait()
    assert leader.process.wait(LIMIT_S) == 70
    pair.gateway.until(lambda: not alive(families))
    assert "The engine died: " in leader.text()
    pair.gateway.until(lambda: pair.gateway.state("node-0") == "failed")
    pair.gateway.until(lambda: "the group of worker node-1 is broken: worker node-0 has failed" in pair.gateway.text())
    status, answer = pair.gateway.ask("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
