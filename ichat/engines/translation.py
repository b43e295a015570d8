"""How a table is applied to a command line: the engine's words for each argument, and the reasons."""

import argparse
import difflib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.engines.flags import (
    CommandLine,
    Flag,
    FlagOutcome,
    FlagRule,
    FlagValueError,
    Refusal,
    Replacement,
    Table,
    as_part,
    is_on,
    mapping,
    read_flag,
    split_flags,
)
from ichat.errors import EXIT_USAGE, Exit
from ichat.security.redact import shown

_GIVEN_WIDTH_MAX, _WHY_WIDTH = 44, 76


@attrs.define
class _Draft:
    """The outcome of an argument while it is being made."""

    given: Sequence[str]
    flags: list[Flag] = attrs.Factory(list[Flag])
    whys: list[str] = attrs.Factory(list[str])

    def finish(self) -> FlagOutcome:
        flags = [flag for index, flag in enumerate(self.flags) if flag.values or flag not in self.flags[:index]]
        passed = [word for flag in flags for word in flag.words()]
        if not self.whys and passed and read_flag(self.given) == read_flag(passed):
            passed = [passed[0] + self.given[0][len(passed[0]) :], *self.given[1:]]
        return FlagOutcome(list(self.given), passed, "; ".join(dict.fromkeys(self.whys)))


def translate(argv: Sequence[str], parser: argparse.ArgumentParser, table: Table) -> list[FlagOutcome]:
    """Return the outcome of each argument for the engine.

    `argv` has the worker's words for the engine, `parser` is the engine's own. The parser gets the words of all
    `FlagOutcome.passed`, in this order. Raises a single Exit 64 that names every argument which is refused.
    """
    outcomes, refusals = try_translation(argv, parser, table)
    if refusals:
        raise refusal_of(table.engine, refusals)
    return outcomes


def refusal_of(engine: str, refusals: Sequence[str]) -> Exit:
    """Return the Exit 64 that names every argument which is refused."""
    text = " " + refusals[0] if len(refusals) == 1 else "".join(f"\n  {refusal}" for refusal in refusals)
    return Exit(EXIT_USAGE, f"{engine} refuses these arguments:{text}")


def try_translation(
    argv: Sequence[str], parser: argparse.ArgumentParser, table: Table
) -> tuple[list[FlagOutcome], list[str]]:
    """Return the outcome of each argument for the engine, and a clause for each refused argument that names it."""
    strays, given = split_flags(argv)
    actions = [(option, action) for action in parser._actions for option in action.option_strings]
    options = {option: action.nargs == 0 for option, action in actions}
    long_names = {option: max(action.option_strings, key=len) for option, action in actions if option[:2] != "--"}
    line = CommandLine(options, [flag for _, flag in given], long_names)
    translation = _Translation(table, line)
    translation.refusals += [f"{word!r} stands alone; every value needs its flag before it" for word in strays]
    drafts = [translation.begin(words, flag) for words, flag in given]
    translation.open_objects(drafts)
    translation.merge_objects(drafts)
    return [draft.finish() for draft in drafts], list(dict.fromkeys(translation.refusals))


