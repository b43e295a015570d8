"""Requests that an earlier owner has tried: the next owner goes on after its attempts, and repeats none."""

import itertools
import types

import pytest
from support.owner_rig import owner_of

from ichat.relays.values import SentAsk

ROUTES = "".join(
    f"""
[[external_routes]]
model_name = "{model}"
api_base = "http://127.0.0.1:{port}/v1"
"""
    for model, port in (("m", 8), ("m", 9), ("other", 10))
)
NAME = """
[[models]]
name = "n"
targets = [{ model = "m" }]
fallbacks = ["other"]
fallback_on = ["5xx"]
"""


class Relay:
    """A relay that keeps what it is sent."""

    def __init__(self, owner):
        self.talk, self.frames, self._numbers = types.SimpleNamespace(settings=1), [], itertools.count(1)
        self.desk = owner.desk_of(self)

    def send(self, frame):
        self.frames.append(frame)

    def ask(self, model, *tried):
        """Return the answer to an ask after these attempts."""
        number = next(self._numbers)
        rows = tuple((endpoint, "m", kind) for endpoint, kind in tried)
        asked = SentAsk(number, 1, f"id{number}", model, b"/v1/completions", peer="127.0.0.1:9", host=b"127.0.0.1")
        self.desk.receives(asked._replace(tried=rows))
        return self.frames[-1]


@pytest.fixture
async def relay(tmp_path):
    async with owner_of(tmp_path, ROUTES + NAME) as owner:
        yield Relay(owner)


async def test_an_endpoint_that_has_failed_with_a_request_is_not_chosen_again(relay):
    """The other one is, each time, though the new owner knows nothing against the first."""
    ends = {relay.ask("m").step.endpoint for _ in range(4)}
    assert len(ends) == 2
    for failed in ends:
        for _ in range(4):
            sent = relay.ask("m", (failed, "unreachable"))
            assert {sent.step.endpoint} == ends - {failed}
            assert sent.attempt == 2
    refused = relay.ask("m", *((one, "unreachable") for one in ends))
    assert refused.refuse.failure.code == "upstream_unreachable"
    assert relay.ask("m", ("a worker that is not known", "unreachable")).step.endpoint in ends


async def test_a_request_that_was_worked_on_is_sent_to_no_other_endpoint(relay):
    """The earlier owner died before it could refuse it; where the name says so, the next model follows."""
    end = relay.ask("m").step.endpoint
    for kind in ("broken", "late", "unfit", "over"):
        assert relay.ask("m", (end, kind)).refuse.failure.status == 502
        assert relay.frames[-1].kind == "refuse"
    assert relay.ask("n", (end, "broken")).step.model == "other"
    assert relay.ask("n", (end, "over")).refuse.failure.code == "upstream_failed"
