"""The calls of the control plane that are under way: while another process may get the gateway, new calls wait."""

import trio

from ichat import errors
from ichat.listeners import Gate, Listeners

WAIT_S = 10.0
"""How long a call waits while the gateway is frozen."""
READS = frozenset(("GET", "HEAD", "OPTIONS"))


class ControlCalls:
    """Counts the calls that may change something."""

    def __init__(self) -> None:
        self.gate = Gate()
        """Closed while the gateway is frozen."""
        self.is_handed_over = False
        """Whether another process answers calls now."""
        self._changing = 0
        self._ended: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<ControlCalls {self._changing} may change something{'' if self.gate.is_open else ', frozen'}>"

    async def begin(self, method: str) -> None:
        """Count a call; while the gateway is frozen, wait first. Raises ApiError 503."""
        if not self.gate.is_open and not self.is_handed_over:
            with trio.move_on_after(WAIT_S):
                await self.gate.wait_open()
        if not self.gate.is_open or self.is_handed_over:
            raise errors.owner_away()
        self._changing += method not in READS

    def end(self, method: str) -> None:
        """Count the end of a call that has begun."""
        self._changing -= method not in READS
        self._ended()

    async def wait_quiet(self) -> None:
        """Wait until no call is under way that may change something."""
        while self._changing:
            await self._ended.wait()
