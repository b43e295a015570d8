"""Copies of requests for another model: they show whether it fails, and how fast it is. Responses are dropped.

A copy starts when the response to its original begins, and occupies a place at an endpoint that is free then. It
waits in no queue, loads no model, has no second attempt, and counts for no limit of a key.
"""

import hashlib
import logging
import random
from collections.abc import Callable

import attrs
import trio

from ichat.config.models import ShadowConfig
from ichat.config.schema import Config, Timeouts
from ichat.http.pool import Pool
from ichat.observability.counts import ShadowCounts
from ichat.observability.request_record import UsedTokens
from ichat.proxy.copies import Copy, send_copy
from ichat.proxy.steps import AttemptStep, Outcome
from ichat.routing.aliases import Alias
from ichat.routing.availability import Full
from ichat.routing.balancer import Balancer
from ichat.routing.request import Lease, RoutingRequest

log = logging.getLogger(__name__)

COPIED_BYTES_MAX = 1024 * 1024
"""A larger request has no copy."""
_NUMBERS = 2.0**64


@attrs.frozen(eq=False)
class CopyUnderWay:
    """A copy with a place at an endpoint."""

    alias: str
    """The name that the original asked for."""
    lease: Lease
    step: AttemptStep
    began_at: float


def is_copied(alias: str, shadow: ShadowConfig, session: bytes, draw: Callable[[], float] = random.random) -> bool:
    """Return whether a request is of the share that is copied: all of a session are, or none."""
    if not session:
        return draw() < shadow.share
    digest = hashlib.blake2b(b"%b\0%b\0%b" % (alias.encode(), shadow.model.encode(), session), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _NUMBERS < shadow.share


def _result_of(outcome: Outcome) -> str:
    """Return the result that is counted: the status of the response, or why there was none."""
    if outcome.kind == "answered":
        return str(outcome.status)
    if outcome.kind == "unfit" and outcome.failure is not None:
        return outcome.failure.code
    if outcome.kind in ("left", "cancelled"):
        return "cancelled"
    return "timeout" if outcome.kind == "late" else "failed"


class Shadows:
    """The copies under way; those of this process are in a nursery of their own."""

    def __init__(self, balancer: Balancer, pool: Pool, counts: ShadowCounts, copies_max: int) -> None:
        self._balancer = balancer
        self._pool = pool
        self._counts = counts
        self._copies_max = copies_max
        self._under_way = 0
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<Shadows {self._under_way} under way>"

    def reconfigure(self, config: Config) -> None:
        """Have as many copies at once, from now on, as another configuration says."""
        self._copies_max = config.routing.shadows_max

    async def run_forever(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send copies until `stop`."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def stop(self) -> None:
        """End all copies of this process, and begin no more: the gateway shuts down."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def start(self, copy: Copy | None, alias: Alias, *, proof: bytes, timeouts: Timeouts) -> None:
        """Begin to send a copy, if it exists and has a free place; this never waits."""
        if copy is None or self._nursery is None:
            return
        under_way = self.begin(alias, len(copy.body.data), copy.grant.fairness_key, proof=proof, timeouts=timeouts)
        if under_way is not None:
            self._nursery.start_soon(self._send, copy, under_way)

    async def _send(self, copy: Copy, under_way: CopyUnderWay) -> None:
        outcome, used = Outcome("cancelled"), None
        try:
            outcome, used = await send_copy(copy, self._pool, under_way.lease.endpoint.facts, under_way.step)
        finally:
            self.end(under_way, outcome, used)

    # For copies that this process or another process sends.

    def begin(
        self,
        alias: Alias,
        body_bytes: int,
        fairness_key: str,
        *,
        proof: bytes,
        timeouts: Timeouts,
        is_busy: bool = False,
    ) -> CopyUnderWay | None:
        """Return a place for the copy of a request for a name; `end` follows. None if there is no place: that counts.

        `proof` is the gateway's for its workers, `is_busy` says that the process that would send it must not.
        """
        if alias.shadow is None:
            return None
        model = alias.shadow.model
        lease = self._lease(model, body_bytes, fairness_key, is_busy=is_busy)
        if not isinstance(lease, Lease):
            self._counts.add(alias.name, model, lease)
            return None
        self._under_way += 1
        endpoint = lease.endpoint
        first_byte_s, stall_s = endpoint.timeouts or (timeouts.first_byte_s, timeouts.stream_stall_s)
        step = AttemptStep(
            endpoint.id.decode(), model, request_head=endpoint.facts.proof_headers(proof),
            first_byte_s=first_byte_s, stall_s=stall_s, passes_all=True,
        )  # fmt: skip
        return CopyUnderWay(alias.name, lease, step, trio.current_time())

    def _lease(self, model: str, body_bytes: int, fairness_key: str, *, is_busy: bool) -> Lease | str:
        """Return a place for a copy, or why there is none."""
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return "draining"
        if body_bytes > COPIED_BYTES_MAX:
            return "too_large"
        if is_busy or self._under_way >= self._copies_max:
            return "busy"
        lease = self._balancer.lease(RoutingRequest(model, fairness_key=fairness_key))
        if not isinstance(lease, Lease):
            return "busy" if isinstance(lease, Full) else "not_ready"
        if lease.is_probe:  # a copy gives no verdict
            lease.release()
            return "not_ready"
        return lease

    def end(self, under_way: CopyUnderWay, outcome: Outcome, used: UsedTokens | None) -> None:
        """Free the place of a copy, and count how it went; `used` are the tokens that its response says were used."""
        self._under_way -= 1
        under_way.lease.release()
        model = under_way.step.model
        if outcome.kind == "answered":
            seconds = trio.current_time() - under_way.began_at
            self._counts.add_response(model, seconds, 0 if used is None else used.total)
        elif outcome.kind != "unfit" and outcome.failure is not None:
            log.info("a copy for %s failed: %s", under_way.alias, outcome.failure.message)
        self._counts.add(under_way.alias, model, _result_of(outcome))
