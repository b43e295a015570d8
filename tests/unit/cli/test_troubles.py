"""What `status` says is wrong, in which order."""

import time

import pytest

from ichat.cli.troubles import BAD, config_sentence, time_of, troubles_of

OK = {"state": "ok", "path": "/i.toml", "since": 1e9, "in_force_since": 1e9, "errors": []}


def worker(name, state, model="m", **more):
    return {"worker_id": name, "state": state, "model_names": [model], **more}


def test_a_gateway_that_is_well_has_none():
    """Nor one that is older and says nothing of its file, whose model is loading, cold or served elsewhere."""
    models = [{"id": "m", "workers": 0}, {"id": "d", "workers": 0, "loaded": False}, {"id": "far", "workers": 1}]
    workers = [worker("m-0", "loading"), worker("d-0", "cold", "d")]
    assert troubles_of({"config": OK, "models": models}, workers) == []
    assert troubles_of({}, []) == []


def test_the_file_is_first_then_workers_then_models():
    """Each with the reason, where one is known."""
    config = {**OK, "state": "refused", "errors": ["server_settings.portt: unknown key; did you mean port?"]}
    failed = worker("m-0", "failed", failure="ended with exit code 64", cause="unknown flag")
    again = worker("n-0", "ready", "n", cause="of an earlier end")
    models = [{"id": "m", "workers": 0, "loaded": None}, {"id": "n", "workers": 1}]
    file, of_worker, of_model = troubles_of({"config": config, "models": models}, [again, failed])
    assert file.startswith("/i.toml is refused since 2001-09-")
    assert file.endswith(" is in force: server_settings.portt: unknown key; did you mean port?")
    assert of_worker == "worker m-0 is failed: ended with exit code 64: unknown flag"
    assert of_model == "model m has no replicas: no worker and no route can take a request for it"


def test_a_cause_belongs_to_the_end_that_it_explains():
    """A worker that was started again, and fails its health checks now, is not down for what ended it before."""
    ill = worker("m-0", "unhealthy", failure="/health is answered with 500", cause="CUDA out of memory")
    assert troubles_of({}, [ill]) == ["worker m-0 is unhealthy: /health is answered with 500"]


def test_of_many_only_some_are_named():
    """So that the rest of what is wrong stays in sight."""
    told = troubles_of({}, [worker(f"w{number}", "failed") for number in range(500)])
    assert (len(told), told[-1]) == (21, "and 480 more like these")


def test_a_changed_file_is_named_until_it_is_in_force():
    """An older gateway says nothing of its file; one with a newer state is not in trouble."""
    changed = config_sentence({**OK, "state": "changed"})
    assert changed.startswith("/i.toml has changed at 2001-09-")
    assert [config_sentence(one) for one in ({}, OK, {**OK, "state": "new"})] == ["", "", ""]
    assert config_sentence({**OK, "state": "refused"}).endswith(" is in force")


@pytest.mark.parametrize("at", [None, "x", -1, 2**40, float("nan")])
def test_a_time_that_no_calendar_has_is_a_question_mark(at):
    assert time_of(at) == "?"


def test_a_time_of_today_has_no_day():
    now = time.time()
    assert [len(time_of(at)) for at in (now, now - 3600, now - 48 * 3600)] == [5, 5, 16]


@pytest.mark.parametrize(
    ("state", "is_named"),
    [
        *((state, True) for state in sorted(BAD)),
        ("ready", False),
        ("cold", False),
        ("asleep", False),
        ("a-new-one", False),
    ],
)
def test_each_bad_state_of_a_worker_is_named(state, is_named):
    assert bool(troubles_of({}, [worker("w", state)])) is is_named
