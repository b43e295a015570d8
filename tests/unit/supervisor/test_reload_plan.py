"""The plan of a reload: what changed is done, what did not is not touched, and the reasons give nothing away."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.admin.setting_changes import steps_of_settings
from ichat.config import load as configuration
from ichat.config.replicas import Replicas
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.supervisor.reload_plan import (
    Change,
    ReloadStep,
    Running,
    changes_of_workers,
    step_of,
    summary,
)


def spec(model_name="a", **keys):
    return ManagedWorkerConfig(model_name=model_name, model_path=f"/{model_name}", **keys)


def runs(specs, failed=(), launched=()):
    return [Running(f"w{i}", one, i in launched, i in failed) for i, one in enumerate(specs)]


def plan(old, new, *, failed=(), launched=(), engines=({}, {})):
    return changes_of_workers(runs(old, failed, launched), new, *engines)


def actions(changes):
    return [(change.action, change.worker_id) for change in changes]


def the_change(old, new, **more):
    (change,) = plan([old], [new], **more)
    return change


def config(text):
    return configuration.parse(text, "x.toml")


def steps(old, new):
    return [(step.action, step.what) for step in steps_of_settings(config(old), config(new))]


# Workers.


def test_the_order_of_workers_and_keys_changes_nothing():
    """The order of workers, of their keys and of their arguments means nothing."""
    a = spec(backend_args={"x": 1, "y": {"p": 1, "q": 2}}, env={"A": "1", "B": "2"})
    again = spec(env={"B": "2", "A": "1"}, backend_args={"y": {"q": 2, "p": 1}, "x": 1})
    changes = plan([a, spec("b"), a], [spec("b"), again, again])
    assert actions(changes) == [("keep", "w0"), ("keep", "w1"), ("keep", "w2")]
    assert not any(change.why or change.new_first for change in changes)
    assert all(change.spec is not None for change in changes)


def test_new_ones_start_and_those_that_are_gone_stop():
    changes = plan([spec("a"), spec("b")], [spec("b"), spec("c")])
    assert changes == [
        Change("stop", "w0", None, "the configuration has it no more"),
        Change("keep", "w1", spec("b"), ""),
        Change("start", "", spec("c"), "it is in the configuration and does not run"),
    ]


def test_a_worker_that_has_not_served_is_restarted_in_its_place():
    """A second process beside it would serve no request earlier, and the plan speaks of no gap."""
    running = [Running("w0", spec(gpu_ids=[]), False, False, serves=False, is_ready=False)]
    (change,) = changes_of_workers(running, [spec(gpu_ids=[], env={"A": "1"})], {}, {})
    assert (change.action, change.new_first, change.rolls, change.gap) == ("restart", False, False, "")


def test_fewer_copies_end_those_that_are_missed_least():
    """First copies that are down, then those that serve nothing, then those with the fewest requests."""
    old, new = spec(replicas=Replicas(5, 5)), spec(replicas=Replicas(2, 2))
    running = [
        Running("w0", old, False, False, requests=2),
        Running("w1", old, False, False, is_ready=False),
        Running("w2", old, False, False, requests=3),
        Running("w3", old, False, False, requests=1),
        Running("w4", old, False, False, is_down=True, serves=False, is_ready=False),
    ]
    changes = changes_of_workers(running, [new, new], {}, {})
    assert actions(changes) == [("update", "w0"), ("stop", "w1"), ("update", "w2"), ("stop", "w3"), ("stop", "w4")]
    assert changes[1].why == "the configuration has fewer copies of a: 2"


def test_copies_restart_in_turn():
    """A copy that serves waits for the others; a copy that is down, or the only copy that stays, does not."""
    old, new = spec(replicas=Replicas(2, 2)), spec(replicas=Replicas(2, 2), heartbeat_interval=4.0)
    (first, second) = plan([old, old], [new, new])
    assert (first.action, first.rolls, second.rolls) == ("restart", True, True)
    assert step_of(first).why.endswith("without a gap: the copies are restarted in turn")
    (down, up) = changes_of_workers(
        [
            Running("w0", old, False, False, is_down=True, serves=False, is_ready=False),
            Running("w1", old, False, False),
        ],
        [new, new],
        {},
        {},
    )
    assert (down.rolls, up.rolls) == (False, True)
    (alone, stopped) = plan([old, old], [attrs.evolve(new, replicas=Replicas(1, 1))])
    assert (alone.action, alone.rolls, stopped.action) == ("restart", False, "stop")


def test_a_copy_does_not_wait_its_turn_with_a_port_of_another():
    """A single worker becomes one of two copies, and its port is another worker's now."""
    two, other = spec(replicas=Replicas(2, 2), gpu_ids=[]), spec(model_name="b", port=7000, gpu_ids=[])
    changes = plan([spec(port=7000, gpu_ids=[]), spec(gpu_ids=[])], [two, two, other])
    (first,) = (one for one in changes if one.worker_id == "w0")
    assert (first.action, first.rolls, first.new_first) == ("restart", False, False)
    assert first.gap == "with a gap: a new worker needs port 7000"


