"""The keys that are made over the API while the gateway runs: made, changed, rotated, withdrawn, refused in the end.

Each change is on the disk before it is in force. Then the gateway goes on with another `Auth`, as at a reload:
connections stay, requests under way go on, and the next request with a key that is gone gets 401.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import trio

from ichat.admin.config_state import ConfigInForce
from ichat.config.load import read_key
from ichat.config.schema import Config, Key
from ichat.errors import ApiError, bad_request
from ichat.listeners import Listeners
from ichat.security.key_file import save_keys
from ichat.security.keys import hash_of, new_key
from ichat.security.made_keys import MadeKey, MadeKeys, OldSecret, changeable_key, check_new_name

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""How often the time of day is read while a key will expire: the clock may be set."""
EXPIRES_IN_S_MAX = 100 * 366 * 24 * 3600.0
"""The longest lifetime of a key that expires."""
OVERLAP_S = 24 * 3600.0
"""How long the old secret of a rotated key is accepted, in seconds, unless the request says otherwise."""
OVERLAP_S_MAX = 90 * 24 * 3600.0
_NEVER_ASKED = ("key_hash", "key_env")
_EXPIRY = ("expires_at", "expires_in_s")


@attrs.define(eq=False, slots=False)
class KeyStore:
    """Holds the made keys."""

    made: MadeKeys
    _path: str
    """The file with the keys."""
    _in_force: ConfigInForce
    _put_in_force: Callable[[MadeKeys, float], None]
    """Makes the gateway continue with the keys that are active at a time."""
    _wall_clock: Callable[[], float] = time.time
    _is_kept: bool = attrs.field(default=True, kw_only=True, alias="is_kept")
    """Whether the next gateway finds the file."""
    _keeps_usage: bool = attrs.field(default=True, kw_only=True, alias="keeps_usage")
    """Whether limits for a day and a month hold."""
    _in_force_at: float = attrs.field(init=False)
    """Keys that expired until then are refused already."""
    listeners: Listeners[[]] = attrs.field(init=False, factory=Listeners[[]])
    """Called at every change of a key, and when a key expires."""

    def __attrs_post_init__(self) -> None:
        self._in_force_at = self._wall_clock()

    def __repr__(self) -> str:
        return f"<KeyStore {self.made!r}>"

    @property
    def configured(self) -> list[Key]:
        """The keys of the configuration that is in force."""
        return self._in_force.config.security.keys

    @property
    def _config(self) -> Config:
        """The configuration that is in force; a ledger that it asks for since its start is not there."""
        config = self._in_force.config
        return config if self._keeps_usage else attrs.evolve(config, usage=attrs.evolve(config.usage, enabled=False))

    async def make(self, table: Mapping[str, Any]) -> tuple[MadeKey, str]:
        """Make the key that a request asks for; return it, and the key itself, stored nowhere.

        Raises ApiError: 400 for a wrong description, 409 if it cannot be made, 503 if it cannot be kept.
        """
        if not self._is_kept:
            raise ApiError(
                409,
                "not_kept",
                "This gateway has no directory that lasts: the key would be gone after a restart, and clients would"
                " need none again. Set server_settings.state_directory to a directory that can be written.",
            )
        now, secret = self._wall_clock(), new_key()
        key = _key_from(table, {}, hash_of(secret), self._config)
        expires_at = _expiry(table, None, now)
        async with self._in_force.lock:
            check_new_name(key.name, self.configured, self.made)
            kept, most = self.made.without_forgotten(now), self._in_force.config.limits.made_keys_max
            if len(kept.by_name) >= most:
                raise ApiError(
                    409,
                    "too_many_keys",
                    f"There are {len(kept.by_name)} made keys already: withdraw some, or raise limits.made_keys_max.",
                )
            made = MadeKey(key, round(now, 3), expires_at)
            await self._change(kept.with_key(made), f"the key {key.name} was made over the API")
        return made, secret

    async def alter(self, name: str, table: Mapping[str, Any]) -> MadeKey:
        """Change the limits, the permissions or the expiry of a made key. Raises ApiError 400, 404, 409 or 503."""
        async with self._in_force.lock:
            before = changeable_key(name, self.configured, self.made)
            if table.get("name", name) != name:
                raise bad_request("The name of a key stays as it is: make another key.", param="name")
            key = _key_from(table, attrs.asdict(before.key), before.key.key_hash or "", self._config)
            expires_at = _expiry(table, before.expires_at, self._wall_clock())
            made = attrs.evolve(before, key=key, expires_at=expires_at)
            await self._change(self.made.with_key(made), f"the key {name} was changed over the API")
        return made

    async def rotate(self, name: str, table: Mapping[str, Any]) -> tuple[MadeKey, str]:
        """Make another secret for a made key; return both. Only the secret before this is accepted for the overlap.

        Name, limits and use stay. Raises ApiError 400, 404, 409 or 503.
        """
        overlap_s = _overlap(table)
        async with self._in_force.lock:
            before, now, secret = changeable_key(name, self.configured, self.made), self._wall_clock(), new_key()
            if not before.is_active(now):
                raise ApiError(409, "key_expired", f"The key {name} has expired: give it more time first.")
            old = OldSecret(before.key.key_hash or "", round(now + overlap_s, 3)) if overlap_s else None
            made = attrs.evolve(before, key=attrs.evolve(before.key, key_hash=hash_of(secret)), old=old)
            await self._change(self.made.with_key(made), f"the key {name} was rotated over the API")
        return made, secret

    async def withdraw(self, name: str) -> None:
        """Forget a made key. Raises ApiError 404, 409 or 503."""
        async with self._in_force.lock:
            changeable_key(name, self.configured, self.made)
            await self._change(self.made.without_key(name), f"the key {name} was withdrawn over the API")

    async def expire_forever(self) -> NoReturn:
        """Put the keys in force anew whenever a key expires."""
        while True:
            at = self.made.next_expiry(self._in_force_at)
            wait_s = min(max(at - self._wall_clock(), 0.0), LOOK_S) if at < math.inf else math.inf
            with trio.move_on_after(wait_s) as waiting:
                await self.listeners.wait()
            if waiting.cancelled_caught and self._wall_clock() >= at:
                async with self._in_force.lock:
                    log.info("a key that was made over the API, or its previous secret, has expired")
                    self._go_on_with(self.made)

    async def _change(self, made: MadeKeys, what: str) -> None:
        """Keep other keys, and put them in force. Raises ApiError 503, and nothing has changed then."""
        try:
            await trio.to_thread.run_sync(save_keys, self._path, made)
        except OSError as error:
            message = f"Nothing was changed: {self._path} cannot be written ({error.strerror or error})."
            raise ApiError(503, "not_kept", message) from error
        log.info("%s", what)
        self._go_on_with(made)

    def _go_on_with(self, made: MadeKeys) -> None:
        self.made = made
        self._in_force_at = self._wall_clock()
        self._put_in_force(made, self._in_force_at)
        self.listeners()


