"""The run of chaos: that it judges rightly, and that it finds nothing."""

import random

import pytest
from chaos_faults import Faults, deck
from chaos_load import FakeAnswers, Wrong, error_of, judge
from chaos_wire import Reply
from support.chaos_run import run

SSE = {b"content-type": b"text/event-stream; charset=utf-8"}
ERROR = b'{"error": {"message": "It failed.", "type": "server_error", "param": null, "code": "upstream_failed"}}'
EVENT = b"\n\ndata: " + ERROR + b"\n\n"
WHOLE = b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
MAY_FAIL = {502}
REFUSAL = {b"x-ichat-error": b"gateway", b"retry-after": b"2"}


def whole(data, is_part):
    return WHOLE.startswith(data) if is_part else data == WHOLE


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(200, SSE, WHOLE, "whole"), "right"),
        (Reply(200, SSE, WHOLE[:9] + EVENT, "whole"), "cut by upstream_failed"),
        (Reply(200, SSE, WHOLE[:12] + EVENT, "whole"), "cut by upstream_failed"),
        (Reply(200, SSE, WHOLE[:12], "broken"), "broken off"),
        (Reply(502, REFUSAL, ERROR, "whole"), "502 upstream_failed"),
    ],
)
def test_whole_and_visibly_incomplete_responses_are_right(reply, outcome):
    """Whole, or a clear error, or visibly incomplete."""
    assert judge(reply, whole, MAY_FAIL) == outcome


@pytest.mark.parametrize(
    ("reply", "may_be", "says"),
    [
        (Reply(), MAY_FAIL, "without a byte"),
        (Reply(200, SSE, WHOLE[:18], "whole"), MAY_FAIL, "looks whole"),
        (Reply(200, {}, WHOLE[:9] + EVENT, "whole"), MAY_FAIL, "looks whole"),
        (Reply(200, SSE, WHOLE + EVENT, "whole"), MAY_FAIL, "looks whole"),
        (Reply(200, SSE, WHOLE + WHOLE[-14:], "whole"), MAY_FAIL, "looks whole"),
        (Reply(200, SSE, b"data: 2" + EVENT, "whole"), MAY_FAIL, "wrong before that"),
        (Reply(200, SSE, b"data: 2", "broken"), MAY_FAIL, "wrong before that"),
        (Reply(200, SSE, WHOLE[:9] + EVENT[:-4] + b"\n\n", "whole"), MAY_FAIL, "without an error"),
        (Reply(200, SSE, WHOLE[:12], "broken"), set(), "nothing was done to its worker"),
        (Reply(502, REFUSAL, ERROR, "whole"), set(), "where only success may be"),
        (Reply(502, REFUSAL, ERROR[:20], "whole"), MAY_FAIL, "without an error"),
        (Reply(502, REFUSAL, ERROR[:20], "broken"), MAY_FAIL, "only a part"),
        (Reply(502, REFUSAL, ERROR.replace(b"upstream_failed", b"oops"), "whole"), MAY_FAIL, "the code 'oops'"),
        (Reply(502, REFUSAL, ERROR.replace(b"server_error", b"api_error"), "whole"), MAY_FAIL, "odd error"),
        (Reply(503, {b"x-ichat-error": b"gateway"}, ERROR.replace(b"upstream_failed", b"draining"), "whole"), {503}, "when to come back"),
    ],
)  # fmt: skip
def test_every_wrong_response_is_noticed(reply, may_be, says):
    """Each way in which a response can be wrong is noticed."""
    with pytest.raises(Wrong, match=says):
        judge(reply, whole, may_be)


def test_a_bug_is_no_clear_error():
    """`internal_error` is in no list of what may be."""
    with pytest.raises(Wrong, match="internal_error"):
        error_of(500, ERROR.replace(b"upstream_failed", b"internal_error"))


def test_the_same_seed_is_the_same_run():
    """Faults and their order follow from the seed, and each kind comes once before any comes twice."""
    kinds = list(Faults.KINDS)
    assert deck(7, kinds, 50) == deck(7, kinds, 50) != deck(8, kinds, 50)
    assert sorted(deck(7, kinds, len(kinds))) == sorted(kinds)


def test_a_short_run(tmp_path):
    """Every kind of fault once, under every kind of load: nothing is wrong."""
    found = run(tmp_path, 0.25, 1500)
    assert found["violations"] == []
    assert set(found["faults"]) == set(Faults.KINDS)
    assert sum(of_kind.get("right", 0) for of_kind in found["outcomes"].values()) > 30


def test_the_answers_of_the_fake_engine_differ():
    """What is right for one question is wrong for another."""
    answers = FakeAnswers()
    for make in (answers.plain, answers.stream, answers.embeddings):
        one, other = make(random.Random(1), "m"), make(random.Random(2), "m")
        assert one.body != other.body
        assert one.whole(b"", True)
        assert not one.whole(b"", False)