def test_changed_workers_restart_by_model_and_in_order():
    """Of three alike one goes and another changes: the third goes on."""
    old = [spec(gpu_ids=[0]), spec(gpu_ids=[1]), spec(gpu_ids=[2])]
    changes = plan(old, [spec(gpu_ids=[2]), spec(gpu_ids=[7])])
    assert actions(changes) == [("restart", "w0"), ("stop", "w1"), ("keep", "w2")]
    assert changes[0].spec == spec(gpu_ids=[7])
    assert changes[0].why == "gpu_ids: [0] -> [7]"


def test_another_model_is_another_worker():
    """A worker is never turned into one of another name, even on the same port."""
    assert actions(plan([spec("a", port=1)], [spec("b", port=1)])) == [("stop", "w0"), ("start", "")]


def test_bounds_change_without_a_restart():
    change = the_change(spec(), spec(max_in_flight=5, share_gpus=True))
    assert (change.action, change.why) == ("update", "max_in_flight: not set -> 5; share_gpus: false -> true")
    change = the_change(spec(), spec(max_in_flight=5, heartbeat_interval=4.0))
    assert (change.action, change.why) == ("restart", "heartbeat_interval: 3.0 -> 4.0; max_in_flight: not set -> 5")


def test_when_a_worker_is_loaded_changes_without_a_restart():
    """What runs goes on running when its worker becomes one on demand, and when it becomes a usual one again."""
    keys = {"load": "on_demand", "idle_s": 5.0, "when_idle": "sleep", "min_loaded_s": 1.0}
    change = the_change(spec(), spec(**keys))
    assert (change.action, change.why) == (
        "update",
        'load: "start" -> "on_demand"; idle_s: 0.0 -> 5.0; when_idle: "stop" -> "sleep"; min_loaded_s: 30.0 -> 1.0',
    )
    assert the_change(spec(**keys), spec()).action == "update"


def test_an_engines_argument_named_like_a_key_restarts():
    """`share_gpus` under backend_args is the engine's, not ours."""
    assert the_change(spec(), spec(backend_args={"share_gpus": True})).action == "restart"


def test_an_update_is_preferred_to_a_restart():
    """The one of which only a bound changed is matched before those that must restart anyway."""
    changes = plan([spec(gpu_ids=[0]), spec(gpu_ids=[1])], [spec(gpu_ids=[1], max_in_flight=5), spec(gpu_ids=[2])])
    assert actions(changes) == [("restart", "w0"), ("update", "w1")]


@pytest.mark.parametrize(("old", "new"), [(1, 1.0), (1, True), (0, False), ("1", 1), ([0, 1], [1, 0])])
def test_values_that_only_look_alike_differ(old, new):
    """1, 1.0 and true are different flags, and the order of a list counts."""
    assert the_change(spec(backend_args={"x": old}), spec(backend_args={"x": new})).action == "restart"


