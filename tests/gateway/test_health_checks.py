"""Workers that are not iChat's own, and external routes, are asked whether they are well."""

import http.server
import json
import ssl
import threading
from types import SimpleNamespace

import pytest
import trio
import trustme
from support.exposition import heartbeat, known, own, shown
from support.peers import code_of, plain
from support.programs import LIMIT_S

from ichat.config import load as configuration
from ichat.config.schema import Config, Health
from ichat.errors import Exit
from ichat.fleet.fleet import Fleet
from ichat.fleet.health_checks import HealthChecker, ProbeResult, ask, read_status
from ichat.fleet.probes import KEEP_S, OWN_AT_ONCE_MAX
from ichat.fleet.views import describe, result_of
from ichat.fleet.worker_table import FORGET_S
from ichat.http import client
from ichat.http.pool import Upstream
from ichat.protocol.messages import Heartbeat
from ichat.proxy.external_routes import external_endpoints
from ichat.routing.availability import NotReady, Ready
from ichat.supervisor.state import SavedRemoteWorker, SavedState

FOREIGN = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1}
SETTINGS = Health(interval_s=10, timeout_s=5, failures_max=3)
TWO_ROUTES = """
[[external_routes]]
model_name = "far"
api_base = "http://one/v1"
health_path = "/ping"
headers = { X-Key = "1" }
[[external_routes]]
model_name = "far"
api_base = "http://two/v1"
"""


class World:
    """A fleet, and a prober whose questions are answered by `status`: a number, an error, or a function."""

    def __init__(self, config=None):
        self.status = 200
        self.asked = []
        self.fleet = Fleet(external_endpoints(config or Config()), trio.current_time, 10)
        self.prober = HealthChecker(self.fleet.probes, SETTINGS, SimpleNamespace(proof=b"proof"), self.ask)

    def configure(self, **health):
        self.prober.reconfigure(Config(health=Health(**health)))

    async def ask(self, upstream, target, headers):
        self.asked.append((upstream.host, target, dict(headers)))
        status = self.status(upstream) if callable(self.status) else self.status
        if isinstance(status, Exception):
            raise status
        if status is None:
            await trio.sleep_forever()
        return status

    def hear(self, **more):
        self.fleet.registry.record_heartbeat(Heartbeat(**{**FOREIGN, **more}))

    def state(self, worker_id="w"):
        return self.fleet.table.state(self.fleet.table.get(worker_id))

    def refusal(self, model="m"):
        found = self.fleet.directory.availability(model)
        assert isinstance(found, NotReady)
        return found.reasons


@pytest.fixture
def world(nursery):
    found = World()
    nursery.start_soon(found.prober.probe_forever)
    yield found
    nursery.cancel_scope.cancel()


# In virtual time.


async def test_a_worker_that_only_the_gateway_cannot_reach_is_found_without_a_request(world, autojump_clock):
    """Its heartbeats arrive all the while; it gets requests again once a check reaches it. Its own state is its own."""
    world.status = 503
    for number in range(17):
        world.hear(start_id="s", heartbeat_interval=10)
        await trio.sleep(4)
        if number == 5:
            assert world.state() == "ready", "any response shows that it can be reached"
            world.status = OSError("no")
    assert (world.state(), "it cannot be reached" in world.refusal()) == ("unhealthy", True)
    assert not world.fleet.table.get("w").answers, "its heartbeats are needed all the same"
    world.status = 200
    world.hear(start_id="s")
    await trio.sleep(11)
    world.hear(start_id="s")
    assert world.state() == "ready"


