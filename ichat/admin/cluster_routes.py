"""The handlers of the gateway as a whole: its state, as it is and as it changes, its history, and its configuration."""

import platform
from collections import Counter
from importlib import metadata

import trio
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Response, request

import ichat
from ichat.admin import views
from ichat.admin.config_view import changed_keys, shown_section
from ichat.admin.context import long_response, query_string, read_flags, stream_response
from ichat.admin.events import KEEP_ALIVE_S, EventStreams
from ichat.admin.lists import read_finished_query, with_long_list
from ichat.admin.operations import TEXT, Operations, content_of, flag, query
from ichat.admin.overview import Overview
from ichat.admin.reload import Reloader
from ichat.admin.schemas import Schema, object_of, ref, view
from ichat.errors import ApiError
from ichat.fleet.worker_record import State
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.host import CpuMeter, HostResources, read_resources
from ichat.hardware.machines import MachineReport, read_machine
from ichat.http import sse
from ichat.observability.history import COLUMNS, OF_MODEL, OF_WORKER
from ichat.observability.logs.stream import read_flag, read_parameters
from ichat.observability.metrics import Metrics
from ichat.observability.scrape import Scraper
from ichat.proxy.finished_requests import FinishedRequests
from ichat.proxy.lanes import Lanes
from ichat.proxy.requests_in_flight import RequestsView
from ichat.supervisor.engine_flags import EngineFlags, engines_of
from ichat.supervisor.supervisor import Supervisor

PACKAGES = ("trio", "hypercorn", "quart", "quart-trio", "httpx", "h11", "attrs", "cattrs")
_WRONG = "A parameter is wrong."
_EVENTS = f"""\
Server-sent events. The first is `state`, an EventState, which is sent again to a slow client. Changes \
follow: `workers`, an object with `changed`, a list of WorkerSummary, and `gone`, a list of ids; `models` and \
`machines`, with the lists `models` and `machines` of those that have changed, and `gone`; `sample`, the newest values \
of the history with `usage_storage`; `lanes`, a Lanes; `requests`, a RequestsInFlight; \
`reloaded`, with `summary` and `at`; \
`config`, a ConfigState, at each change of the configuration file or its state; `keys`, at changes of keys; \
`gateway`, as in `state`, at changes of the gateway's process and its relays. \
A comment is sent after each {KEEP_ALIVE_S:g} s without an event. \
The stream ends with the gateway."""
_VALUES: Schema = {"type": "array", "items": {"type": ["number", "null"]}}

operations = Operations("cluster")


# The state.


@operations.add("GET /v1/admin/cluster/status", response=views.ClusterStatus)
async def get_status(overview: Overview, supervisor: Supervisor, reloader: Reloader, meter: CpuMeter) -> Response:
    """Return the gateway, its machine, and the load."""
    table, gpus = overview.table, await supervisor.gpus.find()
    pids, reported = supervisor.pids, table.machines()

    def read() -> tuple[HostResources, MachineReport]:
        own = read_machine(meter, gpus, pids)
        return read_resources(meter, gpus, pids), own

    resources, own = await trio.to_thread.run_sync(read)
    status = views.ClusterStatus(
        gateway=overview.gateway(),
        resources=resources,
        machines=[],
        workers=Counter[State](map(table.state, table)),
        models=[overview.model(name) for name in sorted(overview.directory.names())],
        config=await reloader.read_state(),
    )
    return long_response(with_long_list(status, "machines", overview.monitor.machines(reported, own)))


@operations.add("GET /v1/admin/cluster/version", response=views.Version)
async def get_version(table: WorkerTable) -> Response:
    """Return the versions of the gateway, its packages and its engines."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    heartbeats = [worker.heartbeat for worker in table if worker.heartbeat is not None]
    workers = (views.WorkerVersions(one.worker_id, one.backend, one.versions) for one in heartbeats)
    version = views.Version(ichat.__version__, platform.python_version(), packages, [])
    return long_response(with_long_list(version, "workers", workers))


@operations.add(
    "GET /metrics",
    response=content_of("text/plain", "Text."),
    parameters=[
        flag(
            "workers",
            "Whether the workers' own metrics are there too; where more than `limits.scraped_workers_max` are ready,"
            " they never are.",
            default=True,
        )
    ],
)
async def get_metrics(scraper: Scraper, metrics: Metrics) -> Response:
    """Return metrics for Prometheus: the gateway's, and those of the ready workers and their engines."""
    with_workers = read_flag(request.args, "workers", default=True)
    parts = await scraper.expose(metrics.families(), with_workers=with_workers)
    return long_response(parts, CONTENT_TYPE_LATEST)


@operations.add(
    "GET /v1/admin/events",
    response=content_of(sse.CONTENT_TYPE, _EVENTS),
    parameters=[flag("requests", "Report the requests in flight as well.")],
    failures={"400": _WRONG, "503": "There are too many (`limits.event_streams_max`)."},
)
async def get_events(events: EventStreams) -> Response:
    """Send everything that operators see, and then each change of it."""
    return stream_response(events.follow(wants_requests=read_flags("requests")[0]))


@operations.add(
    "GET /v1/admin/history",
    response="History",
    parameters=[query("worker", TEXT, "Only this worker beside models and totals; left out: all of them.")],
    failures={"400": _WRONG},
)
async def get_history(overview: Overview) -> Response:
    """Return what happened in the last hour, in samples (`[history]`)."""
    worker = read_parameters(query_string(), ("worker",)).get("worker")
    return long_response(overview.history.parts(None if worker is None else (worker,)))


