"""The pages of keys and usage in a browser: a key is made, shown once, used, changed and revoked; what it used is told."""

import csv
import re
import time

import pytest
from console.conftest import WORKER
from playwright.sync_api import expect

from ichat.security.keys import hash_of

ADMIN, CLIENT = "sk-admin-0123456789", "sk-client-0123456789"
SECURITY = f"""
[security]
admin_key_hash = "{hash_of(ADMIN)}"
[[security.keys]]
name = "of-the-file"
key_hash = "{hash_of(CLIENT)}"
[prices."alpha"]
input = 1.0
output = 2.0
"""


@pytest.fixture
def site(make_site, context):
    """A gateway with one worker and keys; the tab has the operators' key."""
    made = make_site(SECURITY + WORKER.format(name="alpha", more=""))
    made.program.key = ADMIN
    made.program.wait_until_ready("alpha-0")
    keep = f'sessionStorage.setItem("ichat.admin_key", "{ADMIN}")'
    context.add_init_script(f'if (location.protocol === "http:") {keep}')
    return made


def ask(site, key):
    """Ask for the model with a client's key, and return the status."""
    site.program.key = key
    status, _ = site.program.ask("/v1/chat/completions", {"model": "alpha", "messages": []})
    site.program.key = ADMIN
    return status


def make_key(page, name, **fields):
    page.get_by_role("button", name="Create a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("^Name")).fill(name)
    for label, text in fields.items():
        dialog.get_by_label(re.compile(f"^{label.replace('_', ' ')}")).fill(text)
    dialog.get_by_role("button", name="Create the key").click()
    return dialog


def test_a_new_key_is_not_lost_by_a_slip(site, page):
    """Neither Escape nor a press beside it closes what shows a key once; it can be copied over plain http, too."""
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    site.open(page, "keys")
    dialog = make_key(page, "team-c")
    secret = dialog.locator("[data-secret] pre").text_content()
    page.mouse.click(5, 5)
    for _ in range(3):
        page.keyboard.press("Escape")
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    expect(dialog.locator("[data-secret] pre")).to_have_text(secret)
    key, button = (dialog.locator(f"[data-secret] {one}").bounding_box() for one in ("pre", "button"))
    assert key["x"] + key["width"] <= button["x"], "the button covers the key"
    dialog.get_by_role("button", name="Done").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Create a key").click()
    name = page.get_by_role("dialog").get_by_label(re.compile("^Name"))
    name.focus()
    page.keyboard.press("ControlOrMeta+v")
    expect(name).to_have_value(secret)


def test_a_key_is_rotated(site, page):
    """The new secret is shown once, and both are good for a request until the overlap ends."""
    site.open(page, "keys")
    dialog = make_key(page, "team-d")
    secrets = [dialog.locator("[data-secret] pre").text_content()]
    dialog.get_by_role("button", name="Done").click()
    page.locator('[data-key="team-d"]').click()
    page.get_by_role("dialog").get_by_role("button", name="Rotate").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("The current secret is accepted for")).to_have_value("86400")
    dialog.get_by_role("button", name="Rotate").click()
    expect(dialog).to_contain_text("The old one is accepted until")
    secrets.append(dialog.locator("[data-secret] pre").text_content())
    assert [ask(site, secret) for secret in secrets] == [200, 200]
    assert secrets[0] != secrets[1]
    dialog.get_by_role("button", name="Done").click()
    page.locator('[data-key="team-d"]').click()
    expect(page.get_by_role("dialog")).to_contain_text("Old secret until")


def test_a_key_lives(site, page):
    """Made with a limit, shown once, good for a request, changed, and revoked: the next request is refused."""
    site.open(page, "keys")
    dialog = make_key(page, "team-b", Tokens_a_day="1000", Models="alpha")
    secret = dialog.locator("[data-secret] pre").text_content()
    assert secret.startswith("sk-")
    assert ask(site, secret) == 200
    dialog.get_by_role("button", name="Done").click()
    assert secret not in page.content()
    row = page.locator('[data-key="team-b"]')
    expect(row).to_contain_text("alpha")
    page.reload()
    expect(row).to_contain_text("active")
    assert secret not in page.content()
    row.click()
    expect(page.get_by_role("dialog")).to_contain_text("of 1,000")
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    page.get_by_role("dialog").get_by_label(re.compile("^Models")).fill("")
    page.get_by_role("dialog").get_by_label("Tokens a day").fill("2000")
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    [made] = [one for one in site.program.get("/v1/admin/keys")[1]["keys"] if one["name"] == "team-b"]
    assert (made["limits"]["tokens_per_day"], made["models"], made["expires_at"] is None) == (2000, None, False)
    row.click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").last.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    assert ask(site, secret) == 401


