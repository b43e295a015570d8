"""Coding agents as they are, against a real worker with a model that speaks: they connect, stream and show an answer."""

import os
import subprocess

import pytest
from support.programs import ROOT
from support.real_engines import Deployment, python_of

SMOLLM2 = ROOT / ".build/smollm2"
AGENTS = ROOT / ".build/agents/node_modules"
CLAUDE_CODE = AGENTS / "@anthropic-ai/claude-code-linux-x64/claude"
CODEX = AGENTS / "@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex"
ANSWER_S = 1800
"""How long an agent may take: its own prompt has thousands of tokens, and the model runs on the CPU."""
QUESTION = "What is the capital of France?"
INSTRUCTIONS = "Answer in one short sentence."
"""In the place of an agent's own, which are longer than a model of 135 million parameters can follow."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    for needed in (python_of("vllm"), SMOLLM2, CLAUDE_CODE, CODEX):
        if not needed.exists():
            pytest.skip(f"there is no {needed}; ./build test slow makes it")
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    directory = tmp_path_factory.mktemp("agents")
    made = Deployment("vllm", SMOLLM2, directory, max_model_len=8192, enforce_eager=True, **tools)
    yield made.wait()
    made.end()


def ask(command, directory, **env):
    """Run an agent in a directory and a home of its own, and return what it shows on its standard output."""
    (directory / "work").mkdir()
    clean = {"PATH": os.environ["PATH"], "HOME": str(directory), **env}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory / "work",
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_claude_code_shows_the_answer(deployment, tmp_path):
    """It asks /v1/messages, takes the stream, and shows its text."""
    env = {
        "ANTHROPIC_BASE_URL": deployment.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(ANSWER_S * 1000),
    }
    flags = ["--model", "tiny", "--bare", "--tools", "", "--system-prompt", INSTRUCTIONS]
    assert ask([CLAUDE_CODE, "-p", QUESTION, *flags], tmp_path, **env).strip()


def test_codex_shows_the_answer(deployment, tmp_path):
    """It asks /v1/responses, takes the stream, and shows its text."""
    (tmp_path / "instructions.md").write_text(INSTRUCTIONS)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(
        f"""
        model = "tiny"
        model_provider = "ichat"
        model_instructions_file = "{tmp_path / "instructions.md"}"
        [model_providers.ichat]
        name = "iChat"
        base_url = "{deployment.url}/v1"
        wire_api = "responses"
        stream_idle_timeout_ms = {ANSWER_S * 1000}
        """
    )
    assert ask([CODEX, "exec", "--skip-git-repo-check", QUESTION], tmp_path).strip()
