"""What an engine's table of flags is made of.

Every engine has a table with a rule for each flag that its own parser does not know: a flag of vLLM (whose names are
the common ones), of the other engine, or of an older release. Flags that the parser knows pass as they were typed.
Names are matched whole. Argparse accepts any unambiguous prefix, which may turn an old flag into an unrelated new one.
The content of a file given to the engine's own ``--config`` is not translated.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.security.redact import is_flag, shown

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@attrs.frozen(repr=False)
class FlagOutcome:
    """What became of one argument."""

    given: Sequence[str]
    """The words that were typed."""
    passed: Sequence[str]
    """The words that the engine gets instead; empty for a flag that is left out."""
    why: str = ""
    """Why they differ, as a clause for a log; empty if only ``_`` became ``-``."""

    def __repr__(self) -> str:
        given = shown(self.given) or "(nothing)"
        return f"{given} -> {shown(self.passed) or 'nothing'}" + (f": {self.why}" if self.why else "")

    __str__ = __repr__


@attrs.frozen
class Flag:
    """One flag, taken apart."""

    name: str
    """With ``-`` for ``_``, for example ``--max-model-len``."""
    values: Sequence[str] = ()
    path: Sequence[str] = ()
    """The keys of ``--name.key.key``."""
    is_part: bool = False
    """Whether a rule made it as a part of the JSON that `name` takes; `values` holds that part as JSON."""

    def words(self) -> list[str]:
        """Return the words that the engine's parser reads."""
        name = ".".join([self.name, *self.path])
        return [f"{name}={self.values[0]}"] if any(map(is_flag, self.values)) else [name, *self.values]


@attrs.frozen
class Replacement:
    """The outcome of a rule: these flags instead; none if the flag is left out."""

    flags: Sequence[Flag]
    why: str = ""


@attrs.frozen
class Refusal:
    """The outcome of a rule: this engine cannot have the flag, for this reason."""

    why: str


Outcome = Replacement | Refusal


class FlagValueError(Exception):
    """A value that a rule cannot accept; the message says what it must be."""


@attrs.frozen
class CommandLine:
    """The whole command line, for rules that depend on other flags."""

    options: Mapping[str, bool]
    """Each option of the engine's own parser, and whether it takes no value."""
    flags: Sequence[Flag]
    long_names: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """The long name of each short option."""

    def value(self, *names: str) -> str | None:
        """Return the last value given to any of these flags."""
        found = [flag.values[0] for flag in self.flags if flag.name in names and flag.values and not flag.path]
        return found[-1] if found else None

    def has(self, *names: str) -> bool:
        """Return whether any of these flags was given."""
        return any(flag.name in names for flag in self.flags)

    def number(self, *names: str, default: int) -> int:
        """Return the whole number given to any of these flags. Raises FlagValueError."""
        return int(number(self.value(*names) or str(default)))


Rule = Callable[[Flag, CommandLine], Outcome | None]
"""Returns what becomes of a flag; None leaves it as it is. Raises FlagValueError."""


@attrs.frozen
class FlagRule:
    """One line of an engine's table."""

    rule: Rule
    is_for_native: bool = False
    """Whether it also applies to a flag that the engine's parser knows."""
    is_object: bool = False
    """Whether the flag takes JSON, merged from several flags before the rule sees it."""


@attrs.frozen
class Table:
    """What an engine does with flags that are not its own."""

    engine: str
    entries: Mapping[str, FlagRule]


# What the tables are written with.


def replace_with(*words: str, why: str = "") -> Replacement:
    """Return a replacement by other flags, written as words."""
    return Replacement([flag for _, flag in split_flags(words)[1]], why)


def renamed(to: str, why: str = "", convert: Callable[[str], str] = str) -> FlagRule:
    """Return the rule of a flag with one value that is called `to` here; `convert` translates the value."""
    return FlagRule(lambda flag, _: Replacement([Flag(to, [convert(single_value(flag))])], why))


def dropped(why: str) -> FlagRule:
    """Return the rule of a flag that is left out."""
    return FlagRule(lambda _flag, _line: Replacement((), why))


def refused(why: str) -> FlagRule:
    """Return the rule of a flag that this engine cannot have; `why` also says what to do."""
    return FlagRule(lambda _flag, _line: Refusal(why))


def switch(on: Outcome, off: Outcome) -> FlagRule:
    """Return the rule of a flag that is on or off: ``--x``, ``--x True``, ``--no-x``, ``--x False``."""
    return FlagRule(lambda flag, _: on if is_on(flag) else off)


def chosen(outcomes: Mapping[str, Outcome | None], other: Outcome | None = None) -> FlagRule:
    """Return the rule of a flag with a fixed set of values; an outcome of None leaves the flag as it is."""
    return FlagRule(lambda flag, _: outcomes.get(single_value(flag).lower(), other))


