"""The console before real engines: what its pages show comes from them, and what is done there reaches them."""

import json
import os
import re
import shutil
import signal
import threading
import time

import openai
import pytest
from console.conftest import Site
from playwright.sync_api import expect
from support.programs import LIMIT_S
from support.real_engines import LOAD_S, MODELS, RUNNING, Deployment, worker_table

from ichat.observability.logs.lines import timestamp
from ichat.security.keys import hash_of

pytestmark = pytest.mark.engine
WORKERS = {"tiny-0": "vllm", "other-0": "sglang"}
CONTEXT = 16000
"""Of models whose answers last long enough to be looked at; the caches have room for one."""
LONG = {"max_tokens": CONTEXT - 1000, "extra_body": {"ignore_eos": True}}
PROMPT = " ".join(f"line {number}" for number in range(150))
"""Longer than a block of vLLM's cache."""
ADMIN, CLIENT, COUNTED = "sk-admin-0123456789", "sk-client-0123456789", "sk-counted-0123456789"
MORE = f"""
[timeouts]
stop_s = 20
engine_flags_s = 600
[security]
admin_key_hash = "{hash_of(ADMIN)}"
[[security.keys]]
name = "client"
key_hash = "{hash_of(CLIENT)}"
[[security.keys]]
name = "counted"
key_hash = "{hash_of(COUNTED)}"
"""
SAYS_OF_LOAD = {"tiny-0": "generation throughput", "other-0": "Decode batch"}
"""What each engine logs while it generates."""

each_worker = pytest.mark.parametrize("worker", WORKERS)


def long_chat(directory):
    """Return the path of the tiny chat model with a longer context."""
    shutil.copytree(MODELS / "chat", directory / "long")
    path = directory / "long/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": CONTEXT}))
    return directory / "long"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A gateway with keys and a worker of each engine: `tiny-0` and `other-0`."""
    directory = tmp_path_factory.mktemp("watched")
    model = long_chat(directory)
    known = {"max_model_len": CONTEXT, "enforce_eager": True}
    # how many steps until SGLang counts again; threads, whose steps on busy cores wait for each other
    more = worker_table("sglang", model, "other", env={"OMP_NUM_THREADS": "1"}, decode_log_interval=10, **known)
    settings = ["watch_config = false"]
    blocks = {"num_gpu_blocks_override": 128}  # 16384 tokens, as SGLang's cache has
    deployment = Deployment("vllm", model, directory, settings=settings, more=[*more, MORE], **known, **blocks)
    deployment.program.key = ADMIN
    try:
        deployment.wait().program.wait_until_ready("other-0", LOAD_S)
        yield deployment
    finally:
        deployment.end()


@pytest.fixture
def show(place, context, page):
    """Open a page of the console with the operators' key: `show("workers")`."""
    keep = f'sessionStorage.setItem("ichat.admin_key", "{ADMIN}")'
    context.add_init_script(f'if (location.protocol === "http:") {keep}')
    return lambda path: Site(place.program).open(page, path)


def client_of(place, key=CLIENT):
    return openai.OpenAI(base_url=f"{place.url}/v1", api_key=key, max_retries=0, timeout=LOAD_S)


def model_of(worker):
    return worker.removesuffix("-0")


def running(place, worker):
    """Return how many requests the engine itself says that it has."""
    return place.metric(RUNNING[WORKERS[worker]], worker)


