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

    def outcome(self, given: Any) -> Rule:
        """Return the rule that has this outcome."""
        table: Any = {} if isinstance(given, str) else given
        if "then" in table:
            then, other = self.outcome(table["then"]), self.outcome(table["else"])
            names = (table["given"] if "given" in table else table["known"]).split()
            if "given" in table:
                return lambda flag, line: (then if line.has(*names) else other)(flag, line)
            return lambda flag, line: (other if line.options.keys().isdisjoint(names) else then)(flag, line)
        if "to" in table or ("part" in table and "value" not in table):
            return self._moved(table)
        fixed = self._fixed(given)
        return lambda _flag, _line: fixed

    def _fixed(self, given: Any) -> Outcome | None:
        """Return an outcome that does not depend on the command line."""
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

    def _moved(self, given: Mapping[str, Any]) -> Rule:
        """Return the rule that gives the flag's value to another flag, or puts it into the JSON of another flag."""
        read, plus = _READERS[given.get("as", "text")], given.get("plus", 0)
        names = vllm_names(given["to_vllm"]) if "to_vllm" in given else None
        target, *path = given.get("part", "").split(".")
        why = self.text(given.get("why", f"it is {given['part']}" if "part" in given else ""))

        def rule(flag: Flag, _: object) -> Outcome:
            value = read(flag) + plus if plus else read(flag)
            if names is not None and (value := names.get(value.lower())) is None:
                return Refusal(self.text(given["other"]))
            return Replacement([part(target, *path, value=value) if target else Flag(given["to"], [str(value)])], why)

        return rule

    def refused(self, why: str) -> Rule:
        return self.outcome({"refused": why})

    def dropped(self, why: str) -> Rule:
        return self.outcome({"dropped": why})

    def renamed(self, given: Any) -> Rule:
        return self.outcome({"to": given} if isinstance(given, str) else given)

    def renamed_lists(self, to: str) -> Rule:
        return lambda flag, _: Replacement([Flag(to, flag.values)])

    def parts(self, given: Any) -> Rule:
        return self.outcome({"part": given} if isinstance(given, str) else given)

    def objects(self, to: str) -> Rule:
        return lambda flag, _: Replacement([part(to, value=mapping(single_value(flag)))])

    def switches(self, given: Any) -> Rule:
        both: Any = {} if isinstance(given, str) else given
        on, off = self.outcome(both.get("on", given)), self.outcome(both.get("off", "nothing"))
        return lambda flag, line: (on if is_on(flag) else off)(flag, line)

    def choices(self, given: Mapping[str, Any]) -> Rule:
        rules = {value: self.outcome(outcome) for value, outcome in given.items()}
        other = rules.pop("other", self.outcome("keep"))
        return lambda flag, line: rules.get(single_value(flag).lower(), other)(flag, line)

    def cases(self, given: Mapping[str, str]) -> Rule:
        change = {"lower": str.lower, "upper": str.upper}[given["case"]]

        def rule(flag: Flag, _: object) -> Outcome | None:
            new = change(single_value(flag))
            return None if new == single_value(flag) else replace_with(flag.name, new, why=given["why"])

        return rule

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
    "outcomes": _Reader.outcome,
    "dropped": _Reader.dropped,
    "refused": _Reader.refused,
    "parts": _Reader.parts,
    "objects": _Reader.objects,
    "switches": _Reader.switches,
    "choices": _Reader.choices,
    "cases": _Reader.cases,
    "values": _Reader.values,
}
