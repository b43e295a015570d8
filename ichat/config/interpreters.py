"""Finds an engine's interpreter if none is configured. Only files are looked at; nothing is run."""

import os
import sys
from collections.abc import Iterator


def find_interpreter(backend: str) -> str | None:
    """Return the first interpreter with an engine installed: this process' own, else the first nearby; None: none."""
    return next((python for python in (sys.executable, *_nearby(backend)) if _has_engine(python, backend)), None)


def _nearby(backend: str) -> Iterator[str]:
    """Yield the paths where it may be: here and beside this program, in an active environment, and on the PATH."""
    import shutil

    for directory in (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))):
        yield os.path.join(directory, ".engines", backend, "bin", "python")
    if environment := os.environ.get("VIRTUAL_ENV"):
        yield os.path.join(environment, "bin", "python")
    for name in (backend, "python3"):
        if found := shutil.which(name):
            yield os.path.join(os.path.dirname(os.path.realpath(found) if name == backend else found), "python3")


def _has_engine(python: str, backend: str) -> bool:
    """Return whether an interpreter is there and an engine is installed for it."""
    import glob

    prefix = glob.escape(os.path.dirname(os.path.dirname(python)))
    name = glob.escape(backend.replace("-", "_"))
    installed = (f"{prefix}/lib*/python3*/*-packages/{name}{build}-*.dist-info" for build in ("", "_cpu"))
    return os.access(python, os.X_OK) and any(map(glob.glob, installed))
