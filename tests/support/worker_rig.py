"""A worker in this process, with a fake engine on its thread."""

import sys

import pytest
import trio
from support.programs import LIMIT_S

from ichat.config.schema import Limits, Timeouts
from ichat.engines.engine import find
from ichat.engines.engine_loop import TIMES
from ichat.engines.thread import EngineThread
from ichat.http.front_door import FrontDoor
from ichat.http.hub import Hub
from ichat.http.listeners import open_listeners, port_of
from ichat.roles.worker_options import read_command_line
from ichat.roles.worker_server import WorkerServer


class Rig:
    """A worker's parts, without its process."""

    def __init__(self, argv, *, token="", times=TIMES, **timeouts):
        """`token` is the one without which the engine's loop reads no request itself."""
        self._token = token
        self.engine = find("fake")
        self.host = EngineThread(self.engine, argv, client_stall_s=timeouts.pop("client_stall_s", 60), times=times)
        self.options, _ = read_command_line(["--backend", "fake", "--worker-id", "w"])
        self.timeouts = Timeouts(**timeouts)

    async def open(self, nursery):
        listeners = await open_listeners("127.0.0.1", 0)
        self.worker = WorkerServer(self.options, self.engine, self.host, port_of(listeners), token=self._token)
        hub = Hub()
        self.door = FrontDoor(b"worker", self.worker.answer, lambda head, peer: None, hub, Limits(), self.timeouts)
        nursery.start_soon(hub.run_forever)
        nursery.start_soon(self.door.serve_forever, listeners)
        self.host.start()
        return self.worker.port


@pytest.fixture(name="make_worker")
async def make_worker_fixture(nursery, monkeypatch):
    """Start a worker: `rig, port = await make_worker(*arguments, token="", times=TIMES, **time_limits)`."""
    monkeypatch.syspath_prepend("tests/support/fake_engine")
    monkeypatch.delitem(sys.modules, "fake_engine", raising=False)
    rigs = []

    async def make(*argv, wait=True, **timeouts):
        rig = Rig(["--model", "m", *argv], **timeouts)
        rigs.append(rig)
        port = await rig.open(nursery)
        if wait:
            with trio.fail_after(LIMIT_S):
                await rig.host.ready.wait()
        return rig, port

    yield make
    for rig in rigs:
        await rig.host.stop(5)
