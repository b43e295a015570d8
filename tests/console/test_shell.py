"""The shell of the console in a browser: navigation, theme, keyboard, the operator's key, a gateway that goes away."""

import hashlib
import re

import pytest
from playwright.sync_api import TimeoutError as TooLong
from playwright.sync_api import expect
from support.console_state import busy_cluster, busy_requests, gpu, machine, model, request, told, worker
from support.deployments import free_port

KEY = "an-operators-key"
CLIENT = "sk-client-0123456789"
PAGES = ("overview", "workers", "workers/llama-70b-0", "models", "machines", "requests", "orders")
ROUTE = '[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:9/v1"\n'
WIDTHS = (360, 768, 1280, 1920)


def test_the_page_opens_and_is_live(site, page):
    """The port in a browser leads to the console, which shows the gateway's workers as they are."""
    page.goto(f"http://127.0.0.1:{site.program.port}/")
    expect(page).to_have_url(site.url)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.locator("main")).to_contain_text("alpha-0")


def test_the_uptime_goes_on(make_site, page):
    """It is that of now, also on a page to which nothing happens."""
    state = {**busy_cluster(), "gateway": {"id": "1", "version": "0.1.0", "pid": 1, "uptime_s": 12.0}}
    told(page, ["state", state])
    make_site().open(page, "launch")
    first = page.locator("[data-connection]").inner_text()
    page.wait_for_function("before => document.querySelector('[data-connection]').innerText !== before", arg=first)


def test_every_page_is_in_the_navigation_and_has_its_title(site, page):
    """Each link of the navigation leads to a page that shows its own heading, and is marked as where one is."""
    site.open(page)
    for link in page.locator("nav a").all():
        link.click()
        expect(page.locator("main h1")).to_have_count(1)
        expect(link).to_have_attribute("aria-current", "page")
        expect(page).to_have_title(re.compile(" · iChat$"))


def test_an_unknown_page_is_said(site, page):
    """An address that leads nowhere says so and leads back."""
    site.open(page, "nothing/of/the/kind")
    expect(page.locator("main")).to_contain_text("There is no such page")
    page.click("main a")
    expect(page.locator("main h1")).to_have_text("Overview")


def test_the_theme_is_the_systems_until_one_is_chosen(site, page):
    """Dark and light differ, the choice stays with the browser, and the key `t` chooses as well."""
    ground = "getComputedStyle(document.body).backgroundColor"
    site.open(page)
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.get_by_label("Dark or light").click()
    assert page.evaluate(ground) == light
    page.reload()
    page.wait_for_selector("[data-connection=live]")
    assert page.evaluate(ground) == light
    page.keyboard.press("t")
    assert page.evaluate(ground) == dark


def test_the_keyboard_is_enough(site, page):
    """Letters lead to pages, `/` finds, arrows and Enter walk through a table, `?` lists them, Escape closes."""
    site.open(page)
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("Find on this page")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("g")
    page.keyboard.press("w")
    expect(page.locator("main h1")).to_have_text("Workers")
    page.keyboard.press("/")
    page.keyboard.type("gt")
    expect(page.locator("main [type=search]")).to_have_value("gt")
    expect(page.locator("main h1")).to_have_text("Workers")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.press("Delete")
    links = page.locator("tbody .row-link")
    page.get_by_role("button", name="Restarts").focus()
    page.keyboard.press("Tab")
    expect(links.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("beta-0")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    tab = page.get_by_role("tab", name="Now")
    tab.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Log")).to_have_attribute("aria-selected", "true")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_window(site, page, scheme):
    """From a telephone to a large screen nothing sticks out, and everything that can be pressed has a name."""
    page.emulate_media(color_scheme=scheme)
    told(page, ["state", busy_cluster()], ["requests", busy_requests()])
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={}))
    for path in PAGES:
        site.open(page, path)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            # a drawing follows the window by a frame
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        for control in page.locator("button:visible, a:visible, input:visible, select:visible").all():
            name = control.evaluate(
                "one => one.ariaLabel || one.innerText || one.title || [...(one.labels ?? [])].map(l => l.innerText).join()"
            )
            assert name.strip(), (path, control.evaluate("one => one.outerHTML"))


