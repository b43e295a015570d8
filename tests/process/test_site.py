"""The site of `./build docs`: strict, closed in itself, and searched in both languages, without a server."""

import html.parser
import json
import pathlib
import re
import urllib.parse

import pytest
from playwright.sync_api import expect
from support.browser import chromium
from support.programs import ROOT
from support.releases import made_once, run

PYTHON = ROOT / ".build/docs/bin/python"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
"""The elements that a browser loads something for, and the attribute with its address."""

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .build/docs, which ./build docs makes")


class Reader(html.parser.HTMLParser):
    """The addresses in a page: what it loads, where it links, and its anchors."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif LOADED.get(tag) in found:
            self.loads.append(found[LOADED[tag]])


@pytest.fixture(name="site", scope="module")
def site_fixture(tmp_path_factory):
    def make(place):
        words = ("--strict", "--config-file", ROOT / "docs/site/mkdocs.yml", "--site-dir", place / "site")
        run(PYTHON, "-m", "mkdocs", "build", *words, NO_MKDOCS_2_WARNING="1")

    return made_once(tmp_path_factory, "site", make) / "site"


@pytest.fixture(name="pages", scope="module")
def pages_fixture(site):
    return {page: Reader(page) for page in sorted(site.rglob("*.html"))}


def place_of(page, address):
    """Return the file and the anchor that an address in a page leads to."""
    path, _, anchor = address.partition("#")
    file = (page.parent / urllib.parse.unquote(path)).resolve() if path else page
    return file, urllib.parse.unquote(anchor)


def test_the_site_loads_nothing_from_elsewhere(site, pages):
    """No font, script, style or picture of another server, in the pages and in the styles."""
    for page, found in pages.items():
        assert [address for address in found.loads if not place_of(page, address)[0].is_file()] == [], page
    styles = [address for path in site.rglob("*.css") for address in re.findall(r"url\(([^)]+)\)", path.read_text())]
    assert [address for address in styles if "//" in address and "data:" not in address] == []


def test_every_link_of_the_site_leads_to_a_heading(pages):
    """Each page is reached from the first page of its language by links alone."""
    broken, reached = [], {}
    for page, found in pages.items():
        for address in found.links:
            if "://" in address or address.startswith("mailto:"):
                continue
            file, anchor = place_of(page, address)
            reached.setdefault(page, set()).add(file)
            if file not in pages or anchor not in pages[file].anchors:
                broken.append((page.name, address))
    assert broken == []
    assert len(pages) > 25
    index = next(page for page in pages if page.name == "index.html" and page.parent.name != "zh")
    for start in (index, index.parent / "zh/index.html"):
        seen, ahead = set(), [start]
        while ahead:
            if (page := ahead.pop()) not in seen:
                seen.add(page)
                ahead += reached[page]
        assert set(pages) - seen == set()


def test_every_document_is_in_the_site(site):
    """The words of each document's headings are in the index, as are words of the Chinese pages."""
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    titles = {entry["title"] for entry in index["docs"]}
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in index["docs"])
    for document in ("README.md", "SECURITY.md", "ARCHITECTURE.md", *map(str, pathlib.Path(ROOT).glob("docs/*.md"))):
        headings = re.findall(r"^## (.+)$", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
        shown = [re.sub(r"[`*]", "", heading) for heading in headings]
        missing = [heading for heading in shown if heading not in titles and heading not in text]
        assert missing in ([], ["Three minutes to a model"]), document
    assert "\u200b密钥\u200b" in text, "Chinese text is cut into words"
    assert "circuit breaker" in text


@pytest.mark.browser
def test_the_site_is_searched_from_the_disk(site):
    """In each language a word leads to its page, in a browser that opens the files; it loads nothing else."""
    words = {"index.html": ("nine models", "on-demand.html"), "zh/index.html": ("密钥", "zh/")}
    with chromium() as browser:
        for start, (word, expected) in words.items():
            page, asked = browser.new_page(viewport={"width": 390, "height": 800}), []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            with page.expect_request_finished(lambda request: "search_index" in request.url):
                page.goto((site / start).as_uri())
            assert page.evaluate("document.documentElement.lang")[:2] == ("zh" if "zh" in start else "en")
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            page.locator("label[for=__search]").first.click()
            page.locator("input.md-search__input").fill(word)
            page.locator("input.md-search__input").press("End")  # the search listens to keys
            expect(page.locator(f"a.md-search-result__link[href*='{expected}']").first).to_be_visible()
            assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
            page.close()