def test_not_a_number_is_itself():
    nan = spec(backend_args={"x": float("nan")})
    assert the_change(nan, spec(backend_args={"x": float("nan")})).action == "keep"


def test_a_worker_that_failed_is_tried_again_once_something_of_it_changed():
    """An unrelated save does not load it again in vain; any change of its own table may be what it lacked."""
    change = the_change(spec(), spec(), failed=[0])
    assert (change.action, change.new_first, change.gap) == ("keep", False, "")
    assert change.why.startswith("it has failed and nothing of it has changed")
    change = the_change(spec(gpu_ids=[0]), spec(gpu_ids=[1], max_in_flight=5), failed=[0])
    assert (change.action, change.new_first, change.gap) == ("restart", False, "")
    assert change.why == "it has failed; gpu_ids: [0] -> [1]; max_in_flight: not set -> 5"
    assert the_change(spec(), spec(max_in_flight=5), failed=[0]).action == "restart"
    engines = {"vllm": EngineSettings("/a")}, {"vllm": EngineSettings("/b")}
    assert the_change(spec(backend="vllm"), spec(backend="vllm"), failed=[0], engines=engines).action == "restart"
    (change,) = changes_of_workers(runs([spec()], failed=[0]), [spec()], {}, {}, restart_failed=True)
    assert (change.action, change.why) == ("restart", "it has failed")


def test_a_cold_worker_takes_its_change_with_its_next_load():
    """Nothing of it is restarted, since nothing of it runs."""
    old, new = spec(load="on_demand"), spec(load="on_demand", env={"A": "1"})
    [change] = changes_of_workers([Running("w0", old, False, False, is_cold=True)], [new], {}, {})
    assert (change.action, change.gap) == ("update", "")
    assert change.why == "env.A is new; it is cold, and is loaded so the next time"
    [change] = changes_of_workers([Running("w0", old, False, False)], [new], {}, {})
    assert (change.action, change.gap) == ("restart", "with a gap: it is loaded again once its model is wanted")


@pytest.mark.parametrize(
    ("old", "new", "gap"),
    [
        ({"gpu_ids": []}, {"gpu_ids": [], "env": {"A": "1"}}, "without a gap: the new process starts beside it"),
        ({"gpu_ids": [0, 1]}, {"gpu_ids": [1, 2]}, "with a gap: both need GPU 1"),
        ({"gpu_ids": [0], "port": 9}, {"gpu_ids": [1], "port": 9}, "with a gap: both need port 9"),
        ({}, {"env": {"A": "1"}}, "with a gap: without gpu_ids each may use every GPU"),
    ],
)
def test_a_restart_says_whether_the_model_is_served_all_the_while(old, new, gap):
    """And what keeps the new process from starting beside the old process."""
    change = the_change(spec(**old), spec(**new))
    assert (change.action, change.gap, change.new_first) == ("restart", gap, gap.startswith("without a gap"))
    assert step_of(change).why == f"{change.why}; {gap}"


def test_another_worker_may_be_in_the_way_of_a_restart():
    """The gap names it; of one that is down anyway nothing is said."""
    old = [spec(gpu_ids=[0]), spec("b", gpu_ids=[1])]
    first, second = plan(old, [spec(gpu_ids=[1]), spec("b", gpu_ids=[2])])
    assert (first.gap, second.gap) == (
        "with a gap: worker w1 still has GPU 1",
        "with a gap: worker w0 needs GPU 1",
    )
    [change] = changes_of_workers(
        [Running("w0", old[0], False, False, is_down=True, serves=False, is_ready=False)], [spec(gpu_ids=[3])], {}, {}
    )
    assert (change.action, change.gap) == ("restart", "")


def test_of_two_alike_the_one_that_works_stays():
    assert actions(plan([spec(), spec()], [spec()], failed=[0])) == [("stop", "w0"), ("keep", "w1")]