LONG = "a-name-that-never-ends".ljust(110, "x")
KEY_OF_LONG_NAME = {
    "name": LONG, "state": "active", "source": "api", "models": [LONG, LONG], "expires_at": None, "last_used_at": 1.0,
    "limits": {"tokens_per_month": None}, "usage_now": {"in_flight": 0, "tokens_this_month": 1},
}  # fmt: skip

ORDER_OF_LONG_NAME = {
    "worker_id": f"{LONG}-0", "model_name": LONG, "launch": 1, "made_at": 1.0, "expires_at": 1.0, "fetched_at": 1.0,
    "fetched_from": LONG, "ended": "",
}  # fmt: skip

TOO_WIDE = """() => [
  ...[...document.querySelectorAll("td")].filter((one) => innerWidth > 620 && one.offsetWidth > Math.max(400, innerWidth / 3)),
  ...[...document.querySelectorAll(".card, h1, .lead")].filter((one) => one.scrollWidth > one.clientWidth + 1),
  ...(document.documentElement.scrollWidth > innerWidth ? [document.body] : []),
].map((one) => one.outerHTML.slice(0, 300))"""


def test_long_names_push_nothing_out(site, page):
    """Of workers, models, machines, engines and keys: what else is in a row, or on a card, stays in sight."""
    state = busy_cluster()
    more = {"machine": LONG, "backend": LONG, "model_names": [LONG], "model_name": LONG}
    state["workers"] += [worker(f"{LONG}-0", **more), worker(f"{LONG}-1", "failed", cause=LONG, **more)]
    state["models"] += [model(LONG), model(f"{LONG}-2", 0)]
    state["machines"] += [machine(LONG, [f"{LONG}-0", f"{LONG}-1"], [gpu(0, 128, {f"{LONG}-0": 127})])]
    targets = [{"model": LONG, "weight": 1}, {"model": f"{LONG}-2", "weight": 1}]
    state["aliases"].append({"name": LONG, "targets": targets, "fallbacks": [LONG], "longer": LONG, "shadow": None})
    asked = [request(1, worker=f"{LONG}-0", key=LONG, model=LONG, alias=LONG, client=LONG)]
    told(page, ["state", state], ["requests", {"total": 1, "requests": asked}])
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json={"model_path": LONG, "log_file": LONG}))
    orders = [ORDER_OF_LONG_NAME, {**ORDER_OF_LONG_NAME, "launch": 2, "ended": LONG}]
    page.route("**/v1/admin/orders", lambda route: route.fulfill(json={"orders": orders}))
    page.route("**/v1/admin/keys", lambda route: route.fulfill(json={"keys_needed": True, "keys": [KEY_OF_LONG_NAME]}))
    for path in (*PAGES, f"workers/{LONG}-1", "keys"):
        site.open(page, path)
        expect(page.locator("main")).to_contain_text(LONG)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            try:  # a drawing follows the window by a frame
                page.wait_for_function(f"() => !({TOO_WIDE})().length")
            except TooLong:
                raise AssertionError((path, width, page.evaluate(TOO_WIDE))) from None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_words_of_a_button_can_be_read(site, page, scheme):
    """White on the button's blue has a contrast of 4.5 to 1 or more (WCAG 1.4.3)."""
    page.emulate_media(color_scheme=scheme)
    site.open(page, "workers")
    style = "one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"
    colours = page.get_by_role("link", name="Launch").last.evaluate(style)
    lights = [luminance(map(int, re.findall(r"\d+", colour))) for colour in colours]
    assert (max(lights) + 0.05) / (min(lights) + 0.05) >= 4.5, colours


