"""Downloads of managed workers' models, each by a process of the worker's environment, before the worker's start."""

import trio

from ichat.config.engine_args import arguments_of
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.downloads.place import PACKAGES, USUAL, ModelPlace, place_of, whole_version
from ichat.downloads.report import DownloadReport
from ichat.downloads.starting import DownloadOrder, find_python, has_library, run_download
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import DOWNLOADING
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.launch import environment_of, python_of


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

    return (await run_download(order, environment_of(config, spec, ""), show)).why


def _python_for(config: Config, spec: ManagedWorkerConfig) -> str | None:
    """Return the worker's own interpreter if it has the hub's library, else another."""
    assert spec.hub is not None
    own = python_of(config, spec)
    if has_library(own, spec.hub):
        return own
    return find_python(spec.hub, {name: engine.python for name, engine in config.engines.items()})
