"""`ichat.pyz sweep`: ends the processes that a gateway has left, its relays and workers, if no gateway will need them.

A process is signalled only after a check that it belongs to the state directory, and by a descriptor (pidfd) that was
open during the check: no other process with its number is hit.
"""

import argparse
import contextlib
import fcntl
import itertools
import os
import pathlib
import select
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ichat.cli.gateway_address import USUAL_FILE
from ichat.config import load as configuration
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import LOCK_FILE, directory_for
from ichat.config.process_marks import RELAY_VARIABLE, WORKER_VARIABLE, mark_of, names_of, relays_of
from ichat.config.schema import ServerSettings, Timeouts
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.supervisor.orphans import marked_by, process_identity
from ichat.supervisor.processes import session_members
from ichat.supervisor.state import WORKERS_FILE, SavedState, kept_in, read_saved

RESULT_VARIABLE = "SERVICE_RESULT"
"""systemd.exec(5): how a service has ended, for its ExecStopPost."""
ORDERED = ("success", "timeout")
"""The results of an ordered stop. After all others the service starts again, and its relays wait for that."""
KILLED_S = 5.0
"""How long a killed process may need to disappear, in seconds."""
ROUNDS_MAX = 3
"""How often it looks for processes that were started meanwhile."""
EXIT_LEFT = 1


class _Left(NamedTuple):
    """A process that a gateway has left."""

    pid: int
    name: str
    is_first: bool
    """Whether it ends the others of its name at SIGTERM."""
    is_still: Callable[[], bool]
    """Whether the process with this number belongs to the state directory now."""


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz sweep",
        description="End the relays and workers that a gateway has left, if it has ended and will not start again.",
        allow_abbrev=False,
    )
    place = usage.add_mutually_exclusive_group()
    place.add_argument("directory", metavar="DIR", nargs="?", help="the gateway's state directory")
    place.add_argument("--config", "-c", metavar="FILE", help=f"its configuration; else {USUAL_FILE} here")
    usage.add_argument("--all", action="store_true", help='also end workers with on_gateway_exit = "keep"')
    usage.add_argument(
        "--wait-s", metavar="S", type=_seconds, help="how many seconds they have for their end; else timeouts.stop_s"
    )
    return usage


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be from 0 to 3600")
    return value


def run(argv: Sequence[str]) -> int:
    """End the processes of a state directory, and print each; return 1 if any is left. Raises Exit 64 or 69."""
    args = parser().parse_args(list(argv))
    directory, stop_s = _place_of(args)
    result = os.environ.get(RESULT_VARIABLE, "")
    if result and result not in ORDERED:
        print(f"The service has ended with the result {result}: its processes wait for the next start.")
        return 0
    with _locked(directory):
        return _sweep(directory, stop_s if args.wait_s is None else args.wait_s, ends_kept=args.all)


def _place_of(args: argparse.Namespace) -> tuple[str, float]:
    """Return the state directory, and the time that workers have for their end. Raises Exit 64."""
    if args.directory is not None:
        return os.path.abspath(args.directory), Timeouts().stop_s
    path = args.config or USUAL_FILE
    if args.config is None and not os.path.isfile(USUAL_FILE):
        raise Exit(EXIT_USAGE, "ichat.pyz sweep: name the gateway's state directory, or its configuration (-c FILE).")
    stop_s, settings = Timeouts().stop_s, ServerSettings()
    try:
        config = configuration.load(pathlib.Path(path))
        stop_s, settings = config.timeouts.stop_s, config.server_settings
    except Exit:
        refused = configuration.settings_of_refused(pathlib.Path(path))
        if refused is None:
            raise
        settings = refused
    directory = directory_for(settings)
    if directory is None:
        raise Exit(EXIT_USAGE, f"{path} has port 0 and no state_directory: name the gateway's state directory.")
    return os.path.abspath(directory), stop_s


