"""Findings about a gateway: its port, the processes it has left, its report on workers and on its file."""

import pytest

from ichat.cli.client import RequestRefused
from ichat.config.schema import Config, ServerSettings
from ichat.doctor.gateway import (
    GatewayFacts,
    LeftProcess,
    OtherGateway,
    WorkerReport,
    find_in_file,
    find_in_gateway,
    read_report,
)
from ichat.errors import EXIT_USAGE, Exit
from ichat.preflight.facts import Holder

CONFIG = Config(server_settings=ServerSettings(port=8000, state_directory="/s"))
OTHER = OtherGateway(9, "ai", "/var/lib/a b")


@pytest.mark.parametrize(
    ("facts", "level", "words", "command"),
    [
        (GatewayFacts(), "ok", "Port 8000 of 127.0.0.1 is free; no gateway runs there.", ""),
        (GatewayFacts("taken", directory="/s", pid=7), "ok",
         "The gateway runs (process 7) and listens on port 8000.", ""),
        (GatewayFacts("free", directory="/s", pid=7), "warning",
         "A gateway (process 7) uses /s and listens elsewhere than on this port: give each gateway", ""),
        (GatewayFacts("taken", [Holder(9, "nginx")]), "error",
         "Port 8000 of 127.0.0.1 is taken by nginx (process 9)", "ps -fp 9"),
        (GatewayFacts("taken"), "error", "is taken by a process that this user cannot see",
         "sudo ss -ltnp sport = :8000"),
        (GatewayFacts("elsewhere"), "error", "The host 127.0.0.1 is no address of this machine", ""),
        (GatewayFacts("taken", [Holder(9, "python")], OTHER), "warning",
         "A gateway of ai (process 9) listens on port 8000 and has another state directory",
         "sudo -u ai env STATE_DIRECTORY='/var/lib/a b' ./ichat.pyz doctor -c FILE"),
        (GatewayFacts("taken", [], OtherGateway(9, "ai")), "warning", "A gateway of ai (process 9)",
         "sudo -u ai ./ichat.pyz doctor -c FILE"),
    ],
)  # fmt: skip
def test_a_port_has_one_finding(facts, level, words, command):
    """It depends on whether a gateway with this state directory runs, and on the program that has the port."""
    [found] = find_in_gateway(CONFIG, facts, None)
    assert (found.level, found.command) == (level, command)
    assert words in found.sentence


def test_a_gateway_on_any_port_listens_elsewhere():
    """With port 0, that is no contradiction."""
    config = Config(server_settings=ServerSettings(port=0, state_directory="/s"))
    [found] = find_in_gateway(config, GatewayFacts(directory="/s", pid=7), None)
    assert (found.level, found.name) == ("ok", "gateway")


LEFT = [LeftProcess(11, "python", "a"), LeftProcess(12, "vllm", "a"), LeftProcess(13, "python", "b")]


def test_processes_of_a_gateway_that_is_gone_are_ended_or_adopted():
    """A running gateway has its own; a worker that outlives its gateway is adopted by the next gateway."""
    facts = GatewayFacts(directory="/s", processes=LEFT, kept=frozenset({"b"}))
    assert facts.workers_by_pid == {11: "a", 12: "a", 13: "b"}
    _, first, second = find_in_gateway(CONFIG, facts, None)
    assert (first.level, first.name, first.command) == ("warning", "a", "kill 11 12")
    assert first.sentence.startswith("Its gateway is gone, and processes 11 12 of it still runs")
    assert (second.level, second.name, second.command) == ("ok", "b", "")
    assert len(find_in_gateway(CONFIG, GatewayFacts("taken", directory="/s", pid=7, processes=LEFT), None)) == 1


@pytest.mark.parametrize(
    ("worker", "level", "sentence", "command"),
    [
        ({"state": "ready", "heartbeat_age_s": 1.26}, "ok", "It is ready; its last heartbeat arrived 1.3 s ago.", ""),
        ({"state": "loading"}, "ok", "It is loading; it sent no heartbeat yet.", ""),
        ({"state": "unhealthy", "heartbeat_age_s": 41.5, "failure": "it missed heartbeats."}, "error",
         "It is unhealthy (it missed heartbeats); its last heartbeat arrived 41.5 s ago.", "./ichat.pyz workers 'w 1'"),
        ({"state": "failed", "managed": True, "failure": "ended with exit code 64", "cause": "unknown flag"}, "error",
         "It is failed (ended with exit code 64: unknown flag); it sent no heartbeat yet.", "./ichat.pyz logs 'w 1'"),
    ],
)  # fmt: skip
def test_a_reported_worker_has_one_finding(worker, level, sentence, command):
    _, found = find_in_gateway(CONFIG, GatewayFacts(), WorkerReport([{"worker_id": "w 1", **worker}]))
    assert (found.level, found.sentence, found.command) == (level, sentence, command)


