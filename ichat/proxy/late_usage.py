"""The tokens of responses that are made in the background: the key of each, until its worker reports the usage.

The gateway's request has a ticket, which only its worker can know. A report for a ticket counts once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ichat.errors import ApiError, bad_request
from ichat.fleet.fleet_view import TableView
from ichat.listeners import Listeners
from ichat.observability.request_record import UsedTokens
from ichat.protocol.usage import LateUsage, new_ticket
from ichat.routing.endpoint import Endpoint

WAITING_MAX = 10_000
"""At most this many responses in the background are known: the newest."""
OF_A_LIMITED_KEY_MAX = 64
"""A key with a limit of tokens may have at most this many at once, since these count only at their end."""


class Spender(NamedTuple):
    """The key, model and worker of a response in the background."""

    key_name: str
    model: str
    worker: str
    start_id: str
    """Of the worker: another start of it has no report of this response."""


class LateUsageBook:
    """Responses that are being made in the background. Purely synchronous."""

    def __init__(self, table: TableView) -> None:
        self._table = table
        self._spenders: dict[str, Spender] = {}
        """By ticket, the oldest first."""
        self._by_key: dict[str, int] = {}
        self.used: Listeners[[Spender, UsedTokens]] = Listeners()
        """Called with the tokens that a response has used."""

    def __repr__(self) -> str:
        return f"<LateUsageBook {len(self._spenders)}>"

    def is_full_for(self, key_name: str) -> bool:
        """Return whether a key has as many as it may have while its tokens are limited."""
        if self._by_key.get(key_name, 0) < OF_A_LIMITED_KEY_MAX:
            return False
        for ticket, spender in list(self._spenders.items()):
            if spender.key_name == key_name and self._start_of(spender.worker) != spender.start_id:
                self.forget(ticket)
        return self._by_key.get(key_name, 0) >= OF_A_LIMITED_KEY_MAX

    def begin(self, endpoint: Endpoint, key_name: str, model: str, *, is_limited: bool) -> str:
        """Return the ticket of a request to this endpoint; "" if the endpoint cannot report the usage later.

        Raises ApiError where tokens are limited: 400 where they could not be counted, 429 where too many are not yet.
        """
        if not endpoint.reports_late_usage:
            if is_limited:
                raise _uncounted(endpoint.upstream.name)
            return ""
        if is_limited and self.is_full_for(key_name):
            raise _too_many()
        return self.expect(key_name, model, endpoint.id.decode())

    def expect(self, key_name: str, model: str, worker: str) -> str:
        """Note a request that is about to be sent to this worker; return its ticket."""
        if len(self._spenders) >= WAITING_MAX:
            self.forget(next(iter(self._spenders)))
        ticket = new_ticket()
        self._spenders[ticket] = Spender(key_name, model, worker, self._start_of(worker))
        self._by_key[key_name] = self._by_key.get(key_name, 0) + 1
        return ticket

    def forget(self, ticket: str) -> Spender | None:
        """Expect nothing of a ticket any more; return its spender."""
        spender = self._spenders.pop(ticket, None)
        if spender is not None:
            self._by_key[spender.key_name] -= 1
            if not self._by_key[spender.key_name]:
                del self._by_key[spender.key_name]
        return spender

    def settle(self, worker: str, told: Sequence[LateUsage]) -> None:
        """Count a worker's reports; ignore tickets that it did not get from here, and repetitions."""
        for one in told:
            spender = self._spenders.get(one.ticket)
            if spender is not None and spender.worker == worker:
                self.forget(one.ticket)
                self.used(spender, UsedTokens(one.input, one.output, min(one.cached, one.input)))

    def _start_of(self, worker: str) -> str:
        known = self._table.get(worker)
        return known.heartbeat.start_id if known is not None and known.heartbeat is not None else ""


def _too_many() -> ApiError:
    sentence = f"A key with a limit of tokens may have {OF_A_LIMITED_KEY_MAX} responses in the background: wait."
    return ApiError(429, "overloaded", sentence, kind="rate_limit_error", retry_after_s=5)


def _uncounted(name: str) -> ApiError:
    """Return the error for a key with limited tokens, where this upstream counts none."""
    sentence = f"background must not be true for a key with a limit of tokens or a budget: {name} does not count them."
    return bad_request(sentence, param="background")
