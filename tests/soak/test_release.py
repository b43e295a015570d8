"""`./build release` from nothing, under several Pythons."""

import shutil
import tomllib

import pytest
from support.releases import ROOT, interpreter, make_checkout, make_release, run

OLDEST, *_, NEWEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ichat"]["pythons"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_one_commit_gives_the_same_bytes_under_two_pythons(tmp_path):
    """Neither Python, nor path, permissions, times or umask are in what is released."""
    sums = []
    for version, umask in ((OLDEST, 0o022), (NEWEST, 0o077)):
        python = interpreter(version)
        place = make_checkout(tmp_path / version)
        for path in (place / "ichat").rglob("*.py"):
            path.chmod(0o666 & ~umask)
        run("git", "config", "core.fileMode", "false", cwd=place)
        sums.append((make_release(place, python, umask=umask) / "SHA256SUMS").read_text())
    assert sums[0] == sums[1]
