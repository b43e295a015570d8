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
from ichat.errors import ApiError
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.observability.counts import ShadowCounts
from ichat.observability.request_record import ROUTES
from ichat.proxy.leg import Leg, Nowhere
from ichat.proxy.steps import AttemptStep
from ichat.proxy.token_usage import TokenUsage
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.routing.aliases import Alias
from ichat.routing.availability import Full
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import EndpointFacts
from ichat.routing.request import Lease, RoutingRequest
from ichat.security.addresses import CREDENTIALS
from ichat.security.grant import Grant

log = logging.getLogger(__name__)

COPIED_BYTES_MAX = 1024 * 1024
"""A larger request has no copy."""
ID_SUFFIX = b"-shadow"
"""The end of a copy's id: engines distinguish requests by their ids."""
_NUMBERS = 2.0**64


@attrs.frozen(eq=False)
class Copy:
    """A request to send once more, to another model."""

    alias: str
    """The name that the original asked for."""
    model: str
    """The shadow, which gets the copy."""
    request: Request
    """Without its body."""
    body: RequestBody
    """As the name changes it."""
    grant: Grant
    is_suspect: bool
    """Whether it may have members or headers that no worker gets from this caller; see `RequestProgress`."""
    proof: bytes
    timeouts: Timeouts


def copy_of(
    request: Request,
    body: RequestBody,
    alias: Alias,
    *,
    grant: Grant,
    is_suspect: bool,
    proof: bytes,
    timeouts: Timeouts,
) -> Copy | None:
    """Return the copy of a request for the shadow of a name, without the client's key; None if there can be none.

    A form has no copy, nor has a request that continues a response, which only a single worker keeps.
    """
    if request.path not in ROUTES or body.is_form or "previous_response_id" in body.names:
        return None
    if alias.shadow is None:
        return None
    again = Request(
        method=request.method,
        target=request.target,
        path=request.path,
        version=b"1.1",
        headers=[header for header in request.headers if header[0] not in CREDENTIALS],
        body=b"",
        id=request.id + ID_SUFFIX,
        keep_alive=False,
    )
    return Copy(alias.name, alias.shadow.model, again, body, grant, is_suspect, proof, timeouts)


def is_copied(alias: str, shadow: ShadowConfig, session: bytes, draw: Callable[[], float] = random.random) -> bool:
    """Return whether a request is of the share that is copied: all of a session are, or none."""
    if not session:
        return draw() < shadow.share
    digest = hashlib.blake2b(b"%b\0%b\0%b" % (alias.encode(), shadow.model.encode(), session), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _NUMBERS < shadow.share


class Shadows:
    """The copies under way, in a nursery of their own."""

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
        """End all copies, and begin no more: the gateway shuts down."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def start(self, copy: Copy | None) -> None:
        """Begin to send a copy, if it exists and has a free place; this never waits."""
        if copy is not None and (result := self._begin(copy)):
            self._counts.add(copy.alias, copy.model, result)

    def _begin(self, copy: Copy) -> str:
        """Begin to send a copy, or return why not."""
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            return "draining"
        if len(copy.body.data) > COPIED_BYTES_MAX:
            return "too_large"
        if self._under_way >= self._copies_max:
            return "busy"
        lease = self._balancer.lease(RoutingRequest(copy.model, fairness_key=copy.grant.fairness_key))
        if not isinstance(lease, Lease):
            return "busy" if isinstance(lease, Full) else "not_ready"
        if lease.is_probe:  # a copy gives no verdict
            lease.release()
            return "not_ready"
        self._under_way += 1
        self._nursery.start_soon(self._send, copy, lease)
        return ""

    async def _send(self, copy: Copy, lease: Lease) -> None:
        """Send a copy and drop the response. Nothing that goes wrong here concerns other requests."""
        usage = TokenUsage(copy.request.path)
        began, result = trio.current_time(), "cancelled"
        try:
            leg = await self._leg_of(copy, lease.endpoint.facts, lease.endpoint.timeouts, usage)
            outcome = await leg.run()
            result = "timeout" if outcome.kind == "late" else "failed"
            if outcome.kind == "answered":
                result, said = str(leg.status), usage.said()
                self._counts.add_response(copy.model, trio.current_time() - began, 0 if said is None else said.total)
            elif outcome.failure is not None:
                log.info("a copy for %s failed: %s", copy.alias, outcome.failure.message)
        except ApiError as error:
            result = error.code
        except Exception:
            log.exception("a bug sending a copy for %s", copy.alias)
            result = "failed"
        finally:
            self._under_way -= 1
            lease.release()
            self._counts.add(copy.alias, copy.model, result)

    async def _leg_of(
        self, copy: Copy, endpoint: EndpointFacts, timeouts: tuple[float, float] | None, usage: TokenUsage
    ) -> Leg:
        """Return the exchange with an endpoint. Raises ApiError for a body that the endpoint must not get."""
        request, usual = copy.request, copy.timeouts
        first_byte_s, stall_s = timeouts or (usual.first_byte_s, usual.stream_stall_s)
        body = await copy.body.edited({"model": copy.body.text(copy.model)})
        body, _ = await prepare_body(request, body, endpoint, is_suspect=copy.is_suspect)
        added = endpoint.proof_headers(copy.proof)
        pieces = build_upstream_request(
            request, body.data, endpoint, grant=copy.grant, added=added, reads_response=True
        )
        id_ = endpoint.id.decode()
        step = AttemptStep(id_, copy.model, first_byte_s=first_byte_s, stall_s=stall_s, passes_all=True)
        return Leg(self._pool, endpoint, step, Nowhere(), pieces, request.method, usage)
