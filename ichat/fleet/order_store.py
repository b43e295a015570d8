"""Owns the orders for workers on other machines: gives them out, knows their workers' keys, and records their ends.

Each change is on the disk before it is answered: an order goes to a single process, also across a gateway's crash.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import attrs
import trio

from ichat import errors
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.order_file import save_orders
from ichat.fleet.orders import ANYWHERE, LIVE_MAX, Fate, OrderPlace, Orders, RemoteOrder
from ichat.fleet.registered_servers import id_for
from ichat.fleet.worker_calls import end_worker
from ichat.fleet.worker_facts import WorkerEnd
from ichat.http.parties import party_of
from ichat.listeners import Listeners
from ichat.protocol.json_text import parsed
from ichat.protocol.orders import REPORT_BYTES_MAX, LaunchEnd, WorkerOrder, parse_end, parse_order_request
from ichat.security.auth import Caller
from ichat.security.keys import proof_of
from ichat.security.rate_limits import Window
from ichat.security.worker_keys import WorkerKey

log = logging.getLogger(__name__)

WRONG_CODES_MAX = 10
"""How many wrong codes an address may send in a minute."""
ADDRESSES_MAX = 4096
"""How many addresses with wrong codes are remembered."""
_LIMITS = ("head_bytes_max", "body_bytes_max", "connections_max")
_TIMEOUTS = ("client_stall_s", "stop_s", "orphan_after_s")
_ANSWER = b'{"status": "ok"}'


class WrongCodes:
    """The wrong codes of the last minute, by the addresses that have sent them."""

    def __init__(self) -> None:
        self._by_address: dict[str, Window] = {}

    def __repr__(self) -> str:
        return f"<WrongCodes of {len(self._by_address)} addresses>"

    def may_ask(self, address: str, now: float) -> bool:
        """Return whether an address may send another code."""
        window = self._by_address.get(address)
        return window is None or window.sum(now) < WRONG_CODES_MAX

    def count(self, address: str, now: float) -> None:
        """Count a wrong code."""
        if address not in self._by_address and len(self._by_address) >= ADDRESSES_MAX:
            del self._by_address[next(iter(self._by_address))]
        self._by_address.setdefault(address, Window()).add(1, now)


class OrderStore:
    """Holds the orders."""

    def __init__(
        self,
        path: str,
        orders: Orders,
        fleet: Fleet,
        config: Config,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`path` is that of the file with the orders."""
        self._path = path
        self._table = fleet.table
        self._managed = fleet.managed
        self._config = config
        self._wall_clock = wall_clock
        self._wrong = WrongCodes()
        self.lock = trio.Lock()
        """Held while the orders change."""
        self.changed: Listeners[[]] = Listeners()
        """Called when an order is new, was fetched, or has ended."""
        self.reported: Listeners[[LaunchEnd]] = Listeners()
        """Called with a guard's report of the end of a managed worker's launch."""
        self._use(orders)

    def __repr__(self) -> str:
        return f"<OrderStore {len(self.orders.by_launch)} orders>"

    def reconfigure(self, config: Config) -> None:
        """Use the bounds of another configuration in later answers."""
        self._config = config

    def _use(self, orders: Orders) -> None:
        self.orders = orders
        keys = [one for one in orders.by_launch.values() if one.key_hash]
        self._by_key = {bytes.fromhex(one.key_hash.partition(":")[2]): one for one in keys}
        self._proofs = {one.worker_id: proof_of(one.key.encode()) for one in keys if one.key}
        self.changed()

    # What others ask.

    def key_of(self, digest: bytes) -> WorkerKey | None:
        """Return the owner of the key with this digest; None if it is no worker's."""
        order = self._by_key.get(digest)
        if order is None:
            return None
        is_due = order.end_at is not None and self._wall_clock() >= order.end_at
        return WorkerKey(order.worker_id, order.launch, bool(order.ended), is_due)

    def proof_of(self, worker_id: str) -> bytes:
        """Return the proof to a worker with a key of its own that its gateway asks; empty for all other workers."""
        return self._proofs.get(worker_id, b"")

    def is_heard(self, worker_id: str) -> bool:
        """Return whether a worker sends heartbeats."""
        worker = self._table.get(worker_id)
        return worker is not None and worker.is_heard(trio.current_time())

    def has_left(self, worker_id: str, for_s: float) -> bool:
        """Return whether a worker's newest heartbeat was its good-bye, at least `for_s` ago."""
        worker = self._table.get(worker_id)
        if worker is None or worker.heartbeat is None or worker.heartbeat.state != "gone":
            return False
        return trio.current_time() >= worker.heartbeat_at + for_s

    def _is_ordered(self, worker_id: str) -> bool:
        return any(one.worker_id == worker_id for one in self.orders.by_launch.values())

    # Operators.

    async def make(
        self, spec: ManagedWorkerConfig, worker_id: str, valid_s: float, place: OrderPlace = ANYWHERE
    ) -> tuple[RemoteOrder, str]:
        """Make an order for a worker; return it, and its code, stored nowhere.

        `worker_id` is "" for a new worker; an earlier order of that worker ends. Raises ApiError 409 or 503.
        """
        async with self.lock:
            now = self._wall_clock()
            if self.orders.is_full(now):
                message = f"There are {LIVE_MAX} orders already: end workers on other machines (`ichat.pyz stop ID`)."
                raise ApiError(409, "too_many_orders", message)
            known = self._table.get(worker_id)
            if known is not None and (known.managed or not self._is_ordered(worker_id)):
                message = f"The id {worker_id} belongs to a worker that no order has started: choose another id."
                raise ApiError(409, "worker_exists", message)
            taken = {one.worker_id for one in self.orders.by_launch.values()} | {one.id for one in self._table}
            name = worker_id or id_for(f"{spec.model_name}-order", taken)
            orders, order, code = self.orders.with_new(name, _table_of(spec), now, valid_s, place)
            await self._change(orders)
        log.info("worker %s was ordered for another machine (launch %d)", name, order.launch)
        return order, code

    async def make_managed(
        self, worker_id: str, spec: ManagedWorkerConfig, valid_s: float, place: OrderPlace
    ) -> tuple[RemoteOrder, str]:
        """Make the order of a managed worker's launch; return it, and its code. Raises ApiError 503."""
        async with self.lock:
            now, table = self._wall_clock(), _table_of(spec)
            orders, order, code = self.orders.with_new(worker_id, table, now, valid_s, place, is_managed=True)
            await self._change(orders)
        return order, code

    async def ask_to_end(self, order: RemoteOrder) -> None:
        """Have the worker of an order end, by a request, or else by its next heartbeat. Raises ApiError 503."""
        await self._end_at(order.launch, self._wall_clock())
        if (worker := self._table.get(order.worker_id)) is not None:
            await end_worker(worker, self.proof_of(order.worker_id))

    async def finish(self, launch: int, how: str) -> None:
        """Have the code and the key of a launch be dead, if they are not. Raises ApiError 503."""
        async with self.lock:
            order = self.orders.by_launch.get(launch)
            if order is not None and not order.ended:
                await self._change(self.orders.with_end(launch, how))

    async def set_place(self, launch: int, place: OrderPlace) -> None:
        """Set the place of an order that no process has fetched yet; later calls change nothing. Raises ApiError 503.

        Senders that were admitted nowhere before are then answered at their next try.
        """
        async with self.lock:
            order = self.orders.by_launch.get(launch)
            if order is not None and not (order.start_id or order.ended):
                await self._change(self.orders.with_changed(attrs.evolve(order, place=place)))

    async def end(self, worker_id: str, drain_s: float) -> bool:
        """End a worker that an order has started, or withdraw its order; return whether there was any.

        It gets no further requests. Once its requests have ended, `drain_s` at most, it drains and ends; if it does not
        answer, it ends at its next heartbeat. Raises ApiError 503.
        """
        order, worker = self.orders.live(worker_id), self._table.get(worker_id)
        if worker is not None and worker.managed:
            return False
        if order is None:
            is_left = worker is not None and worker.is_down and self._is_ordered(worker_id)
            if worker is not None and is_left:
                self._table.remove(worker)
            return is_left
        endpoint = None if worker is None else self._table.endpoint_of(worker)
        if worker is not None and endpoint is not None and order.key:
            await self._end_at(order.launch, self._wall_clock() + drain_s)
            self._managed.drain(worker)
            with trio.move_on_after(drain_s):
                while endpoint.in_flight:
                    await endpoint.idle.wait()
            await self.ask_to_end(order)
            with trio.move_on_after(self._config.timeouts.stop_s):
                while self._table.get(worker_id) is worker and not worker.is_down:
                    await self._table.changed.wait()
        await self.finish(order.launch, "was stopped")
        if worker is not None:
            self._table.remove(worker)
        return True

    async def _end_at(self, launch: int, at: float) -> None:
        async with self.lock:
            order = self.orders.by_launch[launch]
            await self._change(self.orders.with_changed(attrs.evolve(order, end_at=at)))

    # Workers' guards.

    async def fetch(self, body: bytes | bytearray, caller: Caller) -> bytes:
        """Return the order that the request's code is for. Raises ApiError: 400, 403, 409, 410, 429, 503."""
        request, party = parse_order_request(_read(body)), party_of(caller.address)
        if not self._wrong.may_ask(party, trio.current_time()):
            message = f"{WRONG_CODES_MAX} wrong codes were sent from {caller.address} within a minute: wait a minute."
            raise ApiError(429, "rate_limited", message, retry_after_s=60)
        async with self.lock:
            order, now = self.orders.find(request.code), self._wall_clock()
            if order is None:
                self._wrong.count(party, trio.current_time())
                log.warning("a wrong code for an order was sent from %s", caller.address or "a unix socket")
                raise errors.forbidden("This code is for no order of this gateway: make another (`ichat.pyz order`).")
            fate = order.fate(request.start_id, caller.address, now)
            if fate == "first":
                orders, order = self.orders.with_fetched(order, request.start_id, caller.address, now)
                await self._change(orders)
                log.info("the order of worker %s was fetched from %s", order.worker_id, caller.address)
            elif fate != "again":
                if fate == "elsewhere":
                    self._wrong.count(party, trio.current_time())
                raise _refusal(order, fate, caller.address, now)
        return json.dumps(attrs.asdict(self._answer(order))).encode()

    def _answer(self, order: RemoteOrder) -> WorkerOrder:
        limits, timeouts = self._config.limits, self._config.timeouts
        return WorkerOrder(
            order.worker_id,
            order.launch,
            order.key,
            order.table,
            {name: getattr(limits, name) for name in _LIMITS},
            {name: getattr(timeouts, name) for name in _TIMEOUTS},
            order.place.address,
            order.place.ports,
            order.place.ends_with_parent,
        )

    async def report_end(self, body: bytes | bytearray, caller: Caller) -> bytes:
        """Record how a launch has ended, by its guard's report. Raises ApiError: 400, 403, 503."""
        if len(body) > REPORT_BYTES_MAX:
            raise errors.request_too_large(REPORT_BYTES_MAX)
        end, key = parse_end(_read(body)), caller.worker
        if key is None or (key.worker_id, key.launch) != (end.worker_id, end.launch):
            raise errors.forbidden(f"This key is not that of launch {end.launch} of worker {end.worker_id}.")
        await self.finish(end.launch, f"{end.why}: {end.cause}" if end.cause else end.why)
        self._show(end)
        return _ANSWER

    def _show(self, end: LaunchEnd) -> None:
        """Show operators a worker that has failed; forget it after another end."""
        level = logging.ERROR if end.is_failure else logging.INFO
        log.log(
            level, "worker %s on another machine %s%s", end.worker_id, end.why, f": {end.cause}" if end.cause else ""
        )
        worker = self._table.get(end.worker_id)
        if worker is None:
            return
        if worker.managed:
            self.reported(end)
            return
        if not end.is_failure:
            self._table.remove(worker)
            return
        found = WorkerEnd(
            end.why, self._wall_clock(), exit_code=end.exit_code, signal=end.signal, oom_killed=end.oom_killed,
            cause=end.cause, last_lines=end.last_lines,
        )  # fmt: skip
        self._table.fail(worker, found)

    async def _change(self, orders: Orders) -> None:
        """Keep other orders, and use them. Raises ApiError 503, and nothing has changed then."""
        with trio.CancelScope(shield=True):
            try:
                await trio.to_thread.run_sync(save_orders, self._path, orders)
            except OSError as error:
                message = f"Nothing was changed: {self._path} cannot be written ({error.strerror or error})."
                raise ApiError(503, "not_kept", message) from error
        self._use(orders)


