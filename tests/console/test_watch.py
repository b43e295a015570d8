"""The pages that show a cluster, told by an event stream of the test's: GPUs, queues and failures as they are in life."""

import re
import time

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, busy_requests, history, machine, model, request, told, worker


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
    expect(page.locator(".problems")).not_to_contain_text("gemma-27b has no replicas")
    expect(page.locator(".card", has_text="Problems").locator(".badge")).to_have_text("5")
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


def test_a_quiet_gateway_says_that_nothing_is_wrong(make_site, page):
    """No list of problems where there are none."""
    state = {**busy_cluster(), "workers": [worker("m-0")], "models": [model("m")], "machines": []}
    told(page, ["state", {**state, "history": history(0)}])
    make_site().open(page)
    expect(page.locator("main")).to_contain_text("No problems")
    expect(page.locator(".chart-empty").first).to_have_text("Gathering samples…")


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


def lines(*numbered):
    return "".join(f'id: {at}\ndata: {{"seq": {at}, "time": "", "line": "{text}"}}\n\n' for at, text in numbered)


@pytest.fixture
def log(cluster, page):
    """Open the log of `gemma-27b-0`, whose streams have these bodies and end: returns it and the ids they began after."""

    def open_(*bodies):
        rest, after = list(bodies), []

        def answer(route):
            after.append(route.request.headers.get("last-event-id"))
            route.fulfill(body=rest.pop(0) if rest else "", content_type="text/event-stream")

        page.route("**/v1/logs/stream/**", answer)
        cluster("workers/gemma-27b-0?tab=log")
        return page.locator(".log"), after

    return open_


def test_a_log_goes_on_with_the_next_gateway(log, page):
    """What another gateway has comes in place of what the one before had: its lines may have the same numbers."""
    found, _ = log(lines((1, "of the first")))
    expect(found).to_contain_text("of the first")
    after = []

    def next_gateway(route):
        after.append(route.request.headers.get("last-event-id"))
        body = lines((1, "of the next")) if after[-1] is None else ""  # the first one's stream may be opened again yet
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/logs/stream/**", next_gateway)
    state = busy_cluster()
    tell(page, "state", {**state, "gateway": {**state["gateway"], "id": "2"}})
    expect(found).to_contain_text("of the next")
    expect(found).not_to_contain_text("of the first")
    assert None in after


def test_a_log_whose_stream_ended_is_opened_again(log):
    """It goes on after the last line that it has, so no line is missing and none is there twice."""
    found, after = log(lines((1, "one"), (2, "two")), "", lines((3, "three")))
    expect(found.get_by_role("log").locator("> div:not(.gap)")).to_have_text(["one", "two", "three"])
    expect(found.get_by_role("status")).to_have_text("ended · 3 lines")
    assert after[:3] == [None, "2", "2"]


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


def test_a_table_draws_a_bounded_number_of_rows(make_site, page):
    """What is beyond is counted, and found by the filter; a long id takes no room from the other columns."""
    long_id = f"m-{'x' * 100}"
    workers = [worker(f"m-{number:04}") for number in range(1399)] + [worker(long_id, "failed", cause="No room.")]
    told(page, ["state", {**busy_cluster(), "workers": workers}])
    make_site().open(page, "workers")
    expect(rows(page)).to_have_count(200)
    expect(page.get_by_text("and 1,200 more: filter")).to_be_visible()
    page.get_by_label("Find workers").fill("xx")
    expect(rows(page)).to_have_count(1)
    expect(rows(page).get_by_title(long_id)).to_be_visible()
    expect(rows(page)).to_contain_text("No room.")
    assert page.locator("td").first.bounding_box()["width"] < 400


def test_workers_change_come_and_go_as_the_stream_says(cluster, page):
    """A change redraws its row alone; one that is gone disappears."""
    cluster("workers")
    tell(page, "workers", {"changed": [worker("rerank-0", "wedged"), worker("new-0", "starting")], "gone": ["embed-0"]})
    expect(rows(page)).to_have_count(8)
    expect(page.locator("tr[data-key=rerank-0]")).to_contain_text("stuck")
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


DOWN = (
    "It stays down until something of it changes in the configuration, or it is started here. "
    "./ichat.pyz reload --restart-failed starts all that have failed."
)


@pytest.mark.parametrize(
    ("state", "more", "said"),
    [
        ("unhealthy", {"failure": "fails its health checks", "cause": "Of an earlier end."}, "fails its health checks"),
        ("failed", {"managed": False, "failure": "has failed"}, "has failedStart it again where it was started."),
        (
            "failed",
            {"cause": "No room.", "failure": "ended with exit code 1"},
            f"No room.It ended with exit code 1. {DOWN}",
        ),
    ],
)
def test_a_workers_page_says_what_is_wrong_now(cluster, page, state, more, said):
    """Not what an earlier end was about; and what starts one again that has failed."""
    one = worker("rerank-0", state, **more)
    cluster("workers/rerank-0", ["workers", {"changed": [one], "gone": []}])
    expect(page.get_by_role("alert")).to_have_text(said)


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


def test_a_request_that_goes_nowhere_is_said_to(cluster, page):
    """An error is no destination; targets that are not asked have no turn."""
    target = {"rule": "not_ready", "worker": None, "goes_on": None}
    targets = [
        {**target, "model": "gemma-27b", "share": 1.0, "place": 1, "reason": "worker gemma-27b-0 has failed"},
        {**target, "model": "embed", "share": 0.0, "place": None, "reason": "worker embed-0 is restarting"},
    ]
    answer = {
        "model": "gemma-27b", "policy": "prefix_aware", "rule": "not_ready", "chosen": None, "waiting": 0,
        "reason": "worker gemma-27b-0 has failed", "alias": "gpt-4o", "plan": targets, "candidates": [],
    }  # fmt: skip
    page.route("**/v1/admin/route", lambda route: route.fulfill(json=answer))
    cluster("models")
    page.get_by_role("button", name="Route of a request for gpt-4o").click()
    facts = page.get_by_role("dialog").locator(".facts > div")
    expect(facts.nth(0)).to_have_text("Tonowhere: it is refused (503)")
    expect(facts.nth(1)).to_have_text("Whyworker gemma-27b-0 has failed")
    plan = page.get_by_role("dialog").locator(".plan li")
    expect(plan.nth(0)).to_contain_text("asked first: worker gemma-27b-0 has failed")
    expect(plan.nth(1)).to_contain_text("not asked this time")


