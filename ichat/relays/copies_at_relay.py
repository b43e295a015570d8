"""The copies that a relay sends: its owner gives each a place, or refuses it."""

import trio

from ichat.http.pool import Pool
from ichat.listeners import Listeners
from ichat.observability.request_record import UsedTokens
from ichat.proxy.copies import Copy, send_copy
from ichat.proxy.steps import Outcome
from ichat.relays.frame_desk import Asking, FrameDesk
from ichat.relays.values import SentOutcome, SentStep, TrioClock


class _Copying(Asking):
    """A copy that asks."""

    def __init__(self, scope: trio.CancelScope) -> None:
        super().__init__()
        self.scope = scope

    def cancel(self) -> None:
        """See `Asking`."""
        self.scope.cancel()


class CopiesAtRelay:
    """The copies under way, and those that wait for an answer of the owner."""

    def __init__(self, nursery: trio.Nursery, pool: Pool, desk: FrameDesk, clock: TrioClock) -> None:
        self.copies_max = 0
        """The bound on copies here; the owner bounds those of all relays."""
        self._nursery = nursery
        self._pool = pool
        self._desk = desk
        self._clock = clock
        self._scopes: set[trio.CancelScope] = set()
        self._ended: Listeners[[]] = Listeners()

    def __repr__(self) -> str:
        return f"<CopiesAtRelay {len(self._scopes)} under way>"

    def start(self, number: int, copy: Copy | None) -> None:
        """Ask whether a copy of the request of this number may be sent, and send it then; this never waits."""
        if copy is None:
            return
        scope, is_busy = trio.CancelScope(), len(self._scopes) >= self.copies_max
        content = {"bytes": len(copy.body.data), "is_busy": is_busy}
        asking = _Copying(scope)
        if self._desk.begin_copy(number, content, asking):
            self._scopes.add(scope)
            self._nursery.start_soon(self._run, asking, None if is_busy else copy, scope)

    async def end(self) -> None:
        """End all copies, and return when none is left."""
        for scope in self._scopes:
            scope.cancel()
        while self._scopes:
            await self._ended.wait()

    async def _run(self, asking: Asking, copy: Copy | None, scope: trio.CancelScope) -> None:
        try:
            with scope:
                answer = await asking.wait()
                if isinstance(answer, SentStep):
                    await self._send(answer, copy)
        finally:
            self._desk.end(asking)
            self._scopes.discard(scope)
            self._ended()

    async def _send(self, sent: SentStep, copy: Copy | None) -> None:
        """Send a copy as the owner says, and report how that went."""
        outcome, used = Outcome("cancelled", sent.step.endpoint), None
        try:
            if copy is not None:
                outcome, used = await send_copy(copy, self._pool, self._desk.endpoint(sent), sent.step)
        finally:
            self._report(sent, outcome, used)

    def _report(self, sent: SentStep, outcome: Outcome, used: UsedTokens | None) -> None:
        ended_at = self._clock.ns_of(trio.current_time())
        self._desk.report(SentOutcome(
            sent.number, sent.attempt, self._desk.next_seq, outcome, ended_at=ended_at, usage=used, key=sent.key,
            model=sent.step.model,
        ))  # fmt: skip
