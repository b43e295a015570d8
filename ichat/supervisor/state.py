"""The gateway's lasting state from each start to the next, in a directory that no other gateway uses.

`lock` is held while it runs, and `term` has the number of its start. `secret` identifies its own user
(`config/own_secret.py`). `control` is the socket of its control plane; `sockets/` has those of its workers, `relays/`
those of its relays, `logs/` the workers' lines. `workers.json` has known workers, `keys.json` the keys that were made
over the API (`security/key_file.py`), `orders.json` the orders for workers on other machines (`fleet/order_file.py`),
and `learnt.json` the memory of models at their last loads (`memory_learner.py`). A file is replaced as a whole, or not
at all.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat.config.own_secret import LOCK_FILE, SECRET_FILE, configured_directory, directory_for, keep_secret, private
from ichat.config.replicas import Replicas
from ichat.config.schema import ManagedWorkerConfig, ServerSettings
from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.fleet.load_times import SavedLoadTimes, SavedPhaseTimes
from ichat.supervisor.life import Actual, Wanted
from ichat.supervisor.starts import Starts

log = logging.getLogger(__name__)

UNIX_PATH_BYTES_MAX = 107
"""unix(7): the bytes that fit into an address, without the byte that ends it."""
VERSION = 1
WORKERS_FILE = "workers.json"
TERM_FILE = "term"
PRIVATE_FILES = (WORKERS_FILE, "keys.json", "orders.json", "usage.sqlite3", SECRET_FILE)
"""Files of the state directory that are for the gateway's user only."""
_SOCKET_NAME = "12345678"
_ENTRIES = frozenset((
    "lock", "secret", "control", "inner", "takeover", "sockets", "logs", "workers", "keys", "usage", "term", "relays",
    "starts", "learnt", "orders",
))  # fmt: skip
"""The beginnings of file names in a state directory, up to a dot."""


@attrs.frozen
class SavedManagedWorker:
    """A managed worker as the next gateway must know it."""

    worker_id: str
    spec: dict[str, Any]
    """Its table of the configuration."""
    is_launched: bool
    """Whether it was asked for over the API, and must be started again."""
    pid: int = 0
    """Of its first process; 0 while there is none."""
    stamp: str = ""
    """The `process_identity.stamp_of` this process."""
    launch: int = 0
    """The number of its newest launch, carried out or not; 0: it had none."""
    placed: list[int] | None = None
    """The GPUs that the gateway has chosen for its process; None: its table names them, or it has no process."""


def saved_table(spec: ManagedWorkerConfig) -> dict[str, Any]:
    """Return the table of a worker for the file."""
    return {key: value for key, value in attrs.asdict(spec).items() if value is not None}


@attrs.frozen
class SavedStoppedWorker:
    """A worker of the configuration that an operator has stopped."""

    worker_id: str
    spec: dict[str, Any]
    """Its table of the configuration."""
    at: float
    """When, in seconds since 1970."""


@attrs.frozen
class SavedRemoteWorker:
    """A worker that was not started here."""

    heartbeat: dict[str, Any]
    """Without its empty parts, and without arguments that the worker sends again."""
    at: float
    """When its newest heartbeat arrived, or it answered a health check, in seconds since 1970."""
    token: str = ""
    """A digest of the token that it has shown."""


@attrs.frozen
class SetReplicas:
    """The number of copies of a model that an operator has set."""

    configured: Replicas
    """The number in the configuration at that time: with another number there, this counts no more."""
    now: Replicas


@attrs.frozen
class SavedState:
    """Everything that is remembered of workers."""

    version: int = VERSION
    started: list[SavedManagedWorker] = attrs.field(factory=list[SavedManagedWorker])
    heard: list[SavedRemoteWorker] = attrs.field(factory=list[SavedRemoteWorker])
    load_seconds: SavedLoadTimes = attrs.field(factory=SavedLoadTimes)
    """Of the models of managed workers."""
    load_phases: SavedPhaseTimes = attrs.field(factory=SavedPhaseTimes)
    launches: int = 0
    """The number of the newest launch of any worker: each launch has a higher number than those before it."""
    replicas: dict[str, SetReplicas] = attrs.field(factory=dict[str, SetReplicas])
    """The numbers of copies that operators have set, by models."""
    stopped: list[SavedStoppedWorker] = attrs.field(factory=list[SavedStoppedWorker])


@attrs.frozen
class HandedWorkers:
    """The managed workers of another process of this gateway, in place of those in the file."""

    started: Sequence[SavedManagedWorker]
    states: Mapping[str, tuple[Wanted, Actual]]
    """The wanted and the actual state of each, by the workers' ids."""
    restore: Callable[[], None]
    """Called when all of them are known: gives their records everything else."""


