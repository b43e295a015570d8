"""Fixtures."""

import atexit
import contextlib
import os
import pathlib
import signal
import tempfile

import attrs
import hypothesis
import pytest
import trio
from support.deployments import gateway_fixture, start_fixture  # noqa: F401
from support.peers import OWN_SECRET, Client, Upstream
from support.worker_rig import make_worker_fixture  # noqa: F401

from ichat.config import load as configuration
from ichat.roles import gateway
from ichat.supervisor import state

TESTS = pathlib.Path(__file__).parent

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # begun in the background of a shell, which programs inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

_STATE = tempfile.TemporaryDirectory(prefix="ichat-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE.name  # where gateways and commands of the tests find each other
atexit.register(_STATE.cleanup)

hypothesis.settings.register_profile("ichat", deadline=None)  # what is slow on a busy machine is not wrong
hypothesis.settings.load_profile("ichat")

MARKERS = {"console": pytest.mark.browser, "engine": pytest.mark.engine, "soak": pytest.mark.slow}
"""What the folder of a test says of it."""


def pytest_addoption(parser):
    """Let all gateways in the process of the tests have relays."""
    parser.addoption("--relays", type=int, default=0, help="how many relays gateways in the tests' process have")


@pytest.fixture(autouse=True)
def _with_relays(request, monkeypatch):
    """Have gateways in this process start relays, if that is wanted."""
    if count := request.config.getoption("relays"):
        if not {"autojump_clock", "mock_clock"}.isdisjoint(request.fixturenames):
            pytest.skip("relays are processes of their own, with the system's clock")
        run = gateway.run

        async def run_with_relays(config, file=None, **more):
            settings = attrs.evolve(config.server_settings, relays=count)
            await run(attrs.evolve(config, server_settings=settings), file, **more)

        monkeypatch.setattr(gateway, "run", run_with_relays)


def pytest_collection_modifyitems(items):
    """Mark the tests of each folder as what they are."""
    for item in items:
        mark = MARKERS.get(item.path.relative_to(TESTS).parts[0])
        if mark:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _own_secret(monkeypatch):
    """Gateways in this process have a secret that their clients know."""
    monkeypatch.setattr(state, "keep_secret", lambda directory: OWN_SECRET)


@pytest.fixture
def serve(nursery):
    """Start an upstream: `upstream, port = await serve(reply)`."""

    async def start(reply):
        upstream = Upstream(reply)
        listeners = await nursery.start(trio.serve_tcp, upstream.serve, 0)
        return upstream, listeners[0].socket.getsockname()[1]

    return start


@pytest.fixture
def gateway_to(nursery):
    """Start a gateway in this process: `port = await gateway_to({"model": upstream_port}, more_toml)`."""

    async def start(routes, more=""):
        text = "[server_settings]\nport = 0\n" + more
        for name, port in routes.items():
            text += f'\n[[external_routes]]\nmodel_name = "{name}"\napi_base = "http://127.0.0.1:{port}/v1"\n'
        config = configuration.parse(text, "test.toml")
        return await nursery.start(gateway.run, config)

    return start


@pytest.fixture
async def connect():
    """Open a client: `client = await connect(port)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(port):
            return Client(await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port)))

        yield open_
