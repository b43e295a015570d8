"""The flags of the engines here, as their interpreters report them: each is asked once, by a process of its own.

An interpreter with an engine needs ten seconds and more to answer, since it imports the engine. So its answer is kept
on disk (`engines/kept_flags.py`) until the interpreter, or a package that is installed for it, changes.
"""

import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, cast

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.engines.engine import BUILT_IN
from ichat.engines.kept_flags import Interpreter, KeptFlags, keep, read_kept, version_of
from ichat.errors import ApiError
from ichat.program import own_command
from ichat.supervisor.launch import environment_of, python_of

FAILED_MAX = 16
"""The most interpreters with a kept reason why their flags cannot be had."""
FAILURE_KEPT_S = 30.0
"""How long a failure is repeated before the interpreter is asked once more: asking needs seconds each time."""
OUTPUT_BYTES_MAX = 16 * 1024 * 1024
"""The most that is read of an interpreter's output: the end of it, with the flags."""
CHECK_S = 30.0
"""How long a check of arguments waits for an interpreter that has not reported its flags; then they go unchecked."""
_HIDDEN = ("off_names", "needs_value", "is_hidden")
"""The keys of a flag in a list that are for checks only."""


@attrs.frozen
class InstalledEngine:
    """An engine that workers here may have."""

    name: str
    """As `backend` of a managed worker names it."""
    python: str
    """The interpreter that runs it, unless a worker has its own."""
    version: str | None
    """The version that is installed for this interpreter; None: not known, or none is."""


def engines_of(config: Config) -> list[InstalledEngine]:
    """Return the engines that are built in or configured. It reads directories, so it belongs in a thread."""
    backends = [*BUILT_IN, *config.engines, *(worker.backend for worker in config.managed_workers)]
    found: list[InstalledEngine] = []
    for name in dict.fromkeys(backends):
        python = python_of(config, _placeholder(name))
        found.append(InstalledEngine(name, python, version_of(name, python)))
    return found


class EngineFlags:
    """Asks interpreters, singly, and has their answers kept."""

    def __init__(self, failure_kept_s: float = FAILURE_KEPT_S) -> None:
        self._failure_kept_s = failure_kept_s
        self._failed: dict[str, tuple[float, str]] = {}
        """When interpreters, as they are, were asked in vain, and the reason."""
        self._lock = trio.Lock()

    def __repr__(self) -> str:
        return f"<EngineFlags, {len(self._failed)} interpreters failed>"

    async def ask(self, config: Config, backend: str) -> tuple[str, Sequence[Any]]:
        """Return an engine's interpreter, and the flags that a form shows, as `EngineFlag` has them.

        Raises ApiError: 404 for an engine that is not known here, 409 for an engine that does not report its flags.
        """
        known = {one.name: one.python for one in await trio.to_thread.run_sync(engines_of, config)}
        if backend not in known:
            raise ApiError(404, "not_found", f"There is no engine {backend}. Engines here: {', '.join(known)}.")
        kept = await self._kept(config, _placeholder(backend), config.timeouts.engine_flags_s, needs_help=True)
        shown = [flag for flag in kept.flags if not flag.get("is_hidden")]
        return known[backend], [{name: value for name, value in flag.items() if name not in _HIDDEN} for flag in shown]

    async def prepare(self, config: Config, worker: ManagedWorkerConfig, within_s: float = CHECK_S) -> str:
        """Have the flags of a worker's engine kept, if it has arguments to check; return why that failed, or ""."""
        if not worker.backend_args:
            return ""
        try:
            await self._kept(config, worker, within_s, needs_help=False)
        except ApiError as error:
            return error.message
        return ""

    async def _kept(
        self, config: Config, worker: ManagedWorkerConfig, within_s: float, *, needs_help: bool
    ) -> KeptFlags:
        """Return the kept list of a worker's engine; its interpreter is asked where there is none. Raises ApiError."""
        interpreter, backend = interpreter_of(config, worker), worker.backend
        bound = " (timeouts.engine_flags_s)" if within_s == config.timeouts.engine_flags_s else ""
        too_slow = (
            f"The interpreter {python_of(config, worker)} did not report the flags of {backend} within"
            f" {within_s:g} s{bound}."
        )
        state = ""
        with trio.move_on_after(within_s):
            async with self._lock:
                kept = await trio.to_thread.run_sync(read_kept, interpreter)
                if kept is not None and (kept.has_help or not needs_help):
                    return kept
                state = json.dumps(await trio.to_thread.run_sync(interpreter.state))
                self._check_failed(state)
                try:
                    kept = KeptFlags(await _ask(config, worker), has_help=True)
                except ApiError as error:
                    self._note_failure(state, error.message)
                    raise
                await trio.to_thread.run_sync(keep, interpreter, kept)
                return kept
        if state:
            self._note_failure(state, too_slow)
        raise _unusable(too_slow)

    def _check_failed(self, state: str) -> None:
        """Raise ApiError where this interpreter, as it is, was asked in vain just now."""
        failed_at, sentence = self._failed.get(state, (-math.inf, ""))
        if trio.current_time() < failed_at + self._failure_kept_s:
            raise _unusable(sentence)

    def _note_failure(self, state: str, sentence: str) -> None:
        if len(self._failed) >= FAILED_MAX:
            del self._failed[next(iter(self._failed))]
        self._failed[state] = trio.current_time(), sentence


def interpreter_of(config: Config, worker: ManagedWorkerConfig) -> Interpreter:
    """Return the interpreter of a worker, under which its engine's list is kept."""
    return Interpreter.of(python_of(config, worker), worker.backend, environment_of(config, worker, ""))


async def _ask(config: Config, worker: ManagedWorkerConfig) -> Sequence[Any]:
    """Run a worker that only lists its engine's flags, and leave nothing of it behind."""
    python, backend = python_of(config, worker), worker.backend
    command = [*own_command(python), "worker", f"--backend={backend}", "--list-flags"]
    watched, ours = os.pipe()
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            environment = environment_of(config, worker, "", watched)
            try:
                process = await trio.lowlevel.open_process(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                    start_new_session=True, pass_fds=[watched],
                )  # fmt: skip
            except (OSError, ValueError) as error:
                raise _unusable(f"The interpreter {python} cannot be run: {error}.") from error
            try:
                code = await process.wait()
            finally:
                with trio.CancelScope(shield=True):
                    _kill_session(process.pid)
                    await process.wait()
            return _read_flags(python, backend, code, _end_of(output), _end_of(errors))
    finally:
        os.close(watched)
        os.close(ours)


def _kill_session(pid: int) -> None:
    """Kill a process and all that it has started; they are a process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end_of(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES_MAX))
    return cast("str", file.read().decode(errors="replace"))


def _read_flags(python: str, backend: str, code: int, output: str, errors: str) -> Sequence[Any]:
    lines = [line for line in output.splitlines() if line.startswith('{"flags": ')]
    if code == 0 and lines:
        try:
            return json.loads(lines[-1])["flags"]
        except (ValueError, KeyError):
            pass
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    why = said[-1][:500] if said else "it writes nothing"
    raise _unusable(f"The flags of {backend} cannot be had from {python} (exit code {code}): {why}")


def _unusable(sentence: str) -> ApiError:
    return ApiError(409, "engine_unusable", sentence)


def _placeholder(backend: str) -> ManagedWorkerConfig:
    return ManagedWorkerConfig(model_name=backend, model_path="", backend=backend)
