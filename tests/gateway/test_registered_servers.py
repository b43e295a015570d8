"""`[[registered_servers]]`: servers of the configuration that are workers of the fleet, with https and a key."""

import json
import math
import ssl

import pytest
import trio
import trustme
from support.exposition import heartbeat
from support.peers import Upstream, code_of, plain, until
from support.programs import LIMIT_S

from ichat.config import load as configuration
from ichat.doctor.network import find_in_network, read_routes
from ichat.doctor.settings import find_in_settings
from ichat.errors import Exit
from ichat.fleet.registered_servers import server_ids
from ichat.roles import gateway

KEY = "sk-of-the-other-server"
TOKEN = "one-token-for-all-workers"
KEYED = {b"authorization": b"Bearer " + KEY.encode()}
MANAGED = '[[managed_workers]]\nmodel_name = "a/b"\nmodel_path = "/m"\n'
SERVER = '[[registered_servers]]\nmodel_name = "m"\n'


def answering(text, *, has_health=True):
    """Make a server's reply that accepts KEY alone, and answers with this text."""

    async def reply(stream, head, body):
        headers = dict(head.headers)
        if KEYED.items() - headers.items():
            await stream.send_all(b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n")
        elif head.target == b"/health" and not has_health:
            await stream.send_all(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
        elif head.target == b"/metrics":
            await stream.send_all(plain(b"# TYPE own_total counter\nown_total 5\n"))
        else:
            await stream.send_all(plain(text))

    return reply


async def hello(stream, head, body):
    await stream.send_all(plain(b"plain"))


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def ca_file(authority, tmp_path):
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return tmp_path / "ca.pem"


@pytest.fixture
def serve_tls(nursery, authority):
    """Start a server that speaks https: `server, port = await serve_tls(reply)`."""

    async def start(reply, port=0):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        server = Upstream(reply)

        async def serve(stream):
            await server.serve(trio.SSLStream(stream, context, server_side=True, https_compatible=True))

        listeners = await nursery.start(trio.serve_tcp, serve, port)
        return server, listeners[0].socket.getsockname()[1]

    return start


@pytest.fixture
def site(nursery, connect, tmp_path, monkeypatch):
    """Start a gateway with this configuration: `client, reload = await site(text)`; `reload(text)` returns the plan."""
    monkeypatch.setenv("OTHER_KEY", KEY)
    monkeypatch.setenv("JOIN", TOKEN)
    path = tmp_path / "ichat.toml"

    def write(text):
        settings = f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}/state"\nwatch_config = false\n'
        path.write_text(settings + "[health]\ninterval_s = 0.05\n" + text)

    async def start(text):
        (tmp_path / "state").mkdir(mode=0o700)
        write(text)
        port = await nursery.start(gateway.run, *gateway.read_command_line(["-c", str(path)]))
        client = await connect(port)

        async def reload(text):
            write(text)
            status, _, body = await client.ask(target=b"/v1/admin/config/reload")
            return status, json.loads(body)

        return client, reload, port

    return start


def table(port, ca_file, more=""):
    return f'{SERVER}api_base = "https://localhost:{port}"\napi_key_env = "OTHER_KEY"\nca_certificates = "{ca_file}"\n{more}'


def asked(server):
    return [head for head, _ in server.requests if head.method == b"POST"]


async def workers_of(client):
    listed = json.loads((await client.get(b"/v1/admin/workers"))[2])["data"]
    return {one["worker_id"]: one for one in listed}


async def states_of(client):
    return {worker_id: one["state"] for worker_id, one in (await workers_of(client)).items()}


async def wait_for(client, states):
    with trio.fail_after(LIMIT_S):
        while await states_of(client) != states:
            await trio.sleep(0.01)


async def test_a_server_with_https_and_a_key_shares_its_models_requests(
    site, serve, serve_tls, ca_file, connect, capfd, caplog
):
    """It gets its share beside a worker that joined; its own key goes to it alone, and is shown nowhere."""
    server, port = await serve_tls(answering(b"encrypted"))
    joined, joined_port = await serve(hello)
    text = '[routing]\npolicy = "round_robin"\n' + table(port, ca_file, 'worker_id = "other"\n')
    client, _, gateway_port = await site(text)
    await heartbeat(connect, gateway_port, joined_port)
    answers = {}
    for _ in range(4):
        status, headers, body = await client.ask(priority=3)
        assert status == 200
        answers.setdefault(headers[b"x-ichat-worker"], []).append(body)
    assert answers == {b"other": [b"encrypted"] * 2, b"w": [b"plain"] * 2}
    for head in asked(server):
        headers = dict(head.headers)
        assert (head.target, headers[b"authorization"]) == (b"/v1/chat/completions", KEYED[b"authorization"])
    assert not any(KEY.encode() in value for head, _ in joined.requests for _, value in head.headers)
    view = (await workers_of(client))["other"]
    assert (view["state"], view["managed"], view["host"], view["port"]) == ("ready", False, "localhost", port)
    assert view["heartbeat_age_s"] is None
    shown = [await client.get(path) for path in (b"/metrics", b"/v1/admin/workers/other", b"/v1/admin/config")]
    assert b'own_total{worker="other",model="m"} 5' in shown[0][2]
    shown.append(await client.ask(target=b"/v1/admin/route"))
    assert {one["worker_id"] for one in json.loads(shown[-1][2])["candidates"]} == {"other", "w"}
    assert KEY not in repr(shown) + capfd.readouterr().out + caplog.text


async def test_a_checked_server_gets_requests_again_when_checks_succeed(site, serve_tls, ca_file):
    """It gets no requests while its checks fail, and requests again when they succeed: with its key, beside /v1."""
    server, port = await serve_tls(answering(b"hello"))
    client, *_ = await site(table(port, ca_file))
    await until(lambda: any(head.target == b"/health" for head, _ in server.requests))
    assert (await client.ask())[0] == 200

    async def ill(stream, head, body):
        await stream.send_all(b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n")

    well, server.reply = server.reply, ill
    await wait_for(client, {"m-server-0": "unhealthy"})
    assert code_of((await client.ask())[2]) == "model_not_ready"
    server.reply = well
    await wait_for(client, {"m-server-0": "ready"})
    assert (await client.ask())[0] == 200


async def test_a_server_without_health_comes_back_too(site, serve_tls, ca_file, free_tcp_port):
    """Where nothing listens it is unhealthy; any answer, such as 404, shows that it can be reached again."""
    client, *_ = await site(table(free_tcp_port, ca_file))
    await wait_for(client, {"m-server-0": "unhealthy"})
    await serve_tls(answering(b"hello", has_health=False), free_tcp_port)
    await wait_for(client, {"m-server-0": "ready"})
    assert (await client.ask())[2] == b"hello"


async def test_servers_follow_reloads(site, serve_tls, ca_file):
    """They are added, changed and removed; one whose table is the same keeps its record."""
    (_, first), (_, second) = await serve_tls(answering(b"1")), await serve_tls(answering(b"2"))
    one = table(first, ca_file, 'worker_id = "one"\n')
    client, reload, _ = await site("")
    assert (await client.ask())[0] == 404
    status, answer = await reload(one)
    assert (status, [(step["action"], step["what"]) for step in answer["plan"]]) == (
        200, [("add", "registered server one")],
    )  # fmt: skip
    assert (await client.ask())[2] == b"1"
    status, answer = await reload(one.replace(str(first), str(second)) + "max_in_flight = 3\n")
    assert [step["action"] for step in answer["plan"]] == ["update"]
    assert (await client.ask())[2] == b"2"
    assert (await reload(one.replace("OTHER_KEY", "NO_SUCH_KEY")))[0] == 400
    assert (await client.ask())[2] == b"2"
    assert [step["action"] for step in (await reload(""))[1]["plan"]] == ["remove"]
    assert await workers_of(client) == {}
    assert (await client.ask())[0] == 404


async def test_a_new_join_token_and_heartbeats_change_nothing(site, serve_tls, ca_file, connect):
    """It needs no token; nobody else may take its id, and it is stopped by its table alone."""
    server, port = await serve_tls(answering(b"hello"))
    text = table(port, ca_file, 'worker_id = "w"\n')
    client, reload, gateway_port = await site(text)
    with pytest.raises(AssertionError, match="belongs to a server that the configuration registers"):
        await heartbeat(connect, gateway_port, 1)
    assert (await reload('[security]\njoin_token_env = "JOIN"\n' + text))[0] == 200
    assert await states_of(client) == {"w": "ready"}
    assert (await client.ask())[0] == 200
    await until(lambda: server.requests[-1][0].target == b"/health")
    assert not any(name == b"x-ichat-proof" for head, _ in server.requests for name, _ in head.headers)
    status, _, body = await client.ask(method=b"DELETE", target=b"/v1/admin/workers/w")
    assert (status, code_of(body)) == (409, "not_managed")
    assert b"registered_servers" in body


async def test_a_wrong_key_and_other_paths(site, serve_tls, ca_file):
    """A key that is refused is the gateway's fault and not the client's; the key is for inference alone."""
    server, port = await serve_tls(answering(b"hello"))
    client, *_ = await site(table(port, ca_file).replace("OTHER_KEY", "JOIN"))
    status, _, body = await client.ask()
    assert (status, b"does not accept the key" in body) == (502, True)
    assert TOKEN.encode() not in body
    count = len(asked(server))
    assert (await client.ask(target=b"/v1/fine_tuning/jobs"))[0] == 404
    assert len(asked(server)) == count


async def test_its_certificate_is_verified(site, serve_tls, ca_file):
    """Without the authority's certificate it gets no request, and no key."""
    server, port = await serve_tls(answering(b"hello"))
    client, *_ = await site(table(port, ca_file).replace(f'ca_certificates = "{ca_file}"\n', ""))
    assert (await client.ask())[0] in (502, 503)
    assert server.requests == []


async def test_the_doctor_asks_it_with_its_key(serve_tls, ca_file, monkeypatch):
    """As the gateway would; a wrong key and a certificate that is not trusted are findings."""
    server, port = await serve_tls(answering(b"{}"))
    monkeypatch.setenv("OTHER_KEY", KEY)
    text = table(port, ca_file)

    async def findings(text):
        return [(one.level, one.sentence) for one in find_in_network(await read_routes(parsed(text), math.inf))]

    [(level, sentence), *_] = await findings(text)
    assert (level, "and accepts the key" in sentence, server.requests[-1][0].target) == ("ok", True, b"/v1/models")
    monkeypatch.setenv("OTHER_KEY", "sk-wrong")
    assert (await findings(text))[0] == (
        "error", f"localhost:{port} refuses the key in OTHER_KEY (status 401): correct it, and restart the gateway.",
    )  # fmt: skip
    [(level, sentence), *_] = await findings(text.replace(f'ca_certificates = "{ca_file}"\n', ""))
    assert (level, "set its ca_certificates." in sentence) == ("error", True)
    monkeypatch.delenv("OTHER_KEY")
    assert await findings(text) == []
    [finding] = [one for one in find_in_settings(None, parsed(text)) if one.name == "keys"]
    assert "registered_servers[0]: the environment has no usable key in OTHER_KEY." in finding.sentence


def parsed(text):
    return configuration.parse(text, "test.toml")


def test_a_server_has_any_id_that_no_managed_worker_gets():
    """Managed workers' ids end with a number after the model's name."""
    for worker_id in ("a-b", "a-b-x", "a-b-c-0", "a-0"):
        parsed(f'{MANAGED}{SERVER}api_base = "http://a"\nworker_id = "{worker_id}"\n')


def test_ids_are_made_and_taken():
    """Each has an id: its own, or one that is made from the model's name and no managed worker has."""
    base = 'api_base = "http://a"\n'
    config = parsed(f'{SERVER}{base}{SERVER}{base}worker_id = "m-server-1"\n{SERVER}{base}')
    assert list(server_ids(config)) == ["m-server-0", "m-server-1", "m-server-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SERVER + 'api_base = "ftp://a"\n', "registered_servers[0].api_base: must be like https://host/v1"),
        (SERVER + 'api_base = "http://a"\nworker_id = "a b"\n', "registered_servers[0].worker_id: must be 1 to 128"),
        (SERVER + 'api_base = "http://a"\nca_certificates = "x"\n', "ca_certificates: is for https"),
        (2 * (SERVER + 'api_base = "http://a"\nworker_id = "a"\n'), "registered_servers[1].worker_id: 'a' is taken"),
        (
            MANAGED + SERVER + 'api_base = "http://a"\nworker_id = "a-b-0"\n',
            "registered_servers[0].worker_id: 'a-b-0' may be the id of a managed worker of 'a/b'",
        ),
        (
            SERVER + 'api_base = "http://a"\n[[external_routes]]\nmodel_name = "m"\napi_base = "http://b"\n',
            "registered_servers[0].model_name: 'm' is also an external route",
        ),
        ("[health]\ninterval_s = 0\n" + SERVER + 'api_base = "http://a"\n', "health.interval_s: must not be 0"),
        (SERVER.replace('"m"', '"m*"') + 'api_base = "http://a"\n', "registered_servers[0].model_name: 'm*' has a *"),
    ],
)
def test_every_mistake_of_a_registered_server_has_its_path(text, words):
    """Every mistake has its path and one sentence."""
    with pytest.raises(Exit, match="was not accepted") as refusal:
        parsed(text)
    assert words in str(refusal.value)


async def test_a_missing_key_keeps_the_gateway_from_starting(tmp_path):
    """As for a route, with the variable's name."""
    config = parsed(f'{SERVER}api_base = "http://a"\napi_key_env = "NO_SUCH_KEY"\n')
    with pytest.raises(Exit, match=r"registered_servers\[0\]: the environment has no usable key in NO_SUCH_KEY"):
        await gateway.run(config)
