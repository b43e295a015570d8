"""Downloads from a hub, by the files in its cache."""

import os

import pytest

from ichat.engines.load_phases import COMING_S, downloaded, hub_cache

MIB = 1024**2


@pytest.fixture(name="blobs")
def blobs_fixture(tmp_path):
    directory = tmp_path / "models--org--name" / "blobs"
    directory.mkdir(parents=True)
    return directory


def test_downloaded_bytes_are_counted_during_the_download(tmp_path, blobs):
    """Files that are whole count as well; afterwards, and for files that a broken download left, nothing is said."""
    (blobs / "a").write_bytes(b"x" * 64 * MIB)
    assert not downloaded("org/name", tmp_path, 0)
    coming = blobs / "b.0123.incomplete"
    coming.write_bytes(b"x" * 64 * MIB)
    now = coming.stat().st_mtime
    assert downloaded("org/name", tmp_path, now + 1) == "(0.12 GiB downloaded)"
    assert not downloaded("org/name", tmp_path, now + COMING_S + 1)
    os.truncate(coming, 2**40)
    os.utime(coming, (now, now))
    assert downloaded("org/name", tmp_path, now) == "(0.12 GiB downloaded)", "room that is only reserved has not come"


@pytest.mark.parametrize("model", ["org/other", "../../etc", "/models/org/name", ".", "a/b/c", ""])
def test_other_models_are_none_of_the_hubs(tmp_path, blobs, model):
    """A path is loaded from where it is."""
    (blobs / "b.incomplete").write_bytes(b"x")
    assert not downloaded(model, tmp_path, (blobs / "b.incomplete").stat().st_mtime)


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "~/c", "HF_HOME": "/h"}, "~/c"),
    ],
)
def test_the_cache_is_where_the_hubs_library_has_it(environment, path):
    """By the variables that `huggingface_hub` reads."""
    assert hub_cache(environment) == os.path.expanduser(path)