def luminance(colour):
    """Return the relative luminance of a colour in sRGB, as WCAG defines it."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_narrow_screen_has_the_navigation_behind_a_button(site, page):
    """The button shows the pages, and a choice hides them again."""
    page.set_viewport_size({"width": 360, "height": 740})
    site.open(page)
    expect(page.locator("nav")).to_be_hidden()
    page.get_by_role("button", name="Pages").click()
    page.locator("nav").get_by_role("link", name="Machines").click()
    expect(page.locator("main h1")).to_have_text("Machines & GPUs")
    expect(page.locator("nav")).to_be_hidden()


def keyed(make_site):
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, CLIENT)]
    return make_site(
        '[security]\nadmin_key_hash = "sha256:{}"\n[[security.keys]]\nname = "a"\nkey_hash = "sha256:{}"\n'.format(
            *hashes
        )
    )


def test_the_operators_key_is_asked_for_and_stays_in_the_tab(make_site, page, context):
    """A wrong key is told so, a client's, too, and the right one opens; another tab asks again, and `Lock` forgets it."""
    context.watched.allowed += ["401", "403"]
    site = keyed(make_site)
    page.goto(site.url)
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    page.get_by_label("Key", exact=True).fill(CLIENT)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("This key is for something else")
    page.get_by_label("Key", exact=True).fill(f"\u200b{KEY}\u201d")  # as a document may have it
    page.get_by_role("button", name="Open").click()
    expect(page.locator("[data-connection=live]")).to_be_visible()
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
    page.reload()
    expect(page.locator("[data-connection=live]")).to_be_visible()
    other = context.new_page()
    other.goto(site.url)
    expect(other.get_by_label("Key", exact=True)).to_be_visible()
    page.get_by_role("button", name="Lock").click()
    expect(page.get_by_label("Key", exact=True)).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_without_the_link_the_page_says_how_to_get_it(make_site, browser):
    """Where clients have keys and operators none, the console is for the gateway's own user, who has a link to it."""
    digest = hashlib.sha256(b"x").hexdigest()
    site = make_site(f'[[security.keys]]\nname = "a"\nkey_hash = "sha256:{digest}"\n')
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.url)
    expect(page.locator("main")).to_contain_text("open the link that ./ichat.pyz console prints")
    page.goto(f"{site.url}#key={site.secret}")
    page.wait_for_selector("[data-connection=live]")
    context.close()


def test_a_gateway_that_goes_away_is_said_and_found_again(make_site, page, context):
    """What was shown stays, with a sentence; the page connects by itself once the gateway is back."""
    context.watched.allowed += ["ERR_", "net::"]
    port = free_port()
    site = make_site(ROUTE, port=port)
    site.open(page)
    expect(page.locator("main")).to_contain_text("No problems")
    site.program.stop()
    expect(page.get_by_role("alert")).to_contain_text("No connection to the gateway")
    expect(page.locator("main h1")).to_be_visible()
    expect(page.locator("[data-connection=lost]")).to_contain_text("as of")
    expect(page.locator("main")).not_to_contain_text("No problems")
    make_site(port=port)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("file", ["pages/models.js", "app.js", "vendor/hooks.mjs", "style.css"])
def test_a_file_that_was_not_loaded_is_loaded_again(site, page, context, file):
    """The page is opened while the network changes; it says so, and comes by itself."""
    context.watched.allowed.append("net::ERR_FAILED")
    lost = []

    def lose(route):
        if not lost:
            lost.append(route.request.url)
            route.abort()
        else:
            route.continue_()

    page.route(f"**/{file}", lose)
    site.open(page)
    expect(page.locator("body")).to_have_css("margin", "0px")
    assert lost


def test_a_file_that_never_loads_is_named_in_the_end(site, page, context):
    """Something blocks it: the page ends its attempts, and says which file it is."""
    context.watched.allowed.append("net::ERR_FAILED")
    page.route("**/pages/models.js", lambda route: route.abort())
    page.goto(site.url)
    expect(page.locator("#app")).to_contain_text("app.js, or a file that it needs, cannot be loaded")


def test_the_policy_lets_no_other_script_in(site, page, context):
    """An inline script, markup from text, and a request to elsewhere are stopped by the browser itself."""
    context.watched.allowed += ["Content Security Policy", "TrustedHTML", "TrustedScript", "This document requires"]
    site.open(page)
    refused = page.evaluate("""async () => {
      const found = [];
      addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
      const script = document.createElement("script");
      try { script.textContent = "window.ran = 1"; document.head.append(script); } catch { found.push("script text"); }
      try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = 1'>"); } catch { found.push("html"); }
      try { await fetch("http://127.0.0.1:9/"); } catch { found.push("fetch"); }
      await new Promise((resolve) => setTimeout(resolve, 50));
      return [found, window.ran ?? null];
    }""")
    assert refused[1] is None
    assert "html" in refused[0]
    assert "connect-src" in refused[0]