@attrs.frozen
class StateDirectory:
    """Where things are, once `open_state` has it."""

    path: str
    log_directory: str
    is_kept: bool = True
    """Whether the next gateway has it too, where that matters: a directory that cannot be made is replaced for now."""

    term: int = 1
    """The number of this start of a gateway with this directory: a later start has a higher number."""
    secret: str = attrs.field(default="", repr=False)
    """The proof that a request is from the gateway's own user (`ichat/config/own_secret.py`)."""

    lock: int = -1
    """The descriptor of the locked file `lock`."""

    starts: Starts = attrs.Factory(lambda self: Starts(self.path, self.term), takes_self=True)
    """This start, and those before: after `open_state` it has begun."""

    @property
    def control_socket(self) -> str:
        """Where the control plane listens."""
        return os.path.join(self.path, "control")

    @property
    def inner_socket(self) -> str:
        """Where relays send the requests that the gateway's own process answers."""
        return os.path.join(self.path, "inner")

    @property
    def keys_file(self) -> str:
        """Where the keys are that were made over the API."""
        return os.path.join(self.path, "keys.json")

    @property
    def orders_file(self) -> str:
        """Where the orders for workers on other machines are."""
        return os.path.join(self.path, "orders.json")

    def socket_of(self, worker_id: str) -> str:
        """Return where a managed worker listens: the same at every start, and short for every id."""
        digest = hashlib.blake2b(worker_id.encode(), digest_size=len(_SOCKET_NAME) // 2).hexdigest()
        return os.path.join(self.path, "sockets", digest)

    def load(self) -> SavedState:
        """Read the state of the previous gateway: nothing if there was none, or if its file is damaged."""
        path = self._known_path()
        known, reason = read_saved(path)
        if reason:
            log.error("%s cannot be read (%s): the gateway knows nothing from before", path, reason)
            with contextlib.suppress(OSError):
                path.rename(path.with_suffix(".unread"))
        return known

    def mark_of(self, worker_id: str) -> str:
        """Return the mark of a worker's processes (`WORKER_VARIABLE`); every mark begins with that of ""."""
        return f"{self.path}:{worker_id}"

    def save(self, known: SavedState) -> None:
        """Write all of it, atomically; it blocks for a short time. Raises OSError."""
        path = self._known_path()
        written = path.with_suffix(".new")
        with open(written, "w", encoding="utf-8", opener=private) as file:  # environments may hold keys
            started = json.dumps([attrs.asdict(one) for one in known.started])
            times = f'"load_seconds": {json.dumps(known.load_seconds)}, "load_phases": {json.dumps(known.load_phases)}'
            replicas = json.dumps({name: attrs.asdict(one) for name, one in known.replicas.items()})
            file.write(f'{{"version": {known.version}, {times}, "launches": {known.launches}, "replicas": {replicas},')
            stopped = json.dumps([attrs.asdict(one) for one in known.stopped])
            file.write(f' "started": {started}, "stopped": {stopped}, "heard": [')
            for number, one in enumerate(known.heard):  # thousands of workers are not a single text
                saved = {"heartbeat": one.heartbeat, "at": one.at, "token": one.token}
                file.write((",\n" if number else "\n") + json.dumps(saved))
            file.write("]}\n")
        written.replace(path)

    def _known_path(self) -> pathlib.Path:
        return pathlib.Path(self.path, WORKERS_FILE)


def read_saved(path: pathlib.Path) -> tuple[SavedState, str]:
    """Return the contents of a file of known workers, and why it cannot be used: "" if it can, or is not there."""
    try:
        known = cattrs.structure(json.loads(path.read_text(encoding="utf-8")), SavedState)
    except FileNotFoundError:
        return SavedState(), ""
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, BaseValidationError) as error:
        return SavedState(), type(error).__name__
    return (
        (known, "") if known.version == VERSION else (SavedState(), f"it is of version {known.version}, not {VERSION}")
    )


def kept_in(saved: SavedState) -> frozenset[str]:
    """Return the workers that are meant to outlive their gateway."""
    return frozenset(one.worker_id for one in saved.started if one.spec.get("on_gateway_exit") == "keep")


class DirectoryTaken(Exit):
    """Another process has the state directory."""


