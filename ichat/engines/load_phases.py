"""The phases of a load, by the steps of the engine's thread and by the lines that the engine writes meanwhile.

Phases only go forward. So a line that several processes write, or an unknown line, changes nothing. How much of a
model a hub has sent meanwhile is known by the files in the cache of `huggingface_hub`.
"""

import contextlib
import itertools
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from ichat.config.package_data import read_toml
from ichat.protocol.field_checks import PHASE_CHARACTERS_MAX, PHASES_MAX
from ichat.protocol.messages import LoadPhase

READING = "reading the configuration"
WEIGHTS = "loading weights"
_BAR = re.compile(r"\b(\d{1,6})/(\d{1,6}) \[")
"""Where a progress bar says how much is done."""
_NOUNS = {WEIGHTS: " shards"}
COMING_S = 10.0
"""A file that has not grown for this many seconds was left by a download that broke off."""
FILES_MAX = 4096
GIB = 1024**3
_HUB_NAME = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?")

TimedText = tuple[float, str]
"""The time at which a line was read, in seconds since 1970, and the line."""


@attrs.frozen
class LoadMark:
    """A phase, and the engine's output when it begins."""

    phase: str
    begins: re.Pattern[str]


@attrs.frozen
class LoadLines:
    """The output of an engine while it loads."""

    title: str
    """Its name as its makers write it."""
    marks: Sequence[LoadMark] = ()
    """In the order of their phases, from the first phase after its arguments are parsed."""


def mark(phase: str, *patterns: str) -> LoadMark:
    """Return the mark of a phase that begins with a line in which one of these patterns is."""
    return LoadMark(phase, re.compile("|".join(patterns)))


def load_lines(title: str) -> LoadLines:
    """Return the output of a built-in engine while it loads, from `load_phases.toml`; `title` is its name there."""
    phases = read_toml("ichat.engines", "load_phases.toml")[title.lower()]
    return LoadLines(title, [mark(one["phase"], *one["begins"]) for one in phases])


class LoadTracker:
    """The progress of a load; the engine's thread enters phases, and any thread reads them."""

    def __init__(
        self,
        engine: LoadLines | str,
        lines: Callable[[], Iterable[TimedText]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`engine` has its known lines, or is its name alone; `lines` returns the new lines, where they are read.

        `clock` returns seconds since 1970.
        """
        known = LoadLines(engine) if isinstance(engine, str) else engine
        self._marks = known.marks if lines is not None else ()
        self._lines = lines
        self._clock = clock
        self.importing = f"importing {known.title}"
        """The first phase."""
        self.reading = READING if self._marks else ""
        """The phase in which the engine reads its configuration; empty: its lines do not show when that ends."""
        self._after = ""
        """The engine's state since it was loaded."""
        self._lock = threading.Lock()
        self._began: list[TimedText] = []
        """When each phase began."""
        self._details: dict[str, str] = {}
        self._next_mark = 0
        self._ended_at: float | None = None
        self.version = 0
        """Grows when another phase begins, or one of them is further."""

    def __repr__(self) -> str:
        return f"<LoadTracker {self.phase}>"

    @property
    def phase(self) -> str:
        """The phase that is under way, or the engine's state since it was loaded."""
        return self._after or (self._began[-1][1] if self._began else "starting")

    @property
    def has_ended(self) -> bool:
        """Whether the engine has been loaded."""
        return self._ended_at is not None

    def enter(self, phase: str) -> None:
        """Begin a phase now."""
        with self._lock:
            self._begin(phase, self._clock())

    def catch_up(self) -> None:
        """Read the lines that were written since the last time."""
        if self._lines is None:
            return
        with self._lock:
            if self._ended_at is None:
                for at, line in self._lines():
                    self._read(line, at)

    def note(self, detail: str) -> None:
        """Record how far the phase that is under way is; "" changes nothing."""
        with self._lock:
            self._note(detail)

    def _note(self, detail: str) -> None:
        if detail and self._ended_at is None and self._details.get(self.phase) != detail:
            self._details[self.phase] = detail
            self.version += 1

    def end(self, phase: str) -> None:
        """Read all lines until now: the engine is loaded, and is `ready` for example."""
        self.catch_up()
        with self._lock:
            self._ended_at = self._clock() if self._ended_at is None else self._ended_at
            self._after = phase

    def phases(self) -> list[LoadPhase]:
        """Return the phases until now, in their order, each with its seconds."""
        with self._lock:
            until = self._clock() if self._ended_at is None else self._ended_at
            ends = [*(at for at, _ in self._began[1:]), until][: len(self._began)]
            return [
                LoadPhase(name, round(max(0.0, end - at), 2), self._details.get(name, ""))
                for (at, name), end in zip(self._began, ends, strict=True)
            ]

    def _begin(self, phase: str, at: float) -> None:
        if len(self._began) < PHASES_MAX and phase != self.phase and self._ended_at is None:
            at = max(at, self._began[-1][0]) if self._began else at
            self._began.append((at, phase[:PHASE_CHARACTERS_MAX]))
            self.version += 1

    def _read(self, line: str, at: float) -> None:
        for number in range(self._next_mark, len(self._marks)):
            one = self._marks[number]
            if one.begins.search(line):
                self._next_mark = number + 1
                self._begin(one.phase, at)
                break
        bar = _BAR.search(line)
        if bar is not None and self._is_of_phase(line):
            self._note(f"{bar[1]} of {bar[2]}{_NOUNS.get(self.phase, '')}")

    def _is_of_phase(self, line: str) -> bool:
        """Return whether the phase that is under way could have begun with this line."""
        one = self._marks[self._next_mark - 1] if self._next_mark else None
        return one is not None and one.phase == self.phase and one.begins.search(line) is not None


def hub_cache(environment: Mapping[str, str]) -> str:
    """Return the directory in which `huggingface_hub` keeps models, by the same variables."""
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return os.path.expanduser(cache or os.path.join(home, "hub"))


def downloaded(model: str, cache: pathlib.Path, now: float) -> str:
    """Return in words how much of a hub's model is there while its download runs, otherwise "". May block.

    `now` is in seconds since 1970.
    """
    if not _HUB_NAME.fullmatch(model) or os.path.exists(model):
        return ""
    size, is_coming = 0, False
    blobs = cache / f"models--{model.replace('/', '--')}" / "blobs"
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for entry in itertools.islice(entries, FILES_MAX):
            with contextlib.suppress(OSError):  # it has just got its name
                found = entry.stat()
                size += min(found.st_size, found.st_blocks * 512)
                is_coming = is_coming or (entry.name.endswith(".incomplete") and now - found.st_mtime < COMING_S)
    return f"({size / GIB:.2f} GiB downloaded)" if is_coming else ""
