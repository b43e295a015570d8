"""What a fault of a process of a gateway with relays may cost, by the counts of its clients."""

import time
from collections.abc import Awaitable, Callable

import attrs
import psutil
import trio
from support.deployments import free_port, worker
from support.peers import until
from support.relay_site import Load, Result, site_of

RELAYS = 2
GAP_S = 0.02
FEW = 6, 40
MANY = 200, 50
"""Streams, and requests a second."""


def patient(**others):
    """Return timeouts by which a busy machine changes nothing, but for those that a fault waits for."""
    found = {"owner_wait_s": 600, "ownerless_s": 600, "relay_silent_s": 600, "queue_s": 600, **others}
    return "".join(f"{name} = {seconds}\n" for name, seconds in found.items())


async def _nothing():
    pass


@attrs.define
class Hurt:
    """What a fault may break: the clients on the connections of the relays that it has killed."""

    ports: set = attrs.field(factory=set)
    began_at: float = attrs.field(factory=time.monotonic)
    may_fail: Callable[[Result], bool] = lambda result: False
    """Whether another request may have this result."""
    is_over: bool = False
    """Whether there is no gateway any more."""
    has_new_worker: bool = False
    """Whether the managed worker was started again."""
    check_at_end: Callable[[], Awaitable[None]] = _nothing
    """What else the table says, once all streams have ended."""


async def live_through(gateway, row, load_of, tls=("", None), timeouts=None, text="", others=()):
    """Let a fault happen under load, and compare what the clients have got with the table.

    `load_of` has the streams and the requests a second. `timeouts` are those that the fault waits for. `text` is
    more of the configuration, and `others` are other models of the upstream.
    """
    streams, requests_s = load_of
    text = patient(**timeouts or {}) + worker("w", 'on_gateway_exit = "keep"') + text
    async with (
        site_of(gateway, free_port(), RELAYS, text, tls[0], trust=tls[1], others=others) as site,
        trio.open_nursery() as nursery,
    ):
        worker_pid = await site.until_ready("w-0")
        site.upstream.gap_s = GAP_S * max(1, streams // 10)
        load = Load(site)
        await nursery.start(load.run, streams, requests_s)
        await load.more(5)
        hurt = await row(site, load)
        took_s = time.monotonic() - hurt.began_at
        if not hurt.is_over:
            await load.more(10)
            assert len(site.relays()) == RELAYS
        # Streams of other relays go on to their end; those of the killed relays have ended at once.
        lost = {one.port for one in load.streams} & hurt.ports
        site.upstream.ends.set()
        await hurt.check_at_end()
        load.is_over = True
        await until(lambda: not load.under_way)
        await until(lambda: sum(one.is_whole for one in load.streams) == len(load.streams) - len(lost))
        assert {one.port for one in load.broken} == lost, "other streams broke"
        others = [one for one in load.failed if one.port not in hurt.ports and not hurt.may_fail(one)]
        assert not others, f"other requests failed: {others}, {hurt}"
        if hurt.is_over:
            await until(lambda: not site.relays())
            assert psutil.pid_exists(worker_pid)
        else:
            await site.until_idle()
            assert (await site.until_ready("w-0") != worker_pid) == hurt.has_new_worker
        assert site.upstream.held == {}
        print(f"{row.__name__}: back after {took_s:.2f} s; {load.summary()}")
