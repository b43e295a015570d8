"""SGLang's arguments: reading them with its own parser, checking them, and the facts about the model in them."""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ichat.config.package_data import read_toml
from ichat.engines.engine import EngineInfo
from ichat.engines.engine_arguments import check_given, parsing, refused_as, shown_args, versions_with
from ichat.engines.flag_list import EngineFlag, flags_of
from ichat.engines.flags import ENGINE_KEYS, FlagOutcome
from ichat.engines.kv_events import KvEvents
from ichat.engines.ray_check import check_ray
from ichat.engines.sglang.memory import why_no_sleep
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol.messages import Group

_SERVER_FLAGS: Mapping[str, Sequence[object]] = read_toml("ichat.engines.sglang", "names.toml")["server_flags"]
"""Flags that concern SGLang's own HTTP server, which the worker replaces, with the only values that they may have."""
PAGE_TOKENS_MIN = 16
"""SGLang makes an event for each page of its cache, on its scheduler: smaller pages cost too much."""


class Parser(argparse.ArgumentParser):
    """A parser that raises Exit 64."""

    def error(self, message: str) -> Any:
        """Raise Exit 64."""
        raise usage_error(message)


def list_flags() -> list[EngineFlag]:
    """Return SGLang's flags, those of its own HTTP server hidden."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser()
    ServerArgs.add_cli_args(parser)
    return marked_flags(parser)


def marked_flags(parser: argparse.ArgumentParser) -> list[EngineFlag]:
    """Return the flags of SGLang's parser, those of its own HTTP server hidden."""
    return flags_of(parser, without=[*_SERVER_FLAGS, *ENGINE_KEYS])


def read_args(words: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments as they were given. Raises Exit 64; Exit 0 after `--help`."""
    logging.disable()  # the same warnings appear again when SGLang reads them
    try:
        with parsing(), refused_as(usage_error, argparse.ArgumentError, ValueError, TypeError):
            args = parser.parse_args(words)
    finally:
        logging.disable(logging.NOTSET)
    _check_given(args, parser)
    return args


def make_server_args(words: list[str]) -> Any:
    """Return SGLang's `ServerArgs`, made as it does itself. Raises Exit 64; Exit 0 after `--help`."""
    from sglang.srt.server_args import prepare_server_args

    with contextlib.suppress(ImportError):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    wrong = (argparse.ArgumentError, ValueError, TypeError, AssertionError, OSError)
    try:
        with parsing(), refused_as(usage_error, *wrong):
            record = prepare_server_args(words)
            try:
                if hasattr(record, "resolve_once"):
                    record.resolve_once()
            except (RuntimeError, OSError):  # a missing GPU or hub is reported by the load, which resolves a new record
                record = prepare_server_args(words)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return record


def check_args(args: Any, parser: argparse.ArgumentParser) -> None:
    """Check before the load the conditions that SGLang would check after it. Raises Exit 64, Exit 69."""
    _check_given(args, parser)
    if getattr(args, "use_ray", False):
        check_ray(args.tp_size * args.pp_size)


def _check_given(args: Any, parser: argparse.ArgumentParser) -> None:
    flags = {action.dest for action in parser._actions}
    own = {name: allowed for name, allowed in _SERVER_FLAGS.items() if name in flags}
    check_given("SGLang", args, args.model_path, own, usage_error)


def usage_error(message: str) -> Exit:
    """Return Exit 64 with SGLang's message."""
    text = " ".join(message.split())
    return Exit(EXIT_USAGE, f"SGLang refuses these arguments: {text}")


def resolved_args(args: Any) -> Mapping[str, Any]:
    """Return every argument with its effective value."""
    return args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)


def words_of(outcomes: Sequence[FlagOutcome]) -> list[str]:
    """Return the engine's command line; SGLang looks for ``--config`` as a word of its own."""
    words: list[str] = []
    for word in (word for outcome in outcomes for word in outcome.passed):
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    return words


def changed_args(given: object, resolved: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of arguments that were given, or have an effective value other than SGLang's default.

    A default of None or `auto` lets SGLang choose; its choice is no change.
    """
    defaults = {action.dest: action.default for action in parser._actions}
    return [
        name
        for name, default in defaults.items()
        if name in resolved and name[0] != "_"
        if getattr(given, name, default) != default or (default not in (None, "auto") and resolved[name] != default)
    ]


def engine_info(
    args: Any, outcomes: Sequence[FlagOutcome], changed: Sequence[str], version: str, events: KvEvents | None
) -> EngineInfo:
    """Return the facts about the engine in its arguments."""
    names = [word for one in outcomes if one.given[:1] == ["--served-model-name"] for word in one.given[1:]]
    group = Group(f"{args.dist_init_addr} {args.model_path}", args.node_rank, args.nnodes) if args.nnodes > 1 else None
    return EngineInfo(
        model_path=args.model_path,
        model_names=names or [args.served_model_name or args.model_path],
        args=shown_args({name: value for name, value in resolved_args(args).items() if name[0] != "_"}),
        versions=versions_with("sglang", version),
        changed_args=changed,
        flag_outcomes=outcomes,
        group=group,
        held=events.held if events is not None else None,
        why_no_sleep=why_no_sleep(resolved_args(args)),
    )


def obstacle_to_events(args: Mapping[str, Any]) -> str | None:
    """Return why the worker cannot listen to SGLang's events, or None."""
    try:
        from sglang.srt.disaggregation.kv_events import BlockStored
    except ImportError:
        return "this version of SGLang has no events about its cache"
    if "session_id" not in BlockStored.__struct_fields__:
        return "the events of this version of SGLang do not say which request they are about"
    if args.get("kv_events_config"):
        return "--kv-events-config is given"
    if args.get("disable_radix_cache") or args.get("is_embedding"):
        return "SGLang caches no prefixes"
    if args.get("enable_session_radix_cache"):
        return "with --enable-session-radix-cache SGLang uses the mark of the events for something else"
    if args.get("dp_size", 1) > 1 or args.get("attn_dp_size", 1) not in (None, 1) or args.get("nnodes", 1) > 1:
        return "several caches serve the model"
    if args.get("enable_hierarchical_cache") or args.get("disaggregation_mode", "null") != "null":
        return "SGLang keeps a part of its cache elsewhere"
    return None


def why_too_dear(args: Mapping[str, Any]) -> str | None:
    """Return why events would cost SGLang too much, or None."""
    page = args.get("page_size") or 1
    if page >= PAGE_TOKENS_MIN:
        return None
    return f"an event for every {page} tokens would cost too much (--page-size {PAGE_TOKENS_MIN} would do)"
