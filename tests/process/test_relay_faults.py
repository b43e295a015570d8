"""What clients notice when processes of a gateway with relays are killed or stopped: by their own counts.

Each row of the table is a fault under streams, short requests on new and on kept connections, and a managed worker.
"""

import signal
import time
from functools import partial

import psutil
import pytest
import trio
from support.deployments import free_port, worker
from support.peers import until
from support.programs import alive
from support.relay_faults import FEW, MANY, RELAYS, Hurt, live_through
from support.relay_site import Result, ask, site_of, stop_and_list

from ichat.relays.values import UNREAD_BYTES_MAX

SILENT_S = 2.0
OWNER_WAIT_S, OWNERLESS_S, EARLY_S = 1.0, 3.0, 1.0
CLIENTS = 8
TIMES = 10
"""Of the slow runs."""


async def relay_killed(site, load):
    """SIGKILL for one of two relays: its own streams and requests break, and it is back."""
    victim = site.relays()[1]
    hurt = Hurt(stop_and_list(victim))
    victim.send_signal(signal.SIGKILL)
    await until(lambda: site.starts(1) == 2)
    return hurt


async def relay_stopped(site, load):
    """SIGSTOP for one of two relays: it is killed after its bound, and others go on meanwhile."""
    victim = site.relays()[1]
    hurt = Hurt(stop_and_list(victim))
    before = len(load.results)
    await until(lambda: len(load.results) > before + 8)
    assert site.starts(1) == 1 or time.monotonic() - hurt.began_at > SILENT_S
    await until(lambda: site.starts(1) == 2)
    hurt.ports |= {one.port for one in load.failed if one.began_at < hurt.began_at}
    return hurt


async def all_relays_killed(site, load):
    """SIGKILL for all relays: what they have breaks; the listener holds new connections until they are back."""
    victims = site.relays()
    hurt = Hurt()
    for one in victims.values():
        hurt.ports |= stop_and_list(one)
    for one in victims.values():
        one.send_signal(signal.SIGKILL)
    await site.until_started(RELAYS, 2)
    return hurt


async def owner_killed(site, load):
    """SIGKILL for the process that decides, which is started again: requests wait, and nothing breaks."""
    relays = {one.pid for one in site.relays().values()}
    worker_pid = await site.until_ready("s-0")
    hurt = Hurt()
    await site.kill_owner()
    before = len(load.results)
    await until(lambda: len(load.results) > before + 3)
    await site.start_owner()
    await load.more(5)
    assert {one.pid for one in site.relays().values()} == relays
    assert await site.until_ready("s-0") == worker_pid
    return hurt


async def owner_and_relay_killed(site, load):
    """SIGKILL for the process that decides and one of its relays: that relay's connections break, and it is back."""
    victim = site.relays()[1]
    hurt = Hurt(stop_and_list(victim))
    await site.kill_owner()
    victim.send_signal(signal.SIGKILL)
    await site.start_owner()
    await until(lambda: site.starts(1) >= 1)
    return hurt


async def owner_lost(site, load):
    """SIGKILL for the process that decides, for good: 503 after `owner_wait_s`; the port closes; streams go on.

    The worker that shall stop with its gateway ends after the last relay.
    """
    stopped = psutil.Process(await site.until_ready("s-0"))

    async def has_stopped():
        await until(lambda: not alive([stopped]))

    hurt = Hurt(is_over=True, check_at_end=has_stopped)
    ends_at = hurt.began_at + OWNERLESS_S

    def may_fail(result):
        waited = result.began_at + result.took_s - max(result.began_at, hurt.began_at)
        is_refused = (result.status, result.code) == (503, "owner_away") and waited > OWNER_WAIT_S / 2
        return is_refused or (result.status == 0 and result.began_at + result.took_s > ends_at - EARLY_S)

    hurt.may_fail = may_fail
    await site.kill_owner()
    await until(lambda: any(one.code == "owner_away" for one in load.failed))
    await until(lambda: any(one.port == 0 for one in load.failed))
    assert not any(one.is_whole or one.code for one in load.streams)
    assert alive([stopped])
    return hurt


async def owner_stopped(site, load):
    """SIGSTOP for the process that decides, for longer than a relay may be silent: requests wait, none is killed."""
    relays = {one.pid for one in site.relays().values()}
    hurt = Hurt()
    site.program.process.send_signal(signal.SIGSTOP)
    await until(lambda: time.monotonic() > hurt.began_at + SILENT_S + 1)
    site.program.process.send_signal(signal.SIGCONT)
    await load.more(5)
    assert {one.pid for one in site.relays().values()} == relays
    return hurt


async def owner_stopped_for_long(site, load):
    """SIGSTOP for the process that decides, for longer than requests wait: 503, and afterwards they are served."""
    hurt = Hurt(may_fail=lambda result: result.code == "owner_away" and result.took_s > OWNER_WAIT_S / 2)
    site.program.process.send_signal(signal.SIGSTOP)
    await until(lambda: any(one.code == "owner_away" for one in load.failed))
    site.program.process.send_signal(signal.SIGCONT)
    return hurt


