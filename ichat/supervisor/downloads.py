"""Downloads of managed workers' models, each by a process of the worker's environment, before the worker's start."""

import math
import subprocess
import tempfile
from collections.abc import Callable

import trio

from ichat.config.engine_args import arguments_of
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.downloads.place import USUAL, ModelPlace, place_of, whole_version
from ichat.downloads.report import LINE_BYTES_MAX, DownloadReport, read_report
from ichat.downloads.starting import PACKAGES, SILENT_MORE_S, DownloadOrder, failure_after, find_python, has_library
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import DOWNLOADING
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.launch import environment_of, python_of

KILL_S = 5.0
"""Seconds that a download's process has to end, after the end of its standard input."""


def place_for(config: Config, spec: ManagedWorkerConfig) -> ModelPlace:
    """Return the place of the model of a worker with `hub`."""
    assert spec.hub is not None
    arguments = arguments_of(spec)
    cache = arguments.get("download_dir") if spec.hub == "huggingface" else None
    return place_of(spec.hub, spec.model_path, environment_of(config, spec, ""), None if cache is None else str(cache))


def revision_of(spec: ManagedWorkerConfig) -> str:
    """Return the revision of the model of a worker with `hub`."""
    assert spec.hub is not None
    return str(arguments_of(spec).get("revision") or USUAL[spec.hub])


def directory_for(config: Config, spec: ManagedWorkerConfig) -> str | None:
    """Return the directory of the model of a worker with `hub`; None: no whole model, or no hub. It reads files."""
    return None if spec.hub is None else whole_version(place_for(config, spec), revision_of(spec))


async def download_model(worker: WorkerRecord, spec: ManagedWorkerConfig, context: SupervisorContext) -> str:
    """Download the model of a worker with `hub`, unless it is here; return why that failed, or "".

    The worker's record shows the progress. The process ends with the caller's scope.
    """
    config = context.config
    if spec.hub is None or await trio.to_thread.run_sync(directory_for, config, spec) is not None:
        return ""
    context.managed.enter_load(worker, DOWNLOADING)
    python = _python_for(config, spec)
    if python is None:
        package = PACKAGES[spec.hub]
        return f"No interpreter here has {package}: `uv pip install --python {python_of(config, spec)} {package}`."
    wants_all = str(arguments_of(spec).get("load_format", "auto")) not in ("auto", "safetensors")
    stall_s = config.downloads.stall_s
    order = DownloadOrder(python, place_for(config, spec), revision_of(spec), stall_s, wants_all)

    def show(report: DownloadReport) -> None:
        context.managed.note_load(worker, report.words(), report.left_s)

    return await _run(order, environment_of(config, spec, ""), show)


def _python_for(config: Config, spec: ManagedWorkerConfig) -> str | None:
    """Return the worker's own interpreter if it has the hub's library, else another."""
    assert spec.hub is not None
    own = python_of(config, spec)
    if has_library(own, spec.hub):
        return own
    return find_python(spec.hub, {name: engine.python for name, engine in config.engines.items()})


async def _run(order: DownloadOrder, environment: dict[str, str], show: Callable[[DownloadReport], None]) -> str:
    """Run the download's process; return why it failed, or ""."""
    silent_s = order.stall_s + SILENT_MORE_S
    with tempfile.TemporaryFile() as errors:
        process = await trio.lowlevel.open_process(
            order.command(), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            last = await _follow(process, silent_s, show)
            await process.wait()
        except trio.TooSlowError:
            return f"The download of {order.place.name} said nothing for {silent_s:g} s and was ended."
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)
        return failure_after(last, process.returncode, errors)


async def _follow(
    process: trio.Process, silent_s: float, show: Callable[[DownloadReport], None]
) -> DownloadReport | None:
    """Pass on a process' reports until it ends, and return the last. Raises TooSlowError after a long silence."""
    assert process.stdout is not None
    rest, last = b"", None
    while True:
        with trio.fail_after(silent_s):
            part = await process.stdout.receive_some(LINE_BYTES_MAX)
        if not part:
            return last
        *lines, rest = (rest + part).split(b"\n")
        rest = rest[:LINE_BYTES_MAX]
        for line in lines:
            if (report := read_report(line)) is not None:
                last = report
                if report.state not in ("done", "failed"):
                    show(report)


async def _end(process: trio.Process) -> None:
    """Have a process end, and wait for that."""
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.aclose()
    with trio.move_on_after(KILL_S if process.returncode is None else math.inf):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.stdout.aclose()
