"""Secrets are masked wherever arguments are shown."""

import attrs
import pytest

from ichat.security.redact import is_flag, masked, shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--api-key", "sk-1", "--port", "80"], "--api-key *** --port 80"),
        (["--api-key=sk-1", "--hf-token="], "--api-key=*** --hf-token=***"),
        (["--engine.api_key", "x y"], "--engine.api_key ***"),
        (["--first-token", "5"], "--first-token 5"),
        (["--seed", "-1"], "--seed -1"),
        (["--proxy", "http://me:pw@far/"], "--proxy 'http://***@far/'"),
        (["--extra", '{"token": "t", "n": 1}'], """--extra '{"token": "***", "n": 1}'"""),
        (["--name", "two words"], "--name 'two words'"),
    ],
)
def test_values_of_secret_flags_are_not_shown(words, text):
    assert shown(words) == text


def test_a_negative_number_is_no_flag():
    assert [is_flag(word) for word in ("-x", "--x=a b", "-", "-1", "-.5", "-a b", "x")] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip


def test_secrets_are_masked_at_every_depth():
    """Names decide: a token counter is none, an empty secret hides nothing; JSON in a text is looked into."""
    value = {
        "api_key": "k", "list": [{"password": "p", "first_token": 3}], "private-key": "", "url": "https://u:p@h/x",
        "json": '[{"secret": 1}]', "broken": "{x", "n": 5,
    }  # fmt: skip
    assert masked(value) == {
        "api_key": "***", "list": [{"password": "***", "first_token": 3}], "private-key": "", "url": "https://***@h/x",
        "json": '[{"secret": "***"}]', "broken": "{x", "n": 5,
    }  # fmt: skip


def test_a_value_of_another_kind_is_unchanged():
    one = attrs.make_class("Other", ["token"])("t")
    assert masked(one) is one
