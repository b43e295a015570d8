"""Models on the disk: whether they are whole, which files are wanted, and who uses them."""

import errno
import fcntl
import json
import os

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.downloads.hub_client import HubFile, HubIndex, causes_of, lack_of_room, sentence_of_disk, wanted
from ichat.downloads.inventory import is_used_by, remove_model, stored_models
from ichat.downloads.model_lock import ModelLock, locked
from ichat.downloads.place import ModelPlace, whole_version
from ichat.downloads.report import DownloadReport

COMMIT = "c" * 40
NAME = "org/model.1"


@pytest.fixture(name="place", params=["huggingface", "modelscope"])
def place_fixture(request, tmp_path):
    return ModelPlace(request.param, NAME, str(tmp_path))


def put(place, files, listed=None, revision="main"):
    """Write a version of a model, and the list of its files."""
    if place.hub == "huggingface":
        directory, version = os.path.join(place.directory, "snapshots", COMMIT), COMMIT
        os.makedirs(os.path.join(place.directory, "refs"), exist_ok=True)
        with open(os.path.join(place.directory, "refs", revision), "w") as file:
            file.write(COMMIT)
    else:
        directory, version = place.directory, "master"
    os.makedirs(directory, exist_ok=True)
    for name, size in files.items():
        with open(os.path.join(directory, name), "wb") as file:
            file.write(b"{}" if name == "config.json" else b"x" * size)
    if listed is not None:
        path = place.list_of(version)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(listed))
    return directory


def usual(place):
    return "main" if place.hub == "huggingface" else "master"


@pytest.mark.parametrize(
    ("files", "listed", "is_whole"),
    [
        ({"config.json": 2, "model.safetensors": 9}, {"config.json": 2, "model.safetensors": 9}, True),
        ({"config.json": 2, "model.safetensors": 8}, {"config.json": 2, "model.safetensors": 9}, False),
        ({"config.json": 2}, {"config.json": 2, "model.safetensors": 9}, False),
        ({"config.json": 2, "model.safetensors": 9}, None, True),
        ({"config.json": 2}, None, False),
        ({"model.safetensors": 9}, None, False),
    ],
)
def test_a_model_is_whole_if_every_file_is_here(place, files, listed, is_whole):
    """By the list of its files; without it, by its weights and its index."""
    directory = put(place, files, listed)
    assert whole_version(place, usual(place)) == (directory if is_whole else None)
    assert whole_version(place, "v2") is None
    (found,) = stored_models([(place.hub, place.cache)])
    assert (found.place, found.is_whole, found.download) == (place, is_whole, None)


def test_a_model_of_another_program_with_a_file_under_way_is_not_whole(place):
    """Its files are not listed."""
    put(place, {"config.json": 2, "model.safetensors": 9})
    beside = os.path.join(place.directory, "blobs" if place.hub == "huggingface" else "._____temp")
    os.makedirs(beside)
    with open(os.path.join(beside, "abc.incomplete"), "wb"):
        pass
    assert whole_version(place, usual(place)) is None


def test_a_model_that_is_downloaded_is_not_removed(place):
    """Without a holder of the lock it is, and nothing is left of it."""
    put(place, {"config.json": 2, "model.safetensors": 9})
    lock = ModelLock(place.locks)
    with lock.held() as holder:
        assert holder is None
        lock.show(DownloadReport("downloading", "", 1, 2))
        assert f"{NAME} is being downloaded by process" in remove_model(place)
        (found,) = stored_models([(place.hub, place.cache)])
        assert found.download.words() == "50 %"
    assert remove_model(place) == ""
    assert stored_models([(place.hub, place.cache)]) == []
    assert not list(lock._directory.glob("removed*"))


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    """A file without a holder is no lock; a removed file is another lock."""
    path = tmp_path / "a.lock"
    path.write_text("left by a process that has ended")
    with locked(path) as holder:
        assert holder is None
        with locked(path) as other:
            assert other is not None
            assert other.words.startswith((f"process {os.getpid()} (", "a process that cannot be seen"))
        path.unlink()
        with locked(path) as third:
            assert third is None
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("spec", "is_used"),
    [
        ({"model_path": NAME}, True),
        ({"model_path": f"{NAME}:Q4_K_M"}, True),
        ({"model_path": "org/model.2"}, False),
        ({"model_path": "HERE"}, True),
        ({"model_path": "/models/x"}, False),
        ({"model_path": "/m", "backend_args": {"speculative_config": {"method": "eagle", "model": NAME}}}, True),
        ({"model_path": "/m", "backend_args": {"lora_modules": ["a", NAME]}}, True),
    ],
)
def test_a_worker_uses_a_model_by_its_name_its_directory_and_its_arguments(place, spec, is_used):
    directory = put(place, {"config.json": 2})
    spec = {name: directory if value == "HERE" else value for name, value in spec.items()}
    assert is_used_by(place, ManagedWorkerConfig("m", **spec)) == is_used


def paths(*names, wants_all=False):
    index = HubIndex("v", [HubFile(name, 1) for name in names])
    return [one.path for one in wanted(index, wants_all=wants_all).files]


def test_the_files_that_engines_read_are_wanted():
    """Of weights in two formats, safetensors; none in those of other programs."""
    listed = ["config.json", "a.safetensors", "a.bin", "a.gguf", "tf.h5", "original/x.pth", "onnx/m.onnx", "1/c.json"]
    assert paths(*listed) == ["config.json", "a.safetensors", "1/c.json"]
    assert paths("config.json", "a.bin", "tf.h5") == ["config.json", "a.bin"]
    assert paths("unet/a.safetensors", "a.bin") == ["unet/a.safetensors", "a.bin"]
    assert paths(*listed, wants_all=True) == listed


def test_sentences_about_the_disk_say_what_to_do():
    """A disk without room, before and during a download, and a disk that cannot be written."""
    assert lack_of_room("m", "/c", 10, 10) == ""
    assert lack_of_room("m", "/c", 2 << 30, 1 << 30).startswith(
        "m needs 2.00 GiB more in /c, and that disk has 1.00 GiB"
    )
    for number, words in ((errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EROFS, "cannot be written")):
        assert words in sentence_of_disk(OSError(number, os.strerror(number)), "m", "/c")
    assert sentence_of_disk(OSError(errno.ECONNRESET, "reset"), "m", "/c") == ""


def test_the_causes_of_an_error_are_found_once():
    """Also in a circle, and those of single files."""
    error, cause, of_file = ValueError("a"), OSError("b"), OSError("c")
    error.__cause__, cause.__context__ = cause, error
    error.failed_files = {"f": of_file}
    assert list(causes_of(error)) == [error, cause, of_file]
