"""The handlers of the control plane: registration, models, metrics, workers and their logs, cluster, configuration."""

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, cast

import attrs
import trio
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Response, current_app, g, request

import ichat
from ichat import errors
from ichat.admin import views
from ichat.admin.config_view import shown_section
from ichat.admin.events import EventStreams
from ichat.admin.explain import explain_request, read_question
from ichat.admin.key_store import KeyStore
from ichat.admin.lists import Pieces, in_turns, read_worker_query, to_json, with_long_list, worker_parts
from ichat.admin.overview import Overview
from ichat.admin.reload import Reloader
from ichat.config.load import read_worker
from ichat.config.schema import DRAIN_S_MAX
from ichat.errors import ApiError
from ichat.hardware.gpus import find_gpus
from ichat.hardware.host import CpuMeter, HostResources, read_resources
from ichat.hardware.machines import MachineReport, machines_of, read_machine
from ichat.http import sse
from ichat.observability.logs.store import LogStore
from ichat.observability.logs.stream import read_flag, read_parameters, read_query
from ichat.observability.metrics import Metrics
from ichat.observability.scrape import Scraper
from ichat.observability.usage.ledger import Ledger
from ichat.protocol import ModelCard
from ichat.protocol.model_entry import entry_of
from ichat.proxy.heartbeats import HeartbeatReceiver
from ichat.proxy.prefix_reports import PrefixReportReceiver
from ichat.routing.aliases import Aliases
from ichat.routing.balancer import Balancer
from ichat.routing.model_list import Listed, listed_model, listed_models, near_models
from ichat.routing.prompt_lengths import PromptLengths
from ichat.routing.registry import Registry
from ichat.routing.worker_record import State, WorkerRecord
from ichat.security.auth import Auth
from ichat.security.rate_limits import Quotas
from ichat.supervisor.engine_flags import EngineFlags
from ichat.supervisor.supervisor import Supervisor

PACKAGES = ("trio", "hypercorn", "quart", "quart-trio", "httpx", "h11", "attrs", "cattrs")
NAMED_MAX = 20
"""How many workers the error names that says there is no such worker."""


@attrs.frozen
class AdminContext:
    """What the control plane shows and changes."""

    registry: Registry
    balancer: Balancer
    supervisor: Supervisor
    log_store: LogStore
    reloader: Reloader
    auth: Callable[[], Auth]
    """Returns the rules of access that are in force."""
    quotas: Quotas
    key_store: KeyStore
    metrics: Metrics
    scraper: Scraper
    heartbeats: HeartbeatReceiver
    prefix_reports: PrefixReportReceiver
    aliases: Callable[[], Aliases]
    """Returns the names that the configuration maps to models."""
    prompt_lengths: PromptLengths
    ledger: Ledger
    overview: Overview
    events: EventStreams
    started_at: float
    """In seconds since 1970."""
    engine_flags: EngineFlags = attrs.field(factory=EngineFlags)
    meter: CpuMeter = attrs.field(factory=CpuMeter)


routes = Blueprint("control", __name__)


def context() -> AdminContext:
    """Return the context of the application that handles the request."""
    return cast("AdminContext", current_app.config["CONTEXT"])


def json_response(value: object, status: int = 200) -> Response:
    """Return the response with a value that JSON can hold, or with views."""
    return Response(to_json(value), status=status, content_type="application/json")


def long_response(parts: Iterator[str], content_type: str = "application/json") -> Response:
    """Return the response whose body these parts are."""
    return Response(b"" if request.method == "HEAD" else Pieces(parts), content_type=content_type)


async def read_json() -> Any:
    """Return the parsed body of the request. Raises ApiError 400 for a body that is not JSON."""
    try:
        return json.loads(await request.get_data())
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"The body is not JSON: {error}.") from error


@routes.get("/metrics")
async def _metrics() -> Response:
    with_workers = read_flag(request.args, "workers", default=True)
    parts = await context().scraper.expose(context().metrics.families(), with_workers=with_workers)
    return long_response(parts, CONTENT_TYPE_LATEST)


# Models.


def _allowed() -> frozenset[str] | None:
    """Return the names that the caller may ask for; None: all."""
    return None if g.caller.key is None else g.caller.key.models


def _entry(here: AdminContext, name: str, model: ModelCard, owner: str) -> dict[str, object]:
    loaded, created = here.registry.is_loaded(model.id), int(here.started_at)
    return entry_of(attrs.evolve(model, id=name), created, owner or "ichat", loaded=loaded)


@routes.get("/v1/models")
async def _models() -> Response:
    here, allowed, aliases = context(), _allowed(), context().aliases()
    if allowed is not None:
        return long_response(
            _list_parts(here, sorted(allowed), lambda name: listed_model(name, here.registry, aliases))
        )
    found = await in_turns(listed_models(here.registry, aliases))
    return long_response(_list_parts(here, sorted(found), found.get))


def _list_parts(here: AdminContext, names: Iterable[str], find: Callable[[str], Listed | None]) -> Iterator[str]:
    """Return the list of models in parts; `find` returns what is listed by a name."""
    yield '{"object": "list", "data": ['
    comma = ""
    for name in names:
        found = find(name)
        yield "" if found is None else comma + to_json(_entry(here, name, *found))
        comma = comma if found is None else ", "
    yield "]}"


@routes.get("/v1/models/<path:name>")
async def _one_model(name: str) -> Response:
    here, allowed = context(), _allowed()
    found = listed_model(name, here.registry, here.aliases()) if allowed is None or name in allowed else None
    if found is None:
        raise errors.model_not_found(name, near_models(name, here.registry, here.aliases(), allowed))
    return json_response(_entry(here, name, *found))