@contextlib.contextmanager
def open_state(settings: ServerSettings, log_directory: str | None) -> Generator[StateDirectory]:
    """Lock the directory for this gateway alone, until the end of the context.

    With port 0 and no directory given it is a temporary directory. Raises Exit 69 if it cannot be used; DirectoryTaken,
    if another gateway has it.
    """
    with contextlib.ExitStack() as stack:
        path = configured_directory(settings) or _usual_path(settings)
        is_kept = path is not None or settings.port == 0  # on any free port, nothing is meant to be
        if path is None:
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="ichat-", ignore_cleanup_errors=True))
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            _check_own(path)
            _make_private(path)
            os.makedirs(os.path.join(path, "sockets"), mode=0o700, exist_ok=True)
            lock = os.open(os.path.join(path, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, b"%d\n" % os.getpid())
            secret, term = keep_secret(path), raise_term(path)
            for name in (*PRIVATE_FILES, "sockets"):
                _make_private(os.path.join(path, name))
        except BlockingIOError as error:
            pid = pathlib.Path(path, LOCK_FILE).read_text(errors="replace").partition("\n")[0]
            raise DirectoryTaken(
                EXIT_UNAVAILABLE,
                f"Another gateway (process {pid}) uses {path}: set server_settings.state_directory to another path.",
            ) from error
        except OSError as error:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"The directory {path} cannot be used: {error.strerror or error}; set"
                " server_settings.state_directory to a directory that can.",
            ) from error
        if len(os.path.join(path, "sockets", _SOCKET_NAME).encode()) > UNIX_PATH_BYTES_MAX:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"{path} is too long for a unix socket; set server_settings.state_directory (or TMPDIR) to a shorter"
                " path.",
            )
        state = StateDirectory(path, log_directory or os.path.join(path, "logs"), is_kept, term, secret, lock)
        state.starts.begin()
        with _noting_end(state.starts):
            yield state


@contextlib.contextmanager
def _noting_end(starts: Starts) -> Generator[None]:
    """Note the ordered end of this process: by its last line, by a sentence, or by Ctrl-C. A crash notes nothing."""
    try:
        yield
    except (Exit, KeyboardInterrupt):
        starts.end()
        raise
    starts.end()


def raise_term(directory: str) -> int:
    """Return the number of this start, and keep it; the caller has the lock. Raises OSError."""
    path = pathlib.Path(directory, TERM_FILE)
    term = 1
    try:
        term = 1 + int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        pass
    except ValueError:
        term = int(time.time())  # higher than any number of starts
        log.error("%s is damaged: the number of this start is %d", path, term)
    written = path.with_suffix(".new")
    written.write_text(f"{term}\n", encoding="ascii")
    written.replace(path)
    return term


@contextlib.contextmanager
def handed_state(directory: str, log_directory: str | None, lock: int) -> Generator[StateDirectory]:
    """Use a directory and its lock that another process of this gateway has handed over; own the descriptor.

    Raises Exit 69 if it cannot be used.
    """
    try:
        try:
            term, secret = raise_term(directory), keep_secret(directory)
        except OSError as error:
            why = error.strerror or error
            raise Exit(EXIT_UNAVAILABLE, f"The directory {directory} cannot be used: {why}.") from error
        logs = log_directory or os.path.join(directory, "logs")
        state = StateDirectory(directory, logs, term=term, secret=secret, lock=lock)
        with _noting_end(state.starts):
            yield state
    finally:
        os.close(lock)


def leave_lock(lock: int) -> None:
    """Leave the lock to the process that has got a copy of this descriptor; the number stays valid here."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(nothing, lock, inheritable=False)
    finally:
        os.close(nothing)


def _usual_path(settings: ServerSettings) -> str | None:
    """Make the directory that a gateway on this port usually has; return None where nothing can be kept."""
    path = directory_for(settings)
    if path is None:
        return None
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be made (%s): nothing is kept for the next start", path, error.strerror or error)
        return None
    return path


def _check_own(path: str) -> None:
    """Raise Exit 69 where others may have put something into the state directory, or it is no gateway's alone."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o002:
        raise _unsafe(path, f"can be written by every user of this machine (mode {mode:o})", "chmod 700 it")
    if mode & 0o077 and (strange := [name for name in os.listdir(path) if name.partition(".")[0] not in _ENTRIES]):
        why = f"is open to other users (mode {mode:o}) and holds other things too ({strange[0]!r})"
        raise _unsafe(path, why, "chmod 700 it")


def _make_private(path: str) -> None:
    """Remove other users' rights on a file or a directory. Raises Exit 69 if it belongs to another."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    if found.st_uid != os.geteuid():
        raise _unsafe(path, f"belongs to another user (number {found.st_uid})", f"chown it to {os.geteuid()}")
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        log.warning("other users could open %s (mode %o): they no longer can", path, mode)
        os.chmod(path, mode & 0o700)


def _unsafe(path: str, why: str, remedy: str) -> Exit:
    return Exit(
        EXIT_UNAVAILABLE,
        f"{path} {why}: name a directory for this gateway alone in server_settings.state_directory, or {remedy} if it"
        " is that already.",
    )
