"""axe-core finds no violation on any page, in the light and in the dark scheme."""

import pathlib

import pytest
from playwright.sync_api import expect
from support.console_state import busy_cluster, busy_requests, finished, told

AXE = pathlib.Path(__file__).parents[2] / ".build/console-check/node_modules/axe-core/axe.min.js"
PAGES = (
    "overview", "workers", "workers/llama-70b-0", "workers/llama-70b-0?tab=log", "workers/llama-70b-0?tab=arguments",
    "workers/gemma-27b-0", "models", "machines", "requests", "requests/req-0001", "log", "playground", "launch",
    "config", "keys", "usage", "nothing/of/the/kind",
)  # fmt: skip
RUN = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.flatMap((one) => one.nodes.map((node) =>
    `${one.id}: ${node.target.join(" ")}: ${node.failureSummary.split("\\n").slice(1).join(" ").trim()}`));
}"""


@pytest.fixture
def open_page(make_site, page):
    """Open pages of a busy cluster: `open_page("workers")`."""
    site = make_site()
    told(page, ["state", busy_cluster()], ["requests", busy_requests()])
    details = {"gpu_ids": [2, 3], "args": {"max_model_len": 8192, "seed": 0}, "changed_args": ["max_model_len"]}
    page.route("**/v1/admin/workers/*", lambda route: route.fulfill(json=details))
    done = {"requests": [finished(1), finished(2, status=502, error="upstream_failed")], "since": 1e9, "kept_max": 500}
    page.route("**/v1/admin/requests/finished*", lambda route: route.fulfill(json=done))
    body = 'id: 1\ndata: {"seq": 1, "time": "2026-01-01T10:00:00.000Z", "line": "\\u001b[31mERROR\\u001b[0m \\u001b[36mx"}\n\n'
    page.route("**/v1/logs/**", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    return lambda path: site.open(page, path)


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there: ./build check fetches it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
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