def _key_from(table: Mapping[str, Any], before: Mapping[str, Any], key_hash: str, config: Config) -> Key:
    """Return the key that a request describes; missing fields stay as before. Raises ApiError 400."""
    for name in _NEVER_ASKED:
        if name in table:
            raise bad_request(f"{name} is for [[security.keys]]: the gateway makes this key itself.", param=name)
    asked = {name: value for name, value in table.items() if name not in _EXPIRY}
    described = {**before, **asked, "key_hash": None, "key_env": None}
    return attrs.evolve(read_key(described, config), key_hash=key_hash)


def _overlap(table: Mapping[str, Any]) -> float:
    """Return for how long the old secret of a key is accepted. Raises ApiError 400."""
    for name in table:
        if name != "overlap_s":
            raise bad_request(f"{name}: a rotation takes overlap_s alone; PATCH changes a key.", param=name)
    value = table.get("overlap_s", OVERLAP_S)
    if type(value) not in (int, float) or not 0 <= value <= OVERLAP_S_MAX:
        raise bad_request("overlap_s must be a number of seconds, 90 days at most; 0: none.", param="overlap_s")
    return value


def _expiry(table: Mapping[str, Any], before: float | None, now: float) -> float | None:
    """Return when a key will expire: as a request says, else as before. Raises ApiError 400."""
    given = [name for name in _EXPIRY if name in table]
    if not given:
        return before
    if len(given) > 1:
        raise bad_request(
            "expires_at and expires_in_s are two ways to set the same: leave one of them out.", param=given[1]
        )
    name, value = given[0], table[given[0]]
    if value is None:
        return None
    at = (now if name == "expires_in_s" else 0.0) + value if type(value) in (int, float) else now
    if not now < at <= now + EXPIRES_IN_S_MAX:
        meaning = "seconds from now" if name == "expires_in_s" else "seconds since 1970, later than now"
        raise bad_request(f"{name} must be a number of {meaning}, of 100 years at most, or null for never.", param=name)
    return round(at, 3)
