"""Places for workers with `gpus`: each rule by an example, then all of them on thousands of random machines."""

import itertools
import math
import random

import attrs
import pytest

from ichat.config.engine_args import USABLE
from ichat.placement.estimate import GIB
from ichat.placement.learnt import LearntMemories, LearntMemory, LoadCircumstances, cache_flags_of, key_of
from ichat.placement.model_shape import read_shape
from ichat.placement.place import EVERY_GPU, ModelFigures, NoPlace, PlaceableGpu, Placement, Wish, place, places
from ichat.placement.settings import Settings
from ichat.placement.weights import implied_tensors, sum_weights
from tests.unit.placement.test_estimate import LLAMA_8B, LLAMA_70B

SEEDS = 400
"""The slow form has 10 000."""


def gpu(number, kind="H100", size=80, **more):
    return PlaceableGpu(number, kind, size * GIB, **more)


def figures_of(config, **settings):
    shape = read_shape(config)
    return ModelFigures(shape, sum_weights(shape, implied_tensors(shape), 2.0), Settings(**settings))


def wish(gpus, **more):
    return Wish("m", gpus, path="/models/m", **more)


def why(wanted, gpus, held=()):
    found = place(wanted, gpus, dict(held))
    assert isinstance(found, NoPlace), found
    return found.sentence


FOUR = [gpu(number) for number in range(4)]
ALONE = {0: math.inf}


def test_whole_gpus_are_the_lowest_that_are_empty():
    """A claim counts as soon as it is booked; a worker gets the GPUs again that it had."""
    assert place(wish(2), FOUR, {}) == Placement((0, 1))
    assert place(wish(2), FOUR, {"a": ALONE, "b": {2: 0.25}}) == Placement((1, 3))
    assert place(wish(1, before=[2]), FOUR, {}) == Placement((2,))
    assert place(wish(1, before=[2]), FOUR, {"a": {2: math.inf}}) == Placement((0,))
    assert place(wish(0), None, {}) == Placement(())


def test_gpus_of_a_worker_are_of_the_same_kind():
    """Of two kinds the smaller is chosen if it is known to be enough."""
    mixed = [gpu(0), gpu(1, "L4", 22), gpu(2), gpu(3, "L4", 22)]
    assert place(wish(2), mixed, {}) == Placement((0, 2))
    assert place(wish(2, memory_bytes=20 * GIB), mixed, {}) == Placement((1, 3))
    assert place(wish(2, memory_bytes=21 * GIB), mixed, {}) == Placement((0, 2))
    assert "needs 3 GPUs of the same kind" in why(wish(3), mixed)
    assert why(wish(3), mixed).endswith("This machine has at most 2 of the same kind: lower gpus.")


def test_a_share_fills_the_fullest_gpu():
    """Four quarters fit on a GPU, whole workers stay away from it, and a share is never on a GPU of another worker."""
    quarter = {"a": {0: 0.25}, "b": {0: 0.25}, "c": {0: 0.25}}
    assert place(wish(0.25), FOUR, {"a": {1: 0.25}}) == Placement((1,), 0.25)
    assert place(wish(0.25), FOUR, quarter) == Placement((0,), 0.25)
    assert place(wish(0.3), FOUR, quarter) == Placement((1,), 0.3)
    sentence = why(wish(0.5), FOUR[:2], {**quarter, "d": {1: math.inf}})
    assert "25 % of GPU 0 are left besides worker a and b and c; GPU 1 is worker d's." in sentence
    assert sentence.endswith("It gets a place once worker d ends.")


def test_a_worker_on_all_gpus_leaves_no_place():
    """A table that names no GPUs may use each of them."""
    assert why(wish(1), FOUR[:1], {"a": {EVERY_GPU: math.inf}}) == (
        "m needs a GPU of its own, which this machine has not free: GPU 0 is worker a's. It gets a place once worker a"
        " ends."
    )


def test_memory_of_other_processes_is_not_given_out():
    """As far as they are seen, and as the driver's figure shows where they are not."""
    assert why(wish(1), [gpu(0, others_bytes=30 * GIB)]).startswith(
        "m needs a GPU of its own, which this machine has not free: other processes hold 30.0 GiB of GPU 0."
    )
    assert "other processes hold 60.0 GiB" in why(wish(1), [gpu(0, used_bytes=60 * GIB)])
    assert place(wish(1), [gpu(0, used_bytes=GIB, others_bytes=GIB)], {}) == Placement((0,))
    held = {"a": {0: 0.5}}
    assert place(wish(0.5), [gpu(0, used_bytes=38 * GIB)], held) == Placement((0,), 0.5)
    assert "left besides worker a: other processes hold 22.0 GiB" in why(wish(0.5), [gpu(0, used_bytes=60 * GIB)], held)