async def test_a_worker_that_answers_requests_is_not_asked(world, autojump_clock):
    """Nor is one that loads, or a managed one; with many, those that fail go first and then who was longest not seen."""
    world.fleet.managed.expect("managed", ["m"])
    world.hear(worker_id="managed", start_id="s")
    world.hear(worker_id="loads", start_id="s", state="loading")
    world.hear(start_id="s", heartbeat_interval=1e3)
    endpoint = world.fleet.table.endpoint_of(world.fleet.table.get("w"))
    for _ in range(20):
        endpoint.seen_at = trio.current_time()
        await trio.sleep(3)
    assert world.asked == []
    await trio.sleep(21)
    assert len(world.asked) in (1, 2)
    for number in range(2 * OWN_AT_ONCE_MAX):
        world.hear(worker_id=f"w{number}", start_id="s", heartbeat_interval=1e3, port=number + 2)
    world.asked.clear()
    await trio.sleep(30)
    assert len(world.asked) == 3 * OWN_AT_ONCE_MAX


async def test_a_server_that_answers_checks_needs_one_registration(world, autojump_clock):
    """It stays ready without another beat, however long; without health checks it is silent after three intervals."""
    world.hear()
    await trio.sleep(FORGET_S + 605)
    world.hear(worker_id="another")  # the occasion to forget who is silent
    assert (world.state(), isinstance(world.fleet.directory.availability("m"), Ready)) == ("ready", True)
    assert {one[:2] for one in world.asked} == {("127.0.0.1", "/health")}
    assert world.asked[0][2] == {b"x-ichat-proof": b"proof"}
    world.configure(interval_s=0)
    count = len(world.asked)
    await trio.sleep(100)
    assert (world.state(), len(world.asked)) == ("unhealthy", count)
    assert "has not been heard of for" in world.refusal()


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (503, "/health is answered with 503"),
        (302, "/health is answered with 302"),
        (None, "/health is not answered within 5 s"),
        (OSError("no"), "it cannot be reached"),
        (trio.BrokenResourceError(), "/health is not answered as HTTP has it"),
    ],
)
async def test_a_server_that_fails_checks_gets_no_requests_until_it_recovers(world, status, why, autojump_clock):
    """Not after one failure, but after so many in a row; the reason is told, and who waits goes on at once."""
    changes = []
    world.hear(heartbeat_interval=3600)
    await trio.sleep(25)
    world.fleet.table.changed.add(lambda: changes.append(trio.current_time()))
    world.status = status
    await trio.sleep(11)
    assert world.state() == "ready"
    await trio.sleep(30)
    assert world.state() == "unhealthy"
    assert f"worker w fails its health checks: {why}" in world.refusal()
    assert describe(world.fleet.table, world.fleet.table.get("w"))["failure"] == why
    world.hear(heartbeat_interval=3600)
    assert world.state() == "unhealthy", "whatever its beats say"
    changes.clear()
    world.status = 204
    await trio.sleep(11)
    assert (world.state(), bool(changes)) == ("ready", True)
    assert describe(world.fleet.table, world.fleet.table.get("w"))["failure"] is None


async def test_a_connection_that_failed_is_no_verdict_for_ever(world, autojump_clock):
    """A worker that could not be reached, and never beats again, is back once it answers."""
    world.hear()
    endpoint = world.fleet.table.endpoint_of(world.fleet.table.get("w"))
    endpoint.fail(trio.current_time())
    assert world.state() == "unhealthy"
    await trio.sleep(11)
    assert (world.state(), endpoint.avoid_until < trio.current_time()) == ("ready", True)


@pytest.mark.parametrize("status", [404, 401, 405])
async def test_a_server_without_the_route_is_judged_by_heartbeats(world, status, autojump_clock):
    """It is ready while it beats, and silent when it does not, as it would be without health checks."""
    world.status = status
    for _ in range(10):
        world.hear()
        await trio.sleep(80)
        assert world.state() == "ready"
    await trio.sleep(20)
    assert world.state() == "unhealthy"


async def test_managed_and_unready_workers_are_not_checked(world, autojump_clock):
    """Workers that were started here, and iChat's own that say themselves that they are not ready."""
    world.fleet.managed.expect("w", ["m"])
    world.hear()
    world.hear(worker_id="own", start_id="1", state="loading")
    await trio.sleep(30)
    assert world.asked == []
    world.hear(worker_id="foreign")
    world.status = 500
    await trio.sleep(60)
    assert world.state("foreign") == "unhealthy"
    world.hear(worker_id="foreign", start_id="1")
    assert world.state("foreign") == "ready", "another worker of that name"


