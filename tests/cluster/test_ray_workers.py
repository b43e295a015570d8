"""Workers on a Ray cluster: launched, adopted, replaced and ended; the cluster is real Ray, the engine is the fake."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.deployments import gateway_fixture, lines_of, start_fixture
from support.programs import LIMIT_S, words_of
from support.ray_site import START_S, Site, read_all

__all__ = ["gateway_fixture", "start_fixture"]

STREAMS, EVENTS = 24, 100
SECRET = "a-variable-of-the-worker"
IDS = ("m-0", "m-1", "m-2")


@pytest.fixture
def site(gateway, cluster):
    made = Site(gateway, cluster)
    yield made
    made.close()


def test_copies_serve_and_are_gone_with_their_gateway(site):
    """Both answer; a gateway that ends waits for their guards, and no process of a worker is left."""
    site.begin("gpus = 1\nreplicas = 2")
    site.until_ready("m-0", "m-1")
    assert site.answers()
    assert len(site.living()) == 2
    site.program.until(lambda: any("listens on" in line for line in lines_of(site.program, "m-0")))
    assert site.worker()["on"] == "ray"
    assert site.program.stop() == 0
    ended = json.loads((site.directory() / "orders.json").read_text())["orders"]
    assert [one["ended"] for one in ended] == ["ended with exit code 0"] * 2, "guards have not reported"
    site.program.until(lambda: site.living() == [])  # Ray hears of it when the guards have ended, too
    assert not site.tagged()


def test_a_killed_worker_is_launched_again(site):
    """As another job, with the cause of the end for operators."""
    (pid,) = site.begin().until_ready("m-0")
    (first,) = site.living()
    psutil.Process(pid).kill()
    site.program.until(lambda: site.worker().get("pid") not in (None, pid), START_S)
    site.until_ready("m-0")
    assert site.worker()["signal"] == "SIGKILL"
    assert site.worker()["restarts"] == 1
    site.program.until(lambda: len(site.living()) == 1 and first not in site.living())


def test_a_killed_guard_on_a_node_ends_its_worker(site):
    """The gateway hears of it from Ray, and launches the worker again."""
    (pid,) = site.begin().until_ready("m-0")
    worker = psutil.Process(pid)
    worker.parent().kill()
    worker.wait(LIMIT_S)
    site.program.until(lambda: site.worker().get("pid") not in (None, pid), START_S)
    site.until_ready("m-0")


def test_the_next_gateway_adopts_the_jobs(site):
    """After a gateway was killed: the same jobs and processes, and no other."""
    pids = site.begin("gpus = 1\nreplicas = 2").until_ready("m-0", "m-1")
    jobs = site.living()
    site.program.stop(signal.SIGKILL)
    assert site.begin("gpus = 1\nreplicas = 2").until_ready("m-0", "m-1") == pids
    assert site.living() == jobs
    assert site.answers()


def test_a_launch_without_a_place_is_pending_and_says_why(site):
    """It is given up with its gateway; a table with room for it is launched instead."""
    site.begin("gpus = 8")
    site.program.until(lambda: "8 GPUs" in str(site.worker().get("reason", "")) + str(site.worker()), START_S)
    assert site.program.state("m-0") == "pending"
    assert "No node of Ray has 8 GPUs: the largest have 4" in json.dumps(site.worker())
    assert site.program.ask("/v1/chat/completions", {"model": "m"})[0] == 503
    assert site.program.stop() == 0


def test_an_end_waits_for_streams(site):
    """A worker that is removed answers all its streams to the end; then its job ends by itself."""
    site.begin().until_ready("m-0")
    body = {"model": "m", "stream": True, "events": EVENTS, "gap_s": 0.05}
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        streams = [pool.submit(read_all, site.program, body) for _ in range(STREAMS)]
        site.program.until(lambda: site.worker()["in_flight"] == STREAMS)
        ended = pool.submit(site.program.ask_by, "DELETE", "/v1/admin/workers/m-0", None, START_S)
        texts = [one.result() for one in streams]
        assert ended.result()[0] == 200
    assert all(b"[DONE]" in text for text in texts)
    assert {text.count(b'"content"') for text in texts} == {EVENTS}
    site.program.until(lambda: site.living() == [])
    assert {job["status"] for job in site.jobs().values()} == {"SUCCEEDED"}


def test_nothing_that_ray_shows_is_secret(site):
    """Its jobs, their logs and all command lines have no token, no key and no variable of a worker."""
    (pid,) = site.begin(f'gpus = 1\nenv = {{ VARIABLE = "{SECRET}" }}').until_ready("m-0")
    assert psutil.Process(pid).environ()["VARIABLE"] == SECRET
    kept = (site.directory() / "orders.json").read_text()
    key = kept.partition('"key": "')[2].partition('"')[0]
    own = (site.directory() / "secret").read_text().strip()
    (job,) = site.jobs().values()
    texts = [json.dumps(job), *(word for one in psutil.process_iter() for word in words_of(one))]
    texts += [path.read_text(errors="replace") for path in site.logs_of_ray()]
    assert key
    for secret in (SECRET, key, own):
        assert not any(secret in text for text in texts), secret
    environment = psutil.Process(pid).environ()
    assert not {"RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR"} & environment.keys()


def test_a_code_is_dead_after_its_launch(site):
    """The job of a launch that was given up may begin later: it loads nothing, and ends."""
    site.begin("gpus = 4\nreplicas = 3")
    site.program.until(lambda: sorted(map(site.program.state, IDS)) == ["pending", "ready", "ready"], START_S)
    (waiting,) = (one for one in IDS if site.program.state(one) == "pending")
    why = "4 GPUs are wanted on a node, and at most 0 are free on any"
    site.program.until(lambda: why in json.dumps(site.worker(waiting)), START_S)  # Ray tells some seconds late
    assert site.program.ask_by("DELETE", f"/v1/admin/workers/{waiting}", None, START_S)[0] == 200
    (job,) = (name for name, one in site.jobs().items() if one["status"] == "PENDING")
    assert waiting in job
    ready = next(one for one in IDS if one != waiting)
    assert site.program.ask_by("DELETE", f"/v1/admin/workers/{ready}", None, START_S)[0] == 200
    site.program.until(lambda: site.jobs()[job]["status"] not in ("PENDING", "RUNNING"), START_S)
    assert len(site.living()) == 1


def test_models_on_demand_make_room_for_each_other(site):
    """With room for two of three, the model that is idle longest goes for the third, and its job ends by itself."""
    table = """[[managed_workers]]
model_name = "{}"
model_path = "/m"
backend = "fake"
on = "ray"
gpus = 4
replicas = {{ min = 0, max = 1 }}
min_loaded_s = 0
"""
    site.begin("gpus = 4\nreplicas = { min = 0, max = 1 }\n" + "".join(map(table.format, ("n", "o"))))
    for model in "mno":
        assert site.program.ask("/v1/chat/completions", {"model": model}, START_S)[0] == 200
    assert [site.program.state(f"{model}-0") for model in "mno"] == ["cold", "ready", "ready"]
    site.program.until(lambda: len(site.living()) == 2)
    assert {job["status"] for name, job in site.jobs().items() if "-m-0-" in name} == {"SUCCEEDED"}
