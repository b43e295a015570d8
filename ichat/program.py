"""The form in which this program runs: the pyz, a package that pip or uv has installed, or a checkout.

It decides which command starts another process of it, and how sentences name that command.
"""

import functools
import os
import re
import sys

from ichat import __version__

_COMMANDS = re.compile(r"(?<![\w/])(?:python3 |\./)?ichat\.pyz(?![\w.])|\./build engine (?=\w)")
_INSTALLED = {"./build engine ": "uv pip install ichat "}


@functools.cache
def package_directory() -> str:
    """Return the directory that contains the package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def is_pyz() -> bool:
    """Return whether this process runs the pyz."""
    import zipfile

    return zipfile.is_zipfile(sys.argv[0])


@functools.cache
def is_installed() -> bool:
    """Return whether the package was installed from a wheel; so neither the pyz nor a checkout, installed or not."""
    return os.path.isdir(os.path.join(package_directory(), f"ichat-{__version__}.dist-info"))


def own_command(python: str) -> list[str]:
    """Return the command that runs iChat in an interpreter, in the form in which this process runs.

    An installed package must be installed there, too; its script is preferred, since `-m` would import the modules
    of the working directory first.
    """
    if is_pyz():
        return [python, os.path.abspath(sys.argv[0])]
    script = os.path.join(os.path.dirname(python), "ichat")
    if is_installed() and os.path.dirname(python) and os.path.isfile(script):
        return [python, script]
    return [python, "-m", "ichat"]


def as_typed_here(text: str) -> str:
    """Return a text about the pyz's commands with the commands as they are typed here: an installed `ichat`."""
    return _COMMANDS.sub(lambda found: _INSTALLED.get(found[0], "ichat"), text) if is_installed() else text
