"""The places of vLLM's steps, which change from release to release, as their parameters do."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ichat.config.package_data import read_toml
from ichat.errors import EXIT_UNAVAILABLE, Exit


@functools.cache
def _places() -> Mapping[str, Sequence[str]]:
    """Return the modules in which vLLM has each name, newest first."""
    return read_toml("ichat.engines.vllm", "names.toml")["places"]


def symbol(name: str) -> Any:
    """Return the object of this name, wherever this version of vLLM has it. Raises Exit 69 if it has none."""
    places = _places()[name]
    for place in places:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and place.startswith(error.name):
                continue
            raise Exit(EXIT_UNAVAILABLE, f"vLLM under {sys.executable} cannot be used: {error}.") from error
        if hasattr(module, name):
            return getattr(module, name)
    import vllm

    raise Exit(EXIT_UNAVAILABLE, f"vLLM {vllm.__version__} has no {name} where it was looked for: {places}.")


def call_known(function: Any, known: Mapping[str, Any]) -> Any:
    """Call a function with those of the known arguments that it has parameters for."""
    return function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
