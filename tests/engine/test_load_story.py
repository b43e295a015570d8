"""What is told of the loads of both real engines: their phases in order, and at the second load those of the first."""

import os
import signal

import pytest
from support.real_engines import LOAD_S, python_of

from ichat.cli import estimate
from ichat.config import load as configuration
from ichat.config.engine_args import arguments_of
from ichat.engines.kept_flags import version_of
from ichat.placement.learnt import version_in
from ichat.preflight.learnt_file import read_learnt

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
NEAR_S = 1.5
"""So much may lie between what a worker measures and what its phases say."""


def loads_of(place, start_before=None):
    """Return what is told of the load while it goes on, and the worker once it is ready after another start."""
    seen, found = [], {}

    def is_ready():
        worker = place.worker()
        if worker.get("start_id") == start_before:
            return False
        found.update(worker)
        if worker["state"] != "ready" and worker["load"]:
            seen.append(worker["load"])
        return worker["state"] == "ready"

    place.program.until(is_ready, LOAD_S)
    return seen, found


def names_of(load):
    return [phase["name"] for phase in load["phases"]]


def test_a_load_shows_its_phases_in_order(watched):
    """Import, weights and KV cache come in order, each with its seconds; the second load has the first one beside it."""
    place = watched
    seen, worker = loads_of(place)
    last = worker["last_load"]
    title = TITLES[place.engine]
    wanted = [f"importing {title}", "starting its processes", "loading weights", "sizing the KV cache", "warming up"]
    assert [name for name in names_of(last) if name in wanted] == wanted
    assert names_of(last)[:2] == ["checking", "starting the process"]
    for load in [*seen, last]:
        assert load["elapsed_s"] == pytest.approx(sum(phase["seconds"] for phase in load["phases"]), abs=0.01)
        assert names_of(load) == names_of(last)[: len(names_of(load))], "phases only go forward"
    assert {names_of(load)[-1] for load in seen} >= {f"importing {title}", "starting its processes"}
    assert [load["elapsed_s"] for load in seen] == pytest.approx(sorted(load["elapsed_s"] for load in seen), abs=NEAR_S)
    seconds = {phase["name"]: phase["seconds"] for phase in last["phases"]}
    own = seconds.pop("checking") + seconds.pop("starting the process")
    assert last["elapsed_s"] - own == pytest.approx(place.metric("ichat_worker_load_seconds"), abs=NEAR_S)
    assert seconds[f"importing {title}"] > 0.5
    assert "is ready after" in place.program.text()
    os.kill(worker["pid"], signal.SIGKILL)
    again, worker = loads_of(place, worker["start_id"])
    assert {load["expected_s"] for load in again} == {last["elapsed_s"]}
    first, second = last["phases"], worker["last_load"]["phases"]
    expected = {phase["name"]: phase["seconds"] for phase in first}
    assert {phase["name"]: phase["expected_s"] for phase in second if phase["name"] in expected} == expected
    assert worker["last_load"]["elapsed_s"] > 1


def test_a_load_teaches_the_memory_of_its_model(watched):
    """The engine's own figure of its tokens is in the worker's heartbeat, and in the next estimate, as learnt."""
    place = watched
    place.wait()
    memory, state = place.worker()["memory"], str(place.directory / "state")
    newest = [memory["weights_bytes"]]  # an earlier load may have been learnt before
    place.program.until(lambda: [one.weights_bytes for one in read_learnt(state)[0]] == newest)
    known, why = read_learnt(state)
    (load,) = known
    assert (load.tokens, load.name, load.key.backend, why) == (memory["tokens"], "tiny", place.engine, "")
    assert load.version == version_in(version_of(place.engine, python_of(place.engine)))
    if place.engine == "vllm":
        assert memory["tokens"] == memory["blocks"] * memory["block_tokens"]
        assert load.cache_bytes % memory["blocks"] == 0
    else:
        assert memory["tokens"] == place.worker()["args"]["max_total_tokens"]
        assert (load.weights_bytes, load.cache_bytes) == (memory["weights_bytes"], memory["cache_bytes"])
    spec = configuration.load(place.config).managed_workers[0]
    answer = estimate.answer_for(spec.model_path, spec.backend, arguments_of(spec), None, known)
    assert (answer.found.tokens, answer.found.cache_grade) == (memory["tokens"], "learnt")
    other = {**arguments_of(spec), "max_num_seqs": 3}
    assert estimate.answer_for(spec.model_path, spec.backend, other, None, known).learnt is None
