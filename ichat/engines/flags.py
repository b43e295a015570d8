"""One vocabulary of arguments for every engine.

vLLM's names are the common ones. Every engine has a table that says what becomes of a name which its own parser does
not know: one of the common vocabulary, of the other engine, or of an older release. What the parser knows goes through
as it was typed. Names are matched whole: argparse would take any unambiguous beginning of a name for the name itself,
and so turn an old flag into an unrelated new one. What stands in a file given to the engine's own ``--config`` is
between that file and the engine.
"""

import argparse
import difflib
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.errors import EXIT_USAGE, Exit
from ichat.security.redact import is_flag, shown

"""Names that look like a secret's, and are not."""
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_GIVEN_WIDTH_MAX, _WHY_WIDTH = 44, 76


@attrs.frozen(repr=False)
class FlagOutcome:
    """What became of one argument."""

    given: Sequence[str]
    """Its words, as they were typed."""
    passed: Sequence[str]
    """The words that the engine gets for them; none where it is left out."""
    why: str = ""
    """Why they differ, as a clause for a log; empty where they do not (but for ``_`` that became ``-``)."""

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
    """Whether it is a part of the JSON that `name` takes, put there by a rule: `values` is the JSON of it."""

    def words(self) -> list[str]:
        """Write it as the engine's parser reads it."""
        name = ".".join([self.name, *self.path])
        return [f"{name}={self.values[0]}"] if any(map(is_flag, self.values)) else [name, *self.values]


@attrs.frozen
class Replacement:
    """A rule's answer: these flags instead, none of them for one that is left out."""

    flags: Sequence[Flag]
    why: str = ""


@attrs.frozen
class Refusal:
    """A rule's answer: this flag is not for this engine, for this reason."""

    why: str


Outcome = Replacement | Refusal


class FlagValueError(Exception):
    """A value that a rule cannot take; the sentence says what it must be."""


@attrs.frozen
class CommandLine:
    """The whole command line, as far as a rule may want to know of it."""

    options: Mapping[str, bool]
    """What the engine's own parser takes: each option, and whether it stands alone."""
    flags: Sequence[Flag]
    long_names: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """What else the parser calls ``-x``."""

    def value(self, *names: str) -> str | None:
        """Give the last value that was given to any of these names."""
        found = [flag.values[0] for flag in self.flags if flag.name in names and flag.values and not flag.path]
        return found[-1] if found else None

    def has(self, *names: str) -> bool:
        """Say whether any of these names was given."""
        return any(flag.name in names for flag in self.flags)

    def number(self, *names: str, default: int) -> int:
        """Give a whole number that was given to any of these names."""
        return int(number(self.value(*names) or str(default)))


Rule = Callable[[Flag, CommandLine], Outcome | None]
"""Says what becomes of a flag; None leaves it as it is. Raises Wrong."""


@attrs.frozen
class FlagRule:
    """A line of an engine's table."""

    rule: Rule
    is_for_own: bool = False
    """Whether it looks at the values of a flag that the engine's parser knows, too."""
    is_object: bool = False
    """Whether the flag takes JSON whose parts may come from several flags; the rule gets it whole."""


@attrs.frozen
class Table:
    """What an engine does with the names that are not its own."""

    engine: str
    entries: Mapping[str, FlagRule]


# What the tables are written with.


def replace_with(*words: str, why: str = "") -> Replacement:
    """Answer with other flags, written as words."""
    return Replacement([flag for _, flag in _split(words)[1]], why)


def renamed(to: str, why: str = "", convert: Callable[[str], str] = str) -> FlagRule:
    """Make the entry of a flag with one value that is called `to` here; `convert` gives the value that is meant."""
    return FlagRule(lambda flag, _: Replacement([Flag(to, [convert(single_value(flag))])], why))


def dropped(why: str) -> FlagRule:
    """Make the entry of a flag that can be left out."""
    return FlagRule(lambda _flag, _case: Replacement((), why))


def refused(why: str) -> FlagRule:
    """Make the entry of a flag that nothing here does; `why` also says what to do."""
    return FlagRule(lambda _flag, _case: Refusal(why))


def switch(on: Outcome, off: Outcome) -> FlagRule:
    """Make the entry of a flag that is on or off: ``--x``, ``--x True``, ``--no-x``, ``--x False``."""
    return FlagRule(lambda flag, _: on if is_on(flag) else off)


