"""What operators do with workers in the console, at a gateway with the fake engine."""

import re

from playwright.sync_api import expect

WORKER = """
[[managed_workers]]
model_name = "{name}"
model_path = "/m"
backend = "fake"
heartbeat_interval = 1
{more}
"""


def test_a_worker_that_fails_shows_its_cause_and_last_lines(make_site, page):
    """The page of a worker that ended has why, the exit code, and its last words."""
    site = make_site(WORKER.format(name="m", more="fail = true") + "[restart]\nfirst_s = 600\nlongest_s = 600\n")
    site.program.until(lambda: site.program.state("m-0") == "restarting")
    site.open(page)
    page.locator(".problems").get_by_role("link", name="m-0 is restarting").click()
    expect(page.locator(".notice.warn")).to_contain_text("The engine failed while loading: no such weights")
    ended = page.locator(".card.ended")
    expect(ended).to_contain_text(re.compile(r"Exit code\s*70"))
    expect(ended.locator(".lines")).to_contain_text("RuntimeError: no such weights")


def test_a_log_is_followed_paused_and_searched(site, page):
    """Lines come as they are written; a pause holds them back; the search counts what it finds."""
    site.open(page, "workers/alpha-0")
    page.get_by_role("tab", name="Log").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("listens on")
    status = page.get_by_role("status").filter(has_text="lines")
    expect(status).to_contain_text("live")
    page.get_by_role("button", name="Pause").click()
    expect(status).to_contain_text("paused")
    before = log.locator("> div:not(.gap)").all_inner_texts()
    said = site.program.ask("/v1/chat/completions", {"model": "alpha", "say": "a line for the log", "messages": []})
    assert said[0] == 200, said
    expect(log.locator("> div:not(.gap)")).to_have_text(before, use_inner_text=True)
    page.get_by_role("button", name="Go on").click()
    expect(status).to_contain_text("live")
    page.get_by_label("Find lines").fill("LISTENS ON")
    expect(log.locator("> div:not(.gap)")).to_have_count(1)
    expect(page.get_by_role("status").filter(has_text="found")).to_contain_text("1 found")
    page.get_by_label("Find lines").fill("no line has this")
    expect(log).to_contain_text("No line has that.")


def test_a_worker_is_stopped_after_a_question_and_started_again(site, page):
    """It stays in the list as stopped, which is no problem; its page starts it."""
    site.open(page, "workers/alpha-0")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("dialog")).to_contain_text("Stop alpha-0?")
    expect(page.locator("dialog")).to_contain_text("It stays in the list, and can be started again there.")
    page.locator("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".toast")).to_have_text("alpha-0 is stopped.")
    expect(page.locator(".state-line")).to_contain_text("stopped")
    page.reload()
    expect(page.locator(".facts", has_text="Engine")).to_contain_text("fake")
    expect(page.locator("main h2", has_text="Current load")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    site.open(page, "overview")
    expect(page.locator("main")).to_contain_text("No problems")
    site.open(page, "workers")
    page.get_by_role("tab", name="Stopped").click()
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.locator("tr[data-key=alpha-0]").get_by_role("link").click()
    page.get_by_role("button", name="Start").click()
    expect(page.locator(".toast").last).to_have_text("alpha-0 is being started.")
    expect(page.locator(".state-line")).to_contain_text("ready")


def test_a_worker_is_drained_resumed_and_restarted(site, page):
    """Each is a button of its page, in the states in which it makes sense."""
    site.open(page, "workers/alpha-0")
    pid = site.program.get("/v1/admin/workers/alpha-0")[1]["pid"]
    page.get_by_role("button", name="Drain").click()
    expect(page.locator(".state-line")).to_contain_text("draining")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".state-line")).to_contain_text("ready")
    page.get_by_role("button", name="Restart").click()
    page.locator("dialog").get_by_role("button", name="Restart").click()
    expect(page.locator(".facts", has_text="Process")).not_to_contain_text(str(pid))
    expect(page.locator(".state-line")).to_contain_text("ready")
    expect(page.get_by_role("button", name="Drain")).to_have_count(1)


def test_a_refused_action_shows_the_gateways_sentence(site, page, context):
    """A failure of an action is a message, and the page stays as it is."""
    context.watched.allowed.append("409")
    page.route(
        "**/v1/admin/workers/alpha-0",
        lambda route: (
            route.fulfill(status=409, json={"error": {"message": "It was started elsewhere.", "code": "not_managed"}})
            if route.request.method == "DELETE"
            else route.continue_()
        ),
    )
    site.open(page, "workers/alpha-0")
    page.get_by_role("button", name="Stop").click()
    page.locator("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".toast")).to_have_text("It was started elsewhere.")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()


def test_arguments_are_found(site, page):
    """Those that were set are shown; the defaults on request."""
    site.open(page, "workers/alpha-0")
    page.get_by_role("tab", name="Arguments").click()
    expect(page.locator("tr[data-key=model]")).to_contain_text("/m")
    expect(page.locator("tr[data-key=load_s]")).to_have_count(0)
    page.get_by_label("defaults as well").check()
    expect(page.locator("tr[data-key=load_s]")).to_contain_text("0")
    page.get_by_label("Find arguments").fill("load-s")
    expect(page.locator("main tbody tr")).to_have_count(1)


def test_an_on_demand_model_is_loaded_and_unloaded(make_site, page):
    """The page's buttons do what the commands do, and its badges follow."""
    site = make_site(WORKER.format(name="lazy", more='load = "on_demand"'))
    site.open(page, "models")
    row = page.locator("tr[data-key=lazy]")
    expect(row).to_contain_text("on demand")
    page.get_by_role("button", name="Load lazy").click()
    expect(page.locator(".toast")).to_contain_text("lazy is ready after")
    expect(row).to_contain_text("1 worker")
    page.get_by_role("button", name="Unload lazy").click()
    page.locator("dialog").get_by_role("button", name="Unload").click()
    expect(page.locator(".toast").last).to_contain_text("lazy is unloaded after")
    expect(row).to_contain_text("on demand")


def test_where_a_request_would_go_is_said(site, page):
    """The dialog has what `explain` says: the chosen worker, the rule, and the candidates."""
    site.open(page, "models")
    page.get_by_role("button", name="Route of a request for alpha").click()
    dialog = page.locator("dialog")
    expect(dialog.locator(".facts")).to_contain_text("alpha-0")
    expect(dialog.locator("tr[data-key=alpha-0]")).to_contain_text("chosen")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("button", name="Route of a request for alpha")).to_be_focused()
