"""The files of a model on this machine: whether all are there, its config.json, and its tensors; no weight is read."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, cast

from ichat.placement.weights import LENGTH_BYTES, DamagedFile, Tensor, length_of_header, tensors_of_header

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_POINTER = b"version https://git-lfs"
"""The beginning of the file that Git leaves in the place of a large file."""
_POINTER_BYTES_MAX = 1024
_INDEX_BYTES_MAX = 64 * 1024 * 1024
_CONFIG_BYTES_MAX = 16 * 1024 * 1024
_SHARDS_MAX = 4096
_OTHERS = ("consolidated", "adapter_model")
"""The beginnings of names of safetensors files that are no part of a model as engines load it."""


def lack_of(directory: str) -> str:
    """Return the part that a model's directory lacks, in a few words; "" if nothing is known to be missing.

    Raises OSError.
    """
    try:
        read_config(directory)
    except DamagedFile as error:
        return str(error)
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
    try:
        config = read_config(directory)
    except DamagedFile:
        return True
    return config is None or any(config.get(key) for key in keys)


def read_config(directory: str, name: str = "config.json") -> dict[str, Any] | None:
    """Return a model's config.json; None: there is none. Raises DamagedFile and OSError."""
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    if os.path.getsize(path) > _CONFIG_BYTES_MAX:
        raise DamagedFile(f"{name} is too large")
    try:
        config = json.loads(pathlib.Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name} is not valid JSON") from error
    if not isinstance(config, dict):
        raise DamagedFile(f"{name} is not valid JSON")
    return cast("dict[str, Any]", config)


def read_tokenizer_length(directory: str) -> int | None:
    """Return the most tokens of a sequence by a model's tokenizer; None: it does not say. Raises OSError."""
    try:
        length = (read_config(directory, "tokenizer_config.json") or {}).get("model_max_length")
    except DamagedFile:
        return None
    if not isinstance(length, int | float) or isinstance(length, bool) or not 1 <= length < 1 << 40:
        return None
    return int(length)


def read_tensors(directory: str) -> list[Tensor] | None:
    """Return the tensors of a model's safetensors files, by their headers; None: some files or all are not here.

    Raises DamagedFile with the damage, and OSError.
    """
    index = os.path.join(directory, _INDEXES[0])
    names = _named_in(index, _INDEXES[0]) if os.path.exists(index) else _single_files(directory)
    paths = [os.path.join(directory, name) for name in names]
    if not paths or not all(map(os.path.exists, paths)):
        return None
    if len(paths) > _SHARDS_MAX:
        raise DamagedFile(f"it has more than {_SHARDS_MAX} files")
    return [tensor for path in paths for tensor in _read_header(path)]


def _single_files(directory: str) -> list[str]:
    """Return the safetensors files of a model without an index. Raises OSError."""
    names = sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(".safetensors"))
    return [name for name in names if not name.startswith(_OTHERS)]


def _named_in(path: str, name: str) -> list[str]:
    """Return the files that an index names. Raises DamagedFile and OSError."""
    try:
        if os.path.getsize(path) > _INDEX_BYTES_MAX:
            raise DamagedFile(f"{name} is too large")
        return sorted(set(map(os.fspath, json.loads(pathlib.Path(path).read_bytes())["weight_map"].values())))
    except DamagedFile:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{name} is damaged") from error


def _read_header(path: str) -> list[Tensor]:
    """Return the tensors of a file. Raises DamagedFile and OSError."""
    try:
        if _is_pointer(path):
            raise DamagedFile("is a pointer of Git LFS, not the file itself")
        with open(path, "rb") as file:
            length = length_of_header(file.read(LENGTH_BYTES))
            data_bytes = os.fstat(file.fileno()).st_size - LENGTH_BYTES - length
            if data_bytes < 0:
                raise DamagedFile("is cut off")
            return tensors_of_header(file.read(length), data_bytes)
    except DamagedFile as error:
        raise DamagedFile(f"{os.path.basename(path)} {error}") from error


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
        named = _named_in(path, name)
    except DamagedFile as error:
        return str(error)
    missing = [one for one in named if not os.path.exists(os.path.join(directory, one))]
    if not missing:
        return ""
    return f"{len(missing)} of {len(named)} files that {name} names are missing, {missing[0]} first"