def test_a_reload_never_touches_launched_workers():
    """Not even where the configuration has the same, or its engine's interpreter changes."""
    engines = ({}, {"vllm": EngineSettings("/new")})
    changes = plan([spec(), spec("b")], [spec()], launched=[0, 1], failed=[1], engines=engines)
    assert actions(changes) == [("keep", "w0"), ("keep", "w1"), ("start", "")]
    assert changes[1].spec == spec("b")


def test_another_interpreter_restarts_those_that_have_it():
    """A worker with its own, or of another engine, has nothing to do with it."""
    workers = [spec("a"), spec("b", python="/own"), spec("c", backend="sglang")]
    engines = ({"sglang": EngineSettings("/s")}, {"sglang": EngineSettings("/s"), "vllm": EngineSettings("/new")})
    changes = plan(workers, workers, engines=engines)
    assert actions(changes) == [("restart", "w0"), ("keep", "w1"), ("keep", "w2")]
    assert changes[0].why == 'engines.vllm.python: not set -> "/new"'
    assert plan(workers, workers, engines=({"vllm": EngineSettings()}, {}))[0].action == "keep"
    change = the_change(spec(), spec(max_in_flight=1), engines=engines)
    assert (change.action, change.why) == (
        "restart",
        'max_in_flight: not set -> 1; engines.vllm.python: not set -> "/new"',
    )


def part_of(number, share):
    return {"gpu_ids": [number], "share_gpus": True, "backend_args": {"gpu_memory_utilization": share}}


@pytest.mark.parametrize(
    ("old", "new", "is_first"),
    [
        ({"gpu_ids": [0]}, {"gpu_ids": [1]}, True),
        ({"gpu_ids": [0, 1]}, {"gpu_ids": [1, 2]}, False),
        ({"gpu_ids": [0]}, {"gpu_ids": []}, True),
        ({"gpu_ids": []}, {"gpu_ids": [], "host": "0.0.0.0"}, True),
        ({"gpu_ids": []}, {"gpu_ids": None}, True),
        ({"gpu_ids": None}, {"gpu_ids": []}, True),
        ({"gpu_ids": None}, {"gpu_ids": [0]}, False),
        ({"gpu_ids": [0], "port": 5}, {"gpu_ids": [1], "port": 5}, False),
        ({"gpu_ids": [0], "port": 5}, {"gpu_ids": [1], "port": 6}, True),
        ({"gpu_ids": [0], "port": 5}, {"gpu_ids": [1], "port": 0}, True),
        ({"gpu_ids": [], "host": "10.0.0.1", "port": 5}, {"gpu_ids": [], "host": "10.0.0.2", "port": 5}, True),
        ({"gpu_ids": [], "host": "10.0.0.1", "port": 5}, {"gpu_ids": [], "host": "0.0.0.0", "port": 5}, False),
        ({"gpu_ids": [0]}, {"gpu_ids": [0], "env": {"CUDA_VISIBLE_DEVICES": "1"}}, True),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, {"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, False),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, {"env": {"CUDA_VISIBLE_DEVICES": ""}}, True),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-7a"}}, {"gpu_ids": [1]}, False),
        ({"gpu_ids": [0], "env": {"A": "1"}}, {"gpu_ids": [0], "env": {"HIP_VISIBLE_DEVICES": "1"}}, False),
        (part_of(0, 0.4), part_of(0, 0.6), True),
        (part_of(0, 0.4), part_of(0, 0.61), False),
        (part_of(0, 0.4), {"gpu_ids": [0]}, False),
        ({**part_of(0, 0.1), "backend": "sglang"}, {**part_of(0, 0.2), "backend": "sglang"}, False),
    ],
)  # fmt: skip
def test_the_new_one_comes_first_where_both_have_room(old, new, is_first):
    change = the_change(spec(**old), spec(**new))
    assert (change.action, change.new_first) == ("restart", is_first)


