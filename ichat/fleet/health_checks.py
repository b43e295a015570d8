"""Health checks of workers that were started elsewhere, and of external routes (`[health]`).

Workers are asked for `[health] path`, external routes for their `health_path` if it is set. Only the status of the
response counts; `probes.py` decides what follows from it. A worker of iChat's own reports its state in its
heartbeats. It is asked only if no request has shown for a while that it can be reached, and any response shows that.
"""

import math
from collections.abc import Awaitable, Callable

import attrs
import trio

from ichat.config.schema import Config, Health
from ichat.fleet.probes import Probes
from ichat.fleet.worker_record import WorkerRecord
from ichat.http import client
from ichat.http.heads import Headers
from ichat.http.pool import Upstream
from ichat.listeners import Listeners
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import Auth

Ask = Callable[[Upstream, str, Headers], Awaitable[int]]


@attrs.frozen
class ProbeResult:
    """The meaning of a response, or of its absence, for an endpoint."""

    is_well: bool = False
    why: str = ""
    """Why it is not healthy, in a few words. Empty if it is, or if it has no such route: then nothing is known."""


async def ask(upstream: Upstream, target: str, headers: Headers) -> int:
    """Return the status of a GET. Redirects are not followed, and no body is read. Raises one of client.FAILURES."""
    own = [(b"accept", b"*/*"), (b"user-agent", b"ichat")]
    async with await client.request(upstream, target, [*own, *headers]) as response:
        return response.status


def read_status(target: str, status: int) -> ProbeResult:
    """Return the result of a status: 2xx is healthy; 4xx means that there is no such route, or not for the gateway."""
    if 200 <= status < 300:
        return ProbeResult(is_well=True)
    return ProbeResult() if 400 <= status < 500 else ProbeResult(why=f"{target} is answered with {status}")


class HealthChecker:
    """Checks the workers and routes, in rounds."""

    def __init__(self, probes: Probes, settings: Health, auth: Auth, ask_: Ask = ask) -> None:
        """`auth` has the proof to workers that their gateway asks."""
        self._probes = probes
        self._settings = settings
        self._auth = auth
        self._ask = ask_
        self._reconfigured: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<HealthChecker every {self._settings.interval_s:g} s>"

    def reconfigure(self, config: Config) -> None:
        """Check by another configuration from now on."""
        self._settings = config.health
        self._reconfigured()

    async def probe_forever(self) -> None:
        """Check all every `interval_s`; with 0 check none, and forget what failed before."""
        last = -math.inf
        while True:
            settings, interval_s = self._settings, self._settings.interval_s
            if not interval_s:
                self._probes.forget()
            elif trio.current_time() >= last + interval_s:
                last = trio.current_time()
                await self._probe_all()
            with trio.move_on_at(last + interval_s if interval_s else math.inf):
                while self._settings is settings:
                    await self._reconfigured.wait()

    async def _probe_all(self) -> None:
        now = trio.current_time()
        own = self._probes.unseen(now - self._settings.interval_s)
        for endpoint, _ in own:
            endpoint.see(now)
        await client.ask_each([*self._probes.to_probe(), *own], self._probe)

    async def _probe(self, asked: tuple[Endpoint, WorkerRecord | None]) -> None:
        endpoint, worker = asked
        settings, upstream, route = self._settings, endpoint.upstream, endpoint.route
        target = (route.health_path if route else "") or endpoint.target_at_root(settings.path)
        headers = endpoint.headers_for([], self._auth.proof)
        finding = ProbeResult(why=f"{target} is not answered within {settings.timeout_s:g} s")
        with trio.move_on_after(settings.timeout_s):
            try:
                status = await self._ask(upstream, target, headers)
                is_own = worker is not None and not worker.is_foreign
                finding = ProbeResult(is_well=True) if is_own else read_status(target, status)
            except client.BROKEN:
                finding = ProbeResult(why=f"{target} is not answered as HTTP has it")
            except (OSError, ValueError):
                finding = ProbeResult(why="it cannot be reached")
        if endpoint.upstream is upstream:  # it may have joined again, elsewhere
            self._probes.record(
                endpoint, worker, finding.why, is_well=finding.is_well, failures_max=settings.failures_max
            )