def _table_of(spec: ManagedWorkerConfig) -> dict[str, Any]:
    """Return a worker's keys of `[[managed_workers]]`, without defaults: an older guard knows fewer keys."""
    usual = attrs.asdict(ManagedWorkerConfig(spec.model_name, spec.model_path))
    required = {"model_name", "model_path"}
    return {name: value for name, value in attrs.asdict(spec).items() if name in required or value != usual[name]}


def _refusal(order: RemoteOrder, fate: Fate, address: str, now: float) -> ApiError:
    """Return the error for a code that is not accepted now."""
    if fate == "early":
        message = f"The place of worker {order.worker_id} is not known yet: ask again."
        return ApiError(503, "not_placed", message, retry_after_s=1)
    if fate == "elsewhere":
        log.warning("the code of worker %s was sent from the wrong address %s", order.worker_id, address)
        return errors.forbidden(f"Worker {order.worker_id} is started elsewhere, and not at {address}.")
    log.warning("the code of worker %s was sent again from %s", order.worker_id, address)
    if fate == "used":
        seconds = f"{now - order.fetched_at:.0f} s ago"
        message = f"This code was used {seconds} from {order.fetched_from}: make another order (`ichat.pyz order`)."
        return ApiError(409, "code_used", message, retry=False)
    message = f"The order of worker {order.worker_id} is no longer valid: make another (`ichat.pyz order`)."
    return ApiError(410, "order_ended", message, retry=False)


def _read(body: bytes | bytearray) -> object:
    try:
        return parsed(body)
    except (ValueError, RecursionError) as error:
        raise errors.bad_request("The body is not JSON.") from error