@attrs.define
class _Translation:
    table: Table
    line: CommandLine
    refusals: list[str] = attrs.Factory(list[str])

    def begin(self, words: Sequence[str], flag: Flag) -> _Draft:
        draft = _Draft(words)
        self._guarded(words[0].partition("=")[0], lambda: self._apply(flag, draft))
        return draft

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except FlagValueError as wrong:
            self.refusals.append(f"{name} {wrong}")

    def _find(self, flag: Flag) -> tuple[FlagRule | None, Flag]:
        """Return the table's rule for a flag, also if it is written ``--no-NAME``."""
        entry = self.table.entries.get(flag.name)
        if entry is None and flag.name.startswith("--no-") and flag.name not in self.line.options:
            name = "--" + flag.name[5:]
            entry = self.table.entries.get(name)
            if entry is not None or self.line.options.get(name):
                return entry, attrs.evolve(flag, name=name, values=["False" if is_on(flag) else "True"])
        return entry, flag

    def _apply(self, flag: Flag, draft: _Draft, seen: Sequence[str] = ()) -> None:
        """Add to the draft the translation of a flag, and the translation of that in turn. Raises FlagValueError."""
        entry, flag = self._find(flag)
        is_own = flag.name in self.line.options
        if flag.is_part or (entry is not None and entry.is_object and not is_own):
            draft.flags.append(flag if flag.is_part else as_part(flag))
            return
        applies = entry is not None and (entry.is_for_native or not is_own) and flag.name not in seen
        outcome = entry.rule(flag, self.line) if entry is not None and applies else None
        if isinstance(outcome, Refusal):
            raise FlagValueError(f"is refused: {outcome.why}")
        if outcome is None:
            if not is_own and not applies:
                raise FlagValueError(self._absent(flag.name) if seen else self._unknown(flag.name))
            self._keep(flag, draft)
            return
        self._replace(outcome, draft, [*seen, flag.name])

    def _replace(self, outcome: Replacement, draft: _Draft, seen: Sequence[str]) -> None:
        names = [flag.name for flag in outcome.flags if flag.name in self.line.options]
        if outcome.why or names:
            draft.whys.append(outcome.why or f"{self.table.engine} calls it {' '.join(names)}")
        for flag in outcome.flags:
            self._apply(flag, draft, seen)

    def _keep(self, flag: Flag, draft: _Draft) -> None:
        """Keep a flag of the engine's own; True or False behind a switch is translated. Raises FlagValueError."""
        if not self.line.options.get(flag.name) or not flag.values or flag.name in ("-h", "--help"):
            draft.flags.append(flag)
            return
        opposite = "--" + flag.name[5:] if flag.name.startswith("--no-") else "--no-" + flag.name.lstrip("-")
        if is_on(flag):
            draft.flags.append(Flag(flag.name))
            draft.whys.append("it takes no value")
        elif opposite in self.line.options:
            draft.flags.append(Flag(opposite))
            draft.whys.append(f"{self.table.engine} says it so")
        else:
            draft.whys.append(f"{self.table.engine} is without it unless {flag.name} is given")

    def _unknown(self, name: str) -> str:
        known = [option for option in [*self.line.options, *self.table.entries] if option.startswith("--")]
        longer = sorted((option for option in self.line.options if option.startswith(name)), key=len)
        close = longer[:1] or difflib.get_close_matches(name, known, 1, 0.7)
        if close and name.startswith("--"):
            return f"(did you mean {close[0]}?) is no flag of {self.table.engine}'s"
        return f"is no flag of {self.table.engine}'s, and none of its flags is known to do the same; leave it out"

    def _absent(self, name: str) -> str:
        return f"is {name} in other versions of {self.table.engine}, and nothing in this one; leave it out"

    def open_objects(self, drafts: Sequence[_Draft]) -> None:
        """Apply the rules of flags with JSON that the engine does not have, until none is left."""
        while True:
            parts = [flag.name for draft in drafts for flag in draft.flags if flag.is_part]
            foreign = [name for name in parts if name not in self.line.options]
            if not foreign:
                return
            holders = [draft for draft in drafts if any(flag.name == foreign[0] for flag in draft.flags)]
            self._guarded(_names(holders), lambda name=foreign[0]: self._open(name, drafts))

    def _open(self, name: str, drafts: Sequence[_Draft]) -> None:
        holders, value = self._gathered(name, drafts)
        entry = self.table.entries.get(name)
        outcome = entry.rule(Flag(name, [json.dumps(value)]), self.line) if entry is not None else None
        if outcome is None:
            raise FlagValueError(self._absent(name))
        if isinstance(outcome, Refusal):
            raise FlagValueError(f"is refused: {outcome.why}")
        self._replace(outcome, holders[0], [name])
        for draft in holders[1:]:
            draft.whys.append(f"it goes with {_names(holders[:1])}")

    def merge_objects(self, drafts: Sequence[_Draft]) -> None:
        """Merge the parts of each JSON, and the value of the engine's own flag for it, into a single flag."""
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
        """Remove the parts of a JSON from their drafts; return these and the merged JSON. Raises FlagValueError."""
        holders: list[_Draft] = []
        taken: list[Flag] = []
        for draft in drafts:
            kept = [flag for flag in draft.flags if self.line.long_names.get(flag.name, flag.name) != name]
            if len(kept) < len(draft.flags):
                taken += [flag for flag in draft.flags if flag not in kept]
                holders.append(draft)
                draft.flags = kept
        merged: dict[str, Any] = {}
        for flag in taken:
            own = flag if flag.is_part else as_part(flag)
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


def explain(outcomes: Sequence[FlagOutcome]) -> str:
    """Return a text with each argument, the engine's words for it and the reason, and then the whole command line."""
    rows = [
        (shown(outcome.given) or "(iChat's own)", shown(outcome.passed) or "(nothing)", outcome.why)
        for outcome in outcomes
    ]
    width = min(max((len(given) for given, _, _ in rows), default=0), _GIVEN_WIDTH_MAX)
    lines: list[str] = []
    for given, passed, why in rows:
        if len(given) > width:
            lines += [given, f"{'':{width}} -> {passed}"]
        else:
            lines.append(f"{given:{width}} -> {passed}")
        lines += [" " * (width + 4) + line for line in textwrap.wrap(why, _WHY_WIDTH, break_on_hyphens=False)]
    whole_ = " ".join(text for text in (shown(outcome.passed) for outcome in outcomes) if text)
    return "\n".join([*lines, "", "The engine gets:", f"  {whole_}"])
