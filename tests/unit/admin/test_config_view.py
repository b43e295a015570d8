"""What operators see of a configuration: every value that is in force, and nothing secret."""

import json
import pathlib

import attrs
import pytest

from ichat.admin.config_view import changed_keys, shown_section
from ichat.config import load as configuration
from ichat.config.schema import Config

HASH = "sha256:0123456789abcdef" + 48 * "0"
TEXT = f"""
[server_settings]
port = 4100
[security]
admin_key_hash = "{HASH}"
[[security.keys]]
name = "a"
key_hash = "{HASH}"
tokens_per_minute = 5
[[managed_workers]]
model_name = "m"
model_path = "/m"
max_model_len = 2048
api_key = "sk-hidden-1"
hf_overrides = {{ hf_token = "sk-hidden-2", url = "https://me:sk-hidden-3@hub/x" }}
env = {{ HF_HOME = "sk-hidden-4", ANY = "sk-hidden-5" }}
[[external_routes]]
model_name = "e"
api_base = "https://there/v1"
api_key_env = "THEIR_KEY"
headers = {{ "x-any" = "sk-hidden-6" }}
[engines.vllm]
python = "/opt/python"
"""


@pytest.fixture(scope="module")
def config():
    return configuration.parse(TEXT.replace('admin_key_env = "OPERATORS_KEY"\n', ""), "test.toml")


def test_nothing_secret_is_shown(config):
    """Keys of engines, values of headers and of environments, logins in URLs: none of them, wherever they stand."""
    text = json.dumps(shown_section(config))
    assert "sk-hidden" not in text
    assert HASH not in text


def test_everything_else_is_shown(config):
    """Every section and key with its value in force; a hash so far that it can be told from others."""
    shown = shown_section(config)
    assert shown.keys() == {field.name for field in attrs.fields(Config)}
    assert shown["server_settings"]["port"] == 4100
    assert shown["timeouts"]["engine_flags_s"] == 120
    assert shown["security"]["admin_key_hash"] == "sha256:01234567…"
    assert shown["security"]["keys"][0] | {"name": "a", "tokens_per_minute": 5} == shown["security"]["keys"][0]
    worker, route = shown["managed_workers"][0], shown["external_routes"][0]
    assert worker["env"] == {"HF_HOME": "***", "ANY": "***"}
    assert worker["backend_args"]["max_model_len"] == 2048
    assert route["headers"] == {"x-any": "***"}
    assert route["api_key_env"] == "THEIR_KEY"
    assert shown["engines"] == {"vllm": {"python": "/opt/python", "devices": "CUDA_VISIBLE_DEVICES"}}


def test_the_view_has_what_differs_from_defaults(config):
    """Keys of sections one by one; lists, and tables with free names, as a whole; nothing for an empty file."""
    assert changed_keys(Config()) == []
    assert changed_keys(config) == [
        "server_settings.port", "security.admin_key_hash", "security.keys", "managed_workers", "external_routes",
        "engines",
    ]  # fmt: skip


def test_the_example_can_be_shown():
    """The view of the largest file that there is, is JSON."""
    example = pathlib.Path(__file__).parents[3] / "ichat.toml.example"
    assert json.loads(json.dumps(shown_section(configuration.load(example))))["managed_workers"]