# Workers.


@routes.post("/v1/workers/heartbeat")
@routes.post("/register")
async def _heartbeat() -> Response:
    """Managed workers send here; the front door has the same receiver for what comes over the gateway's port."""
    body = cast("bytes", await request.get_data())
    return Response(await context().heartbeats.receive(body, g.caller), content_type="application/json")


@routes.post("/v1/workers/prefixes")
async def _prefixes() -> Response:
    """Managed workers send here, as for heartbeats."""
    body = cast("bytes", await request.get_data())
    return Response(await context().prefix_reports.receive(body, g.caller), content_type="application/json")


def _known(worker_id: str) -> WorkerRecord:
    """Return the worker of this id. Raises ApiError 404."""
    registry = context().registry
    worker = registry.get(worker_id)
    if worker is None:
        ids = [one.id for one in registry]
        names = ", ".join(ids[:NAMED_MAX]) or "none"
        others = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
        raise ApiError(404, "not_found", f"There is no worker {worker_id}. Workers here: {names}{others}.")
    return worker


@routes.get("/v1/admin/workers")
async def _workers() -> Response:
    query = read_worker_query(request.query_string.decode("latin-1"))
    return long_response(worker_parts(context().registry, query))


@routes.get("/v1/admin/workers/<worker_id>")
async def _one_worker(worker_id: str) -> Response:
    return json_response(context().registry.describe(_known(worker_id)))


@routes.post("/v1/admin/workers/launch")
async def _launch() -> Response:
    here = context()
    spec = read_worker(await read_json(), here.reloader.config)
    if _read_dry_run():
        objections = await here.supervisor.objections_to(spec, is_trial=True)
        return json_response(views.LaunchCheck(objections, here.supervisor.command_of(spec), shown_section(spec)))
    worker = await here.supervisor.launch(spec)
    return json_response(views.Launched(worker.id, context().registry.state(worker.record)), 202)


@routes.delete("/v1/admin/workers/<worker_id>")
async def _stop(worker_id: str) -> Response:
    worker, supervisor = _known(worker_id), context().supervisor
    managed = supervisor.get(worker_id)
    if managed is None:
        pid, host = (worker.heartbeat.pid, worker.heartbeat.host) if worker.heartbeat else (0, "?")
        raise ApiError(
            409,
            "not_managed",
            f"Worker {worker_id} was not started by this gateway: stop it where it was started"
            f" (process {pid} on {host}).",
        )
    await supervisor.remove(managed, seconds_of("drain_s", context().reloader.config.timeouts.drain_s))
    return json_response(views.Stopped(worker_id))


@routes.post("/v1/admin/route")
async def _explain() -> Response:
    """Show where a request would go now: nothing is sent, and nothing changes."""
    here = context()
    question = await read_question(cast("bytes", await request.get_data()), request.args)
    settings, lengths = here.reloader.config.routing, here.prompt_lengths
    view = await explain_request(
        here.registry, here.balancer, here.aliases(), question, settings=settings, lengths=lengths
    )
    view = attrs.evolve(view, load=here.supervisor.loader.preview(view.model))
    return long_response(with_long_list(view, "candidates", view.candidates))


# The cluster, logs, and the configuration.


@routes.get("/v1/admin/cluster/status")
async def _status() -> Response:
    here = context()
    registry, gpus = here.registry, await find_gpus()
    pids, told = here.supervisor.pids, registry.machines()

    def read() -> tuple[HostResources, MachineReport]:
        own = read_machine(here.meter, gpus, pids)
        return read_resources(here.meter, gpus, pids), own

    resources, own = await trio.to_thread.run_sync(read)
    models = [here.overview.model(name) for name in sorted(registry.names())]
    status = views.ClusterStatus(
        gateway=here.overview.gateway(),
        resources=resources,
        machines=[],
        workers=Counter[State](map(registry.state, registry)),
        models=models,
    )
    return long_response(with_long_list(status, "machines", machines_of(own, told)))


@routes.get("/v1/admin/cluster/version")
async def _version() -> Response:
    packages = {name: metadata.version(name) for name in PACKAGES}
    heartbeats = [worker.heartbeat for worker in context().registry if worker.heartbeat is not None]
    workers = (views.WorkerVersions(one.worker_id, one.backend, one.versions) for one in heartbeats)
    version = views.Version(ichat.__version__, platform.python_version(), packages, [])
    return long_response(with_long_list(version, "workers", workers))


@routes.get("/v1/logs/stream/<worker_id>")
async def _logs(worker_id: str) -> Response:
    query = read_query(request.query_string.decode("latin-1"), request.headers.get("last-event-id", ""))
    blocks = await context().log_store.stream(worker_id, query)
    headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
    return Response(b"" if request.method == "HEAD" else blocks, headers=headers)


@routes.post("/v1/admin/config/reload")
async def _reload() -> Response:
    return json_response(await context().reloader.reload(dry_run=_read_dry_run(), why="asked over the API"))


def _read_dry_run() -> bool:
    """Return whether nothing is to be done. Raises ApiError 400 for any other parameter: it may be that, misspelt."""
    values = read_parameters(request.query_string.decode("latin-1"), ("dry_run",))
    return read_flag(values, "dry_run", default=False)


def seconds_of(name: str, default: float) -> float:
    """Return the seconds that the query has under this name. Raises ApiError 400."""
    text = request.args.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= DRAIN_S_MAX:
        raise errors.bad_request(f"{name} must be from 0 to {DRAIN_S_MAX:g} seconds, not {text!r}.", param=name)
    return value
