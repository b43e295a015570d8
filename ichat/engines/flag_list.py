"""The flags of an engine, from its own parser: their names, values, defaults and help.

An operator's form shows the flags that are not hidden. All of them together reveal a mistake before an engine is
imported (`flag_check.py`).
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
"""The longest help of a flag; a longer text is cut off there."""
DEFAULT_CHARACTERS_MAX = 200
"""The longest default that is shown; a longer default is an object of the engine's and is left out."""
_WRAPPED_MAX = 4
"""The depth of the search for the function that reads a value, inside others that allow `None` or a better error."""
_LINE_END = re.compile(r"(?<!\n) ?\n ?(?!\n| ?[-*] )")
"""The end of a line that only keeps it short: neither a paragraph ends there, nor begins the next item of a list."""
_KINDS: dict[Any, Kind] = {int: "integer", float: "number", str: "text", json.loads: "json"}


@attrs.frozen
class EngineFlag:
    """A flag of an engine."""

    name: str
    """For example `--max-model-len`."""
    key: str
    """Its name as an argument of a managed worker, for example `max_model_len`."""
    aliases: Sequence[str]
    """Its other names, without those that begin with `--no-`."""
    kind: Kind
    """The kind of its value; a switch is true or false, and `integer` may be written as 32k."""
    is_list: bool
    """Whether it accepts several values."""
    choices: Sequence[str]
    """The only values that it accepts; empty: it accepts others."""
    default: Any
    """Its default; None: it has none, or the engine chooses."""
    help: str
    """The engine's own help for it."""
    group: str
    """The heading under which the engine's help lists it."""
    off_names: Sequence[str] = ()
    """The names that turn it off, for example `--no-enable-prefix-caching`."""
    needs_value: bool = True
    """Whether it cannot stand alone, as a switch can."""
    is_hidden: bool = False
    """Whether no form shows it: the engine's help does not, or the worker sets it."""


def flags_of(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> list[EngineFlag]:
    """Return all flags of a parser, in its order. Flags that its help hides, or with these destinations, are hidden."""
    found: list[EngineFlag] = []
    for group in parser._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            on_names = [name for name in names if name[:5] != "--no-"] or names
            if on_names and not isinstance(action, argparse._HelpAction):
                is_hidden = action.help == argparse.SUPPRESS or action.dest in without or on_names[0][:5] == "--no-"
                found.append(_flag_of(parser, action, on_names, group.title or "", is_hidden=is_hidden))
    return found


def _flag_of(
    parser: argparse.ArgumentParser, action: argparse.Action, names: Sequence[str], group: str, *, is_hidden: bool
) -> EngineFlag:
    return EngineFlag(
        name=names[0].replace("_", "-"),
        key=names[0].removeprefix("--").replace("-", "_"),
        aliases=[*names[1:], *(name for name in action.option_strings if name[:2] != "--")],
        kind=_kind_of(action),
        is_list=action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1),
        choices=[str(_plain(one)) for one in action.choices or () if one is not None],
        default=_default_of(action),
        help="" if is_hidden else _help_of(parser, action)[:TEXT_CHARACTERS_MAX],
        group=group,
        off_names=[name for name in action.option_strings if name[:5] == "--no-" and name not in names],
        needs_value=action.nargs not in (0, "?", "*"),
        is_hidden=is_hidden,
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
