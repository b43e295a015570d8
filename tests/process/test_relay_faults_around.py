"""What clients notice of faults around relays: of a worker, a relay that retires, and an owner in the middle of work.

These are more rows of the table of `test_relay_faults.py`.
"""

import signal

import psutil
import pytest
from support.deployments import worker
from support.peers import until
from support.programs import ROOT, alive, ichat, kept_command
from support.relay_faults import FEW, MANY, Hurt, live_through
from support.relay_site import Result, ask, post, stop_and_list

WAITING = 6
BODY_MAX, LARGE = 4096, 5000
OWNER_WAIT_S, WATCHDOG_S = 1.0, 4.0
WATCHED = {"owner_wait_s": OWNER_WAIT_S}
BEFORE_A_QUEUE = 150, 50
TIMES = 10
"""Of the slow runs."""


class Request:
    """A request on a connection of its own, for a row of the table."""

    def __init__(self, site, **body):
        self._site, self._body = site, body
        self.result = Result()
        self.data = b""
        """A stream that it has got."""

    async def send(self):
        async with await self._site.connect(self.result) as stream:
            await ask(stream, self._body, self.result)

    async def read_stream(self):
        self._body["stream"] = True
        async with await self._site.connect(self.result) as stream:
            await stream.send_all(post(self._body))
            while b"[DONE]" not in self.data and (more := await stream.receive_some()):
                self.data += more


async def worker_killed(site, load):
    """SIGKILL for a worker: its streams end with an error, its requests get 502, and it is started again."""
    worker_pid = await site.until_ready("w-0")
    stream = Request(site, model="w", events=10**6, gap_s=0.02)
    plain = Request(site, model="w", until_there="/none")
    load.start_soon(stream.read_stream)
    load.start_soon(plain.send)
    await until(lambda: b"delta" in stream.data)

    async def has_both():
        return (await site.get("/v1/admin/workers/w-0"))["in_flight"] == 2

    await site.until(has_both)
    hurt = Hurt(has_new_worker=True)
    psutil.Process(worker_pid).kill()
    await until(lambda: plain.result.status)
    assert (plain.result.status, plain.result.code) == (502, "upstream_failed")
    await until(lambda: b'"error"' in stream.data)

    async def is_back():
        return await site.until_ready("w-0") != worker_pid

    await site.until(is_back)
    again = Request(site, model="w")
    await again.send()
    assert again.result.status == 200
    assert b"[DONE]" not in stream.data
    return hurt


async def retiring_relay_killed(site, load):
    """SIGKILL for a relay that retires: its own connections break, and it is not started again."""
    victim = site.relays()[1]
    victim.send_signal(signal.SIGTERM)
    await until(lambda: site.starts(1) == 2)
    await load.more(5)
    hurt = Hurt(stop_and_list(victim))
    victim.send_signal(signal.SIGKILL)
    await until(lambda: not alive([victim]))
    await load.more(5)
    assert (site.starts(1), site.starts(2)) == (2, 1)
    return hurt


async def owner_killed_with_a_queue(site, load):
    """SIGKILL for the process that decides while requests wait for a place: they are served, in their order."""
    first = Request(site, model="q", who="first")
    load.start_soon(first.read_stream)
    await until(lambda: first.data)
    waiting = [Request(site, model="q", who=f"{number}") for number in range(WAITING)]
    for number, one in enumerate(waiting):
        load.start_soon(one.send)
        await until_waiting(site, number + 1)
    hurt = Hurt()
    await site.kill_owner()
    await begin_some(load)
    await site.start_owner()
    await until_waiting(site, WAITING)

    async def are_served():
        await until(lambda: all(one.result.is_whole for one in waiting))
        assert {one.result.status for one in waiting} == {200}
        assert [who for who in site.upstream.order if who] == ["first", *(f"{number}" for number in range(WAITING))]

    hurt.check_at_end = are_served
    return hurt


async def until_waiting(site, count):
    """Wait until this number of requests waits for a place."""

    async def do_wait():
        return sum(one["phase"] == "queued" for one in (await site.get("/v1/admin/requests"))["requests"]) == count

    await site.until(do_wait)


async def begin_some(load):
    """Wait until a few more requests have begun."""
    before = len(load.results)
    await until(lambda: len(load.results) > before + 3)


