"""Make tiny models from nothing, one of each kind that the engines serve: random weights, their own tokenizers.

    python tests/support/tiny_models.py KIND DIRECTORY

Run by an interpreter that has transformers and tokenizers (an engine's own). KIND is one of:

    chat        a Qwen2 of two layers with a chat template
    adapter     a LoRA adapter for that chat model, strong enough to change what it says
    embedding   a BERT with vectors of length one, in the layout of sentence-transformers
    reranker    a BERT with a single score for a pair of texts
    vision      a Qwen2-VL that takes pictures
    shapes      a Llama, a DeepSeek (MLA) and a Gemma 3 (windows), each in a directory, to measure their memory

Each is a few megabytes and made in seconds. What they answer is noise, but the same noise every time: the weights come
from a fixed seed.
"""

import argparse
import collections
import decimal
import email
import json
import logging
import pathlib
import sys
import typing
import unittest
from collections.abc import Iterator

SEED = 20_240
VOCABULARY = 2_000
CHAT_LENGTH_MAX = 2_048
CHAT_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CHAT_LENGTH_MAX,
    "tie_word_embeddings": True,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}PART{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_PART = "{{ part['text'] }}"
PICTURE_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PICTURE_PART = (
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
)
SPREAD = 0.1  # of weights drawn from the usual 0.02 too little comes through for answers to differ
LENGTH_MAX = 512
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH_MAX,
    "initializer_range": SPREAD,
    "position_embedding_type": "absolute",  # the only one there is, and SGLang wants it said
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
RANK = 8
ADAPTED = {  # SGLang joins q with v, and wants gate and up together
    "q_proj": (128, 128),
    "v_proj": (128, 64),
    "gate_proj": (128, 256),
    "up_proj": (128, 256),
    "down_proj": (256, 128),
}


def write(directory: pathlib.Path, name: str, content: object) -> None:
    """Write one file of JSON, in a directory made where it does not exist."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def corpus() -> Iterator[str]:
    """Return text to learn the tokens from: the documentation strings of the standard library, present everywhere."""
    for module in (argparse, collections, decimal, email, logging, typing, unittest):
        for value in vars(module).values():
            text = getattr(value, "__doc__", None)
            if isinstance(text, str):
                yield text


def make_chat_tokenizer(directory: pathlib.Path, marks: list[str], part: str):
    """Write a tokenizer with some marks of its own and a chat template, and give it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*CHAT_MARKS, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CHAT_LENGTH_MAX
    )
    wrapped.chat_template = CHAT_TEMPLATE.replace("PART", part)
    wrapped.save_pretrained(directory)
    return wrapped


def make_chat(directory: pathlib.Path) -> None:
    """Write a Qwen2 that answers with noise, the same noise every time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_chat_tokenizer(directory, [], TEXT_PART)
    config = Qwen2Config(**CHAT, bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(SEED)
    Qwen2ForCausalLM(config).save_pretrained(directory)


def make_adapter(directory: pathlib.Path) -> None:
    """Write a LoRA adapter in the form that peft gives it, for the chat model's attention and its MLP."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(SEED + 1)
    tensors = {}
    for layer in range(2):
        for module, (width_in, width_out) in ADAPTED.items():
            block = "self_attn" if module in {"q_proj", "v_proj"} else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, width_in) / RANK
            tensors[f"{name}.lora_B.weight"] = torch.randn(width_out, RANK) / RANK
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-chat",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ADAPTED),
    }
    write(directory, "adapter_config.json", settings)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


def make_word_pieces(directory: pathlib.Path) -> None:
    """Write a tokenizer of BERT's kind, which also knows how to join two texts.

    Its words are counted, not learned: a trainer of word pieces numbers them differently each time.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = collections.Counter(word for text in corpus() for word in text.lower().split() if word.isalpha())
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters)]
    pieces += [word for word, _ in words.most_common() if len(word) > 1][: VOCABULARY - len(pieces)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in special}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LENGTH_MAX,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )
    wrapped.save_pretrained(directory)


def make_embedding(directory: pathlib.Path) -> None:
    """Write a BERT whose text vector is its first token's, at length one: what SGLang takes whatever is asked."""
    import torch
    from transformers import BertConfig, BertModel

    make_word_pieces(directory)
    torch.manual_seed(SEED)
    BertModel(BertConfig(**BERT)).save_pretrained(directory)
    write(directory, "modules.json", MODULES)
    pooling = {"word_embedding_dimension": BERT["hidden_size"], "pooling_mode_cls_token": True}
    write(directory, "1_Pooling/config.json", pooling)
    write(directory, "sentence_bert_config.json", {"max_seq_length": LENGTH_MAX, "do_lower_case": False})


def make_reranker(directory: pathlib.Path) -> None:
    """Write a BERT that gives a pair of texts one score."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    make_word_pieces(directory)
    torch.manual_seed(SEED)
    BertForSequenceClassification(BertConfig(**BERT, num_labels=1)).save_pretrained(directory)


def make_vision(directory: pathlib.Path) -> None:
    """Write a Qwen2-VL: the chat model with two layers that see in front of it."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = make_chat_tokenizer(directory, PICTURE_MARKS, PICTURE_PART)
    start, end, image, video = tokenizer.convert_tokens_to_ids(PICTURE_MARKS)
    text = {
        **CHAT,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "initializer_range": SPREAD,
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_chans": 3,  # the name of old, which SGLang reads
            "initializer_range": SPREAD,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 224 * 224,
    }
    write(directory, "preprocessor_config.json", pictures)


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": CHAT_LENGTH_MAX,
}
LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 1_024,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    },
    "moe_layer_freq": 1, "scoring_func": "softmax",  # SGLang wants them said
}  # fmt: skip


def make_shape(directory: pathlib.Path, kind: str, **dimensions: object) -> None:
    """Write a model without a tokenizer: engines need none to say how large their KV cache is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(kind, **{**SHAPE, **dimensions})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def make_shapes(directory: pathlib.Path) -> None:
    """Write models with each attention that is understood, each in a directory of its own."""
    make_shape(directory / "grouped", "llama", num_hidden_layers=3, num_key_value_heads=2, head_dim=64)
    make_shape(directory / "latent", "deepseek_v2", **LATENT)
    make_shape(
        directory / "windows", "gemma3_text", num_hidden_layers=7, num_key_value_heads=2, head_dim=64,
        sliding_window=512, num_attention_heads=4, max_position_embeddings=4 * CHAT_LENGTH_MAX,
    )  # fmt: skip


KINDS = {
    "chat": make_chat,
    "adapter": make_adapter,
    "embedding": make_embedding,
    "reranker": make_reranker,
    "vision": make_vision,
    "shapes": make_shapes,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](pathlib.Path(sys.argv[2]))
