"""A group of workers around one gateway: who is shown as what, and who ends when another one does."""

import json
import socket
import time
import urllib.request

import attrs
import pytest
import trio
from support.peers import plain, until
from support.programs import LIMIT_S, Program, ichat

from ichat.protocol.messages import Heartbeat, PeerLoss
from ichat.roles.heartbeat_sender import HeartbeatSender


@pytest.fixture
def start(tmp_path):
    """Start processes that are gone when the test ends."""
    programs = []

    def run(command):
        program = Program(command, tmp_path / f"{len(programs)}.log")
        programs.append(program)
        return program

    yield run
    for program in programs:
        program.end()


@pytest.fixture
def start_group(start, tmp_path):
    """Start a gateway and the two workers of a group: `gateway, nodes = start_group(*more_flags)`."""

    def run(*more):
        path = tmp_path / "ichat.toml"
        path.write_text("[server_settings]\nport = 0\n")
        gateway = start(ichat("gateway", "-c", path)).wait_for_port()
        register = ("--gateway-address", f"http://127.0.0.1:{gateway.port}", *more)
        nodes = [
            start(
                ichat("worker", "-be", "fake", "--model", "/m", "-n", "m", "--port", "0", "--worker-id", f"node-{rank}",
                      "--group", "g", "--rank", rank, *register)
            )
            for rank in range(2)
        ]  # fmt: skip
        gateway.until(lambda: [gateway.state(f"node-{rank}") for rank in range(2)] == ["ready", "following"])
        return gateway, [node.wait_for_port() for node in nodes]

    return run


def wait_for_beats(gateway):
    """Wait until each worker has beaten again, so that each has been heard of since all were there."""
    first = {worker["worker_id"]: worker["heartbeat_age_s"] for worker in gateway.get("/v1/admin/workers")[1]["data"]}
    asked = time.monotonic()

    def have_beaten():
        at_least_s = time.monotonic() - asked  # between the two answers, however long each was on its way
        now = gateway.get("/v1/admin/workers")[1]["data"]
        return all(worker["heartbeat_age_s"] < first[worker["worker_id"]] + at_least_s for worker in now)

    gateway.until(have_beaten)


def answered_by(gateway):
    """Ask for the model, and give the worker that answered."""
    url, json_ = f"http://127.0.0.1:{gateway.port}/v1/chat/completions", {"content-type": "application/json"}
    request = urllib.request.Request(url, b'{"model": "m"}', json_)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return answer.headers["x-ichat-worker"]


def last_line(program):
    return program.text().splitlines()[-1]


def test_a_follower_follows_and_a_goodbye_ends_its_group(start_group):
    """It is well and gets no requests; told to stop it ends with 0, and the leader, which is of no use then, soon with 70."""
    gateway, (leader, follower) = start_group()
    shown = [gateway.get(f"/v1/admin/workers/node-{rank}")[1] for rank in range(2)]
    assert [one["group"] for one in shown] == [{"id": "g", "rank": rank, "size": 2} for rank in range(2)]
    assert [one["lost"] for one in shown] == [[], []]
    assert {answered_by(gateway) for _ in range(8)} == {"node-0"}
    assert [node.get("/health") for node in (leader, follower)] == [(200, {"status": "ok"})] * 2
    status, answer = follower.ask("/v1/chat/completions", {"model": "m"})
    assert (status, answer["error"]["code"]) == (503, "model_not_ready")
    assert "following" in answer["error"]["message"]
    wait_for_beats(gateway)
    assert follower.stop() == 0
    assert leader.process.wait(LIMIT_S) == 70
    assert last_line(leader) == "The engine died: node-1, another member of its group, has ended"
    states = {one["worker_id"]: one["state"] for one in gateway.get("/v1/admin/workers")[1]["data"]}
    assert states == {"node-0": "failed"}
    assert gateway.ask("/v1/chat/completions", {"model": "m"})[0] == 503


@pytest.mark.parametrize("lost", [0, 1])
def test_a_member_that_is_killed_ends_its_group(start_group, lost):
    """It says no good-bye: after three beats that are missing the other looks for itself, and ends with 70."""
    gateway, nodes = start_group("--heartbeat-interval", "0.5")
    other = nodes[1 - lost]
    wait_for_beats(gateway)
    nodes[lost].process.kill()
    assert other.process.wait(LIMIT_S) == 70
    assert last_line(other).startswith(
        f"The engine died: node-{lost}, another member of its group, has been silent for "
    )
    gateway.until(lambda: gateway.state(f"node-{1 - lost}") == "failed")
    status, answer = gateway.ask("/v1/chat/completions", {"model": "m"})
    assert status in (404, 503), answer


def test_a_member_that_is_killed_is_missed_soon_without_being_asked_to(start_group):
    """Members of a group beat every few seconds, whatever the interval of others is."""
    gateway, (leader, follower) = start_group("--heartbeat-interval", "3600")
    wait_for_beats(gateway)
    follower.process.kill()
    killed = time.monotonic()
    assert leader.process.wait(LIMIT_S) == 70
    assert time.monotonic() - killed > 3
    assert "node-1, another member of its group, has been silent for " in last_line(leader)


# Whom the worker believes.

BEAT = Heartbeat("node-0", "m", "127.0.0.1", 1, heartbeat_interval=3600.0)


class Told:
    """A reporter, with what it said was lost."""

    def __init__(self, address="http://127.0.0.1:1"):
        self.losses = []
        self.reporter = HeartbeatSender(
            address, ca_file=None, host="127.0.0.1", now=lambda: BEAT, lost=self.losses.append
        )

    async def believe(self, port, host="127.0.0.1", *, is_certain=False):
        """Tell of a loss; give how many losses were believed so far."""
        lost = PeerLoss("node-1", "has been silent for 9 s", host, port, is_certain=is_certain)
        with trio.fail_after(LIMIT_S):
            await self.reporter._confirm_loss(lost)
        return len(self.losses)


