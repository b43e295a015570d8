"""A launch on Ray, in virtual time: what becomes of lost answers, of long waits, and of a Ray that does not answer."""

import attrs
import pytest
import trio

from ichat.config import load as configuration
from ichat.fleet.orders import OrderPlace, Orders
from ichat.listeners import Listeners
from ichat.protocol.orders import LaunchEnd
from ichat.ray.api import RayRefused, RayUnknown
from ichat.ray.values import RayJob, RaySubmission
from ichat.supervisor.launcher import Order
from ichat.supervisor.ray_launch import REPORT_S, RayLaunch

CONFIG = configuration.parse(
    '[timeouts]\nstop_s = 6\n[ray]\naddress = "http://127.0.0.1:8265"\n[[managed_workers]]\nmodel_name = "m"\n'
    'model_path = "/m"\non = "ray"\ngpus = 1\n',
    "x.toml",
)
(SPEC,) = CONFIG.managed_workers
SILENT = RayUnknown("no answer within 5 s")


class Ray:
    """A cluster of a single job, which does as a test says."""

    address = "http://head:8265"

    def __init__(self):
        self.status, self.exit_code = None, None
        """Of the job; None: there is none."""
        self.trouble = None
        """The error of each request; None: Ray answers."""
        self.lost, self.refusal = "", None
        """Whether a submission is `taken` or `dropped` while its answer is lost; why it is refused."""
        self.submitted, self.calls = [], []

    async def submit(self, job):
        await self._answer("submit")
        self.submitted.append(job.id)
        if self.refusal:
            raise self.refusal
        self.status = None if self.lost == "dropped" else "PENDING"
        if self.lost:
            raise SILENT

    async def job(self, job_id):
        await self._answer("job")
        return None if self.status is None else RayJob(job_id, self.status, "It waits.", exit_code=self.exit_code)

    async def stop(self, job_id):
        await self._answer("stop")
        self.status = "STOPPED" if self.status == "RUNNING" else self.status

    async def _answer(self, call):
        await trio.sleep(0.05)
        self.calls.append(call)
        if self.trouble:
            raise self.trouble


class OrdersInMemory:
    """The orders, without a file: a write on the disk takes no virtual time."""

    def __init__(self):
        self.orders, self.changed, self.reported = Orders(), Listeners(), Listeners()
        self.heard, self.left = False, False

    def is_heard(self, worker_id):
        return self.heard

    def has_left(self, worker_id, for_s):
        return self.left and for_s == REPORT_S

    async def make_managed(self, worker_id, spec, valid_s, place):
        now = trio.current_time()
        self.orders, order, code = self.orders.with_new(worker_id, {}, now, valid_s, place, is_managed=True)
        return order, code

    async def set_place(self, launch, place):
        self.use(self.orders.with_changed(attrs.evolve(self.orders.by_launch[launch], place=place)))

    async def ask_to_end(self, order):
        self.use(self.orders.with_changed(attrs.evolve(order, end_at=trio.current_time())))

    async def finish(self, launch, how):
        self.use(self.orders.with_end(launch, how))

    def use(self, orders):
        self.orders = orders
        self.changed()


class Cluster:
    """The launcher of a launch."""

    def __init__(self):
        self.api, self.codes, self.tidied, self.orders = Ray(), [], [], OrdersInMemory()

    async def prepare(self, order):
        await self.api._answer("prepare")

    def submission(self, order, code):
        self.codes.append(code)
        return RaySubmission("owner-m-0-1", f"guard {code}")

    def table_of(self, order):
        return order.spec

    async def why_pending(self, spec, job):
        return f"{job.message} ({spec.gpus} GPU)"

    async def place_of(self, order, node_id):
        await self.api._answer("place")
        return OrderPlace(senders=["10.0.0.7"])

    async def tidy(self, worker_id, job_id):
        self.tidied.append(job_id)

    @property
    def order(self):
        return self.orders.orders.by_launch[1]

    def fetch(self):
        """Do what the guard does first."""
        self.api.status = "RUNNING"
        orders, _ = self.orders.orders.with_fetched(self.order, "start", "10.0.0.7", trio.current_time())
        self.orders.use(orders)


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
async def launch(cluster, nursery):
    """A launch that is waited for."""
    made = RayLaunch(Order("m-0", 1, SPEC, CONFIG), "owner-m-0-1", cluster)
    nursery.start_soon(made.wait)
    yield made
    made.close()