def test_shares_of_all_workers_count_together():
    """Beside a worker that stays, two processes of another may be too much; a worker that is stopped ends before."""
    old, new = spec(**part_of(0, 0.4)), spec(**part_of(0, 0.5))
    beside = spec("b", **part_of(0, 0.2))
    assert plan([old], [new])[0].new_first
    assert plan([old, beside], [new, beside])[0].gap == "with a gap: both need GPU 0"
    assert plan([old, beside], [new])[0].new_first
    assert plan([old, beside], [new, beside], failed=[1])[0].new_first
    moved = spec("b", **part_of(1, 0.2))
    assert [one.new_first for one in plan([old, beside], [new, moved])] == [False, True]


def test_the_variable_of_an_engine_says_which_gpus_a_worker_has():
    """Another variable means nothing to it."""
    engines = {"vllm": EngineSettings(devices="HIP_VISIBLE_DEVICES")}
    old = spec(gpu_ids=[0])
    for name, is_first in (("HIP_VISIBLE_DEVICES", True), ("CUDA_VISIBLE_DEVICES", False)):
        change = the_change(old, spec(gpu_ids=[0], env={name: "1"}), engines=(engines, engines))
        assert change.new_first is is_first


def test_a_process_does_not_stay_where_another_starts():
    """Whether the other has a new place, has failed before, or is new."""
    old, new = [spec("a", gpu_ids=[0]), spec("b", gpu_ids=[1])], [spec("a", gpu_ids=[1]), spec("b", gpu_ids=[0])]
    assert [change.new_first for change in plan(old, new)] == [False, False]
    assert [change.new_first for change in plan(old, new, failed=[1])] == [False, False]
    new = [spec("a", gpu_ids=[2]), spec("b", gpu_ids=[0])]
    assert [change.new_first for change in plan(old, new)] == [False, False]
    assert [change.new_first for change in plan(old, [new[0], spec("b", gpu_ids=[3])])] == [True, True]
    change, start = plan(old[:1], new)
    assert (change.gap, start.action) == ("with a gap: a new worker needs GPU 0", "start")
    change, start = plan([spec(port=5, gpu_ids=[])], [spec(port=6, gpu_ids=[]), spec("b", port=5, gpu_ids=[])])
    assert (change.gap, start.action) == ("with a gap: a new worker needs port 5", "start")
    cold = Running("w1", spec("b", load="on_demand", gpu_ids=[1]), False, False, is_cold=True)
    change, _ = changes_of_workers([*runs(old[:1]), cold], new, {}, {})
    assert change.gap == "with a gap: worker w1 needs GPU 0"


def test_the_needs_of_all_new_processes_count_together():
    """Each new process alone would have room beside both old processes; both together have not."""
    old = [spec("a", **part_of(0, 0.3)), spec("b", **part_of(0, 0.3))]
    new = [spec("a", **part_of(0, 0.31)), spec("b", **part_of(0, 0.31))]
    assert [change.new_first for change in plan(old, new)] == [False, False]
    assert [change.new_first for change in plan(old, [new[0], old[1]])] == [True, False]


def test_a_worker_that_waits_for_its_successor_is_stopped_if_another_needs_its_place():
    """Else it serves until its successor is ready."""
    old, successor = spec(gpu_ids=[0]), spec(gpu_ids=[1])
    running = [Running("w0", old, False, False, replaced_by="w1"), Running("w1", successor, False, False)]
    other = spec("b", gpu_ids=[2])
    assert actions(changes_of_workers(running, [successor, other], {}, {})) == [("keep", "w1"), ("start", "")]
    changes = changes_of_workers(running, [successor, spec("b", gpu_ids=[0])], {}, {})
    assert actions(changes) == [("stop", "w0"), ("keep", "w1"), ("start", "")]
    assert changes[0].why == "a new worker needs GPU 0"


