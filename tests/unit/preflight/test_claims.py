"""Two workers that cannot stand side by side are known by their tables, before either is started."""

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.placement.place import EVERY_GPU
from ichat.preflight.claims import claims_of, fit, have_one_port, overfull_gpus


def worker(**keys):
    return ManagedWorkerConfig(model_name="m", model_path="/m", **keys)


def do_conflict(one, other, *, has_gpus=True):
    first, second = (claims_of(worker(**keys), has_gpus=has_gpus) for keys in (one, other))
    assert fit(first, second) == fit(second, first)
    return not fit(first, second)


SHARING = {"gpu_ids": [0], "share_gpus": True}
HALF = {**SHARING, "backend_args": {"gpu-memory-utilization": 0.5}}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"gpu_ids": [0]}, {"gpu_ids": [0]}, True),
        ({"gpu_ids": [0]}, {"gpu_ids": [1]}, False),
        ({"gpu_ids": [0, 1]}, {"gpu_ids": [1, 2]}, True),
        ({"gpu_ids": []}, {"gpu_ids": [0]}, False),
        ({"gpu_ids": []}, {"gpu_ids": []}, False),
        ({}, {"gpu_ids": [0]}, True),
        ({}, {"gpu_ids": []}, False),
        ({}, {}, True),
        (SHARING, {"gpu_ids": [0]}, True),
        (SHARING, SHARING, True),  # both take vLLM's default, 0.9
        (HALF, HALF, False),
        (HALF, {**SHARING, "backend_args": {"gpu_memory_utilization": 0.51}}, True),
        (SHARING, {**SHARING, "backend": "sglang"}, False),
        ({**HALF, "gpu_ids": None}, HALF, False),
        ({**SHARING, "gpu_ids": None}, SHARING, True),
        ({"env": {"CUDA_VISIBLE_DEVICES": "1"}, "gpu_ids": [0]}, {"gpu_ids": [0]}, False),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0, 1"}}, {"gpu_ids": [1]}, True),
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, {"gpu_ids": [1]}, False),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-7a"}, "gpu_ids": [0]}, {"gpu_ids": [1]}, True),
    ],
)
def test_workers_that_need_one_gpu(one, other, expected):
    """The numbers count, all GPUs where there are none, and sharing where both allow it and vLLM's shares fit."""
    assert do_conflict(one, other) is expected


def test_a_machine_without_gpus_has_no_conflict_about_all_of_them():
    """Workers without gpu_ids run on the processor there; numbers mean what they say, as in preflight."""
    assert not do_conflict({}, {}, has_gpus=False)
    assert not do_conflict({}, {"gpu_ids": [0]}, has_gpus=False)
    assert do_conflict({"gpu_ids": [0]}, {"gpu_ids": [0]}, has_gpus=False)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"port": 9000}, {"port": 9000}, True),
        ({"port": 9000}, {"port": 9001}, False),
        ({"port": 0}, {"port": 0}, False),
        ({"port": 9000, "host": "127.0.0.2"}, {"port": 9000}, False),
        ({"port": 9000, "host": "0.0.0.0"}, {"port": 9000}, True),
        ({"port": 9000, "host": "::"}, {"port": 9000, "host": "10.0.0.7"}, True),
    ],
)
def test_workers_that_need_one_port(one, other, expected):
    """A port is one worker's, on each address that it listens on."""
    first, second = {**one, "gpu_ids": [0]}, {**other, "gpu_ids": [1]}
    assert do_conflict(first, second) is expected
    assert have_one_port(worker(**first), worker(**second)) is expected


def test_three_shares_of_one_gpu_are_added_up():
    """Each two of them fit, and all three do not."""
    third = {**SHARING, "backend_args": {"gpu_memory_utilization": 0.4}}
    one, other, last = (claims_of(worker(**third), has_gpus=True) for _ in range(3))
    assert fit(one, other)
    assert overfull_gpus(one, [other]) == set()
    assert overfull_gpus(one, [other, last]) == {0}
    every = claims_of(worker(**{**third, "gpu_ids": None}), has_gpus=True)
    assert overfull_gpus(every, [other, last]) == {0}
    assert overfull_gpus(every, [every, every]) == {EVERY_GPU}
