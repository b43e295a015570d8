"""The way through the models of a plan: what leads on, what ends it, and what is said of it then."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat import errors
from ichat.config.models import NOTHING_SENT, REASONS, TargetConfig
from ichat.http.multipart import fields_of
from ichat.http.pool import Upstream
from ichat.http.request_body import RequestBody, form_body
from ichat.proxy.targets import TargetWalk, passed_over, reason_of, shown
from ichat.routing.aliases import Alias, Plan
from ichat.routing.endpoint import Endpoint

NOT_READY = errors.model_not_ready("a", "worker w is loading", 7)
BODY = b'{ "model" : "n", "messages":[1],\t"top_p": 1, "user":"u" }'


ROUTE = Endpoint(Upstream("the external route a", "h", 1), b"a", 1)


def walk_of(*models, goes_on=NOTHING_SENT, **more):
    return TargetWalk(Plan(models, Alias("n", (TargetConfig(models[0]),), goes_on=frozenset(goes_on), **more)))


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_leads_on_only_where_it_is_asked_for(reason):
    """Each one alone, and none of the others then; the last model has no next one."""
    walk = walk_of("a", "b", goes_on=[reason])
    assert walk.advance(NOT_READY, reason)
    assert (walk.model, walk.tries, walk.passed) == ("b", 2, [("a", reason)])
    if reason not in ("busy", "loading"):
        assert not walk.advance(NOT_READY, reason)
    for other in {*REASONS, ""} - {reason}:
        assert not walk_of("a", "b", goes_on=[reason]).advance(NOT_READY, other)


def test_what_was_passed_over_is_waited_for_in_the_end():
    """All are asked at once first; then the request waits for the first of those that were busy, then the second."""
    walk = walk_of("a", "b", "c", goes_on=("busy", "not_ready", "queue_full"))
    assert walk.passes_over("busy")
    assert not walk.passes_over("loading")
    assert walk.advance(passed_over("a", "busy"), "busy")
    assert walk.advance(NOT_READY, "not_ready")
    assert (walk.model, walk.passes_over("busy")) == ("c", True)
    assert walk.advance(passed_over("c", "busy"), "busy")
    assert (walk.model, walk.passes_over("busy")) == ("a", False)
    assert walk.advance(errors.queue_full("a", 9, 2), "queue_full")
    assert (walk.model, walk.passes_over("busy"), walk.has_more) == ("c", False, False)
    assert not walk.advance(errors.queue_timeout("c", 30, 2, "timeouts.queue_s"), "queue_full")
    assert [model for model, _ in walk.passed] == ["a", "b", "c", "a"]


def test_one_model_alone_is_waited_for():
    """Nothing is passed over where there is nowhere else to go."""
    assert not walk_of("a", goes_on=("busy", "loading")).passes_over("busy")


def test_the_same_route_is_asked_again_before_the_next_model():
    """So often for each model, and only after failures that may pass; what is last is not refused but passed on."""
    walk = walk_of("a", "b", goes_on=("5xx", "unreachable"), retries=1)
    failed = errors.upstream_failed("the external route a", "it answered 503", retry=False)
    assert walk.refuses(503)
    assert walk.advance(failed, "5xx")
    assert (walk.model, walk.passed) == ("a", [])
    assert walk.advance(failed, "5xx")
    assert (walk.model, walk.passed) == ("b", [("a", "5xx")])
    assert walk.refuses(500)
    assert walk.advance(failed, "5xx")
    assert [walk.refuses(status) for status in (200, 404, 429, 500)] == [False] * 4
    assert (walk.model, walk.tries) == ("b", 4)


def test_asking_again_takes_longer_each_time_and_ends_with_the_time_for_it():
    """A route that is down for a moment is not asked a hundred times in it."""
    failed = errors.upstream_failed("the external route a", "it answered 503", retry=False)
    walk = walk_of("a", "b", goes_on=("5xx",), retries=8)
    pauses = []
    for _ in range(6):
        assert walk.advance(failed, "5xx", ROUTE)
        pauses.append(walk.pause_s)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert walk.advance(failed, "5xx", ROUTE, may_repeat=False)
    assert (walk.model, walk.pause_s) == ("b", 0.0)


@given(
    st.integers(1, 5), st.sets(st.sampled_from(REASONS)), st.lists(st.sampled_from((*REASONS, "")), max_size=60),
    st.integers(0, 3),
)  # fmt: skip
def test_every_way_ends(count, goes_on, reasons, retries):
    """Whatever happens, each model is asked once, again as often as it may be, and once more if it was passed over."""
    models = [f"m{number}" for number in range(count)]
    walk, asked = walk_of(*models, goes_on=goes_on, retries=retries), []
    for reason in [*reasons, *["5xx"] * 60]:
        if reason in ("busy", "loading") and not walk.passes_over(reason):
            reason = "queue_full"  # it was waited for, and in vain
        asked.append(walk.model)
        if not walk.advance(NOT_READY, reason):
            break
    else:
        raise AssertionError("it never ends")
    assert walk.tries == len(asked)
    assert asked[0] == "m0"
    assert list(dict.fromkeys(asked)) == models[: len(set(asked))]
    assert max(asked.count(model) for model in models) <= 2 * (retries + 1)
    assert len(walk.passed) <= 2 * count


def test_errors_and_their_reasons():
    """What a worker may have worked on is no reason; an external route's failure is one that can be asked for."""
    failed, silent = errors.upstream_failed("x", "it closed"), errors.upstream_timeout("x", 3)

    def reason(error, *, is_external=False, rejected=0):
        return reason_of(error, is_external=is_external, rejected=rejected)

    assert reason(errors.upstream_unreachable("x", "refused")) == "unreachable"
    assert reason(NOT_READY) == "not_ready"
    assert reason(errors.model_not_ready("a", "failed", 1, "circuit_breaker")) == "circuit"
    assert reason(errors.model_not_found("a", ())) == "not_ready"
    assert reason(errors.queue_full("a", 1, 1)) == "queue_full"
    assert reason(errors.queue_timeout("a", 1, 1, "timeouts.queue_s")) == "queue_full"
    assert reason(errors.too_many_connections()) == ""
    assert [reason(passed_over("a", one)) for one in ("busy", "loading")] == ["busy", "loading"]
    assert [reason(error) for error in (failed, silent, errors.draining(), errors.bad_request("x."))] == [""] * 4
    assert [reason(error, is_external=True) for error in (failed, silent)] == ["5xx", "timeout"]
    assert [reason(failed, is_external=True, rejected=status) for status in (429, 503)] == ["429", "5xx"]


