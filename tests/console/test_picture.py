"""The picture on the Overview: requests on their way from keys to GPUs, in the browser."""

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, busy_lanes, lane, lanes, large_cluster, model, told, worker

HOSTILE = "\u202e<img src=x onerror=alert(1)><script>alert(2)</script>" + "x" * 10_000
PAINTED = "one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value)"
NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def overview(make_site, page):
    """Open the Overview of a cluster with these lanes: `overview(state, lanes)`."""
    site = make_site()
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={}))
    page.context.watched.allowed.append("willReadFrequently")  # the tests read canvases

    def open_(state=None, sent=None, path="overview"):
        told(page, ["state", state or busy_cluster()], *[["lanes", sent or busy_lanes()]] * 8)
        site.open(page, path)
        page.evaluate("(data) => void setInterval(() => window.tell('lanes', data), 500)", sent or busy_lanes())
        return page

    return open_


def node(page, title):
    return page.locator(".node a").filter(has=page.get_by_text(title, exact=True)).first


def column(page, title):
    return page.locator(f".columns ul[aria-label='{title}'] li")


def tell(page, name, data):
    page.evaluate("([name, data]) => window.tell(name, data)", [name, data])


def test_requests_are_drawn_on_their_way_from_keys_to_gpus(overview, page):
    """Each column has its nodes with their figures; lines are drawn, and dots run along them."""
    overview()
    for title, count in (("Keys", 4), ("Names", 2), ("Models", 7), ("Workers", 8), ("GPUs", 8)):
        expect(column(page, title)).to_have_count(count)
    expect(node(page, "team-a")).to_contain_text("tokens/s")
    expect(node(page, "llama-70b")).to_contain_text("9 wait · 60 in flight")
    expect(node(page, "search")).to_contain_text("requests/s")
    expect(node(page, "gpu-2 · 3")).to_contain_text("does not answer")
    lines, dots = page.locator(".picture-live canvas").all()
    assert lines.evaluate(PAINTED)
    assert not dots.evaluate(PAINTED)  # the picture is out of sight yet
    dots.scroll_into_view_if_needed()
    page.wait_for_function(f"one => ({PAINTED})(one)", arg=dots.element_handle())
    seen = dots.evaluate("one => one.toDataURL()")
    page.wait_for_function("([one, seen]) => one.toDataURL() !== seen", arg=[dots.element_handle(), seen])


def test_a_cold_model_lights_up_and_gets_its_first_request(overview, page):
    """The node follows the events: on demand, loading, ready, and with a line that is busy."""
    state = {**busy_cluster(), "workers": [worker("m-0", "cold", on_demand=True)], "aliases": [], "machines": [],
             "models": [model("m", 0, loaded=False)]}  # fmt: skip
    overview(state, lanes())
    expect(node(page, "m")).to_contain_text("on demand")
    expect(page.locator(".node-load")).to_have_count(0)
    loading = worker("m-0", "loading", on_demand=True, ready_in_s=20, load={
        "elapsed_s": 30, "expected_s": 60, "phases": [{"name": "loading weights", "detail": "", "seconds": 3, "expected_s": 9}],
    })  # fmt: skip
    tell(page, "workers", {"changed": [loading], "gone": []})
    tell(page, "models", {"models": [model("m", 0, loaded=False, queued=3)], "gone": []})
    expect(node(page, "m")).to_contain_text("3 wait · loading weights, ready in about")
    expect(page.locator(".node-load").first).to_be_attached()
    tell(page, "workers", {"changed": [worker("m-0", in_flight=1)], "gone": []})
    tell(page, "models", {"models": [model("m", in_flight=1, loaded=True)], "gone": []})
    tell(page, "lanes", lanes(lane("m", "m-0", "team-b", tokens=5000)))
    expect(node(page, "m")).to_contain_text("1 in flight")
    expect(node(page, "team-b")).to_contain_text("tokens/s")
    expect(page.locator(".node-load")).to_have_count(0)


