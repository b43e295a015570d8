"""The launcher of workers on Ray: its owner, and the launches that it finds."""

import time

import pytest
import trio

from ichat.config import load as configuration
from ichat.fleet.fleet import Fleet
from ichat.fleet.order_store import OrderStore
from ichat.fleet.orders import ANYWHERE, Orders
from ichat.protocol.messages import Heartbeat
from ichat.ray.api import RayUnknown
from ichat.ray.values import RayJob
from ichat.supervisor.launcher import Order
from ichat.supervisor.ray_launch import RayLaunch
from ichat.supervisor.ray_launcher import RayLauncher
from ichat.supervisor.state import SavedManagedWorker

CONFIG = configuration.parse(
    '[ray]\naddress = "http://127.0.0.1:8265"\n[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n'
    'on = "ray"\ngpus = 1\n',
    "x.toml",
)
(SPEC,) = CONFIG.managed_workers


class Ray:
    """A cluster with these jobs; None: it does not answer."""

    address = "http://head:8265"

    def __init__(self, found):
        self.found, self.stopped = found, []

    async def jobs(self):
        if self.found is None:
            raise RayUnknown("no answer within 5 s")
        return self.found

    async def stop(self, job_id):
        self.stopped.append(job_id)


def launcher_of(path, ray):
    fleet = Fleet({}, trio.current_time, 8)
    return RayLauncher(ray, str(path), OrderStore(str(path / "orders.json"), Orders(), fleet, CONFIG))


@pytest.mark.parametrize(("state", "expected"), [("gone", True), ("draining", False)])
async def test_a_worker_has_left_some_time_after_its_good_bye(tmp_path, autojump_clock, state, expected):
    """Not before, so that its guard can report the end; and not one that is there, or is not known."""
    fleet = Fleet({}, trio.current_time, 8)
    orders = OrderStore(str(tmp_path / "orders.json"), Orders(), fleet, CONFIG)
    fleet.managed.expect("m-0", ["m"])
    assert not orders.has_left("m-0", 15)
    for one in ("ready", state):
        fleet.registry.record_heartbeat(Heartbeat("m-0", "m", "127.0.0.1", 1, state=one, heartbeat_interval=10))
    await trio.sleep(14)
    assert not orders.has_left("m-0", 15)
    await trio.sleep(2)
    assert (orders.has_left("m-0", 15), orders.has_left("m-1", 15)) == (expected, False)


class SlowDirectory:
    """A directory whose use lasts a moment, and that counts how many threads use it at once."""

    def __init__(self, path):
        self._path, self.users, self.most = path, 0, 0

    def __fspath__(self):
        self.users += 1
        self.most = max(self.most, self.users)
        time.sleep(0.02)
        self.users -= 1
        return str(self._path)


async def test_launches_at_the_same_moment_have_the_same_owner(tmp_path):
    """A single thread makes it, also for the first launches of a state directory: jobs are known by it later."""
    directory, made = SlowDirectory(tmp_path), list[RayLaunch]()
    launcher = RayLauncher(Ray([]), directory, launcher_of(tmp_path, Ray([])).orders)

    async def start(number):
        made.append(await launcher.start(Order(f"m-{number}", number, SPEC, CONFIG)))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(start, number)
    (owner,) = {one.identity.partition("-")[0] for one in made}
    assert (tmp_path / "owner").read_text().strip() == owner
    assert directory.most == 1


async def find(path, status):
    """Return the launcher, its cluster, and the found launches of m-0 and m-1, of which m-1 was never submitted."""
    (path / "owner").write_text("0123abcd\n")
    jobs = [RayJob(f"0123abcd-m-{number}-7", status, metadata={"ichat.owner": "0123abcd"}) for number in (0, 9)]
    ray = Ray(None if status is None else jobs)
    launcher = launcher_of(path, ray)
    for worker_id in ("m-0", "m-1", "m-9"):
        await launcher.orders.make_managed(worker_id, SPEC, 60, ANYWHERE)
    started = [SavedManagedWorker(name, {}, is_launched=False, launch=7) for name in ("m-0", "m-1")]
    return launcher, ray, await launcher.find(started)


async def test_a_job_of_a_saved_launch_is_found_and_all_others_are_ended(tmp_path):
    """The orders of launches that are not found are dead, so a job that begins later loads nothing."""
    launcher, ray, found = await find(tmp_path, "RUNNING")
    assert {*found} == {"m-0"}
    assert ray.stopped == ["0123abcd-m-9-7"]
    assert [one.worker_id for one in launcher.orders.orders.by_launch.values() if not one.ended] == ["m-0"]


async def test_every_launch_with_an_order_is_found_while_ray_is_silent(tmp_path):
    _, _, found = await find(tmp_path, None)
    assert {*found} == {"m-0", "m-1"}


async def test_a_fetched_order_is_found_without_its_job(tmp_path):
    """Another cluster is at Ray's address: the worker may serve, and is soon heard if it does."""
    (tmp_path / "owner").write_text("0123abcd\n")
    launcher = launcher_of(tmp_path, Ray([]))
    for worker_id in ("m-0", "m-1"):
        await launcher.orders.make_managed(worker_id, SPEC, 60, ANYWHERE)
    orders, _ = launcher.orders.orders.with_fetched(launcher.orders.orders.live("m-0"), "start", "10.0.0.7", 1.0)
    launcher.orders.orders = orders
    started = [SavedManagedWorker(name, {}, is_launched=False, launch=7) for name in ("m-0", "m-1")]
    assert {*await launcher.find(started)} == {"m-0"}


async def test_a_job_that_is_over_is_not_found(tmp_path):
    _, ray, found = await find(tmp_path, "FAILED")
    assert (found, ray.stopped) == ({}, [])
