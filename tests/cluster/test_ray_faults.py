"""Parts of Ray that end under load, another cluster at the same address, and workers that come back.

The tests share a cluster, and are in an order in which the next finds what it needs. They last for minutes.
"""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.deployments import gateway_fixture, start_fixture
from support.programs import LIMIT_S, alive
from support.ray_cluster import RayCluster
from support.ray_site import START_S, Site, read_all

__all__ = ["gateway_fixture", "start_fixture"]

pytestmark = [pytest.mark.slow, pytest.mark.breaks]
NODES = 3
STREAMS, GAP_S = 24, 0.1
SHORT, LONG = 200, 550
"""How many events streams have: with `GAP_S` between two they last for 20 and 55 s at least."""


@pytest.fixture(scope="module")
def shaken(has_ray):
    """A head without GPUs, and nodes of a GPU each: a worker is alone on its node."""
    with RayCluster(nodes=NODES, gpus=1) as found:
        yield found


@pytest.fixture
def site(gateway, shaken, tmp_path):
    made = FaultSite(gateway, shaken, tmp_path / "engines")
    yield made
    made.close()


class FaultSite(Site):
    """A gateway with workers, whose engines note that two of a worker run at once."""

    def __init__(self, gateway, cluster, engines):
        super().__init__(gateway, cluster)
        self.cluster, self._engines = cluster, engines
        self.copies = 0

    def begin_copies(self, count):
        self.copies = count
        self.begin(f'gpus = 1\nreplicas = {count}\nalone = "{self._engines}"')
        return self.until_ready(*(f"m-{number}" for number in range(count)))

    def node_of(self, worker_id):
        """Return the node of a worker's job."""
        (job,) = (self.jobs()[name] for name in self.living() if f"-{worker_id}-" in name)
        return job["driver_node_id"]

    def need(self, count):
        """Have so many living nodes, in another cluster if there are fewer."""
        if len(self.cluster.processes("raylet")) - 1 < count:
            self.cluster.begin_anew()

    def until_logged(self, words, limit_s=LIMIT_S):
        self.program.until(lambda: words in self.program.text(), limit_s)

    def until_one_ends(self, processes):
        """Return when one of these processes has ended."""
        self.program.until(lambda: len(alive(processes)) < len(processes), START_S)
        return time.monotonic()

    def until_replaced(self, worker_id, pid):
        self.program.until(lambda: self.worker(worker_id).get("pid") not in (None, 0, pid), START_S)
        self.until_ready(worker_id)
        return self.pid(worker_id)

    def launches(self):
        """Return how many jobs the gateway has sent."""
        return self.program.text().count("is launched on Ray")

    def met(self):
        """Return the notes of engines that ran at once."""
        return "".join(path.read_text() for path in self._engines.parent.glob(f"{self._engines.name}.*"))


class Load:
    """Streams, and requests all the time, until the end of the block.

    `failed` are the requests without an answer, with the time of each.
    """

    def __init__(self, site, events):
        self._site, self._events = site, events
        self._is_over = threading.Event()
        self.failed, self.asked = [], 0

    def __enter__(self):
        self._pool = ThreadPoolExecutor(STREAMS + 1)
        body = {"model": "m", "stream": True, "events": self._events, "gap_s": GAP_S}
        self._streams = [self._pool.submit(read_all, self._site.program, body) for _ in range(STREAMS)]
        self._asking = self._pool.submit(self._ask)
        self._site.program.until(lambda: self.in_flight() >= STREAMS)
        return self

    def in_flight(self):
        return sum(self._site.worker(f"m-{number}").get("in_flight", 0) for number in range(self._site.copies))

    def _ask(self):
        while not self._is_over.wait(0.1):
            self.asked += 1
            status, answer = self._site.program.ask("/v1/chat/completions", {"model": "m"})
            if status != 200:
                self.failed.append((time.monotonic(), status, answer))

    def streams(self):
        """Return how many streams were complete, and how many were cut, once all have ended."""
        texts = [one.result() for one in self._streams]
        whole = sum(b"[DONE]" in text for text in texts)
        assert all(text.count(b'"content"') == self._events for text in texts if b"[DONE]" in text)
        return whole, len(texts) - whole

    def __exit__(self, *_):
        self._is_over.set()
        self._pool.shutdown()


def tell(row, **found):
    print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)


def test_a_dashboard_that_ends_and_returns_changes_nothing(site):
    """No stream and no request fails, nothing is ended or started; a worker that ends waits until it is back."""
    site.need(3)
    pids, sent = site.begin_copies(2), site.launches()
    with Load(site, SHORT) as load, site.cluster.without_dashboard():
        site.until_logged("does not answer about worker m-0")
        site.until_logged("does not answer about worker m-1")
        whole, cut = load.streams()
        assert (cut, load.failed) == (0, [])
        assert [site.pid("m-0"), site.pid("m-1")] == pids
        psutil.Process(pids[0]).kill()
        site.program.until(lambda: "does not answer" in str(site.worker("m-0")), START_S)
        assert site.launches() == sent
    began = time.monotonic()
    site.until_replaced("m-0", pids[0])
    tell("dashboard", whole=whole, cut=cut, asked=load.asked, failed=len(load.failed), back_s=time.monotonic() - began)
    assert len(site.living()) == 2
    assert site.met() == ""


