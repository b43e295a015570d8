"""A browser, a page that must stay clean, and gateways to look at. The tests are plain functions: Playwright is sync."""

import pytest
from support.browser import chromium
from support.console_state import busy_cluster, busy_requests, finished, told
from support.programs import LIMIT_S, Program, ichat

WORKER = """
[[managed_workers]]
model_name = "{name}"
model_path = "/m"
backend = "fake"
heartbeat_interval = 1
{more}
"""


@pytest.fixture(scope="module")
def browser():
    """Chromium, without a window. Playwright has an event loop in this thread, which other files' tests must not find."""
    with chromium() as browser:
        yield browser


class Watched:
    """What a page has done that it must not: errors, refusals by its policy, requests to elsewhere."""

    def __init__(self, context):
        self.wrong = []
        self.allowed = ["/v1/admin/engines/vllm/flags", "net::ERR_NETWORK_CHANGED"]
        """Parts of messages that a test expects. The launch form asks for vLLM's flags, which not every machine has.
        Chromium ends all its requests when the machine gets or loses an address."""
        context.on("weberror", lambda error: self.wrong.append(f"exception: {error.error}"))
        context.on("console", self._console)
        context.on("request", self._request)
        self.origin = None

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.wrong.append(f"console: {message.text} {message.location}")

    def _request(self, request):
        if request.url.startswith(("data:", "blob:", "about:")):
            return
        origin = "/".join(request.url.split("/")[:3])
        self.origin = self.origin or origin
        if origin != self.origin:
            self.wrong.append(f"request to elsewhere: {request.url}")

    def check(self):
        left = [text for text in self.wrong if not any(part in text for part in self.allowed)]
        assert not left, "\n".join(left)


@pytest.fixture
def locale():
    """The browser's language."""
    return "en-US"


@pytest.fixture
def context(browser, locale):
    """A fresh profile; the test fails if a page of it did what it must not (`context.watched.allowed`)."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light", locale=locale)
    context.set_default_timeout(LIMIT_S * 1000)
    context.watched = Watched(context)
    yield context
    context.close()
    context.watched.check()


@pytest.fixture
def page(context):
    return context.new_page()


class Site:
    """A gateway, the address of its console, and the secret that its link has, where it has one."""

    def __init__(self, program, secret=""):
        self.program = program
        self.secret = secret

    @property
    def url(self):
        return f"http://127.0.0.1:{self.program.port}/console/"

    def open(self, page, path="overview"):
        """Open a page of the console by its link, and wait until it shows what the gateway says."""
        if self.secret and not page.url.startswith(self.url):
            page.goto(f"{self.url}#key={self.secret}")
            page.wait_for_selector("[data-connection]")
        page.goto(f"{self.url}#/{path}")
        page.wait_for_selector("[data-connection=live]")
        return page


@pytest.fixture
def make_site(tmp_path):
    """Start a gateway with this configuration: `make_site(toml, settings="")`; paths of workers name no real model."""
    programs = []

    def make(text="", settings="", port=0, **env):
        path = tmp_path / "ichat.toml"
        path.write_text(
            f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\n{settings}'
            f"[timeouts]\nstop_s = 6\ndrain_s = 6\n{text}"
        )
        program = Program(ichat("gateway", "-c", str(path)), tmp_path / f"{len(programs)}.log", env)
        programs.append(program)
        program.wait_for_port()
        return Site(program, "" if "admin_key" in text + settings else program.own_secret())

    yield make
    for program in programs:
        program.end()


@pytest.fixture
def site(make_site):
    """A gateway with two workers of the fake engine, `alpha-0` and `beta-0`, both ready."""
    made = make_site(WORKER.format(name="alpha", more="") + WORKER.format(name="beta", more=""))
    for name in ("alpha-0", "beta-0"):
        made.program.wait_until_ready(name)
    return made


@pytest.fixture
def open_page(make_site, page):
    """Open pages of a busy cluster: `open_page("workers")`."""
    site = make_site()
    told(page, ["state", busy_cluster()], ["requests", busy_requests()])
    details = {"gpu_ids": [2, 3], "args": {"max_model_len": 8192, "seed": 0}, "changed_args": ["max_model_len"]}
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json=details))
    done = {"requests": [finished(1), finished(2, status=502, error="upstream_failed")], "since": 1e9, "kept_max": 500}
    page.route("**/v1/admin/requests/finished*", lambda route: route.fulfill(json=done))
    body = 'id: 1\ndata: {"seq": 1, "time": "2026-01-01T10:00:00.000Z", "line": "\\u001b[31mERROR\\u001b[0m \\u001b[36mx"}\n\n'
    page.route("**/v1/logs/**", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    return lambda path: site.open(page, path)