def chosen(outcomes: Mapping[str, Outcome | None], other: Outcome | None = None) -> FlagRule:
    """Make the entry of a flag with one value, each of which becomes something else; None leaves it as it is."""
    return FlagRule(lambda flag, _: outcomes.get(single_value(flag).lower(), other))


def part(target: str, *path: str, value: Any) -> Flag:
    """Make a part of the JSON that the flag `target` takes."""
    return Flag(target, [json.dumps(value)], path, is_part=True)


def nested_in(target: str, *path: str, convert: Callable[[str], Any] = str, why: str = "") -> FlagRule:
    """Make the entry of a flag whose value stands inside the JSON of `target` now."""
    reason = why or f"it is {'.'.join([target, *path])}"
    return FlagRule(lambda flag, _: Replacement([part(target, *path, value=convert(single_value(flag)))], reason))


def expand_json(rule: Callable[[Mapping[str, Any], CommandLine], Outcome]) -> FlagRule:
    """Make the entry of a flag with JSON; the rule gets all of it, wherever its parts were given."""
    return FlagRule(lambda flag, case: rule(mapping(single_value(flag)), case), is_object=True)


def also_native(entry: FlagRule) -> FlagRule:
    """Have an entry look at flags that the engine's parser knows, too."""
    return attrs.evolve(entry, is_for_own=True)


def single_value(flag: Flag) -> str:
    """Give the one value of a flag. Raises Wrong."""
    if len(flag.values) != 1:
        raise FlagValueError(f"takes one value, not {len(flag.values)}")
    return flag.values[0]


def is_on(flag: Flag) -> bool:
    """Read a flag that may have no value, or say True or False. Raises Wrong."""
    if not flag.values:
        return True
    word = single_value(flag).lower()
    if word not in _TRUE + _FALSE:
        raise FlagValueError("takes no value, or one of True and False")
    return word in _TRUE


def number(text: str) -> str:
    """Give a whole number as digits, from vLLM's notation: 32k is 32000, 32K is 32768. Raises Wrong."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if match is None or ("." in match[1] and not match[2].islower()):
        raise FlagValueError(f"must be a whole number, such as 2048, 2k (2000) or 2K (2048), not {text!r}")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    if "." in match[1]:
        return str(int(float(match[1]) * 1000**power))
    return str(int(match[1]) * (1000 if match[2].islower() else 1024) ** power)


def fraction(text: str) -> float:
    """Read a number. Raises Wrong."""
    try:
        return float(text)
    except ValueError as error:
        raise FlagValueError(f"must be a number, not {text!r}") from error


def whole(text: str) -> int:
    """Read a whole number. Raises Wrong."""
    return int(number(text))


def mapping(text: str) -> dict[str, Any]:
    """Read a JSON object. Raises Wrong."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise FlagValueError("takes a JSON object, and this is no JSON") from error
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise FlagValueError("takes a JSON object")


@attrs.define
class _Draft:
    """A step that is being made."""

    given: Sequence[str]
    flags: list[Flag] = attrs.Factory(list[Flag])
    whys: list[str] = attrs.Factory(list[str])

    def step(self) -> FlagOutcome:
        flags = [flag for index, flag in enumerate(self.flags) if flag.values or flag not in self.flags[:index]]
        passed = [word for flag in flags for word in flag.words()]
        if not self.whys and passed and _read(self.given) == _read(passed):
            passed = [passed[0] + self.given[0][len(passed[0]) :], *self.given[1:]]
        return FlagOutcome(list(self.given), passed, "; ".join(dict.fromkeys(self.whys)))


def translate(argv: Sequence[str], parser: argparse.ArgumentParser, table: Table) -> list[FlagOutcome]:
    """Say what the engine gets for each argument.

    `argv` is what the worker hands to the engine, `parser` the engine's own. The words of all `Step.passed`, one after
    the other, are what the parser shall parse. Raises one Exit 64 that names every argument which cannot be had.
    """
    strays, given = _split(argv)
    actions = [(option, action) for action in parser._actions for option in action.option_strings]
    options = {option: action.nargs == 0 for option, action in actions}
    long_names = {option: max(action.option_strings, key=len) for option, action in actions if option[:2] != "--"}
    case = CommandLine(options, [flag for _, flag in given], long_names)
    translation = _Translation(table, case)
    translation.refusals += [f"{word!r} stands alone; every value needs its flag before it" for word in strays]
    drafts = [translation.begin(words, flag) for words, flag in given]
    translation.open_objects(drafts)
    translation.merge_objects(drafts)
    if translation.refusals:
        refusals = list(dict.fromkeys(translation.refusals))
        text = " " + refusals[0] if len(refusals) == 1 else "".join(f"\n  {refusal}" for refusal in refusals)
        raise Exit(EXIT_USAGE, f"{table.engine} refuses these arguments:{text}")
    return [draft.step() for draft in drafts]


