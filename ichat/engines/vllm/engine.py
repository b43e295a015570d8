"""vLLM inside the worker: its own parser, its own engine client, its own FastAPI application.

This follows vLLM's `vllm.entrypoints` step by step, without its HTTP server and signal handlers. The places of these
steps, and their parameters, change from release to release: see `places`.
"""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ichat.config.package_data import read_toml
from ichat.engines.adapter import GENERATES, HEARS, POOLS, VLLM_PATHS, ProtocolAdapter
from ichat.engines.children import ProcessFamily, adopt_children, children
from ichat.engines.engine import EngineInfo, Progress, Serve, cards_of, progress_of
from ichat.engines.engine_arguments import check_installed, message_of, refused_as, unusable
from ichat.engines.flag_list import EngineFlag
from ichat.engines.flags import FlagOutcome
from ichat.engines.kv_events import WHY, KvEvents, wanted_events
from ichat.engines.load_phases import load_lines
from ichat.engines.responses import bound_responses
from ichat.engines.versions import check_version
from ichat.engines.vllm.arguments import (
    check_args,
    engine_info,
    follows,
    group_of,
    is_about_arguments,
    list_flags,
    obstacle_to_events,
    parse_args,
    usage_error,
)
from ichat.engines.vllm.calls import fail_aborted, note_usage, tag_requests
from ichat.engines.vllm.places import call_known, symbol
from ichat.errors import engine_busy
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import ModelCard

OLDEST = (0, 12)
NEWEST = (0, 32)
"""The oldest and the newest minor version that this was tested with."""
SLEEP_LEVEL = 1
"""The weights go to the machine's memory. Level 2 drops them: they would be loaded before the first request."""
_WRONG = (ValueError, TypeError, KeyError)
"""The exceptions by which vLLM refuses arguments."""
_METRICS: Mapping[str, str] = read_toml("ichat.engines.vllm", "names.toml")["figures"]
"""The metric that has each figure of `Progress`."""


@attrs.define
class _Switch:
    """Replaces the HTTP server that vLLM's exception handlers ask to exit when the engine has died."""

    should_exit: bool = False


