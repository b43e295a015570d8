"""Which of a worker's last lines its end was about: errors, and the lines of its last seconds."""

import re
from collections.abc import Sequence

from ichat.observability.logs.lines import Line

LINES_MAX = 400
"""How many of the last lines are searched, and how many characters of each: the root cause stands far above the end."""
LINE_CHARS_MAX = 1000
LAST_S = 10.0
"""Any line within this time before a worker's end may be about the end, in seconds."""
ERROR_S = 60.0
"""An error within this time before its end may have ended a ready worker; earlier errors were of requests."""
_HEAD_CHARS = 200
"""A line's level stands there."""

EXCEPTION = re.compile(r"(?:^|[\s:\]])(?:\w+\.)*(\w+(?:Error|Exception|Failure)): +(\S.*)$")
"""An exception's last line: its name, and its message."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_LEVEL = re.compile(r"(?:\([^)]*\)|\[[^\]]*\]|[\d:,.TZ -])*(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_ERROR_LEVELS = frozenset(("ERROR", "CRITICAL", "FATAL"))
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(
    rf"{re.escape(_TRACEBACK)}|(?:^|[\s:\]])(?:\w+\.)*\w*(?:Error|Exception|Failure)(?:: |$)|Fatal Python error: "
    r"|terminate called|^  what\(\): |\[E\d{4} |(?:^|[\s:\]])[A-Za-z]+ error: |(?:^|\s)ended with SIG[A-Z]+"
)
"""Marks of lines about errors, for lines without a level."""


def lines_of_end(lines: Sequence[Line], ended_at: float, up_at: float | None) -> list[str]:
    """Return those of a start's last lines that its end may have been about, oldest first.

    These are errors, and all lines of the last seconds. `ended_at` is when the process ended and `up_at` when it was
    ready first, both in seconds since 1970. Nothing from before it was ready is about its end, and no old error.
    """
    texts, found = [plain(line.text) for line in lines], list[str]()
    for line, text, is_error in zip(lines, texts, are_errors(texts), strict=True):
        age_s, is_of_load = ended_at - line.time, up_at is not None and line.time <= up_at
        if not is_of_load and (age_s <= LAST_S or (is_error and (up_at is None or age_s <= ERROR_S))):
            found.append(text)
    return found


def are_errors(lines: Sequence[str]) -> list[bool | None]:
    """Return of each line whether it reports an error; None: it does not say.

    That is said by its level, or by its form: an exception, or a line of its traceback.
    """
    found, in_traceback = list[bool | None](), False
    for line in lines:
        level = _LEVEL.match(line[:_HEAD_CHARS])
        if level is not None:
            is_error = level[1] in _ERROR_LEVELS
        else:
            is_error = _ERROR.search(line) is not None or (in_traceback and line[:1].isspace()) or None
        in_traceback = bool(is_error)
        found.append(is_error)
    return found


def plain(line: str) -> str:
    """Return a line without colours, and cut."""
    return _COLOUR.sub("", line[:LINE_CHARS_MAX]).rstrip()
