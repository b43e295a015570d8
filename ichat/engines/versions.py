"""The versions of an engine that a worker supports."""

import os
import re

from ichat.errors import EXIT_UNAVAILABLE, Exit

ANY_VERSION = "ICHAT_ANY_ENGINE_VERSION"
"""The environment variable that allows any version of an engine, if it is 1."""

Version = tuple[int, ...]


def check_version(engine: str, found: str, oldest: Version, newest: Version) -> None:
    """Check that a version (``0.32.0+cpu``) is from `oldest` to `newest`, both included. Raises Exit 69.

    They are compared as far as the bounds go: 0.32.1 is not newer than (0, 32).
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.partition("+")[0])[:3])
    if oldest <= numbers[: len(oldest)] and numbers[: len(newest)] <= newest:
        return
    if os.environ.get(ANY_VERSION) == "1":
        return
    known = f"{_text(oldest)} to {_text(newest)}"
    raise Exit(
        EXIT_UNAVAILABLE,
        f"{engine} {found} is not a version that this worker knows ({known}): install one of those, or set"
        f" {ANY_VERSION}=1 to try it anyway.",
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
