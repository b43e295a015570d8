"""The tokens of responses that were made in the background, until the gateway knows them. Purely synchronous."""

import logging
import threading
from collections.abc import Callable, Iterable

from ichat.protocol.usage import LATE_MAX, LateUsage, Usage

log = logging.getLogger(__name__)

WAITING_MAX = 10_000
"""The most that are kept for a gateway that does not answer; the oldest are dropped first."""


class LateUsages:
    """The usages that the gateway has not accepted yet, the oldest first. Its methods may be called in any thread."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called after each new usage."""
        self._changed = changed
        self._waiting: dict[str, LateUsage] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<LateUsages {len(self._waiting)} wait>"

    def add(self, ticket: str, usage: Usage) -> None:
        """Note the tokens that the request with this ticket used."""
        with self._lock:
            if len(self._waiting) >= WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]
                log.warning("the gateway accepts no heartbeats: the tokens of a response in the background are lost")
            self._waiting[ticket] = LateUsage(ticket, *usage)
        self._changed()

    def some(self) -> list[LateUsage]:
        """Return as many as a heartbeat can have."""
        with self._lock:
            return list(self._waiting.values())[:LATE_MAX]

    def forget(self, accepted: Iterable[LateUsage]) -> bool:
        """Forget the usages that the gateway has accepted; return whether there are more."""
        with self._lock:
            for one in accepted:
                self._waiting.pop(one.ticket, None)
            return bool(self._waiting)
