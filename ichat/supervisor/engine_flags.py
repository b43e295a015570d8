"""The flags of the engines here, as their interpreters tell them: each is asked once, by a process of its own.

An interpreter with an engine takes ten seconds and more to answer, since it imports the engine. So what it says is kept
until it, or what is installed for it, changes. The engine's version is read from its package's directory, without
running anything.
"""

import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.engines import BUILT_IN
from ichat.errors import ApiError
from ichat.supervisor.launch import environment_of, program_of, python_of

KNOWN_MAX = 16
"""The number of interpreters whose flags are kept, or why they cannot be had."""
FAILURE_KEPT_S = 30.0
"""How long a failure is told again before the interpreter is asked once more: it takes seconds each time."""
OUTPUT_BYTES_MAX = 16 * 1024 * 1024
"""What is read of an interpreter's output: the end of it, where the flags are."""
_LIBRARIES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages")
_Key = tuple[Any, ...]


@attrs.frozen
class InstalledEngine:
    """An engine that workers here may have."""

    name: str
    """As `backend` of a managed worker names it."""
    python: str
    """The interpreter that runs it, unless a worker has its own."""
    version: str | None
    """The version that is installed for this interpreter; None: not known."""


def engines_of(config: Config) -> list[InstalledEngine]:
    """Return the engines that are built in or configured. It reads directories, so it belongs in a thread."""
    backends = [*BUILT_IN, *config.engines, *(worker.backend for worker in config.managed_workers)]
    found: list[InstalledEngine] = []
    for name in dict.fromkeys(backends):
        python = python_of(config, _placeholder(name))
        found.append(InstalledEngine(name, python, version_of(name, python)))
    return found


class EngineFlags:
    """Asks interpreters, one at a time, and keeps what they say."""

    def __init__(self) -> None:
        self._known: dict[_Key, Sequence[Any]] = {}
        self._failed: dict[_Key, tuple[float, str]] = {}
        """When interpreters were asked in vain, and what is said of it."""
        self._lock = trio.Lock()

    def __repr__(self) -> str:
        return f"<EngineFlags of {len(self._known)} interpreters>"

    async def ask(self, config: Config, backend: str) -> tuple[str, Sequence[Any]]:
        """Return an engine's interpreter, and its flags as `EngineFlag` has them.

        Raises ApiError: 404 for an engine that is not known here, 409 for one that does not tell its flags.
        """
        known = {one.name: one.python for one in await trio.to_thread.run_sync(engines_of, config)}
        if backend not in known:
            raise ApiError(404, "not_found", f"There is no engine {backend}. Engines here: {', '.join(known)}.")
        python, within_s = known[backend], config.timeouts.engine_flags_s
        too_slow = (
            f"The interpreter {python} did not tell the flags of {backend} within {within_s:g} s"
            " (timeouts.engine_flags_s)."
        )
        key: _Key | None = None
        with trio.move_on_after(within_s):
            async with self._lock:
                key = await trio.to_thread.run_sync(_key_of, python, backend)
                if key not in self._known:
                    self._check_failed(key)
                    try:
                        flags = await _ask(config, python, backend)
                    except ApiError as error:
                        self._note_failure(key, error.message)
                        raise
                    _make_room(self._known)
                    self._known[key] = flags
                return python, self._known[key]
        if key is not None:
            self._note_failure(key, too_slow)
        raise _unusable(too_slow)

    def _check_failed(self, key: _Key) -> None:
        """Raise ApiError where this interpreter, as it is, was asked in vain just now."""
        failed_at, sentence = self._failed.get(key, (-math.inf, ""))
        if trio.current_time() < failed_at + FAILURE_KEPT_S:
            raise _unusable(sentence)

    def _note_failure(self, key: _Key, sentence: str) -> None:
        _make_room(self._failed)
        self._failed[key] = trio.current_time(), sentence


async def _ask(config: Config, python: str, backend: str) -> Sequence[Any]:
    """Run a worker that only lists its engine's flags, and leave nothing of it behind."""
    command = [*program_of(python), "worker", f"--backend={backend}", "--list-flags"]
    watched, ours = os.pipe()
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            environment = environment_of(config, _placeholder(backend), "", watched)
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


def _make_room(kept: dict[_Key, Any]) -> None:
    if len(kept) >= KNOWN_MAX:
        del kept[next(iter(kept))]


def _kill_session(pid: int) -> None:
    """Kill a process and all that it has started; they are one process group."""
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


def libraries_of(python: str) -> list[pathlib.Path]:
    """Return the directories in which packages of an interpreter are."""
    path = python if os.path.dirname(python) else shutil.which(python) or python
    prefix = pathlib.Path(path).parent.parent
    return [found for pattern in _LIBRARIES for found in sorted(prefix.glob(pattern))]


def version_of(backend: str, python: str) -> str | None:
    """Return the version of an engine's package; that of vLLM for processors has a name of its own."""
    pattern = re.compile(rf"{re.escape(backend.replace('-', '_'))}(?:_cpu)?-([^-]+)\.dist-info")
    try:
        for library in libraries_of(python):
            for entry in os.listdir(library):
                if found := pattern.fullmatch(entry):
                    return found[1]
    except OSError:
        pass
    return None


def _key_of(python: str, backend: str) -> _Key:
    """Return what changes when an interpreter, or what is installed for it, changes."""
    times: Mapping[str, int] = {}
    try:
        paths = [os.path.realpath(python), *map(str, libraries_of(python))]
        times = {path: os.stat(path).st_mtime_ns for path in paths if os.path.exists(path)}
    except OSError:
        pass
    return (backend, python, *times.items())
