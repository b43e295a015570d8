"""Print which tokens prompts have: run by an engine's interpreter, which has the tokenizer.

    .engines/vllm/bin/python tests/bench/prompt_tokens.py MODEL

Reads the messages of one prompt a line, as JSON, and prints the numbers of its tokens likewise, line by line.
"""

import json
import sys

from transformers import AutoTokenizer


def main():
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    for line in sys.stdin:
        prompt = tokenizer.apply_chat_template(json.loads(line), add_generation_prompt=True, tokenize=False)
        print(tokenizer.encode(prompt, add_special_tokens=False), flush=True)


if __name__ == "__main__":
    main()
