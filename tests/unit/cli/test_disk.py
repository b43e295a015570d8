"""`remove`: a model goes only if it is known that no worker has it."""

import argparse
import types

import pytest

from ichat.cli import disk
from ichat.cli.client import EXIT_REFUSED, RequestRefused, Unreachable
from ichat.cli.screen import Screen
from ichat.errors import Exit


class Gateway:
    """Answers a question for its workers as a test says: with workers, or with an error."""

    def __init__(self, answer):
        self.place = types.SimpleNamespace(is_here=True)
        self._answer = answer

    def call(self, method, path, *, params):
        assert (method, path, params) == ("GET", "/v1/admin/workers", {"full": "1"})
        if isinstance(self._answer, Exit):
            raise self._answer
        return types.SimpleNamespace(value={"data": self._answer})


@pytest.fixture
def model(tmp_path):
    """The directory of a model in a cache."""
    directory = tmp_path / "models--org--m"
    (directory / "blobs").mkdir(parents=True)
    (directory / "blobs/x").write_bytes(b"x" * 4096)
    return directory


def remove(model, answer):
    args = argparse.Namespace(model="org/m", hub="huggingface", cache=str(model.parent), config=None, json=False)
    return disk.remove(Gateway(answer), Screen(), args)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (RequestRefused(403, "forbidden", "This key may not see workers."), "not known which workers have the model: This"),
        (Unreachable("no answer in 10 s", timed_out=True), "not known which workers have the model: no answer"),
        ([{"worker_id": "a-0", "model_path": "org/m"}], "org/m is the model of worker a-0: stop and remove that first."),
    ],
)  # fmt: skip
def test_a_model_that_a_worker_may_have_stays(model, answer, sentence):
    """Also if a gateway is there and does not list its workers."""
    with pytest.raises(Exit) as caught:
        remove(model, answer)
    assert caught.value.code == EXIT_REFUSED
    assert sentence in str(caught.value)
    assert (model / "blobs/x").exists()


@pytest.mark.parametrize("answer", [[], [{"worker_id": "a-0", "model_path": "org/other"}], Unreachable("refused")])
def test_a_model_without_a_worker_goes(model, answer):
    """Without a gateway here, none of its workers has it."""
    assert remove(model, answer) == 0
    assert not model.exists()