async def owner_killed_in_a_load(site, load):
    """SIGKILL for the process that decides while a model loads: it is loaded once, and the request gets its answer."""
    request = Request(site, model="cold")
    load.start_soon(request.send)
    shown = {}

    async def has_process():
        shown.update(await site.get("/v1/admin/workers/cold-0"))
        return shown.get("pid")

    await site.until(has_process)
    hurt = Hurt()
    await site.kill_owner()
    await begin_some(load)
    await site.start_owner()
    await until(lambda: request.result.is_whole)
    assert request.result.status == 200
    assert await site.until_ready("cold-0") == shown["pid"]
    return hurt


async def owner_killed_in_a_reload(site, load):
    """SIGKILL for the process that decides while a relay has not prepared the new settings: all relays get them."""
    relays = site.relays()
    hurt = Hurt()
    relays[1].send_signal(signal.SIGSTOP)
    site.configure(f"[limits]\nbody_bytes_max = {BODY_MAX}\n")
    site.program.process.send_signal(signal.SIGHUP)
    await begin_some(load)  # the owner waits for the stopped relay by then
    await site.kill_owner()
    relays[1].send_signal(signal.SIGCONT)
    await site.start_owner()
    await load.more(5)
    assert site.relays() == relays
    for _ in range(4 * len(relays)):
        large = Request(site, model="m", text="x" * LARGE)
        await large.send()
        assert large.result.status == 413
    return hurt


ROUTE_WITH_QUEUE = (("q", "max_in_flight = 1"),)
COLD = worker("cold", 'load = "on_demand"\nload_s = 3\n')
ROWS = {
    worker_killed: {},
    retiring_relay_killed: {},
    owner_killed_with_a_queue: {"others": ROUTE_WITH_QUEUE},
    owner_killed_in_a_load: {"text": COLD},
    owner_killed_in_a_reload: {},
}
"""The rows, with more of their configurations."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
async def test_a_fault_costs_no_more_than_the_table_says(gateway, row):
    """Streams and requests are whole but for those of the killed process, and nothing stays in flight."""
    await live_through(gateway, row, FEW, **ROWS[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
async def test_faults_around_relays_under_load(gateway, tls, row, number, has_tls):
    """The same under 200 streams; a queue is shown behind 150 only, since 200 requests are shown."""
    load = BEFORE_A_QUEUE if row is owner_killed_with_a_queue else MANY
    await live_through(gateway, row, load, *([tls] if has_tls else []), **ROWS[row])


# A keeper.


@pytest.fixture
def kept_gateway(start, tmp_path):
    """Start a keeper with a gateway, as the fixture `gateway` starts a gateway."""

    def run(text, port, settings):
        path = tmp_path / "ichat.toml"
        path.write_text(
            f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\n{settings}[timeouts]\n{text}'
        )
        return start(
            kept_command(WATCHDOG_S, ichat("gateway", "-c", path)),
            PYTHONPATH=f"{ROOT}:{ROOT}/tests/support/fake_engine",
        ).wait_for_port()

    return run


async def owner_stopped_until_its_watchdog(site, load):
    """SIGSTOP for the process that decides, for good: 503 after `owner_wait_s`; it is killed, and requests are served."""
    relays = site.relays()
    (owner,) = [one for one in site.program.family.children() if "relay" not in one.cmdline()]
    hurt = Hurt(may_fail=lambda result: result.code == "owner_away" and result.took_s > OWNER_WAIT_S / 2)
    owner.send_signal(signal.SIGSTOP)
    await until(lambda: any(one.code == "owner_away" for one in load.failed))
    await until(lambda: " listens on " in site.program.text().partition("the gateway was silent")[2])
    await load.more(5)
    assert site.relays() == relays
    return hurt


async def test_a_watchdog_kills_an_owner_that_stands_still_and_no_stream_breaks(kept_gateway):
    """Its keeper does what systemd does elsewhere."""
    await live_through(kept_gateway, owner_stopped_until_its_watchdog, FEW, timeouts=WATCHED)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
async def test_watchdogs_under_load(kept_gateway, number):
    """The same under 200 streams."""
    await live_through(kept_gateway, owner_stopped_until_its_watchdog, MANY, timeouts=WATCHED)
