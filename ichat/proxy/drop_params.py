"""Which parameters of a request an external upstream gets: LiteLLM calls this `drop_params`.

Rules decide on the members that a body has and return the changes; nothing is changed here.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import cast

import attrs

from ichat.config.openai_params import KNOWN
from ichat.errors import ApiError, bad_request
from ichat.http.json_body import parsed_value

SUPPORTED = KNOWN - {
    "reasoning_effort", "verbosity", "thinking", "context_management", "include_server_side_tool_invocations",
}  # fmt: skip
"""The parameters of an upstream that speaks OpenAI's protocol and of which nothing else is known."""
_NEVER_REFUSED = frozenset(("user", "stream", "stream_options"))

_PATH_STEP = re.compile(r"[^.\[\]]+")

PathStep = str | int | None
"""Into the member of this name, the element at this place, or every element."""


@attrs.frozen
class Changes:
    """Changes to a request's body, as `RequestBody.edited` accepts them."""

    replace: Mapping[str, bytes]
    drop: Collection[str]
    dropped: Sequence[str]
    """Names and paths that were there and are left out for the upstream, for the log."""


@attrs.frozen
class ParamRules:
    """The rules of an external route."""

    drop_params: bool = False
    """Leave out parameters that the upstream does not support, instead of refusing the request."""
    additional_drop_params: Sequence[str] = ()
    """Names, and paths such as `tools[*].function.strict`, that the upstream never gets."""
    allowed_openai_params: Sequence[str] = ()
    """Names that it supports as well."""
    supported_openai_params: Sequence[str] | None = None
    """Names that it supports, if these are not `SUPPORTED`."""

    def plan(self, found: Mapping[str, bytes], *, gated: bool) -> Changes:
        """Return the changes for a body with these members of `names`, which have their values as they are written.

        ``gated``: whether the upstream's support for a parameter counts on this route (completions and
        embeddings). Raises ApiError 400 for parameters that it does not support, unless they will be dropped.
        """
        drop = [name for name in found if name in self._never]
        drop += self._unsupported_in(found) if gated else ()
        replace, dropped = dict[str, bytes](), list(drop)
        for name, paths in self._paths.items():
            if name in found and name not in drop:
                value = parsed_value(name, found[name])
                effective = [path for path, steps in paths.items() if _drop_nested(value, steps)]
                if effective:
                    replace[name] = _written(value, name)
                    dropped += effective
        return Changes(replace, frozenset(drop), dropped)

    def _unsupported_in(self, found: Mapping[str, bytes]) -> Sequence[str]:
        """Return the names that are left out since the upstream does not support them. Raises ApiError 400."""
        unsupported = [name for name in found if name in self._gated]
        nulls = [name for name in unsupported if found[name] == b"null"]
        passed = [name for name in unsupported if name not in nulls and not _is_exempt(name, found[name])]
        if passed and not self.drop_params:
            raise _unsupported(passed)
        return nulls + passed

    @cached_property
    def names(self) -> frozenset[str]:
        """The members that the rules are about: `plan` changes nothing in a body without any."""
        return self._gated | self._never | self._paths.keys()

    @cached_property
    def _never(self) -> frozenset[str]:
        return frozenset(name for name in self.additional_drop_params if len(_steps_of(name)) == 1)

    @cached_property
    def _gated(self) -> frozenset[str]:
        supported = SUPPORTED if self.supported_openai_params is None else self.supported_openai_params
        return KNOWN.difference(supported, self.allowed_openai_params, self._never)

    @cached_property
    def _paths(self) -> dict[str, dict[str, list[PathStep]]]:
        """The paths into each member, by its name: as they are written, and the steps behind the name."""
        paths: dict[str, dict[str, list[PathStep]]] = {}
        for path in self.additional_drop_params:
            name, *steps = _steps_of(path)
            if steps:
                paths.setdefault(cast("str", name), {})[path] = steps
        return paths


def _steps_of(path: str) -> list[PathStep]:
    """Return the steps of a path that was checked."""
    steps: list[PathStep] = []
    for match in _PATH_STEP.finditer(path):
        word = match[0]
        is_index = path[match.start() - 1 : match.start()] == "["
        steps.append(word if not is_index else None if word == "*" else int(word))
    return steps


def _drop_nested(value: object, steps: Sequence[PathStep]) -> bool:
    """Remove the values at the end of a path in a parsed value; return whether there were any."""
    places = [value]
    for step in steps[:-1]:
        places = [inner for place in places for inner in _inside(place, step)]
    last = cast("str", steps[-1])
    tables = [cast("dict[str, object]", place) for place in places if isinstance(place, dict) and last in place]
    for table in tables:
        del table[last]
    return bool(tables)


def _inside(place: object, step: PathStep) -> Sequence[object]:
    """Return the values that are a step inside a parsed value; nothing if that step does not exist."""
    if isinstance(place, dict) and isinstance(step, str):
        table = cast("dict[str, object]", place)
        return [table[step]] if step in table else []
    if isinstance(place, list) and not isinstance(step, str):
        elements = cast("list[object]", place)
        return elements if step is None else elements[step : step + 1]
    return []


def _written(value: object, name: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError as error:
        raise bad_request(f"`{name}` is nested too deep.", param=name) from error


def _is_exempt(name: str, value: bytes) -> bool:
    """Return whether a parameter goes to every upstream; clients send `n` = 1 without meaning."""
    return name in _NEVER_REFUSED or (name == "n" and value == b"1")


def _unsupported(names: Sequence[str]) -> ApiError:
    """400: the upstream of this model does not have these parameters."""
    return ApiError(
        400,
        "unsupported_parameter",
        f"The upstream of this model does not support {', '.join(f'`{name}`' for name in names)}: leave them out, or "
        "have the operator set drop_params = true, which drops them, or list them in allowed_openai_params.",
        param=names[0],
    )
