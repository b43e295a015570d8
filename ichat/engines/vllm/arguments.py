"""vLLM's arguments: reading them with its own parser, checking them, and the facts about the model in them."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false, reportUnknownMemberType=false

import argparse
import difflib
import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ichat.config.package_data import read_toml
from ichat.engines.engine import EngineInfo
from ichat.engines.engine_arguments import check_given, parsing, refused_as, shown_args, versions_with
from ichat.engines.flag_list import EngineFlag, flags_of
from ichat.engines.flags import ENGINE_KEYS, FlagOutcome
from ichat.engines.kept_flags import keep_own
from ichat.engines.kv_events import KvEvents
from ichat.engines.ray_check import check_ray
from ichat.engines.translation import translate
from ichat.engines.vllm.flags import table
from ichat.engines.vllm.places import symbol
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol.messages import Group

_SERVER_FLAGS: Mapping[str, Sequence[object]] = read_toml("ichat.engines.vllm", "names.toml")["server_flags"]
"""Flags that concern vLLM's own HTTP server, which the worker replaces, with the only values that they may have."""
_ALONE, _RPC_PORT = "127.0.0.1", 29550
"""vLLM's defaults for the address at which the machines of a data-parallel model meet."""
ON_THE_CPU = "ICHAT_SLEEP_ON_THE_CPU"
"""Set to 1 by tests: on the CPU, vLLM refuses its flag, but does all that belongs to a sleep except to free memory."""


def list_flags() -> list[EngineFlag]:
    """Return vLLM's flags, those of its own HTTP server hidden."""
    return _marked_flags(symbol("make_arg_parser")(symbol("FlexibleArgumentParser")()))


def _marked_flags(parser: argparse.ArgumentParser) -> list[EngineFlag]:
    return flags_of(parser, without=[*_SERVER_FLAGS, *ENGINE_KEYS])


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[FlagOutcome], Mapping[str, Any]]:
    """Return the arguments as vLLM reads them, the outcome of each given flag, and the defaults."""

    class Parser(symbol("FlexibleArgumentParser")):
        def error(self, message: str) -> Any:
            raise usage_error(message, self)

    parser = symbol("make_arg_parser")(Parser(prog="ichat.pyz worker --backend vllm"))
    keep_own("vllm", lambda: _marked_flags(parser))
    outcomes = translate(argv, parser, table())
    words = [word for outcome in outcomes for word in outcome.passed]
    if not {word.partition("=")[0] for word in words} & {"--model", "--config", "-h", "--help"}:
        raise usage_error("--model is missing (vLLM would use a model of its own choice)")
    refuse = functools.partial(usage_error, parser=parser)
    with parsing(), refused_as(refuse, argparse.ArgumentError, ValueError, TypeError):
        args = parser.parse_args(words)
    if args.model_tag is not None:
        raise usage_error(
            f"{args.model_tag!r} stands alone; every value needs its flag before it, the model's is --model"
        )
    return args, outcomes, {name: parser.get_default(name) for name in vars(args)}


def check_args(args: argparse.Namespace) -> None:
    """Check before the load the conditions that vLLM itself would check after it. Raises KeyError, Exit 64, Exit 69."""
    if getattr(args, "tool_parser_plugin", None):
        symbol("ToolParserManager").import_tool_parser(args.tool_parser_plugin)
    if getattr(args, "reasoning_parser_plugin", None):
        symbol("ReasoningParserManager").import_reasoning_parser(args.reasoning_parser_plugin)
    symbol("validate_api_server_args")(args)
    check_given("vLLM", args, args.model, _SERVER_FLAGS, usage_error)
    if args.distributed_executor_backend == "ray":
        check_ray(args.tensor_parallel_size * args.pipeline_parallel_size)


