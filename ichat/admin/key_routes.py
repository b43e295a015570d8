"""The handlers of clients' keys: the list, and keys that are made, changed and withdrawn over the API."""

import time
from typing import Any, cast

import trio
from quart import Blueprint, Response, request

from ichat import errors
from ichat.admin.key_views import KeyList, KeyView, Moment, WithdrawnKey, view_of_key, views_of_keys, with_secret
from ichat.admin.lists import Pieces, with_long_list
from ichat.admin.routes import context, json_response, read_json
from ichat.security.made_keys import MadeKey

routes = Blueprint("keys", __name__)


def _moment() -> Moment:
    return Moment(trio.current_time(), time.time())


def _view_of(made: MadeKey) -> KeyView:
    return view_of_key(made.key, made, context().quotas.of_key(made.key.name), _moment())


async def _read_table() -> dict[str, Any]:
    table = await read_json()
    if not isinstance(table, dict):
        raise errors.bad_request('A key is a JSON object, such as {"name": "team-a"}.')
    return cast("dict[str, Any]", table)


@routes.get("/v1/admin/keys")
async def _keys() -> Response:
    here = context()
    store = here.key_store
    shown = views_of_keys(store.configured, [*store.made.by_name.values()], here.quotas.of_key, _moment())
    found = KeyList(here.auth().has_keys, [])
    return Response(
        b"" if request.method == "HEAD" else Pieces(with_long_list(found, "keys", shown)),
        content_type="application/json",
    )


@routes.post("/v1/admin/keys")
async def _make() -> Response:
    table = await _read_table()
    made, secret = await context().key_store.make(table)
    response = json_response(with_secret(_view_of(made), secret), 201)
    response.headers["cache-control"] = "no-store"
    return response


@routes.patch("/v1/admin/keys/<name>")
async def _alter(name: str) -> Response:
    return json_response(_view_of(await context().key_store.alter(name, await _read_table())))


@routes.delete("/v1/admin/keys/<name>")
async def _withdraw(name: str) -> Response:
    store = context().key_store
    await store.withdraw(name)
    return json_response(WithdrawnKey(name, len(store.configured) + len(store.made.by_name)))
