"""What a client is told when its request is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.fleet.responses import ResponseMissing
from ichat.http.body_mover import is_comment
from ichat.proxy.refusals import WaitBound, load_comment, no_lease, over_limit, response_missing
from ichat.routing.availability import Draining, Full, Loadable, NotReady, QueueTimeout, Unknown
from ichat.security.rate_limits import QuotaRefusal

SECRET = "worker w ended with exit code 64: /secret/path --its-argument"


@pytest.mark.parametrize(
    ("refusal", "status", "code", "limit", "words"),
    [
        (Full(7), 429, "overloaded", "routing.queue_max", "7 of its requests wait already"),
        (NotReady(SECRET, 5, told="it is being loaded"), 503, "model_not_ready", "", "not ready: it is being loaded."),
        (NotReady(SECRET, 5), 503, "model_not_ready", "", "not ready: nothing can serve it at the moment."),
        (
            NotReady(SECRET, 5, "circuit_breaker", told="it failed"),
            503,
            "model_not_ready",
            "circuit_breaker",
            "it failed",
        ),
        (
            Loadable(SECRET, 123.4, told="it is being loaded"),
            503,
            "model_not_ready",
            "timeouts.queue_s",
            "it is being loaded; the request has wai",
        ),
        (Draining(), 503, "draining", "", "shutting down"),
        (QueueTimeout(), 503, "overloaded", "timeouts.queue_s", "waited 30 s"),
        (Unknown(), 404, "model_not_found", "", "`m` does not exist. Models here: a, b"),
    ],
)
def test_every_refusal_of_the_balancer_is_an_error(refusal, status, code, limit, words):
    """Status, code and limit follow from the value, operators' reasons stay here; most say when to ask again."""
    error = no_lease(refusal, "m", lambda: ["b", "a"], WaitBound("queue_s", 30), 100.0)
    assert (error.status, error.code, error.limit) == (status, code, limit)
    assert words in error.message
    assert SECRET not in error.message
    assert (error.retry_after_s is None) == isinstance(refusal, Unknown)


@pytest.mark.parametrize(("ready_at", "retry_after_s"), [(123.4, 24), (100.0, 1), (90.0, 1), (None, 5)])
def test_a_wait_in_vain_for_a_load_has_retry_after(ready_at, retry_after_s):
    """Retry-After is the expected rest, at least a second, and the bound that was reached is named."""
    loadable = Loadable(SECRET, ready_at, told="it is being loaded")
    error = no_lease(loadable, "m", list, WaitBound("load_wait_s", 600), 100.0)
    assert (error.retry_after_s, error.limit) == (retry_after_s, "timeouts.load_wait_s")
    assert error.message == "The model `m` is not ready: it is being loaded; the request has waited for 600 s."


def test_a_limit_is_named_with_its_owner():
    """A key's limit and the common one are told apart, and so are requests at once and in a minute."""
    own = over_limit(QuotaRefusal("a", "requests_per_minute", 5, 53))
    assert (own.status, own.limit, own.retry_after_s) == (429, "security.keys.requests_per_minute", 53)
    assert own.message == "The key `a` may have 5 requests a minute (security.keys.requests_per_minute)."
    common = over_limit(QuotaRefusal("", "max_in_flight", 4, 1))
    assert common.message == "This gateway takes 4 requests at once in all (limits.max_in_flight)."


def test_a_missing_response_names_the_parameter():
    """A continued response is a parameter of the body, one in the path is none."""
    error = response_missing(ResponseMissing("resp_1", "it is gone"), "previous_response_id")
    assert (error.status, error.code, error.param) == (404, "response_not_found", "previous_response_id")
    assert response_missing(ResponseMissing("resp_1", "it is gone")).param is None


@pytest.mark.parametrize(("doing", "ready_at", "expected"), [
    ("", None, "loading m"),
    ("importing vllm", 1022.1, "loading m: importing vllm; about 23 s left"),
    ("importing vllm", 999.0, "loading m: importing vllm, longer than usual"),
    ("a\r\n\r\ndata: {}", None, "loading m: a????data: {}"),
])  # fmt: skip
def test_a_comment_of_a_load_is_one_line(doing, ready_at, expected):
    """What the worker does and how long is left; what a worker says of itself cannot be an event."""
    assert load_comment("m", Loadable("", ready_at, doing=doing).words(1000.0)).decode() == expected


@given(st.text(), st.text())
def test_a_comment_of_a_load_is_known_for_one(name, doing):
    """Whatever is said, a gateway before this one takes it for a comment, in a chunk."""
    words = load_comment("".join(one for one in name if one.isprintable()), doing)
    chunk = bytearray(b"%x\r\n: %b\n\n\r\n" % (len(words) + 4, words))
    assert is_comment(chunk, 0, len(chunk)), chunk