@operations.add(
    "GET /v1/admin/requests",
    parameters=[query("id", TEXT, "Only requests with this `id` or `own_id`; left out: the oldest.")],
    failures={"400": _WRONG},
)
async def get_requests(overview: Overview) -> RequestsView:
    """Return the requests in flight."""
    return overview.in_flight.view(read_parameters(query_string(), ("id",)).get("id"))


@operations.add(
    "GET /v1/admin/requests/finished",
    response="FinishedRequests",
    parameters=[
        query("limit", {"type": "integer", "minimum": 1, "default": 100}, "The most requests, the newest of them."),
        query("id", TEXT, "Only requests with this `id` or `own_id`."),
        query("model", TEXT, "Only of this model, or of the name that stands for models."),
        query("key", TEXT, "Only of the key of this name; empty: without a key."),
        query("worker", TEXT, "Only of this worker or external route."),
        flag("failed", "Only requests that ended with an error, or were cut off."),
    ],
    failures={"400": _WRONG},
)
async def get_finished_requests(finished: FinishedRequests) -> Response:
    """Return the newest requests to models that have ended, newest first (`logs.finished_requests_max`)."""
    wanted = read_finished_query(query_string())
    return long_response(with_long_list(finished.view(), "requests", finished.select(wanted)))


@operations.add(
    "DELETE /v1/admin/requests/<path:request_id>",
    path_descriptions={"request_id": "The request's `own_id`, or its `id` if no other request has that id."},
    failures={
        "404": "There is no such request in flight.",
        "409": "Several requests have this id of their clients' (`ambiguous_id`): use their `own_id`.",
    },
)
async def cancel_request(request_id: str, overview: Overview) -> views.RequestCancelled:
    """Cancel a request in flight: its client gets 503 `request_cancelled`, or its response breaks off."""
    if not overview.in_flight.cancel(request_id):
        raise ApiError(404, "not_found", f"There is no request {request_id} in flight.")
    return views.RequestCancelled(request_id, 1)


# The configuration.


@operations.add("GET /v1/admin/config")
async def get_config(reloader: Reloader) -> views.ConfigView:
    """Return the configuration in force, without secrets."""
    config, file = reloader.config, await reloader.read_state()
    return views.ConfigView(
        path=str(reloader.path) if reloader.path is not None else None,
        file=file,
        file_changed=file.state != "ok",
        watched=reloader.path is not None and config.server_settings.watch_config,
        settings=shown_section(config),
        changed=changed_keys(config),
    )


@operations.add(
    "POST /v1/admin/config/reload",
    parameters=[
        flag("dry_run", "Only say what would be done."),
        flag("restart_failed", "Start workers that have failed anew, changed or not."),
    ],
    failures={
        "400": "The file is wrong (`bad_configuration`); nothing was changed.",
        "409": "The gateway was not started from a file (`no_file`).",
        "503": "The gateway is about to end (`draining`).",
    },
)
async def reload(reloader: Reloader) -> views.ReloadResult:
    """Read the configuration again and apply its changes, without waiting for workers."""
    dry_run, restart_failed = read_flags("dry_run", "restart_failed")
    return await reloader.reload(dry_run=dry_run, why="asked over the API", restart_failed=restart_failed)


@operations.add("GET /v1/admin/engines")
async def get_engines(reloader: Reloader) -> views.EngineList:
    """Return the engines that workers here may have."""
    return views.EngineList(await trio.to_thread.run_sync(engines_of, reloader.config))


@operations.add(
    "GET /v1/admin/engines/<backend>/flags",
    failures={
        "404": "There is no such engine here.",
        "409": "Its interpreter does not report its flags (`engine_unusable`); the message has the cause.",
    },
)
async def get_engine_flags(backend: str, flags: EngineFlags, reloader: Reloader) -> views.EngineFlagList:
    """Return the flags of an engine; its interpreter is run for it, once."""
    return views.EngineFlagList(backend, *await flags.ask(reloader.config, backend))


def schemas() -> dict[str, Schema]:
    """Return the schemas of the history and of the events, which no route returns, by their names."""
    columns, of_model, of_worker = (dict.fromkeys(names, _VALUES) for names in (COLUMNS, OF_MODEL, OF_WORKER))
    history: dict[str, Schema] = {
        "sample_s": {"type": "number", "description": "Seconds between two samples."},
        "columns": object_of(columns, "Each column has a value of every sample, oldest first."),
        "models": {"type": "object", "additionalProperties": object_of(of_model)},
        "workers": {"type": "object", "additionalProperties": object_of(of_worker)},
    }
    state: dict[str, Schema] = {
        "gateway": view(views.GatewayView),
        "config": ref("ConfigState"),
        "aliases": {"type": "array", "items": view(views.AliasView)},
        "usage_storage": {"type": "string", "description": "`ok`, or why usage cannot be kept."},
        "history": ref("History"),
        "workers": {"type": "array", "items": ref("WorkerSummary")},
        "models": {"type": "array", "items": view(views.ModelLoad)},
        "machines": {"type": "array", "items": ref("Machine")},
    }
    return {
        "History": object_of(
            history,
            "What happened, sample by sample; null: nothing is known. Requests, errors and tokens are those since the"
            " sample before, `at` is in seconds since 1970, and `kv_use` is the mean of the workers that report it.",
        ),
        "Lanes": view(Lanes),
        "EventState": object_of(state, "The data of an event `state`, with a history without workers."),
    }
