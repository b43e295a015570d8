"""Libraries that clients are written with, against real vLLM: answers, streams, and tools that must be called.

Each runs in an environment of its own, which `./build test` makes: they pin different versions of OpenAI's SDK.
"""

import json
import subprocess

import pytest
from support.programs import ROOT
from support.real_engines import LOAD_S

LIBRARIES = {"langchain": "clients", "pydantic_ai": "clients", "llama_index": "clients-llama-index"}
"""The libraries, and the environment in which each is."""
TEXT = r"[a-z]{60}"
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"sunny": true\}\}\n</tool_call>'

pytestmark = pytest.mark.parametrize("one_place", ["vllm"], indirect=True)


@pytest.fixture(params=LIBRARIES)
def found(request, one_place):
    """Return what a library got of the model."""
    python = ROOT / ".build" / LIBRARIES[request.param] / "bin/python"
    if not python.exists():
        pytest.skip(f"there is no {python}; ./build test makes it")
    program = ROOT / f"tests/support/clients/with_{request.param}.py"
    command = [python, program, f"{one_place.url}/v1", "tiny", TEXT, CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_library_of_clients_streams_and_calls_tools(found):
    """The stream has the same text in pieces; each call has arguments that fit; the tool's result is answered."""
    assert found["tokens"] == 16
    assert len([piece for piece in found["pieces"] if piece]) > 1
    assert "".join(found["pieces"]) == found["answer"] != ""
    assert found["calls"] == [["weather", {"sunny": True}]] * 2
    assert found["after"]
    assert "".join(found.get("responses", ["by another route"]))
