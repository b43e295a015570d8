"""The handlers of orders: workers that other machines run, each started there by a code that is used once."""

import socket
from collections.abc import Mapping
from typing import Any, cast

from quart import Response, g, request

from ichat import errors
from ichat.admin import views
from ichat.admin.context import json_response, read_json
from ichat.admin.operations import Operations
from ichat.admin.reload import Reloader
from ichat.admin.schemas import Schema, ref
from ichat.config.checks import is_worker_id
from ichat.config.load import read_worker
from ichat.config.ray import ports_in
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.fleet.order_store import OrderStore
from ichat.fleet.orders import ANYWHERE, VALID_S, VALID_S_MAX, OrderPlace, RemoteOrder
from ichat.protocol.orders import WorkerOrder
from ichat.security.addresses import is_loopback

_ANY = ("", "0.0.0.0", "::")
_NOT_ELSEWHERE: Mapping[str, str] = {
    "load": "A worker on another machine is not loaded on demand: leave load out.",
    "when_idle": "A worker on another machine is not loaded on demand: leave when_idle out.",
    "on_gateway_exit": "A worker on another machine outlives its gateway anyway: leave on_gateway_exit out.",
    "scale": "An order starts a single worker: leave scale out.",
    "replicas": "An order starts a single worker: leave replicas out, and order each copy.",
    "gpus": "The gateway chooses no GPUs of other machines: leave gpus out, or write gpu_ids.",
    "gpu_memory_gib": "The gateway chooses no GPUs of other machines: leave gpu_memory_gib out.",
    "share_gpus": "The gateway does not count the GPUs of other machines: leave share_gpus out.",
}
"""The keys of `[[managed_workers]]` that an order may not have, each with the reason."""

operations = Operations("orders")


@operations.add(
    "POST /v1/workers/order",
    response=WorkerOrder,
    body=ref("OrderRequest"),
    failures={
        "403": "The code is for no order, or the worker is started elsewhere.",
        "409": "Another process has used the code (`code_used`).",
        "410": "The order has ended, or its code was not used in time (`order_ended`).",
        "429": "Too many wrong codes were sent from this address.",
        "503": "The place of the worker is not known yet (`not_placed`): ask again.",
    },
)
async def fetch_order(orders: OrderStore) -> Response:
    """Return the order that a code is for; the code is the key."""
    body = cast("bytes", await request.get_data())
    return Response(await orders.fetch(body, g.caller), content_type="application/json")


@operations.add(
    "POST /v1/workers/end",
    response="PrefixesAnswer",
    body=ref("LaunchEnd"),
    failures={"403": "The key is not that of this launch.", "410": "The launch has ended already (`launch_ended`)."},
)
async def report_end(orders: OrderStore) -> Response:
    """Report how a launch on another machine has ended; its key is dead then."""
    body = cast("bytes", await request.get_data())
    return Response(await orders.report_end(body, g.caller), content_type="application/json")


@operations.add("GET /v1/admin/orders")
async def get_orders(orders: OrderStore) -> views.OrderList:
    """Return the orders for workers on other machines."""
    newest = sorted(orders.orders.by_launch.values(), key=lambda one: one.launch, reverse=True)
    return views.OrderList([_view_of(one) for one in newest])


@operations.add(
    "POST /v1/admin/orders",
    response=views.NewOrder,
    status=201,
    body=ref("OrderedWorker"),
    failures={
        "400": "Another machine cannot run it so; the message has every reason.",
        "409": "The id belongs to another worker (`worker_exists`), or there are too many orders (`too_many_orders`).",
        "503": "The order cannot be kept (`not_kept`).",
    },
)
async def make_order(orders: OrderStore, reloader: Reloader) -> Response:
    """Make an order for a worker that another machine will run; only this answer shows the order's code."""
    table = await read_json()
    if not isinstance(table, dict):
        raise errors.bad_request("An order is a JSON object with the keys of [[managed_workers]].")
    given = cast("dict[str, Any]", table)
    worker_id, valid_s = given.pop("worker_id", None) or "", given.pop("valid_s", None)
    place = _place_in(given)
    spec = _checked(given, worker_id, reloader.config)
    seconds = VALID_S if valid_s is None else valid_s
    if type(seconds) not in (int, float) or not 0 < seconds <= VALID_S_MAX:
        raise errors.bad_request(f"valid_s must be a number of seconds, {VALID_S_MAX:g} at most.", param="valid_s")
    order, code = await orders.make(spec, worker_id, seconds, place)
    address, is_local_only = address_for_others(reloader.config)
    made = views.NewOrder(order.worker_id, order.launch, code, order.expires_at, address, is_local_only)
    response = json_response(made, 201)
    response.headers["cache-control"] = "no-store"
    return response


def _checked(table: dict[str, Any], worker_id: object, config: Config) -> ManagedWorkerConfig:
    """Return the worker in an order. Raises ApiError 400 for a worker that another machine cannot run."""
    spec = read_worker(table, config)
    usual = ManagedWorkerConfig(spec.model_name, spec.model_path)
    if problems := [why for name, why in _NOT_ELSEWHERE.items() if getattr(spec, name) != getattr(usual, name)]:
        raise errors.bad_request(" ".join(problems))
    try:
        if worker_id:
            is_worker_id(cast("str", worker_id))
    except (ValueError, TypeError) as error:
        raise errors.bad_request(f"worker_id: {error}.", param="worker_id") from error
    return spec


def _place_in(table: dict[str, Any]) -> OrderPlace:
    """Return the place in an order that is asked for, removed from its table. Raises ApiError 400."""
    ports = table.pop("ports", None) or ""
    if not ports:
        return ANYWHERE
    if table.get("port"):
        raise errors.bad_request("ports and port exclude each other: give the range, or the port.", param="ports")
    try:
        ports_in(ports)
    except (ValueError, TypeError) as error:
        raise errors.bad_request(f"ports {error}.", param="ports") from error
    return OrderPlace(ports=ports)


def address_for_others(config: Config) -> tuple[str, bool]:
    """Return the gateway's URL for other machines, and whether it listens on loopback alone."""
    settings = config.server_settings
    scheme = "http" if settings.tls_certificate is None else "https"
    host = socket.gethostname() if settings.host in _ANY else settings.host
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{settings.port}", settings.host == "localhost" or is_loopback(settings.host)


def _view_of(order: RemoteOrder) -> views.OrderView:
    return views.OrderView(
        order.worker_id, order.launch, str(order.table.get("model_name", "")), order.made_at, order.expires_at,
        order.fetched_at or None, order.fetched_from, order.ended,
    )  # fmt: skip


def schemas() -> dict[str, Schema]:
    """Return the schema of an order that is asked for, by its name."""
    more: Schema = {
        "type": "object",
        "properties": {
            "worker_id": {
                "type": "string",
                "description": "The worker's id; an earlier order of this worker ends. Left out: a new id.",
            },
            "valid_s": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": VALID_S_MAX,
                "default": VALID_S,
                "description": "For how many seconds the code can be used.",
            },
            "ports": {
                "type": "string",
                "pattern": "^[0-9]+-[0-9]+$",
                "description": "The range of ports on which the worker may listen, in place of `port`.",
            },
        },
    }
    return {"OrderedWorker": {"allOf": [ref("Launch"), more]}}