class Story:
    """A long stream of a worker's model, read by a thread until it ends or is left."""

    def __init__(self, place, worker, *, again=False):
        """With `again`, another one begins where one has come to its end."""
        self.id = f"story-{model_of(worker)}"
        self.error = None
        self.chunks = self.whole = 0
        self._place, self._model, self._again = place, model_of(worker), again
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._place.program.until(lambda: self.chunks or self.error)
        assert self.error is None
        return self

    def __exit__(self, *_):
        self._left.set()
        self.join()

    def join(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _read(self):
        try:
            with client_of(self._place) as client:
                while not self._left.is_set() and (self._again or not self.whole):
                    self._read_one(client)
        except Exception as error:  # what a client gets is looked at by the test
            self.error = error

    def _read_one(self, client):
        head = {"x-request-id": self.id}
        with client.completions.create(model=self._model, prompt="x", stream=True, extra_headers=head, **LONG) as found:
            for _ in found:
                self.chunks += 1
                if self._left.is_set():
                    return
        self.whole += 1


def row(page, key):
    return page.locator(f"main tr[data-key='{key}']")


def cell(found, title):
    """Return a row's cell below a heading."""
    return found.locator(f"td[data-title='{title}']")


def some_percent():
    return re.compile(r"^\s*[1-9]\d* %")


def test_load_and_the_kv_caches_are_the_engines_own(place, show, page):
    """While both generate, each worker has a request, a share of its cache and its engine's own count."""
    with Story(place, "tiny-0", again=True), Story(place, "other-0", again=True):
        show("workers")
        for worker, engine in WORKERS.items():
            expect(cell(row(page, worker), "State")).to_contain_text("ready")
            expect(cell(row(page, worker), "In flight")).to_have_text("1")
            expect(cell(row(page, worker), "KV cache")).to_have_text(some_percent())
            expect(cell(row(page, worker), "Engine")).to_have_text(engine)
        show("overview")
        expect(page.locator(".figure", has_text="Workers ready")).to_contain_text("2 / 2")
        expect(page.locator(".figure", has_text="In flight")).to_contain_text("2")
        expect(page.locator("main")).to_contain_text("No problems")
        expect(page.locator(".chart", has_text="KV cache in use").locator("b")).to_have_text(some_percent())
        for worker in WORKERS:
            show(f"workers/{worker}")
            load = page.locator(".card", has=page.get_by_role("heading", name="Current load", exact=True)).locator(
                ".facts div"
            )
            expect(load.filter(has_text="The engine works on")).to_contain_text("1")
            expect(load.filter(has_text="KV cache in use")).to_contain_text(re.compile(r"[1-9]\d* %"))
            expect(load.filter(has_text="Tokens since its start")).to_contain_text(re.compile(r"[1-9]"))


def test_prefix_hits_are_the_engines_own(place, show, page):
    """The same long prompt once more is found in each engine's cache, and the page says which share."""
    show("workers")
    with client_of(place) as client:
        for worker in WORKERS:
            for _ in range(2):
                client.completions.create(model=model_of(worker), prompt=PROMPT, max_tokens=1)
    for worker in WORKERS:
        expect(cell(row(page, worker), "Prefix hits")).to_have_text(some_percent())


@each_worker
def test_a_request_is_cancelled_in_the_engine(place, show, page, worker):
    """The page has who asks for what and for how long; its client gets an error, and the engine ends it."""
    place.program.until(lambda: running(place, worker) == 0)
    aborts = place.metric("ichat_engine_aborts_total", worker)
    show("requests")
    with Story(place, worker) as story:
        found = page.locator("main tbody tr").filter(has=page.get_by_role("button", name=f"Cancel {story.id}"))
        expect(cell(found, "Model")).to_have_text(model_of(worker))
        expect(cell(found, "Where it is")).to_contain_text(f"{worker} answers")
        expect(cell(found, "From")).to_contain_text("client")
        expect(cell(found, "Id").get_by_title(story.id)).to_contain_text(story.id[-8:])
        expect(cell(found, "Age")).to_have_text(re.compile(r"[1-9]"))
        place.program.until(lambda: running(place, worker) == 1)
        page.get_by_role("button", name=f"Cancel {story.id}").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
        expect(page.locator(".toast")).to_have_text("The request was cancelled.")
        expect(found).to_have_count(0)
        story.join()
        assert "An operator has cancelled this request." in str(story.error)
    place.program.until(lambda: running(place, worker) == 0)
    place.program.until(lambda: place.metric("ichat_engine_aborts_total", worker) == aborts + 1)
    assert place.worker(worker)["state"] == "ready"


@each_worker
def test_the_log_is_the_engines_own(place, show, page, worker):
    """What the engine says of its load comes while it generates."""
    show(f"workers/{worker}")
    page.get_by_role("tab", name="Log").click()
    expect(page.get_by_role("status").filter(has_text="lines")).to_contain_text("live")
    page.get_by_label("Find lines").fill(SAYS_OF_LOAD[worker])
    newest = page.get_by_role("log").locator("div").last
    began = timestamp(time.time())
    with Story(place, worker, again=True):
        place.program.until(lambda: (newest.get_attribute("title") or "") > began)
    expect(newest).to_contain_text(SAYS_OF_LOAD[worker])


def test_models_and_machines(place, show, page):
    """Both models are served, a request would go to the worker, and the machine has its memory and its workers."""
    show("models")
    for worker in WORKERS:
        expect(cell(row(page, model_of(worker)), "Ready")).to_have_text("1 worker")
    page.get_by_role("button", name="Route of a request for other").click()
    expect(page.get_by_role("dialog").locator("tr[data-key=other-0]")).to_contain_text("chosen")
    show("machines")
    for worker in WORKERS:
        expect(page.locator(".machine").get_by_role("link", name=worker)).to_be_visible()
    memory = page.get_by_role("meter", name="Memory in use").locator("..")
    expect(memory).to_have_text(re.compile(r"^\s*[1-9][\d.,]* [GT]iB of [1-9][\d.,]* [GT]iB"))


@each_worker
def test_an_engines_arguments_and_a_model_that_is_not_there(place, show, page, worker):
    """The installed engine explains its arguments; preflight objects to a wrong path, and no longer to the right one."""
    show(f"launch?backend={WORKERS[worker]}")
    heading = page.get_by_role("heading", name=re.compile(r"All \d{3} arguments"))
    expect(heading).to_be_visible(timeout=LOAD_S * 1000)
    name = {"vllm": "max_model_len", "sglang": "context_length"}[WORKERS[worker]]
    page.get_by_label("Find an argument").fill(name)
    argument = page.locator(f".argument[data-flag={name}]")
    expect(argument).to_contain_text("--" + name.replace("_", "-"))
    expect(argument.locator("p")).to_contain_text("context length")
    page.context.watched.allowed.append("/v1/admin/workers/launch?dry_run=1")
    path = page.get_by_placeholder("Qwen/Qwen3-0.6B")
    path.fill("/no/such/model")
    expect(page.locator("[data-check=objections]")).to_contain_text("There is no model /no/such/model")
    expect(page.get_by_role("button", name="Launch")).to_be_disabled()
    path.fill(str(MODELS / "chat"))
    expect(page.locator("[data-check=ready]")).to_be_visible()
    expect(page.get_by_role("button", name="Launch")).to_be_enabled()


def test_a_change_of_the_configuration_leaves_the_engines_alone(place, show, page):
    """A plan, the question and the new value; both engines are the same processes as before."""
    pids = [place.worker(worker)["pid"] for worker in WORKERS]
    text = place.config.read_text()
    assert "stop_s = 20" in text
    place.config.write_text(text.replace("stop_s = 20", "stop_s = 21"))
    show("config")
    expect(page.get_by_text("ichat.toml has changed, or is gone")).to_be_visible()
    page.get_by_role("button", name="Review changes").click()
    expect(page.get_by_role("table", name="Plan")).to_contain_text("timeouts.stop_s")
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    expect(page.locator('[data-key="timeouts.stop_s"]')).to_contain_text("21")
    assert [place.worker(worker)["pid"] for worker in WORKERS] == pids
    assert ADMIN not in page.content()


def test_a_key_is_made_and_used(place, show, page):
    """A client has its answer with the key of the page, and the page has the tokens that the engine counted."""
    show("keys")
    page.get_by_role("button", name="Create a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("^Name")).fill("team-c")
    dialog.get_by_label(re.compile("^Tokens a day")).fill("1000")
    dialog.get_by_role("button", name="Create the key").click()
    secret = dialog.locator("[data-secret] pre").text_content()
    dialog.get_by_role("button", name="Done").click()
    with client_of(place, secret) as client:
        answer = client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
        )

    def used():
        [key] = [one for one in place.program.get("/v1/admin/keys")[1]["keys"] if one["name"] == "team-c"]
        return key["usage_now"]["tokens_today"]

    assert answer.usage.total_tokens > 8
    place.program.until(lambda: used() == answer.usage.total_tokens)
    page.reload()
    row(page, "team-c").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"{answer.usage.total_tokens} of 1,000")


