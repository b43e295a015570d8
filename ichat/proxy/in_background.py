"""Preparations for a request before it is sent, if its response is made in the background."""

from ichat.errors import ApiError, bad_request
from ichat.proxy.context import GatewayContext
from ichat.proxy.late_usage import OF_A_LIMITED_KEY_MAX
from ichat.routing.endpoint import Endpoint


def begin_in_background(context: GatewayContext, endpoint: Endpoint, key_name: str, model: str) -> str:
    """Return the ticket of a request to this endpoint; "" if the endpoint cannot report the usage later.

    Raises ApiError where tokens are limited: 400 where they could not be counted, 429 where too many are not yet.
    """
    is_limited = context.quotas.bounds_tokens(key_name)
    if not endpoint.reports_late_usage:
        if is_limited:
            raise _uncounted(endpoint.upstream.name)
        return ""
    if is_limited and context.late_usage.is_full_for(key_name):
        sentence = f"A key with a limit of tokens may have {OF_A_LIMITED_KEY_MAX} responses in the background: wait."
        raise ApiError(429, "overloaded", sentence, kind="rate_limit_error", retry_after_s=5)
    return context.late_usage.expect(key_name, model, endpoint.id.decode())


def _uncounted(name: str) -> ApiError:
    """Return the error for a key with limited tokens, where this upstream counts none."""
    sentence = f"background must not be true for a key with a limit of tokens or a budget: {name} does not count them."
    return bad_request(sentence, param="background")
