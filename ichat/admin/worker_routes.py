"""The handlers of workers: their heartbeats, and all that operators see and do with workers and models."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import cast

import attrs
import trio
from quart import Response, g, request

from ichat import errors
from ichat.admin import views
from ichat.admin.config_view import shown_section
from ichat.admin.context import (
    json_response,
    long_response,
    query_string,
    read_flags,
    read_json,
    seconds_of,
)
from ichat.admin.explain import explain_request, read_question
from ichat.admin.lists import in_turns, joined, read_worker_query, to_json, with_long_list, worker_parts
from ichat.admin.operations import MODEL_FAILURES, MODEL_KEYS, TEXT, Operations, flag, query
from ichat.admin.overview import Overview
from ichat.admin.reload import Reloader
from ichat.admin.schemas import Schema, ref
from ichat.config.load import read_replicas, read_worker
from ichat.config.replicas import REPLICAS_MAX
from ichat.config.schema import DRAIN_S_MAX
from ichat.errors import ApiError
from ichat.fleet.explain import RouteView
from ichat.fleet.heartbeats import HeartbeatReceiver
from ichat.fleet.model_list import Listed, listed_model, listed_models, near_models
from ichat.fleet.order_store import OrderStore
from ichat.fleet.prefix_reports import PrefixReportReceiver
from ichat.fleet.views import describe
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.http.request_body import read_model_body
from ichat.protocol.messages import HeartbeatResponse, ModelCard
from ichat.protocol.model_entry import ModelEntry, entry_of
from ichat.routing.prefix_chain import PROMPTS
from ichat.supervisor.engine_flags import EngineFlags
from ichat.supervisor.supervisor import Supervisor

NAMED_MAX = 20
"""The error for an unknown worker names at most this many workers."""
_ENDING = "The gateway is about to end (`draining`)."
_WRONG = "A parameter is wrong."
_NO_WORKER = {"404": "There is no such worker."}
_COPIES: Schema = {"type": "integer", "minimum": 0, "maximum": REPLICAS_MAX}
_DRAIN_S = query(
    "drain_s",
    {"type": "number", "minimum": 0, "maximum": int(DRAIN_S_MAX)},
    "Longest drain, in seconds; left out: `timeouts.drain_s`.",
)

operations = Operations("workers")


# Requests of workers. The front door has the same receivers for what arrives over the gateway's port.


async def _heartbeat(heartbeats: HeartbeatReceiver) -> Response:
    """Register a worker, or report its state."""
    body = cast("bytes", await request.get_data())
    return Response(await heartbeats.receive(body, g.caller), content_type="application/json")


for _path, _name in (("/v1/workers/heartbeat", "post_heartbeat"), ("/register", "register")):
    operations.add(
        f"POST {_path}",
        name=_name,
        response=HeartbeatResponse,
        body={"anyOf": [ref("Heartbeat"), ref("ShortHeartbeat")]},
        failures={
            "400": "It is not a heartbeat.",
            "404": "The registration of a short heartbeat is not known (`registration_not_found`): send it whole."
            " Or the gateway has removed this worker of its own (`not_found`).",
            "429": "There are too many workers already.",
        },
    )(_heartbeat)


@operations.add(
    "POST /v1/workers/prefixes",
    response="PrefixesAnswer",
    body=ref("PrefixReport"),
    failures={
        "400": "It is not such a report.",
        "404": "This start of the worker has sent no heartbeat here (`registration_not_found`).",
    },
)
async def post_prefixes(reports: PrefixReportReceiver) -> Response:
    """Report which beginnings of prompts a worker's engine caches, and which no longer; `cleared` applies first."""
    body = cast("bytes", await request.get_data())
    return Response(await reports.receive(body, g.caller), content_type="application/json")


# Workers.


def _known(worker_id: str, table: WorkerTable) -> WorkerRecord:
    """Return the worker of this id. Raises ApiError 404."""
    worker = table.get(worker_id)
    if worker is None:
        ids = [one.id for one in table]
        names = ", ".join(ids[:NAMED_MAX]) or "none"
        others = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
        raise ApiError(404, "not_found", f"There is no worker {worker_id}. Workers here: {names}{others}.")
    return worker


@operations.add(
    "GET /v1/admin/workers",
    response="Workers",
    parameters=[
        flag("full", "Everything known of each, rather than a summary."),
        query("limit", {"type": "integer", "minimum": 1}, "Workers in the answer, at most; left out: all."),
        query("after", TEXT, "Only workers with ids after this id: `last_id` of the page before."),
        query("model", TEXT, "Only workers that serve this model, or will."),
        query("state", ref("State"), "Only workers in this state."),
    ],
    failures={"400": _WRONG},
)
async def get_workers(table: WorkerTable) -> Response:
    """Return all workers, or a page of them."""
    return long_response(worker_parts(table, read_worker_query(query_string())))


