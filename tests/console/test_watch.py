"""The pages that show a cluster, told by an event stream of the test's: GPUs, queues and failures as they are in life."""

import re

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, busy_requests, history, model, request, told, worker


@pytest.fixture
def cluster(make_site, page):
    """Open a page of the console for a busy cluster: `cluster("workers")`."""
    site = make_site()
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={}))

    def open_(path, *events):
        told(page, ["state", busy_cluster()], *events)
        return site.open(page, path)

    return open_


def tell(page, name, data):
    page.evaluate("([name, data]) => window.tell(name, data)", [name, data])


def rows(page):
    return page.locator("main tbody tr:visible")


# Overview.


def test_the_overview_says_what_is_wrong_and_leads_there(cluster, page):
    """Failures come first, each with its cause; what only follows from another one is not said twice."""
    cluster("overview")
    problems = page.locator(".problems li")
    expect(problems.first).to_contain_text("gemma-27b-0 is failed")
    expect(problems.first).to_contain_text("CUDA out of memory")
    expect(page.locator(".problems")).to_contain_text("GPU 3 of gpu-2 does not answer")
    expect(page.locator(".problems")).to_contain_text("It starts again in ")
    expect(page.locator(".problems")).to_contain_text("9 requests wait, the oldest one for ")
    expect(page.locator(".problems")).not_to_contain_text("gemma-27b is not served")
    problems.first.get_by_role("link").click()
    expect(page.locator("main h1")).to_have_text("gemma-27b-0")


def test_the_overview_draws_the_last_hour_and_goes_on(cluster, page):
    """Each chart has something in it, and a new sample changes the figures at once."""
    cluster("overview")
    assert page.locator(".chart").count() == 5
    for canvas in page.locator(".chart canvas").all():
        assert canvas.evaluate(
            "one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value)"
        )
    first = page.locator(".chart", has_text="Time to first token")
    sample = dict.fromkeys(busy_cluster()["history"]["columns"], 1)
    tell(page, "sample", {**sample, "at": 2e9, "requests": 600, "ttft_p50_ms": 123, "models": {}, "workers": {}})
    expect(first).to_contain_text("123 ms")
    expect(page.locator(".figure", has_text="Requests/s")).to_contain_text("120")
    expect(page.locator(".chart", has_text="Requests").first).to_contain_text("120 /s")


def test_the_last_hour_of_what_is_gone_is_forgotten(cluster, page):
    """A page that is open for weeks keeps no columns of workers that have ended long ago."""
    cluster("overview")
    ended = page.evaluate("""async () => {
        const { withSample } = await import("/console/store.js");
        let history = { sample_s: 900, columns: { at: [] }, models: {}, workers: {} };
        const seen = [];
        for (let at = 0; at < 7; at += 1) {
            history = withSample(history, { at, models: {}, workers: at < 2 ? { w: { in_flight: at } } : {} });
            seen.push(history.workers.w?.in_flight ?? null);
        }
        return seen;
    }""")
    assert ended == [[0], [0, 1], [0, 1, None], [0, 1, None, None], [1, None, None, None], [None] * 4, None]


def test_a_quiet_gateway_says_that_nothing_is_wrong(make_site, page):
    """No list of problems where there are none."""
    state = {**busy_cluster(), "workers": [worker("m-0")], "models": [model("m")], "machines": []}
    told(page, ["state", {**state, "history": history(0)}])
    make_site().open(page)
    expect(page.locator("main")).to_contain_text("Nothing is wrong that the gateway knows of")
    expect(page.locator(".chart-empty").first).to_have_text("Gathering samples…")


def test_a_gateway_without_workers_shows_how_to_begin(make_site, page):
    """A newcomer gets three ways to a first worker, and a request to copy."""
    site = make_site()
    site.open(page)
    expect(page.locator("main h1")).to_have_text("Welcome")
    expect(page.locator("main")).to_contain_text("[[managed_workers]]")
    expect(page.locator("main")).to_contain_text(f"curl http://127.0.0.1:{site.program.port}/v1/chat/completions")


