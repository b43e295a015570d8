"""The command of a server program: which engine it starts, with which model and arguments.

The words of a command that starts vLLM or SGLang become a managed worker. iChat starts no other program.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ichat.cli.launch import engine_arguments

_MODULES = {"vllm.entrypoints.openai.api_server": "vllm", "sglang.launch_server": "sglang"}
_IMAGES = {"vllm/vllm-openai": "vllm"}
"""Images with the engine's server as their entry point, so that its arguments follow the image."""
_IMAGE = re.compile(rf"(?:[\w.:/-]+/)?({'|'.join(_IMAGES)})(?:[:@]\S+)?")
_CONTAINERS = frozenset(("docker", "podman", "nerdctl"))
_SHELLS = frozenset(("sh", "bash", "zsh", "dash"))
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization",
}  # fmt: skip
_MODEL = ("model", "model_path")
_OURS = frozenset(("host", "port", "uds", "served_model_name", "api_key", "uvicorn_log_level", *_MODEL))
"""Flags of an engine's own server, which a worker replaces."""


class EngineCommand(NamedTuple):
    """A command that starts an engine."""

    backend: str
    model: str
    arguments: dict[str, Any]
    is_contained: bool
    """Whether it starts the engine in a container, where paths are others."""


def without_comments(command: str) -> str:
    """Return a command of several lines without those that are comments."""
    return "\n".join(line for line in command.splitlines() if not line.lstrip().startswith("#"))


def words_of(command: str) -> list[str]:
    """Return the words of a command of several lines. Raises ValueError."""
    words = shlex.split(" ".join(line.rstrip().removesuffix("\\") for line in command.splitlines()))
    if len(words) == 3 and os.path.basename(words[0]) in _SHELLS and words[1] == "-c":
        return words_of(words[2].removeprefix("exec "))
    return words


def engine_command(words: Sequence[str]) -> EngineCommand | None:
    """Return the engine that a command starts; None: it starts another program.

    Raises Exit 64 if its arguments cannot be read, and ValueError if it names no model.
    """
    starts = (_start(words, index) for index in range(len(words)))
    found = next((start for start in starts if start is not None), None)
    if found is None:
        return None
    backend, rest = found
    positional = rest[:1] if rest and not rest[0].startswith("-") else []
    arguments = dict(engine_arguments([_long(word) for word in rest[len(positional) :]]))
    model = _model_of(arguments, positional)
    kept = {key: value for key, value in arguments.items() if key not in _OURS}
    return EngineCommand(backend, model, kept, os.path.basename(words[0]) in _CONTAINERS)


def _model_of(arguments: Mapping[str, Any], positional: Sequence[str]) -> str:
    named = [*(arguments[key] for key in _MODEL if key in arguments), *positional]
    model = next((value for value in named if isinstance(value, str)), None)
    if model is None:
        raise ValueError("it names no model")
    return model


def _long(word: str) -> str:
    name, equals, value = word.partition("=")
    return _SHORT.get(name, name) + equals + value


def _start(words: Sequence[str], index: int) -> tuple[str, list[str]] | None:
    """Return the engine that begins at a word, and the words after that."""
    first, following = words[index], words[index + 1] if index + 1 < len(words) else ""
    if first == "-m" and following in _MODULES:
        return _MODULES[following], list(words[index + 2 :])
    if os.path.basename(first) in ("vllm", "sglang") and following == "serve":
        return os.path.basename(first), list(words[index + 2 :])
    image = _IMAGE.fullmatch(first)
    return None if image is None else (_IMAGES[image[1]], list(words[index + 1 :]))
