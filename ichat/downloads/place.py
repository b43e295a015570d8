"""Where the models of a hub are on this machine, and whether a model is whole there.

A model of the Hugging Face hub is in the cache of `huggingface_hub`, where every engine and tool finds it. A model of
ModelScope is a directory with its files, as `modelscope` has it.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs

from ichat.config.hubs import Hub
from ichat.engines.load_phases import hub_cache
from ichat.preflight.hub import snapshot_in
from ichat.preflight.model_files import lack_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
USUAL: Mapping[Hub, str] = {"huggingface": "main", "modelscope": "master"}
"""The revision of a model if none is named."""
PACKAGES: Mapping[Hub, str] = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}
"""The library of each hub."""
UNDER_WAY = "._____temp"
"""Where `modelscope` has the files that it has not fetched completely."""
_LIST_BYTES_MAX = 16 * 1024 * 1024


@attrs.frozen
class ModelPlace:
    """The place of a model of a hub on this machine, whether it is there or not."""

    hub: Hub
    name: str
    cache: str
    """The directory with all models of the hub."""

    @property
    def directory(self) -> str:
        """The directory with everything of the model."""
        if self.hub == "huggingface":
            return os.path.join(self.cache, f"models--{self.name.replace('/', '--')}")
        return os.path.join(self.cache, "models", *(part.replace(".", "___") for part in self.name.split("/")))

    def directory_of(self, revision: str) -> str:
        """Return where ModelScope's files of a revision are: beside the model's directory if it is not the usual."""
        return self.directory if revision == USUAL[self.hub] else f"{self.directory}@{revision.replace('/', '--')}"

    @property
    def locks(self) -> str:
        """The directory with its locks."""
        return os.path.join(self.cache, ".locks", f"models--{self.name.replace('/', '--')}")

    def version(self, revision: str) -> str | None:
        """Return the directory of a version, whole or not; None: it is not here."""
        if self.hub == "huggingface":
            return snapshot_in(self.cache, self.name, revision)
        directory = self.directory_of(revision)
        return directory if os.path.isdir(directory) else None

    def list_of(self, version: str) -> pathlib.Path:
        """Return the path of the list of a version's files; it is written before the download."""
        return pathlib.Path(self.directory, ".ichat", f"{version}.json")


def place_of(hub: Hub, name: str, environment: Mapping[str, str], cache: str | None = None) -> ModelPlace:
    """Return the place of a model; `cache` replaces the directory that the environment names."""
    return ModelPlace(hub, name, cache or cache_of(hub, environment))


def cache_of(hub: Hub, environment: Mapping[str, str]) -> str:
    """Return the directory with the models of a hub, by the variables that its library reads."""
    if hub == "huggingface":
        return hub_cache(environment)
    root = environment.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub"
    return os.path.expanduser(root)


def whole_version(place: ModelPlace, revision: str) -> str | None:
    """Return the directory of a version of a model if all its files are here; None otherwise. It reads files.

    A version that another program has downloaded has no list of its files: it counts as whole if it has weights,
    every file that its index names, and no file under way.
    """
    directory = place.version(revision)
    if directory is None:
        return None
    version = os.path.basename(directory) if place.hub == "huggingface" else revision
    sizes = read_list(place.list_of(version))
    try:
        if sizes is None:
            return directory if _seems_whole(place, directory) else None
        return directory if all(_has_size(directory, name, size) for name, size in sizes.items()) else None
    except (OSError, ValueError):
        return None


def read_list(path: pathlib.Path) -> Mapping[str, int] | None:
    """Return the sizes of a version's files, by their paths; None: there is no such list."""
    try:
        if path.stat().st_size > _LIST_BYTES_MAX:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    sizes = cast("dict[str, Any]", found)
    return sizes if sizes and all(isinstance(size, int) for size in sizes.values()) else None


def _has_size(directory: str, name: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.getsize(os.path.join(directory, name)) == size
    return False


def _seems_whole(place: ModelPlace, directory: str) -> bool:
    names = os.listdir(directory)
    has_model = "config.json" in names and any(name.endswith(WEIGHTS) for name in names)
    return has_model and not lack_of(directory) and not any(True for _ in _under_way(place))


def _under_way(place: ModelPlace) -> Iterable[str]:
    """Yield the files that a download has begun and not ended."""
    beside = "blobs" if place.hub == "huggingface" else UNDER_WAY
    with contextlib.suppress(OSError), os.scandir(os.path.join(place.directory, beside)) as entries:
        for entry in entries:
            if place.hub != "huggingface" or entry.name.endswith(".incomplete"):
                yield entry.path
