"""Output for the operator: tables and colours on a terminal, plain columns for `grep` and `awk` anywhere else.

Texts of a worker or a model may hold escape sequences that could move the cursor, change the title or
paste into the terminal. All are removed, except colours of log lines if colours are wanted.
"""

import io
import math
import os
import re
import signal
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from typing_extensions import Self

from ichat.program import as_typed_here

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

NONE = "-"
"""An empty cell: a column is a column for `awk` only when every row has it."""
GAP = "  "
CELL_WIDTH = 24
"""The width to which a column may shrink: longer cells are cut, and cells of the last column folded."""
PLAIN_WIDTH_MAX = 120
"""Longer cells are cut in plain columns, except the last cell of a row."""
REFRESHES_PER_S = 8

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REORDERING = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
"""Characters that make a terminal show letters in another order."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_GOOD, _BUSY, _BAD = "green", "yellow", "bold red"
_STYLES: Mapping[str, Mapping[str, str]] = {
    "state": {
        "ready": _GOOD, "following": _GOOD, "starting": _BUSY, "loading": _BUSY, "draining": _BUSY, "stale": _BUSY,
        "waking": _BUSY, "pending": _BUSY, "cold": "dim", "asleep": "dim", "stopped": "dim",
        "restarting": _BAD, "unhealthy": _BAD, "wedged": _BAD, "failed": _BAD, "broken": _BAD, "gone": "dim",
    },
    "chosen": {"yes": _GOOD},
    "action": {"start": _GOOD, "stop": _BAD, "restart": _BUSY, "update": _BUSY, "later": _BUSY, "keep": "dim"},
}  # fmt: skip
"""How the words of a column look, by the column's name."""