def usage_error(message: str, parser: argparse.ArgumentParser | None = None) -> Exit:
    """Return Exit 64 with vLLM's message; `parser` has the flags that an unknown flag may have been meant for."""
    lines = [line.strip() for line in message.splitlines()]
    text = "; ".join(line for line in lines if line and not line.startswith("For further information"))
    if parser is not None and text.startswith("unrecognized arguments:"):
        flags = [option for action in parser._actions for option in action.option_strings]
        for word in text.split()[2:]:
            close = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), flags, 1, 0.7)
            if word.startswith("--") and close:
                text += f" (did you mean {close[0]}?)"
    return Exit(EXIT_USAGE, f"vLLM refuses these arguments: {text}")


def is_about_arguments(error: BaseException) -> bool:
    """Return whether a load failed because of a wrong argument, while vLLM made its configuration."""
    return any(frame.name == "create_engine_config" for frame in traceback.extract_tb(error.__traceback__))


def engine_info(
    args: argparse.Namespace,
    outcomes: Sequence[FlagOutcome],
    defaults: Mapping[str, Any],
    version: str,
    events: KvEvents | None,
) -> EngineInfo:
    """Return the facts about the engine in its arguments."""
    return EngineInfo(
        model_path=args.model,
        model_names=list(args.served_model_name or [args.model]),
        args=shown_args(vars(args)),
        versions=versions_with("vllm", version),
        changed_args=[name for name, value in vars(args).items() if value != defaults[name]],
        flag_outcomes=outcomes,
        group=group_of(args),
        held=events.held if events is not None else None,
        why_no_sleep=why_no_sleep(args, is_alone=group_of(args) is None),
    )


def group_of(args: argparse.Namespace) -> Group | None:
    """Return the group of machines that these arguments describe, or None."""
    nodes = getattr(args, "nnodes", None) or 1
    if nodes > 1:
        return Group(f"{args.master_addr}:{args.master_port} {args.model}", args.node_rank, nodes)
    here = getattr(args, "data_parallel_size_local", None)
    apart = getattr(args, "data_parallel_external_lb", False) or getattr(args, "data_parallel_hybrid_lb", False)
    if not args.headless and (apart or here is None or here >= args.data_parallel_size):
        return None
    meeting = f"{args.data_parallel_address or _ALONE}:{args.data_parallel_rpc_port or _RPC_PORT} {args.model}"
    rank = getattr(args, "data_parallel_start_rank", None)
    return Group(meeting, (rank or 1) if args.headless else 0, args.data_parallel_size)


def follows(args: argparse.Namespace) -> bool:
    """Return whether vLLM serves no requests on this machine."""
    return args.headless or (bool(getattr(args, "node_rank", 0)) and args.data_parallel_size == 1)


def obstacle_to_events(args: argparse.Namespace, *, is_alone: bool) -> str | None:
    """Return why the worker cannot listen to vLLM's events, or None. `is_alone`: no group serves the model."""
    try:
        from vllm.distributed.kv_events import BlockStored
    except ImportError:
        return "this version of vLLM has no events about its cache"
    if "session_id" not in BlockStored.__struct_fields__:
        return "the events of this version of vLLM do not say which request they are about"
    if args.kv_events_config is not None:
        return "--kv-events-config is given"
    if args.enable_prefix_caching is False or args.runner == "pooling":
        return "vLLM caches no prefixes"
    if args.data_parallel_size > 1 or not is_alone:
        return "several caches serve the model"
    if args.kv_transfer_config is not None or getattr(args, "kv_offloading_size", None):
        return "vLLM keeps a part of its cache elsewhere"
    return None


def why_no_sleep(args: argparse.Namespace, *, is_alone: bool) -> str:
    """Return why vLLM cannot give its memory back, as a clause; empty if it can. `is_alone`: no group serves it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get(ON_THE_CPU) != "1":
        return "vLLM gives no memory back on the CPU"
    if not is_alone:
        return "several machines serve the model"
    return "" if args.enable_sleep_mode or current_platform.is_cpu() else "vLLM was started without --enable-sleep-mode"
