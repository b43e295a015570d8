"""Heartbeats as the gateway takes them: over its port, and over the control plane's socket from managed workers."""

import json
from collections.abc import Callable

import attrs

from ichat import errors
from ichat.protocol import Heartbeat, HeartbeatResponse, parse_heartbeat
from ichat.routing.availability import TooManyWorkers
from ichat.routing.registry import Registry
from ichat.routing.worker_record import WorkerRecord
from ichat.security.auth import Auth, Caller

HEARTBEAT_PATHS = frozenset((b"/v1/workers/heartbeat", b"/register"))


@attrs.frozen
class HeartbeatReceiver:
    """Checks heartbeats, records them, and makes their responses."""

    registry: Registry
    auth: Callable[[], Auth]
    """Returns the rules of access that are in force."""
    gateway_id: str
    """Different at each start of the gateway."""
    moved: Callable[[], None]
    """Called when a worker is new, was started again, or is reached elsewhere."""

    async def receive(self, body: bytes | bytearray, caller: Caller) -> bytes:
        """Record the heartbeat in the body of a request, and return the response's. Raises ApiError."""
        self.auth().check("join", caller)
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise errors.bad_request(f"The body is not JSON: {error}.") from error
        heartbeat = await self._accepted(parse_heartbeat(sent), caller)
        before = _place_of(self.registry.get(heartbeat.worker_id))
        new = self.registry.record_heartbeat(heartbeat)
        if isinstance(new, TooManyWorkers):
            raise errors.too_many_workers(new.workers_max)
        if _place_of(self.registry.get(heartbeat.worker_id)) != before:
            self.moved()
        response = HeartbeatResponse(
            status="registered" if new else "ok",
            gateway_id=self.gateway_id,
            heartbeat_interval=heartbeat.heartbeat_interval,
            lost=self.registry.lost(heartbeat.worker_id),
            wants_machine=self.registry.wants_machine(heartbeat.worker_id),
        )
        return json.dumps(attrs.asdict(response)).encode()

    async def _accepted(self, heartbeat: Heartbeat, caller: Caller) -> Heartbeat:
        """Return the heartbeat with the checked host of its worker. Raises ApiError 403 if the id is another worker's.

        Managed workers are trusted.
        """
        if caller.is_managed_worker:
            return heartbeat
        host = await self.auth().check_worker(heartbeat.host, caller)
        known = self.registry.get(heartbeat.worker_id)
        if known is None:
            return attrs.evolve(heartbeat, host=host)
        if known.managed:
            raise errors.forbidden(f"The id {heartbeat.worker_id} belongs to a worker that this gateway has started.")
        if known.heartbeat is not None and known.heartbeat.host != host and not self.registry.is_away(known):
            raise errors.forbidden(
                f"The id {heartbeat.worker_id} belongs to another worker, which runs at {known.heartbeat.host}."
            )
        return attrs.evolve(heartbeat, host=host)


def _place_of(worker: WorkerRecord | None) -> object:
    """Return which start of a worker is reached where; None where nobody is to be reached."""
    if worker is None or worker.heartbeat is None or worker.is_down:
        return None
    return worker.heartbeat.start_id, worker.heartbeat.host, worker.heartbeat.port
