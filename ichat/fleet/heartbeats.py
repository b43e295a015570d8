"""Heartbeats as the gateway receives them: over its port, and over the control plane's socket from managed workers.

A whole heartbeat is read and checked in full if its registration is not that of the worker's last heartbeat.
"""

import contextlib
import hashlib
import json
import marshal
from collections.abc import Mapping, Sequence
from typing import cast

import attrs
import trio

from ichat import errors
from ichat.config.schema import Config, Limits
from ichat.errors import ApiError
from ichat.fleet.registry import Registry
from ichat.fleet.worker_facts import Registration
from ichat.fleet.worker_record import AWAY, WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.http.parties import party_of
from ichat.listeners import Listeners
from ichat.protocol.json_text import parsed
from ichat.protocol.messages import (
    HEARTBEAT_INTERVAL_MAX_S,
    STATUS,
    Heartbeat,
    HeartbeatResponse,
    ShortHeartbeat,
    parse_heartbeat,
    parse_short_heartbeat,
)
from ichat.protocol.usage import LateUsage
from ichat.routing.availability import TooManyWorkers, TooMuchRegistered
from ichat.security.auth import Auth, Caller
from ichat.security.lookups import HOST_CHECK_S, HostLookups

HEARTBEAT_BYTES_MAX = 768 * 1024
"""The largest body of a heartbeat that arrives over the gateway's port."""
LARGE_BYTES = 64 * 1024
"""Larger heartbeats are read and recorded singly, in steps."""
REST_RATIO = 5
"""After a step with a large heartbeat follows a rest of this many times its duration."""
_NO_TURN = contextlib.nullcontext()
_STATUS = frozenset(STATUS)


