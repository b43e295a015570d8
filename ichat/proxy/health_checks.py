"""Health checks of workers that are not iChat's own, and of external routes (`[health]`).

Workers are asked for `[health] path`, external routes for their `health_path` if they have one. Only the status of the
response counts; what follows from it is decided in `registry.py`.
"""

import math
from collections.abc import Awaitable, Callable

import attrs
import trio

from ichat.config.schema import Config, Health
from ichat.http import client
from ichat.http.heads import Headers
from ichat.http.pool import Upstream
from ichat.protocol import PROOF_HEADER
from ichat.routing.endpoint import Endpoint
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord

Ask = Callable[[Upstream, str, Headers], Awaitable[int]]


@attrs.frozen
class ProbeResult:
    """What a response, or its absence, says of an endpoint."""

    is_well: bool = False
    why: str = ""
    """Why it is not healthy, in a few words. Empty if it is, or if it has no such route: then nothing is known."""


async def ask(upstream: Upstream, target: str, headers: Headers) -> int:
    """Return the status of a GET. Redirects are not followed, and no body is read. Raises one of client.FAILURES."""
    own = [(b"accept", b"*/*"), (b"user-agent", b"ichat")]
    async with await client.request(upstream, target, [*own, *headers]) as response:
        return response.status


def read_status(target: str, status: int) -> ProbeResult:
    """Return what a status says: 2xx is healthy; 4xx means that there is no such route, or not for the gateway."""
    if 200 <= status < 300:
        return ProbeResult(is_well=True)
    return ProbeResult() if 400 <= status < 500 else ProbeResult(why=f"{target} is answered with {status}")


class HealthChecker:
    """Checks all of them, in rounds."""

    def __init__(self, registry: Registry, settings: Health, proof: Callable[[], bytes], ask_: Ask = ask) -> None:
        """`proof` returns what shows workers that their gateway asks; empty if there is no token."""
        self._registry = registry
        self._settings = settings
        self._proof = proof
        self._ask = ask_
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<HealthChecker every {self._settings.interval_s:g} s>"

    def reconfigure(self, config: Config) -> None:
        """Check by another configuration from now on."""
        self._settings = config.health
        self._changed.set()

    async def probe_forever(self) -> None:
        """Check all every `interval_s`; with 0 check none, and forget what failed before."""
        last = -math.inf
        while True:
            changed = self._changed = trio.Event()
            interval_s = self._settings.interval_s
            if not interval_s:
                self._registry.forget_probes()
            elif trio.current_time() >= last + interval_s:
                last = trio.current_time()
                await self._probe_all()
            with trio.move_on_at(last + interval_s if interval_s else math.inf):
                await changed.wait()

    async def _probe_all(self) -> None:
        await client.ask_each(self._registry.to_probe(), self._probe)

    async def _probe(self, asked: tuple[Endpoint, WorkerRecord | None]) -> None:
        endpoint, worker = asked
        settings, upstream, route = self._settings, endpoint.upstream, endpoint.route
        proof = self._proof()
        target = (route.health_path if route else "") or settings.path
        headers = route.headers_for([]) if route else [(PROOF_HEADER, proof)] if proof else []
        finding = ProbeResult(why=f"{target} is not answered within {settings.timeout_s:g} s")
        with trio.move_on_after(settings.timeout_s):
            try:
                finding = read_status(target, await self._ask(upstream, target, headers))
            except client.BROKEN:
                finding = ProbeResult(why=f"{target} is not answered as HTTP has it")
            except (OSError, ValueError):
                finding = ProbeResult(why="it cannot be reached")
        if endpoint.upstream is upstream:  # it may have come again, elsewhere
            self._registry.probed(
                endpoint, worker, finding.why, is_well=finding.is_well, failures_max=settings.failures_max
            )
