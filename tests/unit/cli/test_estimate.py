"""`ichat.pyz estimate`: its table, its JSON, and a sentence for each input that has no figure."""

import json

import pytest

from ichat.cli import estimate
from ichat.errors import Exit

SHAPE = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "Llama-70B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return directory


def shown(capsys, *words, code=0):
    assert estimate.run(list(map(str, words))) == code
    return capsys.readouterr().out


def refusal(*words):
    with pytest.raises(Exit) as refused:
        estimate.run(list(map(str, words)))
    return refused.value.code, str(refused.value)


def test_the_table_says_how_each_figure_is_known(model, capsys):
    """Weights and the cache of a request are computed; the rest, and all that rests on it, is assumed."""
    text = shown(capsys, model, "--gpu", "h100", "--tensor-parallel-size", "4", "--max-model-len", "8192")
    rows = {line[:23].strip(): line[23:].split() for line in text.splitlines()}
    assert text.startswith("Llama-70B on each of 4 GPUs with vLLM, H100 with 79.6 GiB\n")
    assert rows["weights"][:2] == ["32.9", "computed"]
    assert rows["KV cache of a request"][:2] == ["0.6", "computed"]
    assert rows["activations"][1] == rows["graphs"][1] == rows["least"][1] == "assumed"
    assert "KV cache of a token  81920 bytes (computed)" in text
    assert "fewest GPUs          2 (assumed)" in text


def test_json_has_the_same_figures(model, capsys):
    """Bytes in place of GiB, and null for figures that are not known."""
    found = json.loads(shown(capsys, model, "--gpu-memory-gib", "80", "--tensor-parallel-size=4", "--json"))
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["weights"]["known"] == "computed"
    assert sum(part["bytes"] for part in found["parts"][:-2]) == parts["least"]["bytes"] == found["least_bytes"]
    assert (found["backend"], found["gpus"], found["kv_bytes_per_token"]) == ("vllm", 4, 81920)
    assert (found["context"], found["fits"], found["fewest_gpus"]) == (131072, True, 4)
    assert found["at_once"] == found["tokens"] / 131072 > 1
    assert (found["gpu"]["memory_bytes"], found["unknown"], found["verdict"]) == (80 * 1024**3, None, None)


def test_too_small_a_gpu_is_named_with_the_remedies(model, capsys):
    """How many would do, and for which length of a sequence these would."""
    text = shown(capsys, model, "--gpu", "H100", "--tp", "2", "--enforce-eager")
    longest = json.loads(shown(capsys, model, "--gpu", "H100", "--tp", "2", "--enforce-eager", "--json"))["verdict"]
    assert text.rstrip("\n").endswith(longest)
    assert longest.startswith(
        "Llama-70B needs 88.2 GiB a GPU at 2 GPUs; H100 has 79.6: 4 GPUs would do, or max_model_len"
    )
    assert "no number of these GPUs would do" in shown(capsys, model, "--gpu-memory-gib", "1")
    sglang = (model, "--gpu-memory-gib", "96", "--tp", "2", "-be", "sglang")
    text = shown(capsys, *sglang)
    assert "has 96.0, and SGLang starts with a shorter context: 4 GPUs would do, or context_length = " in text
    assert json.loads(shown(capsys, *sglang, "--json"))["fits"] is True


def test_an_unknown_shape_has_a_sentence_and_no_figure(model, capsys):
    """The exit code is 1, also with JSON, which has no figures."""
    (model / "config.json").write_text(json.dumps({**SHAPE, "model_type": "rwkv"}))
    sentence = f"The memory of {model} is not known (its type rwkv is not known)."
    assert refusal(model) == (1, sentence)
    assert json.loads(shown(capsys, model, "--json", code=1)) == {"model": str(model), "unknown": sentence}
    (model / "config.json").unlink()
    assert refusal(model) == (1, f"The memory of {model} is not known (no config.json).")


def test_a_model_that_is_not_here_has_a_sentence(tmp_path, monkeypatch):
    """A path that leads nowhere, and a name that the hub's cache does not have; the network is not asked."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert refusal(tmp_path / "no") == (64, f"There is no model {tmp_path}/no: correct MODEL_PATH.")
    reason = f"it is neither a directory here nor in {tmp_path}: download it, or name a directory"
    assert refusal("Org/Model") == (1, f"The memory of Org/Model is not known ({reason}).")


def test_damaged_files_have_a_sentence(model):
    """An index that cannot be read is no reason to guess."""
    (model / "model.safetensors.index.json").write_text("{")
    code, text = refusal(model)
    assert (code, "is not whole (model.safetensors.index.json is damaged)" in text) == (64, True)


def test_a_number_of_gpus_that_cannot_share_the_heads_is_refused(model):
    """The sentence has the numbers that can."""
    code, text = refusal(model, "--tensor-parallel-size", "3")
    assert code == 64
    assert text == "Llama-70B has 64 attention heads: it runs on 1, 2, 4, 8, 16, 32 or 64 GPUs, not on 3."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpu", "H10"], "The GPU H10 is not known (did you mean H100"),
        (["--gpu-memory-gib", "0"], "--gpu-memory-gib must be more than 0, not 0."),
        (["--gpu-memory-gib", "nan"], "--gpu-memory-gib must be more than 0"),
        (["--backend", "tgi"], "--backend must be vllm or sglang, not 'tgi'."),
        (["--max-model-len", "8192", "--max-model-len", "1"], "--max-model-len is given twice."),
    ],
)
def test_wrong_flags_are_refused(model, words, sentence):
    """With 64, before anything is read."""
    code, text = refusal(model, *words)
    assert (code, sentence in text) == (64, True), text
