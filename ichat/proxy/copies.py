"""Copies of requests for another model, as the side with the bytes sends them. Their responses are dropped."""

import logging

import attrs

from ichat.errors import ApiError
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.http.request_body import RequestBody
from ichat.observability.request_record import ROUTES, UsedTokens
from ichat.proxy.leg import Leg, Nowhere
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import ANSWERED, AttemptStep, Outcome
from ichat.proxy.token_usage import TokenUsage
from ichat.proxy.upstream_request import build_upstream_request, prepare_body
from ichat.routing.endpoint import EndpointFacts
from ichat.security.addresses import CREDENTIALS
from ichat.security.grant import Grant

log = logging.getLogger(__name__)

ID_SUFFIX = b"-shadow"
"""The end of a copy's id: engines distinguish requests by their ids."""


@attrs.frozen(eq=False)
class Copy:
    """A request to send once more, to another model."""

    request: Request
    """Without its body."""
    body: RequestBody
    """As the name that the request asked for changes it."""
    grant: Grant
    is_suspect: bool
    """Whether it may have members or headers that no worker gets from this caller; see `RequestProgress`."""


def copy_of(request: Request, body: RequestBody, *, grant: Grant, is_suspect: bool) -> Copy | None:
    """Return the copy of a request, without the client's key; None if there can be none.

    A form has no copy, nor has a request that continues a response, which only a single worker keeps.
    """
    if request.path not in ROUTES or body.is_form or "previous_response_id" in body.names:
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
    return Copy(again, body, grant, is_suspect)


async def send_copy(
    copy: Copy, pool: Pool, endpoint: EndpointFacts, step: AttemptStep
) -> tuple[Outcome, UsedTokens | None]:
    """Send a copy and drop the response; return how that went, and the tokens that the response says were used.

    Nothing that goes wrong here concerns other requests.
    """
    usage = TokenUsage(copy.request.path)
    try:
        leg = await _leg_to(endpoint, copy, step, pool, usage)
        outcome = await leg.run()
    except ApiError as error:
        return Outcome("unfit", step.endpoint, Failure.of(error)), None
    except Exception:
        log.exception("a bug sending a copy for %s", step.model)
        return Outcome("broken", step.endpoint), None
    if outcome is ANSWERED:
        return Outcome("answered", step.endpoint, status=leg.status), usage.said()
    return outcome, None


async def _leg_to(endpoint: EndpointFacts, copy: Copy, step: AttemptStep, pool: Pool, usage: TokenUsage) -> Leg:
    """Return the exchange with an endpoint. Raises ApiError for a body that the endpoint must not get."""
    request = copy.request
    body = await copy.body.edited({"model": copy.body.text(step.model)})
    body, _ = await prepare_body(request, body, endpoint, is_suspect=copy.is_suspect)
    pieces = build_upstream_request(
        request, body.data, endpoint, grant=copy.grant, added=step.request_head, reads_response=True
    )
    return Leg(pool, endpoint, step, Nowhere(), pieces, request.method, usage)
