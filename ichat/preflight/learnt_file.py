"""The file of learnt figures in a gateway's state directory, and the figures for a worker before its start.

The gateway alone writes it (`supervisor/memory_learner.py`); commands read it, whether or not the gateway runs.
"""

import json
import pathlib
from collections.abc import Sequence

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat.config.engine_args import arguments_of
from ichat.config.schema import ManagedWorkerConfig
from ichat.hardware.gpus import Gpu
from ichat.placement.learnt import LearntMemories, LearntMemory, key_of, version_in
from ichat.preflight.facts import Facts
from ichat.preflight.model_memory import MemoryNeed

LEARNT_FILE = "learnt.json"
VERSION = 1


@attrs.frozen
class SavedLearnt:
    """The contents of the file."""

    version: int = VERSION
    loads: list[LearntMemory] = attrs.field(factory=list[LearntMemory])


def read_learnt(directory: str | None) -> tuple[LearntMemories, str]:
    """Return the figures in a state directory, and in a sentence why they cannot be read; "" if they can.

    Without a directory or a file, there are no figures.
    """
    found = LearntMemories()
    if directory is None:
        return found, ""
    path = pathlib.Path(directory, LEARNT_FILE)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        saved = cattrs.structure(value if isinstance(value, dict) else None, SavedLearnt)
    except (FileNotFoundError, NotADirectoryError):
        return found, ""
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, BaseValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        return found, f"{path} cannot be read ({why}): the memory of earlier loads is not known."
    if saved.version != VERSION:
        return found, f"{path} is of version {saved.version}, not {VERSION}: the memory of earlier loads is not known."
    found.restore(saved.loads)
    return found, ""


def write_learnt(directory: str, memories: LearntMemories) -> None:
    """Write the file as a whole, or not at all. Raises OSError."""
    path = pathlib.Path(directory, LEARNT_FILE)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(attrs.asdict(SavedLearnt(loads=list(memories)))) + "\n", encoding="utf-8")
    written.replace(path)


def with_learnt(facts: Facts, worker: ManagedWorkerConfig, memories: LearntMemories) -> Facts:
    """Return a worker's facts with the memory of earlier loads with its engine's version, on each kind of GPU."""
    if facts.version is None or not facts.gpus:
        return facts
    weights = facts.need.weights_bytes if facts.need is not None else None
    arguments, version, found = arguments_of(worker), version_in(facts.version), list[LearntMemory]()
    for kind in {kind_of(gpu) for gpu in facts.gpus}:
        learnt = memories.find(key_of(facts.real_path, worker.backend, arguments, weights, kind), version)
        found += [learnt] if learnt is not None else []
    return attrs.evolve(facts, learnt=found)


def kind_of(gpu: Gpu) -> tuple[str, int]:
    """Return the kind of a GPU, as learnt figures have it."""
    return gpu.name, gpu.memory_total_bytes or 0


def need_on(gpu: Gpu, need: MemoryNeed | None, learnt: Sequence[LearntMemory]) -> MemoryNeed | None:
    """Return the need on a GPU, learnt where it can be; None: it is not known."""
    found = next((one.need_bytes for one in learnt if (one.key.gpu, one.key.gpu_bytes) == kind_of(gpu)), None)
    if found is None:
        return need
    return attrs.evolve(need if need is not None else MemoryNeed(0, 0, 0), learnt_bytes=found)
