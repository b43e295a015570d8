"""Who is the gateway's own user is proved by a secret of his, not guessed from where a request comes."""

import json
import os
import stat
import subprocess

import pytest
from support.peers import AS_OWN, OWN_SECRET, code_of, plain
from support.programs import LIMIT_S, ichat

from ichat.config import load as configuration
from ichat.config.own_secret import announced, find_secret, keep_secret, usual_directory
from ichat.config.schema import Security, ServerSettings
from ichat.errors import Exit
from ichat.http.heads import RequestHead
from ichat.security.auth import Auth
from ichat.security.origins import Site, own_names
from ichat.supervisor.state import open_state

LAUNCH = b'{"model_name": "m", "model_path": "/m", "backend": "vllm", "python": "/bin/echo"}'


def page_of(site, host, *headers, version=b"1.1"):
    named = [(b"host", host.encode()), *((name, value.encode()) for name, value in headers)]
    return site.page(version, named)


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


async def post(client, path, body, *headers):
    lines = b"".join(header + b"\r\n" for header in headers)
    await client.send(b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path, lines, len(body), body))
    status, _, answer = await client.response()
    return status, answer


# Nobody launches a program from here without the secret.

JSON = b"content-type: application/json"
TEXT = b"content-type: text/plain"
FROM_HERE = {
    "a program of another user": [b"host: 127.0.0.1:4000", JSON],
    "nginx, as it asks by default since 1.29.7": [b"host: 127.0.0.1:4000", b"accept: */*", JSON],
    "HAProxy, with a client's own Host": [b"host: localhost", JSON],
    "the port driver of a rootless container": [b"host: 192.168.1.5:4000", JSON],
    "a page of another port": [b"host: localhost:4000", b"origin: http://localhost:8888", TEXT],
    "a page of another loopback address": [b"host: localhost:4000", b"origin: http://127.9.9.9", JSON],
    "a page of a subdomain": [b"host: localhost:4000", b"origin: http://evil.localhost:8888", TEXT],
    "a page whose name leads here": [b"host: evil.example:4000", b"origin: http://evil.example:4000", JSON],
    "a page that says nothing of itself": [b"host: localhost:4000", b"sec-fetch-site: cross-site", TEXT],
}


@pytest.mark.parametrize("headers", FROM_HERE.values(), ids=FROM_HERE.keys())
async def test_local_callers_without_the_secret_change_nothing(gateway_to, connect, headers):
    """Whoever only comes from this machine starts no program: neither in earnest nor for a trial."""
    port = await gateway_to({})
    for path in (b"/v1/admin/workers/launch", b"/v1/admin/workers/launch?dry_run=1", b"/v1/load_lora_adapter"):
        status, answer = await post(await connect(port), path, LAUNCH, *headers)
        assert (status, code_of(answer)) in ((401, "invalid_api_key"), (403, "forbidden"))
    status, _ = await post(await connect(port), b"/v1/workers/heartbeat", b"{}", *headers)
    assert status in (401, 403)
    status, _ = await post(
        await connect(port), b"/v1/admin/workers/launch?dry_run=1", LAUNCH, b"host: localhost", JSON, AS_OWN[:-2]
    )
    assert status not in (401, 403)


async def test_the_control_plane_reads_json_alone(gateway_to, connect):
    """What a page can send without being asked for leave is refused before it is read, with the secret as well."""
    port = await gateway_to({})
    for content_type in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=b", b""):
        header = b"content-type: " + content_type if content_type else b"x-none: 1"
        for path in (b"/v1/admin/config/reload", b"/v1/workers/heartbeat", b"/v1/admin/keys"):
            status, answer = await post(await connect(port), path, b"{}", b"host: localhost", header, AS_OWN[:-2])
            assert (status, code_of(answer)) == (415, "unsupported_media_type")
            assert b"Content-Type: application/json" in answer