def test_reasons_name_what_changed_and_hide_what_is_secret():
    old = spec(
        env={"HF_TOKEN": "hf_1", "A": "old", "B": "old"},
        backend_args={
            "api_key": "k1",
            "gone": [1, 2],
            "hf_overrides": {"auth_token": "t1"},
            "tokenizer": "https://me:pw@x/y",
        },
    )
    new = spec(
        env={"HF_TOKEN": "hf_2", "A": "new", "C": "new"},
        backend_args={
            "api_key": "k2",
            "hf_overrides": {"auth_token": "t2"},
            "tokenizer": "https://x/y",
            "long": "x" * 500,
        },
    )
    why = the_change(old, new).why
    for part in (
        "env.HF_TOKEN has changed", "env.A has changed", "env.B is gone", "env.C is new", "api_key has changed",
        "gone: [1, 2] -> not set", "hf_overrides has changed", 'tokenizer: "https://***@x/y" -> "https://x/y"',
    ):  # fmt: skip
        assert part in why.split("; ")
    for secret in ("hf_1", "hf_2", "k1", "k2", "t1", "t2", "old", "pw", "x" * 100):
        assert secret not in why


SPECS = st.builds(
    spec,
    st.sampled_from("ab"),
    gpu_ids=st.sampled_from([None, [], [0], [1]]),
    port=st.sampled_from([0, 1]),
    max_in_flight=st.sampled_from([None, 5]),
)


@given(st.lists(SPECS, max_size=6), st.lists(SPECS, max_size=6), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_a_plan_leads_where_it_should(old, new, failed, launched):
    """Whatever there is and is wanted: the result is what is wanted, each worker is named once, and no more is done than needed."""
    running = runs(old, failed, launched)
    changes = plan(old, new, failed=failed, launched=launched)
    by_id = {one.worker_id: one for one in running}
    assert [change.worker_id for change in changes if change.worker_id] == list(by_id)
    ours = [change for change in changes if not (change.worker_id and by_id[change.worker_id].is_launched)]
    key = attrs.astuple
    after = [change.spec for change in ours if change.spec]
    assert sorted(map(repr, map(key, after))) == sorted(map(repr, map(key, new)))
    for change in changes:
        one = by_id.get(change.worker_id)
        assert (change.action == "start") == (one is None)
        assert (change.action == "stop") == (change.spec is None)
        assert not change.new_first or change.action == "restart"
        if change.action == "keep":
            assert change.spec == one.spec
        if change.action in ("restart", "update"):
            assert change.spec.model_name == one.spec.model_name
            assert change.why
            assert change.spec != one.spec or one.has_failed
    for name in "ab":
        here = {change.action for change in ours if (change.spec or by_id[change.worker_id].spec).model_name == name}
        assert not {"start", "stop"} <= here
    kept = sum(
        change.action in ("keep", "restart") and by_id[change.worker_id].spec == change.spec
        for change in ours
        if change.worker_id
    )
    wanted, same = list(new), 0
    for one in running:
        if not one.is_launched and one.spec in wanted:
            wanted.remove(one.spec)
            same += 1
    assert kept == same


@given(st.lists(SPECS, max_size=6), st.randoms())
def test_the_same_configuration_changes_nothing(specs, random):
    shuffled = random.sample(specs, len(specs))
    assert {change.action for change in plan(specs, shuffled)} <= {"keep"}


# Everything else.


def test_the_same_settings_have_no_steps():
    text = "[limits]\nbody_bytes_max = 4096\n[engines.vllm]\npython = 'p'\n"
    assert steps(text, text) == []
    assert steps("", "[timeouts]\nstop_s = 15\n[engines.vllm]\n") == []


SECTIONS = (
    "server_settings", "routing", "security", "limits", "timeouts", "circuit_breaker", "health", "restart", "history",
    "logs", "usage", "ray", "downloads", "litellm_settings", "router_settings",
)  # fmt: skip
LATER = {
    "server_settings.host", "server_settings.port", "server_settings.relays", "server_settings.state_directory",
    "logs.access_log", "logs.access_lines_max", "logs.directory", "logs.format", "usage.enabled", "usage.in_spans",
    "ray.address", "ray.token_env",
}  # fmt: skip
WORKERS_TOO = {
    "limits.head_bytes_max", "limits.body_bytes_max", "limits.connections_max",
    "timeouts.client_stall_s", "timeouts.stop_s", "timeouts.orphan_after_s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (section, attribute.name)
        for section in SECTIONS
        for attribute in attrs.fields(type(getattr(Config(), section)))
        if attribute.name != "keys"
    ],
)
def test_every_setting_has_its_step(section, name):
    """A changed value is taken at once, or with a restart of the gateway, and the step says which."""
    before = getattr(Config(), section)
    value = getattr(before, name)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "/other"
    after = attrs.evolve(Config(), **{section: attrs.evolve(before, **{name: other})})
    (step,) = steps_of_settings(Config(), after)
    path = f"{section}.{name}"
    assert step.what == path
    assert step.why.startswith(f"{name}: ")
    assert step.action == ("later" if path in LATER else "update")
    assert ("only with a restart of the gateway" in step.why) == (path in LATER)
    assert ("workers take it at their next start" in step.why) == (path in WORKERS_TOO)


