"""What pages say while models are loaded: what the load does and what is left of it, and nothing red."""

import re

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, model, told, worker

PHASES = [
    {"name": "importing vLLM", "seconds": 9.2, "expected_s": 8.4, "detail": ""},
    {"name": "loading weights", "seconds": 12.7, "expected_s": None, "detail": "3 of 8 shards"},
]
LOAD = {"elapsed_s": 22.0, "expected_s": 900.0, "phases": PHASES}
WORDS = "loading weights 3 of 8 shards, ready in about 15 min"
HELD = '{"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}'


@pytest.fixture
def loading(make_site, page):
    """Open a page while `tiny` is loaded, `down` starts again after a failure, and nothing serves `gone`."""
    site = make_site()
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={}))
    page.route("**/v1/logs/stream/**", lambda route: route.fulfill(body="", content_type="text/event-stream"))
    workers = [
        worker("tiny-0", "loading", load=LOAD, phase="loading weights"), worker("good-0"),
        worker("down-0", "restarting", retry_in_s=600.0, phase="importing vllm", cause="It ended.", failure="ended"),
        worker("old-0", "unhealthy", cause="Of an earlier end.", failure="was silent for 31 s"),
    ]  # fmt: skip
    models = [model("tiny", 0, queued=1, waiting_s=9.0), model("down", 0), model("old", 0), model("good"), model("far")]

    def open_(path, *more):
        state = {**busy_cluster(), "workers": workers, "models": [*models, *more], "machines": [], "aliases": []}
        told(page, ["state", state])
        return site.open(page, path)

    return open_


def test_a_load_is_nothing_wrong(loading, page):
    """It stands apart, with its phase and what is left; the badge counts what is wrong, in the worst of its tones."""
    loading("overview")
    expect(page.locator(".coming li")).to_have_count(1)
    expect(page.locator(".coming")).to_contain_text(f"tiny is loading{WORDS.capitalize()}. 1 request waits for it.")
    problems = page.locator(".problems")
    expect(problems).not_to_contain_text("tiny")
    expect(problems).to_contain_text("old-0 is unhealthywas silent for 31 s")
    expect(problems).not_to_contain_text("has no replicas")
    badge = page.locator(".card", has_text="Problems").locator(".badge")
    expect(badge).to_have_class("badge bad")
    page.evaluate("([name, data]) => window.tell(name, data)", ["workers", {"changed": [], "gone": ["old-0"]}])
    page.evaluate("([name, data]) => window.tell(name, data)", ["models", {"models": [], "gone": ["old"]}])
    expect(badge).to_have_class("badge warn")


def test_a_model_is_not_served_where_no_worker_is_on_its_way(loading, page):
    """Only that is red; workers and external routes are called what they are."""
    loading("models", model("gone", 0))
    for name, text, tone in (
        ("tiny", "loading", "busy"), ("down", "restarting", "warn"), ("gone", "no replicas", "bad"),
        ("good", "1 worker", "ok"), ("far", "1 external route", "ok"),
    ):  # fmt: skip
        badge = page.locator(f"tr[data-key={name}] .badge")
        expect(badge).to_have_text(text)
        expect(badge).to_have_class(f"badge {tone}")
    expect(page.locator("tr[data-key=tiny]")).to_contain_text(WORDS)
    page.locator("nav").get_by_role("link", name="Overview").click()
    expect(page.locator(".problems")).to_contain_text("gone has no replicas")


def test_the_list_says_why_a_worker_is_down(loading, page):
    """Its cause, and not what it was doing before it ended."""
    loading("workers")
    row = page.locator("tr[data-key=down-0]")
    expect(row).to_contain_text("It ended.")
    expect(row).not_to_contain_text("importing vllm")
    expect(page.locator("tr[data-key=old-0]")).not_to_contain_text("Of an earlier end.")


def test_a_worker_that_starts_again_by_itself_is_not_red(loading, page):
    """Its page has the tone of its badge and of its line on the Overview."""
    loading("workers/down-0")
    expect(page.locator(".notice")).to_have_class("notice warn")
    told = {"changed": [worker("down-0", "failed")], "gone": []}
    page.evaluate("([name, data]) => window.tell(name, data)", ["workers", told])
    expect(page.locator(".notice")).to_have_class("notice bad")


