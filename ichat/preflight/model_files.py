"""Whether the files of a model on this machine are all there, by their names and sizes: no weight is read."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import cast

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_POINTER = b"version https://git-lfs"
"""The beginning of the file that Git leaves in the place of a large file."""
_POINTER_BYTES_MAX = 1024
_INDEX_BYTES_MAX = 64 * 1024 * 1024


def lack_of(directory: str) -> str:
    """Return the part that a model's directory lacks, in a few words; "" if nothing is known to be missing.

    Raises OSError.
    """
    config = os.path.join(directory, "config.json")
    if os.path.exists(config):
        try:
            json.loads(pathlib.Path(config).read_bytes())
        except (ValueError, RecursionError):
            return "config.json is not valid JSON"
    weights = [entry for entry in os.scandir(directory) if entry.name.endswith(_WEIGHTS)]
    for entry in weights:
        if not entry.is_file():
            return f"{entry.name} leads to no file"
        if entry.stat().st_size <= _POINTER_BYTES_MAX and _is_pointer(entry.path):
            return f"{entry.name} is a pointer of Git LFS, not the file itself"
    lacks = [lack for name in _INDEXES if (lack := _lack_of_index(directory, name)) is not None]
    if "" in lacks:
        return ""
    return lacks[0] if lacks else ""


def has_architecture(directory: str, keys: Sequence[str]) -> bool:
    """Return whether a model's config.json has one of these keys; True where there is no such file. Raises OSError."""
    path = pathlib.Path(directory, "config.json")
    if not path.exists():
        return True
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return True
    return not isinstance(config, dict) or any(cast("dict[str, object]", config).get(key) for key in keys)


def weight_bytes(directory: str) -> int:
    """Return the size of a model's files that hold weights. Raises OSError."""
    return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(_WEIGHTS))


def _is_pointer(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _lack_of_index(directory: str, name: str) -> str | None:
    """Return the files that an index names and that are missing, "" if there are none; None: there is no such index."""
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    if os.path.getsize(path) > _INDEX_BYTES_MAX:
        return ""
    try:
        named: Sequence[str] = sorted(set(json.loads(pathlib.Path(path).read_bytes())["weight_map"].values()))
        missing = [one for one in named if not os.path.exists(os.path.join(directory, one))]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{name} is damaged"
    if not missing:
        return ""
    return f"{len(missing)} of {len(named)} files that {name} names are missing, {missing[0]} first"