async def all_killed(site, load):
    """SIGKILL for everything: streams break, and requests are refused until the next start."""
    hurt = Hurt(may_fail=lambda result: result.status == 0 and result.began_at < started_at)
    started_at = float("inf")
    victims = site.relays()
    for one in victims.values():
        hurt.ports |= stop_and_list(one)
    await site.kill_owner()
    for one in victims.values():
        one.send_signal(signal.SIGKILL)
    await until(lambda: any(one.port == 0 for one in load.failed))
    await site.start_owner()
    await until(lambda: site.starts(1) >= 1)
    started_at = time.monotonic()
    await site.until_started(RELAYS)
    return hurt


RELAY_ROWS = (relay_killed, relay_stopped, all_relays_killed)
OWNER_ROWS = (owner_killed, owner_and_relay_killed, owner_lost, owner_stopped, owner_stopped_for_long, all_killed)
ROWS = RELAY_ROWS + OWNER_ROWS
BOUNDS = {
    relay_stopped: {"relay_silent_s": SILENT_S},
    owner_stopped: {"relay_silent_s": SILENT_S},
    owner_lost: {"owner_wait_s": OWNER_WAIT_S, "ownerless_s": OWNERLESS_S},
    owner_stopped_for_long: {"owner_wait_s": OWNER_WAIT_S},
}
"""The timeouts that a row waits for."""
WORKERS = dict.fromkeys((owner_killed, owner_lost), worker("s"))
"""Of a row that says what becomes of a worker which shall stop with its gateway."""


async def live(gateway, row, load_of, *tls):
    await live_through(gateway, row, load_of, *tls, timeouts=BOUNDS.get(row), text=WORKERS.get(row, ""))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
async def test_a_fault_of_a_relay_breaks_its_own_connections_alone(gateway, row):
    """Streams and requests at other relays are whole, nothing stays in flight, and the relay is back."""
    await live(gateway, row, FEW)


async def test_a_killed_owner_breaks_no_connection_with_tls(gateway, tls):
    """The relays have the keys of the connections, and those of new connections."""
    await live(gateway, owner_killed, FEW, tls)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("number", range(TIMES))
async def test_faults_of_relays_under_load(gateway, row, number):
    """The same under 200 streams."""
    await live(gateway, row, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("number", range(TIMES))
async def test_faults_of_relays_under_load_with_tls(gateway, tls, row, number):
    """The same with TLS."""
    await live(gateway, row, MANY, tls)


async def test_a_silent_relay_holds_back_no_other(gateway):
    """While a relay is stopped, another accepts all connections: the silent relay is not waited for as the emptiest."""
    async with site_of(gateway, free_port(), RELAYS, "relay_silent_s = 600\n") as site:
        site.relays()[2].send_signal(signal.SIGSTOP)
        results = []
        async with trio.open_nursery() as nursery:
            for more in (40, 1, 1):
                for _ in range(more):
                    results.append(Result())
                    nursery.start_soon(ask_and_stay, site, results[-1])
                await until(lambda: all(one.is_whole for one in results))
                await site.until(partial(has_connections, site, 1, len(results)))  # by its pulse: it hears of it, too
            nursery.cancel_scope.cancel()
        assert {one.status for one in results} == {200}
        assert site.starts(2) == 1


async def has_connections(site, number, least):
    """Return whether a relay has this number of connections, or more, as the owner has heard."""
    relays = (await site.get("/v1/admin/cluster/status"))["gateway"]["relays"]
    return next(one["connections"] for one in relays if one["number"] == number) >= least


async def ask_and_stay(site, result):
    """Send a request, and keep the connection open."""
    async with await site.connect(result) as stream:
        await ask(stream, {"model": "m"}, result)
        await trio.sleep_forever()


# Sides that read nothing.


async def test_an_owner_that_reads_nothing_costs_its_relays_no_memory(gateway):
    """While it is stopped, clients that ask and leave are refused once 8 MB wait for it; afterwards it serves."""
    bounds = "relay_silent_s = 600\nowner_wait_s = 600\n"
    async with site_of(gateway, free_port(), 1, bounds) as site:
        (relay,) = site.relays().values()
        before = relay.memory_info().rss
        site.program.process.send_signal(signal.SIGSTOP)
        refused = []
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(ask_and_leave, site, refused)
            await until(lambda: len(refused) >= CLIENTS)
            nursery.cancel_scope.cancel()
        assert {one.code for one in refused} == {"owner_away"}
        assert relay.memory_info().rss - before < 4 * UNREAD_BYTES_MAX
        site.program.process.send_signal(signal.SIGCONT)
        await site.until(partial(is_served, site))
        await site.until_idle()


async def is_served(site):
    """Return whether a request is answered: it is refused while the owner still reads what waited for it."""
    async with await site.connect() as stream:
        await ask(stream, {"model": "m"}, result := Result())
    return result.status == 200


async def ask_and_leave(site, refused):
    """Send large asks, each on a connection of its own, until they are refused at once."""
    while True:
        async with await site.connect() as stream:
            result = Result()
            with trio.move_on_after(0.02):
                await ask(stream, {"model": "m"}, result, "k" * 11_000)
            if result.is_whole:
                refused.append(result)
