"""`convert` and then `gateway --check`, as a user types them."""

import os
import subprocess

import pytest
from support.programs import LIMIT_S, ROOT, ichat

LITELLM = """
model_list:
  - {model_name: gpt, litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY, rpm: 3}}
  - {model_name: gpt, litellm_params: {model: openai/gpt-4o, api_base: "http://127.0.0.1:9/v1", api_key: sk-other}}
  - {model_name: local, litellm_params: {model: hosted_vllm/q, api_base: "http://127.0.0.1:9/v1", temperature: 0}}
  - {model_name: "*", litellm_params: {model: "openai/*"}}
litellm_settings: {drop_params: true, fallbacks: [{gpt: [local]}], success_callback: [langfuse]}
router_settings: {num_retries: 2, model_group_alias: {gpt-4: gpt}}
general_settings: {master_key: os.environ/LITELLM_MASTER_KEY, database_url: "postgresql://u:p@h/d"}
"""
SWAP = """
macros: {base: "llama-server --port ${PORT}"}
apiKeys: ["${env.LITELLM_MASTER_KEY}"]
models:
  a: {cmd: "${base} -m /a.gguf", aliases: [gpt-4o-mini], ttl: 60}
  b: {cmd: "${base} -m /b.gguf", useModelName: org/b}
groups: {g: {members: [a, b]}}
peers: {p: {proxy: "http://127.0.0.1:9", models: [c], apiKey: "${env.OPENAI_API_KEY}"}}
"""
KEYS = {"OPENAI_API_KEY": "sk-of-openai", "LITELLM_MASTER_KEY": "sk-0123456789abcdef"}


def run(place, *words):
    env = {**os.environ, **KEYS, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ichat(*words), cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("text", [LITELLM, SWAP], ids=["litellm", "llama-swap"])
def test_a_converted_file_passes_the_check(tmp_path, text):
    """The gateway says what to type for the YAML, and accepts what that makes."""
    (tmp_path / "config.yaml").write_text(text)
    refused = run(tmp_path, "gateway", "-c", "config.yaml")
    assert (refused.returncode, refused.stderr.count("\n")) == (64, 1)
    assert "`./ichat.pyz convert config.yaml -o ichat.toml`" in refused.stderr
    made = run(tmp_path, "convert", "config.yaml", "-o", "ichat.toml")
    assert (made.returncode, made.stdout) == (0, "")
    checked = run(tmp_path, "gateway", "-c", "ichat.toml", "--check")
    assert (checked.returncode, checked.stderr) == (0, "ichat.toml is right.\n")
    assert "p@h" not in (tmp_path / "ichat.toml").read_text()
