"""`./build release` from nothing, under several Pythons."""

import shutil
import tomllib

import pytest
from support.releases import ROOT, UV, VERSION, install, interpreter, make_checkout, make_release, release_of_all, run

OLDEST, *_, NEWEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ichat"]["pythons"]


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


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


def test_the_wheel_is_installed_by_every_common_tool(tmp_path_factory, tmp_path):
    """`uv tool install`, pip under the oldest and the newest Python, and the source: each gives the same program."""
    dist = release_of_all(tmp_path_factory)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    place = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    run(UV, "tool", "install", "--quiet", wheel, **place)
    programs = [tmp_path / "bin/ichat", install(tmp_path / "source", source) / "ichat"]
    for version in (OLDEST, NEWEST):
        run(interpreter(version), "-m", "venv", tmp_path / version)
        run(tmp_path / version / "bin/python", "-m", "pip", "install", "--quiet", wheel)
        programs.append(tmp_path / version / "bin/ichat")
    config = tmp_path / "ichat.toml"
    config.write_text("[server_settings]\nport = 0\n")
    for program in programs:
        first, *lines = run(program, "version", "--deps").splitlines()
        assert first == f"ichat {VERSION}"
        assert any(line.startswith("console/preact ") for line in lines)
        run(program, "gateway", "-c", config, "--check")
