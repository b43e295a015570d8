"""Checks of an engine's arguments, and facts about it, that are the same for every built-in engine."""

# PyTorch is not there where types are checked.
# pyright: reportMissingImports=false

import contextlib
import importlib.util
import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from platform import python_version
from typing import Any

import ichat
from ichat.engines.flags import refuse_engine_keys
from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.program import is_installed
from ichat.protocol.json_text import parsed
from ichat.security.redact import masked


def check_installed(engine: str, package: str) -> None:
    """Look for an engine's package without importing it. Raises Exit 69 with what to type."""
    if importlib.util.find_spec(package) is None:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"{engine} is not installed for {sys.executable}: install it there (`uv pip install --python"
            f" {shlex.quote(sys.executable)} {package}`)."
            if is_installed()
            else f"{engine} is not installed for {sys.executable}: run the worker with an interpreter that"
            f" has it (PYTHON ichat.pyz worker …), or make one with `./build engine {package}`.",
        )


def unusable(engine: str, error: Exception) -> Exit:
    """Return Exit 69 for an engine that cannot be imported."""
    return Exit(EXIT_UNAVAILABLE, f"{engine} under {sys.executable} cannot be imported: {error}.")


@contextlib.contextmanager
def refused_as(usage_error: Callable[[str], Exit], *kinds: type[Exception]) -> Generator[None]:
    """Raise `usage_error` of the words of an exception of these kinds."""
    try:
        yield
    except kinds as error:
        raise usage_error(message_of(error)) from error


@contextlib.contextmanager
def parsing() -> Generator[None]:
    """Raise Exit if a parser ends the process, as it does after `--help`."""
    try:
        yield
    except SystemExit as exit_:
        raise Exit(int(exit_.code or 0), "") from exit_


def message_of(error: Exception) -> str:
    """Return an error's message; `str` of a KeyError would show it as a literal."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__


def check_given(
    engine: str, args: Any, model: str, only: Mapping[str, Sequence[object]], usage_error: Callable[[str], Exit]
) -> None:
    """Raise `usage_error` for a model that is not there, a key of the engine's, or a flag of the engine's own server.

    `only` has the values that flags of the server may have if they are set, by their names.
    """
    for name, allowed in only.items():
        if getattr(args, name, None) not in (None, *allowed):
            flag = f"--{name.replace('_', '-')}"
            raise usage_error(f"{flag} concerns {engine}'s own HTTP server, which an iChat worker replaces")
    refuse_engine_keys(args, usage_error)
    if model.startswith(("/", "./", "../", "~")) and not pathlib.Path(model).expanduser().exists():
        raise usage_error(f"the model {model} does not exist")


def shown_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as values that JSON can hold, secrets masked."""
    return parsed(json.dumps(masked(args), default=str))


def versions_with(engine: str, version: str) -> dict[str, str]:
    """Return the versions of an engine and of everything below it."""
    import torch

    return {"ichat": ichat.__version__, engine: version, "torch": torch.__version__, "python": python_version()}