@attrs.define
class _Translation:
    table: Table
    case: CommandLine
    refusals: list[str] = attrs.Factory(list[str])

    def begin(self, words: Sequence[str], flag: Flag) -> _Draft:
        draft = _Draft(words)
        self._guarded(words[0].partition("=")[0], lambda: self._turn(flag, draft))
        return draft

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except FlagValueError as wrong:
            self.refusals.append(f"{name} {wrong}")

    def _find(self, flag: Flag) -> tuple[FlagRule | None, Flag]:
        """Find the table's entry for a flag, also by the name that a ``--no-`` stands before."""
        entry = self.table.entries.get(flag.name)
        if entry is None and flag.name.startswith("--no-") and flag.name not in self.case.options:
            name = "--" + flag.name[5:]
            entry = self.table.entries.get(name)
            if entry is not None or self.case.options.get(name):
                return entry, attrs.evolve(flag, name=name, values=["False" if is_on(flag) else "True"])
        return entry, flag

    def _turn(self, flag: Flag, draft: _Draft, seen: Sequence[str] = ()) -> None:
        """Give the draft what a flag becomes, and what that becomes in turn. Raises Wrong."""
        entry, flag = self._find(flag)
        is_own = flag.name in self.case.options
        if flag.is_part or (entry is not None and entry.is_object and not is_own):
            draft.flags.append(flag if flag.is_part else _as_part(flag))
            return
        applies = entry is not None and (entry.is_for_own or not is_own) and flag.name not in seen
        outcome = entry.rule(flag, self.case) if entry is not None and applies else None
        if isinstance(outcome, Refusal):
            raise FlagValueError(f"is refused: {outcome.why}")
        if outcome is None:
            if not is_own and not applies:
                raise FlagValueError(self._absent(flag.name) if seen else self._unknown(flag.name))
            self._keep(flag, draft)
            return
        self._become(outcome, draft, [*seen, flag.name])

    def _become(self, outcome: Replacement, draft: _Draft, seen: Sequence[str]) -> None:
        names = [flag.name for flag in outcome.flags if flag.name in self.case.options]
        if outcome.why or names:
            draft.whys.append(outcome.why or f"{self.table.engine} calls it {' '.join(names)}")
        for flag in outcome.flags:
            self._turn(flag, draft, seen)

    def _keep(self, flag: Flag, draft: _Draft) -> None:
        """Keep a flag of the engine's own; one that stands alone may say True or False. Raises Wrong."""
        if not self.case.options.get(flag.name) or not flag.values or flag.name in ("-h", "--help"):
            draft.flags.append(flag)
            return
        opposite = "--" + flag.name[5:] if flag.name.startswith("--no-") else "--no-" + flag.name.lstrip("-")
        if is_on(flag):
            draft.flags.append(Flag(flag.name))
            draft.whys.append("it takes no value")
        elif opposite in self.case.options:
            draft.flags.append(Flag(opposite))
            draft.whys.append(f"{self.table.engine} says it so")
        else:
            draft.whys.append(f"{self.table.engine} is without it unless {flag.name} is given")

    def _unknown(self, name: str) -> str:
        known = [option for option in [*self.case.options, *self.table.entries] if option.startswith("--")]
        longer = sorted((option for option in self.case.options if option.startswith(name)), key=len)
        close = longer[:1] or difflib.get_close_matches(name, known, 1, 0.7)
        if close and name.startswith("--"):
            return f"(did you mean {close[0]}?) is no flag of {self.table.engine}'s"
        return f"is no flag of {self.table.engine}'s, and none of its flags is known to do the same; leave it out"

    def _absent(self, name: str) -> str:
        return f"is {name} in other versions of {self.table.engine}, and nothing in this one; leave it out"

    def open_objects(self, drafts: Sequence[_Draft]) -> None:
        """Have the rules of JSON that the engine has no flag for say what becomes of its parts."""
        while True:
            parts = [flag.name for draft in drafts for flag in draft.flags if flag.is_part]
            foreign = [name for name in parts if name not in self.case.options]
            if not foreign:
                return
            holders = [draft for draft in drafts if any(flag.name == foreign[0] for flag in draft.flags)]
            self._guarded(_names(holders), lambda name=foreign[0]: self._open(name, drafts))

    def _open(self, name: str, drafts: Sequence[_Draft]) -> None:
        holders, value = self._gathered(name, drafts)
        entry = self.table.entries.get(name)
        outcome = entry.rule(Flag(name, [json.dumps(value)]), self.case) if entry is not None else None
        if outcome is None:
            raise FlagValueError(self._absent(name))
        if isinstance(outcome, Refusal):
            raise FlagValueError(f"is refused: {outcome.why}")
        self._become(outcome, holders[0], [name])
        for draft in holders[1:]:
            draft.whys.append(f"it goes with {_names(holders[:1])}")

    def merge_objects(self, drafts: Sequence[_Draft]) -> None:
        """Put the parts of each JSON into one flag, together with what was given for it in the engine's own words."""
        for name in dict.fromkeys(flag.name for draft in drafts for flag in draft.flags if flag.is_part):
            self._guarded(name, lambda name=name: self._merge(name, drafts))

    def _merge(self, name: str, drafts: Sequence[_Draft]) -> None:
        holders, value = self._gathered(name, drafts)
        first = next((draft for draft in holders if not draft.whys), holders[0])
        first.flags.append(Flag(name, [json.dumps(value)]))
        if not first.whys:
            first.whys.append("the other flags of the same JSON are put into it")
        for draft in holders:
            if draft is not first:
                draft.whys.append(f"it stands with {_names([first])}")

    def _gathered(self, name: str, drafts: Sequence[_Draft]) -> tuple[list[_Draft], dict[str, Any]]:
        """Take the parts of one JSON out of the drafts that have some, and merge them. Raises Wrong."""
        holders: list[_Draft] = []
        taken: list[Flag] = []
        for draft in drafts:
            kept = [flag for flag in draft.flags if self.case.long_names.get(flag.name, flag.name) != name]
            if len(kept) < len(draft.flags):
                taken += [flag for flag in draft.flags if flag not in kept]
                holders.append(draft)
                draft.flags = kept
        merged: dict[str, Any] = {}
        for flag in taken:
            own = flag if flag.is_part else _as_part(flag)
            value = json.loads(own.values[0])
            for key in reversed(own.path):
                value = {key: value}
            _put(merged, mapping(json.dumps(value)))
        return holders, merged


