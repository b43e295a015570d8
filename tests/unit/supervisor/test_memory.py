"""The state that is saved for the next gateway, where it cannot be written."""

import pytest
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.fleet.fleet import Fleet
from ichat.supervisor.copies import ReplicaNumbers
from ichat.supervisor.memory import WorkerMemory
from tests.unit.supervisor.test_loader import Rig


class Disk:
    """A state directory on a disk that may be full."""

    path = "/state"
    is_full = False

    def save(self, state):
        if self.is_full:
            raise OSError(28, "No space left on device")


async def test_a_launch_elsewhere_waits_until_the_state_can_be_written(autojump_clock):
    """The next gateway would not know it, and would launch it again; a worker here is found by its processes."""
    disk = Disk()
    memory = WorkerMemory(disk, Fleet({}, trio.current_time, 8), {}, lambda: "", ReplicaNumbers(), stopped=list)
    here, there = (ManagedWorkerConfig("m", "/m", on=on) for on in ("here", "ray"))
    for disk.is_full in (False, True, False):
        await memory.save()
        assert memory.objections_to(here) == ()
        objections = memory.objections_to(there)
        assert bool(objections) == disk.is_full
        assert all("/state cannot be written" in one for one in objections)


@pytest.mark.parametrize("objections", [(), ("The disk is full.",)])
async def test_a_worker_with_such_an_objection_is_not_started(autojump_clock, nursery, tmp_path, objections):
    """It is tried again as after any other obstacle."""
    site = Rig(nursery, tmp_path)
    site.context.memory.objections_to = lambda _: objections
    worker = site.add("a")
    worker.life.load()
    await site.until(lambda: worker.record.end is not None or worker.phase == "ready")
    assert (worker.record.end.cause if worker.record.end else "", len(site.starts)) == (
        ("The disk is full.", 0) if objections else ("", 1)
    )
