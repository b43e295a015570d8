"""How the gateway of a state directory has begun, and how its processes before have ended.

`starts.json` is written by the process that has the directory: when it begins, when it answers requests, and at an
ordered end. A process that has not written its end has crashed.
"""

import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Literal

import attrs
import cattrs
from cattrs.errors import BaseValidationError
from prometheus_client import Metric

import ichat
from ichat.observability.prometheus_families import family
from ichat.protocol.messages import Count

log = logging.getLogger(__name__)

STARTS_FILE = "starts.json"
How = Literal["start", "crash", "takeover"]
"""How a process gets the gateway: there was none, it had crashed, or it handed over."""


@attrs.frozen
class GatewayCrash:
    """An end of the gateway's process without a stop."""

    pid: Count | None = None
    """The process; None: not known."""
    version: str = ""
    at: float | None = None
    """When its relays lost it, in seconds since 1970; None: no relay was left to notice."""
    waited_s: float | None = None
    """Seconds for which requests waited for the next process; None: no relay was left, so they were refused."""


@attrs.frozen
class GatewayTakeover:
    """A takeover of the gateway by another process."""

    at: float
    """When the new process answered requests, in seconds since 1970."""
    pid: Count
    """The old process."""
    version: str
    """Of the old process; "" if it is not known."""
    waited_s: float
    """Seconds for which requests waited, from the freeze of the old process on."""


@attrs.frozen
class SavedStarts:
    """The contents of the file."""

    pid: int = 0
    """The process that wrote it last."""
    version: str = ""
    is_running: bool = False
    """Whether that process has not written its end."""
    counts: dict[str, int] = attrs.field(factory=dict[str, int])
    """How many starts there were of each kind."""
    waited_s: float = 0.0
    """For how long requests waited for a next process, all together."""
    last_crash: GatewayCrash | None = None
    last_takeover: GatewayTakeover | None = None


class Starts:
    """The starts of a gateway with a state directory; the last start is that of this process."""

    def __init__(self, directory: str, term: int = 1) -> None:
        """`term` is the number of this start. Nothing is written before `begin`, or `note_open` after a takeover."""
        self._path = pathlib.Path(directory, STARTS_FILE)
        self.term = term
        self.saved = _read(self._path)
        self.retiring_pid: int | None = None
        """The process that has handed the gateway over, while it ends its connections."""
        self._how: How = "start"
        self._old_pid, self._old_version = 0, ""
        self._waiting_ns: int | None = None
        self._is_writer = False

    def __repr__(self) -> str:
        return f"<Starts {self._how}, term {self.term}>"

    def begin(self) -> None:
        """Note that this process has the directory, which no process has handed over."""
        if self.saved.is_running:
            self._how = "crash"
            crash = GatewayCrash(self.saved.pid, self.saved.version)
            self.saved = attrs.evolve(self.saved, last_crash=crash)
        self._is_writer = True
        self._save(is_running=True)

    def begin_by_takeover(self, pid: int, version: str, waiting_ns: int) -> None:
        """Note that a process has handed the gateway over. Requests have waited since this time (`monotonic_ns`)."""
        self._how, self.retiring_pid, self._is_writer = "takeover", pid, True
        self._old_pid, self._old_version, self._waiting_ns = pid, version, waiting_ns
        self._save(is_running=True)

    def note_open(self, lost_ns: int | None) -> None:
        """Note that requests are answered now. Relays that an earlier process left have lost it at this time."""
        now, now_ns, saved = time.time(), time.monotonic_ns(), self.saved
        if self._how == "start" and lost_ns is not None:
            self._how = "crash"
        since_ns = self._waiting_ns if self._how == "takeover" else lost_ns
        waited_s = 0.0 if since_ns is None else round(max(0, now_ns - since_ns) / 1e9, 3)
        counts = {**saved.counts, self._how: saved.counts.get(self._how, 0) + 1}
        saved = self.saved = attrs.evolve(saved, counts=counts, waited_s=round(saved.waited_s + waited_s, 3))
        if self._how == "takeover":
            last = GatewayTakeover(round(now, 3), self._old_pid, self._old_version, waited_s)
            self.saved = attrs.evolve(saved, last_takeover=last)
            log.info("requests waited for %.2f s in this takeover", waited_s)
        elif self._how == "crash":
            self._note_crash(now, lost_ns, waited_s)
        self._save(is_running=True)

    def _note_crash(self, now: float, lost_ns: int | None, waited_s: float) -> None:
        last = self.saved.last_crash
        last = GatewayCrash() if last is None or last.at is not None else last
        who = "the process before" if last.pid is None else f"process {last.pid}, which had this gateway,"
        if lost_ns is None:
            log.warning("%s has ended without a stop", who)
        else:
            last = attrs.evolve(last, at=round(now - waited_s, 3), waited_s=waited_s)
            log.warning("%s has ended without a stop: requests waited for %.1f s", who, waited_s)
        self.saved = attrs.evolve(self.saved, last_crash=last)

    def note_old_end(self) -> None:
        """Note that the process that has handed the gateway over has ended."""
        self.retiring_pid = None

    def end(self) -> None:
        """Note the ordered end of this process. Harmless after `hand_over`."""
        if self._is_writer:
            self._save(is_running=False)

    def hand_over(self) -> None:
        """Write nothing more: another process has the gateway."""
        self._is_writer = False

    def families(self) -> Iterator[Metric]:
        """Return the families for Prometheus."""
        counts = {how: float(self.saved.counts.get(how, 0)) for how in ("start", "crash", "takeover")}
        yield family("ichat_term", self.term)
        yield family("ichat_gateway_starts", counts)
        yield family("ichat_ownerless_seconds", self.saved.waited_s)

    def _save(self, *, is_running: bool) -> None:
        """Write the file. A failure is no reason to end: the next start knows less."""
        self.saved = attrs.evolve(self.saved, pid=os.getpid(), version=ichat.__version__, is_running=is_running)
        written = self._path.with_suffix(".new")
        try:
            written.write_text(json.dumps(attrs.asdict(self.saved)) + "\n", encoding="utf-8")
            written.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror or error)


def _read(path: pathlib.Path) -> SavedStarts:
    """Return the contents of the file; nothing is known if it is missing or damaged."""
    try:
        return cattrs.structure(json.loads(path.read_text(encoding="utf-8")), SavedStarts)
    except FileNotFoundError:
        return SavedStarts()
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, BaseValidationError) as error:
        log.warning("%s cannot be read (%s): earlier starts are not known", path, type(error).__name__)
        return SavedStarts()
