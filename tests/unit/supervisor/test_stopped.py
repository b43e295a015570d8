"""Workers that an operator has stopped: which of them a configuration leaves stopped."""

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.supervisor.stopped import stay_stopped


def spec(name="a", **more):
    return ManagedWorkerConfig(model_name=name, model_path="/m", **more)


@pytest.mark.parametrize(
    ("wanted", "running", "stopped", "stay"),
    [
        ([spec()], [], {"a-0": spec()}, ["a-0"]),
        ([], [], {"a-0": spec()}, []),
        ([spec(port=1)], [], {"a-0": spec()}, []),
        ([spec()], [spec()], {"a-0": spec()}, []),
        ([spec(), spec()], [spec()], {"a-0": spec(), "a-1": spec()}, ["a-0"]),
        ([spec(), spec("b")], [spec("b")], {"a-0": spec(), "b-1": spec("b")}, ["a-0"]),
    ],
    ids=["as it was", "without a table", "with another table", "runs already", "two copies", "other models"],
)
def test_a_worker_stays_stopped_while_its_table_is_wanted_and_free(wanted, running, stopped, stay):
    """A table that is wanted once more than it runs leaves one worker stopped."""
    assert stay_stopped(wanted, running, stopped) == stay