def test_usage_that_is_not_stored_is_a_problem(make_site, page):
    """The sentence of the store is shown as it is."""
    told(page, ["state", {**busy_cluster(), "usage_storage": "the disk is full: /var/lib/ichat/usage.sqlite3"}])
    make_site().open(page)
    expect(page.locator(".problems")).to_contain_text("the disk is full: /var/lib/ichat/usage.sqlite3")


def test_usage_that_is_stored_no_more_is_a_problem(make_site, page):
    """Each sample says how it stands: no page has to be loaded anew for that."""
    told(page, ["state", busy_cluster()], ["sample", {"at": 1.0, "usage_storage": "the disk is full"}])
    make_site().open(page)
    expect(page.locator(".problems")).to_contain_text("the disk is full")


# Workers.


def test_a_log_goes_on_with_the_next_gateway(cluster, page):
    """The stream of a gateway that stops ends; when the next one is there, its lines follow, with whatever numbers."""
    bodies = iter(f'id: 1\ndata: {{"seq": 1, "time": "", "line": "of the {which}"}}\n\n' for which in ("first", "next"))
    page.route("**/v1/logs/stream/**", lambda route: route.fulfill(body=next(bodies), content_type="text/event-stream"))
    cluster("workers/gemma-27b-0")
    page.get_by_role("tab", name="Log").click()
    log = page.locator(".log")
    expect(log).to_contain_text("of the first")
    expect(log.get_by_role("status")).to_contain_text("ended")
    tell(page, "state", busy_cluster())
    expect(log).to_contain_text("of the next")


def test_workers_are_found_sorted_and_grouped(cluster, page):
    """The search, the tabs and the headings choose and order the rows."""
    cluster("workers")
    expect(rows(page)).to_have_count(8)
    page.get_by_role("tab", name="Not ready").click()
    expect(rows(page)).to_have_count(3)
    page.get_by_role("tab", name="All").click()
    page.get_by_role("button", name="In flight").click()
    page.get_by_role("button", name="In flight").click()
    expect(rows(page).first).to_contain_text("llama-70b-0")
    page.get_by_label("Find workers").fill("sglang")
    expect(rows(page)).to_have_count(1)
    expect(rows(page).first).to_contain_text("qwen3-8b-0")
    page.get_by_label("Find workers").fill("nothing like it")
    expect(page.locator("main")).to_contain_text("No worker is like that.")


def test_workers_change_come_and_go_as_the_stream_says(cluster, page):
    """A change redraws its row alone; one that is gone disappears."""
    cluster("workers")
    tell(page, "workers", {"changed": [worker("rerank-0", "wedged"), worker("new-0", "starting")], "gone": ["embed-0"]})
    expect(rows(page)).to_have_count(8)
    expect(page.locator("tr[data-key=rerank-0]")).to_contain_text("wedged")
    expect(page.locator("tr[data-key=new-0]")).to_contain_text("starting")
    expect(page.locator("tr[data-key=embed-0]")).to_have_count(0)


def test_a_workers_page_follows_it(cluster, page):
    """State, load and KV cache are those of the stream; a worker that is gone is said to be."""
    page.route("**/v1/admin/workers/llama-70b-1", lambda route: route.fulfill(json={"gpu_ids": [2, 3], "args": {}}))
    cluster("workers/llama-70b-1")
    expect(page.locator(".facts", has_text="GPUs")).to_contain_text("2, 3")
    expect(page.get_by_role("meter", name="KV cache in use")).to_have_attribute("aria-valuenow", "97")
    tell(page, "workers", {"changed": [worker("llama-70b-1", "unhealthy", failure="was silent for 31 s")], "gone": []})
    expect(page.get_by_role("alert")).to_contain_text("was silent for 31 s")
    page.context.watched.allowed.append("/v1/logs/stream/llama-70b-1")  # it never had a log
    tell(page, "workers", {"changed": [], "gone": ["llama-70b-1"]})
    expect(page.locator("main")).to_contain_text("There is no such worker")


