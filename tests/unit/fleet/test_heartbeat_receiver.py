"""What the gateway makes of heartbeats, whole and short: what it checks again, what not, and what it answers."""

import json

import attrs
import pytest
import trio

from ichat.config.schema import Config, Limits, Security
from ichat.errors import ApiError
from ichat.fleet import heartbeats
from ichat.fleet.fleet import Fleet
from ichat.fleet.heartbeats import HOST_CHECK_S, HeartbeatReceiver, interval_of
from ichat.protocol.messages import STATUS, Heartbeat, ShortHeartbeat, shortened
from ichat.security import lookups
from ichat.security.auth import Auth, Caller

HERE = "10.0.0.1"
WHOLE = {
    "worker_id": "w", "model_name": "m", "host": HERE, "port": 9, "start_id": "1", "registration": "r1",
    "args": {"a": [1, 2.5, None, "é"]}, "heartbeat_interval": 3.0, "progress": {"steps": 1},
}  # fmt: skip
SHORT = {"worker_id": "w", "registration": "r1", "state": "ready"}
OLD = {name: value for name, value in WHOLE.items() if name != "registration"}


def caller(address=HERE, **more):
    return Caller("worker", address, is_local=False, **more)


class Site:
    """A receiver with its fleet, and what it has asked for."""

    def __init__(self, per_second_max=500, networks=()):
        self.fleet = Fleet({}, trio.current_time, 8)
        self.auth = Auth(Security(worker_networks=list(networks)))
        self.moved = 0
        self.receiver = HeartbeatReceiver(
            self.fleet.registry, self.fleet.table, self.auth, Limits(heartbeats_per_second_max=per_second_max),
            gateway_id="g",
        )  # fmt: skip
        self.receiver.moved.add(self._move)

    def _move(self):
        self.moved += 1

    async def send(self, heartbeat, sender=None, **more):
        """Return the answer to a heartbeat, or the status and code of the refusal."""
        try:
            self.auth.check("join", sender or caller())  # as the route does
            return json.loads(await self.receiver.receive(json.dumps(heartbeat | more).encode(), sender or caller()))
        except ApiError as error:
            return error.status, error.code

    def known(self, worker_id="w"):
        worker = self.fleet.table.get(worker_id)
        return worker and worker.heartbeat


@pytest.fixture
def site():
    return Site()


@pytest.fixture
def whole_reads(monkeypatch):
    """Count how often a heartbeat is read as a whole."""
    read = []
    parse = heartbeats.parse_heartbeat

    def counting(sent):
        read.append(sent["worker_id"])
        return parse(sent)

    monkeypatch.setattr(heartbeats, "parse_heartbeat", counting)
    return read


async def test_a_short_heartbeat_changes_the_status_alone(site, autojump_clock):
    """The registration stays what the whole one said; what is left out of the status is as in a whole one."""
    answer = await site.send(WHOLE, state="loading", phase="weights")
    assert (answer["status"], answer["accepts_short"]) == ("registered", True)
    before = site.known()
    answer = await site.send(SHORT, progress={"running": 2, "steps": 7}, machine={"id": "a", "name": "b"})
    assert answer == {
        "status": "ok", "gateway_id": "g", "heartbeat_interval": 3.0, "lost": [], "wants_machine": False,
        "accepts_short": True, "ends": False,
    }  # fmt: skip
    status = {"state": "ready", "phase": "", "progress": {"running": 2, "steps": 7}}
    assert site.known() == attrs.evolve(before, **status)
    assert site.fleet.table.get("w").machine.name == "b"
    assert site.moved == 1


@pytest.mark.parametrize(
    ("first", "short", "refusal"),
    [
        (None, {}, (404, "registration_not_found")),
        (WHOLE, {"registration": "r2"}, (404, "registration_not_found")),
        (WHOLE, {"registration": ""}, (404, "registration_not_found")),
        (WHOLE, {"worker_id": "other"}, (404, "registration_not_found")),
        (OLD, {}, (404, "registration_not_found")),
        (OLD, {"registration": ""}, (404, "registration_not_found")),
        (WHOLE, {"registration": 5}, (400, "bad_request")),
        (WHOLE, {"state": "better"}, (400, "bad_request")),
        (WHOLE, {"progress": {"steps": -1}}, (400, "bad_request")),
        (WHOLE, {"phase": "\n"}, (400, "bad_request")),
        (WHOLE, {"worker_id": ["w"]}, (400, "bad_request")),
    ],
)
async def test_a_short_heartbeat_that_is_refused(site, first, short, refusal):
    """404 asks for a whole one; nothing is recorded."""
    if first:
        await site.send(first)
    before = site.known()
    assert await site.send(SHORT | {"state": "draining"}, **short) == refusal
    assert site.known() is before


