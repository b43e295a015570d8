"""The grant of a request: the rights of its caller, and its reservation within the limits. Purely synchronous."""

import attrs

from ichat.security.auth import Auth, Caller
from ichat.security.rate_limits import QuotaRefusal, QuotaReservation, Quotas

_HAVE_KEYS = frozenset(("data", "admin", "worker", "own"))
"""The kinds of callers that have sent a key of this gateway."""


@attrs.define(eq=False)
class Grant:
    """The sender of a request and its permissions. It is made once; `close` ends it."""

    key_name: str
    """The name of the client's key; empty if it has none."""
    fairness_key: str
    """The owner of the queue share that the request uses."""
    may_steer: bool
    """Whether workers get from this caller what steers their engines."""
    hides_keys: bool
    """Whether the request's headers may have a key that is for this gateway."""
    _reservation: QuotaReservation | None = None

    @property
    def bounds_tokens(self) -> bool:
        """Whether a limit of tokens or a budget holds for the request."""
        return self._reservation is not None and self._reservation.bounds_tokens

    def close(self, tokens: int, now: float) -> None:
        """End the request's reservation, and count the tokens that it used; harmless the second time."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release(tokens, now)


NO_GRANT = Grant("", "", may_steer=False, hides_keys=True)
"""The grant of a request that has none yet."""


def grant_of(auth: Auth, caller: Caller, reservation: QuotaReservation | None = None) -> Grant:
    """Return the grant of a caller. There is no reservation where no limit counts: for the control plane."""
    key, hides_keys = caller.key, auth.has_keys or caller.kind in _HAVE_KEYS
    may_steer = auth.is_operator(caller) if key is None else key.engine_control
    return Grant(caller.key_name, caller.fairness_key, may_steer, hides_keys, reservation)


def admit(
    auth: Auth, quotas: Quotas, caller: Caller, now: float, *, model: str = "", name: str = ""
) -> Grant | QuotaRefusal:
    """Return the grant of a request, which counts for the caller's limits from now on, or the limit that refuses it.

    `model` is the requested model, `name` is the pattern that matches it; both are empty for a request about a
    kept response. Raises ApiError 403 if the caller's key is not for the model.
    """
    key = caller.key
    if model and key is not None and key.models is not None:
        auth.check_model(caller, model, name)
    reservation = quotas.acquire(caller.key_name, now)
    return reservation if isinstance(reservation, QuotaRefusal) else grant_of(auth, caller, reservation)
