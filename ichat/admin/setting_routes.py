"""The handlers that show what there is to set: the configuration in force, and the engines with their flags."""

import attrs
import trio
from quart import Blueprint, Response

from ichat.admin import views
from ichat.admin.config_view import changed_keys, shown_section
from ichat.admin.routes import context, json_response
from ichat.supervisor.engine_flags import engines_of

routes = Blueprint("settings", __name__)


@routes.get("/v1/admin/config")
async def _config() -> Response:
    reloader = context().reloader
    config = reloader.config
    return json_response(
        views.ConfigView(
            path=str(reloader.path) if reloader.path is not None else None,
            file_changed=await reloader.has_file_changed(),
            watched=reloader.path is not None and config.server_settings.watch_config,
            settings=shown_section(config),
            changed=changed_keys(config),
        )
    )


@routes.get("/v1/admin/engines")
async def _engines() -> Response:
    found = await trio.to_thread.run_sync(engines_of, context().reloader.config)
    return json_response(views.EngineList([views.EngineView(**attrs.asdict(one)) for one in found]))


@routes.get("/v1/admin/engines/<backend>/flags")
async def _flags(backend: str) -> Response:
    here = context()
    python, flags = await here.engine_flags.ask(here.reloader.config, backend)
    return json_response({"engine": backend, "python": python, "flags": flags})
