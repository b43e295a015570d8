"""The routes that show what there is to set, for `openapi.py`."""

from ichat.admin.openapi_parts import json_of, operation_of
from ichat.admin.schemas import Schema


def paths_of_settings() -> dict[str, Schema]:
    """Return the operations of `setting_routes.py`, by their paths."""
    backend: Schema = {"name": "backend", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/admin/config": {
            "get": operation_of(
                "cluster", "get_config", "The configuration in force, without secrets", json_of("Config")
            )
        },
        "/v1/admin/engines": {
            "get": operation_of("cluster", "get_engines", "The engines that workers here may have", json_of("Engines"))
        },
        "/v1/admin/engines/{backend}/flags": {
            "parameters": [backend],
            "get": operation_of(
                "cluster",
                "get_engine_flags",
                "The flags of an engine; its interpreter is run for it, once",
                json_of("EngineFlags"),
                failures={
                    "404": "There is no such engine here.",
                    "409": "Its interpreter does not tell its flags (`engine_unusable`); the message has the cause.",
                },
            ),
        },
    }
