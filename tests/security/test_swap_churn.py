"""A client that asks in turn for two models that cannot stand side by side: what that costs the others is bounded."""

import attrs
from support.swap_simulation import LOAD_S, REQUEST_S, STOP_S, Machine, SimulatedWorker

MIN_LOADED_S = 30.0
PAUSE_S = 1.0
HOURS = 2


@attrs.define(eq=False)
class Asking:
    """A client that sends its next request `pause_s` after each answer, for the models in turn."""

    machine: Machine
    models: str
    pause_s: float = 0.0
    answered: int = 0

    def go_on(self):
        self.machine.ask(self.models[self.answered % len(self.models)], self.done)

    def done(self, is_answered):
        self.answered += is_answered
        self.machine.after(self.pause_s, self.go_on)


def two_models(*clients):
    """Return a machine after hours with these clients, of which each is given by its models and its pause."""
    conflicts = {"a": frozenset("b"), "b": frozenset("a")}
    machine = Machine([SimulatedWorker(name, name, conflicts[name], min_loaded_s=MIN_LOADED_S) for name in "ab"])
    asking = [Asking(machine, models, pause_s) for models, pause_s in clients]
    for one in asking:
        machine.at(0.0, one.go_on)
    machine.run(HOURS * 3600)
    return machine, asking


def test_a_busy_model_keeps_its_time():
    """Whatever one client does, a model in use is loaded for `min_loaded_s` in each turn, and not loaded more often."""
    machine, (_, busy) = two_models(("ab", 0.0), ("a", 0.0))
    turn_s = MIN_LOADED_S + 2 * (STOP_S + LOAD_S + PAUSE_S)
    turns = HOURS * 3600 / turn_s
    assert machine.count("start") <= 2 * turns * 1.1
    assert busy.answered >= 0.9 * turns * MIN_LOADED_S / REQUEST_S
    assert max(one.wait_s for one in machine.waited if one.model == "a") <= turn_s


def test_an_idle_model_gives_way_at_most_so_often():
    """A client alone has a model loaded for each request, and no more: every load takes its time, an end and a pause."""
    machine, (churning,) = two_models(("ab", 0.0))
    assert machine.count("start") <= churning.answered + 1
    assert machine.count("start") <= HOURS * 3600 / (LOAD_S + STOP_S + REQUEST_S) + 1
