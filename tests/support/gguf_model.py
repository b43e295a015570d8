"""Make a directory that both engines load from a model in one GGUF file.

    python tests/support/gguf_model.py FILE DIRECTORY

Run by vLLM's interpreter, which has transformers, torch and safetensors, with gguf and accelerate on its PYTHONPATH.
FILE is a Llama in any of GGUF's quantizations. DIRECTORY gets its weights as bfloat16, its configuration, its tokenizer,
its chat template, and how a client's request is sampled that does not say it.
"""

import json
import logging
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What SmolLM2's authors advise; both engines take it for requests that do not say it, which are noise otherwise."""


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def convert(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write the model of the file `source` into the directory `target`."""
    say("importing transformers …")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    target.mkdir(parents=True, exist_ok=True)
    where = str(source.parent)
    say("reading the tokenizer …")
    AutoTokenizer.from_pretrained(where, gguf_file=source.name).save_pretrained(target)
    say("reading the weights …")
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=source.name, dtype=torch.bfloat16)
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "_model_name_or_path")
    }
    config.pop("quantization_config", None)  # the weights are written as bfloat16
    config["architectures"] = ["LlamaForCausalLM"]  # SGLang does not guess them
    model.generation_config.update(**SAMPLING)
    model.generation_config.save_pretrained(target)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    say("writing the weights …")
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    convert(*map(pathlib.Path, sys.argv[1:3]))