@pytest.mark.parametrize("whole", [WHOLE, OLD])
async def test_a_whole_heartbeat_is_read_as_a_whole_once(site, whole_reads, whole):
    """Later ones with the same registration change the status, and are checked; with another one all is read again."""
    await site.send(whole)
    for steps in range(3):
        assert (await site.send(whole, progress={"steps": steps}, state="ready"))["status"] == "ok"
        assert site.known().progress == {"steps": steps}
    assert whole_reads == ["w"]
    assert await site.send(whole, progress={"steps": "x"}) == (400, "bad_request")
    assert await site.send(whole, state="gone!") == (400, "bad_request")
    others = (
        {"port": 10},
        {"args": {"a": [1, 2, None, "é"]}},
        {"args": {"a": [1, 2.5, False, "é"]}},
        {"start_id": "2"},
    )
    for count, more in enumerate(others, 2):
        await site.send(whole, **more)
        assert len(whole_reads) == count
        told = attrs.asdict(site.known()) | {"args": site.fleet.table.get("w").args.unpack()}
        assert {name: told[name] for name in more} == more
    assert await site.send(whole, port=0) == (400, "bad_request")


async def test_both_forms_come_to_the_same(site):
    """A status in a short heartbeat is recorded as the same status in a whole one."""
    other = Site()
    statuses = (
        {"state": "loading", "phase": "p"}, {"state": "ready", "progress": {"running": 1, "kv_use": 0.5, "steps": None}},
        {"state": "draining", "failure": "It broke."}, {"state": "following", "machine": {"id": "a", "name": "b"}},
    )  # fmt: skip
    await site.send(WHOLE)
    for status in statuses:
        told = {name: value for name, value in WHOLE.items() if name not in STATUS} | status
        await other.send(told)
        await site.send({"worker_id": "w", "registration": "r1"}, **status)
        assert site.known() == other.known()


def test_both_forms_have_the_same_status():
    """The fields of a status are those of a whole heartbeat, with the same types and defaults."""
    whole, short = attrs.fields_dict(Heartbeat), attrs.fields_dict(ShortHeartbeat)
    assert set(short) == {"worker_id", "registration", *STATUS}
    for name in STATUS:
        assert (whole[name].type, whole[name].default) == (short[name].type, short[name].default)


async def test_a_registration_that_is_nested_too_deep_for_a_digest_is_read_each_time(site, whole_reads, monkeypatch):
    """What cannot be compared is never taken for the same."""

    def refuse(*_):
        raise ValueError("object too deeply nested to marshal")

    monkeypatch.setattr(heartbeats.marshal, "dumps", refuse)
    for _ in range(3):
        await site.send(WHOLE)
    assert len(whole_reads) == 3
    assert (await site.send(SHORT))["status"] == "ok"


# Who may send.


@pytest.mark.parametrize("sent", [WHOLE, SHORT, OLD])
async def test_a_heartbeat_from_elsewhere_changes_no_worker(site, sent):
    """Neither form is taken from another address than the worker's, nor for a worker that the gateway has started."""
    await site.send(OLD if sent is OLD else WHOLE)
    assert await site.send(sent, caller("10.0.0.2")) == (403, "forbidden")
    assert await site.send(sent, caller(is_relayed=True)) == (403, "forbidden")
    assert await site.send(sent, Caller("anonymous", "10.0.0.2", is_local=False)) == (401, "invalid_api_key")
    assert (await site.send(sent))["status"] == "ok"
    site.fleet.managed.expect("n", ["m"])
    by_socket = Caller("worker", "", is_local=False, is_managed_worker=True)
    assert (await site.send(WHOLE, by_socket, worker_id="n"))["status"] == "ok"
    assert (await site.send(SHORT, by_socket, worker_id="n"))["status"] == "ok"
    assert await site.send(sent, worker_id="n") == (403, "forbidden")


@pytest.mark.parametrize("sent", [WHOLE, OLD])
async def test_a_late_heartbeat_of_a_removed_worker_makes_no_worker(site, sent):
    """The gateway's own workers may send before their records are there, too: they send again soon."""
    by_socket = Caller("worker", "", is_local=False, is_managed_worker=True)
    refused = (404, "not_found")
    assert await site.send(sent, by_socket) == refused
    record = site.fleet.managed.expect("w", ["m"])
    assert (await site.send(sent, by_socket))["status"] == "ok"
    site.fleet.table.remove(record)
    assert await site.send(sent, by_socket) == refused
    assert await site.send(sent, by_socket, state="gone") == refused
    assert not len(site.fleet.table)


