"""Requests of relays that have ended: their owner keeps nothing of them."""

import gc
import types

import pytest
import trio
import trio.testing
from support.frame_damage import answered, ask
from support.owner_rig import owner_of

from ichat.relays.request_at_relay import RequestAtRelay
from ichat.relays.values import Note

ROUTE = '\n[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:9/v1"\n'


class Relay:
    """A relay that reads nothing."""

    def __init__(self, owner):
        self.talk, self.desk = types.SimpleNamespace(settings=1), owner.desk_of(self)

    def send(self, frame):
        pass


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_the_objects_of_an_ended_request_need_no_collector(tmp_path, without_collector):
    """Cycles of them would wait for it, and cost a tenth of the owner's time under load."""
    async with owner_of(tmp_path, ROUTE) as owner:
        desk = Relay(owner).desk
        desk.receives(ask(1))
        desk.receives(answered(1, 1, 1))
        desk.receives(ask(2)._replace(model="there is none"))
        desk.receives(ask(3))
        desk.receives(Note("leave", 3))
        desk.receives(ask(4))
        desk.end()
        await trio.testing.wait_all_tasks_blocked()
        assert not [one for one in gc.get_objects() if isinstance(one, RequestAtRelay)]