def clean(text: str) -> str:
    """Remove characters from a text that a terminal would execute instead of showing; line ends and tabs stay."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", _SEQUENCE.sub("", text)))


def one_line(value: object) -> str:
    """Write anything as a single clean line."""
    return " ".join(_REORDERING.sub("", clean(str(value))).split())


def lines(value: object) -> str:
    """Write anything as clean lines, each with its indent."""
    return "\n".join(line.rstrip() for line in _REORDERING.sub("", clean(str(value))).expandtabs().splitlines())


def width_of(text: str) -> int:
    """Return how many columns of a terminal a clean line fills: a Chinese character fills two."""
    return len(text) if text.isascii() else sum(map(_width_of_character, text))


def _width_of_character(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def cut(text: str, width: int) -> str:
    """Return a clean line that fills no more columns than this; a line that is cut ends with an ellipsis."""
    if width_of(text) <= width:
        return text
    length, taken = 0, 1
    while length < len(text) and (taken := taken + _width_of_character(text[length])) <= width:
        length += 1
    return f"{text[:length]}…" if width > 0 else ""


def log_line(line: str, *, colours: bool) -> str:
    """Make a captured line fit to be shown: its colours stay if wanted; of a progress bar, its last state."""
    line = line.rstrip("\r\n").rpartition("\r")[2]
    if not colours or "\x1b" not in line:
        return clean(line)
    parts = _COLOUR.split(line)
    return "".join(part if number % 2 else clean(part) for number, part in enumerate(parts)) + "\x1b[0m"


def percent(share: object) -> str:
    """Write a share from 0 to 1."""
    return f"{share * 100:.0f}%" if isinstance(share, int | float) else NONE


def size(number: object) -> str:
    """Write a number of bytes."""
    if not isinstance(number, int | float):
        return NONE
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}B"


def duration(seconds: object) -> str:
    """Write a length of time by its two largest units."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return NONE
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    units = [("d", whole // 86400), ("h", whole // 3600 % 24), ("m", whole // 60 % 60), ("s", whole % 60)]
    first = next(index for index, (unit, count) in enumerate(units) if count or unit == "s")
    return "".join(f"{count}{unit}" for unit, count in units[first : first + 2])


class Screen:
    """Standard output: a terminal, or a file or pipe that gets plain text."""

    def __init__(self, *, is_wide: bool = False) -> None:
        """`is_wide`: tables leave out and cut nothing."""
        self.is_terminal = sys.stdout.isatty()
        self._is_wide = is_wide
        self._console: Console | None = None

    def __repr__(self) -> str:
        return f"<Screen {'terminal' if self.is_terminal else 'plain'}>"

    @property
    def has_colours(self) -> bool:
        """Whether colours are shown: on a terminal that has them, unless NO_COLOR is set."""
        return self.is_terminal and not self._rich.no_color and self._rich.color_system is not None

    def prepare(self) -> None:
        """Import modules now that would otherwise be imported during a measurement."""
        if self.is_terminal:
            self._rich.out("", style="dim", end="")

    @property
    def _rich(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            self._console = Console(markup=False, highlight=False, emoji=False)
        return self._console

    def write(self, text: str, style: str = "", end: str = "") -> None:
        """Write text that has been cleaned, at once; `style` is for terminals."""
        if self.is_terminal and style:
            self._rich.out(text, style=style, highlight=False, end=end)
        else:
            sys.stdout.write(text + end)
        sys.stdout.flush()

    def line(self, text: str, style: str = "") -> None:
        """Write a line that has been cleaned."""
        self.write(text, style, "\n")

    def facts(self, facts: Iterable[tuple[str, object]]) -> None:
        """Write facts by their names, each on a line; facts that are None or empty are left out.

        On a terminal a line that is too long goes on below, under its text and not under its name.
        """
        shown = [(name, one_line(value)) for name, value in facts if value is not None and value != ""]
        width = max((len(name) for name, _value in shown), default=0)
        for name, value in shown:
            self.write(name.ljust(width) + GAP, "dim")
            self.line(self._folded(value, width + len(GAP)), _STYLES.get(name, {}).get(value, ""))

    def _folded(self, text: str, indent: int) -> str:
        """Break a text between words at the terminal's width."""
        if not self.is_terminal or len(text) <= (room := max(self._rich.width - indent, CELL_WIDTH)):
            return text
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        return f"\n{' ' * indent}".join(lines)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], can_go: Sequence[str] = ()) -> None:
        """Write a table; a cell that is None or empty shows as `-`.

        On a terminal columns without content are left out, and if it is too narrow columns of `can_go`, in this order.
        Elsewhere long cells are cut. Neither is done if the user wants the whole table.
        """
        cells = [[NONE if cell is None else one_line(cell) or NONE for cell in row] for row in rows]
        if self.is_terminal and not self._is_wide:
            self._rich_table({name: [row[index] for row in cells] for index, name in enumerate(columns)}, can_go)
            return
        if not self._is_wide:
            cells = [[*(cut(cell, PLAIN_WIDTH_MAX) for cell in row[:-1]), *row[-1:]] for row in cells]
        head = [column.upper().replace(" ", "_") for column in columns]
        widths = [max(map(width_of, column)) for column in zip(head, *cells, strict=True)]
        for row in [head, *cells]:
            padded = (cell + " " * (width - width_of(cell)) for cell, width in zip(row, widths, strict=True))
            self.line(GAP.join(padded).rstrip())

    def _rich_table(self, columns: Mapping[str, list[str]], can_go: Sequence[str]) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        shown = {name: cells for name, cells in columns.items() if set(cells) != {NONE}}
        widths = {name: max(map(width_of, [name, *cells])) for name, cells in shown.items()}
        for name in (
            *can_go,
            *[*widths][-2:1:-1],
        ):  # then columns between the first two and the last, from the right
            if sum(min(width, CELL_WIDTH) + len(GAP) for width in widths.values()) <= self._rich.width:
                break
            widths.pop(name, None)
        is_narrow = sum(width + len(GAP) for width in widths.values()) > self._rich.width
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for name in [*widths][:-1]:
            table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=CELL_WIDTH if is_narrow else None)
        for name in [*widths][-1:]:
            table.add_column(name, overflow="fold")
        for row in zip(*(shown[name] for name in widths), strict=True):
            styles = (_STYLES.get(name, {}) for name in widths)
            table.add_row(*(Text(cell, style.get(cell, "")) for cell, style in zip(row, styles, strict=True)))
        self._rich.print(table)


class Spinner:
    """Progress on standard error: a line that changes on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._shown = ""
        self._line = ""
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True, markup=False, highlight=False, emoji=False)
            self._status = console.status("", refresh_per_second=REFRESHES_PER_S)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def elapsed_s(self) -> float:
        """How long it has been shown, in seconds."""
        return time.monotonic() - self._started_at

    def show(self, text: str, detail: str = "") -> None:
        """Show the present progress; `detail` is a part that changes all the time, and only a terminal shows it."""
        text = one_line(text)
        if self._status is not None:
            self._line = text + (f", {one_line(detail)}" if detail else "")
            self._status.update(self)
        elif text != self._shown:
            note(text)
        self._shown = text

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        if self._status is not None:
            self._status.console.out(one_line(text), style="dim", highlight=False)
        else:
            note(one_line(text))

    def __rich__(self) -> "Text":
        """Return the line as it is now: seconds go on while nothing else happens."""
        from rich.text import Text

        return Text.assemble(self._line, (f"  {duration(self.elapsed_s)}", "dim"))


def note(text: str, style: str = "") -> None:
    """Write a line to standard error, after the text on standard output."""
    sys.stdout.flush()
    text = as_typed_here(text)
    if style and sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).out(text, style=style, highlight=False)
    else:
        print(text, file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Let no character that a stream cannot encode end the process."""
    streams: tuple[TextIO | Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on; in ichat.pyz it has ended the process until here."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def give_up_stdout() -> None:
    """Discard output that is still to be written to a closed pipe, so that the process ends quietly."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