class Asked:
    """A gateway that answers with these objects, or refuses with this error."""

    def __init__(self, answers, error=None):
        self.answers, self.error = answers, error

    def get(self, path):
        if self.error is not None:
            raise self.error
        return type("Reply", (), {"value": self.answers[path]})


@pytest.mark.parametrize(
    ("error", "level", "command"),
    [
        (RequestRefused(401, "unauthorized", "The key is missing."), "warning", "export ICHAT_ADMIN_KEY=…"),
        (RequestRefused(503, "busy", "It is busy."), "error", ""),
        (Exit(EXIT_USAGE, "No gateway answers."), "error", ""),
    ],
)
def test_a_gateway_that_refuses_its_report_is_named(error, level, command):
    """Without the operators' key, the workers are not known: a warning."""
    _, found = find_in_gateway(CONFIG, GatewayFacts(), read_report(lambda: Asked({}, error)))
    assert (found.level, found.command) == (level, command)
    assert found.sentence == f"The gateway could not be asked about its workers: {error}"


def test_a_report_has_workers_and_the_file():
    answers = {
        "/v1/admin/workers": {"data": [{"worker_id": "w"}, 7]},
        "/v1/admin/config": {"file": {"state": "ok"}},
        "/v1/admin/cluster/status": {"gateway": {"relays": [{"pid": 5}, {"pid": None}]}},
    }
    assert read_report(lambda: Asked(answers)) == WorkerReport([{"worker_id": "w"}], {"state": "ok"}, relays=[5])
    answers["/v1/admin/cluster/status"] = {"gateway": {}}
    assert read_report(lambda: Asked(answers)).relays is None


@pytest.mark.parametrize(
    ("pid", "relays", "reported", "found"),
    [
        (None, [5, 6], None, ("warning", "processes 5 6", "./ichat.pyz sweep /s")),
        (7, [5, 6], [5, 6], ("ok", "has 2 relays", "")),
        (7, [5, 6], [5], ("warning", "processes 6", "kill 6")),
        (7, [5, 6], None, None),
        (7, [5, 6], [1, 2], None),
        (7, [], [], None),
    ],
)
def test_relays_belong_to_the_running_gateway(pid, relays, reported, found):
    """Without a gateway they are left; relays that it does not report are not its own, unless it counts otherwise."""
    facts = GatewayFacts("taken", directory="/s", pid=pid, relays=relays, holders=[Holder(5, "python", "/s", True)])
    findings = [one for one in find_in_gateway(CONFIG, facts, WorkerReport(relays=reported)) if one.name == "relays"]
    assert [(one.level, one.command) for one in findings] == ([(found[0], found[2])] if found else [])
    assert all(found[1] in one.sentence for one in findings)


def test_a_port_that_own_relays_hold_is_no_problem():
    """The next gateway with this directory has it; that of another directory is named with both ways out."""
    own = GatewayFacts("taken", [Holder(5, "python", "/s", True)], directory="/s", relays=[5])
    assert [(one.level, one.name) for one in find_in_gateway(CONFIG, own, None)] == [
        ("ok", "port"),
        ("warning", "relays"),
    ]
    other = GatewayFacts("taken", [Holder(5, "python", "/o t", True)], directory="/s")
    [found] = find_in_gateway(CONFIG, other, None)
    assert (found.level, found.name) == ("error", "port")
    assert "start that gateway, or run `./ichat.pyz sweep '/o t'`" in found.sentence
    running = GatewayFacts("taken", [Holder(5, "python", "/o")], directory="/s")
    assert "is used by the gateway in /o" in find_in_gateway(CONFIG, running, None)[0].sentence


def test_a_gateway_that_refuses_its_file_is_an_error():
    """It has each mistake; a file that was not reloaded yet is a warning with the command to type."""
    file = {"state": "refused", "path": "/i.toml", "since": 1e9, "in_force_since": 9e8, "errors": ["a: no", "b: no"]}
    [found] = find_in_file(WorkerReport(config=file))
    assert (found.level, found.name) == ("error", "configuration")
    assert found.sentence.endswith(" is in force: a: no; b: no.")
    [found] = find_in_file(WorkerReport(config=file), is_listed=True)
    assert found.sentence.endswith(" is in force.")
    [found] = find_in_file(WorkerReport(config={**file, "state": "changed", "errors": []}))
    assert (found.level, found.command) == ("warning", "./ichat.pyz reload")
    assert find_in_file(WorkerReport(config={**file, "state": "ok"})) == []