class VLLM:
    """A model in vLLM's `AsyncLLM`."""

    name = "vllm"
    load_lines = load_lines("vLLM")

    def __init__(self) -> None:
        self.adapter = ProtocolAdapter(VLLM_PATHS)
        self._switch = _Switch()
        self._client: Any = None
        self._args = argparse.Namespace()
        self._info: EngineInfo
        self._loaded: Any = None
        self._family = ProcessFamily()
        self._events: KvEvents | None = None
        self._memory: EngineMemory | None = None

    def check(self) -> None:
        """Look for the package without importing it."""
        check_installed("vLLM", "vllm")

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """See `Engine.parse`."""
        try:
            import vllm
        except ImportError as error:
            raise unusable("vLLM", error) from error
        check_version("vLLM", vllm.__version__, OLDEST, NEWEST)
        if self.adapter.settings.responses_max:
            os.environ.setdefault("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        symbol("cli_env_setup")()
        adopt_children()
        self._args, outcomes, defaults = parse_args(argv)
        with refused_as(usage_error, *_WRONG):
            symbol("validate_parsed_serve_args")(self._args)
            check_args(self._args)
        outcomes += self.adapter.guard_media(self._args)
        self._listen(outcomes)
        self._info = engine_info(self._args, outcomes, defaults, vllm.__version__, self._events)
        return self._info

    def _listen(self, outcomes: list[FlagOutcome]) -> None:
        """Let vLLM publish events about its cache, if they are wanted and possible."""
        obstacle = obstacle_to_events(self._args, is_alone=group_of(self._args) is None)
        self._events = wanted_events(self.adapter.settings, obstacle)
        if self._events is not None:
            flag = self._events.flag(enable_kv_cache_events=True)
            outcomes.append(FlagOutcome([], flag, WHY))
            self._args.kv_events_config = symbol("KVEventsConfig")(**json.loads(flag[1]))

    def flags(self) -> Sequence[EngineFlag]:
        """See `Describer.flags`. vLLM reads its help texts only if the command line of its import asks for help."""
        sys.argv.append("--help")
        symbol("cli_env_setup")()
        return list_flags()

    def run(self, *, phase: Callable[[str], None], serve: Serve) -> None:
        """See `Engine.run`."""
        import uvloop

        if follows(self._args):
            self._follow(serve)
        else:
            uvloop.run(self._lead(self._args, serve))

    async def _lead(self, args: argparse.Namespace, serve: Serve) -> None:
        """Load the model, or this machine's part of it, and serve vLLM's application."""
        try:
            context = symbol("build_async_engine_client")(args)
            client = await context.__aenter__()
        except _WRONG as error:
            if is_about_arguments(error):
                raise usage_error(message_of(error)) from error
            raise
        try:
            known: dict[str, Any] = {"args": args, "engine_client": client}
            known["supported_tasks"] = await client.get_supported_tasks()
            known["model_config"] = client.model_config
            known["vllm_config"] = client.vllm_config
            app = call_known(symbol("build_app"), known)
            app.state.server = self._switch
            await call_known(symbol("init_app_state"), {**known, "state": app.state})
            bound_responses(app, self.adapter)
            self._loaded = app.state
            self._family = _family_of(client.vllm_config)
            self._memory = _memory_of(client.vllm_config)
            self._set_routes(app)
            self._client = client
            self.adapter.reports_usage = note_usage(client)
            fail_aborted(client, self._info.model_names[0])
            if self._events is not None:
                tag_requests(client, self._events)
                self._events.open()
            async with app.router.lifespan_context(app):
                await serve(app)
        finally:
            if self._events is not None:
                self._events.close()
            await context.__aexit__(None, None, None)  # noqa: ASYNC102

    def _set_routes(self, app: Any) -> None:
        """Set the routes that vLLM has for this model; it would answer others with `Not Found`."""
        names = (*GENERATES, *POOLS, *HEARS)
        served = [name for name in names if _has_route(app, self.adapter.to_engine(f"/v1/{name}".encode()).decode())]
        self.adapter.serve_only(self._info.model_names[0], served, set(names) - set(served) if served else ())

    def _follow(self, serve: Serve) -> None:
        """Run this machine's part of a model that another machine leads."""
        import vllm
        from vllm.usage.usage_lib import UsageContext

        args = self._args
        with refused_as(usage_error, *_WRONG):
            given = vllm.AsyncEngineArgs.from_cli_args(args)
            config = given.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
        parallel = config.parallel_config
        if getattr(parallel, "node_rank_within_dp", 0) > 0:
            processes = symbol("MultiprocExecutor")(config, monitor_workers=False)
        else:
            known = {
                "target_fn": symbol("EngineCoreProc").run_engine_core,
                "local_engine_count": parallel.data_parallel_size_local,
                "start_index": parallel.data_parallel_rank,
                "local_start_index": 0,
                "vllm_config": config,
                "local_client": False,
                "handshake_address": f"tcp://{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}",
                "executor_class": vllm.v1.executor.Executor.get_class(config),
                "log_stats": not args.disable_log_stats,
            }
            processes = call_known(symbol("CoreEngineProcManager"), known)
        self._family = ProcessFamily(children())
        try:
            asyncio.run(serve(None))  # type: ignore[arg-type]
        finally:
            (getattr(processes, "shutdown", None) or processes.close)()

    async def sleep(self) -> None:
        """See `Sleeper.sleep`. The KV cache is dropped. Raises ApiError 409 while vLLM has requests."""
        if count := self._client.output_processor.get_num_unfinished_requests():
            raise engine_busy("vLLM", count)
        await self._client.sleep(SLEEP_LEVEL)

    async def wake(self) -> None:
        """See `Sleeper.wake`."""
        if await self._client.wake_up() is False:  # older versions return None
            raise RuntimeError("vLLM did not allocate a part of its memory again")

    def why_dead(self) -> str | None:
        """See `Engine.why_dead`."""
        client = self._client
        if (why := self._family.first_dead()) is not None:
            return why
        if client is not None and (client.errored or self._switch.should_exit):
            return f"vLLM's engine core stopped ({type(client.dead_error).__name__}); the log above has the cause"
        return None

    def progress(self) -> Progress:
        """Return vLLM's own metrics, over all of its engines."""
        if self._client is None:
            return Progress()
        from prometheus_client import REGISTRY

        return progress_of(REGISTRY.restricted_registry(list(_METRICS.values())).collect(), _METRICS)

    def memory(self) -> EngineMemory | None:
        """See `Measured.memory`."""
        return self._memory

    def models(self) -> Sequence[ModelCard]:
        """Return the model under each of its names, and its adapters."""
        longest = self._client.model_config.max_model_len if self._client is not None else None
        adapters = getattr(getattr(self._loaded, "openai_serving_models", None), "lora_requests", None) or {}
        if not isinstance(adapters, dict):
            adapters = {adapter.lora_name: adapter for adapter in adapters}
        paths = {name: adapter.lora_path for name, adapter in list(adapters.items())}
        return cards_of(self._info, longest, paths)


def _has_route(app: Any, path: str) -> bool:
    """Return whether an application has a route for `POST`, however deeply it is nested."""
    from starlette.routing import Match

    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    return any(route.matches(scope)[0] == Match.FULL for route in app.routes)


def _family_of(config: Any) -> ProcessFamily:
    """Return the processes that the engine cannot lose; none if vLLM tolerates faults itself."""
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        return ProcessFamily()
    return ProcessFamily(child for child in children("VLLM::") if "Coordinator" not in child.title)


def _memory_of(config: Any) -> EngineMemory:
    """Return the size of the KV cache, as vLLM's engine core has reported it at the end of its start.

    Several engine cores report the sum of their blocks, so that number is left out.
    """
    cache = config.cache_config
    is_alone = getattr(config.parallel_config, "data_parallel_size", 1) == 1
    return EngineMemory(
        tokens=getattr(cache, "kv_cache_size_tokens", None) or None,
        blocks=(cache.num_gpu_blocks or None) if is_alone else None,
        block_tokens=cache.block_size or None,
    )
