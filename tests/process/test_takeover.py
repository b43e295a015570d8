"""A takeover with real processes: requests wait and are answered, streams go on, and one process has the gateway."""

import http.client
import json
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import trio
from support.deployments import free_port, pid_of, stream, worker
from support.peers import until
from support.programs import LIMIT_S, alive
from support.relay_site import Result, ask, post, site_of
from support.takeovers import begin, change, finish, stops_at, take_over_in_a_row, until_stopped

from ichat.errors import EXIT_UNAVAILABLE

LOGS = '[logs]\naccess_log = ""\n'
ASK = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
EVENTS = 40
STREAM = json.dumps({"model": "m", "messages": [], "stream": True, "events": EVENTS, "gap_s": 0.1})
JSON = {"content-type": "application/json"}


class Load:
    """Short requests on kept and on fresh connections, and streams, until it ends."""

    def __init__(self, port, context=None):
        self._port, self._context = port, context
        self.failures, self.answered, self.streamed = [], 0, 0
        self._end = threading.Event()
        calls = [(self._ask_forever, (True,)), (self._ask_forever, (False,)), *[(self._stream_forever, ())] * 3]
        self._threads = [threading.Thread(target=call, args=args) for call, args in calls]
        for thread in self._threads:
            thread.start()

    def _connect(self):
        if self._context is not None:
            return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=60, context=self._context)
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _ask_forever(self, is_kept):
        connection = self._connect()
        while not self._end.is_set():
            try:
                connection.request("POST", "/v1/chat/completions", ASK, JSON)
                answer = connection.getresponse()
                text = answer.read()
            except (http.client.HTTPException, OSError) as error:
                self.failures.append(error)
                connection.close()
                continue
            self.answered += 1
            if answer.status != 200:
                self.failures.append((answer.status, text))
            if not is_kept:
                connection.close()
        connection.close()

    def _stream_forever(self):
        while not self._end.is_set():
            connection = self._connect()
            try:
                connection.request("POST", "/v1/chat/completions", STREAM, JSON)
                text = connection.getresponse().read().decode()
            except (http.client.HTTPException, OSError) as error:
                self.failures.append(error)
            else:
                if text.count("delta") != EVENTS or not text.endswith("data: [DONE]\n\n"):
                    self.failures.append(text)
                self.streamed += 1
            connection.close()

    def end(self):
        self._end.set()
        for thread in self._threads:
            thread.join()
        return self.failures


