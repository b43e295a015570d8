"""The flags that SGLang needs for an encoder (BERT and similar models), read from the model's own files.

By default SGLang divides an encoder's prompts and uses its prefix cache, which makes wrong vectors. It always uses
the first token's vector. A rerank request to a model that is no cross-encoder ends it. It returns a cross-encoder's
raw score, which vLLM maps to 0..1.
"""

# huggingface_hub is installed with SGLang and is not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.engines.flags import FlagOutcome
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit

_KIN = ("Bert", "Roberta", "XLMRoberta", "Contriever")
_WHOLE = (
    ("--disable-radix-cache", [], "an encoder reads its whole text at once, so no beginning of it can be kept"),
    ("--chunked-prefill-size", ["-1"], "an encoder reads its whole text at once"),
)


@attrs.frozen
class Encoder:
    """How SGLang must serve an encoder."""

    flag_outcomes: Sequence[FlagOutcome]
    """The arguments that are missing."""
    is_cross_encoder: bool
    wants_sigmoid: bool
    """Whether its scores must be mapped to 0..1."""


def inspect_encoder(model: str, revision: str | None, given: Sequence[str]) -> Encoder | None:
    """Return how to serve an encoder; None for other models. `given` are the flags that SGLang gets already.

    Raises Exit 64 for an encoder that would give wrong vectors.
    """
    config = _read(model, "config.json", revision)
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if not architecture.startswith(_KIN):
        return None
    is_cross_encoder = architecture.endswith("ForSequenceClassification")
    pooling = {} if is_cross_encoder else _read(model, "1_Pooling/config.json", revision)
    modes = [key.removeprefix("pooling_mode_") for key, on in pooling.items() if on is True and "pooling_mode" in key]
    if modes and modes != ["cls_token"]:
        raise Exit(
            EXIT_USAGE,
            f"SGLang refuses these arguments: it would take the first token's vector, where {model} wants"
            f" {' and '.join(modes)}, and so give wrong vectors: serve this model with --backend vllm",
        )
    outcomes = [
        FlagOutcome([], [flag, *values], f"{why}: SGLang would answer wrongly without it")
        for flag, values, why in _WHOLE
        if flag not in given
    ]
    return Encoder(outcomes, is_cross_encoder, is_cross_encoder and _wants_sigmoid(config))


def _wants_sigmoid(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM would apply a sigmoid to the score; SGLang never does."""
    labels = len(cast("dict[str, str]", config.get("id2label", {"0": ""})))
    if config.get("sbert_ce_default_activation_function") or labels != 1:
        return False
    name = (config.get("sentence_transformers") or {}).get("activation_fn")
    return name.endswith(".Sigmoid") if name else config.get("problem_type") != "regression"


def _find(model: str, name: str, revision: str | None) -> pathlib.Path | None:
    if os.path.exists(model):
        return pathlib.Path(model) / name if os.path.isdir(model) else None
    from huggingface_hub import errors, hf_hub_download

    try:
        return pathlib.Path(str(hf_hub_download(model, name, revision=revision)))
    except errors.LocalEntryNotFoundError as error:  # a subclass of the next class: the hub cannot be asked
        if name == "config.json":
            return None  # SGLang has read it already, so it has the model from elsewhere
        raise OSError(" ".join(str(error).split())[:300]) from error
    except (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.HFValidationError):
        return None


def _read(model: str, name: str, revision: str | None) -> dict[str, Any]:
    """Return the content of a model's JSON file, empty if there is none; the model is a directory or a hub's name.

    Raises Exit 69 if the hub cannot be asked.
    """
    try:
        path = _find(model, name, revision)
        found: object = json.loads(path.read_text()) if path else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Exit(EXIT_UNAVAILABLE, f"{name} of the model {model} cannot be read: {error}") from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
