"""How the process' own log lines look: whatever text is in one, a terminal shows it and does nothing else."""

import logging
import re

FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and ends of lines, what changes the direction of text, and halves of characters."""


class LineFormatter(logging.Formatter):
    """Writes such characters as escapes, and each record's message as one line; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__(FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        """Return the line of a record, without its traceback."""
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        """Return all of a record's text."""
        return shown_safely(super().format(record))


def shown_safely(text: str) -> str:
    """Return a text in which no character has a terminal do anything but begin a line."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
