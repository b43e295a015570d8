"""vLLM inside the worker: its own parser, its own engine client, its own FastAPI application.

This follows vLLM's `vllm.entrypoints` step by step, without its HTTP server and signal handlers. The places of these
steps, and their parameters, change from release to release: `_PLACES` has the places, `_call` passes the parameters.
"""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false

import argparse
import asyncio
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from platform import python_version
from typing import Any

import attrs

import ichat
from ichat.engines.adapter import GENERATES, HEARS, POOLS, VLLM_PATHS, ProtocolAdapter
from ichat.engines.children import ProcessFamily, adopt_children, children
from ichat.engines.engine import EngineInfo, Progress, Serve
from ichat.engines.flag_list import EngineFlag, flags_of
from ichat.engines.flags import ENGINE_KEYS, FlagOutcome, refuse_engine_keys
from ichat.engines.kept_flags import keep_own
from ichat.engines.kv_events import WHY, KvEvents, wanted_events
from ichat.engines.ray_check import check_ray
from ichat.engines.responses import bound_responses
from ichat.engines.translation import translate
from ichat.engines.versions import check_version
from ichat.engines.vllm.aborts import fail_aborted
from ichat.engines.vllm.events import obstacle_to_events, tag_requests
from ichat.engines.vllm.flags import table
from ichat.engines.vllm.groups import follows, group_of
from ichat.engines.vllm.metrics import read_progress
from ichat.engines.vllm.phases import LOAD_LINES
from ichat.engines.vllm.sleep import fall_asleep, wake_up, why_no_sleep
from ichat.engines.vllm.usage import note_usage
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.protocol.json_text import parsed
from ichat.protocol.messages import ModelCard
from ichat.security.redact import masked

OLDEST = (0, 12)
NEWEST = (0, 32)
"""The oldest and the newest minor version that this was tested with."""

_PLACES: Mapping[str, Sequence[str]] = {
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "validate_api_server_args": ("vllm.entrypoints.launchers.launcher", "vllm.entrypoints.openai.api_server"),
    "cli_env_setup": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
    "build_async_engine_client": (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
    ),
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
    "ToolParserManager": ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
    "ReasoningParserManager": ("vllm.reasoning",),
    "MultiprocExecutor": ("vllm.v1.executor.multiproc_executor",),
    "CoreEngineProcManager": ("vllm.v1.engine.utils",),
    "EngineCoreProc": ("vllm.v1.engine.core",),
    "KVEventsConfig": ("vllm.config.kv_events", "vllm.config"),
}
"""The modules in which vLLM has each name, newest first."""
_SERVER_FLAGS: Mapping[str, Sequence[object]] = {
    "uds": (None,),
    "ssl_keyfile": (None,),
    "ssl_certfile": (None,),
    "ssl_ca_certs": (None,),
    "grpc": (False,),
    "grpc_port": (None,),
    "api_server_count": (None, 1),
}
"""Flags that concern vLLM's own HTTP server, which the worker replaces, with the only values that they may have."""


@attrs.define
class _Switch:
    """Replaces the HTTP server that vLLM's exception handlers ask to exit when the engine has died."""

    should_exit: bool = False


