"""Both engines in jobs of a real Ray cluster, started by the pyz: two copies that answer, drain and end."""

import json
import time
import urllib.request

import httpx
import pytest
from support.deployments import free_port
from support.programs import LIMIT_S
from support.ray_cluster import RAY, RayCluster
from support.real_engines import ENGINES, LOAD_S, Deployment, interpreters, send, worker_table

COPIES = ("tiny-0", "tiny-1")
TOKENS = 300

pytestmark = pytest.mark.skipif(not RAY.exists(), reason="there is no Ray here: ./build test fetches it from the index")


class OnRay(Deployment):
    """A gateway with two copies of a model on a cluster."""

    def __init__(self, engine, model, directory, *, address, **arguments):
        self.engine, self.directory, self.address = engine, directory, address
        lines = ["[server_settings]", f"port = {free_port()}", f'state_directory = "{directory}/state"']
        lines += ["[ray]", f'address = "{address}"', *interpreters()]
        lines += [one for one in worker_table(engine, model, "tiny", **arguments) if one != "port = 0"]
        self.config = directory / "ichat.toml"
        self.config.write_text("\n".join([*lines, 'on = "ray"', "gpus = 1", "replicas = 2"]))
        self.start()

    def jobs(self):
        """Return the states of this gateway's jobs."""
        with urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=LIMIT_S) as answer:
            found = json.load(answer)
        owner = (self.directory / "state/owner").read_text().strip()
        return [job["status"] for job in found if (job["metadata"] or {}).get("ichat.owner") == owner]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_copies_answer_drain_and_end(engine, room, tmp_path):
    """A copy that is removed answers its stream to the end; with its gateway the other goes, and no job is left."""
    room.make(2)
    began = time.monotonic()
    with RayCluster(nodes=2, gpus=1) as cluster:
        place = OnRay(engine, "chat", tmp_path, address=cluster.address, max_model_len=2048, enforce_eager=True)
        try:
            place.program.wait_for_port()
            for worker_id in COPIES:
                place.program.wait_until_ready(worker_id, LOAD_S)
            print(f"{engine}: both copies on Ray were ready {time.monotonic() - began:.0f} s after the cluster's start")
            assert len({place.worker(one)["pid"] for one in COPIES}) == 2
            asked = {"model": "tiny", "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            streams = [send(place.program.port, asked) for _ in range(4)]
            place.program.until(lambda: all(place.worker(one)["in_flight"] for one in COPIES))
            assert place.program.ask_by("DELETE", "/v1/admin/workers/tiny-1", None, LOAD_S)[0] == 200
            for sock in streams:
                assert b"data: [DONE]" in _rest(sock)
            place.program.until(lambda: sorted(place.jobs()) == ["RUNNING", "SUCCEEDED"])
            body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
            assert httpx.post(f"{place.url}/v1/completions", json=body, timeout=LOAD_S).status_code == 200
            assert place.program.stop() == 0
            assert place.jobs() == ["SUCCEEDED"] * 2
        finally:
            place.end()


def _rest(sock):
    """Return all that comes of a stream."""
    data = b""
    with sock:
        while b"\r\n0\r\n" not in data and (more := sock.recv(65536)):
            data += more
    return data
