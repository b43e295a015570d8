"""What pages in a real browser can do to a gateway of this machine: run programs, use models, become the console."""

import contextlib
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.browser import chromium
from support.programs import LIMIT_S

from ichat.protocol.messages import response_tag

pytestmark = pytest.mark.browser

REBOUND = "evil.example"
"""A name that its owner points at this machine once a page of it is loaded."""
ELSEWHERE = "192.0.2.1"
"""Stands for the address of a gateway on another machine, of which browsers send no Fetch Metadata over http."""
FLAGS = (
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP {ELSEWHERE} 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks,HttpsUpgrades",  # browsers without these are to be safe, too
)
TOKEN = "a-token-of-workers-0123456789"
ADMIN = "an-admins-key-0123456789"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
FORM = """<form method=post enctype="text/plain" action="{action}"><input name='{begin}' value='"}}'></form>
<script>document.forms[0].submit()</script>"""
TAKES_OVER = """<script>
document.title = "ran"
const request = new XMLHttpRequest()
request.open("POST", "/v1/admin/workers/launch?dry_run=1", false)
request.setRequestHeader("content-type", "application/json")
request.send({body})
new Image().src = "{beacon}/ran"
</script>"""
REGISTERS = """<script>
document.title = "ran"
navigator.serviceWorker.register("{script}", {{scope: "/"}})
</script>"""
SERVICE_WORKER = """
self.addEventListener("install", () => self.skipWaiting())
self.addEventListener("activate", event => event.waitUntil(clients.claim()))
self.addEventListener("fetch", event => event.respondWith(new Response("the console is mine")))
"""


@pytest.fixture(scope="module")
def browser():
    with chromium(*FLAGS) as found:
        yield found


@pytest.fixture
def page(browser):
    context = browser.new_context()
    context.set_default_timeout(LIMIT_S * 1000)
    yield context.new_page()
    context.close()


class Web:
    """A server of the attacker's: his pages, and what he answers as a model."""

    def __init__(self):
        self.answers = {}
        """Content type and text by path."""
        self.asked = []
        """Paths, with a GET or POST before them."""
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                web.asked.append(f"{self.command} {self.path}")
                kind, text = web.answers.get(self.path, ("text/plain", ""))
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("service-worker-allowed", "/")
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *_):
                """Write no line of a log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://localhost:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web():
    with contextlib.closing(Web()) as found:
        yield found


@pytest.fixture
def mark(tmp_path):
    """A launch whose `python` is a program that leaves a file behind: `launch, file = mark`."""
    file, program = tmp_path / "it-ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {file}\n")
    program.chmod(0o700)
    return {"model_name": "x", "model_path": "/m", "backend": "fake", "python": str(program)}, file


def routed_to(web):
    return f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{web.port}/v1"\n'


def open_form(page, web, action):
    """Open the attacker's page, which sends a form to `action`; return the response once it is shown."""
    begin = json.dumps(CHAT)[:-1] + ', "user": "'
    web.answers["/form"] = "text/html", FORM.format(action=action, begin=begin)
    with page.expect_response(action) as found:
        page.goto(f"{web.url}/form")
    page.wait_for_url(action)
    page.wait_for_load_state()
    return found.value


@pytest.mark.parametrize("path", ["/v1/admin/workers/launch?dry_run=1", "/v1/admin/workers/launch"])
def test_a_page_of_another_port_of_this_machine_runs_nothing(gateway, web, page, mark, path):
    """Whatever content type it gives its JSON: the request that needs no question is refused, the other not allowed."""
    launch, file = mark
    program = gateway("")
    web.answers["/"] = "text/html", "<title>a notebook</title>"
    statuses = []
    page.on("response", lambda response: statuses.append(response.status) if path in response.url else None)
    page.goto(f"{web.url}/")
    for host in ("localhost", "127.0.0.1"):
        for mode, kind in (("no-cors", "text/plain"), ("no-cors", "application/json"), ("cors", "application/json")):
            page.evaluate(
                """([url, mode, type, body]) => fetch(url, {method: "POST", mode, headers: {"content-type": type}, body})
                    .catch(() => "refused")""",
                [f"http://{host}:{program.port}{path}", mode, kind, json.dumps(launch)],
            )
    assert not file.exists()
    assert program.get("/v1/admin/workers")[1]["data"] == []
    assert statuses
    assert set(statuses) <= {403, 405, 415}


