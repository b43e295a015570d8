"""Fixtures."""

import atexit
import collections
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
from support.relay_site import tls_fixture  # noqa: F401
from support.worker_rig import make_worker_fixture  # noqa: F401

from ichat.admin.reload import ConfigFile
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

MARKERS = {
    "console": pytest.mark.browser,
    "cluster": pytest.mark.ray,
    "engine": pytest.mark.engine,
    "soak": pytest.mark.slow,
}
"""What the folder of a test says of it."""


def pytest_addoption(parser):
    """Let all gateways in the process of the tests have relays."""
    parser.addoption("--relays", type=int, default=0, help="how many relays gateways in the tests' process have")
    parser.addoption("--relays-part", type=int, default=1, help="with --relays: run one of so many tests of each file")


def _why_without_relays(item):
    """Return why a test cannot be run with relays; "" if it can."""
    if not {"autojump_clock", "mock_clock"}.isdisjoint(item.fixturenames):
        return "relays are processes of their own, with the system's clock"
    mark = item.get_closest_marker("one_process")
    return "" if mark is None else mark.args[0]


def _with_count(config, count):
    return attrs.evolve(config, server_settings=attrs.evolve(config.server_settings, relays=count))


@attrs.frozen
class _FileWithRelays(ConfigFile):
    """A file whose configuration wants relays."""

    count: int = 0

    def load(self):
        return _with_count(super().load(), self.count)


@pytest.fixture
def relay_count(request):
    """Return how many relays a gateway in this process has."""
    return request.config.getoption("relays")


@pytest.fixture(autouse=True)
def _with_relays(request, monkeypatch):
    """Have gateways in this process start relays, if that is wanted."""
    if count := request.config.getoption("relays"):
        if why := _why_without_relays(request.node):
            pytest.skip(why)
        run = gateway.run

        async def run_with_relays(config, file=None, **more):
            if file is not None:
                file = _FileWithRelays(file.path, file.seen, file.log_format, count)
            await run(_with_count(config, count), file, **more)

        monkeypatch.setattr(gateway, "run", run_with_relays)


def pytest_collection_modifyitems(config, items):
    """Mark the tests of each folder as what they are; with relays, keep the part that is wanted."""
    for item in items:
        mark = MARKERS.get(item.path.relative_to(TESTS).parts[0])
        if mark:
            item.add_marker(mark)
    part = config.getoption("relays_part")
    if config.getoption("relays") and part > 1:
        numbers = collections.Counter()
        kept, left_out = [], []
        for item in items:
            is_kept = not _why_without_relays(item) and numbers[item.path] % part == 0
            numbers[item.path] += not _why_without_relays(item)
            (kept if is_kept else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


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
