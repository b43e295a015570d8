"""The file with the keys that were made over the API: a line each, with the key's hash and never the key itself.

It is replaced as a whole, or not at all, and is on the disk before a key is given out.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, cast

from ichat.config.checks import is_key_hash
from ichat.config.load import read_key
from ichat.config.own_secret import private
from ichat.errors import EXIT_UNAVAILABLE, ApiError, Exit
from ichat.security.made_keys import MadeKey, MadeKeys, OldSecret

VERSION = 1


def load_keys(path: str) -> MadeKeys:
    """Return the keys in a file; none where there is no file.

    Raises Exit 69 for a file that cannot be read: a gateway that knew none of its keys would be closed to their owners,
    or open to all.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if found["version"] != VERSION:
            raise ValueError(f"it is of version {found['version']}, not {VERSION}")
        made = [_read(table) for table in found["keys"]]
    except FileNotFoundError:
        return MadeKeys()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, ApiError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise Exit(
            EXIT_UNAVAILABLE,
            f"The keys that were made over the API cannot be read from {path} ({why}). Put a copy of the file in its"
            " place, or remove it: then those keys are not known any more.",
        ) from error
    return MadeKeys({one.key.name: one for one in made}, is_used=True)


def _read(table: dict[str, Any]) -> MadeKey:
    made_at, expires_at = table.pop("made_at"), table.pop("expires_at", None)
    if type(made_at) not in (int, float) or type(expires_at) not in (int, float, type(None)):
        raise ValueError("the time of a key is no number")
    old = _read_old(table.pop("old", None))
    key = read_key(table)
    if key.key_hash is None:
        raise ValueError(f"the key {key.name} has no hash")
    return MadeKey(key, cast("float", made_at), cast("float | None", expires_at), old)


def _read_old(table: dict[str, Any] | None) -> OldSecret | None:
    if table is None:
        return None
    until = table["until"]
    if type(until) not in (int, float):
        raise ValueError("the time of a key is no number")
    is_key_hash(table["key_hash"])
    return OldSecret(table["key_hash"], until)


def save_keys(path: str, made: MadeKeys) -> None:
    """Write all of them; it blocks until the disk has them. Raises OSError."""
    # Thousands of keys are not written as a single text.
    lines = ((",\n" if number else "\n") + one.line for number, one in enumerate(made.by_name.values()))
    replace_private_file(path, itertools.chain((f'{{"version": {VERSION}, "keys": [',), lines, ("]}\n",)))


def replace_private_file(path: str, parts: Iterable[str]) -> None:
    """Write a text in parts to a file that is for this user alone; it blocks until the disk has it. Raises OSError."""
    written = f"{path}.new"
    with open(written, "w", encoding="utf-8", opener=private) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    directory = os.open(pathlib.Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