def _names(drafts: Sequence[_Draft]) -> str:
    return " with ".join(draft.given[0].partition("=")[0] for draft in drafts)


def _put(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _put(into[key], cast("dict[str, Any]", value))
        elif key in into and into[key] != value:
            raise FlagValueError(f"is given two values for {key!r}; leave one of them out")
        else:
            into[key] = value


def _as_part(flag: Flag) -> Flag:
    """Read a flag with JSON, or with a key and its value, as vLLM reads it. Raises Wrong."""
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


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[list[str], Flag]]]:
    """Take a command line apart: the words before the first flag, and each flag with its words."""
    strays: list[str] = []
    found: list[list[str]] = []
    for word in argv:
        if is_flag(word):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            strays.append(word)
    return strays, [(words, _read(words)) for words in found]


def _read(words: Sequence[str]) -> Flag:
    name, equals, value = words[0].partition("=")
    values = [value, *words[1:]] if equals else list(words[1:])
    if not name.startswith("--"):
        if name.startswith("-O") and len(name) > 2:
            return Flag("-O", [name[2:], *values])
        return Flag(name, values)
    name, *path = name.split(".")
    return Flag("--" + name[2:].replace("_", "-"), values, path)


def explain(steps: Sequence[FlagOutcome]) -> str:
    """Show each argument beside what the engine gets for it, why where they differ, and then the whole command."""
    rows = [(shown(step.given) or "(iChat's own)", shown(step.passed) or "(nothing)", step.why) for step in steps]
    width = min(max((len(given) for given, _, _ in rows), default=0), _GIVEN_WIDTH_MAX)
    lines: list[str] = []
    for given, passed, why in rows:
        if len(given) > width:
            lines += [given, f"{'':{width}} -> {passed}"]
        else:
            lines.append(f"{given:{width}} -> {passed}")
        lines += [" " * (width + 4) + line for line in textwrap.wrap(why, _WHY_WIDTH, break_on_hyphens=False)]
    whole_ = " ".join(text for text in (shown(step.passed) for step in steps) if text)
    return "\n".join([*lines, "", "The engine gets:", f"  {whole_}"])
