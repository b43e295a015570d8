"""The relay's side of decisions: what it reports of requests whose clients leave."""

from ichat.proxy.steps import AttemptStep
from ichat.relays.frame_desk import FrameDesk
from ichat.relays.link import hello
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import MonotonicNs, SentAsk, SentOutcome, SentStep

NOW = MonotonicNs(1)


def test_a_client_that_leaves_in_the_turn_of_its_step_frees_its_place():
    """The task was cancelled before it could receive the step: the owner hears that the request has left."""
    talk, sent = RelayTalk(), []
    talk.meet_owner(hello(1), NOW)
    desk = FrameDesk(talk, sent.append, lambda: NOW)
    asking = desk.begin(
        SentAsk(1, NOW, "id1", "m", b"/v1/completions"), cancel=lambda: None, comment=lambda _text: None
    )
    step = SentStep(1, 1, AttemptStep("w", "m"), key="k")
    desk.receive(step, has_effect=talk.receives(step, NOW))
    desk.end(asking)
    outcome = sent[-1]
    assert isinstance(outcome, SentOutcome)
    assert (outcome.number, outcome.attempt, outcome.outcome.kind) == (1, 1, "left")
    assert talk.requests == {}
