"""Make a tiny chat model from nothing: random weights, its own tokenizer, its own chat template.

    python tests/tiny_model.py DIRECTORY

Run by an interpreter that has transformers and tokenizers (an engine's own). The result is a Qwen2 of two layers and
about 0.6 million parameters, a few megabytes with its tokenizer, which both engines load in the usual way. Its text
is noise, but the same noise every time: the weights come from a fixed seed and greedy decoding is deterministic.
"""

import pathlib
import sys

SEED = 20_240
VOCABULARY = 2_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus():
    """Give text to learn the tokens from: the documentation strings of the standard library, present everywhere."""
    import argparse
    import collections
    import decimal
    import email
    import logging
    import typing
    import unittest

    for module in (argparse, collections, decimal, email, logging, typing, unittest):
        for value in vars(module).values():
            text = getattr(value, "__doc__", None)
            if isinstance(text, str):
                yield text


def make(directory: pathlib.Path) -> None:
    """Write the model into a directory (made where it does not exist)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)

    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