async def test_a_job_is_submitted_once_and_claimed(autojump_clock, launch, cluster):
    """The reason of its wait is Ray's until a guard has the order."""
    await trio.sleep(5)
    assert (launch.waits_for, cluster.api.submitted) == ("It waits. (1 GPU)", ["owner-m-0-1"])
    cluster.fetch()
    assert launch.waits_for == ""
    await trio.sleep(3600)
    assert not launch.has_ended
    assert cluster.api.submitted == ["owner-m-0-1"]


async def test_only_the_node_of_a_job_gets_its_order(autojump_clock, launch, cluster):
    """No machine does before the job runs."""
    await trio.sleep(5)
    assert cluster.order.fate("start", "10.0.0.7", trio.current_time()) == "early"
    cluster.api.status = "RUNNING"
    await trio.sleep(3)
    assert launch.waits_for == "Its guard begins on a node of Ray."
    assert cluster.order.fate("start", "10.0.0.8", trio.current_time()) == "elsewhere"
    assert cluster.order.fate("start", "10.0.0.7", trio.current_time()) == "first"


@pytest.mark.parametrize("lost", ["taken", "dropped"])
async def test_a_submission_without_an_answer_is_never_repeated(autojump_clock, launch, cluster, lost):
    """Ray is asked for the job instead; it counts as lost only when Ray still does not know it later."""
    cluster.api.lost = lost
    await trio.sleep(50)
    assert not launch.has_ended
    await trio.sleep(20)
    assert launch.has_ended == (lost == "dropped")
    assert bool(cluster.order.ended) == (lost == "dropped")
    assert len(cluster.api.submitted) == 1


async def test_a_launch_waits_while_ray_is_silent(autojump_clock, launch, cluster):
    """Nothing is submitted or given up; operators see since when."""
    cluster.api.trouble = SILENT
    await trio.sleep(3600)
    assert "Ray at http://head:8265 does not answer (no answer within 5 s) since " in launch.waits_for
    assert launch.is_unanswered
    assert not launch.has_ended
    cluster.api.trouble = None
    await trio.sleep(5)
    assert (launch.waits_for, launch.is_unanswered) == ("It waits. (1 GPU)", False)


async def test_a_long_wait_is_no_failure_and_its_code_is_dead(autojump_clock, launch, cluster):
    """The next launch is another job."""
    await trio.sleep(595)
    assert not launch.has_ended
    await trio.sleep(10)
    assert launch.had_no_place
    assert launch.reported_end.why == "had no place on Ray within 600 s"
    assert cluster.order.fate("start", "10.0.0.7", trio.current_time()) == "late"
    assert "stop" not in cluster.api.calls


async def test_a_worker_serves_on_while_ray_is_silent(autojump_clock, launch, cluster, caplog):
    """Its heartbeats alone count. If they end, operators read that it cannot be replaced yet."""
    await trio.sleep(5)
    cluster.fetch()
    cluster.api.trouble, cluster.orders.heard = SILENT, True
    await trio.sleep(3600)
    assert not launch.has_ended
    assert launch.waits_for == ""
    assert "is silent, too" not in caplog.text
    cluster.orders.heard = False
    await trio.sleep(3600)
    assert not launch.has_ended
    assert caplog.text.count("worker m-0 is silent, too: it is launched again once Ray answers about it") == 1


async def test_a_worker_that_has_left_has_ended_while_ray_is_silent(autojump_clock, launch, cluster):
    """It has said good-bye, and its guard has not reported the end: nothing else would be heard of it."""
    await trio.sleep(5)
    cluster.fetch()
    cluster.api.trouble, cluster.orders.heard = SILENT, False
    await trio.sleep(60)
    assert not launch.has_ended
    cluster.orders.left = True
    await trio.sleep(10)
    assert launch.reported_end.why == "has said good-bye"
    assert cluster.order.ended


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        (RayRefused(403, "403 Forbidden"), "Ray refuses it (403 Forbidden): correct ray.token_env."),
        (RayRefused(500, "bad label"), "Ray refuses it (bad label)."),
    ],
)
async def test_a_refusal_ends_the_launch_with_its_reason(autojump_clock, launch, cluster, refusal, cause):
    cluster.api.refusal = refusal
    await trio.sleep(5)
    assert (launch.reported_end.why, launch.reported_end.cause) == ("cannot be started", cause)
    assert cluster.order.ended


