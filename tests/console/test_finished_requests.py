"""The console's list of finished requests, and the page of a request with its timeline."""

import json
import urllib.parse
import urllib.request

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, finished, request, told

NOT_ASKED = {"queued_s": 2.0, "overhead_s": None, "head_s": None, "first_s": None, "body_s": None}
REFUSED = finished(3, status=503, error="model_not_ready", worker="", phases=NOT_ASKED, tokens=None, duration_s=2.0)
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e\u2066"


@pytest.fixture
def requests_page(make_site, page):
    """Open a page of the console for a gateway with these finished requests, and those in flight."""
    site = make_site()

    def open_(path, done=(), in_flight=(), kept_max=500):
        def answer(route):
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(route.request.url).query))
            found = [one for one in done if query.get("id") in (None, one["id"], one["own_id"])]
            found = [one for one in found if "failed" not in query or one["error"]]
            route.fulfill(json={"requests": found, "since": 1e9, "kept_max": kept_max})

        page.route("**/v1/admin/requests/finished*", answer)
        page.route("**/v1/admin/requests?*", lambda route: route.fulfill(
            json={"requests": list(in_flight), "total": len(in_flight)}
        ))  # fmt: skip
        told(page, ["state", busy_cluster()], ["requests", {"requests": [], "total": 0}])
        return site.open(page, path)

    return open_


def rows(page):
    return page.get_by_label("Finished requests").locator("tbody tr")


def test_a_request_is_found_and_opened_with_the_keyboard(requests_page, page):
    """The filter, the arrow keys and Enter lead to its timeline; its address stays when the page is loaded again."""
    requests_page("requests", [finished(1), finished(2), REFUSED, finished(4, key="team-b")])
    expect(rows(page)).to_have_count(4)
    expect(rows(page).first).to_contain_text("…ine-0004")
    page.get_by_label("Filter by id").focus()
    page.keyboard.type("team-a")
    expect(rows(page)).to_have_count(3)
    for _ in range(20):
        if page.evaluate("document.activeElement.matches('.row-link')"):
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("A request")
    assert page.url.endswith("#/requests/req-0002")
    page.reload()
    expect(page.locator("main")).to_contain_text("mine-0002")
    page.go_back()
    expect(page.get_by_label("Filter by id")).to_have_value("team-a")


def test_the_timeline_is_drawn_in_proportion_with_a_table_of_the_same(requests_page, page):
    """Each phase has its width; the table has the same seconds, and a screen reader reads only the table."""
    phases = {"queued_s": 1.0, "overhead_s": 0.0, "head_s": 0.5, "first_s": 1.5, "body_s": 1.0}
    requests_page("requests/req-0001", [finished(1, phases=phases, duration_s=4.0)])
    bar = page.locator(".timeline")
    expect(bar).to_have_attribute("aria-hidden", "true")
    widths = bar.evaluate("bar => [...bar.children].map((one) => one.getBoundingClientRect().width)")
    assert [round(width / sum(widths) * 8) for width in widths] == [2, 1, 3, 2]
    table = page.get_by_label("Phases").locator("tbody tr")
    expect(table).to_have_count(5)
    expect(table.first).to_contain_text("Queue")
    expect(table.nth(3)).to_contain_text("38 %")
    expect(page.locator("main")).to_contain_text("25 %")
    assert round(bar.locator("i").evaluate("one => one.offsetWidth / one.parentElement.offsetWidth * 4")) == 1


def test_failures_are_selected_and_the_filter_is_in_the_address(requests_page, page):
    """A link with the filter shows the same list."""
    requests_page("requests", [finished(1), REFUSED])
    page.get_by_label("only failures").check()
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("model_not_ready")
    assert page.url.endswith("#/requests?failed=1")
    page.reload()
    expect(rows(page)).to_have_count(1)
    rows(page).locator(".row-link").click()
    expect(page.get_by_label("Phases")).not_to_contain_text("Until")
    expect(page.locator("main")).to_contain_text("model_not_ready")


def test_a_request_in_flight_and_an_unknown_id_are_said(requests_page, page):
    """A request that has not ended has its phase; an id that nothing has leads to the access log."""
    requests_page("requests/req-0007", in_flight=[request(7, "queued")])
    expect(page.locator("main")).to_contain_text("queued for 18 s until now")
    page.unroute("**/v1/admin/requests?*")
    page.goto(f"{page.url.partition('#')[0]}#/requests/nobody")
    expect(page.locator("main")).to_contain_text("No request with this id is known.")
    expect(page.locator("main")).to_contain_text("The access log has earlier requests")


def test_requests_of_one_id_lead_to_each_other(requests_page, page):
    """Clients may give several requests the same id; each has a page of its own."""
    requests_page("requests/same", [finished(2, id="same"), finished(1, id="same")])
    expect(page.locator("main")).to_contain_text("1 other request with this id")
    page.get_by_role("link", name="req-0001").click()
    expect(page.locator(".facts").first).to_contain_text("req-0001")
    expect(page.locator("main")).not_to_contain_text("with this id")


@pytest.mark.parametrize("text", [HOSTILE, "\u202e" + "x" * 10_000, "模型" * 5000])
def test_hostile_ids_and_names_do_nothing(requests_page, page, text):
    """Neither the list nor the page of a request runs them, or becomes wider than the window."""
    hostile = finished(
        1, id=text, model=text, alias=text, key=text, worker=text, error=text, path=text, client=text, method=text,
        passed=[{"model": text, "reason": text}], phase=text, trace_id=text,
    )  # fmt: skip
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    requests_page("requests", [hostile, finished(2)])
    expect(rows(page)).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    rows(page).last.locator(".row-link").click()
    expect(page.locator(".timeline")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator("main img, main script").count()


def test_a_real_request_has_its_timeline(site, page):
    """What a gateway says of a request that it has answered is drawn."""
    body = json.dumps({"model": "alpha", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"content-type": "application/json", "x-request-id": "mine/1?"}
    url = f"http://127.0.0.1:{site.program.port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        assert b"[DONE]" in response.read()
    site.open(page, "requests")
    rows(page).locator(".row-link").click()
    expect(page.locator("main")).to_contain_text("mine/1?")
    expect(page.locator("main")).to_contain_text("It went well.")
    expect(page.get_by_label("Phases").locator("tbody tr")).to_have_count(5)
    page.goto(f"{page.url.partition('#')[0]}#/requests/{urllib.parse.quote('mine/1?', safe='')}")
    expect(page.get_by_label("Phases").locator("tbody tr")).to_have_count(5)