def test_gpus_that_cannot_be_used_say_why():
    """A GPU that fails, is divided, or reports no memory; no GPU at all; GPUs that are not known."""
    broken = gpu(0, trouble="does not answer (GPU is lost)")
    assert "GPU 0 does not answer (GPU is lost)" in why(wish(1), [broken])
    assert place(wish(1), [broken, gpu(1)], {}) == Placement((1,))
    assert "GPU 0 does not report its memory" in why(wish(0.5), [PlaceableGpu(0)])
    assert place(wish(1), [PlaceableGpu(0)], {}) == Placement((0,))
    assert why(wish(1), []).startswith("There is no GPU for gpus: no NVIDIA GPU answers on this machine; set gpus = 0")
    assert why(wish(0.5), None).startswith("The GPUs of this machine are not known")


def test_a_number_of_gpus_must_divide_the_model():
    """The heads of the model, by the GPUs that share a layer."""
    large = figures_of(LLAMA_70B)
    assert why(wish(3, figures=large), FOUR) == (
        "m has 64 attention heads: it runs on 1, 2, 4, 8, 16, 32 or 64 GPUs, not on 3."
    )
    assert place(wish(4, figures=figures_of(LLAMA_70B, pipeline=2), stages=2), FOUR, {}) == Placement((0, 1, 2, 3))


def test_a_model_that_is_too_large_is_refused_by_computed_figures():
    """With the figures, and the number of GPUs that would do."""
    large = figures_of(LLAMA_70B, context=8192)
    assert why(wish(1, figures=large), FOUR) == (
        "m needs a GPU of its own, which this machine has not free: "
        + "; ".join(f"GPU {n} gives 76.0 of its 80.0 GiB, and the model needs 133.9" for n in range(4))
        + ". 2 such GPUs would do."
    )
    assert "gives 7.6 of its 80.0 GiB" in why(wish(0.1, figures=figures_of(LLAMA_8B)), FOUR[:1])
    assert "the model needs 90.0" in why(wish(1, memory_bytes=90 * GIB), FOUR)


def test_auto_is_the_fewest_gpus_that_hold_the_model():
    """By everything that the model needs, on a kind that is there; without figures there is no such number."""
    assert place(wish("auto", figures=figures_of(LLAMA_8B, context=8192)), FOUR, {}) == Placement((0,))
    large = wish("auto", figures=figures_of(LLAMA_70B, context=8192))
    assert place(large, FOUR, {}) == Placement((0, 1))
    assert place(large, [gpu(n, "L40S", 45) for n in range(4)], {}) == Placement((0, 1, 2, 3))
    assert "needs 2 GPUs of the same kind" in why(large, FOUR[:1])
    assert "no number of such GPUs holds the model" in why(large, [gpu(0, "T4", 2)])
    assert why(wish("auto", unknown="no config.json"), FOUR) == (
        "The memory of /models/m is not known (no config.json): give gpus and gpu_memory_gib."
    )


# Figures of earlier loads.


def learnt_wish(gpus, model, size, tensor=1, kind="H100", **found):
    """Return the wish of a worker after a load of its model on such GPUs, with these figures."""
    figures, arguments = figures_of(model, context=8192), {"max_model_len": 8192}
    weights = figures.weights.on_gpu(tensor, 1)
    key = key_of("/models/m", "vllm", {**arguments, "tensor_parallel_size": tensor}, weights, (kind, size * GIB))
    memories = LearntMemories()
    memories.add(LearntMemory(key, "0.32.0", "m", 0.0, cache_flags_of(arguments), **found))
    before = LoadCircumstances("/models/m", "vllm", arguments, "0.32.0+cpu")
    return wish(gpus, figures=figures, circumstances=before, memories=memories)


def test_a_learnt_figure_replaces_the_computed_one():
    """It refuses a GPU on which the weights alone would fit, and is no figure of another kind of GPU or engine."""
    wanted = learnt_wish(1, LLAMA_8B, 22, kind="L4", beside_bytes=21 * GIB)
    assert why(wanted, [gpu(0, "L4", 22)]) == (
        "m needs a GPU of its own, which this machine has not free: GPU 0 gives 20.9 of its 22.0 GiB, and the model"
        " needs 21.4, as learnt from an earlier load. 2 such GPUs would do."
    )
    assert place(wanted, [gpu(0, "A10", 22)], {}) == Placement((0,))
    other = attrs.evolve(wanted, circumstances=attrs.evolve(wanted.circumstances, version="0.33.0"))
    assert place(other, [gpu(0, "L4", 22)], {}) == Placement((0,))
    assert place(attrs.evolve(wanted, memory_bytes=GIB), [gpu(0, "L4", 22)], {}) == Placement((0,))


def test_a_learnt_figure_admits_what_was_computed_too_large():
    """Of a load with less memory than its weights have in the files, as after a quantization."""
    sizes = [gpu(0, "L4", 14)]
    assert "the model needs 16.0" in why(wish(1, figures=figures_of(LLAMA_8B, context=8192)), sizes)
    assert place(learnt_wish(1, LLAMA_8B, 14, kind="L4", beside_bytes=10 * GIB), sizes, {}) == Placement((0,))


