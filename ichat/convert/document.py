"""A configuration of iChat's that is being written: tables with their comments, and the text of them.

Texts of the given file become comments too, so a comment never leaves its line.
"""

import collections
import fnmatch
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.config import load as configuration
from ichat.errors import Exit

NO_COUNTERPART = "has no counterpart"
COLUMNS = 100
"""Where comments are folded."""
SAME_MAX = 4
"""How many items of a list are named before they are counted instead."""
_PLACE = re.compile(r"\[\d+\]")
_INNER = "backend_args"
"""A key with a table below its own."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_APART = frozenset(("swap_sets", "budget_per_month"))
"""Tables and keys that are right only beside others, so that they cannot be judged alone."""


@attrs.define
class TomlTable:
    """A table of the configuration."""

    name: str
    values: dict[str, Any] = attrs.field(factory=dict[str, Any])
    notes: list[str] = attrs.field(factory=list[str])
    """The comments above it."""
    is_array: bool = False
    """Whether there may be several tables of this name."""
    refusal: str = ""
    """Why iChat refuses it; then all of it is a comment."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        sentences = [*self.notes, f"Left out: {self.refusal}"] if self.refusal else self.notes
        for sentence in sentences:
            yield from comment_of(sentence)
        mark = "#" if self.refusal else ""
        yield from (mark + line for line in self._own_lines())

    def _own_lines(self) -> Iterator[str]:
        path = ".".join(key_of(part) for part in self.name.split("\0"))
        yield f"[[{path}]]" if self.is_array else f"[{path}]"
        inner = self.values.get(_INNER)
        arguments = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
        yield from _pairs_of({key: value for key, value in self.values.items() if key != _INNER or not arguments})
        if arguments:
            yield f"[{path}.{_INNER}]"
            yield from _pairs_of(arguments)


@attrs.define
class Document:
    """The whole configuration. Settings of the given file that it does not have are its remarks."""

    title: str
    tables: list[TomlTable] = attrs.field(factory=list[TomlTable])
    remarks: dict[str, dict[str, None]] = attrs.field(factory=dict[str, dict[str, None]])
    """The paths of settings that were not carried over, by the sentence that says why, or which setting to use."""
    _sections: dict[str, TomlTable] = attrs.field(factory=dict[str, TomlTable], init=False)
    has_secrets: bool = False
    """Whether a key of an upstream is in it."""

    def set(self, section: str, key: str, value: Any, note: str = "") -> None:
        """Set a key of a section that is there once; `note` is its comment."""
        table = self._sections.get(section)
        if table is None:
            table = self._sections[section] = TomlTable(section)
            self.tables.append(table)
        table.values[key] = value
        if note:
            table.notes.append(f"{key}: {note}")

    def add(self, name: str, values: Mapping[str, Any], notes: Sequence[str] = ()) -> TomlTable:
        """Add a table of an array, such as a route, and return it."""
        table = TomlTable(name, dict(values), list(notes), is_array=True)
        self.tables.append(table)
        return table

    def remark(self, path: str, sentence: str) -> None:
        """Add the sentence that says why a setting was not carried over, or which setting to use."""
        self.remarks.setdefault(sentence, {})[path] = None

    def has_section(self, section: str) -> bool:
        """Return whether any key of a section was set."""
        return section in self._sections

    @property
    def notes_count(self) -> int:
        """How many comments say that something differs."""
        paths = sum(len(paths) for paths in self.remarks.values())
        return paths + sum(len(table.notes) + bool(table.refusal) for table in self.tables)

    def judge(self) -> None:
        """Make comments of the tables and keys that iChat refuses. Raises Exit 64 if the rest contradicts itself."""
        if not _problem_in(self.text()):
            return
        for part in self.tables:
            if not part.is_array:
                self._judge_keys(part)
            elif part.name not in _APART:
                part.refusal = _problem_in("\n".join(part.lines()), f"{part.name}[0].")
        self.tables = [table for table in self.tables if table.values or table.refusal]
        configuration.parse(self.text(), "The result")

    def _judge_keys(self, table: TomlTable) -> None:
        for key, value in list(table.values.items()):
            problem = _problem_in("\n".join(TomlTable(table.name, {key: value}).lines()), f"{table.name}.{key}: ")
            if problem and key not in _APART:
                del table.values[key]
                self.remark(f"{table.name}.{key}", problem)

    def text(self) -> str:
        """Return the file."""
        blocks = ["\n".join(comment_of(self.title))]
        if self.remarks:
            lines = ["# Not carried over:"]
            for sentence, paths in self.remarks.items():
                lines += comment_of(f"- {', '.join(_shortened(paths))}: {sentence}", "#   ")
            blocks.append("\n".join(lines))
        ordered = sorted(self.tables, key=lambda table: table.is_array or table.name.startswith("prices"))
        blocks += ["\n".join(table.lines()) for table in ordered]
        return "\n\n".join(blocks) + "\n"


def sentence_for(key: str, sentences: Mapping[str, str]) -> str:
    """Return the sentence for a setting: `sentences` have it by several keys, and a * stands for any characters."""
    for keys, sentence in sentences.items():
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in keys.split()):
            return sentence.strip()
    return NO_COUNTERPART


def _shortened(paths: Collection[str]) -> Iterator[str]:
    """Yield paths; more than `SAME_MAX` that differ by their places in a list are a single path with a number."""
    patterns = {path: _PLACE.sub("[…]", path) for path in paths}
    same = collections.Counter(patterns.values())
    for path in dict.fromkeys(pattern if same[pattern] > SAME_MAX else path for path, pattern in patterns.items()):
        yield f"{path} ({same[path]} times)" if same[path] > SAME_MAX else path


def _problem_in(text: str, path: str = "") -> str:
    """Return why iChat refuses a configuration, in a sentence without the path; "" if it does not."""
    try:
        configuration.parse(text, "")
    except Exit as refusal:
        _, *problems = str(refusal).splitlines()
        place = path.replace("\0", ".")
        return "; ".join(problem.strip().removeprefix(place) for problem in problems) or str(refusal).strip()
    return ""


def _pairs_of(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key_of(key)} = {value_of(value)}" for key, value in values.items() if value is not None)


def comment_of(sentence: str, indent: str = "# ") -> list[str]:
    """Return a sentence as lines of comments, which hold printable characters alone; `indent` begins further lines."""
    plain = "".join(character if character.isprintable() else " " for character in sentence)
    return textwrap.wrap(
        plain, COLUMNS, initial_indent="# ", subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def key_of(name: str) -> str:
    """Return a key as TOML has it."""
    return name if _BARE.fullmatch(name) else _string(name)


def value_of(value: Any) -> str:
    """Return a value as TOML has it, on a single line; nulls in lists and tables are left out."""
    if isinstance(value, dict):
        given = {key: one for key, one in cast("dict[str, Any]", value).items() if one is not None}
        inner = ", ".join(f"{key_of(key)} = {value_of(one)}" for key, one in given.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(value_of(one) for one in cast('list[Any]', value) if one is not None)}]"
    return _SCALARS[type(value)](value)


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else str(value)


_SCALARS: Mapping[type, Callable[[Any], str]] = {
    str: _string,
    bool: lambda value: "true" if value else "false",
    int: str,
    float: _float,
}
