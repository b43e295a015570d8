"""Mistakes in a worker's command line, reported before the import of the engine. That lasts ten seconds and more.

The engine's flags are known once a worker of this interpreter, the gateway or the doctor has asked for them. An
unknown flag is no mistake until then: the engine itself reads its arguments after that.
"""

import os
import sys
from collections.abc import Sequence

from ichat.config.schema import EngineValue, ManagedWorkerConfig
from ichat.engines.flag_check import engine_name, refusals_of
from ichat.engines.flags import CommandLine, refusal_of_variable, split_flags
from ichat.engines.kept_flags import Interpreter, read_kept
from ichat.engines.translation import refusal_of
from ichat.preflight.facts import ENGINES, Facts, read_model
from ichat.preflight.obstacles import problems_of_model

_MODEL = ("--model", "--model-path")
_OTHER = ("--config", "-h", "--help")
"""Flags that may say the model, or that want none."""


def check_command_line(backend: str, argv: Sequence[str]) -> None:
    """Raise Exit 64 with every mistake in an engine's arguments that shows without the engine."""
    strays, given = split_flags(argv)
    line = CommandLine({}, [flag for _, flag in given])
    if line.has(*_OTHER) or strays:
        return
    mistakes = list(_mistakes_of_model(backend, line)) if backend in ENGINES else []
    kept = read_kept(Interpreter.of(sys.executable, backend, os.environ))
    if kept is not None:
        mistakes += refusals_of(backend, argv, kept.flags)
    if backend in ENGINES and (refusal := refusal_of_variable(os.environ)):
        mistakes.append(refusal)
    if mistakes:
        raise refusal_of(engine_name(backend), mistakes)


def _mistakes_of_model(backend: str, line: CommandLine) -> Sequence[str]:
    path = line.value(*_MODEL)
    if path is None:
        return [] if line.has(*_MODEL) else ["--model is missing: give a directory, or a name on the model hub"]
    arguments: dict[str, EngineValue] = {
        flag.name.removeprefix("--").replace("-", "_"): flag.values[0] if flag.values else True for flag in line.flags
    }
    worker = ManagedWorkerConfig(model_name="m", model_path=path, backend=backend, backend_args=arguments)
    state, hint = read_model(worker)
    facts = Facts(model=state, model_hint=hint, directory=os.getcwd())
    return [sentence.rstrip(".") for sentence in problems_of_model(path, facts, "--model")]
