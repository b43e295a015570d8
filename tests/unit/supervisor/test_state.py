"""What the gateway writes down of workers, and what the next one makes of it."""

import json

import attrs
import pytest

from ichat.fleet.fleet import Fleet
from ichat.fleet.views import describe
from ichat.protocol.messages import Group, Heartbeat, LoadPhase, ModelCard, parse_heartbeat, saved_form
from ichat.supervisor.state import SavedManagedWorker, SavedRemoteWorker, SavedState, SavedStoppedWorker, StateDirectory

ARGS = {"max_model_len": 4096, "nested": {"a": [1, None, "ü"]}}
HEARTBEATS = [
    Heartbeat("w", "m", "10.0.0.1", 8000),
    Heartbeat("w", "", "10.0.0.1", 8000, state="gone"),
    Heartbeat("w", "m", "127.0.0.1", 0, state="ready", unix_socket=True),
    Heartbeat(
        "w", "m", "10.0.0.1", 8000, models=[ModelCard("m", "/m", None, 9), ModelCard("lora", parent="m")],
        model_names=["m"], group=Group("g", 0, 2), backend="vllm", state="loading", phase="loading weights",
        heartbeat_interval=3.5, unix_socket=True, max_in_flight=7, pid=5, start_id="s", versions={"vllm": "1"},
        changed_args=["max_model_len"], progress={"running": 0.0, "waiting": None}, failure="The engine died",
        loaded=[LoadPhase("importing vLLM", 4.0), LoadPhase("loading weights", 2.0, "1 of 2 shards")],
    ),
]  # fmt: skip


@pytest.fixture
def state(tmp_path):
    return StateDirectory(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("heartbeat", HEARTBEATS)
@pytest.mark.parametrize("args", [None, ARGS])
def test_a_heartbeat_is_read_as_it_was(state, heartbeat, args):
    """What is left out since it is empty comes back as empty."""
    started = [SavedManagedWorker("mine", {"model": "m"}, is_launched=True, pid=3, stamp="x", launch=4)]
    saved = SavedState(
        started=started, heard=[SavedRemoteWorker(saved_form(heartbeat, args), 5.0, "t")] * 2, launches=7,
        stopped=[SavedStoppedWorker("resting", {"model": "n"}, 6.0)],
    )  # fmt: skip
    state.save(saved)
    known = state.load()
    assert known == saved
    assert parse_heartbeat(known.heard[1].heartbeat) == attrs.evolve(heartbeat, args=args or {})


def test_a_load_that_goes_on_is_not_kept(state):
    """It may be long over when the next gateway reads of it."""
    heartbeat = attrs.evolve(HEARTBEATS[0], state="loading", load=[LoadPhase("importing vLLM", 4.0)])
    state.save(SavedState(heard=[SavedRemoteWorker(saved_form(heartbeat, None), 5.0, "t")]))
    assert parse_heartbeat(state.load().heard[0].heartbeat) == attrs.evolve(heartbeat, load=[])


def test_state_of_an_earlier_version_is_read(state, tmp_path):
    """It wrote all of a heartbeat, with its arguments, and did not count its launches."""
    heartbeat = attrs.evolve(HEARTBEATS[-1], args=ARGS)
    before = SavedState(heard=[SavedRemoteWorker(attrs.asdict(heartbeat), 5.0, "t")])
    text = json.dumps({name: value for name, value in attrs.asdict(before).items() if name != "launches"})
    (tmp_path / "workers.json").write_text(text)
    assert state.load().launches == 0
    assert parse_heartbeat(state.load().heard[0].heartbeat) == heartbeat


def test_arguments_are_kept_for_foreign_workers():
    """A worker that is not iChat's own may never send a heartbeat again; the others do as soon as they are asked."""
    fleet = Fleet({}, lambda: 1000.0, max_in_flight=5)
    fleet.registry.record_heartbeat(Heartbeat("other", "m", "h", 1, args=ARGS))
    fleet.registry.record_heartbeat(Heartbeat("own", "m", "h", 1, args=ARGS, start_id="s"))
    kept = {heartbeat.worker_id: args and args.unpack() for heartbeat, _, args in fleet.registry.snapshot()}
    assert kept == {"other": ARGS, "own": None}


def test_arguments_stay_until_the_next_start():
    """A heartbeat without arguments has not lost them; a new start has others. The same arguments are kept once."""
    fleet = Fleet({}, lambda: 1000.0, max_in_flight=5)
    first = Heartbeat("w", "m", "h", 1, args=ARGS, start_id="1")
    fleet.registry.record_heartbeat(first)
    fleet.registry.record_heartbeat(attrs.evolve(fleet.table.get("w").heartbeat, phase="well"))
    assert describe(fleet.table, fleet.table.get("w"))["args"] == ARGS
    fleet.registry.record_heartbeat(attrs.evolve(first, worker_id="other", args=dict(ARGS)))
    assert fleet.table.get("other").args is fleet.table.get("w").args
    fleet.registry.record_heartbeat(attrs.evolve(first, start_id="2", args={}))
    assert describe(fleet.table, fleet.table.get("w"))["args"] == {}