# The names and the pages of a gateway whose clients need no key.


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("127.0.0.1:4000", True),
        ("10.0.0.5", True),  # no name can be made to lead away from an address
        ("[fd00::1]:4000", True),
        ("localhost", True),
        ("LocalHost.:80", True),
        ("a.localhost", True),
        ("gw.example", True),
        ("GW.example:443", True),
        ("x.cluster.example", True),
        ("cluster.example", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("gw.example.evil.example", False),
        ("evil-cluster.example", False),
        ("a@localhost", False),
        ("localhost:4000:1", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[::1", False),
        ("1.2.3.4.5", False),
        *((name, True) for name in sorted(own_names())),
    ],
)
def test_a_name_is_known_or_refused(host, is_known):
    """A `Host` is an address, this machine's name, or one of the configuration's; all others are told what to do."""
    page = page_of(Site(["gw.example", "*.cluster.example"]), host)
    assert (not page.objection) is is_known
    assert is_known or "server_settings.hosts" in page.objection
    assert not page_of(Site(["*"]), host).objection or not host or not is_known


@pytest.mark.parametrize(
    "host", ["http://gw.example", "gw.example:4000", "GW.example", "*", "*.a.*", "", "a b", "[::1]"]
)
def test_an_invalid_host_name_is_refused_with_a_sentence(host):
    """A name without a scheme and a port, in lower case, perhaps with `*.` before it; or `*` for all."""
    text = f"[server_settings]\nhosts = [{json.dumps(host)}]\n"
    if host == "*":
        assert configuration.parse(text, "test.toml").server_settings.hosts == ["*"]
        return
    with pytest.raises(Exit, match=r"server_settings.hosts: .* is neither a name of this gateway, such as"):
        configuration.parse(text, "test.toml")


@pytest.mark.parametrize(
    ("headers", "may", "is_listed"),
    [
        ([], True, False),
        ([(b"origin", "http://gw.example:4000")], True, False),
        ([(b"origin", "https://gw.example:4000")], False, False),
        ([(b"origin", "http://gw.example")], False, False),
        ([(b"origin", "http://gw.example:4000"), (b"origin", "http://evil.example")], False, False),
        ([(b"origin", "null")], False, False),
        ([(b"origin", "")], False, False),
        ([(b"origin", "https://chat.example")], True, True),
        ([(b"origin", "https://chat.example"), (b"sec-fetch-site", "cross-site")], True, True),
        ([(b"origin", "https://chat.example"), (b"origin", "null")], False, False),
        ([(b"sec-fetch-site", "same-origin")], True, False),
        ([(b"sec-fetch-site", "none")], True, False),
        ([(b"sec-fetch-site", "same-site")], False, False),
        ([(b"sec-fetch-site", "cross-site")], False, False),
        ([(b"origin", "http://gw.example:4000"), (b"sec-fetch-site", "same-site")], False, False),
        ([(b"origin", "https://gw.example:4000"), (b"x-forwarded-proto", "https")], True, False),  # a proxy with TLS
    ],
)
def test_a_page_is_the_gateways_own_or_listed(headers, may, is_listed):
    """An `Origin` is the request's scheme and `Host`, or stands in `cors_origins`: then it uses models alone."""
    page = page_of(Site(["gw.example"], ["https://chat.example"]), "gw.example:4000", *headers)
    assert (not page.objection, page.is_listed) == (may, is_listed)
    assert may or "cors_origins" in page.objection
    assert page.objection.isascii()
    assert page.objection.isprintable()


async def test_models_are_for_known_names_and_own_pages(serve, gateway_to, connect):
    """A page that a browser was led to by another name of this address neither uses models nor reads anything."""
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream}, 'hosts = ["gw.example"]\n')
    body = b'{"model": "m"}'
    for headers, status in (
        ([b"host: gw.example"], 200),
        ([b"host: evil.example:4000", b"origin: http://evil.example:4000"], 403),
        ([b"host: evil.example"], 403),
        ([b"host: localhost", b"origin: http://localhost:8888"], 403),
        ([b"host: gw.example", b"authorization: Bearer sk-anything", b"origin: http://evil.example"], 403),
    ):
        assert (await post(await connect(port), b"/v1/chat/completions", body, JSON, *headers))[0] == status
        for path in (b"/v1/models", b"/metrics", b"/v1/admin/workers", b"/v1/admin/config"):
            if headers == [b"host: gw.example"] and path != b"/v1/models":
                continue  # from loopback by another name: a proxy, perhaps
            client = await connect(port)
            await client.send(b"GET %b HTTP/1.1\r\n%b\r\n" % (path, b"".join(one + b"\r\n" for one in headers)))
            found = (await client.response(b"GET"))[0]
            assert (found == 200) is (status == 200), (path, headers)


def test_with_a_right_key_names_and_pages_do_not_matter():
    """Keys do not come by themselves: only who has one sends it, and no page of another origin reads the answer."""
    auth = Auth(Security(), secret=OWN_SECRET)
    headers = [(b"host", b"evil.example"), (b"origin", b"null"), (b"authorization", b"Bearer " + OWN_SECRET.encode())]
    caller = auth.caller(RequestHead(b"GET", b"/", b"1.1", headers, 0), "127.0.0.1:1")
    assert (caller.kind, caller.page.objection, auth.is_operator(caller)) == ("own", "", True)


# The secret and where it is.


def listening(address, port):
    return announced(str(usual_directory(port)), [(address, port)])


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The state directory of a gateway of this user at port 4000, with its lock and secret."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "ichat/4000"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "lock").touch()
    return directory


def test_the_secret_is_kept_and_private(state):
    """256 random bits that only this user reads, the same at every start; what is no secret is replaced."""
    made = keep_secret(str(state))
    assert len(made) == 43
    path = state / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keep_secret(str(state)) == made
    path.chmod(0o644)
    assert keep_secret(str(state)) not in (made, ""), "others could have read it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("short\n")
    assert keep_secret(str(state)) not in (made, "short")


