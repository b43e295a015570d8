"""A worker on another machine: two words bring it to its gateway, and what is missing is said before the load.

Both machines are network namespaces: this one's interfaces stay as they are, since a change of them ends the
requests of every Chromium on it (net::ERR_NETWORK_CHANGED), those of other tests too.
"""

import ctypes
import os
import shutil
import subprocess
import urllib.parse

import pytest
from support.deployments import free_port
from support.programs import LIMIT_S, ichat

TOKEN = "sk-token-0123456789"
HERE, THERE = "198.18.0.1", "198.18.0.2"
"""Addresses that are for tests of networks (RFC 2544)."""
CLONE_NEWNET = 0x40000000


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def enter(path):
    """Let this thread, and the processes that it starts, be in the network namespace of this file."""
    with open(path) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot enter {path}")


@pytest.fixture(scope="module")
def elsewhere():
    """Return the words before a command that is to run on the other machine. The tests run on the gateway's."""
    name, other = f"ichat-{os.getpid()}", f"ichat-{os.getpid()}-other"
    if shutil.which("ip") is None or os.geteuid() or ip("netns", "add", name).returncode:
        pytest.skip("no network namespace can be made")
    try:
        steps = (
            ("netns", "add", other),
            ("-n", name, "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", other),
            ("-n", name, "addr", "add", f"{HERE}/30", "dev", "here"),
            ("-n", name, "link", "set", "here", "up"),
            ("-n", name, "link", "set", "lo", "up"),
            ("-n", other, "addr", "add", f"{THERE}/30", "dev", "there"),
            ("-n", other, "link", "set", "there", "up"),
            ("-n", other, "link", "set", "lo", "up"),
        )
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(done.stderr)
        with open("/proc/thread-self/ns/net") as before:
            enter(f"/run/netns/{name}")
            yield ["ip", "netns", "exec", other]
            enter(f"/proc/self/fd/{before.fileno()}")
    finally:
        ip("netns", "del", other)
        ip("netns", "del", name)


def worker_of(url, *more):
    return ichat("worker", "-be", "fake", "--model", "/m", "--gateway-address", url, "-n", "m", "--port", "0", *more)


@pytest.fixture
def url(gateway):
    """A gateway with a token, which listens on all of its machine's addresses."""
    text = '[security]\njoin_token_env = "ICHAT_JOIN_TOKEN"\n'
    program = gateway(text, settings='host = "0.0.0.0"\n', ICHAT_JOIN_TOKEN=TOKEN)
    return program, f"http://{HERE}:{program.port}"


def test_the_gateways_address_is_enough(url, elsewhere, start):
    """With the token in its environment, the worker listens where its gateway reaches it, and gets its requests."""
    program, address = url
    worker = start([*elsewhere, *worker_of(address, "--worker-id", "w1")], ICHAT_JOIN_TOKEN=TOKEN)
    program.wait_until_ready("w1")
    worker.until(lambda: f"listens on {THERE}:" in worker.text())
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200


@pytest.mark.parametrize(
    ("token", "parts"),
    [
        ("", ["(401): No key was sent", "Set ICHAT_JOIN_TOKEN here to the gateway's token"]),
        ("sk-token-of-another", ["(401): This key is not known: this route takes the workers' token"]),
    ],
)
def test_missing_things_are_named_before_the_load(url, elsewhere, start, token, parts):
    """The worker ends with the gateway's reason, and its engine has not begun."""
    _, address = url
    worker = start([*elsewhere, *worker_of(address)], ICHAT_JOIN_TOKEN=token)
    assert worker.process.wait(LIMIT_S) == 64
    assert worker.text().rstrip().splitlines()[-1].startswith(f"The gateway {address} does not let this worker join")
    assert all(part in worker.text() for part in parts), worker.text()
    assert "importing" not in worker.text()


def test_a_gateway_without_a_token_says_how_to_name_one(gateway, elsewhere, start):
    """Its own machine's workers need none, so only the worker elsewhere notices."""
    program = gateway("", settings='host = "0.0.0.0"\n')
    worker = start([*elsewhere, *worker_of(f"http://{HERE}:{program.port}")])
    assert worker.process.wait(LIMIT_S) == 64
    assert "name a token in security.join_token_env, which they have in ICHAT_JOIN_TOKEN" in worker.text()


def test_no_way_to_the_gateway(start, elsewhere):
    """Where the worker should listen is then not known, which is said at once."""
    address = "http://203.0.113.9:4000"
    worker = start([*elsewhere, *worker_of(address)])
    assert worker.process.wait(LIMIT_S) == 69
    assert f"There is no way from this machine to the gateway {address}" in worker.text()


def test_a_gateway_that_is_not_there_yet(start):
    """The worker loads meanwhile; on the gateway's own machine it listens on 127.0.0.1."""
    worker = start(worker_of(f"http://127.0.0.1:{free_port()}"))
    worker.until(lambda: "accepts no heartbeats" in worker.text())
    line = next(line for line in worker.text().splitlines() if " listens on " in line)
    assert urllib.parse.urlsplit("//" + line.rpartition(" ")[2]).hostname == "127.0.0.1"
    assert worker.stop() == 0