async def test_a_name_is_looked_up_once_a_minute(autojump_clock, monkeypatch):
    """It is looked up again after that, and for another sender; where it leads elsewhere it is refused."""
    site, found, asked = Site(), [HERE], []

    async def resolve(host, _):
        asked.append(host)
        return list(found)

    monkeypatch.setattr(lookups, "resolve", resolve)
    for sent in (OLD, OLD, WHOLE, WHOLE, SHORT):
        assert (await site.send(sent | {"host": "node"} if "host" in sent else sent))["status"] in ("registered", "ok")
        assert site.known().host == HERE
    assert len(asked) == 1
    await trio.sleep(HOST_CHECK_S + 1)
    for _ in range(3):
        assert (await site.send(SHORT))["status"] == "ok"
    assert len(asked) == 2
    assert await site.send(SHORT, caller("10.0.0.2")) == (403, "forbidden")
    assert len(asked) == 3
    site.auth.replace(Auth(Security()))
    assert (await site.send(SHORT))["status"] == "ok"
    assert len(asked) == 3
    found[:] = ["10.0.0.3"]
    await trio.sleep(HOST_CHECK_S + 1)
    assert await site.send(SHORT) == (403, "forbidden")


# Ends.


@pytest.mark.parametrize("goodbye", [WHOLE, SHORT, OLD])
async def test_a_goodbye_forgets_the_worker(site, goodbye):
    """Its registration is forgotten with it."""
    await site.send(OLD if goodbye is OLD else WHOLE)
    assert (await site.send(goodbye, state="gone"))["status"] == "ok"
    assert site.known() is None
    assert await site.send(SHORT) == (404, "registration_not_found")


async def test_a_goodbye_of_an_earlier_start_does_nothing(site):
    """However often it comes."""
    await site.send(WHOLE)
    await site.send(WHOLE, start_id="2", registration="r2")
    for _ in range(3):
        await site.send(WHOLE, state="gone")
        assert site.known().start_id == "2"
    assert (await site.send(SHORT, registration="r2"))["status"] == "ok"
    assert await site.send(SHORT) == (404, "registration_not_found")


async def test_a_short_heartbeats_answer_has_the_groups_losses(site):
    """As the answer to a whole one does."""
    for rank in (0, 1):
        await site.send(
            WHOLE,
            worker_id=f"n{rank}",
            group={"id": "g", "rank": rank, "size": 2},
            state="ready" if rank else "loading",
        )
    await site.send({"worker_id": "n1", "registration": "r1", "state": "gone"})
    answer = await site.send({"worker_id": "n0", "registration": "r1"})
    assert [one["worker_id"] for one in answer["lost"]] == ["n1"]


async def test_a_returning_worker_wakes_the_queues(site):
    """One that failed, and sends heartbeats again, is reached again."""
    await site.send(WHOLE)
    await site.send(WHOLE, state="gone", failure="It broke.")
    moved = site.moved
    assert (await site.send(SHORT))["status"] == "ok"
    assert site.moved == moved + 1


# How often.


def test_the_interval_grows_with_the_workers():
    """It is the worker's own while all of them send few enough a second, and never more than an hour."""
    assert interval_of(3, 10, 500) == 3
    assert interval_of(3, 1500, 500) == 3
    assert interval_of(3, 10_000, 500) == 20
    assert interval_of(60, 10_000, 500) == 60
    assert interval_of(3, 10_000_000, 1) == 3600


async def test_a_worker_is_not_silent_before_the_interval_it_was_given(autojump_clock):
    """Workers that obey are told a longer one where there are many; the others, and groups, keep theirs."""
    site = Site(per_second_max=1)
    for number in range(30):
        await site.send(OLD, worker_id=f"o{number}")
    group = {"id": "g", "rank": 0, "size": 1}
    new, old, member = [
        (await site.send(sent, worker_id=name, **more))["heartbeat_interval"]
        for name, sent, more in (("new", WHOLE, {}), ("o0", OLD, {}), ("member", WHOLE, {"group": group}))
    ]
    assert (new, old, member) == (30, 3, 3)
    await trio.sleep(80)
    states = {name: site.fleet.table.state(site.fleet.table.get(name)) for name in ("new", "o0", "member")}
    assert states == {"new": "ready", "o0": "unhealthy", "member": "unhealthy"}
    site.receiver.reconfigure(Config(limits=Limits(heartbeats_per_second_max=100)))
    assert (await site.send(SHORT, worker_id="new"))["heartbeat_interval"] == 3
    await trio.sleep(10)
    assert site.fleet.table.state(site.fleet.table.get("new")) == "unhealthy"


def test_a_short_heartbeat_has_less_than_350_bytes():
    """Also with a long name and large numbers."""
    progress = {"running": 4096, "waiting": 100_000, "kv_use": 1 / 3, "steps": 10**12, "tokens_out": 10**14}
    progress |= {"prompt_tokens": 10**12, "cached_tokens": 10**12}
    name = "deployment-llama-70b-instruct-5d59d67564-x7k2p"  # a pod
    heartbeat = Heartbeat(f"{name}-1234567-abcd", "m", "h", 1, progress=progress, phase="ready", registration="0" * 16)
    assert len(json.dumps(shortened(heartbeat))) < 350