@operations.add("GET /v1/admin/workers/<worker_id>", response="Worker", failures=_NO_WORKER)
async def get_worker(worker_id: str, table: WorkerTable) -> object:
    """Return a worker with everything that is known of it."""
    return describe(table, _known(worker_id, table))


@operations.add(
    "POST /v1/admin/workers/launch",
    response=views.Launched,
    status=202,
    other_responses={"200": views.LaunchCheck},
    body=ref("Launch"),
    parameters=[flag("dry_run", "Only say what would keep it from starting.")],
    failures={
        "400": "It cannot be launched so; the message has every reason.",
        "409": "It could not start now: port, GPU, interpreter or model; the message says what to do.",
        "503": _ENDING,
    },
)
async def launch_worker(supervisor: Supervisor, reloader: Reloader, flags: EngineFlags, table: WorkerTable) -> Response:
    """Start a worker and its copies, without waiting for them; the next gateway starts them again."""
    spec = read_worker(await read_json(), reloader.config)
    unchecked = await flags.prepare(reloader.config, spec) or None
    if read_flags("dry_run")[0]:
        objections = await supervisor.objections_to(spec, is_trial=True)
        command, settings = supervisor.command_of(spec), shown_section(spec)
        return json_response(views.LaunchCheck(objections, unchecked, command, settings))
    copies = await supervisor.launch(spec)
    state = table.state(copies[0].record)
    return json_response(views.Launched(copies[0].id, state, [worker.id for worker in copies]), 202)


@operations.add(
    "DELETE /v1/admin/workers/<worker_id>",
    parameters=[_DRAIN_S],
    failures={**_NO_WORKER, "409": "This gateway has not started it (`not_managed`)."},
)
async def stop_worker(
    worker_id: str, supervisor: Supervisor, orders: OrderStore, reloader: Reloader, table: WorkerTable
) -> views.Stopped:
    """Stop a worker that the gateway has started or ordered, and forget it; answers when that is done."""
    drain_s = seconds_of("drain_s", reloader.config.timeouts.drain_s)
    if await orders.end(worker_id, drain_s):
        return views.Stopped(worker_id, in_config=False)
    worker, managed = _known(worker_id, table), supervisor.get(worker_id)
    if managed is None:
        pid, host = (worker.heartbeat.pid, worker.heartbeat.host) if worker.heartbeat else (0, "?")
        what = f"was not started by this gateway: stop it where it was started (process {pid} on {host})"
        if worker.server is not None:
            what = "belongs to the configuration: remove its table from [[registered_servers]], and reload"
        raise ApiError(409, "not_managed", f"Worker {worker_id} {what}.")
    in_config = not managed.is_launched
    await supervisor.remove(managed, drain_s)
    return views.Stopped(worker_id, in_config)


# Models.


def _allowed() -> frozenset[str] | None:
    """Return the names that the caller may ask for; None: all."""
    return None if g.caller.key is None else g.caller.key.models


def _entry(overview: Overview, name: str, model: ModelCard, owner: str) -> dict[str, object]:
    loaded, created = overview.directory.is_loaded(model.id), int(overview.started_at)
    return entry_of(attrs.evolve(model, id=name), created, owner or "ichat", loaded=loaded)


@operations.add("GET /v1/models", tag="models", response="Models")
async def get_models(overview: Overview) -> Response:
    """Return the models that can be asked for now."""
    directory, allowed, aliases = overview.directory, _allowed(), overview.context.aliases
    if allowed is not None:
        entry_of = partial(listed_model, directory=directory, aliases=aliases)
        return long_response(_list_parts(overview, sorted(allowed), entry_of))
    found = await in_turns(listed_models(directory, aliases))
    return long_response(_list_parts(overview, sorted(found), found.get))


def _list_parts(overview: Overview, names: Iterable[str], find: Callable[[str], Listed | None]) -> Iterator[str]:
    """Return the list of models in parts; `find` returns the model listed by a name."""
    yield '{"object": "list", "data": ['
    found = ((name, find(name)) for name in names)
    yield from joined("" if one is None else to_json(_entry(overview, name, *one)) for name, one in found)
    yield "]}"


@operations.add(
    "GET /v1/models/<path:name>",
    tag="models",
    response=ModelEntry,
    path_descriptions={"name": "Slashes in it stand as they are."},
    failures={"404": "There is no such model now."},
)
async def get_model(name: str, overview: Overview) -> object:
    """Return a model that can be asked for now."""
    directory, allowed, aliases = overview.directory, _allowed(), overview.context.aliases
    is_allowed = allowed is None or not allowed.isdisjoint((name, aliases.name_for(name, directory.has)))
    found = listed_model(name, directory, aliases) if is_allowed else None
    if found is None:
        raise errors.model_not_found(name, near_models(name, directory, aliases, allowed))
    return _entry(overview, name, *found)


