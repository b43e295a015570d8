"""Logs in the console: older lines, a search of all kept lines, a file of them, colours, and the gateway's own lines."""

import json
import urllib.parse

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, told

ID = "gemma-27b-0"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e\u2066 \x1b]0;title\x07\x1b[31mred\x1b[0m"


def time_of(number):
    return f"2026-01-01T10:00:{number:02}.000Z"


def streamed(*numbered):
    entries = [{"seq": number, "time": time_of(number), "line": text} for number, text in numbered]
    return "".join(f"id: {entry['seq']}\ndata: {json.dumps(entry)}\n\n" for entry in entries)


class Kept:
    """The kept lines of a worker, with numbers as positions; a page has three lines."""

    def __init__(self, lines):
        self.lines = lines
        self.asked = []

    def __call__(self, route):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(route.request.url).query))
        self.asked.append(query)
        if "after" in query:
            begin = int(query["after"].split(".")[2])
            found, before, after = range(begin, min(begin + 3, len(self.lines))), begin, begin + 3
        else:
            given = query.get("before", f"1.1.{len(self.lines)}")
            end = int(given.split(".")[2]) if given.startswith("1.1.") else int(given[17:19]) + 1 - int(query["known"])
            matching = [n for n in range(end) if query.get("text", "").lower() in self.lines[n].lower()]
            found, after = matching[-3:], end
            before = found[0] if len(matching) > 3 else 0
        lines = [{"time": time_of(n), "line": self.lines[n], "position": f"1.1.{n}", "previous": n < 2} for n in found]
        page = {"lines": lines, "before": f"1.1.{before}" if before else None, "after": f"1.1.{after}"}
        route.fulfill(json=page)


@pytest.fixture
def open_log(make_site, page):
    """Open the log of a worker with these kept lines, of which the stream has the last two."""
    site = make_site()

    def open_(lines, more=""):
        kept = Kept(lines)
        page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={}))
        page.route(f"**/v1/logs/pages/{ID}?*", kept)
        body = streamed(*[(n, lines[n]) for n in range(len(lines))][-2:])
        page.route("**/v1/logs/stream/**", lambda route: route.fulfill(
            body="" if "last-event-id" in route.request.headers else body, content_type="text/event-stream"
        ))  # fmt: skip
        told(page, ["state", busy_cluster()])
        site.open(page, f"workers/{ID}?tab=log{more}")
        return page.get_by_role("log"), kept

    return open_


def lines_of(log):
    return log.locator("> div:not(.gap)").evaluate_all(
        "all => all.map((one) => [...one.childNodes].slice(one.querySelector('.added') ? 1 : 0)"
        ".map((node) => node.textContent).join(''))"
    )


TEN = [f"line {number}" for number in range(10)]


def test_older_lines_stand_before_the_live_lines(open_log, page):
    """Each once, up to the oldest; lines of the previous run are marked."""
    log, kept = open_log(TEN)
    expect(log).to_contain_text("line 9")
    for number, first in enumerate(("line 5", "line 2", "line 0")):
        page.get_by_role("button", name="Older lines").click()
        expect(log).to_contain_text(first)
        assert len(kept.asked) == number + 1
    assert lines_of(log) == TEN
    expect(log).to_contain_text("These are the oldest lines that are kept.")
    expect(page.get_by_role("button", name="Older lines")).to_have_count(0)
    assert (kept.asked[0]["before"], kept.asked[0]["known"]) == (time_of(8), "1")
    assert [one["before"] for one in kept.asked[1:]] == ["1.1.5", "1.1.2"]
    expect(log.locator(".of-previous")).to_have_count(2)


