"""What may be shown of arguments and configurations: everything but the secrets in them."""

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from typing import Any, cast

MASK = "***"
_SECRET = re.compile(
    r"(^|[-_])((api|access|private|secret)[-_]key|key[-_]hash|token|password|passphrase|secret|credentials?|authorization)$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-(\d+|\d*\.\d+)$")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_COUNT = re.compile(r"(first|adapter)[-_]token$")


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag, not a value or a negative number."""
    return word[:1] == "-" and len(word) > 1 and not _NUMBER.match(word) and " " not in word.partition("=")[0]


def shown(words: Sequence[str]) -> str:
    """Return words as a shell would read them, without the values that are secret."""
    texts: list[str] = []
    hidden = False
    for word in words:
        if is_flag(word):
            name, equals, value = word.partition("=")
            hidden = _is_secret(name.rpartition(".")[2])
            texts.append(name + equals + (MASK if hidden and equals else _quoted(value) if equals else ""))
        else:
            texts.append(MASK if hidden else _quoted(word))
    return " ".join(texts)


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and not _COUNT.search(name)


def _quoted(word: str) -> str:
    return shlex.quote(masked(word))


def masked(value: Any) -> Any:
    """Return a value as JSON knows it, with a mask in place of each secret that has a name in it.

    Texts that are JSON themselves are looked into, and so are the engines' own dataclasses; URLs lose their login.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(masked(json.loads(value))) if value[:1] in ("{", "[") else _LOGIN.sub(MASK, value)
        return _LOGIN.sub(MASK, value)
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: MASK if _is_secret(key) and inner else masked(inner) for key, inner in found.items()}
    return [masked(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value
