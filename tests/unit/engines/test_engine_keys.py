"""An engine asks for no key: the gateway has none for it, and its clients' keys are its own."""

import argparse
import re

import pytest

from ichat.engines.flags import refuse_engine_keys


@pytest.mark.parametrize(
    ("args", "variable", "what"),
    [
        ({"api_key": ["k"]}, None, "--api-key"),
        ({"admin_api_key": "k"}, None, "--admin-api-key"),
        ({"api_key": None}, "k", "the environment variable VLLM_API_KEY"),
    ],
)
def test_a_key_of_the_engines_own_is_refused(args, variable, what, monkeypatch):
    """By a flag of either engine, or by vLLM's variable: one sentence that says whose keys are."""
    if variable:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    sentence = f"{what} is not for a worker: clients' keys belong to the gateway"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        refuse_engine_keys(argparse.Namespace(**args), ValueError)


def test_no_key_is_no_matter(monkeypatch):
    """Also where the engine's arguments know of one."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    refuse_engine_keys(argparse.Namespace(api_key=None, admin_api_key=""), ValueError)