SENTENCE = "node-1, another member of its group, has been silent for 9 s"


@pytest.fixture
def closed_port():
    """Return a port that is taken and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


SELF = b"x-ichat-worker: node-1\r\n"


@pytest.mark.parametrize("status", [b"200 OK", b"503 Service Unavailable"])
async def test_a_member_that_answers_is_not_lost(serve, status):
    """The network may be cut between it and the gateway alone: it is there as often as it answers, well or not."""

    async def answer(stream, head, body):
        await stream.send_all(b"HTTP/1.1 %b\r\n%bcontent-length: 0\r\n\r\n" % (status, SELF))

    member, port = await serve(answer)
    told = Told()
    for _ in range(3):
        assert await told.believe(port) == 0
    assert [head.target for head, _ in member.requests] == [b"/health"] * 3


@pytest.mark.parametrize("header", [b"", b"x-ichat-worker: node-7\r\n"])
async def test_another_program_on_a_members_port_is_not_the_member(serve, header):
    """Its port may be another program's by now, or another worker's."""

    async def answer(stream, head, body):
        await stream.send_all(plain(b"{}", header))

    _, port = await serve(answer)
    told = Told()
    assert [await told.believe(port), await told.believe(port)] == [0, 1]


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_a_member_is_asked_wherever_it_is(nursery, host):
    """Addresses of both families, and names."""

    async def answer(stream):
        await stream.receive_some()
        await stream.send_all(plain(b"{}", SELF))

    listeners = await nursery.start(trio.serve_tcp, answer, 0)
    ports = {listener.socket.family: listener.socket.getsockname()[1] for listener in listeners}
    told = Told()
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    for _ in range(3):
        assert await told.believe(ports[family], host) == 0


async def test_a_member_that_cannot_be_reached_is_lost_the_second_time(closed_port):
    """Once may be chance."""
    told = Told()
    assert [await told.believe(closed_port), await told.believe(closed_port)] == [0, 1]
    assert told.losses == [SENTENCE]


async def test_a_member_that_accepts_and_never_answers_is_lost(serve, autojump_clock):
    """A process that hangs takes connections as well: it has so long to answer, and no longer."""

    async def nothing(stream, head, body):
        await trio.sleep_forever()

    _, port = await serve(nothing)
    told = Told()
    assert [await told.believe(port), await told.believe(port)] == [0, 1]


async def test_a_certain_loss_needs_no_question(serve):
    """It is believed at once, and nobody is asked."""

    async def answer(stream, head, body):
        await stream.send_all(plain(b"{}"))

    member, port = await serve(answer)
    told = Told()
    assert await told.believe(port, is_certain=True) == 1
    assert told.losses == [SENTENCE]
    assert member.connections == 0


@pytest.fixture
async def gateway_with(serve):
    """Start a gateway that answers beats with these losses, one after the other, and then with none."""

    async def start(*losses):
        left = [
            loss if isinstance(loss, bytes) else json.dumps({"lost": [loss] if loss else []}).encode()
            for loss in losses
        ]

        async def take(stream, head, body):
            await stream.send_all(plain(left.pop(0) if left else b'{"lost": []}'))

        gateway, port = await serve(take)
        return gateway, Told(f"http://127.0.0.1:{port}")

    return start


def silent(port, **more):
    return {**attrs.asdict(PeerLoss("node-1", "has been silent for 9 s", "127.0.0.1", port, is_certain=False)), **more}


async def test_the_second_question_follows_soon(gateway_with, closed_port, nursery):
    """It does not wait for the next interval, which may be long."""
    gateway, told = await gateway_with(silent(closed_port), silent(closed_port))
    nursery.start_soon(told.reporter.send_forever)
    began = trio.current_time()
    await until(lambda: told.losses)
    assert trio.current_time() - began >= 0.1
    assert told.losses == [SENTENCE]
    assert len(gateway.requests) == 2


async def test_a_member_that_is_heard_of_again_is_asked_anew(gateway_with, closed_port):
    """What was counted against it is forgotten."""
    lost = silent(closed_port)
    _, told = await gateway_with(lost, None, lost, lost)
    async with told.reporter.client() as gateway:
        believed = []
        for _ in range(4):
            assert await told.reporter._send(gateway, BEAT) is None
            believed.append(len(told.losses))
    assert believed == [0, 0, 0, 1]


async def test_a_member_that_says_goodbye_believes_no_loss(gateway_with):
    """A group that ends together is not broken."""
    gateway, told = await gateway_with(silent(1, is_certain=True))
    await told.reporter.send_goodbye()
    assert [json.loads(body)["state"] for _, body in gateway.requests] == ["gone"]
    assert told.losses == []


@pytest.mark.parametrize(
    "answer", [b"", b"no JSON", b"[]", b'{"lost": []}', b'{"lost": {"worker_id": "x"}}', b'{"lost": 5}', b"{}"]
)
async def test_an_answer_of_another_form_is_no_loss(gateway_with, answer):
    """The beat was taken, and that is all that is known."""
    _, told = await gateway_with(answer)
    async with told.reporter.client() as gateway:
        assert await told.reporter._send(gateway, BEAT) is None
    assert told.losses == []


@pytest.mark.parametrize(("host", "losses"), [("nobody.invalid", 1), ("fe80::1%eth0", 1), ("::::", 0)])
async def test_a_host_that_leads_nowhere_is_no_failure(host, losses, autojump_clock):
    """A gateway passes on whatever host a member gave; of one that is no address at all, nothing is believed."""
    told = Told()
    assert [await told.believe(1, host), await told.believe(1, host)] == [0, losses]
