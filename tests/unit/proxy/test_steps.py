"""How a request goes on: every way as a row of a table, and that steps and outcomes can be sent to another process."""

import json
import math
import typing

import cattrs
import pytest
from cattrs.preconf.json import make_converter
from hypothesis import given
from hypothesis import strategies as st

from ichat import errors
from ichat.config.models import NOTHING_SENT, REASONS
from ichat.proxy.refusals import Failure
from ichat.proxy.steps import (
    BEGUN,
    AttemptStep,
    BodyEdits,
    Done,
    Found,
    Lookup,
    Outcome,
    Refuse,
    RequestRoute,
    Wait,
    is_rejected,
    next_step,
    plain_start,
    shown,
)

NOW = 100.0
ANSWERED = Outcome("answered", "w1", status=200)
ALONE = Outcome("alone")
WAITED = Outcome("waited")
LONG = Outcome("too_long", "w1", Failure.of(errors.context_length_exceeded("a")))


def plain(**more):
    return RequestRoute("a", queue_s=30.0, **more)


def named(*ahead, goes_on=NOTHING_SENT, **more):
    return RequestRoute("a", ahead, "n", tuple(goes_on), queue_s=30.0, repeats_until=NOW + 1, **more)


def found(endpoint="w1"):
    return Found(endpoint)


def refused(error, reason=""):
    return Outcome("refused", failure=Failure.of(error), reason=reason)


def gone(endpoint="w1", kind="unreachable"):
    error = errors.upstream_unreachable(f"worker {endpoint}", "connection refused")
    if kind == "declined":
        error = errors.declined("a", "is shutting down")
    return Outcome(kind, endpoint, Failure.of(error))


def failed(kind="broken", status=0, endpoint="x", **more):
    error = errors.upstream_failed("the external route x", f"it answered {status}" if status else "it closed")
    return Outcome(kind, endpoint, Failure.of(error), status=status, is_external=True, **more)


def full(waited_s=0.0, kind="full"):
    return Outcome(kind, waited_s=waited_s)


def in_short(step):
    match step:
        case Lookup(model, _, excluded):
            return " ".join(["find", model, *(f"-{one}" for one in excluded)])
        case AttemptStep(endpoint, model):
            return f"ask {endpoint} for {model}"
        case Wait(kind, seconds):
            return f"{kind} {seconds:g}"
        case Refuse(failure):
            return f"refuse {failure.status} {failure.code}"
        case Done():
            return "done"


def walk(route, outcomes, now=NOW):
    """Return the steps after each of the outcomes, in short, and the route in the end."""
    steps = []
    for outcome in outcomes:
        route, step = next_step(route, outcome, now)
        steps.append(in_short(step))
    return steps, route


QUEUE_FULL, NOT_READY = errors.queue_full("a", 9, 2), errors.model_not_ready("a", "it is being loaded", 7)
OPEN = errors.model_not_ready("a", "it failed", 3, "circuit_breaker")
LATE = errors.queue_timeout("a", 30, 2, "timeouts.queue_s")
NEVER = errors.model_not_found("a", ())
FALLBACK, BUSY = named("b"), named("b", goes_on=("busy", "loading", "not_ready", "queue_full"))
AGAIN = named("b", goes_on=("5xx", "429", "timeout"), retries=1)
LONGER = named("b", longer="l")

