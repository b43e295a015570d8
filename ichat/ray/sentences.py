"""Ray's reasons in a sentence: tracebacks and pages of proxies are left out."""

import re

SENTENCE_CHARACTERS_MAX = 300
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*): (.+)$", re.MULTILINE)
"""A line that ends a traceback: the class of the error, and its words."""
_FORWARDED = "Request failed with status code"
"""Begins the error of the head about an answer of the agent, which follows."""
_OF_REQUESTS = {"ValueError", "TypeError", "RuntimeError"}
"""The errors by which Ray's programs refuse a request; all others say that a part of Ray failed."""
_TRACEBACK = "Traceback (most recent call last):"


def refusal_in(text: str) -> str:
    """Return why Ray refuses a request, from the traceback that it answers; "" if it says nothing of the request."""
    found = _last_error(text)
    return _cut(found[1]) if found is not None and found[0] in _OF_REQUESTS else ""


def shortened_reason(text: str) -> str:
    """Return a text of Ray in a line, with the last error or line of a traceback in its place; "" for HTML."""
    before, is_traceback, _ = text.partition(_TRACEBACK)
    if is_traceback:
        found = _last_error(text)
        return _cut(f"{before.strip()} {text.rstrip().splitlines()[-1] if found is None else found[1]}")
    return "" if text.lstrip().startswith("<") else _cut(text)


def _last_error(text: str) -> tuple[str, str] | None:
    """Return the class and the words of the last error; None: there is none."""
    found = [match for match in _ERROR.finditer(text) if not match[2].startswith(_FORWARDED)]
    return (found[-1][1], found[-1][2]) if found else None


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SENTENCE_CHARACTERS_MAX else f"{line[: SENTENCE_CHARACTERS_MAX - 1]}…"
