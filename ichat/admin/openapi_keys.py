"""The routes of clients' keys in the OpenAPI document."""

from ichat.admin.key_store import EXPIRES_IN_S_MAX
from ichat.admin.key_views import KeyLimits, KeyList, KeyUsage, KeyView, NewKey, WithdrawnKey
from ichat.admin.openapi_parts import json_body, json_of, operation_of
from ichat.admin.schemas import Schema, or_null, properties_of, view
from ichat.config.schema import Key

_WRONG = {"400": "It is no such key; the message has every reason."}
_KNOWN = {
    "404": "There is no such key.",
    "409": "The key is in the gateway's configuration (`configured_key`).",
}
_NOT_KEPT = {"503": "The file with the keys cannot be written (`not_kept`); nothing was changed."}


def schemas_of_keys() -> dict[str, Schema]:
    """Return the schemas of what these routes take and give, by their names."""
    return {
        "KeyLimits": view(KeyLimits),
        "KeyUsage": view(KeyUsage),
        "Key": view(KeyView),
        "Keys": view(KeyList),
        "NewKey": view(NewKey),
        "WithdrawnKey": view(WithdrawnKey),
        "KeyRequest": {
            **_request("name"),
            "description": "A key to be made. What is left out, or null, is its default.",
        },
        "KeyChange": {
            **_request(),
            "description": "What is to change of a key. What is left out stays; null is the default.",
        },
    }


def _request(*required: str) -> Schema:
    properties = properties_of(Key, without=("key_hash", "key_env"))
    end: dict[str, Schema] = {
        "expires_at": {"type": "number", "description": "When it expires, in seconds since 1970; null: never."},
        "expires_in_s": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": EXPIRES_IN_S_MAX,
            "description": "The same in seconds from now. One of the two may be given.",
        },
    }
    properties = {**properties, **end}
    shown = {name: one if name in (*required, "name") else or_null(one) for name, one in properties.items()}
    return {"type": "object", "properties": shown, "required": list(required), "additionalProperties": False}


def paths_of_keys() -> dict[str, Schema]:
    """Return these routes by their paths."""
    name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/admin/keys": {
            "get": operation_of(
                "keys", "get_keys", "Clients' keys, what they may use, and what they use", json_of("Keys")
            ),
            "post": operation_of(
                "keys",
                "make_key",
                "Make a client's key; the answer has the key itself, which is shown this once",
                json_of("NewKey"),
                status="201",
                body=json_body("KeyRequest"),
                failures={
                    **_WRONG,
                    "409": "The name is taken (`key_exists`), or there"
                    " are `limits.made_keys_max` of them (`too_many_keys`).",
                    **_NOT_KEPT,
                },
            ),
        },
        "/v1/admin/keys/{name}": {
            "parameters": [name],
            "patch": operation_of(
                "keys",
                "change_key",
                "Change what a made key may use, or when it expires",
                json_of("Key"),
                body=json_body("KeyChange"),
                failures={**_WRONG, **_KNOWN, **_NOT_KEPT},
            ),
            "delete": operation_of(
                "keys",
                "withdraw_key",
                "Withdraw a made key: its requests under way go on, the next one gets 401",
                json_of("WithdrawnKey"),
                failures={**_KNOWN, **_NOT_KEPT},
            ),
        },
    }
