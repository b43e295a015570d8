"""`replicas`: its two forms, and a sentence for every number and every other key that cannot be."""

import json

import pytest

from ichat.admin.config_schema import config_schema
from ichat.config import load as configuration
from ichat.config.copies import each_copy
from ichat.config.replicas import Replicas
from ichat.config.schema import Config
from ichat.errors import ApiError, Exit

WORKER = """
[[managed_workers]]
model_name = "m"
model_path = "/m"
"""


def read(text):
    (worker,) = configuration.parse(WORKER + text, "x.toml").managed_workers
    return worker


@pytest.mark.parametrize(
    ("text", "replicas", "load", "workers"),
    [
        ("", Replicas(1, 1), "start", 1),
        ("replicas = 1", Replicas(1, 1), "start", 1),
        ("replicas = 64", Replicas(64, 64), "start", 64),
        ("replicas = { min = 2, max = 4 }", Replicas(2, 4), "start", 2),
        ("replicas = { min = 0, max = 1 }", Replicas(0, 1), "on_demand", 1),
        ('replicas = { min = 0, max = 1 }\nload = "on_demand"\nidle_s = 5', Replicas(0, 1), "on_demand", 1),
        ('load = "on_demand"', Replicas(1, 1), "on_demand", 1),
        ("replicas = 2\nport = 0\ngpu_ids = []", Replicas(2, 2), "start", 2),
    ],
)
def test_a_number_has_two_forms(text, replicas, load, workers):
    """A single number is both bounds, and a `min` of 0 loads the model on demand."""
    found = read(text)
    assert (found.replicas, found.load, len(each_copy([found]))) == (replicas, load, workers)
    assert not found.backend_args


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("replicas = 0", "replicas: begins at 1; { min = 0, max = 1 } loads the model on demand"),
        ("replicas = -1", "replicas: begins at 1; { min = 0, max = 1 } loads the model on demand"),
        ("replicas = { min = 0, max = 0 }", "replicas: begins at 1; { min = 0, max = 1 } loads the model on demand"),
        ("replicas = { min = 3, max = 2 }", "replicas: max (2) is below min (3)"),
        ("replicas = { min = 1, max = 65 }", "replicas: max may be at most 64, not 65"),
        ("replicas = 65", "replicas: max may be at most 64, not 65"),
        (
            "replicas = { min = 0, max = 2 }",
            "replicas: with min = 0, max must be 1, not 2: a single copy is loaded on demand",
        ),
        ("replicas = true", "replicas: must be a whole number, or { min = 1, max = 4 }, not true"),
        ("replicas = 2.0", "replicas: must be a whole number, or { min = 1, max = 4 }, not 2.0"),
        ('replicas = "2"', 'replicas: must be a whole number, or { min = 1, max = 4 }, not "2"'),
        ("replicas = { min = 1 }", "replicas.max: is missing"),
        ("replicas = { min = 1, max = 2, mix = 3 }", "replicas.mix: unknown key; did you mean min?"),
        (
            "replicas = 2\nport = 8001",
            "port: two copies cannot have the same port: leave port out (0: any free port), or write two tables",
        ),
        (
            "replicas = 2\ngpu_ids = [0]",
            "gpu_ids: two copies cannot have the same GPUs: write gpus = 1, or two tables",
        ),
        (
            "scale = { down_s = 5 }",
            "scale.down_s (5) must be at least scale.up_s (10): otherwise the number of copies never rests",
        ),
        ("scale = { busy = 2 }", "scale.busy: must be from 0.05 to 1, not 2"),
        ("scale = 3", "scale: must be a table, not 3"),
        (
            'replicas = { min = 0, max = 1 }\nload = "start"',
            "load: replicas.min = 0 means that the model is loaded on demand: leave load out",
        ),
        (
            'replicas = { min = 1, max = 2 }\nload = "on_demand"',
            "load: a single copy is loaded on demand: leave load out, or write replicas = { min = 0, max = 1 }",
        ),
    ],
)
def test_a_number_that_cannot_be_has_its_sentence(text, problem):
    """In the file, and for a worker that is launched."""
    with pytest.raises(Exit) as caught:
        read(text)
    assert str(caught.value).splitlines()[1:] == [f"  managed_workers[0].{problem}"]
    table = configuration.parse_toml(f'model_name = "m"\nmodel_path = "/m"\n{text}')
    with pytest.raises(ApiError) as refused:
        configuration.read_worker(table, Config())
    assert refused.value.message == f"This is not a worker that can be launched: {problem}."


def test_a_saved_table_is_read_again():
    """The state directory has both bounds, and `load` as it follows from them."""
    table = {"model_name": "m", "model_path": "/m", "replicas": {"min": 0, "max": 1}, "load": "on_demand"}
    assert configuration.read_worker(table, Config()) == read("replicas = { min = 0, max = 1 }")


@pytest.mark.parametrize(
    ("value", "replicas"), [(3, Replicas(3, 3)), ({"min": 2}, Replicas(2, 2)), ({"min": 1, "max": 4}, Replicas(1, 4))]
)
def test_an_operators_number_may_leave_max_out(value, replicas):
    assert configuration.read_replicas(value) == replicas


@pytest.mark.parametrize(
    "value", [None, [], {}, {"max": 2}, {"min": "1"}, {"min": 2, "max": 1}, 0, "3", {"min": 1, "x": 1}]
)
def test_an_operators_number_that_cannot_be_is_refused(value):
    with pytest.raises(ApiError) as caught:
        configuration.read_replicas(value)
    assert (caught.value.status, caught.value.code) == (400, "bad_request")


def test_editors_know_both_forms():
    schema = config_schema()["properties"]["managed_workers"]["items"]["properties"]["replicas"]
    assert schema["type"] == ["integer", "object"]
    assert {*schema["properties"]} == {"min", "max"}
    assert json.dumps(schema)
