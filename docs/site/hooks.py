"""MkDocs' hooks: the pages that `site_pages.py` makes, and each page in the language of its reader."""

import pathlib
import re

import site_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure import StructureItem
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from mkdocs.utils.templates import TemplateContext

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHIM = ROOT / ".build/docs/iframe-worker.js"
"""What `./build docs` fetches, so that the search works in pages that are opened from a disk."""
IN_ENGLISH = "以下文档为英文"
_ALTERNATE = re.compile(r'\s*<link rel="alternate"[^>]*>')
_made: dict[str, site_pages.MadeSite] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and have them in the navigation: a group for each language, for its groups of pages."""
    try:
        _made["site"] = site = site_pages.SiteMaker(ROOT, site_pages.read_map(HERE / "pages.toml")).make()
    except site_pages.SiteError as error:
        raise PluginError(str(error)) from None
    languages: dict[str, dict[str, list[dict[str, str]]]] = {}
    for page in site.pages:
        groups = languages.setdefault(page.language, {})
        groups.setdefault(page.group, []).append({site.titles[page.uri]: page.uri})
    config.nav = [{name: [{group: pages} for group, pages in groups.items()]} for name, groups in languages.items()]
    config.theme.static_templates.clear()  # 404.html and sitemap.xml need the site's address
    config.mdx_configs["toc"]["slugify"] = site_pages.slug_of
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, their pictures, and what the search needs in a page without a server."""
    files.remove(files.src_uris["sitemap.xml"])
    for uri, text in _made["site"].texts.items():
        files.append(File.generated(config, uri, content=text))
    for uri, path in _made["site"].pictures.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, config.theme["logo"], abs_src_path=str(ROOT / "ichat/console/icon.svg")))
    files.append(File.generated(config, config.extra["polyfills"][0], abs_src_path=str(SHIM)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Let no page of a language lead on to another language."""
    for before, after in zip(nav.pages, nav.pages[1:], strict=False):
        if language_of(before) != language_of(after):
            before.next_page = after.previous_page = None
    return nav


def on_page_context(context: TemplateContext, page: Page, config: MkDocsConfig, nav: Navigation) -> TemplateContext:
    """Show a page in its language, with the pages of that language beside it, and lead to its translation."""
    site, language = _made["site"], language_of(page)
    config.theme["language"] = language
    shown = next(one for one in site.pages if one.uri == page.file.src_uri)
    for other in config.extra["alternate"]:
        translation = site.translation(shown, other["lang"])
        other["link"] = translation.removesuffix(".md") + ".html" if translation else first_page_of(other["lang"])
    config.extra["homepage"] = first_page_of(language)
    groups = {item.title: item.children for item in nav.items if isinstance(item, Section)}
    items: list[StructureItem] = list(groups[language])
    if language != site_pages.MAIN:
        translated = {one.path for one in site.pages if one.language == language}
        others = [one for group in groups[site_pages.MAIN] for one in group.children or ()]
        items.append(Section(IN_ENGLISH, [one for one in others if path_of(one) not in translated]))
    context["nav"] = Navigation(items, nav.pages)
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leave out the head's links to translations: the theme would ask for sitemaps beside them."""
    return _ALTERNATE.sub("", output)


def language_of(page: Page) -> str:
    """Return the language of a page."""
    return next(one.language for one in _made["site"].pages if one.uri == page.file.src_uri)


def first_page_of(language: str) -> str:
    """Return the address of a language's first page."""
    return "index.html" if language == site_pages.MAIN else f"{language}/index.html"


def path_of(item: StructureItem) -> str:
    """Return a page's place without its ending."""
    return item.file.src_uri.removesuffix(".md") if isinstance(item, Page) else ""
