"""The parts of an engine's table of flags.

Every engine has a table with a rule for each flag that its own parser does not know: a flag of vLLM (its names are
the common names), of the other engine, or of an older release. Flags that the parser knows pass as they were typed.
Names are matched whole. Argparse accepts any unambiguous prefix, and may so turn an old flag into an unrelated flag.
The content of a file given to the engine's own ``--config`` is not translated.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.config.schema import EngineValue
from ichat.security.redact import is_flag, shown

ENGINE_KEYS = ("api_key", "admin_api_key")
"""Arguments by which an engine asks for a key; the gateway has none for it, so that every request would get 401."""
NO_KEY = "clients' keys belong to the gateway ([[security.keys]] in its configuration)"
"""Why a worker gets no such argument."""
KEY_VARIABLE = "VLLM_API_KEY"
"""The variable that vLLM reads where it gets no such argument."""
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def refuse_engine_keys(args: object, usage_error: Callable[[str], Exception]) -> None:
    """Raise the exception that `usage_error` makes of a sentence if the engine would ask for a key of its own.

    The tables refuse the flags before (`flag_table`); this also finds them in a file given to ``--config``.
    """
    given = [f"--{name.replace('_', '-')}" for name in ENGINE_KEYS if getattr(args, name, None)]
    for what in given:
        raise usage_error(f"{what} is not for a worker: {NO_KEY}")
    if refusal := refusal_of_variable(os.environ):
        raise usage_error(refusal)


def refusal_of_variable(environment: Mapping[str, str]) -> str:
    """Return why a worker cannot have this environment, in a clause; "" where it asks for no key of the engine's."""
    has_key = environment.get(KEY_VARIABLE)
    return f"the environment variable {KEY_VARIABLE} is not for a worker: {NO_KEY}" if has_key else ""


def engine_flags(arguments: Mapping[str, EngineValue]) -> list[str]:
    """Return engine arguments as flags: `max_model_len = 2048` is ``--max-model-len 2048``.

    true is the flag alone, false its ``--no-`` form, a list several values, a table JSON.
    """
    flags: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *(json.dumps(one) if isinstance(one, dict | list) else str(one) for one in value)]
        elif isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags.append(f"--{name}={value}")
    return flags


@attrs.frozen(repr=False)
class FlagOutcome:
    """The outcome of an argument."""

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
    """A flag, split into its parts."""

    name: str
    """With ``-`` for ``_``, for example ``--max-model-len``."""
    values: Sequence[str] = ()
    path: Sequence[str] = ()
    """The keys of ``--name.key.key``."""
    is_part: bool = False
    """Whether a rule made it as a part of the JSON that `name` accepts; `values` holds that part as JSON."""

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
    """A value that a rule cannot accept; the message says which form it must have."""


@attrs.frozen
class CommandLine:
    """The whole command line, for rules that depend on other flags."""

    options: Mapping[str, bool]
    """Each option of the engine's own parser, and whether it has no value."""
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
"""Returns the outcome of a flag; None leaves it unchanged. Raises FlagValueError."""


@attrs.frozen
class FlagRule:
    """A line of an engine's table."""

    rule: Rule
    is_for_native: bool = False
    """Whether it also applies to a flag that the engine's parser knows."""
    is_object: bool = False
    """Whether the flag's value is JSON, merged from several flags before the rule sees it."""


@attrs.frozen
class Table:
    """How an engine treats flags that are not its own."""

    engine: str
    entries: Mapping[str, FlagRule]


def replace_with(*words: str, why: str = "") -> Replacement:
    """Return a replacement by other flags, written as words."""
    return Replacement([flag for _, flag in split_flags(words)[1]], why)


def part(target: str, *path: str, value: Any) -> Flag:
    """Return a part of the JSON that the flag `target` accepts."""
    return Flag(target, [json.dumps(value)], path, is_part=True)


def single_value(flag: Flag) -> str:
    """Return the single value of a flag. Raises FlagValueError."""
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