def test_a_search_has_an_address_and_leads_to_the_lines_around(open_log, page):
    """The text stands in the address; a line's time leads to its neighbours, and Back to the search."""
    log, kept = open_log([f"{'needle' if number in (1, 4, 9) else 'hay'} {number}" for number in range(10)])
    page.keyboard.press("/")
    page.keyboard.type("NEEDLE")
    expect(log).to_contain_text("needle 1")
    assert lines_of(log) == ["needle 1", "needle 4", "needle 9"]
    expect(log).to_contain_text("All kept lines were searched.")
    expect(page.get_by_role("status").filter(has_text="found")).to_contain_text("3 found")
    assert page.url.endswith("?tab=log&find=NEEDLE")
    assert {one["text"] for one in kept.asked} == {"NEEDLE"}
    page.evaluate("location.hash = location.hash.replace('NEEDLE', 'hay 3')")
    expect(page.get_by_label("Find lines")).to_have_value("hay 3")
    expect(page.get_by_role("status").filter(has_text="found")).to_contain_text("1 found")
    page.go_back()
    expect(page.get_by_label("Find lines")).to_have_value("NEEDLE")
    page.reload()
    expect(log).to_contain_text("needle 1")
    log.locator("a.at").nth(1).click()
    expect(log.locator(".marked")).to_contain_text("needle 4")
    assert page.url.endswith("?tab=log&at=1.1.4")
    assert lines_of(log) == [f"{'needle' if number in (1, 4) else 'hay'} {number}" for number in range(1, 7)]
    page.get_by_role("button", name="Newer lines").click()
    expect(log).to_contain_text("needle 9")
    page.get_by_role("button", name="Older lines").click()
    expect(log).to_contain_text("hay 0")
    page.go_back()
    expect(page.get_by_label("Find lines")).to_have_value("NEEDLE")
    page.go_forward()
    page.get_by_role("link", name="Newest lines").click()
    expect(log).to_contain_text("needle 9")
    expect(log.locator(".marked")).to_have_count(0)


def test_nothing_in_a_line_is_obeyed_but_its_colours(open_log, page):
    """Neither markup, nor a terminal's sequences, nor signs that turn the text, nor its length."""
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    log, _ = open_log([f"\u05d0{HOSTILE}", f"{HOSTILE}", "x" * 10_000])
    expect(log.locator(".ansi-red")).to_have_text("red")
    expect(log).to_contain_text("<script>alert(2)</script>\\u202e\\u2066")
    expect(log).to_contain_text("6000 characters more")
    page.get_by_role("button", name="Older lines").click()
    expect(log.locator(".ansi-red")).to_have_count(2)
    assert log.locator("img, script").count() == 0
    assert page.title().startswith(ID)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_positions_that_are_gone_are_said(open_log, page):
    """A sentence in place of lines, and a way to the newest lines."""
    page.context.watched.allowed.append("/v1/logs/pages/")
    log, _ = open_log(TEN)
    error = {"error": {"message": "The lines of this position are not kept any more.", "code": "not_found"}}
    page.route(f"**/v1/logs/pages/{ID}?*", lambda route: route.fulfill(status=404, json=error))
    page.evaluate(f"location.hash = '#/workers/{ID}?tab=log&at=1.1.9999'")
    expect(log).to_contain_text("The lines of this position are not kept any more.")
    page.get_by_role("link", name="Newest lines").click()
    expect(log).to_contain_text("line 9")
    page.get_by_role("button", name="Older lines").click()
    expect(log).to_contain_text("The lines of this position are not kept any more.")


def test_the_log_of_a_real_worker(site, page):
    """Its lines are searched, kept as a file, and those of the previous run have an address."""
    site.open(page, "workers/alpha-0?tab=log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("ready after")
    page.get_by_role("button", name="Older lines").click()
    expect(log).to_contain_text("These are the oldest lines that are kept.")
    shown = lines_of(log)
    assert len([line for line in shown if "ready after" in line]) == 1
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    assert waiting.value.suggested_filename == "alpha-0.log"
    text = waiting.value.path().read_text()
    assert [line.partition(" ")[2] for line in text.splitlines()][: len(shown)] == shown
    page.get_by_label("Find lines").fill("READY after")
    expect(page.get_by_role("status").filter(has_text="found")).to_contain_text("found")
    expect(log).to_contain_text("All kept lines were searched.")
    assert all("ready after" in line for line in lines_of(log))
    page.context.watched.allowed.append("/v1/logs/stream/alpha-0?previous=1")  # there is none
    page.get_by_label("Find lines").fill("")
    page.get_by_label("Previous run").check()
    expect(page.get_by_role("status").filter(has_text="line")).to_contain_text("There is no log of a run of alpha-0")
    assert "run=previous" in page.url


def test_the_gateways_own_log_is_a_page(site, page):
    """It is reached by two keys, and goes on with what the gateway does."""
    site.open(page)
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page.locator("main h1")).to_have_text("Gateway log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("alpha-0")
    expect(log).to_contain_text("The lines since the gateway's start")
    page.get_by_label("Find lines").fill("beta-0")
    expect(page.get_by_role("status").filter(has_text="found")).to_contain_text("found")
    assert all("beta-0" in line for line in lines_of(log))
    assert page.url.endswith("#/log?find=beta-0")
