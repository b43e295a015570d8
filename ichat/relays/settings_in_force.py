"""The settings of all relays: each has the same, or a change is refused."""

from collections.abc import Mapping

import trio

from ichat.config.schema import Config
from ichat.errors import EXIT_USAGE, Exit
from ichat.listeners import Listeners
from ichat.relays.link import whole
from ichat.relays.relay_at_owner import RelayAtOwner
from ichat.relays.settings import RelaySettings, count_of
from ichat.relays.values import Note, TalkError

PREPARE_S = 5.0
"""How long relays may need for other settings."""


class SettingsInForce:
    """The settings in force in all relays, and those that are offered to them."""

    def __init__(self, config: Config, relays: Mapping[int, RelayAtOwner]) -> None:
        """`relays` are the running relays, by their processes."""
        self._relays = relays
        self.count = count_of(config.server_settings.relays)
        """How many relays there must be. Another configuration may change it, but not to or from 0."""
        self.config = config
        self.version = 1
        self.now = RelaySettings.of(config, self.count)
        self._offered: tuple[int, RelaySettings, int] | None = None
        self.answered: Listeners[[]] = Listeners()
        """Called when a relay has prepared settings, or cannot, or has ended."""

    def __repr__(self) -> str:
        return f"<SettingsInForce {self.version}>"

    async def prepare(self, config: Config) -> None:
        """Have all relays prepare the settings of another configuration. Raises Exit 64 if one of them cannot.

        `put_in_force` must follow, or `forget`.
        """
        count = count_of(config.server_settings.relays) or self.count
        self._offered = version, settings, _ = self.version + 1, RelaySettings.of(config, count), count
        asked = self._offer_to_all(version, settings)
        with trio.move_on_after(PREPARE_S):
            while any(one.is_preparing(version) for one in asked):
                await self.answered.wait()
        if refusal := next((one.refusal for one in asked if one.refusal), ""):
            self.forget()
            raise Exit(EXIT_USAGE, refusal)
        for relay in asked:
            if relay.is_preparing(version):
                relay.kill(f"it has not prepared other settings within {PREPARE_S:g} s")

    def _offer_to_all(self, version: int, settings: RelaySettings) -> list[RelayAtOwner]:
        asked = [relay for relay in self._relays.values() if relay.state == "accepting"]
        for relay in asked:
            relay.refusal = ""
            self._offer(relay, version, settings)
        return asked

    def forget(self) -> None:
        """Drop the settings that were prepared."""
        if self._offered is None:
            return
        version, *_ = self._offered
        self._offered = None
        for relay in self._relays.values():
            if relay.state == "accepting" and relay.talk.offered == version:
                _tell(relay, "forget", version)

    def put_in_force(self, config: Config) -> None:
        """Put the prepared settings in force, in the same moment as the rest of the configuration."""
        if self._offered is None:
            return
        self.version, self.now, self.count = self._offered
        self._offered, self.config = None, config
        for relay in self._relays.values():
            if relay.prepared == self.version:
                _tell(relay, "commit", self.version)

    def follow(self, version: int) -> None:
        """Have a higher version than this, which a relay has of an earlier owner."""
        self.version = max(self.version, version + 1)

    def offer(self, relay: RelayAtOwner) -> None:
        """Offer the settings in force to a relay that has none, or older settings."""
        self._offer(relay, self.version, self.now)

    def receive(self, relay: RelayAtOwner, answer: Note) -> bool:
        """Note whether a relay has prepared the offered settings; return whether it has the settings in force now."""
        if answer.kind == "cannot":
            relay.refusal = str(answer.content.get("why", "")) or "A relay cannot use the configuration."
            self.answered()
            version = whole(answer, "version")
            if relay.state == "starting":
                relay.kill(relay.refusal)
            elif self._offered is None or version != self._offered[0]:
                _tell(relay, "forget", version)
            return False
        version = relay.prepared = whole(answer, "version")
        self.answered()
        if self._offered is not None and version == self._offered[0]:
            return False
        _tell(relay, "commit", version)
        if version < self.version:  # they have changed meanwhile
            self.offer(relay)
        return version >= self.version

    def _offer(self, relay: RelayAtOwner, version: int, settings: RelaySettings) -> None:
        _tell(relay, "settings", version, settings=settings.content())


def _tell(relay: RelayAtOwner, kind: str, version: int, **more: object) -> None:
    """Send a relay a frame about settings; kill a relay that cannot get it now, since others must not wait for it."""
    try:
        relay.send(Note(kind, 0, {"version": version, **more}))
    except TalkError as error:
        relay.kill(str(error))
