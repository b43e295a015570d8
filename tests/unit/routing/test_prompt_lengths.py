"""How many tokens a prompt has by its bytes, and when that is too many."""

import pytest

from ichat.http.pool import Upstream
from ichat.routing.endpoint import Endpoint
from ichat.routing.prompt_lengths import MEASURED_BYTES_MAX, PromptLengths, is_measurable

CHAT = b"/v1/chat/completions"


def endpoints(*lengths):
    return [Endpoint(Upstream("worker w", "h", 1), b"w", 1, context_tokens=length) for length in lengths]


def test_an_estimate_follows_the_newest_prompts():
    """After some of another language it is theirs; short ones teach nothing."""
    lengths = PromptLengths()
    assert lengths.tokens("m", 4000) is None
    lengths.learn("m", 1000, 63)
    assert lengths.tokens("m", 4000) is None
    lengths.learn("m", 4000, 1000)
    assert lengths.tokens("m", 4000) == 1000
    assert lengths.tokens("other", 4000) is None
    for _ in range(50):
        lengths.learn("m", 2000, 1000)
    assert 1980 < lengths.tokens("m", 4000) <= 2000


def test_one_clients_prompts_do_not_make_anothers_seem_too_long():
    """Digits are a token each, say: prose is not believed to be so, however many come between."""
    lengths = PromptLengths()
    for _ in range(20):
        lengths.learn("m", 4000, 1000)
        for _ in range(8):
            lengths.learn("m", 4000, 4000)
    assert lengths.tokens("m", 4000) < 1250


def test_a_long_prompt_weighs_more_than_a_short_one():
    """What a template adds is nothing to a long prompt, and much to a short one."""
    lengths = PromptLengths()
    for _ in range(5):
        lengths.learn("m", 200, 100)
        lengths.learn("m", 40000, 10000)
    assert 1000 <= lengths.tokens("m", 4000) < 1020


@pytest.mark.parametrize(
    ("bytes_in", "contexts", "is_too_long"),
    [
        (1280, [256], False),
        (1290, [256], True),
        (1290, [256, 512], False),
        (1290, [256, None], False),
        (1290, [None], False),
        (1290, [], False),
    ],
)
def test_clearly_too_long_is_so_for_every_endpoint(bytes_in, contexts, is_too_long):
    """By a quarter; an endpoint that is not known might take it."""
    lengths = PromptLengths()
    assert not lengths.is_too_long("m", bytes_in, endpoints(*contexts))
    lengths.learn("m", 4000, 1000)
    assert lengths.is_too_long("m", bytes_in, endpoints(*contexts)) == is_too_long


def test_models_that_no_name_leads_to_are_forgotten():
    """A reload bounds what is remembered."""
    lengths = PromptLengths()
    for model in "abc":
        lengths.learn(model, 4000, 1000)
    lengths.keep_only({"b", "d"})
    assert [lengths.tokens(model, 4) for model in "abcd"] == [None, 1, None, None]


@pytest.mark.parametrize(
    ("path", "names", "body", "expected"),
    [
        (CHAT, ["messages"], b'{"messages": "x"}', True),
        (b"/chat/completions", ["messages"], b'{"messages": "x"}', True),
        (b"/v1/messages", ["messages"], b"{}", True),
        (b"/v1/responses", ["input"], b"{}", True),
        (b"/v1/responses", ["input", "previous_response_id"], b"{}", False),
        (CHAT, ["messages", "truncate_prompt_tokens"], b"{}", False),
        (CHAT, ["messages"], b'{"url": "data:image/png;base64,AA"}', False),
        (CHAT, ["messages"], b'{"type": "input_audio"}', False),
        (b"/v1/completions", ["prompt"], b'{"prompt": "a [1]"}', True),
        (b"/v1/completions", ["prompt"], b'{"prompt" : ["a", "b"]}', False),
        (b"/v1/completions", ["prompt"], b'{"prompt":[1, 2]}', False),
        (b"/v1/embeddings", ["input"], b"{}", False),
        (b"/v1/rerank", ["documents"], b"{}", False),
        (CHAT, ["messages"], bytearray(MEASURED_BYTES_MAX), True),
        (CHAT, ["messages"], bytearray(MEASURED_BYTES_MAX + 1), False),
    ],
)
def test_which_bodies_tell_how_long_their_prompts_are(path, names, body, expected):
    """One text, all of it in the body, and nothing else of size."""
    assert is_measurable(path, names, body) == expected
