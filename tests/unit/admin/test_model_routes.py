"""What operators ask of models that are loaded on demand, with a loader that says what a test wants."""

import types

import jsonschema
import pytest
import trio

from ichat import errors
from ichat.admin.app import make_app
from ichat.admin.calls import ControlCalls
from ichat.admin.openapi import document
from ichat.admin.reload import Reloader
from ichat.config.schema import Config, Security
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.worker_table import WorkerTable
from ichat.security.auth import Auth
from ichat.security.keys import Seal
from ichat.supervisor.supervisor import Supervisor

VERBS = ("load", "unload", "sleep", "wake")


class FakeLoader:
    """Does with a model what it is asked, which takes a while, or refuses."""

    def __init__(self):
        self.asked = []
        self.refusal = None
        self.takes_s = 0.0

    async def _do(self, *asked):
        self.asked.append(asked)
        await trio.sleep(self.takes_s)
        if self.refusal:
            raise self.refusal
        return "m-0"

    async def load(self, model):
        return await self._do("load", model)

    async def unload(self, model, drain_s):
        return await self._do("unload", model, drain_s)

    async def sleep(self, model):
        return await self._do("sleep", model)

    async def wake(self, model):
        return await self._do("wake", model)


@pytest.fixture
def loader():
    return FakeLoader()


@pytest.fixture
def ask(loader):
    """Ask the control plane: `status, answer = await ask("load", {"model": "m"})`."""
    fleet = Fleet({}, lambda: 0.0, 10)
    fleet.managed.expect("m-0", ["m"])
    seal = Seal()
    parts = {
        WorkerTable: fleet.table,
        Supervisor: types.SimpleNamespace(loader=loader),
        Reloader: types.SimpleNamespace(config=Config()),
        Auth: Auth(Security()),
        Seal: seal,
        ControlCalls: ControlCalls(),
    }
    client = make_app(parts).test_client()

    async def request(verb, body, query=""):
        headers = {"x-ichat-caller": seal.sign(b"own here  127.0.0.1 any -").decode()}
        answer = await client.post(f"/v1/admin/models/{verb}{query}", json=body, headers=headers)
        return answer.status_code, await answer.get_json()

    return request


@pytest.mark.parametrize("verb", VERBS)
async def test_the_answer_says_what_has_become_of_the_model(ask, loader, verb, autojump_clock):
    """Its worker, the state of that, and how long it took, as the OpenAPI document says."""
    loader.takes_s = 7.25
    status, answer = await ask(verb, {"model": "m"})
    assert (status, answer) == (200, {"model": "m", "worker_id": "m-0", "state": "starting", "seconds": 7.25})
    drain = (Config().timeouts.drain_s,) if verb == "unload" else ()
    assert loader.asked == [(verb, "m", *drain)]
    components = document()["components"]
    jsonschema.validate(answer, {"$ref": "#/components/schemas/ModelChange", "components": components})


async def test_how_long_requests_may_take_is_said_with_unload(ask, loader):
    """`drain_s` is a number of seconds; anything else is refused before anything is done."""
    assert (await ask("unload", {"model": "m"}, "?drain_s=2.5"))[0] == 200
    assert loader.asked == [("unload", "m", 2.5)]
    status, answer = await ask("unload", {"model": "m"}, "?drain_s=-1")
    assert (status, answer["error"]["param"]) == (400, "drain_s")
    assert len(loader.asked) == 1


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "refusal",
    [
        errors.model_not_found("m", []),
        ApiError(409, "not_on_demand", "The model `m` has no on-demand worker."),
        errors.model_not_ready("m", "CUDA is out of memory", 7),
    ],
    ids=lambda refusal: refusal.code,
)
async def test_a_refusal_has_the_loaders_status_and_sentence(ask, loader, verb, refusal):
    """404, 409 and 503 come through as they are."""
    loader.refusal = refusal
    status, answer = await ask(verb, {"model": "m"})
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (refusal.status, refusal.code, str(refusal))


@pytest.mark.parametrize("body", [{}, {"model": 1}, {"model": ""}, []])
async def test_a_request_without_a_model_does_nothing(ask, loader, body):
    """It is told what is missing."""
    assert (await ask("load", body))[0] == 400
    assert loader.asked == []