def test_a_key_of_the_file_is_changed_there(site, page):
    """Its facts are shown, and no button changes it."""
    site.open(page, "keys")
    page.locator('[data-key="of-the-file"]').click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("[[security.keys]]")
    expect(dialog.get_by_role("button")).to_have_text("Close")
    dialog.get_by_role("button").click()
    expect(dialog).to_have_count(0)


def test_a_key_that_cannot_be_made(site, page):
    """The gateway's sentence stands in the form, which keeps what was typed."""
    page.context.watched.allowed.append("/v1/admin/keys")
    site.open(page, "keys")
    dialog = make_key(page, "of-the-file")
    expect(dialog.get_by_role("alert")).to_contain_text("of-the-file")
    expect(dialog.get_by_label(re.compile("^Name"))).to_have_value("of-the-file")
    dialog.get_by_label("Tokens a day").fill("many")
    dialog.get_by_role("button", name="Create the key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("this is no number: many")


def test_usage_has_a_bar_for_each_day_with_a_part_for_each_key(site, page):
    """Hostile names of keys are texts; a chart without tokens is not drawn."""
    hostile = "<img src=x onerror=alert(1)>\u202e" + "x" * 10_000
    amounts = dict.fromkeys(
        ("requests", "errors", "input_tokens", "output_tokens", "cached_tokens", "estimated_tokens", "busy_s"), 5
    )
    today = time.strftime("%Y-%m-%d", time.gmtime())

    def answer(route):
        rows = [{**amounts, "cost": None, "day": today, "model": "m", "key": key} for key in ("team-a", hostile)]
        totals = {**amounts, "cost": None}
        route.fulfill(json={"from": f"{today}T00:00:00Z", "to": f"{today}T01:00:00Z", "by": ["day", "key"], "rows": rows,
                            "totals": totals, "limits": [], "storage": "ok"})  # fmt: skip

    page.route("**/v1/admin/usage?*", answer)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    site.open(page, "usage?span=week")
    bars = page.get_by_role("figure", name="Tokens by day and key")
    expect(bars.locator("li")).to_have_count(7)
    expect(bars.locator("li").last).to_contain_text("team-a 10")
    expect(bars.locator("li").last.locator("i")).to_have_count(2)
    assert all(one.bounding_box()["height"] > 50 for one in bars.locator("li").last.locator("i").all())
    expect(bars.locator("li").first).to_contain_text("nothing")
    assert bars.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_usage_is_grouped_as_asked_and_exported(site, page, tmp_path):
    """Who used which model how often, told apart as one likes, and the same as a file."""
    for _ in range(3):
        assert ask(site, CLIENT) == 200
    site.open(page, "usage")
    table = page.get_by_role("table", name="Usage")
    row = table.get_by_role("row").nth(1)
    for text in ("of-the-file", "alpha", "3"):
        expect(row).to_contain_text(text)
    expect(page.locator('[data-total="Requests"]')).to_contain_text("3")
    page.get_by_label("Worker or route").check()
    expect(table).to_contain_text("alpha-0")
    page.get_by_label(re.compile("^By")).select_option("day")
    expect(table.get_by_role("columnheader", name="Day (UTC)")).to_be_visible()
    assert page.url.endswith("#/usage?by=key%2Cmodel%2Cendpoint&time=day")
    page.reload()
    expect(table.get_by_role("columnheader", name="Day (UTC)")).to_be_visible()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    saved.value.save_as(tmp_path / "usage.csv")
    [line] = csv.DictReader((tmp_path / "usage.csv").read_text().splitlines())
    assert [line[name] for name in ("key", "model", "endpoint", "requests")] == [
        "of-the-file", "alpha", "alpha-0", "3",
    ]  # fmt: skip
    page.get_by_label("When").select_option("last_month")
    expect(table.locator("..")).to_contain_text("No requests in this time")
    expect(page.get_by_role("figure")).to_have_count(0)
