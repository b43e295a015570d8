"""A run of a benchmark: its prompts are fitted, its load is sent, and the workers are asked for theirs meanwhile."""

import json
import resource
import signal
import sys
import time
import urllib.parse
from functools import partial
from typing import Any

import attrs
import trio

from ichat.cli.bench.figures import BenchFigures, BenchPlan, figures_of
from ichat.cli.bench.load import BenchLoad, ChatClient
from ichat.cli.bench.prompts import PATH, bodies_for
from ichat.cli.bench.samples import WorkerSample
from ichat.cli.client import Api
from ichat.cli.json_values import objects_of
from ichat.cli.screen import Spinner, note, one_line
from ichat.errors import Exit
from ichat.http.pool import Upstream

WORKERS = "/v1/admin/workers"
EVERY_S = 1.0
"""Seconds between two questions for the workers' load, and between two lines of progress."""


def measure(api: Api, operator: Api, plan: BenchPlan) -> tuple[BenchFigures, bool]:
    """Carry out a plan; return its figures, and whether Ctrl-C ended it early. Raises Exit.

    `api` has the key for requests to models; `operator` asks for the workers' load.
    """
    next_body = bodies_for(api, plan)
    client = ChatClient(_upstream(api), _target(api), _headers(api), next_body, plan.timeout_s)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began, cpu_began = time.monotonic(), time.process_time()
    try:
        load, workers, is_cut_short = trio.run(_run, plan, client, operator)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    cpu = (time.process_time() - cpu_began) / max(time.monotonic() - began, 1e-9)
    return figures_of(plan, load.requests, workers, client_cpu=cpu, is_cut_short=is_cut_short), is_cut_short


def as_json(figures: BenchFigures) -> Any:
    """Return the figures as JSON has them, rounded to microseconds."""
    return json.loads(json.dumps(attrs.asdict(figures)), parse_float=lambda text: round(float(text), 6))


async def _run(plan: BenchPlan, client: ChatClient, operator: Api) -> tuple[BenchLoad, list[WorkerSample], bool]:
    load, workers, is_cut_short = BenchLoad(plan, client.ask), list[WorkerSample](), False
    with Spinner() as progress, trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_workers, operator, plan.model, workers)
            nursery.start_soon(_show_progress, progress, load)

            async def end_at_ctrl_c() -> None:
                nonlocal is_cut_short
                async for _ in signals:
                    is_cut_short = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(end_at_ctrl_c)
            await load.run()
            nursery.cancel_scope.cancel()
    return load, workers, is_cut_short


async def _show_progress(progress: Spinner, load: BenchLoad) -> None:
    """Show on a terminal how far the run is."""
    while sys.stderr.isatty():
        ended = [one for one in load.requests if one.ended_at is not None]
        failed = sum(1 for one in ended if one.error)
        progress.show(f"{len(ended) - failed} answered, {failed} failed, {len(load.requests) - len(ended)} under way")
        await trio.sleep(EVERY_S)


async def _watch_workers(operator: Api, model: str, samples: list[WorkerSample]) -> None:
    """Ask the gateway for the load of the model's workers, until it refuses."""
    ask = partial(operator.call, "GET", WORKERS, params={"model": model})
    while True:
        try:
            answer = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except Exit as error:
            note(f"No figures of workers: {error}")
            return
        now = trio.current_time()
        for one in objects_of(answer.value.get("data")):
            kv_use, running, waiting = (_number(one.get(name)) for name in ("kv_use", "running", "waiting"))
            samples.append(WorkerSample(now, one_line(one.get("worker_id")), kv_use, running, waiting))
        await trio.sleep(EVERY_S)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _upstream(api: Api) -> Upstream:
    url = urllib.parse.urlsplit(api.place.url)
    return Upstream(api.place.url, url.hostname or "", url.port or (443 if api.place.tls else 80), api.place.tls)


def _target(api: Api) -> str:
    return urllib.parse.urlsplit(api.place.url).path + PATH


def _headers(api: Api) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in api.headers.items()]