class VLLM:
    """A model in vLLM's `AsyncLLM`."""

    name = "vllm"
    load_lines = LOAD_LINES

    def __init__(self) -> None:
        self.adapter = ProtocolAdapter(VLLM_PATHS)
        self._switch = _Switch()
        self._client: Any = None
        self._args = argparse.Namespace()
        self._info: EngineInfo
        self._loaded: Any = None
        self._family = ProcessFamily()
        self._events: KvEvents | None = None

    def check(self) -> None:
        """Look for the package without importing it."""
        if importlib.util.find_spec("vllm") is None:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"vLLM is not installed for {sys.executable}: run the worker with an interpreter that"
                " has it (PYTHON ichat.pyz worker …), or make one with `./build engine vllm`.",
            )

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """See `Engine.parse`."""
        try:
            import vllm
        except ImportError as error:
            raise Exit(EXIT_UNAVAILABLE, f"vLLM under {sys.executable} cannot be imported: {error}.") from error
        check_version("vLLM", vllm.__version__, OLDEST, NEWEST)
        if self.adapter.settings.responses_max:
            os.environ.setdefault("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
        _symbol("cli_env_setup")()
        adopt_children()
        self._args, outcomes, defaults = _parse(argv)
        try:
            _symbol("validate_parsed_serve_args")(self._args)
            _check(self._args)
        except (ValueError, TypeError, KeyError) as error:
            raise _usage(_words(error)) from error
        outcomes += self.adapter.guard_media(self._args)
        self._listen(outcomes)
        self._info = _info(self._args, outcomes, defaults, vllm.__version__, self._events)
        return self._info

    def _listen(self, outcomes: list[FlagOutcome]) -> None:
        """Let vLLM publish events about its cache, if they are wanted and possible."""
        obstacle = obstacle_to_events(self._args, is_alone=group_of(self._args) is None)
        self._events = wanted_events(self.adapter.settings, obstacle)
        if self._events is not None:
            flag = self._events.flag(enable_kv_cache_events=True)
            outcomes.append(FlagOutcome([], flag, WHY))
            self._args.kv_events_config = _symbol("KVEventsConfig")(**json.loads(flag[1]))

    def flags(self) -> Sequence[EngineFlag]:
        """See `Describer.flags`. vLLM reads its help texts only if the command line of its import asks for help."""
        sys.argv.append("--help")
        _symbol("cli_env_setup")()
        parser = _symbol("make_arg_parser")(_symbol("FlexibleArgumentParser")())
        return flags_of(parser, without=[*_SERVER_FLAGS, *ENGINE_KEYS])

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
            context = _symbol("build_async_engine_client")(args)
            client = await context.__aenter__()
        except (ValueError, TypeError, KeyError) as error:
            if _is_about_arguments(error):
                raise _usage(_words(error)) from error
            raise
        try:
            known: dict[str, Any] = {"args": args, "engine_client": client}
            known["supported_tasks"] = await client.get_supported_tasks()
            known["model_config"] = client.model_config
            known["vllm_config"] = client.vllm_config
            app = _call(_symbol("build_app"), known)
            app.state.server = self._switch
            await _call(_symbol("init_app_state"), {**known, "state": app.state})
            bound_responses(app, self.adapter)
            self._loaded = app.state
            self._family = _family_of(client.vllm_config)
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
        try:
            given = vllm.AsyncEngineArgs.from_cli_args(args)
            config = given.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
        except (ValueError, TypeError, KeyError) as error:
            raise _usage(_words(error)) from error
        parallel = config.parallel_config
        if getattr(parallel, "node_rank_within_dp", 0) > 0:
            processes = _symbol("MultiprocExecutor")(config, monitor_workers=False)
        else:
            known = {
                "target_fn": _symbol("EngineCoreProc").run_engine_core,
                "local_engine_count": parallel.data_parallel_size_local,
                "start_index": parallel.data_parallel_rank,
                "local_start_index": 0,
                "vllm_config": config,
                "local_client": False,
                "handshake_address": f"tcp://{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}",
                "executor_class": vllm.v1.executor.Executor.get_class(config),
                "log_stats": not args.disable_log_stats,
            }
            processes = _call(_symbol("CoreEngineProcManager"), known)
        self._family = ProcessFamily(children())
        try:
            asyncio.run(serve(None))  # type: ignore[arg-type]
        finally:
            (getattr(processes, "shutdown", None) or processes.close)()

    async def sleep(self) -> None:
        """See `Sleeper.sleep`."""
        await fall_asleep(self._client)

    async def wake(self) -> None:
        """See `Sleeper.wake`."""
        await wake_up(self._client)

    def why_dead(self) -> str | None:
        """See `Engine.why_dead`."""
        client = self._client
        if (why := self._family.first_dead()) is not None:
            return why
        if client is not None and (client.errored or self._switch.should_exit):
            return f"vLLM's engine core stopped ({type(client.dead_error).__name__}); the log above has the cause"
        return None

    def progress(self) -> Progress:
        """Return vLLM's own metrics."""
        return Progress() if self._client is None else read_progress()

    def models(self) -> Sequence[ModelCard]:
        """Return the model under each of its names, and its adapters."""
        names = self._info.model_names
        if self._client is None:
            return [ModelCard(name, self._info.model_path) for name in names]
        longest = self._client.model_config.max_model_len
        adapters = getattr(getattr(self._loaded, "openai_serving_models", None), "lora_requests", None) or {}
        if not isinstance(adapters, dict):
            adapters = {adapter.lora_name: adapter for adapter in adapters}
        return [
            *(ModelCard(name, self._info.model_path, None, longest) for name in names),
            *(ModelCard(name, adapter.lora_path, names[0]) for name, adapter in list(adapters.items())),
        ]


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


def _symbol(name: str) -> Any:
    """Return the object of this name, wherever this version of vLLM has it. Raises Exit 69 if it has none."""
    for place in _PLACES[name]:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and place.startswith(error.name):
                continue
            raise Exit(EXIT_UNAVAILABLE, f"vLLM under {sys.executable} cannot be used: {error}.") from error
        except ImportError as error:
            raise Exit(EXIT_UNAVAILABLE, f"vLLM under {sys.executable} cannot be used: {error}.") from error
        if hasattr(module, name):
            return getattr(module, name)
    import vllm

    raise Exit(EXIT_UNAVAILABLE, f"vLLM {vllm.__version__} has no {name} where it was looked for: {_PLACES[name]}.")


def _call(function: Any, known: Mapping[str, Any]) -> Any:
    """Call a function with those of the known arguments that it has parameters for."""
    return function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[FlagOutcome], Mapping[str, Any]]:
    """Return the arguments as vLLM reads them, the outcome of each given flag, and the defaults."""

    class Parser(_symbol("FlexibleArgumentParser")):
        def error(self, message: str) -> Any:
            raise _usage(message, self)

    parser = _symbol("make_arg_parser")(Parser(prog="ichat.pyz worker --backend vllm"))
    keep_own("vllm", lambda: flags_of(parser, without=[*_SERVER_FLAGS, *ENGINE_KEYS]))
    outcomes = translate(argv, parser, table())
    words = [word for outcome in outcomes for word in outcome.passed]
    if not {word.partition("=")[0] for word in words} & {"--model", "--config", "-h", "--help"}:
        raise _usage("--model is missing (vLLM would take a model of its own choice)")
    try:
        args = parser.parse_args(words)
    except SystemExit as exit_:
        raise Exit(int(exit_.code or 0), "") from exit_
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise _usage(str(error), parser) from error
    if args.model_tag is not None:
        raise _usage(f"{args.model_tag!r} stands alone; every value needs its flag before it, the model's is --model")
    return args, outcomes, {name: parser.get_default(name) for name in vars(args)}


