"""axe-core finds no violation on any page, in the light and in the dark scheme, and in Chinese."""

import pathlib

import pytest
from playwright.sync_api import expect
from support.console_state import PAGES

AXE = pathlib.Path(__file__).parents[2] / ".build/console-check/node_modules/axe-core/axe.min.js"
RUN = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.flatMap((one) => one.nodes.map((node) =>
    `${one.id}: ${node.target.join(" ")}: ${node.failureSummary.split("\\n").slice(1).join(" ").trim()}`));
}"""


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there: ./build check fetches it")
@pytest.mark.parametrize(("scheme", "locale"), [("light", "en-US"), ("dark", "en-US"), ("light", "zh-CN")])
def test_no_page_has_a_violation(open_page, page, scheme):
    """Names, roles, contrast and order, by the rules of axe-core."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    found = []
    for path in PAGES:
        open_page(path)
        expect(page.locator("main h1, main h3").first).to_be_visible()
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE.read_text())
        found += [f"{path}: {one}" for one in page.evaluate(RUN)]
    assert not found, "\n".join(found)
