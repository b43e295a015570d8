"""A gateway that is killed at a moment of a launch on Ray: its next start has the worker, once."""

import collections
import time

import psutil
import pytest
from support.deployments import gateway_fixture, start_fixture
from support.programs import LIMIT_S, ROOT
from support.ray_door import RayDoor
from support.ray_site import START_S, Site

__all__ = ["gateway_fixture", "start_fixture"]

ROUNDS = 5
PATHS = ":".join(str(ROOT / "tests/support" / name) for name in ("dying", "fake_engine"))
FIRST = "owner opened"
"""The moment that only the first launch of a state directory has."""
MOMENTS = (
    "ended renamed", "ended done", "launch renamed", "launch done", "nodes 1 asked", "free 1 answered",
    "order renamed", "order done", "submit 1 asked", "submit 1 begun", "submit 1 sent", "submit 1 answered",
    "job 1 asked", "job 1 answered", "job 2 sent", "place renamed", "place done", "fetched renamed", "fetched done",
)  # fmt: skip
"""The writes and the requests of a launch that follows another, in their order: see `dying/` and `ray_door.py`."""
FEW = ("order done", "submit 1 begun", "place done", "fetched done")
RUNNING = ("place done", "fetched done")
"""The moments of them at which the job runs: it goes on."""


class Launches:
    """A gateway that is killed at moments of launches, and its one worker."""

    def __init__(self, gateway, cluster, directory):
        self.door = RayDoor(cluster.address)
        self.site = Site(gateway, cluster, self.door.url)
        self._step, self._go, self._engines = (directory / name for name in ("step", "step.go", "engines"))

    def begin(self):
        keys = f'gpus = 1\nalone = "{self._engines}"'
        return self.site.begin(keys, restart="well_s = 0.1", PYTHONPATH=PATHS, ICHAT_DIES_AT=str(self._step))

    def kill_at(self, moment):
        """Launch the worker again, and return when that has killed the gateway; return the job of before."""
        (before,) = self.site.living()
        self._go.touch()
        self._arm(moment)
        psutil.Process(self.site.pid()).kill()
        self._until_killed()
        return before

    def kill_at_first(self):
        """Have the gateway killed at the first launch of a new state directory."""
        if self.site.program is not None:
            self.site.program.stop()
            for name in ("owner", "orders.json", "workers.json"):
                (self.site.directory() / name).unlink(missing_ok=True)
        self._go.unlink(missing_ok=True)
        self._arm(FIRST)
        self.begin()
        self._go.touch()  # not before the gateway listens
        self._until_killed()
        return ""

    def _arm(self, moment):
        is_request = moment.split()[0] in ("nodes", "free", "submit", "job")
        self._step.write_text("" if is_request else moment)
        self.door.at(moment if is_request else "", lambda: self.site.program.process.kill())

    def _until_killed(self):
        self.site.program.process.wait(LIMIT_S)
        self.disarm()

    def disarm(self):
        self._step.unlink(missing_ok=True)
        self.door.at("", None)

    def recover(self):
        """Start the next gateway: it has the worker, by one job, and there was no second engine. Return the job."""
        self.begin().until_ready("m-0")
        assert self.site.answers()
        self.site.program.until(lambda: len(self.site.living()) == 1, START_S)
        assert self._engines.with_suffix(".m-0").read_text() == ""
        return self.site.living()[0]

    def end(self):
        """Stop the gateway: no job and no process is left."""
        assert self.site.program.stop() == 0
        self.site.program.until(lambda: self.site.living() == [])  # Ray hears of an end some time later
        assert not self.site.tagged()

    def close(self):
        self.disarm()
        self.site.close()
        self.door.close()


@pytest.fixture
def launches(gateway, cluster, tmp_path):
    made = Launches(gateway, cluster, tmp_path)
    yield made
    made.close()


def test_a_gateway_that_is_killed_in_a_launch_has_the_worker_once(launches):
    """At four of the moments: the order is kept, Ray has the job, its node may fetch the order, and has fetched it."""
    launches.begin().until_ready("m-0")
    for moment in FEW:
        launches.kill_at(moment)
        living = launches.site.living()
        after = launches.recover()
        assert moment not in RUNNING or [after] == living, moment
    launches.end()


@pytest.mark.slow
def test_a_gateway_that_is_killed_at_any_moment_of_a_launch_has_the_worker_once(launches):
    """Each moment, several times; the printed table has the jobs that went on, and the seconds until the worker serves."""
    kept, seconds = collections.Counter(), collections.defaultdict(list)
    for number in range(ROUNDS):
        for moment in (FIRST, *MOMENTS):
            before = launches.kill_at_first() if moment == FIRST else launches.kill_at(moment)
            began = time.monotonic()
            living = launches.site.living()
            after = launches.recover()
            kept[moment] += after in living
            seconds[moment].append(time.monotonic() - began)
            assert after != before or moment.startswith("ended"), moment
            print(f"{number} {moment}: {seconds[moment][-1]:.1f} s", flush=True)
    for moment, found in seconds.items():
        print(f"{moment}: {len(found)} times, the same job {kept[moment]} times, ready in at most {max(found):.1f} s")
    launches.end()
