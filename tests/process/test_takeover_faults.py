"""Processes of a takeover that are killed or stopped at its steps, under streams and short requests."""

import contextlib
import signal
from functools import partial

import pytest
import trio
import trio.testing
from support.deployments import free_port
from support.peers import until
from support.relay_site import Load, Result, ask, site_of
from support.takeovers import begin, end_load, finish, kill, stops_at, until_stopped

from ichat.errors import EXIT_UNAVAILABLE

STREAMS, REQUESTS_S, RELAYS = 4, 30, 2
HELLO, FREEZE, READY = "new 1", "new 2", "new 3"
"""The messages before which a new process stops."""
WELCOME, SNAPSHOT, GO = "old 1", "old 2", "old 3"
"""The messages before which an old process stops."""
CONFIG = 'owner_wait_s = 100\nownerless_s = 100\n[logs]\naccess_log = ""\n'


@contextlib.asynccontextmanager
async def site_under_load(gateway, relays, step=""):
    """Yield a site and its load; in the end, no request has failed, no stream broke, and each is counted once."""
    async with (
        site_of(partial(gateway, **stops_at(step)), free_port(), relays, CONFIG) as site,
        trio.open_nursery() as nursery,
    ):
        load = Load(site)
        await nursery.start(load.run, STREAMS, REQUESTS_S)
        await load.more(5)
        yield site, load
        await load.more(5)
        await end_load(site, load)


async def goes_on(site, load):
    """Wait until a gateway answers requests that begin now."""
    await load.more(5)
    assert site.program.process.poll() is None


@pytest.mark.parametrize("relays", [0, RELAYS])
async def test_the_old_process_goes_on_if_the_new_process_is_killed(gateway, start, tmp_path, relays):
    """At each step before `go`. A signal that stops the old process before it sends `go` changes nothing."""
    async with site_under_load(gateway, relays, GO) as (site, load):
        for step in (HELLO, FREEZE, READY):
            new = begin(start, tmp_path / "ichat.toml", **stops_at(step))
            await until_stopped(new)
            await kill(new)
            await goes_on(site, load)
        new = begin(start, tmp_path / "ichat.toml")
        await until_stopped(site.program)
        await kill(new)
        site.program.process.send_signal(signal.SIGCONT)
        await goes_on(site, load)
        assert site.program.text().count("the takeover has failed") == 2


async def test_the_new_process_goes_on_if_the_old_process_is_killed(gateway, start, tmp_path):
    """At each step: before the new process has asked, while it waits, and while it builds."""
    path = tmp_path / "ichat.toml"
    async with site_under_load(gateway, RELAYS, WELCOME) as (site, load):
        for next_step in (SNAPSHOT, GO, ""):
            new = begin(start, path, **stops_at(next_step))
            await until_stopped(site.program)
            await kill(site.program)
            await finish(site, new)
            await goes_on(site, load)
        for step in (HELLO, FREEZE, READY):
            new = begin(start, path, **stops_at(step))
            await until_stopped(new)
            await kill(site.program)
            new.process.send_signal(signal.SIGCONT)
            await finish(site, new)
            await goes_on(site, load)


async def test_requests_wait_for_a_start_if_the_new_process_is_killed_after_it_has_the_gateway(
    gateway, start, tmp_path
):
    """It was the only process that decides: this is a crash, which relays survive."""
    path = tmp_path / "ichat.toml"
    async with site_under_load(gateway, RELAYS) as (site, load):
        old, new = site.program, begin(start, path, **stops_at("adopting"))
        await until_stopped(new)
        await until(lambda: old.process.poll() == 0)
        await kill(new)
        await finish(site, begin(start, path))
        await goes_on(site, load)


async def test_a_request_that_reaches_a_relay_with_the_last_word_of_its_owner_waits(gateway, start, tmp_path):
    """The relay hears of it before the connection to the owner has ended: the next owner answers."""
    async with site_of(gateway, free_port(), 1, CONFIG) as site:
        (relay,) = site.relays().values()
        async with await site.connect() as stream, trio.open_nursery() as nursery:
            await ask(stream, {"model": "m"}, Result())
            relay.send_signal(signal.SIGSTOP)
            new = begin(start, tmp_path / "ichat.toml")
            await until(lambda: "has this gateway now" in site.program.text())
            nursery.start_soon(ask, stream, {"model": "m"}, result := Result())
            await trio.testing.wait_all_tasks_blocked()
            relay.send_signal(signal.SIGCONT)
            await finish(site, new)
        assert (result.status, result.code) == (200, "")


@pytest.mark.slow
async def test_a_process_that_stands_still_is_not_waited_for(gateway, start, tmp_path):
    """The old process kills a new process that is silent; the new process leaves an old process that is silent."""
    path = tmp_path / "ichat.toml"
    async with site_under_load(gateway, RELAYS, GO) as (site, load):
        for step in (HELLO, FREEZE, READY):
            new = begin(start, path, **stops_at(step))
            await until_stopped(new)
            if step == READY:
                await until(lambda: new.process.poll() == -signal.SIGKILL)  # noqa: B023
            else:
                new.process.send_signal(signal.SIGCONT)
                new.process.send_signal(signal.SIGTERM)
                await until(lambda: new.process.poll() is not None)  # noqa: B023
            await goes_on(site, load)
        new = begin(start, path)
        await until_stopped(site.program)
        await until(lambda: new.process.poll() == EXIT_UNAVAILABLE)
        site.program.process.send_signal(signal.SIGCONT)
        await goes_on(site, load)
