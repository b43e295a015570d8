"""The relay's side of decisions: what it reports of requests whose clients leave."""

import pytest

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.proxy.steps import AttemptStep
from ichat.relays.frame_desk import Asking, FrameDesk
from ichat.relays.frames import ASK_BYTES_MAX, OWN_BYTES_MAX, encode, has_large_ask
from ichat.relays.link import hello
from ichat.relays.relay_asks import admit, report_refusal
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import HEAD_ONLY, MonotonicNs, SentAsk, SentOutcome, SentStep

NOW = MonotonicNs(1)


def test_a_client_that_leaves_in_the_turn_of_its_step_frees_its_place():
    """The task was cancelled before it could receive the step: the owner hears that the request has left."""
    talk, sent = RelayTalk(), []
    talk.meet_owner(hello(1), NOW)
    desk = FrameDesk(talk, sent.append, lambda: NOW)
    asking = Asking()
    desk.begin(SentAsk(1, NOW, "id1", "m", b"/v1/completions"), asking)
    step = SentStep(1, 1, AttemptStep("w", "m"), key="k")
    desk.receive(step, has_effect=talk.receives(step, NOW))
    desk.end(asking)
    outcome = sent[-1]
    assert isinstance(outcome, SentOutcome)
    assert (outcome.number, outcome.attempt, outcome.outcome.kind) == (1, 1, "left")
    assert talk.requests == {}


ASKED = SentAsk(1, NOW, "id1", "m", b"/v1/completions")
LARGE = ASK_BYTES_MAX
TRIED = tuple(("w" * 64, "m" * 128, "unreachable") for _ in range(16))


@pytest.mark.parametrize("has_owner", [True, False])
@pytest.mark.parametrize("asked", [
    ASKED._replace(path=b"/v1/completions?" + b"x" * LARGE), ASKED._replace(credential=b"Bearer " + b"x" * LARGE),
    ASKED._replace(model="m" * LARGE), ASKED._replace(model="m" * 100_000), ASKED._replace(method=b"X" * LARGE),
    ASKED._replace(headers=((b"origin", b"\xff" * (LARGE // 6)),)), ASKED._replace(previous_response_id="x" * LARGE),
    ASKED._replace(model="\U0001f600" * (LARGE // 4)), ASKED._replace(credential=b"x" * OWN_BYTES_MAX),
])  # fmt: skip
async def test_an_ask_that_no_frame_can_have_is_refused_and_leaves_nothing(asked, has_owner):
    """The client gets 431: nothing is sent, now or to the next owner."""
    talk, sent = RelayTalk(), []
    if has_owner:
        talk.meet_owner(hello(1), NOW)
    desk = FrameDesk(talk, sent.append, lambda: NOW)
    with pytest.raises(ApiError) as refused:
        desk.begin(asked, Asking())
    with pytest.raises(ApiError) as not_admitted:
        await admit(desk, asked._replace(bits=HEAD_ONLY))
    assert {(one.value.status, one.value.code) for one in (refused, not_admitted)} == {(431, "head_too_large")}
    assert (desk.asking, talk.requests, sent) == ({}, {}, [])


@pytest.mark.parametrize("asked", [
    ASKED, ASKED._replace(credential=b"x" * (OWN_BYTES_MAX - 1024)), ASKED._replace(path=b"/x?" + b"\xff" * 1900),
    ASKED._replace(model="m" * (OWN_BYTES_MAX - 1024)), ASKED._replace(headers=((b"origin", b"x" * 10_000),)),
])  # fmt: skip
def test_an_ask_that_is_not_refused_has_room_for_its_attempts(asked):
    """It is written again with each attempt that has failed."""
    assert not has_large_ask(asked)
    encode(asked._replace(tried=TRIED, queued_s=1 / 3))


@pytest.mark.parametrize(("count", "has_headers"), [(10, True), (2000, False)])
def test_a_refusal_is_reported_however_large_its_head_is(count, has_headers):
    """A frame that is too large goes without headers, and the client gets its refusal."""
    talk, sent = RelayTalk(), []
    talk.meet_owner(hello(1), NOW)
    desk = FrameDesk(talk, lambda frame: sent.append((frame, encode(frame))), lambda: NOW)
    headers = [(b"x", b"\xff" * 1000)] * count
    head = RequestHead(b"X" * LARGE, b"/v1/completions?" + b"x" * LARGE, b"1.1", headers, 0)
    report_refusal(desk, errors.bad_request("No."), b"id1", "peer", head)
    ((note, _),) = sent
    assert (note.kind, note.content["id"], bool(note.content["headers"])) == ("record", "id1", has_headers)
