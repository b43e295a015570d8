"""Short heartbeats between processes: a worker and its gateway, and the next one."""

import json

from support.deployments import free_port, start_registering

LOG = '[logs]\naccess_log = "{}"\n'
SHORT_BYTES = 300


def sizes(log):
    """Return the sizes of the heartbeats over the gateway's port that it accepted, and their statuses."""
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    beats = [one for one in entries if one.get("path") == "/v1/workers/heartbeat"]
    return [(one["status"], "short" if one["bytes_in"] < SHORT_BYTES else "whole") for one in beats]


def known_whole(program):
    """Return what the gateway knows of the worker once it knows the machine too: that is reported last."""
    program.until(lambda: program.get("/v1/admin/workers/w1")[1]["machine"])
    return program.get("/v1/admin/workers/w1")[1]


def test_a_worker_sends_the_whole_to_each_gateway_once(gateway, start, tmp_path):
    """It sends short heartbeats otherwise; a gateway that was restarted learns all of it again, and all it needs."""
    log = tmp_path / "access.log"
    port = free_port()
    program = gateway(LOG.format(log), port=port)
    start_registering(start, program.port, 0.2)
    program.wait_until_ready("w1")
    known = known_whole(program)
    program.until(lambda: sizes(log)[-8:] == [(200, "short")] * 8)
    program.process.kill()
    program.process.wait()
    log.unlink()
    program = gateway(LOG.format(log), port=port)
    program.wait_until_ready("w1")
    program.until(lambda: sizes(log)[-8:] == [(200, "short")] * 8)
    assert sizes(log)[:2] in ([(404, "short"), (200, "whole")], [(200, "whole"), (200, "short")])
    again = known_whole(program)
    assert known["args"]
    for name in ("args", "versions", "model_names", "port", "start_id", "pid", "machine"):
        assert again[name] == known[name]
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