def test_the_error_in_the_end_tells_of_every_model():
    """One message with each model's reason, the last one's status, and the shortest wait."""
    walk = walk_of("a", "b", "c")
    walk.advance(NOT_READY, "not_ready")
    walk.advance(errors.model_not_found("b", ()), "not_ready")
    assert not walk.advance(errors.upstream_unreachable("worker w", "connection refused"), "unreachable")
    error = walk.error()
    assert (error.status, error.code, error.retry_after_s) == (502, "upstream_unreachable", 7)
    assert error.message == (
        "No model answers for `n`: `a` is not ready: worker w is loading; `b` is not here: no worker and no external"
        " route has it; `c`: worker w cannot be reached: connection refused."
    )
    alone = walk_of("a")
    alone.advance(errors.model_not_found("a", ()), "not_ready")
    assert (alone.is_told, alone.error().status, alone.error().param) == (False, 503, None)
    alone.advance(NOT_READY, "not_ready")
    assert alone.is_told


async def test_the_body_names_the_model_and_has_what_is_set():
    """The rest stays byte for byte; for the next model only the name changes."""
    walk = walk_of("a", "b", set={"top_p": b"0.5", "temperature": b"0"}, drop=frozenset(("user",)))
    body = await walk.fit(RequestBody(BODY, ("model", "messages", "top_p", "user")))
    assert body.data == b'{ "temperature":0,"model" : "a", "messages":[1],\t"top_p": 0.5 }'
    assert json.loads(body.data) == {"temperature": 0, "model": "a", "messages": [1], "top_p": 0.5}
    assert body.names == ("temperature", "model", "messages", "top_p")
    walk.advance(NOT_READY, "not_ready")
    assert (await walk.fit(body)).data == body.data.replace(b'"a"', b'"b"')
    assert body.original.data is BODY


async def test_a_body_is_the_same_whether_it_is_searched_or_scanned():
    """What is set comes before `model` or before all, and nothing else differs."""
    given = {"top_k": b"3"}
    names = ("model", "messages", "top_p", "user")
    searched = await walk_of("a", set=given).fit(RequestBody(BODY, names))
    assert (searched.data, searched.names) == (
        BODY.replace(b'"model" : "n"', b'"top_k":3,"model" : "a"'),
        ("top_k", "model", "messages", "top_p", "user"),
    )
    escaped = BODY.replace(b'"u"', b'"\\u006f"')
    scanned = await walk_of("a", set=given).fit(RequestBody(escaped, names))
    assert json.loads(scanned.data) == {**json.loads(searched.data), "user": "o"}


async def test_a_name_that_is_its_own_model_changes_nothing():
    """The body is the same object: it was not even scanned."""
    alias = Alias("n", (TargetConfig("n"),))
    body = RequestBody(BODY, ("model", "messages", "user"))
    assert await TargetWalk(Plan(("n",), alias)).fit(body) is body
    dropping = attrs.evolve(alias, drop=frozenset(("user",)))
    assert b"user" not in (await TargetWalk(Plan(("n",), dropping)).fit(body)).data


async def test_a_form_is_changed_as_well():
    """Text of one line is set; what a form cannot have so, a table or a line break, is not the client's to set either."""
    head = b'Content-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    parts = [(b"model", b"n"), (b"language", b"de"), (b"prompt", b"x"), (b"table", b"-1"), (b"lines", b"1")]
    form = b"--b\r\n" + b"--b\r\n".join(head % part for part in parts) + b"--b--\r\n"
    values = {"language": b'"en"', "temperature": b"0.5", "table": b"{}", "lines": b'"a\\nb"', 'no"name': b"1"}
    walk = walk_of("a", set=values, drop=frozenset(("prompt",)))
    body = await walk.fit(form_body(form, await fields_of(form, b"multipart/form-data; boundary=b")))
    parts = [(b"temperature", b"0.5"), (b"model", b"a"), (b"language", b"en")]
    assert body.data == b"--b\r\n" + b"--b\r\n".join(head % part for part in parts) + b"--b--\r\n"
    assert body.names == ("temperature", "model", "language")


def test_names_fit_in_headers():
    """A name of other letters is quoted."""
    assert [shown("org/m:1 x"), shown("größe")] == [b"org/m:1 x", b"gr%C3%B6%C3%9Fe"]