async def test_a_check_of_an_old_address_is_ignored(world, autojump_clock):
    """A worker that registers with another address is judged anew, and an answer of the old one comes too late."""
    world.status = 500
    world.hear()
    await trio.sleep(60)
    assert world.state() == "unhealthy"
    world.status = lambda upstream: None if upstream.port == 1 else 200
    await trio.sleep(SETTINGS.interval_s - 1)  # the old one is being asked
    world.hear(port=2)
    assert world.state() == "ready"
    await trio.sleep(20)
    assert (world.state(), world.fleet.table.endpoint_of(world.fleet.table.get("w")).probe_failures) == ("ready", 0)


async def test_many_that_hang_are_asked_a_few_at_a_time(world, autojump_clock):
    """There is a bound to those that are asked at once, and everybody's turn comes."""
    busy, most = [0], [0]

    async def hang(upstream, target, headers):
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        try:
            await trio.sleep_forever()
        finally:
            busy[0] -= 1

    world.prober._ask = hang
    for number in range(100):
        world.hear(worker_id=f"w{number}", heartbeat_interval=3600)
    await trio.sleep(120)
    assert most == [client.ASKED_AT_ONCE_MAX]
    assert {world.state(f"w{number}") for number in range(100)} == {"unhealthy"}


async def test_routes_are_asked_where_they_say_how(nursery, autojump_clock):
    """With their own headers; one that fails gets no requests, the other of its model does; with none left it is 503."""
    world = World(configuration.parse(TWO_ROUTES, "test"))
    world.status = 500
    nursery.start_soon(world.prober.probe_forever)
    one, two = world.fleet.directory.availability("far").endpoints
    await trio.sleep(1)
    assert world.asked == [("one", "/ping", {b"x-key": b"1"})]
    await trio.sleep(30)
    assert world.fleet.directory.availability("far").endpoints == [two]
    assert "far" in result_of(world.fleet.directory.model_steps())
    two.health_failure = "it is not well"
    assert "the external route far fails its health checks: /ping is answered with 500" in world.refusal("far")
    assert "far" not in result_of(world.fleet.directory.model_steps())
    world.status = 200
    await trio.sleep(11)
    assert world.fleet.directory.availability("far").endpoints == [one]
    two.health_failure = ""
    world.status = 404
    await trio.sleep(60)
    assert list(world.fleet.directory.availability("far").endpoints) == [one, two]
    world.configure(interval_s=0)
    await trio.sleep(2)
    assert (one.probe_failures, world.fleet.directory._has_ill_routes) == (None, False)
    nursery.cancel_scope.cancel()


async def test_a_restart_keeps_servers_that_showed_the_token(world, autojump_clock):
    """If it has shown the token that is needed now; others, and iChat's own, must beat. What is written stays fresh."""
    for number, more in enumerate(({}, {}, {"start_id": "1"})):
        beat_ = Heartbeat(**{**FOREIGN, "worker_id": f"w{number}", **more})
        world.fleet.registry.restore(beat_, 3000.0, can_return=number != 1)
    assert {world.state(f"w{number}") for number in range(3)} == {"stale"}
    await trio.sleep(11)
    assert [world.state(f"w{number}") for number in range(3)] == ["ready", "stale", "stale"]
    versions = []
    for _ in range(3):
        versions.append(world.fleet.table.version)
        await trio.sleep(KEEP_S + 20)
    assert versions == sorted(set(versions))
    [age_s] = [age_s for beat_, age_s, _ in world.fleet.registry.snapshot() if beat_.worker_id == "w0"]
    assert age_s <= SETTINGS.interval_s
    world.fleet.table.require_reauthentication()
    await trio.sleep(60)
    assert world.state("w0") == "stale", "the token is another one now"
    await trio.sleep(FORGET_S)
    world.hear(worker_id="another")
    assert world.fleet.table.get("w0") is None