ROWS = {
    "answered": (plain(), [BEGUN, found(), ANSWERED], ["find a", "ask w1 for a", "done"]),
    "an error of the upstream is an answer": (
        plain(), [BEGUN, found(), Outcome("answered", status=503)], ["find a", "ask w1 for a", "done"],
    ),
    "cut in the middle": (plain(), [found(), Outcome("cut", "w1")], ["ask w1 for a", "done"]),
    "the client leaves": (plain(), [found(), Outcome("left")], ["ask w1 for a", "done"]),
    "an operator cancels": (plain(), [full(), Outcome("cancelled")], ["place 30", "done"]),
    "another endpoint": (
        plain(), [found(), gone(), found("w2"), ANSWERED], ["ask w1 for a", "find a -w1", "ask w2 for a", "done"],
    ),
    "another endpoint after a worker declines": (
        plain(), [found(), gone(kind="declined"), found("w2")], ["ask w1 for a", "find a -w1", "ask w2 for a"],
    ),
    "a third endpoint": (
        plain(), [found(), gone(), found("w2"), gone("w2"), found("w3")],
        ["ask w1 for a", "find a -w1", "ask w2 for a", "find a -w1 -w2", "ask w3 for a"],
    ),
    "no other endpoint": (
        plain(), [found(), gone(), ALONE], ["ask w1 for a", "find a -w1", "refuse 502 upstream_unreachable"],
    ),
    "only one endpoint keeps the response": (
        plain(is_bound=True), [found(), gone()], ["ask w1 for a", "refuse 502 upstream_unreachable"],
    ),
    "never twice where it may have been worked on": (
        plain(), [found(), failed("broken")], ["ask w1 for a", "refuse 502 upstream_failed"],
    ),
    "unfit for its endpoint": (
        plain(), [found(), Outcome("unfit", "w1", Failure.of(errors.bad_request("x.")))],
        ["ask w1 for a", "refuse 400 bad_request"],
    ),
    "too long, and no longer model": (plain(), [found(), LONG], ["ask w1 for a", "refuse 400 context_length_exceeded"]),
    "queue": (plain(), [BEGUN, full(), found()], ["find a", "place 30", "ask w1 for a"]),
    "the queue has a limit for all waits": (plain(), [full(29.5)], ["place 0.5"]),
    "the queue is full": (plain(), [full(), refused(QUEUE_FULL, "queue_full")], ["place 30", "refuse 429 overloaded"]),
    "waited in vain": (plain(), [full(), refused(LATE, "queue_full")], ["place 30", "refuse 503 overloaded"]),
    "load on demand": (plain(), [full(kind="loadable"), found()], ["place 30", "ask w1 for a"]),
    "start of a worker": (plain(), [full(kind="starting"), found()], ["place 30", "ask w1 for a"]),
    "a load in vain": (
        plain(), [full(kind="loadable"), refused(NOT_READY, "not_ready")], ["place 30", "refuse 503 model_not_ready"],
    ),
    "no such model": (plain(), [refused(NEVER, "not_ready")], ["refuse 404 model_not_found"]),
    "an open circuit": (plain(), [refused(OPEN, "circuit")], ["refuse 503 model_not_ready"]),
    "the gateway drains": (FALLBACK, [refused(errors.draining())], ["refuse 503 draining"]),
    "fallback where nothing serves the model": (
        FALLBACK, [refused(NOT_READY, "not_ready"), found()], ["find b", "ask w1 for b"],
    ),
    "fallback after the last endpoint": (
        FALLBACK, [found(), gone(), ALONE, found("v")], ["ask w1 for a", "find a -w1", "find b", "ask v for b"],
    ),
    "no fallback without its reason": (
        named("b", goes_on=("circuit",)), [refused(NOT_READY, "not_ready")], ["refuse 503 model_not_ready"],
    ),
    "no fallback after a worker may have worked on it": (
        named("b", goes_on=REASONS), [found(), failed("broken")._replace(is_external=False)],
        ["ask w1 for a", "refuse 502 upstream_failed"],
    ),
    "no fallback after a response has begun": (
        named("b", goes_on=REASONS), [found(), failed("broken", is_over=True)],
        ["ask w1 for a", "refuse 502 upstream_failed"],
    ),
    "busy models are waited for in the end": (
        BUSY, [full(), full(), refused(QUEUE_FULL, "queue_full"), full()], ["find b", "find a", "find b", "place 30"],
    ),
    "a single model is waited for": (named(goes_on=("busy",)), [full(), found()], ["place 30", "ask w1 for a"]),
    "a model on its way is passed over": (BUSY, [full(kind="loadable"), found()], ["find b", "ask w1 for b"]),
    "again at another route of the model": (
        AGAIN, [found("x"), failed("rejected", 503), found("y")], ["ask x for a", "find a -x", "ask y for a"],
    ),
    "again after a pause, then fallback": (
        AGAIN, [found("x"), failed("rejected", 429), ALONE, WAITED, found("x"), failed("late"), found("v")],
        ["ask x for a", "find a -x", "pause 0.25", "find a", "ask x for a", "find b", "ask v for b"],
    ),
    "the last upstream error is passed on": (
        AGAIN, [found("x"), failed("broken"), ALONE, WAITED, found("x"), failed("broken"), found("v"),
                failed("broken", endpoint="v"), ALONE, WAITED, found("v"), failed("broken", endpoint="v")],
        ["ask x for a", "find a -x", "pause 0.25", "find a", "ask x for a", "find b", "ask v for b",
         "find b -v", "pause 0.25", "find b", "ask v for b", "refuse 502 upstream_failed"],
    ),
    "a longer model by an estimate": (LONGER, [Outcome("seems_too_long"), found()], ["find l", "ask w1 for l"]),
    "a longer model after a refusal": (LONGER, [found(), LONG, found()], ["ask w1 for a", "find l", "ask w1 for l"]),
    "nothing is longer than the longest": (
        LONGER, [found(), LONG, found(), LONG], ["ask w1 for a", "find l", "ask w1 for l", "refuse 400 context_length_exceeded"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("route", "outcomes", "expected"), ROWS.values(), ids=ROWS)
def test_every_way_on(route, outcomes, expected):
    """The steps of a request, by the outcomes of those before."""
    assert walk(route, outcomes)[0] == expected


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_leads_on_only_where_it_is_asked_for(reason):
    """Each of them alone, and none of the others then; the last model has no next one."""
    outcome = refused(NOT_READY, reason)
    steps, route = walk(named("b", goes_on=[reason]), [outcome, outcome])
    assert steps == ["find b", "refuse 503 model_not_ready"]
    assert (route.tries, route.passed) == (2, (("a", reason),))
    for other in {*REASONS, ""} - {reason}:
        assert walk(named("b", goes_on=[reason]), [refused(NOT_READY, other)])[0] == ["refuse 503 model_not_ready"]


def test_asking_again_takes_longer_each_time_and_ends_with_the_time_for_it():
    """A route that is down for a moment is not asked a hundred times in it."""
    route = named("b", goes_on=("5xx",), retries=8)
    once = [found("x"), failed("rejected", 503), ALONE, WAITED]
    steps, left = walk(route, once * 6)
    assert steps[2::4] == [f"pause {seconds:g}" for seconds in (0.25, 0.5, 1, 2, 4, 4)]
    assert walk(left, [failed("rejected", 503)], NOW + 1)[0] == ["find b"]


def test_an_attempt_says_which_responses_the_client_must_not_get():
    """Those of an external route after which there is another way; of the last model all are passed on."""
    route = named("b", goes_on=("5xx", "unreachable"), retries=1, longer="l")
    step = next_step(route, found("x"), NOW)[1]
    assert [is_rejected(status, step.rejects) for status in (200, 404, 429, 500)] == [False, False, False, True]
    assert (step.has_longer, step.is_again) == (True, False)
    assert step.response_head == ((b"x-ichat-model", b"a"), (b"x-ichat-attempts", b"1"))
    again = walk(route, [failed("rejected", 503), ALONE, WAITED])[1]
    step = next_step(again, found("x"), NOW)[1]
    assert (step.is_again, step.response_head[-1]) == (True, (b"x-ichat-attempts", b"2"))
    last = walk(route, [failed("rejected", 503)] * 3)[1]
    assert (last.model, last.tries, next_step(last, found("x"), NOW)[1].rejects) == ("b", 4, ())


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_plain_request_starts_as_any_other(is_bound):
    """Its first step is kept, and is the same as if it were decided each time."""
    assert plain_start("a", 30.0, is_bound=is_bound) == next_step(plain(is_bound=is_bound), BEGUN, NOW)


def test_an_open_circuit_is_skipped_while_another_model_can_be_asked():
    """The last model's endpoint is asked all the same."""
    route = named("b", goes_on=("circuit",))
    assert next_step(route, BEGUN, NOW)[1].skips_open
    assert not next_step(route, refused(OPEN, "circuit"), NOW)[1].skips_open


def test_edits_refer_to_the_body_as_it_was_sent():
    """The next model's have all that the name sets and drops, and its own name."""
    edits = BodyEdits("a", (("seed", b"5"),), ("user",))
    _, step = next_step(named("b", edits=edits), refused(NOT_READY, "not_ready"), NOW)
    assert step.edits == edits._replace(model="b")


def test_the_error_in_the_end_tells_of_every_model():
    """One message with each model's reason, the last one's status, and the shortest wait."""
    route, outcomes = named("b", "c"), [refused(NOT_READY, "not_ready"), refused(NEVER, "not_ready"), gone("w"), ALONE]
    for outcome in outcomes:
        route, step = next_step(route, outcome, NOW)
    error = step.failure.error()
    assert (error.status, error.code, error.retry_after_s) == (502, "upstream_unreachable", 7)
    assert error.message == (
        "No model answers for `n`: `a` is not ready: it is being loaded; `b` is not here: no worker and no external"
        " route has it; `c`: worker w cannot be reached: connection refused."
    )
    _, alone = next_step(named(), refused(NEVER, "not_ready"), NOW)
    assert (alone.failure.status, alone.failure.param) == (503, None)
    _, alone = next_step(named(), refused(NOT_READY, "not_ready"), NOW)
    assert alone.failure == Failure.of(NOT_READY)


def test_names_fit_in_headers():
    """A name of other letters is quoted."""
    assert [shown("org/m:1 x"), shown("größe")] == [b"org/m:1 x", b"gr%C3%B6%C3%9Fe"]


@given(
    st.integers(1, 5), st.sets(st.sampled_from(REASONS)), st.lists(st.sampled_from((*REASONS, "")), max_size=60),
    st.integers(0, 3),
)  # fmt: skip
def test_every_way_ends(count, goes_on, reasons, retries):
    """Whatever happens, each model is asked once, again as often as it may be, and once more if it was passed over."""
    models = [f"m{number}" for number in range(count)]
    route = RequestRoute(models[0], tuple(models[1:]), "n", tuple(goes_on), retries=retries, repeats_until=math.inf)
    asked = []
    for reason in [*reasons, *["5xx"] * 60]:
        asked.append(route.model)
        outcome = full(kind={"busy": "full", "loading": "loadable"}[reason]) if reason in ("busy", "loading") else None
        route, step = next_step(route, outcome or refused(NOT_READY, reason), NOW)
        if isinstance(step, Wait):  # in vain
            route, step = next_step(route, refused(QUEUE_FULL, "queue_full"), NOW)
        if isinstance(step, Refuse):
            break
    else:
        raise AssertionError("it never ends")
    assert route.tries == len(asked)
    assert asked[0] == "m0"
    assert list(dict.fromkeys(asked)) == models[: len(set(asked))]
    assert max(asked.count(model) for model in models) <= 2 * (retries + 1)
    assert len(route.passed) <= 2 * count


VALUES = (Failure, BodyEdits, RequestRoute, Outcome, Found, Lookup, Wait, AttemptStep, Refuse, Done)


def values_of(kind):
    """Return a strategy of values with all fields set: NaN is left out, since it is not equal to itself."""
    return st.builds(kind, **{name: field_of(hint) for name, hint in typing.get_type_hints(kind).items()})


def field_of(hint):
    if hint is float:
        return st.floats(allow_nan=False)
    if hint in VALUES:
        return values_of(hint)
    return st.none() | values_of(Failure) if hint == Failure | None else st.from_type(hint)


@given(st.one_of(*map(values_of, VALUES)))
def test_values_come_back_from_another_process_unchanged(value):
    """They have nothing that only this process has."""
    converter = make_converter()
    assert converter.structure(json.loads(json.dumps(converter.unstructure(value))), type(value)) == value


def test_a_value_of_another_kind_is_refused():
    """The check above can fail: an outcome of no known kind is none."""
    with pytest.raises(cattrs.BaseValidationError):
        make_converter().structure({"kind": "bored"}, Outcome)
