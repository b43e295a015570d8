"""The shell of the console in a browser: navigation, theme, keyboard, the operator's key, a gateway that goes away."""

from playwright.sync_api import expect


def test_the_page_opens_and_is_live(site, page):
    """The port in a browser leads to the console, which shows the gateway's workers as they are."""
    page.goto(f"http://127.0.0.1:{site.program.port}/")
    expect(page).to_have_url(site.url)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.locator("main")).to_contain_text("alpha-0")