def _check(args: argparse.Namespace) -> None:
    """Check before the load the conditions that vLLM itself would check after it. Raises KeyError, Exit 64, Exit 69."""
    if getattr(args, "tool_parser_plugin", None):
        _symbol("ToolParserManager").import_tool_parser(args.tool_parser_plugin)
    if getattr(args, "reasoning_parser_plugin", None):
        _symbol("ReasoningParserManager").import_reasoning_parser(args.reasoning_parser_plugin)
    _symbol("validate_api_server_args")(args)
    for name, allowed in _SERVER_FLAGS.items():
        if getattr(args, name, allowed[0]) not in allowed:
            raise _usage(f"--{name.replace('_', '-')} concerns vLLM's own HTTP server, which an iChat worker replaces")
    refuse_engine_keys(args, _usage)
    path = pathlib.Path(args.model).expanduser()
    if args.model.startswith(("/", "./", "../", "~")) and not path.exists():
        raise _usage(f"the model {args.model} does not exist")
    if args.distributed_executor_backend == "ray":
        check_ray(args.tensor_parallel_size * args.pipeline_parallel_size)


def _usage(message: str, parser: argparse.ArgumentParser | None = None) -> Exit:
    lines = [line.strip() for line in message.splitlines()]
    text = "; ".join(line for line in lines if line and not line.startswith("For further information"))
    if parser is not None and text.startswith("unrecognized arguments:"):
        flags = [option for action in parser._actions for option in action.option_strings]
        for word in text.split()[2:]:
            close = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), flags, 1, 0.7)
            if word.startswith("--") and close:
                text += f" (did you mean {close[0]}?)"
    return Exit(EXIT_USAGE, f"vLLM refuses these arguments: {text}")


def _words(error: Exception) -> str:
    """Return an error's message; `str` of a KeyError would show it as a literal."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _is_about_arguments(error: BaseException) -> bool:
    """Return whether a load failed because of a wrong argument, while vLLM made its configuration."""
    return any(frame.name == "create_engine_config" for frame in traceback.extract_tb(error.__traceback__))


def _info(
    args: argparse.Namespace,
    outcomes: Sequence[FlagOutcome],
    defaults: Mapping[str, Any],
    version: str,
    events: KvEvents | None,
) -> EngineInfo:
    import torch

    return EngineInfo(
        model_path=args.model,
        model_names=list(args.served_model_name or [args.model]),
        args=parsed(json.dumps(masked(vars(args)), default=str)),
        versions={"ichat": ichat.__version__, "vllm": version, "torch": torch.__version__, "python": python_version()},
        changed_args=[name for name, value in vars(args).items() if value != defaults[name]],
        flag_outcomes=outcomes,
        group=group_of(args),
        held=events.held if events is not None else None,
        why_no_sleep=why_no_sleep(args, is_alone=group_of(args) is None),
    )
