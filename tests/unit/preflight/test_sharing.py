"""Workers whose claims of one GPU do not fit together are told so, if it is certain, before the last one starts."""

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.doctor.workers import WorkerCheckFacts, find_in_workers
from ichat.hardware.gpus import Gpu
from ichat.preflight.facts import Facts
from ichat.preflight.obstacles import obstacles_of

ONE, TWO = [Gpu(0, "GPU-0aa")], [Gpu(0, "GPU-0aa"), Gpu(1, "GPU-1aa")]
BY_IDS = {"gpu_ids": [0]}
BY_VARIABLE = {"env": {"CUDA_VISIBLE_DEVICES": "0"}}
BY_UUID = {"env": {"CUDA_VISIBLE_DEVICES": "GPU-0aa"}}
BY_OTHER_VARIABLE = {"env": {"HIP_VISIBLE_DEVICES": "0"}}
HIP = {"devices": "HIP_VISIBLE_DEVICES"}


def shared(share, **keys):
    return {"share_gpus": True, "backend_args": {"gpu_memory_utilization": share}, **keys}


def worker(**keys):
    return ManagedWorkerConfig(model_name="m", model_path="/m", **keys)


def problems_of_last(tables, **facts):
    """Return what the last of these workers is told about the GPUs of the others."""
    *others, last = (worker(**table) for table in tables)
    named = {f"w-{number}": other for number, other in enumerate(others)}
    return [one.sentence for one in obstacles_of(last, "/p", named, Facts(**facts)) if one.subject == "sharing"]


def take(percent, number=0, others="w-0, w-1"):
    sentence = f"The vLLM workers that share GPU {number} take {percent} % of its memory together"
    return [f"{sentence} (this one and {others}): lower their gpu_memory_utilization, to 100 % in all."]


def apart(what):
    remedy = "set share_gpus = true for both and see that their shares of its memory fit together"
    return [f"GPU 0 is worker w-0's: choose other {what}, or {remedy}."]


@pytest.mark.parametrize(
    ("tables", "facts", "expected"),
    [
        # by gpu_ids
        ([shared(0.4, **BY_IDS)] * 2, {}, []),
        ([shared(0.4, **BY_IDS)] * 3, {}, take(120)),
        ([shared(0.5, **BY_IDS)] * 2, {}, []),
        ([shared(0.1, **BY_IDS)] * 10, {}, []),  # exactly 1, which a sum of floats is not
        ([shared(0.51, **BY_IDS)] * 2, {}, take(102, others="w-0")),
        ([BY_IDS] * 2, {}, apart("gpu_ids")),
        ([BY_IDS, shared(0.4, **BY_IDS)], {}, apart("gpu_ids")),
        # by the variable, which counts before gpu_ids
        ([shared(0.4, **BY_VARIABLE)] * 2, {}, []),
        ([shared(0.4, **BY_VARIABLE)] * 3, {}, take(120)),
        ([shared(0.5, **BY_VARIABLE)] * 2, {}, []),
        ([BY_VARIABLE] * 2, {}, apart("GPUs in CUDA_VISIBLE_DEVICES")),
        ([shared(0.4, **BY_IDS), shared(0.4, **BY_VARIABLE), shared(0.4, **BY_IDS)], {}, take(120)),
        ([{**BY_VARIABLE, "gpu_ids": [1]}, {"gpu_ids": [1]}], {}, []),
        ([{"env": {"CUDA_VISIBLE_DEVICES": ""}}, BY_IDS], {}, []),
        # without either: vLLM takes the first GPUs that it sees
        ([shared(0.4)] * 2, {"gpus": ONE}, []),
        ([shared(0.4)] * 3, {"gpus": ONE}, take(120)),
        ([shared(0.4)] * 3, {"gpus": TWO}, take(120)),
        ([shared(0.4)] * 3, {"gpus": TWO, "visible": "1"}, take(120, 1)),
        ([shared(0.5)] * 2, {"gpus": ONE}, []),
        ([shared(0.4, **BY_IDS), shared(0.4), shared(0.4)], {"gpus": TWO}, take(120)),
        ([shared(0.9, gpu_ids=[1]), shared(0.9)], {"gpus": TWO}, []),
        # what is not certain
        ([shared(0.4)] * 3, {}, []),
        ([shared(0.4)] * 3, {"gpus": []}, []),
        ([shared(0.4)] * 3, {"gpus": ONE, "visible": ""}, []),
        ([shared(0.4)] * 3, {"gpus": ONE, "visible": "-1"}, []),
        ([{}, {}], {"gpus": ONE}, []),  # nobody has said that it has the GPU alone
        ([BY_IDS, {}], {"gpus": ONE}, []),
        ([shared(0.4), shared(0.4), shared(0.4, **BY_IDS)], {"gpus": TWO}, []),
        ([shared(0.9, **BY_UUID), shared(0.9, **BY_IDS)], {"gpus": TWO}, []),
        ([shared(0.9, **BY_IDS), shared(0.9, **BY_UUID)], {"gpus": TWO, "visible": "GPU-0aa"}, []),
        ([BY_IDS, {"backend": "sglang", "share_gpus": True}], {"gpus": ONE}, []),
        # engines with unknown shares
        ([shared(0.5, **BY_IDS), {"backend": "sglang", "share_gpus": True, **BY_IDS}, shared(0.5, **BY_IDS)], {}, []),
        ([shared(0.9, **BY_IDS)] * 2 + [{"backend": "sglang", "share_gpus": True, **BY_IDS}], {}, []),
        # another vendor's GPUs: gpu_ids counts, and neither its variable nor CUDA's
        ([shared(0.4, **BY_IDS)] * 3, HIP, take(120)),
        ([BY_OTHER_VARIABLE] * 2, {**HIP, "visible": "0"}, []),
        ([shared(0.4, **BY_OTHER_VARIABLE)] * 3, {**HIP, "visible": "0"}, []),
        ([{**BY_VARIABLE, "gpu_ids": [1]}, {**BY_VARIABLE, "gpu_ids": [2]}], HIP, []),
        ([BY_VARIABLE] * 2, HIP, []),
    ],
)  # fmt: skip
def test_claims_of_one_gpu(tables, facts, expected):
    """They fit together, or the last worker is told so; what is not certain is no problem."""
    assert problems_of_last(tables, **facts) == expected


def test_each_number_is_told_of_once():
    """In the order of the numbers, each with the workers that claim it."""
    tables = [shared(0.6, gpu_ids=[1]), shared(0.6, gpu_ids=[0]), shared(0.6, gpu_ids=[1, 0, 1])]
    assert problems_of_last(tables) == take(120, 0, "w-1") + take(120, 1, "w-0")


@pytest.mark.parametrize("named", [BY_IDS, BY_VARIABLE, {}])
def test_workers_on_demand_take_turns(named):
    """They claim nothing before they are loaded, and are not refused for a worker that has the GPU now."""

    def levels(*loads):
        tables = [worker(**shared(0.4, load=load, **named)) for load in loads]
        facts = Facts(gpus=ONE)
        checks = [WorkerCheckFacts(table, f"w-{number}", "/p", facts) for number, table in enumerate(tables)]
        return [one.level for one in find_in_workers(checks, 2**40)]

    assert levels("on_demand", "on_demand", "on_demand") == ["ok"] * 3
    assert levels("start", "on_demand", "on_demand") == ["ok"] * 3
    assert levels("on_demand", "start", "start") == ["ok"] * 3
    assert levels("start", "start", "start") == ["ok", "ok", "error"]
