"""The memory of models by their files here, and the obstacle that follows from it before a start."""

import json
import struct

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.hardware.gpus import Gpu
from ichat.placement.learnt import LearntMemories, LearntMemory, key_of
from ichat.placement.model_shape import UnknownShape
from ichat.placement.weights import DamagedFile
from ichat.preflight.facts import Facts, read_facts
from ichat.preflight.learnt_file import with_learnt
from ichat.preflight.model_memory import MemoryNeed, describe_model
from ichat.preflight.obstacles import obstacles_of

GIB = 1024**3
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TOKEN = 2 * 2 * 2 * 32 * 2


def write_tensors(path, *shapes, dtype="F32", cut=0):
    """Write a safetensors file of zeros."""
    size, table = {"F32": 4, "BF16": 2}[dtype], {}
    offset = 0
    for number, shape in enumerate(shapes):
        end = offset + size * shape[0] * shape[1]
        name = f"model.layers.{number}.mlp.up_proj.weight"
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(max(offset - cut, 0)))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def bytes_of(directory, environment=None, **arguments):
    return describe_model(str(directory), arguments, environment or {}).weights().on_gpu()


def write_index(directory, *names):
    weight_map = {str(number): name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_only_files_that_the_index_names_count(model):
    """A second copy of the weights, and adapters, are no part of the model."""
    write_tensors(model / "a.safetensors", (10, 10))
    write_tensors(model / "consolidated.safetensors", (100, 10))
    write_tensors(model / "adapter_model.safetensors", (100, 10))
    assert bytes_of(model) == 200  # float32 is loaded as 16 bits
    write_tensors(model / "b.safetensors", (10, 10), dtype="BF16")
    assert bytes_of(model) == 400
    write_index(model, "b.safetensors", "b.safetensors")
    assert bytes_of(model) == 200


def test_a_model_without_its_weights_is_described_by_its_configuration(model):
    """No file, or not all of them: config.json implies the weights."""
    assert describe_model(str(model), {}, {}).is_implied
    write_tensors(model / "a.safetensors", (10, 10))
    assert not describe_model(str(model), {}, {}).is_implied
    write_index(model, "a.safetensors", "b.safetensors")
    assert describe_model(str(model), {}, {}).is_implied


def test_a_model_is_found_in_the_hubs_cache(model, tmp_path):
    """By its name and its revision, without the network."""
    place = tmp_path / "hub" / "models--Org--Model"
    (place / "snapshots").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("c0ffee\n")
    model.rename(place / "snapshots" / "c0ffee")
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert describe_model("Org/Model", {}, environment).shape.layers == 2
    assert describe_model("Org/Model", {"revision": "c0ffee"}, environment).shape.layers == 2
    for name, arguments in (("Org/Other", {}), ("Org/Model", {"revision": "v2"})):
        with pytest.raises(UnknownShape, match=f"neither a directory here nor in {tmp_path}/hub"):
            describe_model(name, arguments, environment)


def test_the_tokenizer_may_bound_the_context(model):
    """The smaller length counts; a length that is no number does not."""
    (model / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert describe_model(str(model), {}, {}).shape.context == 512
    for length in ("1e30", "true", '"long"', "0"):
        (model / "tokenizer_config.json").write_text(f'{{"model_max_length": {length}}}')
        assert describe_model(str(model), {}, {}).shape.context == 2048


def test_damaged_files_are_named(model):
    """A damaged index, header or configuration has its sentence, and never a number."""
    write_tensors(model / "a.safetensors", (10, 10), cut=1)
    with pytest.raises(DamagedFile, match=r"a\.safetensors is cut off"):
        bytes_of(model)
    (model / "a.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DamagedFile, match=r"a\.safetensors is a pointer of Git LFS"):
        bytes_of(model)
    for index in ('{"weight_map": [1]}', '{"weight_map": {"a": 5}}', "{", "[]"):
        (model / "model.safetensors.index.json").write_text(index)
        with pytest.raises(DamagedFile, match=r"model\.safetensors\.index\.json is damaged"):
            bytes_of(model)
    for config in ("[]", "{", "[" * 100_000):
        (model / "config.json").write_text(config)
        with pytest.raises(DamagedFile, match=r"config\.json is not valid JSON"):
            bytes_of(model)
    (model / "config.json").unlink()
    with pytest.raises(UnknownShape, match=r"no config\.json"):
        bytes_of(model)


def test_other_ways_to_load_weights_are_not_computed(model):
    """Weights that are quantized while they are loaded, other formats, and single files have no figure."""
    for arguments in ({"quantization": "fp8"}, {"load_format": "gguf"}):
        with pytest.raises(UnknownShape, match="is not computed"):
            describe_model(str(model), arguments, {})
    (model / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnknownShape, match="single file"):
        describe_model(str(model / "m.gguf"), {}, {})


def need_of(model, backend="vllm", **arguments):
    worker = ManagedWorkerConfig(model_name="m", model_path=str(model), backend=backend, backend_args=arguments)
    return read_facts(worker, "/nothing", {}).need


def test_facts_have_the_need_of_a_worker(model):
    """Weights, and for vLLM the longest sequence, unless vLLM shortens it; an unknown shape has no need."""
    write_tensors(model / "a.safetensors", (10, 10))
    assert need_of(model) == MemoryNeed(200, 2048 * TOKEN, 2048)
    assert need_of(model, **{"max-model-len": 1024, "tensor-parallel-size": 2}) == MemoryNeed(100, 512 * TOKEN, 1024)
    assert need_of(model, max_model_len="auto") == need_of(model, "sglang") == MemoryNeed(200, 0, 2048)
    assert need_of(model, enable_lora=True) is None
    assert need_of(model / "nothing") is None
    assert need_of(model, "third") is None


def sentences(need, total_gib, backend="vllm", **arguments):
    worker = ManagedWorkerConfig(model_name="m", model_path="/m", backend=backend, backend_args=arguments)
    total = round(total_gib * GIB)
    gpus = [Gpu(number, memory_total_bytes=total, memory_free_bytes=total) for number in range(2)]
    facts = Facts(need=need, gpus=gpus)
    return [one.sentence for one in obstacles_of(worker, "/p", {}, facts, is_later=True) if one.subject == "memory"]


def test_a_model_that_is_larger_than_its_gpu_is_refused_before_it_starts():
    """By computed figures alone: weights, and the cache of a sequence."""
    need = MemoryNeed(round(16.1 * GIB), round(2.1 * GIB), 8192)
    assert "".join(sentences(need, 15.9)) == (
        "The model needs 18.2 GiB (weights 16.1, KV cache of 8192 tokens 2.1), and GPU 0 has 15.9, of which vLLM uses"
        " 14.6: raise tensor_parallel_size, lower max_model_len, or choose a larger GPU."
    )
    assert sentences(need, 15.9, tensor_parallel_size=2)[0].startswith("The model needs 18.2 GiB on each GPU (")
    assert sentences(need, 24) == []
    assert sentences(need, 19) != []
    assert sentences(need, 19, gpu_memory_utilization=0.98) == []
    assert sentences(need, 19, kv_cache_memory_bytes=GIB) == []
    weights = MemoryNeed(round(16.1 * GIB), 0, 8192)
    remedies = "raise tensor_parallel_size, or choose a larger GPU."
    found = sentences(weights, 15.9, "sglang")
    assert found == [f"The model needs 16.1 GiB (weights 16.1), and GPU 0 has 15.9: {remedies}"]
    assert sentences(weights, 16.2, "sglang") == []
    assert sentences(None, 1) == []


def learnt_sentences(beside_gib, total_gib=24.0, need=None, version="0.32.0", **arguments):
    """Return the obstacles to a worker for which an earlier load is known; the GPU is as then."""
    worker = ManagedWorkerConfig(model_name="m", model_path="/m", backend_args=arguments)
    gpu = Gpu(0, name="H100", memory_total_bytes=round(total_gib * GIB), memory_free_bytes=round(total_gib * GIB))
    weights = None if need is None else need.weights_bytes
    memories = LearntMemories()
    key = key_of("/m", "vllm", {}, weights, ("H100", 24 * GIB))
    memories.add(LearntMemory(key, "0.32.0", "m", 1.0, beside_bytes=round(beside_gib * GIB), raised_bytes=99 * GIB))
    facts = with_learnt(Facts(need=need, gpus=[gpu], version=version, real_path="/m"), worker, memories)
    return [one.sentence for one in obstacles_of(worker, "/p", {}, facts, is_later=True) if one.subject == "memory"]


def test_a_learnt_figure_refuses_a_start_that_the_weights_alone_allow():
    """On the same kind of GPU, with the same version, flags and weights; an assumed raise refuses nothing."""
    need = MemoryNeed(16 * GIB, 2 * GIB, 8192)
    assert learnt_sentences(21.5, need=need) == [
        (
            "The model needs 23.5 GiB (learnt: 21.5 beside its KV cache, KV cache of 8192 tokens 2.0), and GPU 0 has 24.0,"
            " of which vLLM uses 22.1: raise tensor_parallel_size, lower max_model_len, or choose a larger GPU."
        )
    ]
    assert learnt_sentences(20.6, need=need) == []
    assert learnt_sentences(21.5, need=need, version="0.31.0") == []
    assert learnt_sentences(21.5, need=need, version=None) == []
    assert learnt_sentences(21.5, 24.5, need=need) == []
    assert learnt_sentences(21.5, need=need, enforce_eager=True) == []
    assert learnt_sentences(21.5, need=need, max_model_len=4096) != []
    assert learnt_sentences(1.0, need=need) == []


def test_a_model_of_an_unknown_shape_is_refused_by_learnt_figures():
    """Its KV cache is not known; everything else is."""
    assert learnt_sentences(23) == [
        (
            "The model needs 23.0 GiB (learnt: 23.0 beside its KV cache), and GPU 0 has 24.0, of which vLLM uses 22.1:"
            " raise tensor_parallel_size, or choose a larger GPU."
        )
    ]
    assert learnt_sentences(22) == []