def test_every_section_of_the_configuration_is_looked_at():
    assert {field.name for field in attrs.fields(Config)} == {
        *SECTIONS,
        "managed_workers",
        "swap_sets",
        "registered_servers",
        "external_routes",
        "engines",
        "models",
        "prices",
        "general_settings",
    }


def test_names_are_known_by_their_names():
    """A name that comes, goes or changes has a step, whatever the order in the file."""

    def config(*tables):
        return configuration.parse("\n".join(f"[[models]]\n{table}" for table in tables), "x.toml")

    same, gone = 'name = "same"\nfallbacks = ["a"]', 'name = "gone"'
    steps = steps_of_settings(
        config(same, 'name = "x"\ntargets = [{ model = "a", weight = 5 }]', gone),
        config('name = "new"', 'name = "x"\ntargets = [{ model = "a", weight = 10 }]', same),
    )
    assert [(step.action, step.what) for step in steps] == [
        ("update", "models x"), ("remove", "models gone"), ("add", "models new"),
    ]  # fmt: skip
    assert '"weight": 5.0' in steps[0].why
    assert '"weight": 10.0' in steps[0].why


def test_keys_are_known_by_their_names():
    """A key that comes, goes or changes has a step, which shows no hash of it."""
    first, second = "sha256:" + 64 * "a", "sha256:" + 64 * "b"
    old = f"""[[security.keys]]
name = "gone"
key_hash = "{first}"
[[security.keys]]
name = "same"
key_hash = "{first}"
"""
    new = old.replace("gone", "new").replace(
        f'same"\nkey_hash = "{first}"', f'same"\nkey_hash = "{second}"\nmax_in_flight = 3'
    )
    found = steps_of_settings(config(old), config(new))
    assert [(step.action, step.what) for step in found] == [
        ("remove", "security.keys gone"), ("update", "security.keys same"), ("add", "security.keys new"),
    ]  # fmt: skip
    assert found[1].why == "key_hash has changed; max_in_flight: not set -> 3"


def test_an_interpreter_that_changed_has_a_step():
    (step,) = steps_of_settings(config(""), config("[engines.vllm]\npython = '/p'"))
    assert step == ReloadStep(
        "update", "engines.vllm.python", 'python: not set -> "/p"; for workers that start from now on'
    )


def test_swap_sets_are_known_by_their_members():
    """The order of the sets and of their members means nothing."""
    workers = "\n".join(
        f'[[managed_workers]]\nmodel_name = "{name}"\nmodel_path = "/m"\nload = "on_demand"' for name in "abcd"
    )
    old = 'swap_sets = [{ members = ["a", "b"] }, { members = ["c", "d"] }, { members = ["a", "d"] }]\n' + workers
    sets = '{ members = ["d", "c"] }, { members = ["b", "a"], loaded_max = 2 }, { members = ["b", "d"] }'
    new = f"swap_sets = [{sets}]\n{workers}"
    assert steps_of_settings(config(old), config(new)) == [
        ReloadStep("update", "swap set of a, b", "loaded_max: 1 -> 2"),
        ReloadStep("remove", "swap set of a, d", "the configuration has it no more"),
        ReloadStep("add", "swap set of b, d", "it is new in the configuration"),
    ]
    assert steps(new, new) == []


