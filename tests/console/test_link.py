"""The console's link: the gateway's own user opens the console by it, and nobody else may change anything."""

from playwright.sync_api import expect


def test_the_link_makes_the_browsers_tab_the_own_users(site, page):
    """The secret leaves the address at once, and what the page changes is allowed."""
    page.goto(f"{site.url}#key={site.secret}")
    page.wait_for_selector("[data-connection=live]")
    assert site.secret not in page.evaluate("location.href + history.length + document.body.textContent")
    assert page.evaluate("history.state") is None
    status = "fetch('/v1/admin/config/reload', {method: 'POST', headers: {authorization: 'Bearer ' + %s}}).then(r => r.status)"
    assert page.evaluate(status % "sessionStorage.getItem('ichat.admin_key')") == 200
    page.reload()
    page.wait_for_selector("[data-connection=live]")
    assert page.evaluate(status % "sessionStorage.getItem('ichat.admin_key')") == 200


def test_a_link_that_is_opened_in_a_tab_of_the_console_counts_too(site, page, context):
    """Only what follows the # changes then, so the browser loads nothing by itself."""
    page.goto(f"{site.url}#/workers")
    page.wait_for_selector("[data-connection=live]")
    page.goto(f"{site.url}#key={site.secret}")
    expect(page.get_by_role("button", name="Lock")).to_be_visible()
    assert site.secret not in page.url


def test_without_the_link_the_console_shows_and_changes_nothing(site, page, context):
    """What is refused says how to open the console."""
    context.watched.allowed.append("401")
    page.goto(f"{site.url}#/workers/alpha-0")
    page.wait_for_selector("[data-connection=live]")
    page.get_by_role("button", name="Stop").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.get_by_text("./ichat.pyz console")).to_be_visible()
    assert site.program.state("alpha-0") == "ready"