@pytest.mark.parametrize(("old_relays", "new_relays"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_requests_and_streams_go_on_while_another_process_gets_the_gateway(
    gateway, start, tmp_path, old_relays, new_relays
):
    """No request is refused, no stream breaks, the worker stays, and the old process ends."""
    port = free_port()
    old = gateway(worker() + LOGS, port=port, settings=f"relays = {old_relays}\n").wait_until_ready("m-0")
    pid = old.get("/v1/admin/workers/m-0")[1]["pid"]
    load = Load(port)
    try:
        old.until(lambda: load.answered > 20)
        change(tmp_path / "ichat.toml", f"relays = {old_relays}", f"relays = {new_relays}")
        new = begin(start, tmp_path / "ichat.toml").wait_for_port()
        before = load.answered, load.streamed
        new.until(lambda: load.answered > before[0] + 20 and load.streamed > before[1] + 3)
        old.until(lambda: old.process.poll() is not None)
    finally:
        failures = load.end()
    assert failures == []
    assert old.process.returncode == 0
    shown = new.get("/v1/admin/workers/m-0")[1]
    assert (shown["pid"], shown["state"], shown["restarts"]) == (pid, "ready", 0)


@pytest.mark.parametrize("relays", [0, 2])
async def test_takeovers_in_a_row_with_tls(gateway, start, tls, tmp_path, relays):
    """No request is refused, no stream breaks, and the ledger has each request and token once."""
    settings, trust = tls
    async with site_of(gateway, free_port(), relays, LOGS, settings, trust=trust) as site:
        begun = partial(begin, start, tmp_path / "ichat.toml")
        found = await take_over_in_a_row(site, begun, times=2, streams=4, requests=100, requests_s=30)
    print(found.summary())


async def test_limits_count_the_requests_that_the_old_process_still_has(gateway, start, tmp_path):
    """A second request of the only one that may be under way is refused, until the old process's has ended."""
    async with site_of(gateway, free_port(), 0, LOGS + "[limits]\nmax_in_flight = 1\n") as site:
        site.upstream.opens = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_once, site, first := Result())
            await until(lambda: site.upstream.held)
            await finish(site, begin(start, tmp_path / "ichat.toml"))
            await ask_once(site, second := Result())
            assert second.code == "rate_limited"
            site.upstream.opens.set()
        assert first.status == 200

        async def is_answered():
            await ask_once(site, third := Result())
            return third.status == 200

        await site.until(is_answered)
        assert site.upstream.most == 1


async def test_an_old_process_that_has_ended_is_not_shown_while_its_relays_end(gateway, start, tmp_path):
    """The new process has no relays itself: it follows the old process beside the relays, which have streams."""
    async with site_of(gateway, free_port(), 1, LOGS) as site:
        (relay,) = site.relays().values()
        async with await site.connect() as stream:
            await stream.send_all(post({"model": "m", "stream": True}))
            await stream.receive_some()
            old = site.program.process
            change(tmp_path / "ichat.toml", "relays = 1", "relays = 0")
            await finish(site, begin(start, tmp_path / "ichat.toml"))
            await until(lambda: old.poll() is not None)

            async def is_alone():
                return (await site.get("/v1/admin/cluster/status"))["gateway"].get("retiring_pid") is None

            await site.until(is_alone)
            assert alive([relay])


async def ask_once(site, result):
    with trio.fail_after(LIMIT_S):
        async with await site.connect() as stream:
            await ask(stream, {"model": "m"}, result)


def test_a_takeover_during_a_load_is_refused_before_the_freeze(gateway, start, tmp_path):
    """The load goes on, with the request that waits for it; other requests are served."""
    loads = worker("a", 'load = "on_demand"\nload_s = 600')
    old = gateway(loads + worker("b") + LOGS).wait_until_ready("b-0")
    with stream(old, {"model": "a", "messages": []}) as waiting:
        old.until(lambda: old.state("a-0") == "loading")
        pid = pid_of(old, "a-0")
        new = begin(start, tmp_path / "ichat.toml")
        old.until(lambda: new.process.poll() is not None)
        assert new.process.returncode == EXIT_UNAVAILABLE
        assert "There was no takeover: Worker a-0 is being" in new.text()
        assert "asks for this gateway" not in old.text()
        assert (pid_of(old, "a-0"), old.state("a-0")) == (pid, "loading")
        assert old.ask("/v1/chat/completions", {"model": "b", "messages": []})[0] == 200
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.recv(1)


async def test_a_second_takeover_at_once_is_refused(gateway, start, tmp_path):
    """The first goes on, and succeeds."""
    path = tmp_path / "ichat.toml"
    async with site_of(gateway, free_port(), 0, LOGS) as site:
        first = begin(start, path, **stops_at("new 2"))
        await until_stopped(first)
        second = begin(start, path)
        await until(lambda: second.process.poll() is not None)
        assert second.process.returncode == EXIT_UNAVAILABLE
        assert "Another takeover of this gateway is under way" in second.text()
        first.process.send_signal(signal.SIGCONT)
        await finish(site, first)
        await ask_once(site, result := Result())
        assert result.status == 200


def test_the_old_process_goes_on_if_its_state_cannot_be_written(gateway, start, tmp_path):
    """As on a full disk: the new process ends with a sentence. Once it can be written, a takeover succeeds."""
    old = gateway(worker() + LOGS, port=free_port()).wait_until_ready("m-0")
    obstacle = tmp_path / "state" / "workers.new"
    obstacle.mkdir()
    new = begin(start, tmp_path / "ichat.toml")
    old.until(lambda: new.process.poll() is not None)
    assert new.process.returncode == EXIT_UNAVAILABLE
    assert "The running gateway cannot write its state" in new.text()
    assert old.ask("/v1/chat/completions", {"model": "m", "messages": []})[0] == 200
    obstacle.rmdir()
    new = begin(start, tmp_path / "ichat.toml").wait_for_port()
    assert new.ask("/v1/chat/completions", {"model": "m", "messages": []})[0] == 200


HALF = """
import json, os, socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1] + "/takeover")
hello = {"kind": "hello", "protocol": int(sys.argv[2]), "directory": os.path.realpath(sys.argv[1])}
sock.send(json.dumps(hello).encode())
answer = json.loads(sock.recv(65536))
print(answer["kind"], answer.get("why", ""), flush=True)
if answer["kind"] == "welcome":
    sock.send(b'{"kind": "freeze"}')
    while json.loads(sock.recv(65536))["kind"] != "snapshot":
        pass
    print("snapshot", flush=True)
    time.sleep(600)
"""
"""A new process that stops half-way."""


def test_the_old_process_goes_on_when_the_new_process_dies_in_the_freeze(gateway, tmp_path):
    """Requests wait meanwhile, and none is refused; another protocol is refused before the freeze."""
    old = gateway(worker() + LOGS).wait_until_ready("m-0")
    command = [sys.executable, "-c", HALF, str(tmp_path / "state")]
    refused = subprocess.run([*command, "99"], capture_output=True, text=True, timeout=60, check=False)
    assert "protocol" in refused.stdout
    with subprocess.Popen([*command, "1"], stdout=subprocess.PIPE, text=True) as new:
        assert [new.stdout.readline().split()[0] for _ in range(2)] == ["welcome", "snapshot"]
        load = Load(old.port)
        new.kill()
    old.until(lambda: load.answered > 20)
    assert load.end() == []
    assert "the takeover has failed" in old.text()
    assert old.state("m-0") == "ready"


def test_a_takeover_without_a_gateway_starts_as_usual(start, tmp_path):
    """The first start of a gateway may be a takeover, too."""
    path = tmp_path / "ichat.toml"
    path.write_text(f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}/state"\n')
    new = begin(start, path).wait_for_port()
    assert new.get("/v1/models")[0] == 200
