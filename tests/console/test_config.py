"""The configuration page in a browser: what is in force, what the file would change, and taking it."""

import time

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, told

UNWATCHED = "watch_config = false\n"


@pytest.fixture
def site(make_site):
    return make_site(
        '[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:9/v1"\nheaders = { x = "sk-hidden" }\n',
        UNWATCHED,
    )


def change(site, old, new):
    path = site.program.get("/v1/admin/config")[1]["path"]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert old in text
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace(old, new))


def test_everything_in_force_is_shown_without_secrets(site, page):
    """What is not the default is shown first, and marked; all the rest can be."""
    site.open(page, "config")
    row = page.locator('[data-key="timeouts.stop_s"]')
    expect(row).to_contain_text("6")
    expect(row).to_contain_text("set")
    expect(page.locator('[data-key="timeouts.queue_s"]')).to_have_count(0)
    page.get_by_label("Find a setting").fill("queue_s")
    page.get_by_role("button", name="Show the defaults as well").click()
    expect(page.locator('[data-key="timeouts.queue_s"]')).not_to_contain_text("set")
    page.get_by_label("Find a setting").fill("")
    expect(page.locator('[data-key="external_routes[0]"]')).to_contain_text("***")
    assert "sk-hidden" not in page.content()
    page.get_by_label("Only what is not the default").check()
    expect(page.locator('[data-key="timeouts.queue_s"]')).to_have_count(0)
    expect(row).to_be_visible()
    page.get_by_label("Find a setting").fill("drain")
    expect(page.locator("[data-key]")).to_have_count(1)


def test_a_plan_comes_before_its_application(site, page):
    """That the file has changed is said; the plan says what would happen, and only the question's answer applies it."""
    site.open(page, "config")
    expect(page.locator("main")).not_to_contain_text("has changed")
    change(site, "stop_s = 6", "stop_s = 8")
    page.reload()
    expect(page.get_by_text("ichat.toml has changed, or is gone")).to_be_visible()
    page.get_by_role("button", name="Review changes").click()
    expect(page.get_by_role("table", name="Plan")).to_contain_text("timeouts.stop_s")
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 6
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 6
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    expect(page.locator('[data-key="timeouts.stop_s"]')).to_contain_text("8")
    expect(page.locator("main")).not_to_contain_text("has changed")
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 8


def test_a_file_that_is_wrong(site, page):
    """Every problem of the file is shown, and nothing changes."""
    page.context.watched.allowed.append("/v1/admin/config/reload")
    site.open(page, "config")
    change(site, "stop_s = 6", 'stop_s = "six"')
    page.get_by_role("button", name="Review changes").click()
    expect(page.get_by_role("alert")).to_contain_text("timeouts.stop_s: must be a number")
    expect(page.locator('[data-key="timeouts.stop_s"]')).to_contain_text("6")


def test_a_refused_file_is_the_first_thing_that_is_wrong(make_site, page):
    """Since when, what is in force instead, and each mistake, on the Overview and on its own page, until it is taken."""
    mistakes = ["server_settings.portt: unknown key; did you mean port?", "routing.policy: must be one of these"]
    now = time.time()
    file = {
        "state": "refused",
        "since": now - 60,
        "in_force_since": now - 1800,
        "path": "/etc/ichat.toml",
        "errors": mistakes,
    }
    told(page, ["state", {**busy_cluster(), "config": file}])
    page.route("**/v1/admin/config", lambda route: route.fulfill(json={
        "path": "/etc/ichat.toml", "file_changed": True, "watched": True, "settings": {}, "changed": []}))  # fmt: skip
    make_site().open(page)
    line = page.locator(".problems li").first
    expect(line).to_contain_text("ichat.toml is refused since ")
    expect(line).to_contain_text(" is in force")
    expect(line).to_contain_text(f"{mistakes[0]} (and 1 more mistake)")
    line.get_by_role("link").click()
    expect(page.get_by_role("alert").get_by_role("listitem")).to_have_text(mistakes)
    expect(page.get_by_role("alert")).to_contain_text("The gateway reloads it automatically once it is right.")
    expect(page.locator("main")).not_to_contain_text("in a moment")
    page.evaluate("file => window.tell('config', file)", {**file, "state": "changed", "errors": []})
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".notice")).to_contain_text("ichat.toml has changed, or is gone, since ")
    page.locator("nav").get_by_role("link", name="Overview").click()
    expect(page.locator(".problems li").first).to_contain_text("ichat.toml has changed, or is gone, since ")
    just_now = {**file, "state": "changed", "since": time.time(), "errors": []}
    page.evaluate("file => window.tell('config', file)", just_now)
    expect(page.locator(".problems li").first).not_to_contain_text("ichat.toml")  # it is read in a moment
    page.locator("nav").get_by_role("link", name="Overview").click()
    expect(page.locator(".problems")).to_contain_text("The gateway has not read it since: a reload does.")
    page.evaluate("file => window.tell('config', file)", {**file, "state": "ok", "errors": []})
    expect(page.locator(".problems")).not_to_contain_text("ichat.toml")