def test_usage_is_what_the_engines_counted(place, show, page):
    """Tokens of plain and streamed requests, by key and model."""
    expected = {}
    with client_of(place, COUNTED) as client:
        for worker in WORKERS:
            asked = {"model": model_of(worker), "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            plain = client.completions.create(**asked).usage
            for _ in client.completions.create(**asked, stream=True):
                pass  # it leaves at the last event, before the end of the body
            expected[worker] = 2 * plain.prompt_tokens, 2 * plain.completion_tokens
    path = "/v1/admin/usage?by=model&key=counted"
    place.program.until(lambda: place.program.get(path)[1]["totals"]["requests"] == 2 * len(WORKERS))
    show("usage")
    rows = page.get_by_role("table", name="Usage").get_by_role("row").filter(has_text="counted")
    for worker, (tokens_in, tokens_out) in expected.items():
        found = rows.filter(has_text=model_of(worker))
        expect(cell(found, "Requests")).to_have_text("2")
        expect(cell(found, "Tokens in")).to_have_text(f"{tokens_in:,}")
        expect(cell(found, "Tokens out")).to_have_text(f"{tokens_out:,}")


def test_a_worker_that_is_killed_comes_back(place, show, page):
    """Its page has how it ended and its last lines; then it is ready again, and answers."""
    show("workers/tiny-0")
    killed = place.worker()["pid"]
    os.kill(killed, signal.SIGKILL)
    ended = page.locator(".card.ended")
    expect(ended).to_contain_text(re.compile(r"Signal\s*(9|SIGKILL)"))
    expect(ended.locator(".lines")).to_contain_text("vllm", ignore_case=True)
    state = page.locator(".state-line .badge").first
    expect(state).not_to_have_text("ready")
    expect(page.locator(".facts div", has_text="Restarts")).to_contain_text("1")
    expect(state).to_have_text("ready", timeout=LOAD_S * 1000)
    assert place.worker()["pid"] != killed
    with client_of(place) as client:
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens > 0
