"""The handlers of clients' keys: the list, and keys that are made, changed and withdrawn over the API."""

import time
from typing import Any, cast

import trio
from quart import Response

from ichat import errors
from ichat.admin.context import json_response, long_response, read_json
from ichat.admin.key_store import EXPIRES_IN_S_MAX, OVERLAP_S, OVERLAP_S_MAX, KeyStore
from ichat.admin.key_views import (
    KeyList,
    KeyView,
    Moment,
    NewKey,
    WithdrawnKey,
    view_of_key,
    views_of_keys,
    with_secret,
)
from ichat.admin.lists import with_long_list
from ichat.admin.operations import Operations
from ichat.admin.schemas import PARTS, Schema, or_null, properties_of, ref
from ichat.config.schema import Key
from ichat.security.auth import Auth
from ichat.security.made_keys import MadeKey
from ichat.security.rate_limits import Quotas

_WRONG = {"400": "It is no such key; the message has every reason."}
_KNOWN = {
    "404": "There is no such key.",
    "409": "The key is in the gateway's configuration (`configured_key`).",
}
_NOT_KEPT = {"503": "The file with the keys cannot be written (`not_kept`); nothing was changed."}

operations = Operations("keys")


def _moment() -> Moment:
    return Moment(trio.current_time(), time.time())


def _view_of(made: MadeKey, quotas: Quotas) -> KeyView:
    return view_of_key(made.key, made, quotas.of_key(made.key.name), _moment())


def _new(made: MadeKey, secret: str, quotas: Quotas, status: int) -> Response:
    response = json_response(with_secret(_view_of(made, quotas), secret), status)
    response.headers["cache-control"] = "no-store"
    return response


async def _read_table() -> dict[str, Any]:
    table = await read_json()
    if not isinstance(table, dict):
        raise errors.bad_request('A key is a JSON object, such as {"name": "team-a"}.')
    return cast("dict[str, Any]", table)


@operations.add("GET /v1/admin/keys", response=KeyList)
async def get_keys(store: KeyStore, quotas: Quotas, auth: Auth) -> Response:
    """Return clients' keys with their limits and their usage."""
    shown = views_of_keys(store.configured, [*store.made.by_name.values()], quotas.of_key, _moment())
    return long_response(with_long_list(KeyList(auth.has_keys, []), "keys", shown))


@operations.add(
    "POST /v1/admin/keys",
    response=NewKey,
    status=201,
    body=ref("KeyRequest"),
    failures={
        **_WRONG,
        "409": "The name is in use (`key_exists`), or there are `limits.made_keys_max` of them (`too_many_keys`).",
        **_NOT_KEPT,
    },
)
async def make_key(store: KeyStore, quotas: Quotas) -> Response:
    """Make a client's key; only this answer shows the key itself."""
    return _new(*await store.make(await _read_table()), quotas, 201)


@operations.add(
    "POST /v1/admin/keys/<name>/rotate",
    response=NewKey,
    body=ref("KeyRotation"),
    failures={
        **_WRONG,
        "404": _KNOWN["404"],
        "409": "The key is in the gateway's configuration (`configured_key`), or has expired (`key_expired`).",
        **_NOT_KEPT,
    },
)
async def rotate_key(name: str, store: KeyStore, quotas: Quotas) -> Response:
    """Make another secret for a made key; only this answer shows it. The old secret is accepted for the overlap."""
    return _new(*await store.rotate(name, await _read_table()), quotas, 200)


@operations.add("PATCH /v1/admin/keys/<name>", body=ref("KeyChange"), failures={**_WRONG, **_KNOWN, **_NOT_KEPT})
async def change_key(name: str, store: KeyStore, quotas: Quotas) -> KeyView:
    """Change the limits, the permissions or the expiry of a made key."""
    return _view_of(await store.alter(name, await _read_table()), quotas)


@operations.add("DELETE /v1/admin/keys/<name>", failures={**_KNOWN, **_NOT_KEPT})
async def withdraw_key(name: str, store: KeyStore) -> WithdrawnKey:
    """Withdraw a made key: its unfinished requests go on, the next request gets 401."""
    await store.withdraw(name)
    return WithdrawnKey(name, len(store.configured) + len(store.made.by_name))


def schemas() -> dict[str, Schema]:
    """Return the schemas of the bodies of these requests, by their names."""
    overlap_s = PARTS["properties"]["rotation"]["overlap_s"] | {"maximum": OVERLAP_S_MAX, "default": OVERLAP_S}
    return {
        "KeyRequest": _request("A key to make. Null and missing members have their defaults.", "name"),
        "KeyChange": _request("The changes of a key. Missing members stay; null is the default."),
        "KeyRotation": {"type": "object", "properties": {"overlap_s": overlap_s}, "additionalProperties": False},
    }


def _request(description: str, *required: str) -> Schema:
    expiry = PARTS["properties"]["key"]
    properties = {**properties_of(Key, without=("key_hash", "key_env")), **expiry}
    properties["expires_in_s"] = {**expiry["expires_in_s"], "maximum": EXPIRES_IN_S_MAX}
    return {
        "type": "object",
        "properties": {name: one if name == "name" else or_null(one) for name, one in properties.items()},
        "required": list(required),
        "additionalProperties": False,
        "description": description,
    }