class _Turn:
    """Lets a single task at a time do a long step, and then rests, so that requests are handled in between."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._began_at = self._rests_until = float("-inf")

    def __repr__(self) -> str:
        return f"<_Turn {self._lock!r}>"

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        is_taken = False
        try:
            await trio.sleep_until(self._rests_until)
            is_taken = True
        finally:
            if not is_taken:
                self._lock.release()
        self._began_at = trio.current_time()

    async def __aexit__(self, *_: object) -> None:
        now = trio.current_time()
        self._rests_until = now + REST_RATIO * (now - self._began_at)
        self._lock.release()


class HeartbeatReceiver:
    """Checks heartbeats, records them, and makes their responses."""

    def __init__(
        self,
        registry: Registry,
        table: WorkerTable,
        auth: Auth,
        limits: Limits,
        *,
        gateway_id: str,
    ) -> None:
        """`auth` has the rules of access in force; `gateway_id` is different at each start of the gateway."""
        self._registry = registry
        self._table = table
        self._auth = auth
        self._per_second_max = limits.heartbeats_per_second_max
        self.gateway_id = gateway_id
        self._lookups = HostLookups()
        self._turn = _Turn()
        """Held for each step with a large heartbeat."""
        self.moved: Listeners[[]] = Listeners()
        """Called when a worker is new, was started again, or is reached elsewhere."""
        self.used_late: Listeners[[str, Sequence[LateUsage]]] = Listeners()
        """Called with a worker's id and its report on responses that were made in the background."""

    def __repr__(self) -> str:
        return f"<HeartbeatReceiver of {self._table!r}>"

    def reconfigure(self, config: Config) -> None:
        """Use the bound of another configuration from now on."""
        self._per_second_max = config.limits.heartbeats_per_second_max

    async def receive(self, body: bytes | bytearray, caller: Caller) -> bytes:
        """Record the heartbeat in the body of a request, and return the response's. Raises ApiError.

        The access rules of its route have let the caller join.
        """
        turn = self._turn if len(body) > LARGE_BYTES else _NO_TURN
        async with turn:
            sent = _read(body)
        is_short = "registration" in sent and "host" not in sent
        digest = None if is_short else _digest_of(sent)
        worker = self._registered(sent, digest, is_short=is_short)
        if worker is not None:
            status = parse_short_heartbeat({"registration": "", **sent})  # whole heartbeats need not have it
            return self._record(await self._with_status(worker, status, caller), caller)
        if is_short:
            raise errors.registration_not_found(parse_short_heartbeat(sent).worker_id)
        async with turn:
            whole = parse_heartbeat(sent)
        self._check_port(whole)
        registration = Registration(
            digest, whole.registration, whole.heartbeat_interval, whole.host, self._sender(caller), trio.current_time()
        )
        heartbeat = attrs.evolve(
            whole,
            host=await self._checked_host(whole.host, caller),
            heartbeat_interval=self._interval_of(whole, whole.heartbeat_interval),
        )
        async with turn:
            self._check_id(heartbeat, caller)
            return self._record(heartbeat, caller, registration)

    def _registered(self, sent: Mapping[str, object], digest: bytes | None, *, is_short: bool) -> WorkerRecord | None:
        """Return the sender of a heartbeat, if its registration is unchanged."""
        worker_id = sent.get("worker_id")
        worker = self._table.get(worker_id) if isinstance(worker_id, str) else None
        known = worker.registration if worker is not None and worker.heartbeat is not None else None
        if known is None:
            return None
        told, last = (sent["registration"], known.name) if is_short else (digest, known.digest)
        return worker if told and told == last else None

    async def _with_status(self, worker: WorkerRecord, status: ShortHeartbeat, caller: Caller) -> Heartbeat:
        """Return the worker's newest heartbeat with another status. Raises ApiError 403."""
        known, newest = worker.registration, worker.heartbeat
        assert newest is not None, "this worker has not registered"
        assert known is not None, "this worker has not registered"
        heartbeat = attrs.evolve(
            newest,
            host=await self._host_of(worker, known, newest.host, caller),
            heartbeat_interval=self._interval_of(newest, known.interval_s),
            state=status.state,
            phase=status.phase,
            load=status.load,
            failure=status.failure,
            progress=status.progress,
            machine=status.machine,
            late_usage=status.late_usage,
        )
        self._check_id(heartbeat, caller)
        return heartbeat

    async def _host_of(self, worker: WorkerRecord, known: Registration, host: str, caller: Caller) -> str:
        """Return the address of a worker that was at `host`, looked up again now and then. Raises ApiError 403."""
        sender, now = self._sender(caller), trio.current_time()
        if known.checked_for != sender or now - known.checked_at >= HOST_CHECK_S:
            host = await self._checked_host(known.host, caller)
            worker.registered(attrs.evolve(known, checked_for=sender, checked_at=now))
        return host

    async def check_sender(self, worker_id: str, start_id: str, caller: Caller) -> WorkerRecord:
        """Return the worker of a report, if that counts: it must be from the place of the heartbeats of this start.

        The access rules of its route have let the caller join. Raises ApiError: 403, 404.
        """
        worker = self._table.get(worker_id)
        known = worker.registration if worker is not None else None
        if worker is None or worker.heartbeat is None or known is None:
            raise errors.start_not_found(worker_id)
        host = await self._host_of(worker, known, worker.heartbeat.host, caller)
        self._check_id(attrs.evolve(worker.heartbeat, host=host), caller)
        if worker.heartbeat.start_id != start_id or self._table.get(worker_id) is not worker:
            raise errors.start_not_found(worker_id)
        return worker

    def _sender(self, caller: Caller) -> tuple[Auth, str, bool]:
        return self._auth, caller.address, caller.is_relayed

    async def _checked_host(self, host: str, caller: Caller) -> str:
        """Return the address of a worker that is at `host` by its own account. Raises ApiError 403.

        Managed workers are trusted.
        """
        if caller.is_managed_worker:
            return host
        found = await self._lookups.addresses_of(host, caller.address)
        return self._auth.check_worker(host, found, caller)

    def _check_port(self, heartbeat: Heartbeat) -> None:
        """Raise ApiError 400 if a heartbeat names no port, and the gateway knows no unix socket of its worker."""
        known = self._table.get(heartbeat.worker_id)
        has_socket = heartbeat.unix_socket and known is not None and known.unix_socket is not None
        if heartbeat.port == 0 and heartbeat.state != "gone" and not has_socket:
            raise errors.bad_request("This is not a heartbeat: port: must be from 1 to 65535.")

    def _check_id(self, heartbeat: Heartbeat, caller: Caller) -> None:
        """Raise ApiError 403 if the id of a heartbeat is another worker's, 404 if a managed worker has been removed."""
        known = self._table.get(heartbeat.worker_id)
        if caller.is_managed_worker and (known is None or not known.managed):
            raise ApiError(404, "not_found", f"This gateway has no worker {heartbeat.worker_id} of its own.")
        if caller.is_managed_worker:
            return
        self._check_key(heartbeat.worker_id, caller)
        if known is None:
            return
        if known.managed and caller.worker is None:
            raise errors.forbidden(f"The id {heartbeat.worker_id} belongs to a worker that this gateway has started.")
        if known.server is not None:
            raise errors.forbidden(
                f"The id {heartbeat.worker_id} belongs to a server that the configuration registers."
            )
        if caller.worker is not None:
            return  # its key is that of the newest launch, wherever that is
        if known.heartbeat and known.heartbeat.host != heartbeat.host and self._table.state(known) not in AWAY:
            raise errors.forbidden(
                f"The id {heartbeat.worker_id} belongs to another worker, which runs at {known.heartbeat.host}."
            )

    def _check_key(self, worker_id: str, caller: Caller) -> None:
        """Raise ApiError 403 if a worker has a key of its own and another was sent, or the key is another worker's."""
        key = caller.worker
        if key is not None and key.worker_id != worker_id:
            raise errors.forbidden(f"This key is that of worker {key.worker_id}, and of no other.")
        if key is None and self._table.proof_of(worker_id):
            raise errors.forbidden(f"The id {worker_id} belongs to a worker with a key of its own, from its order.")

    def _interval_of(self, heartbeat: Heartbeat, own_s: float) -> float:
        """Return the seconds until a worker's next heartbeat.

        Only workers that know of short heartbeats get another interval, and no members of a group: all of a group wait
        for each other.
        """
        if not heartbeat.registration or heartbeat.group is not None:
            return own_s
        return interval_of(own_s, len(self._table), self._per_second_max)

    def _record(self, heartbeat: Heartbeat, caller: Caller, registration: Registration | None = None) -> bytes:
        """Record a heartbeat that was checked, and return the response. Raises ApiError 429.

        `registration` is that of a whole heartbeat.
        """
        late_usage, sender = heartbeat.late_usage, None if caller.is_managed_worker else party_of(caller.address)
        if late_usage:
            heartbeat = attrs.evolve(heartbeat, late_usage=[])
        worker_id = heartbeat.worker_id
        recorded = self._registry.record_heartbeat(heartbeat, sender, registration)
        if isinstance(recorded, TooManyWorkers):
            raise errors.too_many_workers(recorded.workers_max)
        if isinstance(recorded, TooMuchRegistered):
            who = f"that join from {caller.address}" if "per_address" in recorded.limit else "that join"
            allowed = f"have registered as much as they may, {recorded.allowed}"
            sentence = f"Workers {who} {allowed}: raise that, or end some."
            raise errors.rate_limited(sentence, f"limits.{recorded.limit}", 60)
        if late_usage:
            self.used_late(worker_id, late_usage)
        if recorded.has_moved:
            self.moved()
        worker = self._table.get(worker_id)
        response = HeartbeatResponse(
            status="registered" if recorded.is_new else "ok",
            gateway_id=self.gateway_id,
            heartbeat_interval=heartbeat.heartbeat_interval,
            lost=self._table.lost(worker_id),
            wants_machine=worker is not None and worker.machine is None,
            accepts_short=True,
            ends=caller.worker is not None and caller.worker.is_asked_to_end,
        )
        return json.dumps(attrs.asdict(response)).encode()


def interval_of(own_s: float, workers: int, per_second_max: int) -> float:
    """Return the seconds between two heartbeats of a worker: its own, or more if all send too many a second."""
    return max(own_s, min(workers / per_second_max, HEARTBEAT_INTERVAL_MAX_S))


def _read(body: bytes | bytearray) -> dict[str, object]:
    """Return the JSON object in a body. Raises ApiError 400."""
    try:
        sent = parsed(body)
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"The body is not JSON: {error}.") from error
    if not isinstance(sent, dict):
        raise errors.bad_request("A heartbeat is a JSON object.")
    return cast("dict[str, object]", sent)


def _digest_of(sent: Mapping[str, object]) -> bytes | None:
    """Return a digest of the registration in a whole heartbeat, as it was received."""
    registration = {name: value for name, value in sent.items() if name not in _STATUS}
    try:
        data = marshal.dumps(registration, 2)  # needs a third of the time of JSON; later versions note identities too
    except ValueError:  # nested too deep
        return None
    return hashlib.blake2b(data, digest_size=16).digest()
