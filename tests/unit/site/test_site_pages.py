"""Pages of the site: each section of a document is on one page, and links follow it there."""

import importlib.util
import sys

import pytest
from support.programs import ROOT


def load_site_pages():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs/site/site_pages.py")
    module = sys.modules["site_pages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = load_site_pages()
DOCUMENTS = {
    "README.md": "**English** · [中文](README.zh.md)\n\n# Project\n\nSee [names](docs/guide.md#names).\n",
    "README.zh.md": "[English](README.md)\n\n# 项目\n\n第一句。\n第二句，见[指南](docs/guide.md)。\n`x` 是\n代码。\n\n- 一。\n- 二。\n",
    "docs/guide.md": """# Guide

It has [keys](#keys), and [a file](../examples/proxy.conf).

## Names

A name, and what it is not: `[keys](#keys)`.

    # no heading
    [keys](#keys)

### Patterns

## Keys

```toml
## no heading
```
""",
    "examples/proxy.conf": "listen 80;\n```\n",
}
MAP = """
[[en]]
group = "Start"
pages = [
    { path = "index", sections = ["README.md"] },
    { path = "names", sections = ["docs/guide.md#names"] },
    { path = "guide", sections = ["docs/guide.md"] },
]
[[zh]]
group = "入门"
pages = [{ path = "index", sections = ["README.zh.md"] }]
"""


@pytest.fixture(name="make")
def make_fixture(tmp_path):
    """Make a site of the documents, some of them changed, by a map that may be changed, too."""

    def make(*replaced, **documents):
        text = MAP
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        for name, content in {**DOCUMENTS, **documents}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "pages.toml").write_text(text)
        return site_pages.SiteMaker(tmp_path, site_pages.read_map(tmp_path / "pages.toml")).make()

    return make


def test_a_link_follows_its_section(make):
    """A section of another page, of this page, of a document and of another language; code is left as it is."""
    texts = make().texts
    assert "See [names](names.md)." in texts["index.md"]
    assert "[keys](guide.md#keys), and [a file](examples/proxy.conf.md)" in texts["guide.md"]
    assert "见[指南](../guide.md)" in texts["zh/index.md"]
    assert "`[keys](#keys)`" in texts["names.md"]
    assert "    # no heading\n    [keys](#keys)" in texts["names.md"]


def test_a_page_of_one_section_has_its_heading_as_title(make):
    """The headings below it rise with it; those of code do not."""
    site = make()
    assert site.titles["names.md"] == "Names"
    assert [line for line in site.texts["names.md"].splitlines() if line.startswith("#")] == [
        "# Names { #page }",
        "## Patterns",
    ]
    assert "## no heading" in site.texts["guide.md"]
    assert "## Names" not in site.texts["guide.md"]


def test_a_page_without_chinese_says_so(make):
    """In Chinese; a page in both languages does not."""
    found = {uri for uri, text in make().texts.items() if "没有中文版" in text}
    assert found == {"names.md", "guide.md", "examples/proxy.conf.md"}


def test_chinese_sentences_stand_without_blanks(make):
    """The end of a line in Chinese is no blank, as browsers would show it."""
    text = make().texts["zh/index.md"]
    assert "第一句。第二句" in text
    assert "。`x` 是代码。\n\n- 一。\n- 二。" in text


def test_a_document_is_called_by_its_title(make):
    """A link whose text is the name of a document has the page's title in its place."""
    texts = make(**{"README.md": "# Project\n\nSee [docs/guide.md](docs/guide.md).\n"}).texts
    assert "See [Guide](guide.md)." in texts["index.md"]


def test_a_title_is_not_said_twice(make):
    """The heading of a page's first section is left out if it is the page's title, and links to it lead to the page."""
    more = 'title = "Names", sections = ["docs/guide.md#names", "docs/guide.md#keys"]'
    texts = make(('sections = ["docs/guide.md#names"]', more)).texts
    headings = [line for line in texts["names.md"].splitlines() if line.startswith("#")]
    assert headings == ["# Names { #page }", "### Patterns", "## Keys", "## no heading"]
    assert "See [names](names.md)." in texts["index.md"]
    assert "[keys](names.md#keys)" in texts["guide.md"]


def test_a_file_that_is_linked_is_shown_whole(make):
    """Its fence is longer than any fence in it."""
    assert "````text\nlisten 80;\n```\n````" in make().texts["examples/proxy.conf.md"]


@pytest.mark.parametrize(
    ("replaced", "documents", "message"),
    [
        ([("guide.md#names", "guide.md#nouns")], {}, "docs/guide.md has no such heading"),
        ([("docs/guide.md#names", "docs/gone.md")], {}, "docs/gone.md, which is no file"),
        ([('["README.md"]', '["README.md", "docs/guide.md#names"]')], {}, "'## Names' of docs/guide.md is on 2 pages"),
        (
            [('{ path = "index", sections = ["README.md"] }', '{ path = "index" }')],
            {},
            "the page index has no sections",
        ),
        ([('["docs/guide.md"]', '["docs/guide.md#keys"]')], {}, "'# Guide' of docs/guide.md is on no page"),
        ([], {"README.md": "# Project\n\n[x](docs/guide.md#nothing)\n"}, "docs/guide.md#nothing, and the site has no"),
        ([], {"README.md": "# Project\n\n[x](docs/nothing.md)\n"}, "docs/nothing.md, which does not exist"),
        ([], {"README.md": "# Project\n\n[x](../other.md)\n"}, "outside the repository"),
        (
            [('["README.md"]', '["README.md", "docs/guide.md#keys"]')],
            {"README.md": "# Project\n\n## Keys\n"},
            "the heading 'Keys' of README.md and of docs/guide.md",
        ),
    ],
)
def test_a_map_that_does_not_fit_is_refused(make, replaced, documents, message):
    """The sentence names the document and the section."""
    with pytest.raises(site_pages.SiteError, match=message):
        make(*replaced, **documents)
