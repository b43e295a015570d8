"""The lists of engines' flags that are kept on disk, so that mistakes are found without importing an engine.

Each interpreter and engine has a file, beside the state of the user's gateways. The file is valid until the
interpreter or its installed packages change. The engine's version is read from its package's directory, without
running anything.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import ichat
from ichat.config.own_secret import private, state_base
from ichat.engines.flag_list import EngineFlag

KEPT_MAX = 32
"""How many lists are kept; the oldest are removed first."""
FILE_BYTES_MAX = 8 * 1024 * 1024
"""The largest file that is read: a list has about 300 KB."""
_LIBRARIES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "lib64/python3*/site-packages")
_OTHERS_WRITE = 0o022
_unwritten: dict["Interpreter", tuple[list[Any], "KeptFlags"]] = {}
"""The lists of this process that could not be written, at most KEPT_MAX."""


@attrs.frozen
class KeptFlags:
    """The flags of an engine as an interpreter has reported them."""

    flags: Sequence[Mapping[str, Any]]
    """Each as `EngineFlag` has it, hidden flags too."""
    has_help: bool
    """Whether they have the engine's help; a list that a worker has made in passing may be without."""


@attrs.frozen
class Interpreter:
    """An interpreter with an engine: the key of its kept list."""

    python: str
    """Its path, with the directory resolved but not the link of an environment's `python` itself."""
    backend: str
    search_path: str = ""
    """The PYTHONPATH of its workers, without iChat's own sources."""

    @classmethod
    def of(cls, python: str, backend: str, environment: Mapping[str, str]) -> "Interpreter":
        """Return the interpreter that this word means, with the workers' variables."""
        path = python if os.path.dirname(python) else shutil.which(python, path=environment.get("PATH")) or python
        place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        source = os.path.dirname(os.path.dirname(os.path.abspath(ichat.__file__)))
        words = environment.get("PYTHONPATH", "").split(os.pathsep)
        return cls(place, backend, os.pathsep.join(word for word in words if word and os.path.abspath(word) != source))

    def state(self) -> list[Any]:
        """Return a value that changes when the interpreter or its installed packages change."""
        paths = [os.path.realpath(self.python), *map(str, libraries_of(self.python))]
        times: dict[str, int] = {}
        for path in paths:
            with contextlib.suppress(OSError):
                times[path] = os.stat(path).st_mtime_ns
        return [ichat.__version__, attrs.astuple(self), version_of(self.backend, self.python), *times.items()]

    def file(self) -> pathlib.Path:
        """Return where its list is kept."""
        name = hashlib.sha256("\0".join(attrs.astuple(self)).encode()).hexdigest()[:32]
        return pathlib.Path(_directory(), f"{name}.json")


def _directory() -> str:
    return os.path.join(state_base(), "flags")


def read_kept(interpreter: Interpreter) -> KeptFlags | None:
    """Return the kept list of an interpreter as it is now; None: there is none."""
    path, now = interpreter.file(), json.loads(json.dumps(interpreter.state()))
    try:
        status = os.stat(path)
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE or status.st_size > FILE_BYTES_MAX:
            return None
        state, kept = _parsed(str(path), status.st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        if interpreter not in _unwritten:
            return None
        state, kept = _unwritten[interpreter]
    return kept if state == now else None


@functools.lru_cache(maxsize=KEPT_MAX)
def _parsed(path: str, _mtime_ns: int) -> tuple[list[Any], KeptFlags]:
    value = json.loads(pathlib.Path(path).read_bytes())
    return value["state"], KeptFlags([flag for flag in value["flags"] if flag["name"]], bool(value["has_help"]))


def keep(interpreter: Interpreter, kept: KeptFlags, kept_max: int = KEPT_MAX) -> None:
    """Keep a list, and remove the oldest beyond the bound. A list that cannot be written stays in this process."""
    path, state = interpreter.file(), json.loads(json.dumps(interpreter.state()))
    value = {"state": state, "has_help": kept.has_help, "flags": kept.flags}
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(new, "w", opener=private) as file:
            json.dump(value, file)
        os.replace(new, path)
        entries = sorted(path.parent.iterdir(), key=_changed_at)
        for old in entries[:-kept_max]:
            old.unlink(missing_ok=True)
    except OSError:
        if len(_unwritten) >= kept_max:
            _unwritten.clear()
        _unwritten[interpreter] = state, kept


def keep_own(backend: str, list_flags: Callable[[], Sequence[EngineFlag]]) -> None:
    """Keep this interpreter's list where none is kept: the engine is imported anyway."""
    interpreter = Interpreter.of(sys.executable, backend, os.environ)
    if read_kept(interpreter) is None:
        keep(interpreter, KeptFlags([attrs.asdict(flag) for flag in list_flags()], has_help=False))


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


def _changed_at(path: pathlib.Path) -> float:
    try:
        status = path.stat()
    except OSError:
        return 0.0
    return status.st_mtime if stat.S_ISREG(status.st_mode) else 0.0