@pytest.mark.parametrize(
    ("address", "url", "found"),
    [
        ("127.0.0.1", "http://127.0.0.1:4000", "http://127.0.0.1:4000"),
        ("127.0.0.1", "http://localhost:4000", "http://127.0.0.1:4000"),
        ("0.0.0.0", "http://localhost:4000", "http://127.0.0.1:4000"),
        ("::1", "http://localhost:4000", "http://[::1]:4000"),
        ("10.0.0.5", "http://10.0.0.5:4000", "http://10.0.0.5:4000"),
        ("127.0.0.1", "http://[::1]:4000", None),  # where another user's process may listen
        ("10.0.0.5", "http://127.0.0.1:4000", None),
        ("127.0.0.1", "http://127.0.0.1:4001", None),
        ("127.0.0.1", "http://gw.example:4000", None),
        ("127.0.0.1", "http://127.0.0.1:x", None),
    ],
)
def test_the_secret_goes_to_the_gateway_itself(state, address, url, found):
    """Only to the very address at which the process listens that holds the directory."""
    secret = keep_secret(str(state))
    with announced(str(state), [(address, 4000)]):
        assert find_secret(url) == (None if found is None else (secret, found))


def test_without_a_gateway_there_is_no_secret_to_send(state):
    """Whoever took the port after its end gets nothing."""
    keep_secret(str(state))
    (state / "lock").write_text("999999999\n127.0.0.1 4000\n")
    assert find_secret("http://127.0.0.1:4000") is None
    (state / "lock").write_text(f"{os.getpid()}\n127.0.0.1 4000\n")
    assert find_secret("http://127.0.0.1:4000")


@pytest.mark.skipif(os.getuid() != 0, reason="only root has a process of another user at hand")
def test_a_process_of_another_user_is_not_the_gateway(state):
    """Its number may be that of a gateway that has ended."""
    keep_secret(str(state))
    with subprocess.Popen(["sleep", "60"], user=12345) as other:
        (state / "lock").write_text(f"{other.pid}\n127.0.0.1 4000\n")
        found = find_secret("http://127.0.0.1:4000")
        other.kill()
    assert found is None


def test_a_directory_that_others_may_change_has_no_secret(state):
    """They could have put theirs there."""
    keep_secret(str(state))
    with announced(str(state), [("127.0.0.1", 4000)]):
        assert find_secret("http://127.0.0.1:4000")
        state.chmod(0o770)
        assert find_secret("http://127.0.0.1:4000") is None


def test_a_directory_elsewhere_is_found(state, tmp_path):
    """By the configuration that names it, or by what lies beside the usual ones while the gateway runs."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "lock").touch()
    secret = keep_secret(str(elsewhere))
    with announced(str(elsewhere), [("127.0.0.1", 4001)]):
        assert find_secret("http://127.0.0.1:4001") == (secret, "http://127.0.0.1:4001")
        (tmp_path / "ichat/4001.at").unlink()
        assert find_secret("http://127.0.0.1:4001") is None
        assert find_secret("http://127.0.0.1:4001", str(elsewhere)) == (secret, "http://127.0.0.1:4001")


# The directory.


def opened(path):
    with open_state(ServerSettings(port=0, state_directory=str(path)), None) as found:
        return found


def test_an_open_directory_is_closed_or_refused(tmp_path):
    """What other users may read is closed with a warning; where they may have put something, the gateway ends."""
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    (path / "keys.json").write_text("{}")
    (path / "keys.json").chmod(0o644)
    (path / "sockets").mkdir(mode=0o755)
    opened(path)
    assert [stat.S_IMODE((path / name).stat().st_mode) for name in ("", "keys.json", "sockets")] == [
        0o700,
        0o600,
        0o700,
    ]
    path.chmod(0o777)
    with pytest.raises(Exit, match="can be written by every user") as refusal:
        opened(path)
    assert refusal.value.code == 69
    assert "server_settings.state_directory" in str(refusal.value)


def test_a_directory_of_other_things_is_left_alone(tmp_path):
    """A directory that is no gateway's is not closed to those who use it."""
    (tmp_path / "somebody").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(Exit, match="holds other things too"):
        opened(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path):
    """It is his, and so is what lies in it."""
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(Exit, match="belongs to another user"):
        opened(path)


# With real processes.


def test_the_own_user_needs_no_key(gateway, start, tmp_path):
    """The command line changes things and a hand-started worker joins, each by the secret that it finds by itself."""
    program = gateway("")
    url = f"http://127.0.0.1:{program.port}"
    secret = (tmp_path / "state/secret").read_text().strip()
    reload = start(ichat("reload", "-g", url))
    assert reload.process.wait(LIMIT_S) == 0, reload.text()
    link = start(ichat("console", "-g", url))
    assert link.process.wait(LIMIT_S) == 0
    assert link.text() == f"{url}/console/#key={secret}\n"
    stranger = start(ichat("reload", "-g", url), XDG_STATE_HOME=str(tmp_path / "none"), HOME=str(tmp_path / "none"))
    assert stranger.process.wait(LIMIT_S) == 1
    assert "the secret of the gateway's own user" in stranger.text()
    start(ichat("worker", "-be", "fake", "--model", "/m", "-n", "m", "--port", "0", "--worker-id", "w1", "-ga", url))
    program.wait_until_ready("w1")
    assert secret not in program.text()
    assert secret not in json.dumps(program.get("/v1/admin/config")[1])
