"""What engines say of requests that are too long, as found in their sources and applications, becomes one sentence."""

import json

import pytest

from ichat.engines.context_length import SIGN, restated
from ichat.engines.error_translation import anthropic_error, error_event, openai_error

LIMIT = "This model's maximum context length is 256 tokens. However, "

# Whose words, the words, and what the client reads of them.
WORDS = [
    (
        "vllm: a prompt, which the tokenizer cuts",
        (
            "This model's maximum context length is 256 tokens. However, your prompt contains at least 257 input tokens,"
            " which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
            " (parameter=input_tokens, value=257)"
        ),
        "your prompt has at least 257 tokens.",
    ),
    (
        "vllm: a prompt in tokens",
        (
            "This model's maximum context length is 256 tokens. However, your prompt contains 300 input tokens, which"
            " exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        ),
        "your prompt has 300 tokens.",
    ),
    (
        "vllm: a prompt of so many characters that nobody counts its tokens",
        (
            "This model's maximum context length is 256 tokens. However, your prompt contains 200000 characters (more than"
            " 4352 characters, which is the upper bound for 256 input tokens). Please reduce the length of the input"
            " prompt. (parameter=input_text, value=200000)"
        ),
        "your prompt has 200000 characters, which are more tokens than that.",
    ),
    ("vllm", "Input length (300) exceeds model's maximum context length (256).", "your prompt has 300 tokens."),
    (
        "vllm: responses",
        "The engine prompt length 300 exceeds the max_model_len 256. Please reduce prompt.",
        "your prompt has 300 tokens.",
    ),
    (
        "vllm: with pictures",
        (
            "The decoder prompt (length 300) is longer than the maximum model length of 256. Make sure that `max_model_len`"
            " is no smaller than the number of text tokens."
        ),
        "your prompt has 300 tokens.",
    ),
    (
        "vllm: no room for one token",
        (
            "The decoder prompt (length 256) plus the number of requested output tokens (at least 1) is longer than the"
            " maximum model length of 256. Make sure that `max_model_len` is no smaller than the number of text tokens"
            " (prompt + requested output tokens)."
        ),
        "your prompt has 256 tokens.",
    ),
    (
        "vllm: the completion alone",
        (
            "max_tokens=1000 cannot be greater than max_model_len=256. Please request fewer output tokens."
            " (parameter=max_tokens, value=1000)"
        ),
        "you requested 1000 tokens for the completion alone.",
    ),
    (
        "vllm: decisions",
        "the prompt has 300 tokens and a canvas read adds 8, more than max_model_len=256",
        "your prompt has 300 tokens.",
    ),
    (
        "sglang: a prompt",
        "The input (300 tokens) is longer than the model's context length (256 tokens).",
        "your prompt has 300 tokens.",
    ),
    (
        "sglang: prompt and completion",
        (
            "Requested token count exceeds the model's maximum context length of 256 tokens. You requested a total of 300"
            " tokens: 200 tokens from the input messages and 100 tokens for the completion. Please reduce the number of"
            " tokens in the input messages or the completion to fit within the limit."
        ),
        "you requested 300 tokens (200 in the prompt, 100 for the completion).",
    ),
    (
        "sglang: the completion alone",
        "max_completion_tokens is too large: 1000.This model supports at most 256 completion tokens.",
        "you requested 1000 tokens for the completion alone.",
    ),
    (
        "sglang: the scheduler's own limit",
        (
            "Input length (300 tokens) exceeds the maximum allowed length (256 tokens). Use a shorter input or enable"
            " --allow-auto-truncate."
        ),
        "your prompt has 300 tokens.",
    ),
    (
        "sglang: decisions",
        "the prompt has 300 tokens, which does not fit the context length of 256 tokens",
        "your prompt has 300 tokens.",
    ),
]


@pytest.mark.parametrize(("words", "seen"), [row[1:] for row in WORDS], ids=[row[0] for row in WORDS])
def test_every_refusal_reads_alike(words, seen):
    """Both engines' words, in both engines' forms, get OpenAI's code, and a message with the limit and what was asked."""
    for answer in (
        {"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}},
        {"object": "error", "message": words, "type": "BadRequestError", "param": None, "code": 400},
        {"type": "error", "error": {"type": "invalid_request_error", "message": words}},
    ):
        status, body = openai_error(400, json.dumps(answer).encode())
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
        assert error["message"] == LIMIT + seen
        assert SIGN in body


def test_a_memory_that_is_too_small_has_no_limit_to_tell():
    """SGLang does not say how many tokens its cache has."""
    words = "Request prompt exceeds the KV memory budget: input_len=300."
    assert restated(words) == "This model has no room for the prompt, which has 300 tokens."


def test_anthropics_form_and_events_have_the_code_too():
    """A client of any route can tell it from other mistakes, also in a stream that has begun."""
    words = WORDS[1][1]
    body = json.dumps({"type": "error", "error": {"type": "BadRequestError", "message": words}}).encode()
    status, told = anthropic_error(400, body)
    assert (status, json.loads(told)["error"]["code"]) == (400, "context_length_exceeded")
    event = b"data: " + json.dumps({"error": {"message": words, "type": "BadRequestError", "code": 400}}).encode()
    assert SIGN in error_event(b"/v1/chat/completions", event + b"\n\n")


@pytest.mark.parametrize(
    "words",
    [
        "temperature must be in [0, 2], got -1.0.",
        "The prompt says: This model's maximum context length is 5 tokens.",
        "max_tokens must be at least 1, got -5.",
        'the tool "code": "context_length_exceeded" is unknown',
    ],
)
def test_other_mistakes_stay_as_they_are(words):
    """What a client may quote in the middle of a message does not make it this error."""
    _, body = openai_error(400, json.dumps({"error": {"message": words, "code": 400}}).encode())
    error = json.loads(body)["error"]
    assert (error["message"], error["code"]) == (words, "bad_request")
    assert SIGN not in body


def test_another_status_with_these_words_is_no_refusal_of_the_request():
    """A failure of the engine is not the client's mistake, whatever it says."""
    _, body = openai_error(500, json.dumps({"error": {"message": WORDS[1][1], "code": 500}}).encode())
    assert json.loads(body)["error"]["code"] == "internal_error"
