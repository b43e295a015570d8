"""Takeovers of a gateway under load, and what clients notice of them."""

import signal
import statistics
import time

import attrs
import psutil
import trio
from support.peers import until
from support.programs import LIMIT_S, ichat
from support.relay_site import Load


def change(path, before, after):
    """Change the configuration for the next process."""
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def begin(start, path, command=(), **env):
    """Start a new process that asks for the gateway; `command` runs it in place of these sources."""
    return start([*(command or ichat()), "gateway", "-c", str(path), "--takeover"], **env)


def stops_at(step):
    """Return what to add to a process's environment so that it stops at a step; see `stopping/sitecustomize.py`."""
    return {"PYTHONPATH": "tests/support/stopping:tests/support/fake_engine", "ICHAT_STOPS_AT": step}


async def until_stopped(program):
    """Wait until a process has stopped itself."""
    await until(lambda: program.family.status() == psutil.STATUS_STOPPED)


async def kill(program):
    """End a process by SIGKILL."""
    await trio.to_thread.run_sync(program.stop, signal.SIGKILL)


async def finish(site, new):
    """Wait until a new process has the gateway of a site."""
    await trio.to_thread.run_sync(new.wait_for_port)
    site.program = new


@attrs.define
class InARow:
    """The figures of takeovers in a row."""

    load: Load
    late_s: list = attrs.field(factory=list)
    """Of each takeover: the longest time of a request that was under way meanwhile."""
    totals: list = attrs.field(factory=list)
    """Requests, tokens of prompts and answers, and errors in the ledger in the end."""

    def summary(self):
        """Return them in a line."""
        usual = statistics.median(one.took_s for one in self.load.results)
        return (
            f"{len(self.late_s)} takeovers: {self.load.summary()}; answers took {usual:.3f} s usually, and over a"
            f" takeover {statistics.median(self.late_s):.2f} s (median), {max(self.late_s):.2f} s at most"
            f" ({', '.join(f'{one:.2f}' for one in self.late_s)}); in the ledger {self.totals}"
        )


async def take_over_in_a_row(site, begun, times, streams, requests, requests_s):
    """Have new processes, which `begun` starts, get the gateway under load, and check what the clients got.

    No request is refused, no stream breaks, and the ledger has each request and token of the upstream once.
    """
    async with trio.open_nursery() as nursery:
        found = InARow(load := Load(site))
        await nursery.start(load.run, streams, requests_s)
        for number in range(times):
            await until(lambda: len(load.results) >= number * requests // times, LIMIT_S)  # noqa: B023
            first, began_at = len(load.results), time.monotonic()
            await finish(site, begun())
            await load.more(5)
            seen = load.results[max(0, first - 20) :]
            found.late_s.append(max(one.took_s for one in seen if one.began_at + one.took_s > began_at))
        await until(lambda: len(load.results) >= requests, LIMIT_S)
        found.totals = await end_load(site, load)
    return found


async def end_load(site, load):
    """End a load: no request was refused, no stream breaks, and the ledger has each of them once. Return its totals."""
    site.upstream.ends.set()
    load.is_over = True
    await until(lambda: not load.under_way)
    await until(lambda: all(one.is_whole for one in load.streams))
    assert (load.failed, load.broken) == ([], [])
    found = []
    with trio.fail_after(LIMIT_S):
        while found != [site.upstream.served, *site.upstream.tokens, 0]:
            found = await totals_of(site)
            await trio.sleep(0.02)
    return found


async def totals_of(site):
    """Return requests, tokens of prompts and of answers, and errors in the ledger."""
    totals = (await site.get("/v1/admin/usage"))["totals"]
    return [totals[name] for name in ("requests", "input_tokens", "output_tokens", "errors")]
