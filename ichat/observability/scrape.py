"""The workers' own metrics as the gateway shows them: every sample has the labels `worker` and `model`.

All workers are scraped at once when the gateway is, unless there are too many of them.
"""

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import attrs
import trio

from ichat.config.schema import Config
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.http import client
from ichat.observability.exposition import Families, MetricFamily, add_twins, escaped, read_steps, written
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import Auth

log = logging.getLogger(__name__)

REUSE_S = 1.0
"""How long other scrapes get the result of an earlier scrape."""
ALL_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of all answers of a round."""


@attrs.frozen
class ScrapeLimits:
    """Limits on a round of answers."""

    ask_s: float = 2.0
    """The limit on a worker's answer."""
    round_s: float = 6.0
    """The limit on all answers together: workers that were not asked by then count as failed."""
    bytes_max: int = 4 * 1024 * 1024
    """The most bytes of a worker's answer."""


LIMITS = ScrapeLimits()


@attrs.define
class _Round:
    """The result of a round, and the time that is left to it."""

    found: dict[str, Families | None]
    """None: the worker did not answer."""
    left_out: int = 0
    """How many ready workers were not asked, since they are too many."""
    bytes_left: int = ALL_BYTES_MAX


class Scraper:
    """Asks the ready workers for their metrics, and shows them together with the gateway's own."""

    def __init__(self, table: WorkerTable, workers_max: int, auth: Auth, limits: ScrapeLimits = LIMITS) -> None:
        """More than `workers_max` ready workers are not asked, none of them.

        `auth` has the proof to workers that were not started here that their gateway asks.
        """
        self._table = table
        self._workers_max = workers_max
        self._auth = auth
        self._limits = limits
        self._turn, self._reading = trio.Lock(), trio.Lock()
        self._round = _Round({})
        self._found_at = -math.inf

    def __repr__(self) -> str:
        return f"<Scraper of {len(self._round.found)} workers>"

    def reconfigure(self, config: Config) -> None:
        """Ask as many workers as another configuration has it."""
        self._workers_max = config.limits.scraped_workers_max

    async def expose(self, own: Iterable[Families], *, with_workers: bool = True) -> Iterator[str]:
        """Return an exposition in short texts: the gateway's metrics, and those of the workers.

        `own` gives the gateway's in parts, each of which is a step.
        """
        parts = list[Families]()
        for part in own:
            parts.append(part)
            await trio.lowlevel.checkpoint()
        if not with_workers:
            return written(parts)
        async with self._turn:
            if trio.current_time() - self._found_at >= REUSE_S:
                self._round = await self._ask_all()
                self._found_at = trio.current_time()
            round_ = self._round
        found = (families for families in round_.found.values() if families is not None)
        return written([*parts, _families_of(round_), *found])

    async def _ask_all(self) -> _Round:
        """Return each worker's metrics, unless the workers are too many."""
        table = self._table
        ready = [(one, table.endpoint_of(one)) for one in table if table.state(one) == "ready"]
        workers = [(worker, endpoint) for worker, endpoint in ready if endpoint is not None]
        if len(workers) > self._workers_max:
            return _Round({}, left_out=len(workers))
        round_ = _Round(dict.fromkeys([worker.id for worker, _ in workers]))
        with trio.move_on_after(self._limits.round_s):
            await client.ask_each(workers, functools.partial(self._ask, round_))
        return round_

    async def _ask(self, round_: _Round, asked: tuple[WorkerRecord, Endpoint]) -> None:
        worker, endpoint = asked
        labels = {"worker": worker.id, "model": worker.names[0] if worker.names else ""}
        try:
            with trio.fail_after(self._limits.ask_s):
                proof = b"" if worker.managed else self._auth.proof
                data = await _fetch(endpoint, proof, round_, self._limits.bytes_max)
        except client.FAILURES as error:
            log.debug("worker %s gave no metrics: %r", worker.id, error)
            return
        async with self._reading:  # not at once: the steps of many would follow each other without a pause
            round_.found[worker.id] = await _read(data, labels)


async def _fetch(endpoint: Endpoint, proof: bytes, round_: _Round, bytes_max: int) -> bytes:
    """Return a worker's metrics. Raises one of client.FAILURES, ValueError if they are too long."""
    headers = endpoint.headers_for([(b"accept", b"text/plain;version=0.0.4")], proof)
    data = bytearray()
    async with await client.request(endpoint.upstream, endpoint.target_at_root("/metrics"), headers) as response:
        if response.status != 200:
            raise ValueError(f"it answers with {response.status}")
        async for piece in response:
            data += piece
            round_.bytes_left -= len(piece)
            if len(data) > bytes_max or round_.bytes_left < 0:
                raise ValueError("its answer is too long")
    return bytes(data)


async def _read(data: bytes, labels: Mapping[str, str]) -> Families:
    """Return a worker's metrics, with a turn for other tasks after each step of reading them."""
    families: Families = {}
    for _ in read_steps(data.decode(errors="replace"), labels, families):
        await trio.lowlevel.checkpoint()
    add_twins(families)
    await trio.lowlevel.checkpoint()
    return families


def _families_of(round_: _Round) -> Families:
    """Return the families about the round itself."""
    failed, left_out = "ichat_worker_scrape_failed", "ichat_workers_not_scraped"
    samples = [f'{failed}{{worker="{escaped(one)}"}} {int(found is None)}' for one, found in round_.found.items()]
    return {
        failed: _gauge(failed, "1 for a ready worker without metrics here.", samples),
        left_out: _gauge(
            left_out,
            "Ready workers without metrics here, since there are more than limits.scraped_workers_max.",
            [f"{left_out} {round_.left_out}"],
        ),
    }


def _gauge(name: str, text: str, samples: list[str]) -> MetricFamily:
    return MetricFamily({"HELP": f"# HELP {name} {text}", "TYPE": f"# TYPE {name} gauge"}, samples)
