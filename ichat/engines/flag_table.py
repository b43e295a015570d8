"""An engine's table of flags: its `flags.toml`, completed by rules in Python where a value must be computed.

The comments at the beginning of `ichat/engines/flags.toml` describe these files.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ichat.config.package_data import read_toml
from ichat.engines.flags import (
    ENGINE_KEYS,
    NO_KEY,
    Flag,
    FlagRule,
    Outcome,
    Refusal,
    Replacement,
    Rule,
    Table,
    fraction,
    is_on,
    mapping,
    part,
    replace_with,
    single_value,
    whole,
)

FILE = "flags.toml"
_SENTENCE = re.compile(r"\{(\w+)\}")
_READERS: Mapping[str, Callable[[Flag], Any]] = {
    "text": single_value,
    "whole": lambda flag: whole(single_value(flag)),
    "mapping": lambda flag: mapping(single_value(flag)),
    "numbers": lambda flag: [fraction(text) for text in flag.values],
}
"""How the value of a flag becomes a part of JSON, by the names that `as` may have."""


class FlagRules(dict[str, FlagRule]):
    """Rules written in Python, by the names of their flags."""

    def of(self, names: str, *, is_for_native: bool = False, is_object: bool = False) -> Callable[[Rule], Rule]:
        """Return a decorator that makes a function the rule of these flags; blanks separate their names."""

        def add(rule: Rule) -> Rule:
            self.update(dict.fromkeys(names.split(), FlagRule(rule, is_for_native, is_object)))
            return rule

        return add


def read_table(engine: str, *sources: tuple[str, FlagRules]) -> Table:
    """Return an engine's table; `engine` is its name in messages.

    Each source is a package with a `flags.toml` and the rules that complete it. The rules of a later source replace
    those of an earlier source.
    """
    entries: dict[str, FlagRule] = {}
    for package, rules in sources:
        data = read_toml(package, FILE)
        sentences = {"engine": engine, **_shared()["sentences"], **data["sentences"]}
        entries |= _Reader(engine, data, sentences).entries() | rules
    refusal = FlagRule(lambda _flag, _line: Refusal(NO_KEY), is_for_native=True)
    return Table(engine, entries | {f"--{key.replace('_', '-')}": refusal for key in ENGINE_KEYS})


@functools.cache
def _shared() -> Mapping[str, Any]:
    return read_toml("ichat.engines", FILE)


def vocabulary(kind: str) -> Mapping[str, str]:
    """Return values of a kind, such as `methods`: SGLang's name by vLLM's."""
    return _shared()["vocabulary"][kind]


def vllm_names(kind: str) -> dict[str, str]:
    """Return values of a kind: vLLM's name by SGLang's in lower case."""
    return {theirs.lower(): ours for ours, theirs in vocabulary(kind).items()}


@attrs.frozen
class _Reader:
    """Makes the rules of a file. `_SECTIONS` has its method for each section."""

    engine: str
    data: Mapping[str, Any]
    sentences: Mapping[str, str]

    def entries(self) -> dict[str, FlagRule]:
        found: dict[str, FlagRule] = {}
        for tables, is_for_native in ((self.data, False), (self.data.get("native", {}), True)):
            for section, make in _SECTIONS.items():
                for key, given in tables.get(section, {}).items():
                    group: Any = {} if isinstance(given, str) else given
                    names, value = (group["flags"], group["why"]) if "flags" in group else (key, given)
                    rule = FlagRule(make(self, value), is_for_native, is_object=section == "objects")
                    found |= dict.fromkeys(names.split(), rule)
        return found

    def text(self, given: str) -> str:
        """Return a reason with the sentences that it names in braces."""
        text = _SENTENCE.sub(lambda match: self.sentences[match[1]], given)
        return self.text(text) if text != given else text

    def outcome(self, given: Any) -> Outcome | None:
        if given == "keep":
            return None
        if given == "nothing":
            return Replacement((), self.text("{nothing}"))
        if isinstance(given, str):
            return replace_with(*given.split())
        if "refused" in given:
            return Refusal(self.text(given["refused"]))
        if "dropped" in given:
            return Replacement((), self.text(given["dropped"]))
        if "part" in given:
            target, *path = given["part"].split(".")
            return Replacement([part(target, *path, value=given["value"])])
        return replace_with(*given["words"].split(), why=self.text(given["why"]))

    def refused(self, why: str) -> Rule:
        outcome = Refusal(self.text(why))
        return lambda _flag, _line: outcome

    def dropped(self, why: str) -> Rule:
        outcome = Replacement((), self.text(why))
        return lambda _flag, _line: outcome

    def renamed(self, given: Any) -> Rule:
        to, why = (given, "") if isinstance(given, str) else (given["to"], self.text(given["why"]))
        return lambda flag, _: Replacement([Flag(to, [single_value(flag)])], why)

    def renamed_lists(self, to: str) -> Rule:
        return lambda flag, _: Replacement([Flag(to, flag.values)])

    def parts(self, given: Any) -> Rule:
        given = {"part": given} if isinstance(given, str) else given
        target, *path = given["part"].split(".")
        read, why = _READERS[given.get("as", "text")], self.text(given.get("why", f"it is {given['part']}"))
        return lambda flag, _: Replacement([part(target, *path, value=read(flag))], why)

    def objects(self, to: str) -> Rule:
        return lambda flag, _: Replacement([part(to, value=mapping(single_value(flag)))])

    def switches(self, given: Any) -> Rule:
        both: Any = {} if isinstance(given, str) else given
        on, off = self.outcome(both.get("on", given)), self.outcome(both.get("off", "nothing"))
        return lambda flag, _: on if is_on(flag) else off

    def choices(self, given: Mapping[str, Any]) -> Rule:
        outcomes = {value: self.outcome(outcome) for value, outcome in given.items()}
        other = outcomes.pop("other", None)
        return lambda flag, _: outcomes.get(single_value(flag).lower(), other)

    def values(self, given: Mapping[str, str]) -> Rule:
        names = vllm_names(given["to_vllm"]) if "to_vllm" in given else {}
        if "to_sglang" in given:
            names = {ours.lower(): theirs for ours, theirs in vocabulary(given["to_sglang"]).items()}
        names |= {name: new for name, new in given.items() if name not in ("to_vllm", "to_sglang")}
        why = f"{self.engine} calls it so"

        def rule(flag: Flag, _: object) -> Outcome | None:
            new = names.get(single_value(flag).lower())
            return None if new in (None, single_value(flag)) else replace_with(flag.name, new, why=why)

        return rule


_SECTIONS: Mapping[str, Callable[[_Reader, Any], Rule]] = {
    "renamed": _Reader.renamed,
    "renamed_lists": _Reader.renamed_lists,
    "dropped": _Reader.dropped,
    "refused": _Reader.refused,
    "parts": _Reader.parts,
    "objects": _Reader.objects,
    "switches": _Reader.switches,
    "choices": _Reader.choices,
    "values": _Reader.values,
}