@operations.add(
    "POST /v1/admin/route",
    response=RouteView,
    body=MODEL_KEYS,
    parameters=[
        query("path", {"enum": [path.decode() for path in PROMPTS]}, "The request's route; left out: by its keys."),
        query("session", TEXT, "The session that the request names (`routing.session_header`)."),
    ],
    failures={status: MODEL_FAILURES[status] for status in ("400", "404")},
)
async def explain_route(overview: Overview, reloader: Reloader, supervisor: Supervisor) -> Response:
    """Return where a request would go now, and why; nothing is sent, and nothing changes."""
    question = await read_question(cast("bytes", await request.get_data()), request.args)
    context = overview.context
    view = await explain_request(
        overview.directory, overview.table, context.balancer, context.aliases, question,
        settings=reloader.config.routing, lengths=context.prompt_lengths,
    )  # fmt: skip
    load, scale = await supervisor.loader.preview(view.model), supervisor.scaler.view(view.model)
    view = attrs.evolve(view, load=load, scale=scale)
    return long_response(with_long_list(view, "candidates", view.candidates))


# Models that are loaded on demand.


def _failures(conflict: str = "") -> dict[str, str]:
    """Return the failures of a change of a model; a conflict may have other causes than that it is not on demand."""
    return {
        "404": MODEL_FAILURES["404"],
        "409": f"None of its workers is an on-demand worker{conflict}.",
        "503": "It failed (`model_not_ready`), or the gateway is about to end (`draining`); the message has the cause.",
    }


@operations.add("POST /v1/admin/models/load", body=MODEL_KEYS, failures=_failures())
async def load_model(supervisor: Supervisor, table: WorkerTable) -> views.ModelChange:
    """Load the model of an on-demand worker, and evict others if they are in the way; answers once it is ready."""
    return await _change(supervisor.loader.load, table)


@operations.add("POST /v1/admin/models/unload", body=MODEL_KEYS, parameters=[_DRAIN_S], failures=_failures())
async def unload_model(supervisor: Supervisor, table: WorkerTable, reloader: Reloader) -> views.ModelChange:
    """End the process of a model's on-demand worker; answers when nothing of it is left."""
    drain_s = seconds_of("drain_s", reloader.config.timeouts.drain_s)
    return await _change(partial(supervisor.loader.unload, drain_s=drain_s), table)


@operations.add(
    "POST /v1/admin/models/sleep",
    body=MODEL_KEYS,
    failures=_failures(", or it is not loaded, or its engine cannot sleep"),
)
async def sleep_model(supervisor: Supervisor, table: WorkerTable) -> views.ModelChange:
    """Have the engine of a model's on-demand worker release its memory, once it has no requests."""
    return await _change(supervisor.loader.sleep, table)


@operations.add("POST /v1/admin/models/wake", body=MODEL_KEYS, failures=_failures(", or none of them is asleep"))
async def wake_model(supervisor: Supervisor, table: WorkerTable) -> views.ModelChange:
    """Wake the on-demand worker of a model; answers once it is ready."""
    return await _change(supervisor.loader.wake, table)


@operations.add(
    "POST /v1/admin/models/<path:name>/replicas",
    body={
        "type": "object",
        "properties": {"min": _COPIES, "max": {**_COPIES, "description": "Left out: `min`."}},
        "required": ["min"],
    },
    path_descriptions={"name": "Slashes in it stand as they are."},
    failures={
        "400": "These are no such numbers, or the model's table does not allow them.",
        "404": MODEL_FAILURES["404"],
        "409": "The model has no table here, or several, or its copies are being restarted.",
    },
)
async def set_replicas(name: str, supervisor: Supervisor, reloader: Reloader) -> views.ReplicasChange:
    """Change the number of a model's copies, until a reload names another; does not wait for them."""
    replicas = read_replicas(await read_json())
    async with reloader.lock:
        scaled = supervisor.copies.scale(name, replicas)
    return views.ReplicasChange(name, replicas.min, replicas.max, scaled.started, scaled.ending)


async def _change(change: Callable[[str], Awaitable[str]], table: WorkerTable) -> views.ModelChange:
    """Change the model that the body names; return its new state, and the time that the change needed.

    `change` returns the id of the worker that it changed, and raises ApiError.
    """
    body = cast("bytes", await request.get_data())
    model, _, _ = await read_model_body(body, ("model",))
    began_at = trio.current_time()
    worker_id = await change(model)
    seconds = round(trio.current_time() - began_at, 3)
    worker = table.get(worker_id)
    state = table.state(worker) if worker is not None else "gone"
    return views.ModelChange(model, worker_id, state, seconds)
