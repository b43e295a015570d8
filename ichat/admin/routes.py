"""The control plane's routes for operators: workers, their logs, the cluster, the configuration."""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import attrs
import trio
from quart import Response, request
from quart_trio import QuartTrio

import ichat
from ichat import errors
from ichat.admin import views
from ichat.admin.openapi import document
from ichat.admin.reload import Reloader
from ichat.config.schema import DRAIN_S_MAX, read_worker
from ichat.errors import ApiError
from ichat.hardware.gpus import find_gpus
from ichat.hardware.host import CpuMeter, HostResources, read_resources
from ichat.hardware.machines import MachineView, machines_of, read_machine
from ichat.http import sse
from ichat.observability.logs.store import LogStore
from ichat.observability.logs.stream import read_query
from ichat.routing.balancer import Balancer
from ichat.routing.registry import Registry
from ichat.routing.worker_record import State, WorkerRecord
from ichat.security.auth import Auth
from ichat.supervisor.supervisor import Supervisor

PACKAGES = ("trio", "hypercorn", "quart", "quart-trio", "httpx", "h11", "attrs", "cattrs")


@attrs.frozen
class AdminContext:
    """What the control plane shows and steers."""

    registry: Registry
    balancer: Balancer
    supervisor: Supervisor
    logbook: LogStore
    reloader: Reloader
    auth: Callable[[], Auth]
    """Gives who may do what at the moment."""
    gateway_id: str
    """Tells one start of the gateway from the next."""
    started_at: float
    """In seconds since 1970."""
    meter: CpuMeter = attrs.field(factory=CpuMeter)


def json_response(value: object, status: int = 200) -> Response:
    """Return the response with a value that JSON can hold, or with views."""
    return Response(json.dumps(value, default=_plain), status=status, content_type="application/json")


def _plain(value: Any) -> Mapping[str, Any]:
    return value.describe() if isinstance(value, MachineView) else attrs.asdict(value, recurse=False)


async def read_json() -> Any:
    """Read the request's body. Raises ApiError 400 where it is not JSON."""
    try:
        return json.loads(await request.get_data())
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"The body is not JSON: {error}.") from error


def add_routes(app: QuartTrio, parts: AdminContext) -> None:
    """Add the routes below /v1/admin and /v1/logs, and /openapi.json."""
    _add_workers(app, parts)
    _add_cluster(app, parts)

    @app.get("/v1/logs/stream/<worker_id>")
    async def logs(worker_id: str) -> Response:
        query = read_query(request.query_string.decode("latin-1"), request.headers.get("last-event-id", ""))
        blocks = await parts.logbook.stream(worker_id, query)
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        return Response(b"" if request.method == "HEAD" else blocks, headers=headers)

    @app.post("/v1/admin/config/reload")
    async def reload() -> Response:
        dry_run = _flag("dry_run")
        return json_response(await parts.reloader.reload(dry_run=dry_run, why="asked over the API"))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return json_response(document())


def _add_workers(app: QuartTrio, parts: AdminContext) -> None:
    registry, supervisor = parts.registry, parts.supervisor

    def known(worker_id: str) -> WorkerRecord:
        worker = registry.get(worker_id)
        if worker is None:
            names = ", ".join(one.id for one in registry) or "none"
            raise ApiError(404, "not_found", f"There is no worker {worker_id}. Workers here: {names}.")
        return worker

    @app.get("/v1/admin/workers")
    async def workers() -> Response:
        return json_response({"object": "list", "data": [registry.describe(worker) for worker in registry]})

    @app.get("/v1/admin/workers/<worker_id>")
    async def one_worker(worker_id: str) -> Response:
        return json_response(registry.describe(known(worker_id)))

    @app.post("/v1/admin/workers/launch")
    async def launch() -> Response:
        worker = await supervisor.launch(read_worker(await read_json(), parts.reloader.config))
        return json_response(views.Launched(worker.id, registry.state(worker.record)), 202)

    @app.delete("/v1/admin/workers/<worker_id>")
    async def stop(worker_id: str) -> Response:
        worker = known(worker_id)
        managed = supervisor.get(worker_id)
        if managed is None:
            pid, host = (worker.heartbeat.pid, worker.heartbeat.host) if worker.heartbeat else (0, "?")
            raise ApiError(
                409,
                "not_managed",
                f"Worker {worker_id} was not started by this gateway: stop it where it was started"
                f" (process {pid} on {host}).",
            )
        await supervisor.remove(managed, _seconds("drain_s", parts.reloader.config.timeouts.drain_s))
        return json_response(views.Stopped(worker_id))


def _add_cluster(app: QuartTrio, parts: AdminContext) -> None:
    registry, balancer = parts.registry, parts.balancer

    @app.get("/v1/admin/cluster/status")
    async def status() -> Response:
        gpus = await find_gpus()
        pids, told = parts.supervisor.pids, registry.machines()

        def read() -> tuple[HostResources, list[MachineView]]:
            own = read_machine(parts.meter, gpus, pids)
            return read_resources(parts.meter, gpus, pids), machines_of(own, told)

        resources, machines = await trio.to_thread.run_sync(read)
        uptime_s = round(time.time() - parts.started_at, 3)
        models = [
            views.ModelLoad(name, **registry.load_of(name), queued=balancer.waiting_for(name))
            for name in sorted(registry.names())
        ]
        return json_response(
            views.ClusterStatus(
                gateway=views.GatewayView(parts.gateway_id, ichat.__version__, os.getpid(), uptime_s),
                resources=resources,
                machines=machines,
                workers=Counter[State](map(registry.state, registry)),
                models=models,
            )
        )

    @app.get("/v1/admin/cluster/version")
    async def version() -> Response:
        packages = {name: metadata.version(name) for name in PACKAGES}
        heartbeats = [worker.heartbeat for worker in registry if worker.heartbeat is not None]
        workers = [views.WorkerVersions(one.worker_id, one.backend, one.versions) for one in heartbeats]
        return json_response(views.Version(ichat.__version__, platform.python_version(), packages, workers))


def _flag(name: str) -> bool:
    value = request.args.get(name, "false").lower()
    if value not in ("1", "0", "true", "false", "yes", "no"):
        raise errors.bad_request(f"{name} must be true or false, not {value!r}.", param=name)
    return value in ("1", "true", "yes")


def _seconds(name: str, default: float) -> float:
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
