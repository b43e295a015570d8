"""The models on this machine's disk: their sizes, whether they are whole, and their removal. It reads directories."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import attrs

from ichat.config.engine_args import arguments_of
from ichat.config.hubs import HUBS, Hub
from ichat.config.schema import ManagedWorkerConfig
from ichat.downloads.model_lock import ModelLock
from ichat.downloads.place import USUAL, ModelPlace, whole_version
from ichat.downloads.report import DownloadReport

_PREFIX = "models--"
MODELS_MAX = 10_000


@attrs.frozen
class StoredModel:
    """A model on this machine's disk."""

    place: ModelPlace
    size_bytes: int
    is_whole: bool
    """Whether all files of a version are here."""
    download: DownloadReport | None
    """How far the process is that downloads it now; None: none does."""


def stored_models(caches: Iterable[tuple[Hub, str]]) -> list[StoredModel]:
    """Return the models in these directories, each of a hub, the largest first."""
    places = [place for hub, cache in caches for place in _places_in(hub, cache)]
    return sorted(map(stored_model, places), key=lambda one: (-one.size_bytes, one.place.name))


def stored_model(place: ModelPlace) -> StoredModel:
    """Return a model that is on the disk."""
    size = sum(_size_of(directory) for directory in _directories_of(place))
    return StoredModel(place, size, _is_whole(place), _download_of(place))


def is_stored(place: ModelPlace) -> bool:
    """Return whether anything of a model is on the disk."""
    return any(os.path.isdir(directory) for directory in _directories_of(place))


def remove_model(place: ModelPlace) -> str:
    """Remove everything of a model; return in a sentence why that cannot be, "" if it is done. Raises OSError."""
    with ModelLock(place.locks).held() as holder:
        if holder is not None:
            return f"{place.name} is being downloaded by {holder.words}: end that first."
        for number, directory in enumerate(_directories_of(place)):
            aside = pathlib.Path(place.locks, f"removed.{number}")
            shutil.rmtree(aside, ignore_errors=True)  # left by a removal that was cut off
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)
            if aside.exists():
                return f"{place.name} was removed, and {aside} could not be deleted: see its rights."
    return ""


def is_used_by(place: ModelPlace, spec: ManagedWorkerConfig) -> bool:
    """Return whether a managed worker with this table loads a model, or has it among its engine's arguments."""
    values = [spec.model_path, *_texts_of(arguments_of(spec))]
    return any(does_name(place, value) for value in values)


def does_name(place: ModelPlace, text: str) -> bool:
    """Return whether a text is a model's name, or leads into its directory."""
    if text.partition(":")[0] == place.name:
        return True
    if not text.startswith(("/", ".", "~")):
        return False
    real = os.path.realpath(os.path.expanduser(text))
    return any(os.path.commonpath([real, directory]) == directory for directory in map(os.path.realpath, _all(place)))


def _all(place: ModelPlace) -> Sequence[str]:
    return _directories_of(place) or [place.directory]


def _texts_of(value: object) -> Iterator[str]:
    """Yield every text in a value of an engine's argument."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in cast("dict[str, object]", value).values():
            yield from _texts_of(one)
    elif isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _texts_of(one)


def _places_in(hub: Hub, cache: str) -> Iterator[ModelPlace]:
    names = _huggingface_names(cache) if hub == HUBS[0] else _modelscope_names(cache)
    for name, _ in zip(names, range(MODELS_MAX), strict=False):
        yield ModelPlace(hub, name, cache)


def _huggingface_names(cache: str) -> Iterator[str]:
    for name in _directories_in(cache):
        if name.startswith(_PREFIX):
            yield name.removeprefix(_PREFIX).replace("--", "/")


def _modelscope_names(cache: str) -> Iterator[str]:
    models = os.path.join(cache, "models")
    for owner in _directories_in(models):
        names = {name.partition("@")[0] for name in _directories_in(os.path.join(models, owner))}
        yield from sorted(f"{owner}/{name.replace('___', '.')}" for name in names if not name.startswith("."))


def _directories_in(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _directories_of(place: ModelPlace) -> list[str]:
    """Return the directories of a model that are here: with ModelScope, each revision has its own."""
    beside = pathlib.Path(place.directory)
    found = [str(beside)] if beside.is_dir() else []
    if place.hub == "modelscope" and beside.parent.is_dir():
        found += [str(one) for one in sorted(beside.parent.iterdir()) if one.name.startswith(f"{beside.name}@")]
    return found


def _size_of(directory: str) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(root, name))
                total += min(status.st_size, status.st_blocks * 512)
    return total


def _is_whole(place: ModelPlace) -> bool:
    revisions = {USUAL[place.hub]}
    if place.hub == "huggingface":
        revisions.update(os.path.basename(one) for one in _directories_in(os.path.join(place.directory, "snapshots")))
    else:
        revisions.update(one.rpartition("@")[2] for one in _directories_of(place) if "@" in os.path.basename(one))
    return any(whole_version(place, revision) is not None for revision in revisions)


def _download_of(place: ModelPlace) -> DownloadReport | None:
    """Return how far the process is that downloads a model; None: none does."""
    lock = ModelLock(place.locks)
    if not os.path.isdir(place.locks):
        return None
    with contextlib.suppress(OSError), lock.held() as holder:
        return None if holder is None else lock.shown() or DownloadReport("starting")
    return None
