"""Arguments that an engine would refuse, by the list of its flags: names, kinds of values and choices.

The engine is not imported. A value is refused only where no version of a reader would accept it: the engine itself
reports subtler mistakes.
"""

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ichat.engines.flags import Flag, FlagValueError, Table, number, split_flags
from ichat.engines.translation import try_translation

SHOWN_CHOICES_MAX = 12
"""How many choices a refusal names."""
_NO_NUMBER = ("", "none", "null", "auto")
"""Other values that readers of numbers accept."""

FlagEntry = Mapping[str, Any]
"""An `EngineFlag` as JSON has it."""


def refusals_of(backend: str, argv: Sequence[str], flags: Sequence[FlagEntry]) -> list[str]:
    """Return a clause for each argument that an engine with these flags would refuse; the clause names the argument.

    `argv` has the arguments that the worker would hand to the engine.
    """
    table = _table_of(backend)
    by_name = {name: flag for flag in flags for name in _names_of(flag)}
    outcomes, refusals = try_translation(argv, _parser_of(flags), table or Table(backend, {}))
    if table is None:  # an engine from elsewhere may know more than its list has: only a likely slip is reported
        refusals = [refusal for refusal in refusals if "did you mean" in refusal]
    passed = [word for outcome in outcomes for word in outcome.passed]
    for _, flag in split_flags(passed)[1]:
        entry = by_name.get(flag.name)
        if entry is not None and not flag.path:
            refusals += _refusals_of_values(flag, entry)
    return list(dict.fromkeys(refusals))


def engine_name(backend: str) -> str:
    """Return the name of an engine in messages."""
    table = _table_of(backend)
    return backend if table is None else table.engine


def _table_of(backend: str) -> Table | None:
    if backend == "vllm":
        from ichat.engines.vllm.flags import table
    elif backend == "sglang":
        from ichat.engines.sglang.flags import table
    else:
        return None
    return table()


def _names_of(flag: FlagEntry) -> list[str]:
    names = [str(flag["name"]), *flag.get("aliases", ()), *flag.get("off_names", ())]
    return list(dict.fromkeys(name.replace("_", "-") if name.startswith("--") else name for name in names))


def _parser_of(flags: Sequence[FlagEntry]) -> argparse.ArgumentParser:
    """Return a parser with the names of the engine's; it reads nothing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for flag in flags:
        action = "store_true" if flag.get("kind") == "switch" else "store"
        parser.add_argument(*_names_of(flag), dest=str(flag["name"]), action=action)
    return parser


def _refusals_of_values(flag: Flag, entry: FlagEntry) -> Iterator[str]:
    if entry.get("kind") == "switch":
        return
    if not flag.values and entry.get("needs_value"):
        yield f"{flag.name} needs a value"
    if len(flag.values) > 1 and not entry.get("is_list"):
        yield f"{flag.name} takes one value, not {len(flag.values)} ({', '.join(flag.values[:SHOWN_CHOICES_MAX])})"
    choices: Sequence[str] = entry.get("choices") or ()
    for value in flag.values:
        if choices:
            yield from _refusal_of_choice(flag.name, value, choices)
        elif why := _refusal_of_kind(value, entry.get("kind")):
            yield f"{flag.name} {why}, not {value!r}"


def _refusal_of_choice(name: str, value: str, choices: Sequence[str]) -> Iterator[str]:
    known = {choice.lower(): choice for choice in choices}
    if value.lower() in known or value.lower() in _NO_NUMBER:
        return
    close = difflib.get_close_matches(value.lower(), known, 1, 0.6)
    meant = f" (did you mean {known[close[0]]}?)" if close else ""
    more = f" and {len(choices) - SHOWN_CHOICES_MAX} more" if len(choices) > SHOWN_CHOICES_MAX else ""
    yield f"{name} takes one of {', '.join(choices[:SHOWN_CHOICES_MAX])}{more}, not {value!r}{meant}"


def _refusal_of_kind(value: str, kind: object) -> str:
    """Return the required form of values of this kind, as a clause, if this value lacks it; otherwise ""."""
    if value.strip().lower() in _NO_NUMBER:
        return ""
    if kind == "integer":
        try:
            number(value)
        except FlagValueError:
            return "takes a whole number"
    elif kind == "number":
        try:
            float(value)
        except ValueError:
            return "takes a number"
    elif kind == "json" and value.lstrip()[:1] in ("{", "["):
        try:
            json.loads(value)
        except ValueError:
            return "takes JSON"
    return ""
