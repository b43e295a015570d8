"""The changes since the last event: which workers, models and machines followers of the event stream need again.

Facts (state, address, settings) are sent as soon as they change. Figures (requests in flight, progress) change all the
time: each round sends at most `FIGURES_AT_ONCE` of them, oldest first, so the size of an event is bounded. Both are
read from the view that is sent, so that a new field of a view is a fact by itself.
"""

import heapq
import operator

import attrs

from ichat.admin.views import ModelLoad
from ichat.fleet.views import WorkerSummary
from ichat.fleet.worker_record import WorkerRecord

FIGURES_AT_ONCE = 100
"""The most things of a kind with figures in a round."""
_UNSURE = object()
"""Facts or figures of which some followers have others: they differ from all others."""


class ToldMarks:
    """The facts and figures that followers have of a kind of things, by their ids."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[object, object, int]] = {}
        """The facts and figures of each thing, and the round in which they were sent."""
        self._turn = 0

    def __repr__(self) -> str:
        return f"<ToldMarks of {len(self._told)} things>"

    def clear(self) -> None:
        """Forget all of it: there are no followers."""
        self._told.clear()

    def note_state(self, state: dict[str, tuple[object, object]]) -> None:
        """Note the facts and figures in the state that new followers get; `find` returns all that differ from it.

        So they get a thing that is soon as it was for the others, and the others get a thing that stays so.
        """
        for key in self._told.keys() | state.keys():
            told, marks = self._told.get(key), state.get(key)
            if told is None or marks is None or told[0] != marks[0]:
                self._told[key] = (_UNSURE, _UNSURE, self._turn)
            elif told[1] != marks[1]:
                self._told[key] = (told[0], _UNSURE, told[2])

    def find(self, now: dict[str, tuple[object, object]], *, with_figures: bool) -> tuple[list[str], list[str]]:
        """Return the ids of things to send, and the ids of things that are gone.

        `now` has the present facts and figures of each thing. The returned things count as sent.
        """
        self._turn += 1
        told, urgent, later = self._told, list[str](), list[tuple[int, str]]()
        for key, (facts, figures) in now.items():
            known = told.get(key)
            if known is None or known[0] != facts:
                urgent.append(key)
            elif with_figures and known[1] != figures:
                later.append((known[2], key))
        found = urgent + [key for _, key in heapq.nsmallest(FIGURES_AT_ONCE, later)]
        for key in found:
            told[key] = (*now[key], self._turn)
        gone = [key for key in told if key not in now] if len(told) != len(now) or told.keys() != now.keys() else []
        for key in gone:
            del told[key]
        return found, gone


def marks_of_worker(view: WorkerSummary, worker: WorkerRecord) -> tuple[object, object]:
    """Return the facts and figures of a worker: every field of its view except fields that change with the clock alone.

    The start of a time or load that moves is a fact, and a load's whole seconds are a figure.
    """
    load, circuit = view.load, view.circuit
    moving = (
        worker.retry_at,
        worker.ready_at,
        load and (load.expected_s, [(phase.name, phase.detail) for phase in load.phases]),
        circuit and circuit.state,
    )
    return (_facts_of_worker(view), moving), (
        _figures_of_worker(view),
        load and int(load.elapsed_s),
        circuit and circuit.failures,
    )


def marks_of_model(view: ModelLoad) -> tuple[object, object]:
    """Return the facts and figures of a model."""
    return (_facts_of_model(view), view.queued > 0), _figures_of_model(view)


FIGURES_OF_WORKER = ("in_flight", "progress", "running", "waiting", "kv_use", "prefix_hit_rate")
MOVING_OF_WORKER = ("load", "circuit")
"""Fields that the clock changes in part."""
FIGURES_OF_MODEL = ("in_flight", "queued", "waiting_s")


def facts_in(kind: type["attrs.AttrsInstance"], *others: str) -> list[str]:
    """Return the fields of a view that are facts: all but `others`, and ages and times left, which the clock moves."""
    return [name for name in attrs.fields_dict(kind) if name not in others and not name.endswith(("_age_s", "_in_s"))]


_facts_of_worker = operator.attrgetter(*facts_in(WorkerSummary, *FIGURES_OF_WORKER, *MOVING_OF_WORKER))
_figures_of_worker = operator.attrgetter(*FIGURES_OF_WORKER)
_facts_of_model = operator.attrgetter(*facts_in(ModelLoad, *FIGURES_OF_MODEL))
_figures_of_model = operator.attrgetter(*FIGURES_OF_MODEL)