def test_a_check_is_well_by_2xx_and_unknown_by_4xx():
    """2xx is well, 4xx is no answer to the question, everything else is ill."""
    found = {status: read_status("/h", status) for status in (200, 299, 301, 400, 429, 500, 504)}
    assert [status for status, finding in found.items() if finding.is_well] == [200, 299]
    assert [status for status, finding in found.items() if finding == ProbeResult()] == [400, 429]
    assert found[301].why == "/h is answered with 301"


def test_older_state_files_count_as_without_a_token():
    """A file of a gateway that kept no token is one where nobody has shown it."""
    assert SavedRemoteWorker({}, 1.0).token == ""
    assert SavedState().heard == []


@pytest.mark.parametrize(
    "text",
    [
        '[health]\npath = "health"', '[health]\npath = "/a b"', '[health]\npath = ""', "[health]\ntimeout_s = 0",
        "[health]\nfailures_max = 0", "[health]\ninterval_s = -1", '[health]\npath = "/a#b"',
        '[[external_routes]]\nmodel_name = "m"\napi_base = "http://x"\nhealth_path = "http://y/health"',
    ],
)  # fmt: skip
def test_a_wrong_configuration(text):
    """Each says where it is wrong."""
    with pytest.raises(Exit, match=r"health"):
        configuration.parse(text, "test")


async def test_health_is_in_the_metrics():
    """Of those that are asked, and of nobody else."""
    fleet, metrics = known("m")
    for name in ("well", "ill", "own"):
        fleet.registry.record_heartbeat(Heartbeat(**{**FOREIGN, "worker_id": name}))
    assert "ichat_health_failed" not in own(metrics).text
    for name in ("well", "ill"):
        worker = fleet.table.get(name)
        fleet.probes.record(
            fleet.table.endpoint_of(worker), worker, name * (name == "ill"), is_well=name == "well", failures_max=1
        )
    now = own(metrics)
    assert {one["worker"]: now.get("ichat_health_failed", **one) for one in now.labels("ichat_health_failed")} == {
        "well": 0,
        "ill": 1,
    }


# Over sockets.


async def test_a_server_that_registers_once(serve, gateway_to, connect):
    """A plain server gets requests while its /health is well, none while it is not, and again when it is."""
    well = True

    async def reply(stream, head, body):
        if head.target != b"/health":
            await stream.send_all(plain(b'{"hello": 1}'))
        elif well:
            await stream.send_all(plain(b""))
        else:
            await stream.send_all(b"HTTP/1.1 307 no\r\nlocation: /v1/models\r\ncontent-length: 0\r\n\r\n")

    upstream, port = await serve(reply)
    gateway = await gateway_to({}, "[health]\ninterval_s = 0.05\n")
    await heartbeat(connect, gateway, port, heartbeat_interval=0.01)
    client = await connect(gateway)
    with trio.fail_after(LIMIT_S):
        while b"/health" not in {head.target for head, _ in upstream.requests} or (await client.ask())[0] != 200:
            await trio.sleep(0.01)
        well = False
        while b"its worker is unhealthy" not in (answer := await client.ask())[2]:
            await trio.sleep(0.01)
        assert (answer[0], code_of(answer[2])) == (503, "model_not_ready")
        assert b"/health" not in answer[2], "that is for operators"
        assert "/health is answered with 307" in json.loads((await client.get(b"/v1/admin/workers/w"))[2])["failure"]
        assert (await shown(connect, gateway)).get("ichat_health_failed", worker="w") == 1
        well = True
        while (await client.ask())[0] != 200:
            await trio.sleep(0.01)
    assert b"/v1/models" not in {head.target for head, _ in upstream.requests}


