"""The examples for nginx and HAProxy, run by the real programs before a real gateway."""

import contextlib
import http.client
import json
import pathlib
import shutil
import socket
import ssl
import subprocess

import pytest
import trustme
from support.deployments import free_port, worker
from support.programs import LIMIT_S

from ichat.security.keys import hash_of

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CLIENT, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
KEYS = f"""[security]
admin_key_hash = "{hash_of(ADMIN)}"
trusted_proxies = ["127.0.0.1"]
[[security.keys]]
name = "team"
key_hash = "{hash_of(CLIENT)}"
"""
PROXIES = ("nginx", "haproxy")
FROM = "127.0.0.5"
"""The client's address."""


def written(proxy, directory, port, gateway_port, pem, key):
    """Write the example of a proxy for these ports and this certificate; return the command that runs it."""
    if proxy == "nginx":
        text = (EXAMPLES / "nginx.conf").read_text()
        changes = {
            "127.0.0.1:4000": f"127.0.0.1:{gateway_port}",
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "/etc/ssl/gw.example.pem": str(pem),
            "/etc/ssl/gw.example.key": str(key),
        }
        paths = "".join(
            f"{kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        before = f"daemon off;\nuser root;\npid {directory}/pid;\nerror_log stderr;\nevents {{}}\n"
        frame = (before + f"http {{\naccess_log off;\n{paths}", "}\n")
    else:
        text = (EXAMPLES / "haproxy.cfg").read_text()
        joined = directory / "joined.pem"
        joined.write_bytes(pem.read_bytes() + key.read_bytes())
        changes = {
            "127.0.0.1:4000": f"127.0.0.1:{gateway_port}",
            "bind :443": f"bind 127.0.0.1:{port}",
            "/etc/ssl/gw.example.pem": str(joined),
        }
        frame = ("", "")
    for old, new in changes.items():
        assert old in text, "the example has other words"
        text = "".join(
            line if line.lstrip().startswith("#") else line.replace(old, new) for line in text.splitlines(keepends=True)
        )
    path = directory / f"{proxy}.conf"
    path.write_text(frame[0] + text + frame[1])
    return [proxy, "-c", path, "-p", directory] if proxy == "nginx" else [proxy, "-db", "-f", path]


class Proxy:
    """A proxy that runs, and a client of it."""

    def __init__(self, gateway, port, authority):
        self.gateway = gateway
        self.port = port
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)

    def ask(self, path, body=None, **headers):
        """Send a request from FROM, and return the response's status and lines."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=LIMIT_S, source_address=(FROM, 0), context=self.context
        )
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {CLIENT}", **headers}
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().splitlines()


@pytest.fixture(params=PROXIES)
def proxy(request, gateway, start, tmp_path):
    """A proxy of the examples before a gateway with one worker, whose access log is `access.log`."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    access = f'[logs]\naccess_log = "{tmp_path}/access.log"\n'
    program = gateway(KEYS + access + worker())
    program.key = ADMIN
    program.wait_until_ready("m-0")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    pem, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    pem.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    port = free_port()
    running = start(written(request.param, tmp_path, port, program.port, pem, key))

    def listens():
        assert running.process.poll() is None, running.text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    running.until(listens)
    return Proxy(program, port, authority)


def test_a_stream_comes_through_and_the_address_is_the_clients(proxy, tmp_path):
    """A whole stream comes through, and what a client says of its own address is replaced."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2}
    forged = {"x-forwarded-for": "203.0.113.7"}
    status, text = proxy.ask("/v1/chat/completions", body, **forged)
    assert (status, text[-2:]) == (200, [b"data: [DONE]", b""])
    log = tmp_path / "access.log"
    proxy.gateway.until(lambda: "/completions" in log.read_text())
    lines = map(json.loads, log.read_text().splitlines())
    assert {line["client"] for line in lines if line["path"].endswith("/completions")} == {FROM}


def test_operators_routes_do_not_pass_the_proxies(proxy):
    """The examples keep the operators' routes off the network; everything else needs the key that is for it."""
    assert proxy.ask("/v1/admin/workers", authorization=f"Bearer {ADMIN}")[0] == 403
    assert proxy.ask("/v1/chat/completions", {"model": "m"}, authorization="Bearer nobody")[0] == 401
    assert proxy.ask("/v1/models")[0] == 200


@pytest.mark.parametrize("proxy_name", PROXIES)
def test_the_configuration_is_right(proxy_name, tmp_path):
    """The program itself has nothing to say about its example."""
    if shutil.which(proxy_name) is None:
        pytest.skip(f"{proxy_name} is not installed")
    certificate = trustme.CA().issue_cert("gw.example")
    pem, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    pem.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    command = written(proxy_name, tmp_path, free_port(), 4000, pem, key)
    check = [*command, "-t"] if proxy_name == "nginx" else [*command, "-c"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
