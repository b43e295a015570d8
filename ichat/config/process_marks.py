"""The marks of a gateway's processes: variables by which they are found, wherever their parents have gone."""

import os
import pathlib

WORKER_VARIABLE = "ICHAT_WORKER"
"""In the environment of a worker and of its children: the state directory of its gateway, a colon, and its id."""
RELAY_VARIABLE = "ICHAT_RELAY"
"""In a relay's environment: the state directory of its gateway."""


def mark_of(pid: int, variable: str) -> str:
    """Return the mark of a process; "" if it has none, or cannot be read."""
    try:
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = f"{variable}=".encode()
    return next((os.fsdecode(word[len(name) :]) for word in words if word.startswith(name)), "")


def relays_of(directory: str) -> list[int]:
    """Return the relays of the gateway with this state directory, with and without their gateway; it reads `/proc`."""
    names = names_of(directory)
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return sorted(pid for pid in pids if mark_of(pid, RELAY_VARIABLE) in names)


def names_of(directory: str) -> tuple[str, ...]:
    """Return the names that a state directory may have in marks."""
    return tuple(dict.fromkeys((directory, os.path.abspath(directory), os.path.realpath(directory))))