@contextlib.contextmanager
def _locked(directory: str) -> Generator[None]:
    """Keep gateways from starting with a state directory. Raises Exit 69 if that is impossible."""
    try:
        owner = os.stat(directory).st_uid
        if owner != os.geteuid():
            why = f"{directory} belongs to another user (number {owner}): run this as that user."
            raise Exit(EXIT_UNAVAILABLE, why)
        lock = os.open(os.path.join(directory, LOCK_FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        what = "There is no directory" if not os.path.lexists(directory) else "No gateway has ever used"
        raise Exit(EXIT_UNAVAILABLE, f"{what} {directory}: name a gateway's state directory.") from error
    except OSError as error:
        raise Exit(EXIT_UNAVAILABLE, f"{directory} cannot be used: {error.strerror or error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        pid = os.pread(lock, 32, 0).decode(errors="replace").partition("\n")[0]
        raise Exit(
            EXIT_UNAVAILABLE,
            f"A gateway (process {pid}) uses {directory}: stop it, and it ends its processes itself.",
        ) from error
    finally:
        os.close(lock)


def _sweep(directory: str, wait_s: float, *, ends_kept: bool) -> int:
    saved = _saved_of(directory, may_be_damaged=ends_kept)
    kept = frozenset[str]() if ends_kept else kept_in(saved)
    first = left = list(_find(directory, saved, kept))
    for _ in range(ROUNDS_MAX if first else 0):
        _end(left, wait_s)
        left = list(_find(directory, saved, kept))
    staying = {one.name for one in _find(directory, saved, frozenset())} & kept
    for name in sorted(staying):
        print(f'worker {name} stays (on_gateway_exit = "keep"): --all ends it, too')
    if left:
        print(f"these processes cannot be ended: {' '.join(str(one.pid) for one in left)}")
    elif not first and not staying:
        print(f"No process is left of the gateway of {directory}.")
    return EXIT_LEFT if left else 0


def _saved_of(directory: str, *, may_be_damaged: bool) -> SavedState:
    """Return the workers that the gateway has written down. Raises Exit 69 if that is damaged, and matters."""
    saved, why = read_saved(pathlib.Path(directory, WORKERS_FILE))
    if why and not may_be_damaged:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"{directory}/{WORKERS_FILE} cannot be used ({why}), and does not say which workers stay: --all ends all.",
        )
    return saved


def _find(directory: str, saved: SavedState, kept: frozenset[str]) -> Iterator[_Left]:
    """Yield the processes that belong to a state directory, but none of kept workers."""
    seen = {os.getpid()}
    for one in itertools.chain(_relays_in(directory), _marked_in(directory), _saved_in(saved)):
        if one.pid not in seen and one.name not in kept:
            seen.add(one.pid)
            yield one


def _relays_in(directory: str) -> Iterator[_Left]:
    """Yield the relays, which have the name ""."""
    names = names_of(directory)
    for pid in relays_of(directory):
        yield _Left(pid, "", is_first=True, is_still=partial(_has_mark, pid, RELAY_VARIABLE, names))


def _marked_in(directory: str) -> Iterator[_Left]:
    """Yield the processes with the mark of a worker."""
    for name in names_of(directory):
        for process, mark in marked_by(f"{name}:"):
            is_still = partial(_has_mark, process.pid, WORKER_VARIABLE, (mark,))
            yield _Left(process.pid, mark.removeprefix(f"{name}:"), _is_leader(process.pid), is_still)


def _saved_in(saved: SavedState) -> Iterator[_Left]:
    """Yield the sessions of the workers that the gateway knew: a program may have overwritten its environment."""
    for one in saved.started:
        if one.pid and one.stamp and process_identity(one.pid) == one.stamp:
            for process in session_members(one.pid):
                is_still = partial(_is_in_session, process.pid, one.pid, one.stamp)
                yield _Left(process.pid, one.worker_id, process.pid == one.pid, is_still)


def _has_mark(pid: int, variable: str, marks: Sequence[str]) -> bool:
    """Return whether a process of this user has one of these marks."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid() and mark_of(pid, variable) in marks
    return False


def _is_leader(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def _is_in_session(pid: int, first: int, stamp: str) -> bool:
    """Return whether a process is in the session of a worker's first process, and the latter is the saved process."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) == first and process_identity(first) == stamp
    return False


def _end(left: Sequence[_Left], wait_s: float) -> None:
    """End these processes: SIGTERM for the first of each worker, which ends the others; SIGKILL for the rest."""
    with contextlib.ExitStack() as stack:
        opened = list(_opened(left, stack))
        with_first = {one.name for one in left if one.is_first}
        asked = [descriptor for one, descriptor in opened if one.is_first or one.name not in with_first]
        _signal(asked, signal.SIGTERM)
        _wait(asked, wait_s)
        killed = [descriptor for _, descriptor in opened if not _has_ended(descriptor)]
        _signal(killed, signal.SIGKILL)
        _wait(killed, KILLED_S)
        for one, descriptor in opened:
            how = "killed" if one.is_first and descriptor in killed else "ended"
            print(f"{how} {f'worker {one.name}' if one.name else 'a relay'} (process {one.pid})")


def _opened(left: Iterable[_Left], stack: contextlib.ExitStack) -> Iterator[tuple[_Left, int]]:
    """Yield the processes that still belong to the state directory, each with a descriptor, which the stack closes."""
    for one in left:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(one.pid)
            stack.callback(os.close, descriptor)
            if one.is_still():
                yield one, descriptor


def _signal(descriptors: Sequence[int], number: signal.Signals) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)


def _wait(descriptors: Sequence[int], seconds: float) -> None:
    """Wait until all of these processes have ended, at most this time."""
    until = time.monotonic() + seconds
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * max(0.0, until - time.monotonic()))


def _has_ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
