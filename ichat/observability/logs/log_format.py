"""How the process' own log lines look: a terminal shows any text in them and does nothing else."""

import json
import logging
import os
import re
import time
from collections.abc import Mapping

from ichat.http.request_ids import REQUEST_ID

LOG_FORMATS = ("auto", "text", "json")
FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
SHORT_FORM = "%(asctime)s %(message)s"
SHORT_TIME = "%H:%M:%S"
SHORT_INDENT = " " * len("00:00:00 ")
SHORT_CHARACTERS_MAX = 200
"""The longest message that is no problem, in characters; commands are longer."""
RED, YELLOW, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and ends of lines, characters that turn the direction of text, and half characters."""


class LineFormatter(logging.Formatter):
    """Writes such characters as escapes, and each record's message as a single line; a traceback keeps its lines.

    A line about a request has its id.
    """

    def __init__(self) -> None:
        super().__init__(FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        """Return the line of a record, without its traceback."""
        return _with_id(super().formatMessage(record).replace("\n", "\\n"))

    def format(self, record: logging.LogRecord) -> str:
        """Return all of a record's text."""
        return shown_safely(super().format(record))


class ShortFormatter(LineFormatter):
    """Writes the time of day and the message for a person at a terminal; problems stand out.

    Of a message of several lines, all but the first begin with blanks, so that none looks like a record.
    """

    def __init__(self, *, has_colours: bool) -> None:
        logging.Formatter.__init__(self, SHORT_FORM, SHORT_TIME)
        self._has_colours = has_colours

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        """Return the lines of a record, without its traceback."""
        return _with_id(logging.Formatter.formatMessage(self, record).replace("\n", f"\n{SHORT_INDENT}"))

    def format(self, record: logging.LogRecord) -> str:
        """Return all of a record's text."""
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text if len(text) <= SHORT_CHARACTERS_MAX else f"{text[:SHORT_CHARACTERS_MAX]}…"
        time, _, message = text.partition(" ")
        text = f"{time} {record.levelname.lower()}: {message}"
        return coloured(text, RED if record.levelno >= logging.ERROR else YELLOW) if self._has_colours else text


class JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object: time, level, logger and message; request_id and traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line, without its end."""
        known = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if request_id := REQUEST_ID.get():
            known["request_id"] = request_id.decode()
        if record.exc_info:
            known["traceback"] = self.formatException(record.exc_info)
        return json_line(record.created, known)


def _with_id(line: str) -> str:
    """Return a line with the id of the request that it is about."""
    request_id = REQUEST_ID.get().decode()
    return line if request_id in line else f"{line} ({request_id})"


def json_line(at: float, known: Mapping[str, str]) -> str:
    """Return a line of a log: its time (seconds since 1970, written as in RFC 3339), and what else is known."""
    milliseconds = int(at * 1000) % 1000
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return json.dumps({"time": f"{clock}.{milliseconds:03}Z", **known})


def formatter_of(form: str, fd: int) -> logging.Formatter:
    """Return the formatter of the process' own lines to a descriptor, by `logs.format`."""
    if form == "json":
        return JsonFormatter()
    return ShortFormatter(has_colours=has_colours(fd)) if is_short(form, fd) else LineFormatter()


def is_short(form: str, fd: int) -> bool:
    """Return whether lines to a descriptor are short, by `logs.format`."""
    return form == "text" or (form == "auto" and os.isatty(fd))


def has_colours(fd: int) -> bool:
    """Return whether a descriptor leads to a terminal with colours that the user has not switched off."""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    """Return a text in a colour."""
    return f"{colour}{text}{PLAIN}"


def shown_safely(text: str) -> str:
    """Return a text in which no character has a terminal do anything but begin a line."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
