"""Clients' keys that were made over the API: which of them are in force, and until when. Purely synchronous.

The configuration's own keys have precedence: a made key with the name or the hash of one of them contradicts it.
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from ichat.config.schema import Config, Key
from ichat.config.usage import contradictions_of_limits
from ichat.errors import ApiError
from ichat.security.auth import ClientKey

DAY_S = 24 * 3600.0
EXPIRED_KEPT_S = 30 * DAY_S
"""How long a key that has expired is still listed, and its name reserved."""
SHORT_EXPIRED_KEPT_S = DAY_S
"""The same for a key that was valid for less than a day: a console makes a key for each hour."""
_DEFAULTS = {field.name: field.default for field in attrs.fields(Key)}


def _digest_in(key_hash: str | None) -> bytes:
    return bytes.fromhex((key_hash or "").partition(":")[2])


def _digest_of(one: "MadeKey") -> bytes:
    return _digest_in(one.key.key_hash)


def _client_of(one: "MadeKey") -> ClientKey:
    models = None if one.key.models is None else frozenset(one.key.models)
    return ClientKey(one.key.name, models, one.key.metrics, one.key.engine_control)


@attrs.frozen
class OldSecret:
    """The secret that a key had before it was rotated."""

    key_hash: str
    until: float
    """It is refused from this time on, in seconds since 1970."""


@attrs.frozen
class MadeKey:
    """A key that was made over the API. Times are in seconds since 1970."""

    key: Key
    """Its name, its hash, and its permissions, as `[[security.keys]]` would have them."""
    made_at: float
    expires_at: float | None = None
    """It is refused from this time on; None: never."""
    old: OldSecret | None = None
    """The old secret that its owner may send instead, for as long as an overlap lasts."""
    digest: bytes = attrs.field(init=False, eq=False, repr=False, default=attrs.Factory(_digest_of, takes_self=True))
    client: ClientKey = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(_client_of, takes_self=True)
    )
    """The identity of a caller that sends it."""

    def is_active(self, now: float) -> bool:
        """Return whether it has not expired."""
        return self.expires_at is None or now < self.expires_at

    def digests(self, now: float) -> list[bytes]:
        """Return the digests by which it is known: none if it has expired, two during an overlap."""
        if not self.is_active(now):
            return []
        old = self.old_at(now)
        return [self.digest] if old is None else [self.digest, _digest_in(old.key_hash)]

    def old_at(self, now: float) -> OldSecret | None:
        """Return its old secret, if that is still accepted."""
        return self.old if self.old is not None and now < self.old.until and self.is_active(now) else None

    @property
    def ends(self) -> list[float]:
        """When the key and its old secret begin to be refused, as far as they will."""
        return [at for at in (self.expires_at, self.old.until if self.old is not None else None) if at is not None]

    def is_listed(self, now: float) -> bool:
        """Return whether it is active, or has not expired long ago."""
        if self.expires_at is None:
            return True
        is_short = self.expires_at - self.made_at < DAY_S
        return now < self.expires_at + (SHORT_EXPIRED_KEPT_S if is_short else EXPIRED_KEPT_S)

    @functools.cached_property
    def line(self) -> str:
        """Its line in the file of keys; thousands of keys are written whenever a key changes."""
        fields = attrs.asdict(self.key).items()
        table = {name: value for name, value in fields if value != _DEFAULTS[name]}
        old = {} if self.old is None else {"old": attrs.asdict(self.old)}
        return json.dumps({**table, "made_at": self.made_at, "expires_at": self.expires_at, **old})


@attrs.frozen
class MadeKeys:
    """All of them."""

    by_name: Mapping[str, MadeKey] = attrs.Factory(dict[str, MadeKey])
    is_used: bool = False
    """Whether there ever was a key. Clients need a key from then on: the end of the last key opens nothing."""

    def __repr__(self) -> str:
        return f"<MadeKeys {len(self.by_name)}>"

    def active(self, now: float) -> dict[bytes, ClientKey]:
        """Return those that are in force, by their digests."""
        return {digest: one.client for one in self.by_name.values() for digest in one.digests(now)}

    def next_expiry(self, now: float) -> float:
        """Return when the next of them, or of their old secrets, expires; infinity: none will."""
        return min((at for one in self.by_name.values() for at in one.ends if at > now), default=math.inf)

    def with_key(self, one: MadeKey) -> "MadeKeys":
        """Return these and another key, which replaces a key of the same name."""
        return MadeKeys({**self.by_name, one.key.name: one}, is_used=True)

    def without_key(self, name: str) -> "MadeKeys":
        """Return these but the key of this name."""
        return MadeKeys({key: one for key, one in self.by_name.items() if key != name}, self.is_used)

    def without_forgotten(self, now: float) -> "MadeKeys":
        """Return these but those that expired long ago."""
        kept = {name: one for name, one in self.by_name.items() if one.is_listed(now)}
        return MadeKeys(kept, self.is_used)

    def merged_with(self, config: Config) -> Config:
        """Return the configuration with these beside its own keys, also those that have expired.

        The use of a key is counted by its name, and stays counted when it is given more time.
        """
        keys = [*config.security.keys, *(one.key for one in self.by_name.values())]
        return attrs.evolve(config, security=attrs.evolve(config.security, keys=keys))

    def contradictions(self, config: Config, now: float) -> Iterator[str]:
        """Yield what keeps a configuration from being in force beside these keys at this time."""
        for index, name, what in self._taken_by(config):
            yield (
                f"security.keys[{index}].{what}: is that of {name!r}, a key made over the API: choose another, or"
                f" withdraw that key first (`./ichat.pyz keys withdraw {name}`)"
            )
        for problems in self._wrong_limits(config, now).values():
            yield from problems

    def at_start(self, config: Config, now: float) -> tuple["MadeKeys", Sequence[str]]:
        """Return these as they can be in force when a gateway starts, and the changes for that, in sentences.

        The configuration wins, since there is no gateway yet that could withdraw a key. It replaces a key of
        the same name or hash, and a key with a limit that cannot be kept has expired.
        """
        taken = {name: f"security.keys[{index}] has its {what}" for index, name, what in self._taken_by(config)}
        wrong = self._wrong_limits(config, now)
        kept = {
            name: attrs.evolve(one, expires_at=now) if name in wrong else one
            for name, one in self.by_name.items()
            if name not in taken
        }
        left = "is left out, and forgotten with the next change of a key"
        said = [f"the made key {name} {left}: {why}" for name, why in taken.items()]
        said += [f"{'; '.join(why)}: the key has expired until it is changed" for why in wrong.values()]
        return MadeKeys(kept, self.is_used), said

    def _taken_by(self, config: Config) -> Iterator[tuple[int, str, str]]:
        """Yield which configured keys have the name or the hash of a made key, with its name and which of both."""
        hashes = {one.old.key_hash: name for name, one in self.by_name.items() if one.old is not None}
        hashes |= {one.key.key_hash or "": name for name, one in self.by_name.items()}
        for index, key in enumerate(config.security.keys):
            if key.name in self.by_name:
                yield index, key.name, "name"
            if key.key_hash in hashes:
                yield index, hashes[key.key_hash], "key_hash"

    def _wrong_limits(self, config: Config, now: float) -> Mapping[str, Sequence[str]]:
        """Return the errors in the limits of active keys, by their names."""
        found = {
            name: list(contradictions_of_limits(f"the made key {name}", one.key, config.usage, config.prices))
            for name, one in self.by_name.items()
            if one.is_active(now)
        }
        return {name: problems for name, problems in found.items() if problems}


NO_KEYS = MadeKeys()
"""None was ever made."""


def check_new_name(name: str, configured: Iterable[Key], made: MadeKeys) -> None:
    """Raise ApiError 409 where no key of this name can be made, as it exists."""
    if name in made.by_name:
        raise ApiError(409, "key_exists", f"There is a key {name} already: withdraw it first, or choose another name.")
    if any(key.name == name for key in configured):
        raise ApiError(409, "key_exists", f"The configuration has a key {name} already: choose another name.")


def changeable_key(name: str, configured: Iterable[Key], made: MadeKeys) -> MadeKey:
    """Return the made key of this name. Raises ApiError: 409 for one of the configuration, 404 for one of neither."""
    found = made.by_name.get(name)
    if found is not None:
        return found
    if any(key.name == name for key in configured):
        raise ApiError(
            409,
            "configured_key",
            f"The key {name} is in the gateway's configuration ([[security.keys]]): change it there, and reload.",
        )
    raise ApiError(404, "not_found", f"There is no key {name}.")
