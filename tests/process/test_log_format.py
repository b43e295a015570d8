"""Logs that machines read: one JSON object a line, and the id of the request that a line is about."""

import json
import re

import pytest
from support.deployments import worker
from support.programs import ichat

CONFIG = """
[server_settings]
port = 0
state_directory = "{place}/state"
{more}
[[external_routes]]
model_name = "gone"
api_base = "http://127.0.0.1:9/v1"
"""
ASKED = "/v1/chat/completions"
LISTENS = r"listens on 127\.0\.0\.1:(\d+)"
BODY = {"model": "gone", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def gateway(tmp_path, start):
    """Start a gateway with a worker of its own, and an upstream that refuses connections; wait for its port."""

    def run(*flags, more=""):
        path = tmp_path / "ichat.toml"
        path.write_text(CONFIG.format(place=tmp_path, more=more) + worker())
        program = start(ichat("gateway", "-c", path, *flags))
        program.until(lambda: program.process.poll() is not None or re.search(LISTENS, program.text()))
        program.port = int(re.search(LISTENS, program.text())[1])
        return program

    return run


@pytest.mark.parametrize("way", ["flag", "file"])
def test_every_line_is_a_json_object(gateway, way):
    """The gateway's own lines, requests and the worker's output, by the flag or by `logs.format`."""
    program = gateway("--log-format=json") if way == "flag" else gateway(more='[logs]\nformat = "json"')
    program.until(lambda: program.state("m-0") == "ready")
    assert program.ask(ASKED, BODY)[0] == 502
    program.stop()
    lines = [json.loads(line) for line in program.text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert any(line.get("worker") == "m-0" and "message" in line for line in lines)
    [request] = [line for line in lines if line.get("path") == ASKED]
    about = [line for line in lines if line.get("request_id") == request["id"]]
    assert [(line["level"], line["logger"].split(".")[0]) for line in about][:1] == [("warning", "ichat")]
    assert not [line for line in lines if "listens on" in line.get("message", "") and "request_id" in line]


@pytest.mark.parametrize("form", ["auto", "text"])
def test_a_line_of_text_about_a_request_has_its_id(gateway, form):
    """In the short form and in the long one; other lines have none."""
    program = gateway(f"--log-format={form}")
    assert program.ask(ASKED, BODY)[0] == 502
    program.stop()
    [about] = [line for line in program.text().splitlines() if re.search("(?i)warning.*gone", line)]
    assert re.search(r"\breq-[0-9a-f]{24}\b", about)
    assert not re.search(r"listens on .*req-", program.text())


def test_a_workers_own_lines_are_json_objects(start):
    """Its engine's lines stay as the engine writes them."""
    program = start(ichat("worker", "--backend=fake", "--model=m", "--port=0", "--log-format=json"))
    program.until(lambda: "listens on" in program.text())
    program.stop()
    own = [json.loads(line) for line in program.text().splitlines() if line.startswith("{")]
    assert any("listens on" in line["message"] for line in own)
    assert {line["logger"].split(".")[0] for line in own} == {"ichat"}