def test_a_worker_that_ends_in_order_to_be_started_again_is_nothing_wrong(loading, page):
    """A reload drains it for as long as its requests take: its model is not served meanwhile, and will be."""
    loading("overview")
    tell = "([name, data]) => window.tell(name, data)"
    drained = worker("good-0", "draining", phase="ready", coming=True)
    page.evaluate(tell, ["workers", {"changed": [drained], "gone": []}])
    page.evaluate(tell, ["models", {"models": [model("good", 0, queued=2)], "gone": []}])
    expect(page.locator(".coming")).to_contain_text(
        "good is being restartedgood-0 is draining, and is started again. 2 requests wait for it."
    )
    expect(page.locator(".problems")).not_to_contain_text("good")
    page.locator("nav").get_by_role("link", name="Models").click()
    expect(page.locator("tr[data-key=good] .badge")).to_have_class("badge busy")
    page.locator("nav").get_by_role("link", name="Workers").click()
    expect(page.locator("tr[data-key=good-0]")).to_contain_text("is started again")
    page.evaluate(tell, ["workers", {"changed": [{**drained, "coming": False}], "gone": []}])
    expect(page.locator("tr[data-key=good-0]")).not_to_contain_text("ready")
    page.locator("nav").get_by_role("link", name="Overview").click()
    expect(page.locator(".problems")).to_contain_text("good has no replicas")


def test_the_page_of_a_loading_worker_is_its_load(loading, page):
    """Each phase with its seconds beside those of the last time, and the log; the charts come with its first figures."""
    loading("workers/tiny-0")
    rows = page.get_by_role("table", name="Phases").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("importing vLLM 9.2 s8.4 s")
    expect(rows.last).to_contain_text("loading weights 3 of 8 shards now")
    expect(rows.last).to_contain_text("–")
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "2")
    expect(page.locator(".chart")).to_have_count(0)
    expect(page.locator(".log")).to_be_visible()
    done = {**LOAD, "elapsed_s": 61.0}
    page.evaluate("one => window.tell('workers', { changed: [one], gone: [] })", worker("tiny-0", last_load=done))
    expect(page.locator(".card", has_text="Its last load")).to_be_visible()
    expect(page.locator(".chart")).to_have_count(0)  # there is nothing to draw yet
    sample = {"at": 2e9, "models": {}, "workers": {"tiny-0": {"in_flight": 1, "kv_use": 0.5}}}
    page.evaluate("one => window.tell('sample', one)", sample)
    expect(page.locator(".chart")).to_have_count(2)
    expect(page.locator(".card", has_text="Its last load")).to_contain_text("61 s in all, last time 15 min.")
    page.get_by_role("tab", name="Log").click()
    expect(page).to_have_url(f"{page.url.partition('#')[0]}#/workers/tiny-0?tab=log")
    page.go_back()
    expect(page.get_by_role("tab", name="Now")).to_have_attribute("aria-selected", "true")


def test_the_last_lines_are_shown_from_their_end(loading, page):
    """What is read first is what was written last."""
    loading("workers/down-0")
    page.unroute("**/v1/admin/workers/*")
    details = {"ended_at": 1.0, "exit_code": 1, "last_lines": [f"line {number}" for number in range(200)]}
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json=details))
    page.reload()
    lines = page.locator("pre.lines")
    expect(lines).to_contain_text("line 199")
    page.wait_for_function(
        "box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2", arg=lines.element_handle()
    )


def test_the_playground_says_what_it_waits_for(loading, page):
    """From the first second: what the load does, how long the last ones took, a bar, and the way to the log."""
    loading("playground?model=tiny")
    held = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    expect(page.get_by_label("Model 1")).to_contain_text("tiny (loading)")
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_label("Message", exact=True).press("Enter")
    waiting = page.locator(".by-model")
    expect(waiting).to_contain_text(f"tiny is being loaded: {WORDS} (the last loads took 15 min)")
    expect(waiting.get_by_role("progressbar")).to_be_visible()
    waiting.locator("summary").press("Enter")
    phases = waiting.get_by_role("table", name="Phases").locator("tbody tr")
    expect(phases.first).to_have_text(re.compile("importing vLLM.*9.2 s.*8.4 s"))
    expect(phases.last).to_contain_text("now")
    expect(waiting.get_by_role("link", name="Log")).to_have_attribute("href", "#/workers/tiny-0?tab=log")
    tell = "one => window.tell('workers', { changed: [one], gone: [] })"
    page.evaluate(tell, worker("tiny-0", "loading", ready_in_s=600.0, phase="importing vllm"))
    expect(waiting).to_contain_text("tiny is being loaded: importing vllm, ready in about 10 min")
    page.evaluate(tell, worker("tiny-0"))
    page.evaluate("one => window.tell('models', { models: [one], gone: [] })", model("tiny", 0, loaded=False))
    expect(waiting).to_contain_text("tiny is not loaded yet")
    page.evaluate("one => window.tell('models', { models: [one], gone: [] })", model("tiny", 1))
    expect(waiting).to_contain_text("Waiting for a worker")
    held[0].fulfill(body=f"data: {HELD}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
    expect(waiting).to_have_attribute("data-state", "done")


def test_a_comparison_begins_with_a_model_that_is_ready(loading, page):
    """Not with the first of the alphabet, which may be down."""
    loading("playground?model=good")
    page.get_by_role("button", name="Compare with another").click()
    expect(page.get_by_label("Model 2")).to_have_value("far")
