"""The bounds of a relay without an owner: of its requests, and of itself."""

from collections.abc import Callable

import trio

from ichat import errors
from ichat.config.schema import Timeouts
from ichat.listeners import Listeners
from ichat.relays.frame_desk import FrameDesk
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import MonotonicNs

TICK_S = 1.0
OWNERLESS_TICK_S = 0.25
"""How often requests are looked at that wait for an owner."""


class Ownerless:
    """How long requests wait for a word of the owner, and how long the relay waits for an owner."""

    def __init__(
        self, talk: RelayTalk, desk: FrameDesk, now: Callable[[], MonotonicNs], ticked: Callable[[float], None]
    ) -> None:
        """`ticked` is called about once a second, with Trio's time."""
        self._talk = talk
        self._desk = desk
        self._now = now
        self._ticked = ticked
        self.timeouts = Timeouts()
        self.since: float | None = None
        """Since when there is no owner, by Trio's clock; None: it has an owner."""
        self.lost_at: MonotonicNs | None = None
        """When the last owner was lost; None: there was none before."""
        self.changed: Listeners[[]] = Listeners()
        """Called when an owner is lost, or met."""

    def __repr__(self) -> str:
        return f"<Ownerless since {self.since}>"

    def lose_owner(self) -> None:
        """Begin to wait for an owner."""
        self.since, self.lost_at = trio.current_time(), self._now()
        self._talk.lose_owner(self.lost_at)
        self.changed()

    def meet_owner(self) -> None:
        """Wait no longer."""
        self.since = None
        self.changed()

    async def refuse_forever(self) -> None:
        """Refuse the requests that have waited for a word of the owner for too long."""
        while True:
            with trio.move_on_after(TICK_S if self.since is None else OWNERLESS_TICK_S):
                await self.changed.wait()
            self._ticked(trio.current_time())
            self._desk.refuse_overdue(round(self.timeouts.owner_wait_s * 1e9))

    async def wait_until_given_up(self) -> None:
        """Return when there has been no owner for too long."""
        while True:
            since = self.since
            with trio.move_on_at(trio.current_time() + 3600.0 if since is None else self._until(since)):
                await self.changed.wait()
            if since is not None and self.since == since and trio.current_time() >= self._until(since):
                return

    def _until(self, since: float) -> float:
        return since + self.timeouts.ownerless_s

    async def wait_until_back(self, deadline: float) -> None:
        """Return when there is an owner. Raises ApiError 503 at the deadline."""
        with trio.move_on_at(deadline):
            while self.since is not None:
                await self.changed.wait()
        if self.since is not None:
            raise errors.owner_away()
