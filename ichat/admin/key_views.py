"""Clients' keys as the control plane shows them. Times are in seconds since 1970."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import attrs
from attrs import frozen

from ichat.config.schema import Key
from ichat.protocol.messages import Count
from ichat.security.made_keys import MadeKey
from ichat.security.rate_limits import Quota


@frozen
class KeyLimits:
    """The limits of a key; null: no limit."""

    max_in_flight: Count | None = None
    """Requests under way at the same time."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    budget_per_month: float | None = None
    """In the currency of `[prices]`."""


@frozen
class KeyUsage:
    """The usage of a key now."""

    in_flight: Count
    """Requests under way."""
    requests_last_minute: Count | None
    """Null: the key has no such limit, so they are not counted here."""
    tokens_last_minute: Count | None
    """Null: as above."""
    tokens_today: Count | None = None
    tokens_this_month: Count | None = None
    cost_this_month: float | None = None
    """Their cost by `[prices]`. Null: the key has no such limit, and GET /v1/admin/usage has it."""


@frozen
class KeyView:
    """A client's key; the key itself is known to its owner alone."""

    name: str
    source: Literal["file", "api"]
    """Whether the configuration has it, or it was made over the API."""
    made_at: float | None
    """Null: it is in the configuration."""
    expires_at: float | None
    """From when on it is refused; null: never."""
    state: Literal["active", "expired"]
    models: Sequence[str] | None
    """The models that it may use; null: all."""
    metrics: bool
    """Whether it may read /metrics."""
    engine_control: bool
    """Whether it may send workers what steers their engines."""
    limits: KeyLimits
    usage_now: KeyUsage
    last_used_at: float | None
    """When its newest request was let in; null: it had none since the gateway's start."""
    old_secret_until: float | None
    """Until when the secret that it had before its rotation is accepted too; null: there is none."""


@frozen
class KeyList:
    """Clients' keys."""

    keys_needed: bool
    """Whether clients need a key: there are keys, or a key was made before."""
    keys: Sequence[KeyView]
    """Those of the configuration first, then those that were made over the API."""


@frozen
class NewKey(KeyView):
    """A key that was just made or rotated."""

    key: str
    """The key itself, for its owner: it is stored nowhere, and shown only here."""


@frozen
class WithdrawnKey:
    """A key that is not known any more."""

    name: str
    keys_left: Count
    """How many clients' keys there are still. With none left, all clients are refused until a key is made."""
    state: Literal["withdrawn"] = "withdrawn"


@frozen
class Moment:
    """A moment, by both clocks."""

    now: float
    """As `trio.current_time` has it."""
    time: float
    """In seconds since 1970."""


QuotaOf = Callable[[str], Quota | None]
"""Returns the quota of the key of a name."""
_LIMITS = [field.name for field in attrs.fields(KeyLimits)]


def view_of_key(key: Key, made: MadeKey | None, quota: Quota | None, at: Moment) -> KeyView:
    """Return a key as it is shown; `made` is None for one of the configuration."""
    used_at = None if quota is None else quota.used_at
    return KeyView(
        key.name,
        source="file" if made is None else "api",
        made_at=None if made is None else made.made_at,
        expires_at=None if made is None else made.expires_at,
        state="active" if made is None or made.is_active(at.time) else "expired",
        models=key.models,
        metrics=key.metrics,
        engine_control=key.engine_control,
        limits=KeyLimits(**{name: getattr(key, name) for name in _LIMITS}),
        usage_now=_usage_of(key, quota, at),
        last_used_at=None if used_at is None else round(at.time - (at.now - used_at), 3),
        old_secret_until=None if made is None or (old := made.old_at(at.time)) is None else old.until,
    )


def _usage_of(key: Key, quota: Quota | None, at: Moment) -> KeyUsage:
    if quota is None:
        return KeyUsage(0, None, None)
    standings = [] if quota.spending is None else quota.spending.standings(key)
    spent = {one.limit: one.used for one in standings}
    return KeyUsage(
        quota.in_flight,
        requests_last_minute=None if key.requests_per_minute is None else quota.requests.sum(at.now),
        tokens_last_minute=None if key.tokens_per_minute is None else quota.tokens.sum(at.now),
        tokens_today=_whole(spent.get("tokens_per_day")),
        tokens_this_month=_whole(spent.get("tokens_per_month")),
        cost_this_month=spent.get("budget_per_month"),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def with_secret(view: KeyView, secret: str) -> NewKey:
    """Return the view of a key that was just made or rotated, with the key itself."""
    return NewKey(**attrs.asdict(view, recurse=False), key=secret)


def views_of_keys(
    configured: Sequence[Key], made: Sequence[MadeKey], quota_of: QuotaOf, at: Moment
) -> Iterator[KeyView]:
    """Yield all keys as they are shown."""
    for key in configured:
        yield view_of_key(key, None, quota_of(key.name), at)
    for one in made:
        yield view_of_key(one.key, one, quota_of(one.key.name), at)
