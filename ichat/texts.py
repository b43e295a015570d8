"""Names in messages: few enough, and short enough, however many there are."""

import itertools
import json
from collections.abc import Iterable

NAMED_MAX = 20
"""How many names a message has."""
NAMES_BYTES_MAX = 1000
"""How many bytes of JSON they take."""
NAME_BYTES_MAX = 500
SHORT_CHARACTERS = 40
"""So much is shown of a name that takes more than `NAME_BYTES_MAX`."""


def some_of(names: Iterable[str], how: str) -> str:
    """Return names for a message: sorted if they are few, else the first ones, and `how` the others are found.

    Where there are no names, that is "".
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


def _json_bytes(text: str) -> int:
    return len(json.dumps(text))