@pytest.mark.parametrize("gpus", [1, "auto"])
def test_an_assumed_figure_refuses_no_gpu(gpus):
    """Such a figure is what remains of a launch that ended for lack of memory; "auto" chooses more GPUs if it can."""
    wanted, small = (
        learnt_wish(gpus, LLAMA_8B, 22, kind="L4", raised_bytes=90 * GIB),
        [gpu(n, "L4", 22) for n in (0, 1)],
    )
    assert place(wanted, small[:1], {}) == Placement((0,))
    assert place(wanted, small, {}) == Placement((0,) if gpus == 1 else (0, 1))


def test_auto_counts_with_learnt_figures():
    """The number for which the load is known is chosen by its figures."""
    assert place(learnt_wish("auto", LLAMA_8B, 80), FOUR, {}) == Placement((0,))
    assert place(learnt_wish("auto", LLAMA_8B, 80, beside_bytes=79 * GIB), FOUR, {}) == Placement((0, 1))


# Random machines.


def random_machine(rng):
    """Return up to four GPUs of two kinds, some with troubles, and some memory of others."""
    kinds = [("H100", 80), ("L4", 22)]
    return [
        attrs.evolve(
            gpu(number, *rng.choice(kinds)),
            trouble=rng.choice(["", "", "", "", "fails"]),
            others_bytes=rng.choice([0, 0, 0, GIB // 2, 12 * GIB]),
        )
        for number in range(rng.randint(1, 4))
    ]


def random_wish(rng, before):
    wanted = rng.choice([1, 1, 2, 3, 4, 0.05, 0.25, 0.5, 0.9, round(rng.uniform(0.05, 0.99), 2)])
    return wish(wanted, memory_bytes=rng.choice([None, 4 * GIB, 20 * GIB, 70 * GIB]), before=before)


def fits_by_force(wanted, chosen, held):
    """Return whether these GPUs do, by the rules alone."""
    shares = [sum(claims.get(one.number, 0) for claims in held.values()) for one in chosen]
    if any(one.trouble for one in chosen) or len({(one.kind, one.memory_bytes) for one in chosen}) > 1:
        return False
    part = wanted.gpus if isinstance(wanted.gpus, float) else 1.0
    if any((wanted.memory_bytes or 0) > math.floor(USABLE * part * one.memory_bytes) for one in chosen):
        return False
    if isinstance(wanted.gpus, float):
        [one], [taken] = chosen, shares
        return part + taken + one.others_bytes / (USABLE * one.memory_bytes) <= 1 + 1e-9
    return not any(shares) and all(one.others_bytes <= (1 - USABLE) * one.memory_bytes for one in chosen)


def check_machine(seed):
    """Workers arrive and leave; each claim counts from its decision on."""
    rng = random.Random(seed)
    gpus, held, had = random_machine(rng), {}, {}
    for step in range(12):
        if held and rng.random() < 0.35:
            del held[rng.choice(list(held))]
            continue
        name = f"w{step}"
        wanted = random_wish(rng, had.get(name, rng.sample(range(4), rng.randint(0, 2))))
        found = place(wanted, gpus, held)
        shuffled = rng.sample(gpus, len(gpus))
        names = rng.sample(list(held), len(held))
        again = place(wanted, shuffled, {name: held[name] for name in names})
        assert type(again) is type(found), seed
        count = math.ceil(wanted.gpus)
        fitting = [
            tuple(one.number for one in chosen)
            for chosen in itertools.combinations(gpus, count)
            if fits_by_force(wanted, chosen, held)
        ]
        assert {one.gpu_ids for one in places(wanted, gpus, held)} == set(fitting), seed
        if isinstance(found, NoPlace):
            assert not fitting, (seed, found)
            assert all(f"GPU {one.number}" in found.sentence or str(one.number) in found.sentence for one in gpus)
            continue
        assert found == again, seed
        assert found.gpu_ids in fitting, seed
        held[name] = dict.fromkeys(found.gpu_ids, found.share)
        for one in gpus:
            shares = [min(1.0, claims[one.number]) for claims in held.values() if one.number in claims]
            assert sum(share * USABLE * one.memory_bytes for share in shares) <= USABLE * one.memory_bytes + 1, seed


def test_claims_never_exceed_a_gpu_on_random_machines():
    """The sum of the claims is at most 95 % of each GPU, the order of the facts does not matter, and no place is lost."""
    for seed in range(SEEDS):
        check_machine(seed)


@pytest.mark.slow
def test_claims_never_exceed_a_gpu_on_many_random_machines():
    """The same for 10 000 seeds."""
    for seed in range(10_000):
        check_machine(seed)
