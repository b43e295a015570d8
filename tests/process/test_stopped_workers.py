"""Workers that an operator has stopped, over restarts of the gateway and changes of the file."""

from support.deployments import free_port, worker


def test_a_stopped_worker_stays_stopped_over_a_restart_until_its_table_changes(gateway, tmp_path):
    """The next gateway lists it without a process; another table starts it, and no table forgets it."""
    port, other = free_port(), worker("other")
    program = gateway(worker() + other, port).wait_until_ready("m-0")
    program.wait_until_ready("other-0")
    assert program.ask_by("DELETE", "/v1/admin/workers/m-0")[1]["stays"]
    assert program.ask_by("DELETE", "/v1/admin/workers/other-0")[1]["stays"]
    assert program.stop() == 0
    program = gateway(worker() + other, port)
    program.wait_for_port()
    program.until(lambda: program.state("m-0") == program.state("other-0") == "stopped")
    assert program.descendants() == []
    found = program.get("/v1/admin/workers/m-0")[1]
    assert (found["failure"], found["origin"], found["model_names"]) == (
        "was stopped by an operator",
        "configuration",
        ["m"],
    )
    file = tmp_path / "ichat.toml"
    file.write_text(file.read_text().replace(worker() + other, worker(beats_s=19)))
    program.ask_by("POST", "/v1/admin/config/reload")
    program.until(lambda: program.state("other-0") is None)
    program.until(lambda: "ready" in {one["state"] for one in program.get("/v1/admin/workers")[1]["data"]})
    assert {one["state"] for one in program.get("/v1/admin/workers")[1]["data"]} == {"ready"}