def part(target: str, *path: str, value: Any) -> Flag:
    """Return a part of the JSON that the flag `target` takes."""
    return Flag(target, [json.dumps(value)], path, is_part=True)


def nested_in(target: str, *path: str, convert: Callable[[str], Any] = str, why: str = "") -> FlagRule:
    """Return the rule of a flag whose value is now inside the JSON of `target`."""
    reason = why or f"it is {'.'.join([target, *path])}"
    return FlagRule(lambda flag, _: Replacement([part(target, *path, value=convert(single_value(flag)))], reason))


def expand_json(rule: Callable[[Mapping[str, Any], CommandLine], Outcome]) -> FlagRule:
    """Return the rule of a flag with JSON; `rule` gets all of it, wherever its parts were given."""
    return FlagRule(lambda flag, line: rule(mapping(single_value(flag)), line), is_object=True)


def also_native(rule: FlagRule) -> FlagRule:
    """Return the rule, applied also to a flag that the engine's parser knows."""
    return attrs.evolve(rule, is_for_native=True)


def same(names: str, rule: FlagRule) -> dict[str, FlagRule]:
    """Return one rule for several flags, whose names are separated by blanks."""
    return dict.fromkeys(names.split(), rule)


def renaming(name: str, values: Mapping[str, str], engine: str) -> FlagRule:
    """Return the rule of a flag whose values have other names at an engine."""

    def rule(flag: Flag, _: CommandLine) -> Outcome | None:
        new = values.get(single_value(flag).lower())
        return None if new in (None, single_value(flag)) else replace_with(name, new, why=f"{engine} calls it so")

    return also_native(FlagRule(rule))


def single_value(flag: Flag) -> str:
    """Return the one value of a flag. Raises FlagValueError."""
    if len(flag.values) != 1:
        raise FlagValueError(f"takes one value, not {len(flag.values)}")
    return flag.values[0]


def is_on(flag: Flag) -> bool:
    """Return whether a flag is on; it has no value, or True or False. Raises FlagValueError."""
    if not flag.values:
        return True
    word = single_value(flag).lower()
    if word not in _TRUE + _FALSE:
        raise FlagValueError("takes no value, or one of True and False")
    return word in _TRUE


def number(text: str) -> str:
    """Return a whole number as digits, from vLLM's notation: 32k is 32000, 32K is 32768. Raises FlagValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if match is None or ("." in match[1] and not match[2].islower()):
        raise FlagValueError(f"must be a whole number, such as 2048, 2k (2000) or 2K (2048), not {text!r}")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    if "." in match[1]:
        return str(int(float(match[1]) * 1000**power))
    return str(int(match[1]) * (1000 if match[2].islower() else 1024) ** power)


def fraction(text: str) -> float:
    """Return the value of a number. Raises FlagValueError."""
    try:
        return float(text)
    except ValueError as error:
        raise FlagValueError(f"must be a number, not {text!r}") from error


def whole(text: str) -> int:
    """Return the value of a whole number. Raises FlagValueError."""
    return int(number(text))


def mapping(text: str) -> dict[str, Any]:
    """Return the value of a JSON object. Raises FlagValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise FlagValueError("takes a JSON object, and this is no JSON") from error
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise FlagValueError("takes a JSON object")


def as_part(flag: Flag) -> Flag:
    """Return a flag with JSON, or with a key and its value, as a part of JSON. Raises FlagValueError."""
    text = single_value(flag)
    if not flag.path:
        return part(flag.name, value=mapping(text))
    if flag.path[-1].endswith("+"):
        return part(flag.name, *flag.path[:-1], flag.path[-1][:-1], value=text.split(","))
    try:
        value = json.loads(text)
    except ValueError:
        value = whole(text) if re.fullmatch(r"[\d.]+[kmgtKMGT]", text) else text
    return part(flag.name, *flag.path, value=value)


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[tuple[list[str], Flag]]]:
    """Return the words before the first flag, and then each flag with its words."""
    strays: list[str] = []
    found: list[list[str]] = []
    for word in argv:
        if is_flag(word):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            strays.append(word)
    return strays, [(words, read_flag(words)) for words in found]


def read_flag(words: Sequence[str]) -> Flag:
    """Return the flag that these words are, its name spelt with ``-``."""
    name, equals, value = words[0].partition("=")
    values = [value, *words[1:]] if equals else list(words[1:])
    if not name.startswith("--"):
        if name.startswith("-O") and len(name) > 2:
            return Flag("-O", [name[2:], *values])
        return Flag(name, values)
    name, *path = name.split(".")
    return Flag("--" + name[2:].replace("_", "-"), values, path)
