"""The marks of the event stream: a field of a view that differs is a change."""

import attrs
import pytest

from ichat.admin.changes import (
    FIGURES_OF_MODEL,
    FIGURES_OF_WORKER,
    MOVING_OF_WORKER,
    facts_in,
    marks_of_model,
    marks_of_worker,
)
from ichat.admin.views import ModelLoad
from ichat.fleet.fleet import Fleet
from ichat.fleet.views import WorkerSummary, summarize
from ichat.fleet.worker_record import WorkerRecord
from ichat.protocol.load_story import LoadStory, StoryPhase
from ichat.protocol.messages import Heartbeat
from ichat.routing.circuit_breaker import CircuitView

RECORD = WorkerRecord("w", managed=False, heartbeat=Heartbeat(worker_id="w", model_name="m", host="h", port=1))
FLEET = Fleet({}, lambda: 0.0, 1)
FLEET.table.enter(RECORD)
VIEW = summarize(FLEET.table, RECORD)
LOAD = LoadStory(1.2, 9.0, (StoryPhase("loading weights", 1.2),))
CIRCUIT = CircuitView("open", 5, 3.0)


def marks(record=RECORD, **changes):
    return marks_of_worker(attrs.evolve(VIEW, **changes), record)


@pytest.mark.parametrize("name", facts_in(WorkerSummary, *FIGURES_OF_WORKER, *MOVING_OF_WORKER))
def test_each_other_field_of_a_worker_is_a_fact(name):
    """A view whose field differs differs in its facts, whichever field it is."""
    assert marks(**{name: "another"})[0] != marks()[0]


@pytest.mark.parametrize("name", FIGURES_OF_WORKER)
def test_figures_of_a_worker_are_no_facts(name):
    """What changes all the time differs in the figures alone."""
    (facts, figures), (facts_before, figures_before) = marks(**{name: 0.123}), marks()
    assert (facts, figures != figures_before) == (facts_before, True)


def test_the_clock_alone_changes_nothing():
    """Ages and times left are no change, nor what is left of a circuit's rest; what they are counted from is."""
    left = [one for one in attrs.fields_dict(WorkerSummary) if one.endswith(("_age_s", "_in_s"))]
    assert len(left) == 3
    assert marks(**dict.fromkeys(left, 5.5)) == marks()
    for moved in (attrs.evolve(RECORD, retry_at=7.0), attrs.evolve(RECORD, ready_at=7.0)):
        assert marks(moved)[0] != marks()[0]
    assert marks(circuit=CIRCUIT) == marks(circuit=attrs.evolve(CIRCUIT, retry_in_s=2.0))
    assert marks(circuit=CIRCUIT)[0] != marks(circuit=attrs.evolve(CIRCUIT, state="half-open"))[0]
    assert marks(circuit=CIRCUIT)[1] != marks(circuit=attrs.evolve(CIRCUIT, failures=6))[1]


def test_a_load_is_a_figure_by_its_seconds_and_a_fact_by_its_phases():
    """Its whole seconds go on as a figure; another phase, detail or expectation is a fact."""
    assert marks(load=LOAD) == marks(
        load=attrs.evolve(LOAD, elapsed_s=1.9, phases=(StoryPhase("loading weights", 1.9),))
    )
    assert marks(load=LOAD)[1] != marks(load=attrs.evolve(LOAD, elapsed_s=2.0))[1]
    for other in (
        attrs.evolve(LOAD, expected_s=8.0),
        attrs.evolve(LOAD, phases=(StoryPhase("warming up", 1.2),)),
        None,
    ):
        assert marks(load=LOAD)[0] != marks(load=other)[0]


def test_fields_of_a_model_are_facts_or_figures():
    """Whether requests wait is a fact; how many, and for how long, are figures."""
    view = ModelLoad("m", workers=1, in_flight=0, circuits_open=0, queued=1, waiting_s=None, loaded=None)
    before = marks_of_model(view)
    for name in FIGURES_OF_MODEL:
        facts, figures = marks_of_model(attrs.evolve(view, **{name: 9}))
        assert (facts, figures != before[1]) == (before[0], True)
    for name in facts_in(ModelLoad, *FIGURES_OF_MODEL):
        assert marks_of_model(attrs.evolve(view, **{name: 9}))[0] != before[0]
    assert marks_of_model(attrs.evolve(view, queued=0))[0] != before[0]