async def test_a_job_that_fails_ends_the_launch(autojump_clock, launch, cluster):
    """With its exit code, where its guard has not reported."""
    await trio.sleep(5)
    cluster.fetch()
    cluster.api.status, cluster.api.exit_code = "FAILED", 127
    await trio.sleep(15)
    assert (launch.returncode, launch.reported_end.why) == (127, "has ended with exit code 127")


async def test_a_job_that_ray_has_lost_ends_the_launch(autojump_clock, launch, cluster):
    """As after another start of the cluster."""
    await trio.sleep(5)
    cluster.fetch()
    await trio.sleep(10)
    cluster.api.status = None
    await trio.sleep(15)
    assert launch.reported_end.why == "was lost by Ray"


async def test_ray_is_asked_seldom_while_a_worker_is_heard(autojump_clock, launch, cluster):
    """A worker that is heard runs; once it is silent, Ray knows best whether its node is gone."""
    await trio.sleep(5)
    cluster.api.status, cluster.orders.heard = "RUNNING", True
    cluster.fetch()
    await trio.sleep(5)
    cluster.api.calls.clear()
    await trio.sleep(300)
    assert 9 <= cluster.api.calls.count("job") <= 11
    cluster.api.status, cluster.orders.heard = "FAILED", False
    await trio.sleep(3)
    assert launch.has_ended


async def test_a_worker_that_is_heard_outlives_a_job_that_ray_has_lost(autojump_clock, launch, cluster):
    """Another cluster is at the same address: what it does not know ends when the worker is silent."""
    await trio.sleep(5)
    cluster.fetch()
    await trio.sleep(10)
    cluster.api.status, cluster.orders.heard = None, True
    await trio.sleep(3600)
    assert not launch.has_ended
    assert not cluster.order.ended
    cluster.orders.heard = False
    await trio.sleep(15)
    assert launch.reported_end.why == "was lost by Ray"
    assert cluster.order.ended


async def test_the_end_of_a_waiting_launch_leaves_its_job(autojump_clock, launch, cluster, nursery):
    """Ray does nothing for a stop of a pending job: the code is dead instead."""
    await trio.sleep(5)
    await launch.end(6, trio.Event())
    assert launch.has_ended
    assert cluster.order.ended
    assert "stop" not in cluster.api.calls
    assert cluster.tidied == ["owner-m-0-1"]


async def test_a_worker_ends_by_itself_first(autojump_clock, launch, cluster, nursery):
    """It is asked, and its guard reports the end: Ray stops nothing."""
    await trio.sleep(5)
    cluster.fetch()
    nursery.start_soon(launch.end, 6, trio.Event())
    await trio.sleep(1)
    assert cluster.order.end_at is not None
    cluster.orders.reported(LaunchEnd("m-0", 1, "was stopped on its machine"))
    await trio.sleep(1)
    assert launch.has_ended
    assert "stop" not in cluster.api.calls


async def test_an_end_without_a_report_is_seen_at_once(autojump_clock, launch, cluster, nursery):
    """A gateway that ends hears no reports: Ray is asked often."""
    await trio.sleep(5)
    cluster.fetch()
    await trio.sleep(20)
    nursery.start_soon(launch.end, 6, trio.Event())
    await trio.sleep(3)
    cluster.api.status, cluster.api.exit_code = "SUCCEEDED", 0
    await trio.sleep(1)
    assert launch.has_ended


@pytest.mark.parametrize(("is_silent", "within_s"), [(False, 6 + REPORT_S + 2), (True, 60)])
async def test_a_worker_that_does_not_end_is_stopped_by_ray(autojump_clock, launch, cluster, is_silent, within_s):
    """The wait is bounded, also while Ray is silent: then the worker's key is dead."""
    await trio.sleep(5)
    cluster.fetch()
    cluster.api.trouble = SILENT if is_silent else None
    with trio.fail_after(within_s):
        await launch.end(6, trio.Event())
    assert cluster.order.ended
    assert ("stop" in cluster.api.calls) or is_silent


async def test_nothing_is_waited_for_in_a_hurry(autojump_clock, launch, cluster):
    await trio.sleep(5)
    cluster.fetch()
    hurry = trio.Event()
    hurry.set()
    with trio.fail_after(1):
        await launch.end(6, hurry)
    assert "stop" in cluster.api.calls
