"""Tables read strictly: TOML or JSON in, frozen objects out, every problem at once and with its path.

Nothing is coerced: a string is never read as a number or a boolean, nor the reverse.
"""

import contextlib
import difflib
import functools
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast, get_args, get_origin

import attrs
import cattrs
from attrs import field
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

SHOWN_CHARACTERS_MAX = 60
_HOLDS_SECRETS = re.compile(r"(^|\.)(env|headers|(?:\w*_)?(?:key|token|api_key)_(?:env|hash))([.\[]|$)")
"""The paths of values that no message may show."""

Schema = Mapping[str, Any]
Check = Callable[[Any], None]
"""A function that raises ValueError with a sentence about a value of the right type."""
Reload = Literal["now", "workers", "later"]
"""When a reload puts a changed value in force.

`now`: at once. `workers`: at once, and in managed workers at their next start. `later`: at the gateway's next start.
"""


@attrs.frozen
class Between:
    """The check that a number is in a range, both ends included."""

    low: float
    high: float = math.inf

    def __call__(self, value: float) -> None:
        """Raise ValueError for a number outside."""
        if not self.low <= value <= self.high:
            raise ValueError(f"must be from {self.low:g} to {self.high:g}, not {_short(value)}")

    @property
    def schema(self) -> Schema:
        """The same as JSON schema."""
        return {"minimum": self.low} | ({} if math.isinf(self.high) else {"maximum": self.high})


@attrs.frozen
class OneOf:
    """The check that a text is one of these."""

    allowed: tuple[str, ...]

    def __call__(self, value: str) -> None:
        """Raise ValueError for another text."""
        if value not in self.allowed:
            raise ValueError(f"must be one of {', '.join(self.allowed)}, not {value!r}")

    @property
    def schema(self) -> Schema:
        """The same as JSON schema."""
        return {"enum": list(self.allowed)}


@attrs.frozen
class Fits:
    """The check that a text is of a kind."""

    is_right: Callable[[str], object]
    """Returns something true for such a text."""
    problem: str
    """The sentence for any other text: it "must be ..."."""
    schema: Schema
    """The JSON schema of such a text, as far as it can say it."""

    def __call__(self, value: str) -> None:
        """Raise ValueError for another text."""
        if not self.is_right(value):
            raise ValueError(self.problem)


def matches(pattern: re.Pattern[str], problem: str) -> Fits:
    """Return the check that a text matches the whole of a pattern."""
    return Fits(pattern.fullmatch, problem, {"pattern": f"^{pattern.pattern}$"})


def one_of(*allowed: str) -> OneOf:
    """Return the check that a text is one of these."""
    return OneOf(allowed)


def checked(
    check: Check | None, default: Any = attrs.NOTHING, schema: Schema | None = None, *, reload: Reload | None = None
) -> Any:
    """Declare a field with a check of its value, if any; None, if the type allows it, is not checked.

    The check runs while structuring, so that all problems are found at once. Its `schema`, if any, says
    the same in JSON schema; a `schema` given here replaces that. `reload` is for `reload_of`.
    """
    return field(default=default, metadata={"check": check, "schema": schema, "reload": reload})


@functools.cache
def reload_of(owner: type[Any], name: str) -> Reload | None:
    """Return when a reload puts a changed field in force; None: as usual for the fields of this class."""
    return attrs.fields_dict(owner)[name].metadata.get("reload")


def strict_converter(*, forbid_extra_keys: bool) -> cattrs.Converter:
    """Return a converter that coerces no value into another type."""
    converter = cattrs.Converter(forbid_extra_keys=forbid_extra_keys, detailed_validation=True)
    exact: list[tuple[type, str]] = [(str, "a string"), (int, "a whole number"), (bool, "true or false")]
    for kind, words in exact:
        converter.register_structure_hook(kind, _exactly(kind, words))
    converter.register_structure_hook(float, _number)
    return converter


def section_hook(
    section: type[Any],
    converter: cattrs.Converter,
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Callable[[Any, Any], Any]:
    """Return the hook that structures a table: exactly its keys, each of the right type and checked."""

    def hook(attribute: "attrs.Attribute[Any]") -> Callable[[Any, Any], Any]:
        check: Check | None = attribute.metadata.get("check")
        kinds = get_args(attribute.type) if get_origin(attribute.type) is types.UnionType else (attribute.type,)
        container = next((origin for origin in map(get_origin, kinds) if origin in (list, dict)), None)

        def structure(value: Any, kind: Any) -> Any:
            is_left_out = value is None and type(None) in kinds
            if container and type(value) is not container and not is_left_out:
                raise ValueError(f"must be {'an array' if container is list else 'a table'}, not {shown(value)}")
            structured = converter.structure(value, kind)
            if check is not None and structured is not None:
                check(structured)
            return structured

        return structure

    overrides: Any = {attribute.name: override(struct_hook=hook(attribute)) for attribute in attrs.fields(section)}
    structure = make_dict_structure_fn(section, converter, **overrides)

    def table(value: Any, kind: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"must be a table, not {shown(value)}")
        mapping = cast("Mapping[str, Any]", value)
        return structure(prepare(mapping) if prepare else mapping, kind)

    return table


def _exactly(kind: type, words: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"must be {words}, not {shown(value)}")
        return value

    return structure


def _number(value: Any, _: Any) -> float:
    with contextlib.suppress(OverflowError):  # a whole number may be larger than any other
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    raise ValueError(f"must be a number, not {shown(value)}")


def _short(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:
        return shown(value)


def shown(value: Any) -> str:
    """Return a value for a message, as JSON of at most `SHOWN_CHARACTERS_MAX` characters."""
    try:
        return json.dumps(value, default=str)[:SHOWN_CHARACTERS_MAX]
    except RecursionError:
        return "something that is nested too deep"


def problems_of(error: Exception, path: str = "") -> Iterable[str]:
    """Return a line for each leaf in cattrs' tree of errors, with its path."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        inside, others = error.group_exceptions()
        for inner, note in inside:
            yield from problems_of(inner, _path_in(path, note))
        for inner in others:
            yield from problems_of(inner, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        yield from _unknown_keys(error, path)
    elif isinstance(error, KeyError):
        yield f"{path}: is missing"
    elif _HOLDS_SECRETS.search(path):
        yield f"{path}: {str(error).partition(', not ')[0]}"
    else:
        yield f"{path}: {error}"


def _path_in(path: str, note: AttributeValidationNote | IterableValidationNote) -> str:
    if isinstance(note, AttributeValidationNote):
        return f"{path}.{note.name}" if path else note.name
    return f"{path}[{note.index}]" if isinstance(note.index, int) else f"{path}.{note.index}"


def _unknown_keys(error: ForbiddenExtraKeysError, path: str) -> Iterable[str]:
    known = [attribute.name for attribute in attrs.fields(error.cl)]
    elsewhere: Mapping[str, str] = getattr(error.cl, "ELSEWHERE", {})
    for key in sorted(error.extra_fields):
        close = difflib.get_close_matches(key, known, 1)
        hint = f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known here: {', '.join(known)}"
        if key in elsewhere:
            hint = f"is not read here: {elsewhere[key]}"
        yield f"{path}.{key}: {hint}" if path else f"{key}: {hint}"