# Machines.


def test_machines_show_the_holders_of_their_gpus(cluster, page):
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


def test_machines_show_the_share_of_ray(cluster, page):
    """The free GPUs and their kind; a Ray that does not answer is named, and the figures stay."""
    share = {"raylets": 2, "gpus": 8, "gpus_free": 5.5, "kinds": ["H200"], "unanswered_since": None}
    old = {**share, "gpus_free": None, "unanswered_since": time.time() - 5 * 86400}
    machines = [machine("gpu-1", ray=share), machine("gpu-2", ray=old), machine("gpu-3")]
    cluster("machines", ["state", {**busy_cluster(), "machines": machines}])
    expect(page.locator(".card").nth(0)).to_contain_text("5.5 of 8 H200 GPUs free")
    expect(page.locator(".card").nth(1)).to_contain_text(re.compile("– of 8 H200 GPUs free.*last answer 5 d"))
    expect(page.locator(".card").nth(2)).not_to_contain_text("free")


# Requests in flight.


def test_requests_say_where_they_are_and_why(cluster, page):
    """The oldest comes first; a queue, a load and a busy engine are named as reasons."""
    cluster("requests", ["requests", busy_requests()])
    expect(rows(page)).to_have_count(6)
    expect(rows(page).first).to_contain_text("9 requests wait for llama-70b: every worker has as many requests")
    expect(rows(page).nth(1)).to_contain_text("7 requests wait inside its engine; its KV cache is full")
    expect(rows(page)).to_contain_text(
        ["", "", "as gpt-4o", "the model is being loaded: loading weights 64 %, ready in about ", "", ""]
    )
    long_id = "0123456789ab-0123456789ab-00000042"
    tell(page, "requests", {"total": 2000, "requests": [request(1, own_id=long_id, id=long_id)]})
    expect(page.get_by_title(long_id)).to_have_text("…00000042")
    expect(page.get_by_text("and 1,999 more: filter")).to_be_visible()
    tell(page, "requests", busy_requests())
    page.get_by_label("Find requests").fill("vision")
    expect(rows(page)).to_have_count(1)


def test_requests_are_asked_for_only_where_they_are_shown(cluster, page):
    """The stream tells of requests while their page is open, and no longer."""
    cluster("overview")
    page.locator("nav").get_by_role("link", name="Requests").click()
    expect(page.locator("main h1")).to_have_text("Requests in flight")
    page.locator("nav").get_by_role("link", name="Workers").click()
    expect(page.locator("main h1")).to_have_text("Workers")
    page.wait_for_function("() => window.eventStreams.length === 3")
    assert page.evaluate("window.eventStreams") == ["", "?requests=1", ""]


def test_a_request_is_cancelled_after_a_question(cluster, page):
    """`Cancel` in the dialog does nothing; the answer does, for the request of that row."""
    asked = []
    page.route("**/v1/admin/requests/req-*", lambda route: (asked.append(route.request), route.fulfill(json={})))
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


def test_relays_are_a_table_that_follows_the_gateway(cluster, page):
    """A retiring relay is shown with its remaining requests; the last takeover and crashes are sentences."""
    cluster("machines")
    expect(page.locator(".card", has_text="Relays")).to_have_count(0)
    relay = {"number": 1, "pid": 8, "state": "accepting", "connections": 4, "requests": 3, "rss_bytes": 2**25,
             "restarts": 0, "cpu_s": 1.0, "age_s": 9.0}  # fmt: skip
    gateway = {
        "id": "1", "version": "0.1.0", "pid": 1, "uptime_s": 5.0, "term": 3, "retiring_pid": 7,
        "relays": [relay, {**relay, "pid": 9, "state": "retiring", "requests": 2}],
        "last_takeover": {"at": 1.0, "pid": 7, "version": "0.1.0", "waited_s": 0.25},
        "last_crash": {"at": None, "pid": 5, "version": "", "waited_s": None},
        "last_relay_crash": {"number": 1, "pid": 6, "at": 1.0, "how": "has ended by signal SIGKILL"},
    }  # fmt: skip
    tell(page, "gateway", gateway)
    card = page.locator(".card", has_text="Relays")
    expect(card.locator("tbody tr", has_text="retiring")).to_contain_text("9")
    for words in ("from process 7", "Process 7 ends its connections", "no relay was left", "signal SIGKILL", "term 3"):
        expect(card).to_contain_text(words)
    tell(page, "gateway", {**gateway, "last_crash": {"at": 1.0, "pid": None, "version": "", "waited_s": 2.0}})
    expect(card).to_contain_text("an unknown process; requests waited 2 s")
