"""Other programs of the machine, and the code of a model, get nothing of a managed worker but what they are given."""

import stat

import psutil
import pytest
from support.deployments import pid_of, worker

TOKEN, ADMIN, CLIENT = (f"sk-{name}-0123456789" for name in ("token", "admin", "client"))
KEYS = """[security]
join_token_env = "T_TOKEN"
admin_key_env = "T_ADMIN"
[[security.keys]]
name = "a"
key_env = "T_CLIENT"
"""


@pytest.fixture(autouse=True)
def keys_fixture(monkeypatch):
    for name, key in (("T_TOKEN", TOKEN), ("T_ADMIN", ADMIN), ("T_CLIENT", CLIENT)):
        monkeypatch.setenv(name, key)


def listening(pid):
    """Return the TCP ports on which a process and its children listen, with the addresses."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = [one for process in family for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {(one.laddr.ip, one.laddr.port) for one in found}


def test_a_managed_worker_opens_no_port(gateway, tmp_path):
    """It is asked over its unix socket, in a directory of the gateway's user alone; all that operators see is there."""
    program = gateway(KEYS + worker(more="children = 1"))
    program.key = ADMIN
    program.wait_until_ready("m-0")
    assert listening(pid_of(program)) == set()
    found = program.get("/v1/admin/workers/m-0")[1]
    assert (found["port"], found["unix_socket"]) == (0, True)
    [summary] = program.get("/v1/admin/workers")[1]["data"]
    assert summary["port"] is None
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert program.get("/v1/admin/cluster/status")[0] == 200
    program.key = CLIENT
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200


def test_a_managed_worker_with_a_port_wants_the_token(gateway):
    """A configured port is opened, and asks every caller for the token once there is one."""
    program = gateway(KEYS + worker(more="port = 0"))
    program.key = ADMIN
    program.wait_until_ready("m-0")
    port = program.get("/v1/admin/workers/m-0")[1]["port"]
    assert listening(pid_of(program)) == {("127.0.0.1", port)}
    program.port = port
    for key, status in (("", 401), (ADMIN, 401), (CLIENT, 401), (TOKEN, 200)):
        program.key = key
        assert program.ask("/v1/chat/completions", {"model": "m"})[0] == status, key
    program.key = ""
    assert program.get("/health")[0] == 200


def test_a_heartbeat_over_the_network_names_a_port(gateway):
    """Without one, what a worker calls its host would be the path of a unix socket."""
    program = gateway(worker()).wait_until_ready("m-0")
    body = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 0, "unix_socket": True}
    status, answer = program.ask("/v1/workers/heartbeat", body)
    assert (status, answer["error"]["message"]) == (400, "This is not a heartbeat: port: must be from 1 to 65535.")
    assert program.state("w") is None
    assert program.ask("/v1/workers/heartbeat", {**body, "worker_id": "m-0"})[0] == 403


def test_a_model_finds_no_key_in_its_environment(gateway, tmp_path, monkeypatch):
    """Neither the keys in force, nor those that the commands read, nor one that an earlier configuration named."""
    monkeypatch.setenv("T_EARLIER", "sk-earlier-0123456789")
    monkeypatch.setenv("T_ROUTE", "sk-route-0123456789")
    monkeypatch.setenv("ICHAT_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("ICHAT_API_KEY", CLIENT)
    monkeypatch.setenv("ICHAT_JOIN_TOKEN", TOKEN)
    monkeypatch.setenv("T_OTHER", "no key")
    route = '[[external_routes]]\nmodel_name = "gpt"\napi_base = "http://127.0.0.1:9/v1"\napi_key_env = "T_ROUTE"\n'
    program = gateway(KEYS.replace("T_CLIENT", "T_EARLIER") + route)
    program.key = ADMIN
    path = tmp_path / "ichat.toml"
    path.write_text(path.read_text().replace("T_EARLIER", "T_CLIENT").replace(route, ""))
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 200
    body = {"model_name": "m", "model_path": "/m", "backend": "fake", "children": 1}
    assert program.ask("/v1/admin/workers/launch", body)[0] == 202
    program.wait_until_ready("m-0")
    first = psutil.Process(pid_of(program))
    for process in (first, *first.children(recursive=True)):
        environment = process.environ()
        assert not [name for name, value in environment.items() if value.startswith("sk-")]
        assert environment["T_OTHER"] == "no key"
