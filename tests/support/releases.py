"""Checkouts of this repository's files, and releases made from them."""

import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from support.programs import LIMIT_S

ROOT = pathlib.Path(__file__).parents[2]
UV = ROOT / ".build/tools/bin/uv"
FILES = ("ichat", "build", "pyproject.toml", "ichat.toml.example", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")
GIT = ("git", "-c", "user.name=Tester", "-c", "user.email=tester@localhost", "-c", "commit.gpgsign=false")
VERSION = re.search(r'"(.+)"', (ROOT / "ichat/__init__.py").read_text().rpartition("__version__")[2])[1]


def make_checkout(place):
    """Make a repository with one commit of the files as they are here, and a changelog that has this version."""
    place.mkdir(exist_ok=True)
    for name in FILES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)
    changelog = place / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased", f"## {VERSION} (2026-11-27)", 1))
    run("git", "init", "--quiet", cwd=place)
    commit(place)
    return place


def commit(place):
    run(*GIT, "add", "--all", cwd=place)
    run(*GIT, "commit", "--quiet", "--message", "All of it.", cwd=place)


def lend_tools(place):
    """Copy what `./build` has made here into a checkout: the tools, the bundle and the console's JavaScript.

    They are no links, since `./build` makes anew what is out of date.
    """
    for name in ("tools", "bundle", "console/vendor"):
        if (ROOT / ".build" / name).exists():
            shutil.copytree(ROOT / ".build" / name, place / ".build" / name, symlinks=True)


def make_release(place, python=sys.executable, umask=-1):
    """Run `./build release` in a checkout, and return dist/."""
    run(python, place / "build", "release", umask=umask)
    return place / "dist"


def made_once(tmp_path_factory, name, make):
    """Return a directory that all processes of the tests share; the first that needs it has `make` fill it."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with (base.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".made").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (place / ".made").touch()
    return place


def release_of_all(tmp_path_factory):
    """Return the dist/ of a release that all processes of the tests share."""

    def make(place):
        make_checkout(place / "checkout")
        lend_tools(place / "checkout")
        make_release(place / "checkout")

    return made_once(tmp_path_factory, "release", make) / "checkout/dist"


def install(place, package=None, python=sys.executable):
    """Make an environment, with a package if one is given, and return the directory with its programs."""
    run(UV, "venv", "--quiet", "--allow-existing", "--python", python, place)
    if package is not None:
        run(UV, "pip", "install", "--quiet", "--python", place / "bin/python", package)
    return place / "bin"


def run(*command, cwd=None, code=0, umask=-1, **env):
    """Run a command to its exit code, and return what it wrote; to standard error, if the code is none of success."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        umask=umask,
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **env},
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stderr if code else done.stdout


def interpreter(version):
    """Find a working interpreter of a version: this one, on the PATH, or kept by pyenv."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    candidates = [sys.executable, *(f"{place}/python{version}" for place in os.environ["PATH"].split(os.pathsep))]
    candidates += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}")))
    for candidate in candidates:
        if os.path.exists(candidate):
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
            if f"{done.stdout}{done.stderr}".startswith(f"Python {version}."):  # Python 2 says it on stderr
                return candidate
    pytest.skip(f"there is no Python {version} on this machine")