def test_external_routes_have_one_step_a_model():
    old = """
        external_routes = [
            { model_name = "same", api_base = "http://a/v1" }, { model_name = "same", api_base = "http://b/v1" },
            { model_name = "gone", api_base = "http://a/v1" },
            { model_name = "other", api_base = "http://a/v1", headers = { X-Key = "k1", X-Old = "k2" } },
            { model_name = "more", api_base = "http://a/v1" },
        ]"""
    new = """
        external_routes = [
            { model_name = "new", api_base = "http://a/v1" },
            { model_name = "same", api_base = "http://b/v1" }, { model_name = "same", api_base = "http://a/v1" },
            { model_name = "more", api_base = "http://a/v1" }, { model_name = "more", api_base = "http://b/v1" },
            { model_name = "other", api_base = "http://b/v1", headers = { X-Key = "k3", X-New = "k4" } },
        ]"""
    found = steps_of_settings(config(old), config(new))
    assert [(step.action, step.what) for step in found] == [
        ("remove", "external route gone"),
        ("update", "external route other"),
        ("update", "external route more"),
        ("add", "external route new"),
    ]
    assert found[1].why == (
        'api_base: "http://a/v1" -> "http://b/v1"; headers.X-Key has changed; headers.X-Old is gone; headers.X-New is new'
    )
    assert found[2].why == "1 of them -> 2"
    assert steps(new, new) == []
    fewer = new.replace('{ model_name = "same", api_base = "http://a/v1" },', "")
    assert steps(new, fewer) == [("update", "external route same")]


def test_two_routes_that_are_quite_the_same_are_counted():
    one = '{ model_name = "a", api_base = "http://a/v1" },'
    (step,) = steps_of_settings(config(f"external_routes = [{one}{one}]"), config(f"external_routes = [{one}]"))
    assert step == ReloadStep("update", "external route a", "2 of them -> 1")


def test_a_plan_reads_as_sentences():
    changes = plan([spec("a"), spec("b"), spec("c")], [spec("b", port=1), spec("c"), spec("d")])
    found = [step_of(change) for change in changes]
    assert [(step.action, step.what) for step in found] == [
        ("stop", "worker w0"), ("restart", "worker w1"), ("keep", "worker w2"), ("start", "a worker of d"),
    ]  # fmt: skip
    assert summary(found) == "+1 start, ~1 restart, -1 stop, 1 untouched"
    more = [ReloadStep("update", "x", ""), ReloadStep("later", "y", "")]
    assert summary(more) == (
        "+0 start, ~0 restart, -0 stop, 1 update, 1 only with a restart of the gateway, 0 untouched"
    )
    assert summary([]) == "+0 start, ~0 restart, -0 stop, 0 untouched"


def test_prices_are_named_in_the_plan():
    """Each price that is new, gone or different is a step, and so is what [usage] says."""
    old = '[usage]\nenabled = true\n[prices."a"]\ninput = 1\n[prices."b"]\ninput = 1\n'
    new = '[usage]\nenabled = false\nkeep_days = 3\n[prices."b"]\ninput = 2\n[prices."c"]\n'
    assert steps(old, new) == [
        ("later", "usage.enabled"), ("update", "usage.keep_days"),
        ("remove", "price of a"), ("update", "price of b"), ("add", "price of c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "action"), [(2, 4, "update"), (4, '"cores"', "update"), (0, 2, "later"), (2, 0, "later")]
)
def test_a_reload_changes_the_number_of_relays_but_not_whether_there_are_any(old, new, action):
    """The plan names the way that interrupts nobody."""
    before, after = (f"[server_settings]\nrelays = {number}\n" for number in (old, new))
    [step] = steps_of_settings(config(before), config(after))
    assert (step.action, step.what) == (action, "server_settings.relays")
    assert ("--takeover" in step.why) == (action == "later")
