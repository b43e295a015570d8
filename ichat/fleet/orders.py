"""Orders for workers that other machines run: which order a code is for, and which keys count. Pure values.

An order waits until its code is used, then its worker has a key, and at its end its code and its key are dead. The
table of a dead order is forgotten. Its hashes stay for a while: an old code or key is refused with the reason.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from ichat.security.addresses import Networks
from ichat.security.keys import hash_of, new_key

LIVE_MAX = 1000
"""The most orders that wait or have a worker."""
ENDED_MAX = 1000
"""The ended orders that are remembered."""
AGAIN_S = 60.0
"""How long the process that has fetched an order gets the same answer again, in seconds: an answer may be lost."""
VALID_S, VALID_S_MAX = 3600.0, 30 * 24 * 3600.0
"""How long a code can be used that no process has used yet, in seconds: usually, and at most."""

Fate = Literal["first", "again", "used", "late", "early", "elsewhere"]
"""What becomes of a request for an order, by its code: the order, for the `first` time or `again`, or no order.

After `early` (no sender is admitted yet) and `elsewhere` (another sender is) the code is as good as before.
"""


@attrs.frozen
class OrderPlace:
    """The place where the worker of an order is started, as far as its launcher knows it."""

    senders: list[str] | None = None
    """The addresses and networks from which the order may be fetched; None: from anywhere; empty: from nowhere yet."""
    address: str = ""
    """The machine's own address, by which others reach it; "": the worker finds it."""
    ports: str = ""
    """The range of ports on which the worker may listen; "": the port in its table, or any."""
    ends_with_parent: bool = False
    """Whether the worker ends with the program that has started its guard, also if that program ignores hang-ups."""


ANYWHERE = OrderPlace()


@attrs.frozen
class RemoteOrder:
    """An order for a worker on another machine. Times are in seconds since 1970."""

    worker_id: str
    launch: int
    """Higher than that of any earlier order."""
    table: dict[str, Any]
    """The worker's keys of `[[managed_workers]]`; empty after its end."""
    code_hash: str
    made_at: float
    expires_at: float
    """Until then the code can be used for the first time."""
    start_id: str = attrs.field(default="", repr=False)
    """Identifies the process that has fetched the order; empty: no process has."""
    fetched_at: float = 0.0
    fetched_from: str = ""
    """The address from which the order was fetched."""
    key: str = attrs.field(default="", repr=False)
    """The worker's; empty before the order is fetched, and after its end."""
    key_hash: str = ""
    end_at: float | None = None
    """When the worker must end, by an operator's wish; None: not at all."""
    place: OrderPlace = ANYWHERE
    is_managed: bool = False
    """Whether the gateway itself launches the worker, starts it again and ends it."""
    ended: str = ""
    """How it has ended, in a few words after the worker's name; empty: it has not."""

    def is_overdue(self, now: float) -> bool:
        """Return whether its code can no longer be used, and has never been."""
        return not self.fetched_at and now > self.expires_at

    def fate(self, start_id: str, address: str, now: float) -> Fate:
        """Return what becomes of a request for this order by a process, sent from an address."""
        if self.ended or self.is_overdue(now):
            return "late"
        if not self.start_id:
            senders = self.place.senders
            is_admitted = senders is None or address in Networks(senders)
            return "first" if is_admitted else "elsewhere" if senders else "early"
        is_same = secrets.compare_digest(self.start_id.encode(), start_id.encode())
        return "again" if is_same and now <= self.fetched_at + AGAIN_S else "used"


@attrs.frozen
class Orders:
    """All orders, by the numbers of their launches; a change returns other orders."""

    by_launch: Mapping[int, RemoteOrder] = attrs.field(factory=dict[int, RemoteOrder])
    newest: int = 0
    """The number of the newest launch."""

    def live(self, worker_id: str) -> RemoteOrder | None:
        """Return the order of a worker that has not ended."""
        found = (one for one in self.by_launch.values() if one.worker_id == worker_id and not one.ended)
        return next(found, None)

    def of_managed(self) -> list[RemoteOrder]:
        """Return the orders of managed workers that have not ended."""
        return [one for one in self.by_launch.values() if one.is_managed and not one.ended]

    def is_full(self, now: float) -> bool:
        """Return whether there can be no further order; overdue orders do not count."""
        live = sum(not one.ended and not one.is_overdue(now) for one in self.by_launch.values())
        return live >= LIVE_MAX

    def find(self, code: str) -> RemoteOrder | None:
        """Return the order that a code is for."""
        code_hash = hash_of(code)
        return next((one for one in self.by_launch.values() if one.code_hash == code_hash), None)

    def with_new(
        self,
        worker_id: str,
        table: Mapping[str, Any],
        now: float,
        valid_s: float,
        place: OrderPlace = ANYWHERE,
        *,
        is_managed: bool = False,
    ) -> tuple["Orders", RemoteOrder, str]:
        """Return the orders with a new order, the order, and its code. An earlier order of the worker ends by it."""
        code, before = f"order-{secrets.token_urlsafe(32)}", self.live(worker_id)
        orders = self if before is None else self.with_end(before.launch, "was replaced by another order")
        order = RemoteOrder(
            worker_id, self.newest + 1, {**table}, hash_of(code), now, now + valid_s, place=place, is_managed=is_managed
        )
        return orders.with_changed(order), order, code

    def with_fetched(self, order: RemoteOrder, start_id: str, address: str, now: float) -> tuple["Orders", RemoteOrder]:
        """Return the orders in which a process has fetched an order, and this order with the key of its worker."""
        key = new_key()
        fetched = attrs.evolve(
            order, start_id=start_id, fetched_at=now, fetched_from=address, key=key, key_hash=hash_of(key)
        )
        return self.with_changed(fetched), fetched

    def with_end(self, launch: int, how: str) -> "Orders":
        """Return the orders after the end of a launch: its code and its key are dead."""
        order = self.by_launch[launch]
        return self.with_changed(attrs.evolve(order, ended=how, table={}, key="", start_id=""))

    def with_changed(self, order: RemoteOrder) -> "Orders":
        """Return the orders with a new or changed order; of too many ended orders the oldest are left out."""
        found = {**self.by_launch, order.launch: order}
        ended = sorted(one.launch for one in found.values() if one.ended)
        for launch in ended[: max(0, len(ended) - ENDED_MAX)]:
            del found[launch]
        return Orders(found, max(self.newest, order.launch))