def lose_node(site, program):
    """Kill a program of Ray on the node of a worker, under load; return when another node has the worker.

    Requests that were not sent to it yet are answered by the other copy; its streams are cut, and look so.
    """
    site.need(3)
    pids = site.begin_copies(2)
    node, lost = site.node_of("m-0"), psutil.Process(pids[0])
    with Load(site, SHORT) as load:
        on_it = site.worker("m-0")["in_flight"]
        began = time.monotonic()
        assert site.cluster.kill(program, node) >= 1
        site.until_replaced("m-0", pids[0])
        took_s = time.monotonic() - began
        whole, cut = load.streams()
    tell(program, whole=whole, cut=cut, asked=load.asked, failed=len(load.failed), replaced_s=took_s)
    assert load.failed == []
    assert cut <= on_it
    assert site.node_of("m-0") != node
    assert site.pid("m-1") == pids[1]
    assert not alive([lost])
    assert site.met() == ""


def test_a_node_without_its_raylet_has_its_worker_replaced(site):
    """On another node."""
    lose_node(site, "raylet")


def test_an_old_worker_that_comes_back_ends(site):
    """Its node was lost and it was replaced while it stood still: its key is dead."""
    site.need(2)
    (pid,) = site.begin_copies(1)
    worker, guard, supervisor = line_of(pid)
    for process in (supervisor, guard, worker):
        process.suspend()
    with contextlib.ExitStack() as stack:
        for process in (supervisor, guard, worker):
            stack.callback(end, process)
        site.cluster.kill("raylet", site.node_of("m-0"))
        began = time.monotonic()
        new = site.until_replaced("m-0", pid)
        replaced_s, began = time.monotonic() - began, time.monotonic()
        worker.resume()
        site.program.until(lambda: not alive([worker]))
        ended_s = time.monotonic() - began
        assert (site.pid(), site.answers()) == (new, True)
        guard.resume()
        supervisor.resume()
        site.program.until(lambda: not alive([guard, supervisor]))
    assert (site.pid(), site.answers()) == (new, True)
    assert len(site.living()) == 1
    tell("old worker", replaced_s=replaced_s, ended_s=ended_s)


def line_of(pid):
    """Return a worker's process, its guard, and the guard's parent: Ray's process for the job, which would kill it."""
    worker = psutil.Process(pid)
    return worker, worker.parent(), worker.parent().parent()


def end(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def test_a_lost_head_ends_all_and_its_return_starts_each_worker_once(site):
    """Streams and requests go on until Ray ends its nodes. Nothing is started before another cluster is at the address.

    Requests meanwhile are refused, also where the worker has said good-bye, so that it seems to be on its way.
    """
    site.need(1)
    workers = [psutil.Process(pid) for pid in site.begin_copies(1)]
    sent = site.launches()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(site.until_one_ends, site.cluster.processes("raylet", site.node_of("m-0")))
        with Load(site, SHORT) as load:
            began = time.monotonic()
            site.cluster.kill("gcs_server")
            whole, cut = load.streams()
            failed = list(load.failed)
            after_s = time.monotonic() - began
        lost_at = lost.result()
    site.program.until(lambda: not alive(workers), START_S)
    gone_s = time.monotonic() - began
    tell("head", whole=whole, cut=cut, asked=load.asked, failed=len(failed), after_s=after_s, lost_s=lost_at - began)
    asked_at = time.monotonic()
    status, answer = site.program.ask("/v1/chat/completions", {"model": "m"})
    refused_s = time.monotonic() - asked_at
    assert status == 503, answer
    assert site.launches() == sent
    site.cluster.begin_anew()
    began = time.monotonic()
    site.until_ready("m-0")
    tell("head", gone_s=gone_s, refused_s=refused_s, sent=site.launches() - sent, back_s=time.monotonic() - began)
    assert [cut, *(one for one in failed if one[0] < lost_at)] == [0]
    assert len(site.living()) == 1
    assert site.met() == ""


def test_a_node_without_its_agent_has_its_worker_replaced(site):
    """The raylet ends with its agent."""
    lose_node(site, "ray::DashboardAgent")


def test_a_worker_outlives_the_cluster_that_knew_it_while_it_is_heard(site):
    """Another cluster at the address knows no job of it: it is not ended, and not launched again, until it ends."""
    site.need(1)
    (pid,) = site.begin_copies(1)
    worker, guard, supervisor = line_of(pid)
    supervisor.suspend()
    with contextlib.ExitStack() as stack:
        for process in (supervisor, guard, worker):
            stack.callback(end, process)
        site.cluster.begin_anew()
        site.until_logged("Ray has no job of worker m-0 any more")
        assert (site.pid(), site.answers(), site.living()) == (pid, True, [])
        supervisor.resume()
        site.until_replaced("m-0", pid)
    assert site.met() == ""
    assert len(site.living()) == 1
