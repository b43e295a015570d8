"""Descriptors of workers that more processes than the gateway's own hold open, so that its death closes none of them.

The gateway's owner and each of its relays have the same. Nothing is read from them here, and nothing is written.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ichat.listeners import Listeners
from ichat.observability.logs.journal import JOURNAL
from ichat.observability.logs.pipes import OUTPUT

log = logging.getLogger(__name__)

STARTS_MAX = 128
"""The most starts of workers with kept descriptors. Their messages fit into the buffer of a socket."""
LAUNCHER = "launcher"
NAMES = (LAUNCHER, OUTPUT, JOURNAL)
"""The writing end of the pipe to a launcher, the reading end of a worker's output, and its unwritten output."""
_TEXT_MAX = 512
Start = tuple[str, str]
"""A worker's id, and the identity of the first process of a start of it."""


class KeptDescriptors:
    """The descriptors of running workers, by the workers and their starts."""

    def __init__(self, *, is_shared: bool = True) -> None:
        """`is_shared` says whether other processes have the same; if not, only a takeover needs them."""
        self.is_shared = is_shared
        self._of: dict[Start, dict[str, int]] = {}
        self._is_full = False
        self.changed: Listeners[[Mapping[str, Any], Sequence[int]]] = Listeners()
        """Called with the message that has another process do the same, and with its descriptors."""

    def __repr__(self) -> str:
        return f"<KeptDescriptors of {len(self._of)} starts>"

    @property
    def starts(self) -> list[Start]:
        """The starts with descriptors."""
        return [*self._of]

    def of(self, start: Start) -> Mapping[str, int]:
        """Return the descriptors of a start by their names; they stay with this object."""
        return self._of.get(start, {})

    def keep(self, start: Start, descriptors: Mapping[str, int]) -> None:
        """Keep copies of descriptors until `drop`. Raises OSError if there are no more descriptors."""
        if self._has_no_room(start):
            return
        copies: dict[str, int] = {}
        with contextlib.ExitStack() as undo:
            for name in filter(descriptors.__contains__, NAMES):
                copies[name] = os.dup(descriptors[name])
                undo.callback(os.close, copies[name])
            undo.pop_all()
        self.drop(start)
        self._of[start] = copies
        self.changed(*_message(start, copies))

    def drop(self, start: Start) -> None:
        """Close the descriptors of a start that has ended. Harmless the second time."""
        if self._forget(start):
            self.changed({"kind": "drop", "worker": start[0], "start": start[1]}, ())

    def messages(self) -> Iterator[tuple[Mapping[str, Any], Sequence[int]]]:
        """Return the messages by which another process gets all descriptors."""
        for start, descriptors in list(self._of.items()):
            yield _message(start, descriptors)

    def send_all(self, send: Callable[[Mapping[str, Any], Sequence[int]], None]) -> None:
        """Have another process keep all descriptors; it may have some of them already."""
        for message, descriptors in self.messages():
            send(message, descriptors)

    def receive(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Obey a message, and own its descriptors. Raises ValueError for a message of another form.

        Descriptors of a start that is known already are closed: several processes have them.
        """
        try:
            start = _text(message, "worker"), _text(message, "start")
            if message.get("kind") == "drop" and not descriptors:
                self._forget(start)
                return
            which: Any = message.get("which")
            names = [name for name in NAMES if name in which] if isinstance(which, list) else []
            if message.get("kind") != "keep" or names != which or len(names) != len(descriptors):
                raise ValueError(f"This is no message about descriptors to keep: {str(message)[:_TEXT_MAX]}.")
            if start in self._of or self._has_no_room(start):
                return
            self._of[start], descriptors = dict(zip(names, descriptors, strict=True)), ()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Close all descriptors; no other process hears of that."""
        for start in list(self._of):
            self._forget(start)

    def _has_no_room(self, start: Start) -> bool:
        is_full, was_full = start not in self._of and len(self._of) >= STARTS_MAX, self._is_full
        self._is_full = is_full
        if is_full and not was_full:
            log.error(
                "%d workers have pipes that outlive the gateway's own process: worker %s and later workers end with it",
                STARTS_MAX, start[0],
            )  # fmt: skip
        return is_full

    def _forget(self, start: Start) -> bool:
        descriptors = self._of.pop(start, None)
        for descriptor in (descriptors or {}).values():
            os.close(descriptor)
        return descriptors is not None


def _message(start: Start, descriptors: Mapping[str, int]) -> tuple[Mapping[str, Any], Sequence[int]]:
    worker, identity = start
    return {"kind": "keep", "worker": worker, "start": identity, "which": [*descriptors]}, [*descriptors.values()]


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > _TEXT_MAX:
        raise ValueError(f"The field `{name}` of a message about descriptors is no name.")
    return value
