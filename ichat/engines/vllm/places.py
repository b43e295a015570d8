"""The places of vLLM's steps, which change from release to release, as their parameters do."""

# vLLM is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ichat.errors import EXIT_UNAVAILABLE, Exit

_PLACES: Mapping[str, Sequence[str]] = {
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
    "validate_api_server_args": ("vllm.entrypoints.launchers.launcher", "vllm.entrypoints.openai.api_server"),
    "cli_env_setup": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
    "build_async_engine_client": (
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.openai.api_server",
    ),
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
    "ToolParserManager": ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"),
    "ReasoningParserManager": ("vllm.reasoning",),
    "MultiprocExecutor": ("vllm.v1.executor.multiproc_executor",),
    "CoreEngineProcManager": ("vllm.v1.engine.utils",),
    "EngineCoreProc": ("vllm.v1.engine.core",),
    "KVEventsConfig": ("vllm.config.kv_events", "vllm.config"),
}
"""The modules in which vLLM has each name, newest first."""


def symbol(name: str) -> Any:
    """Return the object of this name, wherever this version of vLLM has it. Raises Exit 69 if it has none."""
    for place in _PLACES[name]:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name and place.startswith(error.name):
                continue
            raise Exit(EXIT_UNAVAILABLE, f"vLLM under {sys.executable} cannot be used: {error}.") from error
        if hasattr(module, name):
            return getattr(module, name)
    import vllm

    raise Exit(EXIT_UNAVAILABLE, f"vLLM {vllm.__version__} has no {name} where it was looked for: {_PLACES[name]}.")


def call_known(function: Any, known: Mapping[str, Any]) -> Any:
    """Call a function with those of the known arguments that it has parameters for."""
    return function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