def test_the_picture_is_walked_and_opened_with_the_keyboard(overview, page):
    """It is a single stop of Tab; arrow keys go along the lines, Enter opens a page, and the others are pale meanwhile."""
    overview()
    page.get_by_role("button", name="As a table").focus()
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    expect(focused).to_have_attribute("data-node", "key batch")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("data-node", "model llama-70b")
    expect(page.locator(".node.pale").filter(has_text="rerank-0")).to_be_attached()
    expect(page.locator(".node:not(.pale)").filter(has_text="llama-70b-1")).to_be_attached()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("data-node", "worker llama-70b-1")
    name = focused.get_attribute("aria-label")
    assert name.startswith("llama-70b-1 29 in flight, "), name
    assert name.endswith("tokens/s"), name
    page.keyboard.press("Tab")
    assert focused.get_attribute("data-node") is None
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("llama-70b-1")


def test_a_table_shows_the_same_and_has_an_address(overview, page):
    """Every lane is a row, so is every idle worker; a reload shows the table again."""
    overview()
    page.get_by_role("button", name="As a table").focus()
    page.keyboard.press("Enter")
    rows = page.get_by_label("Requests on their way").locator("tbody tr")
    expect(rows).to_have_count(6 + 4)  # four workers have no lane
    expect(rows.first).to_contain_text("team-a")
    expect(rows.first).to_contain_text("gpu-1: 0, 1")
    assert page.url.endswith("#/overview?view=table")
    page.reload()
    expect(rows).to_have_count(10)
    page.get_by_role("button", name="As a picture").click()
    expect(node(page, "llama-70b")).to_be_visible()


@pytest.mark.parametrize(("workers", "models"), [(1, 1), (30, 6), (300, 60)])
def test_any_number_of_workers_is_a_bounded_number_of_nodes(overview, page, workers, models):
    """Groups show each of their members as a cell; nothing is wider than the page, on a phone either."""
    state, sent = large_cluster(workers, models)
    overview(state, sent)
    expect(page.locator(".columns ul")).to_have_count(5)
    assert all(one.locator("li").count() <= 12 for one in page.locator(".columns ul").all())
    cells = column(page, "Workers").locator(".cells i").count()
    assert (cells or column(page, "Workers").count()) == workers
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator(".columns ul")).to_have_count(2)
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("view", ["picture", "table"])
def test_hostile_names_do_nothing(overview, page, view):
    """Markup is text, a text that runs from right to left stays in its node, and a long name displaces nothing."""
    state = {**busy_cluster(), "workers": [worker(f"{HOSTILE}-0")], "models": [model(HOSTILE)],
             "aliases": [{"name": HOSTILE + "n", "targets": [{"model": HOSTILE, "weight": 1}], "fallbacks": []}]}  # fmt: skip
    sent = lanes(lane(HOSTILE, f"{HOSTILE}-0", HOSTILE, HOSTILE + "n"))
    overview(state, sent, "overview?view=table" if view == "table" else "overview")
    if view == "picture":
        expect(page.locator(".node a").first).to_contain_text("<img src=x")
        assert page.locator(".node a").first.evaluate("one => one.scrollHeight <= one.clientHeight + 4")
        assert all(len(one.get_attribute("aria-label")) < 250 for one in page.locator(".node a").all())
    else:
        expect(page.get_by_label("Requests on their way")).to_contain_text("<img src=x")
    assert page.locator("main img, main script").count() == 0
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


def test_nothing_runs_where_motion_is_not_wanted(browser, make_site):
    """With `prefers-reduced-motion` lines are drawn, and no dots."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    told(page, ["state", busy_cluster()], ["lanes", busy_lanes()])
    make_site().open(page)
    node(page, "llama-70b").scroll_into_view_if_needed()
    page.evaluate(NEXT_FRAMES)
    lines, dots = page.locator(".picture-live canvas").all()
    assert lines.evaluate(PAINTED)
    assert not dots.evaluate(PAINTED)
    context.close()