def test_a_name_that_was_made_to_point_here_reaches_no_model(gateway, web, page):
    """The browser takes the gateway for the page's own server; its name is none of the gateway's."""
    web.answers["/v1/chat/completions"] = "application/json", '{"secret": 1}'
    program = gateway(routed_to(web))
    url = f"http://{REBOUND}:{program.port}"
    page.route(f"{url}/attack", lambda route: route.fulfill(content_type="text/html", body="<title>x</title>"))
    page.goto(f"{url}/attack")
    found = page.evaluate(
        """async chat => {
            const read = async (path, options) => { const got = await fetch(path, options); return [got.status, await got.text()] }
            const headers = {"content-type": "application/json"}
            return [await read("/v1/models"), await read("/v1/chat/completions", {method: "POST", headers, body: chat}),
                    await read("/v1/chat/completions", {method: "POST", body: chat})]
        }""",
        json.dumps(CHAT),
    )
    assert not any("secret" in text or '"data"' in text for _, text in found)
    assert "POST /v1/chat/completions" not in web.asked
    assert [status for status, _ in found] == [403, 403, 403]


def test_a_form_is_no_request_for_a_model(gateway, web, page, mark):
    """What an external route answers to it would be a page of the gateway's origin, which may run programs."""
    launch, file = mark
    answer = TAKES_OVER.replace("{body}", json.dumps(json.dumps(launch))).replace("{beacon}", web.url)
    web.answers["/v1/chat/completions"] = "text/html", answer
    program = gateway(routed_to(web))
    response = open_form(page, web, f"http://localhost:{program.port}/v1/chat/completions")
    assert not file.exists()
    assert page.title() != "ran"
    assert "POST /v1/chat/completions" not in web.asked
    assert (response.status, response.headers["content-type"]) == (403, "application/json")


def test_an_answer_that_a_browser_shows_runs_nothing(gateway, web, page, mark):
    """Where a browser does not say what it asks for, and every page may ask: the answer is sealed."""
    launch, file = mark
    answer = TAKES_OVER.replace("{body}", json.dumps(json.dumps(launch))).replace("{beacon}", web.url)
    web.answers["/v1/chat/completions"] = "text/html", answer
    program = gateway(routed_to(web), settings='cors_origins = ["*"]\n')
    action = f"http://{ELSEWHERE}:{program.port}/v1/chat/completions"
    response = open_form(page, web, action)
    assert "POST /v1/chat/completions" in web.asked
    assert not file.exists()
    assert page.title() != "ran"
    assert "GET /ran" not in web.asked
    assert page.evaluate("self.origin") == "null"
    assert (response.status, response.headers["content-type"]) == (200, "text/html")


def test_a_workers_script_does_not_become_the_console(gateway, web, page):
    """A worker that joined answers with a page, and with the script that this page would have the browser keep."""
    more = '[security]\nadmin_key_env = "AN_ADMINS_KEY"\njoin_token_env = "A_JOIN_TOKEN"\n'
    program = gateway(more, AN_ADMINS_KEY=ADMIN, A_JOIN_TOKEN=TOKEN)
    script = f"/v1/responses/resp_{response_tag('w', 's')}_{'0' * 32}"
    web.answers[script] = "text/javascript", SERVICE_WORKER
    web.answers["/v1/chat/completions"] = "text/html", REGISTERS.format(script=script)
    join(program, {
        "worker_id": "w", "start_id": "s", "model_name": "m", "host": "127.0.0.1", "port": web.port,
        "heartbeat_interval": 3600,
    })  # fmt: skip
    own = f"http://localhost:{program.port}"
    refused = open_form(page, web, f"{own}/v1/chat/completions")
    page.goto(f"{own}/health")  # a page of the gateway's origin, in which a script asks, as none can
    found = page.evaluate(
        """script => navigator.serviceWorker.register(script, {scope: "/"}).then(() => "registered", String)""", script
    )
    page.goto(f"{own}/console/")
    assert "the console is mine" not in page.content()
    assert page.evaluate("navigator.serviceWorker.getRegistrations().then(all => all.length)") == 0
    assert (refused.status, "403" in found) == (403, True), found
    for path in (script, "/v1/chat/completions"):
        assert f"GET {path}" not in web.asked
        assert f"POST {path}" not in web.asked


def join(program, registration):
    """Register a worker that the attacker has."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{program.port}/v1/workers/heartbeat",
        json.dumps(registration).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert answer.status == 200
