"""Waiting for a worker that was launched: until it is ready, or the reason of its failure is known."""

import pytest

from ichat.cli.client import JsonReply, Waits
from ichat.cli.launch import ENDING_POLLS_MAX, wait_until_ready
from ichat.errors import Exit


class Asked:
    """A gateway that reports these states of a worker, and the last one from then on."""

    waits = Waits(poll_s=0.0)

    def __init__(self, *workers):
        self.workers = [{"worker_id": "w", "managed": True, **one} for one in workers]
        self.asked = 0

    def get(self, path):
        assert path == "/v1/admin/workers/w"
        self.asked += 1
        return JsonReply(self.workers[min(self.asked, len(self.workers)) - 1], "")


STARTING, READY = {"state": "starting"}, {"state": "ready"}
JUST_ENDED = {"state": "restarting", "failure": "ended with exit code 70", "retry_in_s": 0.0}
ENDED = {**JUST_ENDED, "exit_code": 70, "cause": "no such weights", "last_lines": ["bye"]}
KILLED = {**JUST_ENDED, "failure": "was ended by signal SIGKILL", "signal": "SIGKILL"}


@pytest.mark.parametrize(
    ("states", "restarts", "asked", "sentence"),
    [
        ([STARTING, READY], False, 2, ""),
        ([STARTING, ENDED, READY], True, 3, ""),
        ([STARTING, ENDED], False, 2, "Worker w ended with exit code 70: no such weights."),
        ([JUST_ENDED, JUST_ENDED, ENDED], False, 3, "Worker w ended with exit code 70: no such weights."),
        ([JUST_ENDED, KILLED], False, 2, "Worker w was ended by signal SIGKILL."),
        ([JUST_ENDED], False, ENDING_POLLS_MAX, "Worker w ended with exit code 70."),
        ([{"state": "gone"}, {**ENDED, "state": "failed"}], True, 2,
         "Worker w ended with exit code 70: no such weights."),
        ([{"state": "gone"}], True, ENDING_POLLS_MAX, "Worker w is gone."),
        ([{"state": "gone", "managed": False}], True, 1, "Worker w is gone."),
    ],
)  # fmt: skip
def test_a_worker_that_is_down_is_reported_with_its_reason(states, restarts, asked, sentence):
    """The gateway knows that a process has ended before it has read its last output."""
    api = Asked(*states)
    if sentence:
        with pytest.raises(Exit) as caught:
            wait_until_ready(api, "w", restarts=restarts)
        assert str(caught.value) == sentence
    else:
        assert wait_until_ready(api, "w", restarts=restarts).value["state"] == "ready"
    assert api.asked == asked
