"""The places of a gateway's relays, by their numbers. A relay of each number runs, and after its end another."""

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio

from ichat.relays.figures import RelayFigures
from ichat.relays.relay_at_owner import RelayAtOwner
from ichat.relays.settings_in_force import SettingsInForce

log = logging.getLogger(__name__)

PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
"""Before a relay that has ended is started again."""
LIVED_S = 10.0
"""After this life, the pause is the first again."""


class RelayPlaces:
    """Keeps a relay of each number running, from 1 to the number of relays."""

    def __init__(
        self,
        settings: SettingsInForce,
        start: Callable[[int], Awaitable[RelayAtOwner]],
        figures: RelayFigures,
    ) -> None:
        """`settings` say how many relays there must be. `start` starts a relay of a number, and raises OSError."""
        self._settings = settings
        self._start = start
        self._figures = figures
        self._numbers: set[int] = set()
        """The numbers that are kept."""
        self._ended = trio.Event()
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<RelayPlaces {sorted(self._numbers)}>"

    @property
    def is_over(self) -> bool:
        """Whether no relay is started any more."""
        return self._ended.is_set()

    def begin(self, nursery: trio.Nursery, present: Mapping[int, RelayAtOwner]) -> None:
        """Keep relays running in tasks of this nursery; `present` has the relays that run already."""
        self._nursery = nursery
        self._fill(nursery, present)

    def fill(self) -> None:
        """Keep relays of further numbers running, if there must be more now. Harmless before `begin`."""
        if self._nursery is not None and not self.is_over:
            self._fill(self._nursery, {})

    def end(self) -> None:
        """Start no relay from now on."""
        self._ended.set()

    def _fill(self, nursery: trio.Nursery, present: Mapping[int, RelayAtOwner]) -> None:
        for number in range(1, self._settings.count + 1):
            if number not in self._numbers:
                self._numbers.add(number)
                nursery.start_soon(self._keep, number, present.get(number))

    async def _keep(self, number: int, relay: RelayAtOwner | None) -> None:
        """Start a relay, unless it is there, and start it again whenever it has ended, while its number is wanted."""
        pause_s, why = PAUSE_FIRST_S, None
        while not self.is_over and number <= self._settings.count:
            if why is not None:
                self._figures.note_restart(number, why)
            began_at, why = trio.current_time(), None
            try:
                if relay is None:
                    relay = await self._start(number)
            except OSError as error:
                log.error("relay %d cannot be started: %s", number, error.strerror or error)
            else:
                await relay.leaves_place.wait()
                why, relay = relay.left_by, None
            if why == "retired":
                continue
            if trio.current_time() - began_at > LIVED_S:
                pause_s = PAUSE_FIRST_S
            with trio.move_on_after(pause_s):
                await self._ended.wait()
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)
        self._numbers.discard(number)
