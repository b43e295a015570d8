"""The configuration page in a browser: what is in force, what the file would change, and taking it."""

import pytest
from playwright.sync_api import expect

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
    """Every section with its values; what is not the default is marked, and can be shown alone."""
    site.open(page, "config")
    row = page.locator('[data-key="timeouts.stop_s"]')
    expect(row).to_contain_text("6")
    expect(row).to_contain_text("set")
    expect(page.locator('[data-key="timeouts.queue_s"]')).not_to_contain_text("set")
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
    expect(page.locator("main")).not_to_contain_text("The file has changed")
    change(site, "stop_s = 6", "stop_s = 8")
    page.reload()
    expect(page.get_by_text("The file has changed since it was read.")).to_be_visible()
    page.get_by_role("button", name="Plan a reload").click()
    expect(page.get_by_role("table", name="Plan")).to_contain_text("timeouts.stop_s")
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 6
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 6
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    expect(page.locator('[data-key="timeouts.stop_s"]')).to_contain_text("8")
    expect(page.locator("main")).not_to_contain_text("The file has changed")
    assert site.program.get("/v1/admin/config")[1]["settings"]["timeouts"]["stop_s"] == 8


def test_a_file_that_is_wrong(site, page):
    """Every problem of the file is shown, and nothing changes."""
    page.context.watched.allowed.append("/v1/admin/config/reload")
    site.open(page, "config")
    change(site, "stop_s = 6", 'stop_s = "six"')
    page.get_by_role("button", name="Plan a reload").click()
    expect(page.get_by_role("alert")).to_contain_text("timeouts.stop_s: must be a number")
    expect(page.locator('[data-key="timeouts.stop_s"]')).to_contain_text("6")
