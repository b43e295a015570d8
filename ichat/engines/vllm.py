"""vLLM inside the worker: its own parser, its own engine client, its own FastAPI application.

Written against vLLM 0.32, whose `vllm.entrypoints.launchers` this follows step by step, without its HTTP server and
signal handlers.
"""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false

import argparse
import difflib
import importlib.util
import json
import pathlib
import platform
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import ichat
from ichat.config import is_secret
from ichat.engines import EngineInfo, Progress, Serve
from ichat.engines.child import adopt_children
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit

TESTED = "0.32"
_OURS: Mapping[str, object] = {
    "uds": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "grpc": False,
    "grpc_port": None,
    "headless": False,
    "api_server_count": None,
}
"""Flags that concern vLLM's own HTTP server, which the worker replaces, with the only value that they may have."""


@attrs.define
class _Switch:
    """Stands in for the HTTP server that vLLM's exception handlers ask to exit when the engine has died."""

    should_exit: bool = False


class VLLM:
    """One model in vLLM's `AsyncLLM`."""

    name = "vllm"

    def __init__(self) -> None:
        self._switch = _Switch()
        self._client: Any = None

    def check(self) -> None:
        """Look for the package without importing it."""
        if importlib.util.find_spec("vllm") is None:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"vLLM is not installed for {sys.executable}: run the worker with an interpreter that"
                " has it (PYTHON ichat.pyz worker …), or make one with `./build engine vllm`.",
            )

    def run(
        self,
        argv: Sequence[str],
        *,
        parsed: Callable[[EngineInfo], None],
        phase: Callable[[str], None],
        serve: Serve,
    ) -> None:
        """See `Engine.run`."""
        if not {word.partition("=")[0] for word in argv} & {"--model", "--config", "-h", "--help"}:
            raise _usage("--model is missing (vLLM would take a model of its own choice)")
        phase("importing vLLM")
        try:
            import vllm
            from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
            from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        except ImportError as error:
            raise Exit(EXIT_UNAVAILABLE, _cannot_import(error)) from error
        cli_env_setup()
        adopt_children()
        args = _parse(argv, make_arg_parser)
        try:
            validate_parsed_serve_args(args)
            _check(args)
        except (ValueError, TypeError, KeyError) as error:
            raise _usage(_words(error)) from error
        parsed(_info(args, vllm.__version__))
        phase(f"loading {args.model}")
        import uvloop

        uvloop.run(self._load(args, serve))

    async def _load(self, args: argparse.Namespace, serve: Serve) -> None:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app

        try:
            context = build_async_engine_client(args)
            client = await context.__aenter__()
        except (ValueError, TypeError, KeyError) as error:
            if _is_about_arguments(error):
                raise _usage(_words(error)) from error
            raise
        try:
            tasks = await client.get_supported_tasks()
            app = build_app(args, tasks, client.model_config)
            app.state.server = self._switch
            await init_app_state(client, app.state, args, tasks)
            self._client = client
            async with app.router.lifespan_context(app):
                await serve(app)
        finally:
            await context.__aexit__(None, None, None)  # noqa: ASYNC102

    def why_dead(self) -> str | None:
        """See `Engine.why_dead`."""
        client = self._client
        if client is not None and (client.errored or self._switch.should_exit):
            return f"vLLM's engine core stopped ({type(client.dead_error).__name__}); the log above has the cause"
        return None

    def progress(self) -> Progress:
        """Read vLLM's own metrics."""
        if self._client is None:
            return Progress()
        running = _metric("vllm:num_requests_running")
        waiting = _metric("vllm:num_requests_waiting")
        steps = _metric("vllm:iteration_tokens_total", "vllm:iteration_tokens_total_count")
        tokens = _metric("vllm:generation_tokens", "vllm:generation_tokens_total")
        return Progress(
            running=None if running is None else int(running),
            waiting=None if waiting is None else int(waiting),
            kv_use=_metric("vllm:kv_cache_usage_perc"),
            steps=None if steps is None else int(steps),
            tokens_out=None if tokens is None else int(tokens),
        )


def _metric(name: str, sample: str | None = None) -> float | None:
    """Sum a metric over vLLM's engines, from the registry it reports to; None where it does not report it."""
    from prometheus_client import REGISTRY

    values = [
        found.value
        for metric in REGISTRY.restricted_registry([sample or name]).collect()
        for found in metric.samples
        if found.name == (sample or name)
    ]
    return sum(values) if values else None


def _parse(argv: Sequence[str], make_arg_parser: Callable[[Any], Any]) -> argparse.Namespace:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise _usage(message, self)

    parser = make_arg_parser(Parser(prog="ichat.pyz worker --backend vllm"))
    try:
        args = parser.parse_args(list(argv))
    except SystemExit as exit_:
        raise Exit(int(exit_.code or 0), "") from exit_
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise _usage(str(error), parser) from error
    if args.model_tag is not None:
        raise _usage(f"{args.model_tag!r} stands alone; every value needs its flag before it, the model's is --model")
    return args


def _check(args: argparse.Namespace) -> None:
    """Find before the load what vLLM itself would find after it. Raises KeyError, Exit 64."""
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_api_server_args(args)
    for name, allowed in _OURS.items():
        if getattr(args, name, allowed) != allowed:
            raise _usage(f"--{name.replace('_', '-')} concerns vLLM's own HTTP server, which an iChat worker replaces")
    path = pathlib.Path(args.model).expanduser()
    if args.model.startswith(("/", "./", "../", "~")) and not path.exists():
        raise _usage(f"the model {args.model} does not exist")


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
    """Give the message; a KeyError shows it as a literal."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _is_about_arguments(error: BaseException) -> bool:
    """Tell a wrong argument from a failing load: it is found while vLLM makes its configuration, before any child."""
    return any(frame.name == "create_engine_config" for frame in traceback.extract_tb(error.__traceback__))


def _cannot_import(error: ImportError) -> str:
    try:
        import vllm

        found = f"vLLM {vllm.__version__}"
    except ImportError:
        found = "vLLM"
    return f"{found} under {sys.executable} cannot be used ({error}); this worker was written for vLLM {TESTED}."


def _info(args: argparse.Namespace, version: str) -> EngineInfo:
    import torch

    shown = {name: "***" if value and is_secret(name) else value for name, value in vars(args).items()}
    return EngineInfo(
        model_path=args.model,
        model_names=list(args.served_model_name or [args.model]),
        args=json.loads(json.dumps(shown, default=str)),
        versions={
            "ichat": ichat.__version__,
            "vllm": version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
