"""What flags an engine has, as its own parser says: their names, values, defaults and help.

An operator's form shows them. Nothing is checked by them: a worker's engine reads its arguments itself.
"""

import argparse
import enum
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import attrs

Kind = Literal["switch", "integer", "number", "text", "json"]

TEXT_CHARACTERS_MAX = 4000
"""The longest help of a flag; the rest of a longer one is cut off."""
DEFAULT_CHARACTERS_MAX = 200
"""The longest default that is shown; a longer one, which is an object of the engine's, is left out."""
_WRAPPED_MAX = 4
"""How deep the function is looked for that reads a value, inside others that allow `None` or a better error."""
_LINE_END = re.compile(r"(?<!\n) ?\n ?(?!\n| ?[-*] )")
"""The end of a line that only keeps it short: neither a paragraph ends there, nor begins the next item of a list."""
_KINDS: dict[Any, Kind] = {int: "integer", float: "number", str: "text", json.loads: "json"}


@attrs.frozen
class EngineFlag:
    """One flag of an engine."""

    name: str
    """For example `--max-model-len`."""
    key: str
    """Its name as an argument of a managed worker, for example `max_model_len`."""
    aliases: Sequence[str]
    """Its other names, without those that begin with `--no-`."""
    kind: Kind
    """What its value is; a switch is true or false, and `integer` may be written as 32k."""
    is_list: bool
    """Whether it takes several values."""
    choices: Sequence[str]
    """The only values that it takes; empty: it takes others."""
    default: Any
    """Its default; None: it has none, or the engine chooses."""
    help: str
    """What the engine's own help says of it."""
    group: str
    """The heading under which the engine's help lists it."""


def flags_of(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> list[EngineFlag]:
    """Return the flags that a parser's help shows, in its order, without those of these destinations."""
    found: list[EngineFlag] = []
    for group in parser._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--") and name[:5] != "--no-"]
            is_shown = action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
            if names and is_shown and action.dest not in without:
                found.append(_flag_of(parser, action, names, group.title or ""))
    return found


def _flag_of(parser: argparse.ArgumentParser, action: argparse.Action, names: Sequence[str], group: str) -> EngineFlag:
    return EngineFlag(
        name=names[0].replace("_", "-"),
        key=names[0].removeprefix("--").replace("-", "_"),
        aliases=[*names[1:], *(name for name in action.option_strings if name[:2] != "--")],
        kind=_kind_of(action),
        is_list=action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1),
        choices=[str(_plain(one)) for one in action.choices or () if one is not None],
        default=_default_of(action),
        help=_help_of(parser, action)[:TEXT_CHARACTERS_MAX],
        group=group,
    )


def _kind_of(action: argparse.Action) -> Kind:
    if action.nargs == 0:
        return "switch"
    for reader in _wrapped(action.type, _WRAPPED_MAX):
        name = getattr(reader, "__name__", "")
        if reader in _KINDS:
            return _KINDS[reader]
        if "json" in name or "dict" in name or "dataclass" in name:
            return "json"
        if "int" in name.split("_"):
            return "integer"
    return "text"


def _wrapped(reader: Any, depth: int) -> Iterator[Any]:
    """Return the function that reads a value, and those that it calls as its closure has them."""
    if callable(reader):
        yield reader
        for cell in (getattr(reader, "__closure__", None) or ()) if depth else ():
            yield from _wrapped(cell.cell_contents, depth - 1)


def _default_of(action: argparse.Action) -> Any:
    default = _plain(action.default)
    if default == argparse.SUPPRESS:
        return None
    try:
        text = json.dumps(default)
    except (TypeError, ValueError):
        default = text = str(cast("object", default))
    return default if len(text) <= DEFAULT_CHARACTERS_MAX else None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help with its placeholders filled in, as `--help` would show it."""
    try:
        text = argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""
    except (ValueError, TypeError, KeyError):  # a % that stands for itself
        text = action.help or ""
    return _LINE_END.sub(" ", re.sub(r"[ \t]+", " ", text)).strip()
