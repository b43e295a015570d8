"""Names in messages, bounded in number and length, and the words of system errors."""

import difflib
import itertools
import json
import os
from collections.abc import Iterable

NAMED_MAX = 20
"""The most names in a message."""
NAMES_BYTES_MAX = 1000
"""The most bytes of JSON for these names."""
NAME_BYTES_MAX = 500
COMPARED_CHARACTERS_MAX = 100
"""Longer names are never suggested."""
NEAR_ENOUGH = 0.8
"""The similarity (`difflib`, at most 1) from which on a name may have been meant."""
SHORT_CHARACTERS = 40
"""The characters that are shown of a name of more than `NAME_BYTES_MAX` bytes."""


def some_of(names: Iterable[str], how: str) -> str:
    """Return names for a message: sorted if they are few, else the first names, and `how` the others are found.

    Without names the result is "".
    """
    first = list(itertools.islice(names, NAMED_MAX + 1))
    shown, room = list[str](), NAMES_BYTES_MAX
    for name in sorted(first) if len(first) <= NAMED_MAX else first[:NAMED_MAX]:
        room -= _json_bytes(name)
        if room >= 0:
            shown.append(name)
    text = ", ".join(shown)
    if len(shown) == len(first):
        return text
    return f"{text} and others ({how})" if text else f"some with long names ({how})"


def shortened(name: str) -> str:
    """Return a name for a message: its beginning if it is long."""
    return name if _json_bytes(name) <= NAME_BYTES_MAX else f"{name[:SHORT_CHARACTERS]}…"


def reason_of(error: OSError) -> str:
    """Return the message of a system error, without its number and its place."""
    known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else ""
    return (known or error.strerror or str(error)).rstrip(".")


def plain_model(name: str) -> str:
    """Return a model's name without its parts that differ between servers: capitals, owner before it, tag behind it."""
    return name.casefold().rpartition("/")[2].partition(":")[0]


def probably_meant(model: str, names: Iterable[str]) -> str | None:
    """Return the model's name that an unknown name probably meant, of a few names; None if that is not clear.

    It is the first name that differs only in capitals, owner or tag; else a name that is nearly the same.
    """
    if len(model) > COMPARED_CHARACTERS_MAX:
        return None
    short = [name for name in names if len(name) <= COMPARED_CHARACTERS_MAX]
    plain = plain_model(model)
    for name in short:
        if plain and plain_model(name) == plain:
            return name
    close = difflib.get_close_matches(model, short, 1, NEAR_ENOUGH)
    return close[0] if close else None


def _json_bytes(text: str) -> int:
    return len(json.dumps(text))