# Models and names.


def test_models_show_queues_and_names_their_shares(cluster, page):
    """A name's targets have their shares, and a model that waits says for how long."""
    cluster("models")
    expect(page.locator("tr[data-key=llama-70b]")).to_contain_text("oldest ")
    alias = page.locator("tr[data-key='gpt-4o']")
    expect(alias).to_contain_text(re.compile(r"llama-70b\s*90 %\s*qwen3-8b\s*10 %"))
    expect(alias).to_contain_text("mistral-24b")
    expect(page.locator("tr[data-key=small]")).to_contain_text("gemma-27b (10 %)")
    page.get_by_label("Find models").fill("qwen")
    expect(page.locator("main tbody tr")).to_have_count(3)


# Machines.


def test_machines_show_who_holds_their_gpus(cluster, page):
    """Each GPU has its memory and its holders; one that does not answer says why; a machine without says so."""
    cluster("machines")
    expect(page.locator("main")).to_contain_text("3 machines, 8 GPUs")
    expect(page.locator("main")).to_contain_text("Nothing is known of GPUs here")
    gpus = page.locator(".gpu")
    expect(gpus).to_have_count(8)
    expect(gpus.nth(2)).to_contain_text("52 GiB of 141 GiB")
    expect(gpus.nth(2)).to_contain_text(re.compile(r"others\s*14 GiB"))
    expect(gpus.last).to_contain_text("GPU is lost")
    gpus.first.get_by_role("link", name="llama-70b-0").click()
    expect(page.locator("main h1")).to_have_text("llama-70b-0")


# Requests in flight.


def test_requests_say_where_they_are_and_why(cluster, page):
    """The oldest comes first; a queue, a load and a busy engine are named as reasons."""
    cluster("requests", ["requests", busy_requests()])
    expect(rows(page)).to_have_count(6)
    expect(rows(page).first).to_contain_text("9 requests wait for llama-70b: every worker has as many requests")
    expect(rows(page).nth(1)).to_contain_text("7 requests wait inside its engine; its KV cache is full")
    expect(rows(page)).to_contain_text(["", "", "as gpt-4o", "the model is being loaded, ready in about ", "", ""])
    page.get_by_label("Find requests").fill("vision")
    expect(rows(page)).to_have_count(1)


def test_requests_are_asked_for_only_where_they_are_shown(cluster, page):
    """The stream tells of requests while their page is open, and no longer."""
    cluster("overview")
    page.locator("nav").get_by_role("link", name="Requests").click()
    expect(page.locator("main h1")).to_have_text("Requests in flight")
    page.locator("nav").get_by_role("link", name="Workers").click()
    expect(page.locator("main h1")).to_have_text("Workers")
    page.wait_for_function("window.eventStreams.length === 3")
    assert page.evaluate("window.eventStreams") == ["", "?requests=1", ""]


def test_a_request_is_cancelled_after_a_question(cluster, page):
    """`Cancel` in the dialog does nothing; the answer does, for the request of that row."""
    asked = []
    page.route("**/v1/admin/requests/*", lambda route: (asked.append(route.request), route.fulfill(json={})))
    cluster("requests", ["requests", {"total": 1, "requests": [request(7)]}])
    button = page.get_by_role("button", name="Cancel req-0007")
    button.click()
    page.locator("dialog").get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator("dialog")).to_have_count(0)
    assert asked == []
    button.click()
    page.locator("dialog").get_by_role("button", name="Cancel it").click()
    expect(page.locator(".toast")).to_have_text("The request was cancelled.")
    assert [(one.method, one.url.rpartition("/")[2]) for one in asked] == [("DELETE", "req-0007")]
    tell(page, "requests", {"total": 0, "requests": []})
    expect(page.locator("main")).to_contain_text("No request is in flight")
