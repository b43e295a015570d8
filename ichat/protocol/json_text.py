"""JSON as RFC 8259 has it, in both directions: Python's own also reads and writes numbers that are none."""

import json
from collections.abc import Callable
from typing import Any, cast


def encoder(default: Callable[[Any], Any] | None = None) -> Callable[[object], str]:
    """Return a function that writes values as ASCII; `default` makes a plain value of any other object.

    NaN and the infinities become texts, so that every client can still read the values around them.
    """
    strict, lenient = json.JSONEncoder(default=default, allow_nan=False), json.JSONEncoder(default=default)

    def encode(value: object) -> str:
        try:
            return strict.encode(value)
        except ValueError:
            return strict.encode(parsed(lenient.encode(value)))

    return encode


to_json = encoder()
"""Return a value that JSON can hold as ASCII."""


def parsed(text: str | bytes | bytearray) -> Any:
    """Return the value of a text of JSON, with NaN and the infinities as texts. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=str)


def object_in(text: str | bytes) -> dict[str, Any]:
    """Return the members of a JSON object; none for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
