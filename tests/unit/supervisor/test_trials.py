"""Launches on trial: many are asked for while somebody types, and few are examined at once."""

import contextlib
import threading

import pytest
import trio
from support.programs import LIMIT_S

from ichat.config import load as configuration
from ichat.config.schema import ManagedWorkerConfig
from ichat.observability.tracing import open_tracing
from ichat.preflight import facts as preflight_facts
from ichat.roles.gateway_components import build
from ichat.supervisor.state import open_state
from ichat.supervisor.supervisor import TRIALS_MAX


@pytest.fixture
async def supervisor(tmp_path):
    config = configuration.parse(f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}"\n', "test.toml")
    with open_state(config.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(config, None, state, tracing)
        yield components.control.supervisor
        components.control.log_store.close()


async def test_few_are_examined_at_once(supervisor, monkeypatch):
    """The threads of all others stay free: a real launch is examined at once."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def read_facts(*_):
        begun.release()
        go_on.wait(LIMIT_S)
        return preflight_facts.Facts()

    monkeypatch.setattr(preflight_facts, "read_facts", read_facts)
    spec = ManagedWorkerConfig(model_name="m", model_path="/m")
    found = []

    async def examine(*, is_trial):
        found.append(await supervisor.objections_to(spec, is_trial=is_trial))

    def begins():
        assert begun.acquire(timeout=LIMIT_S)

    async with trio.open_nursery() as nursery:
        for _ in range(TRIALS_MAX + 3):
            nursery.start_soon(lambda: examine(is_trial=True))
        for _ in range(TRIALS_MAX):
            await trio.to_thread.run_sync(begins)
        with trio.fail_after(LIMIT_S):
            while supervisor._trials.statistics().tasks_waiting < 3:
                await trio.sleep(0.001)
        assert not begun.acquire(blocking=False)
        nursery.start_soon(lambda: examine(is_trial=False))
        await trio.to_thread.run_sync(begins)
        go_on.set()
    assert found == [[]] * (TRIALS_MAX + 4)
