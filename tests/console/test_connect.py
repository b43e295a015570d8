"""The dialog that connects a client to a name: the texts for known clients, and a key that is made for them."""

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
"""
NAMES = """
[[models]]
name = "claude-*"
targets = [{ model = "alpha" }]
"""
HOSTILE = "'; rm -rf ~; '<img src=x onerror=alert(1)>\u202e" + "x" * 10_000


@pytest.fixture
def keyed_site(make_site, context):
    """A gateway with a worker, a name and keys; the tab has the operators' key."""
    made = make_site(SECURITY + NAMES + WORKER.format(name="alpha", more=""))
    made.program.key = ADMIN
    made.program.wait_until_ready("alpha-0")
    context.add_init_script(f'location.protocol === "http:" && sessionStorage.setItem("ichat.admin_key", "{ADMIN}")')
    return made


def recipe(page):
    return page.locator("[data-recipe] pre")


def test_a_client_is_connected_with_the_keyboard(keyed_site, page):
    """The texts have this gateway's address and the name; a key that is made there is in them, works, and is for it."""
    keyed_site.open(page, "models")
    page.get_by_role("link", name="Connect a client to alpha").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Connect a client to alpha")
    expect(recipe(page)).to_contain_text(
        f'base_url="http://127.0.0.1:{keyed_site.program.port}/v1", api_key="YOUR-KEY"'
    )
    dialog.get_by_role("tab", name="OpenAI SDK").focus()
    for name, text in (
        ("claude", "claude --model 'alpha'"),
        ("codex", 'wire_api = "responses"'),
        ("webui", "OPENAI_API_BASE_URL='http"),
        ("continue", 'model: "alpha"'),
    ):
        page.keyboard.press("ArrowRight")
        expect(page.locator("[data-recipe]")).to_have_attribute("data-recipe", name)
        expect(recipe(page)).to_contain_text(text)
        expect(recipe(page)).to_contain_text(f"http://127.0.0.1:{keyed_site.program.port}")
    dialog.get_by_role("button", name="Create a key").focus()
    page.keyboard.press("Enter")
    expect(recipe(page)).not_to_contain_text("YOUR-KEY")
    secret = recipe(page).text_content().split('apiKey: "')[1].split('"')[0]
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    keyed_site.program.key = secret
    assert keyed_site.program.ask("/v1/chat/completions", {"model": "alpha", "messages": []})[0] == 200
    keyed_site.program.key = ADMIN
    [made] = [one for one in keyed_site.program.get("/v1/admin/keys")[1]["keys"] if one["source"] == "api"]
    assert (made["models"], made["expires_at"] is None) == (["alpha"], False)
    dialog.get_by_role("button", name="Done").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert secret not in page.content()


def test_a_pattern_says_what_to_write_for_it(keyed_site, page):
    """Claude Code's own names fit the pattern; elsewhere the reader writes a name."""
    keyed_site.open(page, "models?connect=claude-*")
    expect(page.get_by_role("dialog")).to_contain_text("Every name that fits claude-* is answered")
    expect(recipe(page)).to_contain_text('model="claude-NAME"')
    expect(page.get_by_label("only for this name")).to_have_count(0)


def test_where_clients_need_no_key_none_is_made(site, page):
    """The texts are complete at once, and the dialog has an address."""
    site.open(page, "models?connect=beta")
    expect(recipe(page)).to_contain_text('api_key="none"')
    expect(page.get_by_role("button", name="Create a key")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.url.endswith("#/models")


def test_a_hostile_name_is_a_text_in_every_recipe(site, page):
    """It is quoted as each client's language wants it, and widens nothing."""
    site.open(page)
    page.evaluate("name => { location.hash = '#/models?' + new URLSearchParams({connect: name}) }", HOSTILE)
    dialog = page.get_by_role("dialog")
    for name in ("OpenAI SDK", "Claude Code", "Codex", "Open WebUI", "Continue"):
        dialog.get_by_role("tab", name=name).click()
        assert "\u202e" not in recipe(page).text_content()
    dialog.get_by_role("tab", name="Claude Code").click()
    expect(recipe(page)).to_contain_text("$'\\'; rm -rf ~; \\'<img")
    assert page.locator("dialog img").count() == 0
    assert dialog.evaluate("one => one.scrollWidth <= one.clientWidth")