async def test_a_check_sends_a_whole_request_and_reads_the_status(serve):
    """A whole request, and only the status of the answer; what is no answer is an error of a kind that is expected."""

    async def reply(stream, head, body):
        if head.target == b"/close":
            return "close"
        answers = {b"/early": b"HTTP/1.1 103 x\r\n\r\nHTTP/1.1 200 x\r\n\r\n", b"/odd": b"odd\r\n\r\n"}
        await stream.send_all(answers.get(head.target, b"HTTP/1.1 500 x\r\ncontent-length: 99999999\r\n\r\n"))
        return None

    upstream, port = await serve(reply)
    there = Upstream("u", "127.0.0.1", port)
    assert await ask(there, "/early", []) == 200
    assert await ask(there, "/long", [(b"x-mine", b"1")]) == 500
    for target in ("/odd", "/close"):
        with pytest.raises(client.BROKEN):
            await ask(there, target, [])
    with pytest.raises(OSError, match="connect"):
        await ask(Upstream("u", "127.0.0.1", 1), "/", [])
    headers = dict(upstream.requests[1][0].headers)
    assert headers[b"host"] == b"127.0.0.1:%d" % port
    assert (headers[b"x-mine"], headers[b"connection"]) == (b"1", b"close")


async def test_an_encrypted_route_is_verified(nursery):
    """Its health is asked over https, with the authorities that it has; another's certificate is no answer."""
    authority = trustme.CA()
    ours, theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(ours)

    async def answer(stream):
        encrypted = trio.SSLStream(stream, ours, server_side=True, https_compatible=True)
        try:
            await encrypted.receive_some()
            await encrypted.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except trio.BrokenResourceError:
            pass

    listeners = await nursery.start(trio.serve_tcp, answer, 0)
    there = Upstream("u", "localhost", listeners[0].socket.getsockname()[1], theirs)
    with pytest.raises(client.BROKEN):
        await ask(there, "/health", [])
    authority.configure_trust(theirs)
    assert await ask(there, "/health", []) == 200
    nursery.cancel_scope.cancel()


# With whole programs.


@pytest.fixture
def foreign():
    """Return the port of a server that is none of iChat's, and what it was asked for."""
    asked = []

    class Plain(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_another_interval_is_taken_by_a_gateway_that_runs(gateway, foreign, tmp_path):
    """Who was not asked is asked as soon as `[health]` says so, and the plan names what has changed."""
    port, asked = foreign
    program = gateway("[health]\ninterval_s = 0\n", settings="watch_config = false\n")
    program.ask("/register", {**FOREIGN, "port": port, "heartbeat_interval": 0.01})
    program.until(lambda: program.state("w") == "unhealthy")
    assert "/health" not in asked
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("interval_s = 0", 'interval_s = 0.1\npath = "/well"'))
    plan = program.ask("/v1/admin/config/reload", {})[1]["plan"]
    assert {step["what"] for step in plan} == {"health.interval_s", "health.path"}
    program.wait_until_ready("w")
    assert "/well" in asked


@pytest.mark.parametrize("token", ["one-token-for-all-workers", "another-token-for-them"])
def test_a_killed_gateways_successor_knows_registered_servers(gateway, foreign, tmp_path, token):
    """A server that registered once is there after kill -9 of the gateway, unless workers need another token now."""
    text = '[health]\ninterval_s = 0.1\n[security]\njoin_token_env = "JOIN"\n'
    program = gateway(text, JOIN="one-token-for-all-workers")
    program.key = "one-token-for-all-workers"
    program.ask("/register", {**FOREIGN, "port": foreign[0], "heartbeat_interval": 0.01})
    program.key = None
    program.wait_until_ready("w")
    kept = tmp_path / "state/workers.json"
    program.until(lambda: kept.exists() and '"w"' in kept.read_text())
    program.process.kill()
    program.process.wait()
    count = len(foreign[1])
    again = gateway(text, JOIN=token)
    if token == "one-token-for-all-workers":
        again.wait_until_ready("w")
        assert len(foreign[1]) > count
    else:
        again.until(lambda: "the gateway listens" in again.text())
        assert again.state("w") == "stale"
        assert token not in kept.read_text()
