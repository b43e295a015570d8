"""The memory of loads over the lives of gateways, with a fake engine."""

import json

import pytest
from support.deployments import free_port, worker
from support.takeovers import begin

from ichat.preflight.learnt_file import LEARNT_FILE

MEMORY = "memory = {{ tokens = {} }}"


def loads(tmp_path):
    file = tmp_path / "state" / LEARNT_FILE
    return json.loads(file.read_text())["loads"] if file.exists() else []


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_load_is_known_to_the_next_gateway(gateway, tmp_path, is_damaged):
    """A gateway that is killed has written it; a damaged file is put aside, and the next load is in a new file."""
    program = gateway(worker(more=MEMORY.format(100)))
    program.until(lambda: [one["tokens"] for one in loads(tmp_path)] == [100])
    assert program.get("/v1/admin/workers/m-0")[1]["memory"]["tokens"] == 100
    (known,) = loads(tmp_path)
    assert (known["name"], known["beside_bytes"], known["key"]["backend"]) == ("m", None, "fake")
    program.process.kill()
    program.process.wait()
    if is_damaged:
        (tmp_path / "state" / LEARNT_FILE).write_text("{")
    program = gateway(worker("n", more=MEMORY.format(200)))
    tokens = [200] if is_damaged else [100, 200]
    program.until(lambda: [one["tokens"] for one in loads(tmp_path)] == tokens)
    assert ("cannot be read (it is damaged)" in program.text()) == is_damaged


def test_a_load_is_known_after_a_takeover(gateway, start, tmp_path):
    """The new process goes on with the file, and learns from the next load."""
    program = gateway(worker(more=MEMORY.format(100)), free_port())
    program.until(lambda: [one["tokens"] for one in loads(tmp_path)] == [100])
    path = tmp_path / "ichat.toml"
    new = begin(start, path).wait_for_port()
    path.write_text(path.read_text() + worker("n", more=MEMORY.format(200)))
    new.until(lambda: {one["tokens"] for one in loads(tmp_path)} == {100, 200})
    assert len(loads(tmp_path)) == 2
