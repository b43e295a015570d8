"""The pages of the site, made from the Markdown of the repository by the map `pages.toml`.

Nothing here knows MkDocs: documents come in, and the Markdown of pages goes out, with every link pointing at the page
that has the section now.
"""

import collections
import pathlib
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MAIN = "en"
"""The language whose pages have no folder of their own."""
TITLE = "page"
"""The anchor of each page's title, which no heading has: a page may have a section of the same name."""
NO_CHINESE = '<p class="no-translation" lang="zh" data-search-exclude>本页没有中文版。</p>'
EXAMPLES = "Examples"
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_LINK = re.compile(r"(?:\[([\w./-]+\.md))?(\]\()([^)\s]+)(\))")
"""A link, with its text if that is the name of a document."""
_BETWEEN_HAN = re.compile(
    r"(?<=[\u3001-\u30ff\u4e00-\u9fff\uff01-\uff60])\n(?=[\u4e00-\u9fff\uff08])"
    r"|(?<=[\u3001\u3002\uff01-\uff1f])\n(?=\w|\*\*|`(?!``))"
)
"""The end of a line in Chinese prose, which browsers show as a blank."""
_SPAN = re.compile(r"`[^`\n]+`")
_FENCE = {".py": "python", ".toml": "toml", ".example": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


class SiteError(Exception):
    """The map and the documents do not fit; its text says what to do."""


@dataclass(frozen=True)
class SitePage:
    """A page: where it is, what it is called, and what stands on it."""

    language: str
    group: str
    path: str
    title: str = ""
    sections: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The page's file in the site's source."""
        return f"{self.path}.md" if self.language == MAIN else f"{self.language}/{self.path}.md"


@dataclass
class MadeSite:
    """The pages with their Markdown, in order, and the files that they show."""

    pages: list[SitePage]
    texts: dict[str, str] = field(default_factory=dict)
    """Markdown by the page's `uri`."""
    titles: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, pathlib.Path] = field(default_factory=dict)
    """The files that pages show, by their place in the site."""

    def translation(self, page: SitePage, language: str) -> str | None:
        """Return the `uri` of the same page in a language, or None."""
        return next((one.uri for one in self.pages if (one.language, one.path) == (language, page.path)), None)


def slug_of(title: str, _separator: str = "-") -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is prose: outside fenced and indented code."""
    is_code, is_indented, is_blank = False, False, True
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
            yield line, False
            continue
        is_indented = (line.startswith("    ") and (is_indented or is_blank)) or (is_indented and not line.strip())
        is_blank = not line.strip()
        yield line, not is_code and not is_indented


def headings_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the ranks and titles of the headings."""
    for line, is_prose in lines_of(text):
        if is_prose and (found := _HEADING.match(line)):
            yield len(found[1]), found[2]


def sections_of(text: str) -> dict[str, str]:
    """Return a document's sections by the anchors of their headings; that of "" is its beginning, from its title on."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line, is_prose in lines_of(text):
        heading = _HEADING.match(line) if is_prose else None
        if heading and len(heading[1]) == 1:
            found[""].clear()  # a line above the title leads to the other language, which the site's head does
        elif heading and len(heading[1]) == 2:
            current = slug_of(heading[2])
            found[current] = []
        found[current].append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def read_map(path: pathlib.Path) -> list[SitePage]:
    """Return the pages of the map, in order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        SitePage(
            language,
            group["group"],
            page["path"],
            page.get("title", ""),
            tuple(page.get("sections", ())),
            tuple(page.get("files", ())),
        )
        for language, groups in tables.items()
        for group in groups
        for page in group["pages"]
    ]


class SiteMaker:
    """Reads the documents that the map names, and writes the pages."""

    def __init__(self, root: pathlib.Path, pages: Iterable[SitePage]) -> None:
        self._root = root
        self._site = MadeSite(list(pages))
        self._documents: dict[str, dict[str, str]] = {}
        self._places: dict[tuple[str, str], str] = {}
        """Where each heading of a document is: a page's `uri` and an anchor. That of "" is the document's beginning."""

    def make(self) -> MadeSite:
        """Return the site. Raises `SiteError` where a section is on no page or on two, or a link leads nowhere."""
        made = [(page, self._parts_of(page)) for page in self._site.pages]
        self._check_sections(made)
        for page, parts in made:
            self._place(page, parts)
        for page, parts in made:
            self._write(page, parts)
        return self._site

    def _document(self, name: str) -> dict[str, str]:
        if name not in self._documents:
            path = self._root / name
            if not path.is_file():
                raise SiteError(f"pages.toml names {name}, which is no file: remove it there.")
            self._documents[name] = sections_of(path.read_text(encoding="utf-8"))
        return self._documents[name]

    def _parts_of(self, page: SitePage) -> list[tuple[str, str]]:
        """Return the documents and texts on a page, in order."""
        named = {one for other in self._site.pages for one in other.sections}
        parts: list[tuple[str, str]] = []
        for section in page.sections:
            document, _, slug = section.partition("#")
            known = self._document(document)
            if slug not in known:
                raise SiteError(f"pages.toml names {section}, and {document} has no such heading: rename it there.")
            if slug:
                parts.append((document, known[slug]))
            else:
                parts += [(document, text) for name, text in known.items() if f"{document}#{name}" not in named]
        return parts

    def _check_sections(self, made: list[tuple[SitePage, list[tuple[str, str]]]]) -> None:
        counts = collections.Counter(part for _, parts in made for part in parts)
        for (document, text), count in counts.items():
            if count > 1:
                raise SiteError(f"{text.splitlines()[0]!r} of {document} is on {count} pages of pages.toml: leave one.")
        for document, sections in self._documents.items():
            for text in sections.values():
                if text and (document, text) not in counts:
                    first = text.splitlines()[0]
                    raise SiteError(f"{first!r} of {document} is on no page: name {document} in pages.toml.")

    def _title_of(self, page: SitePage, parts: list[tuple[str, str]]) -> str:
        if page.title:
            return page.title
        for _, text in parts:
            for _, title in headings_of(text):
                return title
        raise SiteError(f"the page {page.path} has no sections in pages.toml: name them, or remove the page.")

    def _shown_by_title(self, page: SitePage, parts: list[tuple[str, str]]) -> str:
        """Return the section whose heading is the page's title or stands in its place: the first or only, or none."""
        text = parts[0][1] if parts else ""
        is_named_so = text.startswith(f"## {self._site.titles[page.uri]}\n")
        return text if text.startswith("## ") and (len(parts) == 1 or is_named_so) else ""

    def _place(self, page: SitePage, parts: list[tuple[str, str]]) -> None:
        """Note where the headings of a page are. Raises `SiteError` where two documents give one anchor."""
        owners: dict[str, str] = {}
        self._site.titles[page.uri] = self._title_of(page, parts)
        for document, text in parts:
            for rank, heading in headings_of(text):
                slug = slug_of(heading)
                is_title = rank == 1 or (rank == 2 and text == self._shown_by_title(page, parts))
                anchor = page.uri if is_title else f"{page.uri}#{slug}"
                if not is_title and owners.setdefault(slug, document) != document:
                    raise SiteError(
                        f"{page.uri} has the heading {heading!r} of {owners[slug]} and of {document}: rename one of"
                        " them, or put it on another page in pages.toml."
                    )
                self._places.setdefault((document, slug), anchor)
                if rank == 1:
                    self._places.setdefault((document, ""), page.uri)
        for file in page.files:
            self._places.setdefault((file, ""), page.uri)

    def _write(self, page: SitePage, parts: list[tuple[str, str]]) -> None:
        lines = [f"# {self._site.titles[page.uri]} {{ #{TITLE} }}", ""]
        if page.language == MAIN and self._site.translation(page, "zh") is None:
            lines += [NO_CHINESE, ""]
        by_title = self._shown_by_title(page, parts)
        raised = 1 if by_title and len(parts) == 1 else 0
        for document, text in parts:
            for line, is_prose in lines_of(text):
                heading = _HEADING.match(line) if is_prose else None
                if heading and (len(heading[1]) == 1 or (len(heading[1]) == 2 and text == by_title)):
                    continue  # the title stands above
                shown = line[raised:] if heading else line
                lines.append(self._links(page, document, shown) if is_prose else shown)
            lines.append("")
        for file in page.files:
            lines += shown_file(self._root / file, is_alone=len(page.files) == 1)
        self._site.texts[page.uri] = _BETWEEN_HAN.sub("", "\n".join(lines))

    def _links(self, page: SitePage, document: str, line: str) -> str:
        spans = [(found.start(), found.end()) for found in _SPAN.finditer(line)]

        def changed(found: re.Match[str]) -> str:
            if any(start <= found.start() < end for start, end in spans):
                return found[0]
            target = self._target(page, document, found[3])
            uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.uri), target))
            text = f"[{self._site.titles.get(uri, found[1])}" if found[1] else ""
            return f"{text}{found[2]}{target}{found[4]}"

        return _LINK.sub(changed, line)

    def _target(self, page: SitePage, document: str, link: str) -> str:
        """Return where a link of a document leads in the site, from a page."""
        if "://" in link or link.startswith("mailto:"):
            return link
        name, _, slug = link.partition("#")
        path = (self._root / document).parent / name if name else self._root / document
        try:
            target = path.resolve().relative_to(self._root.resolve()).as_posix()
        except ValueError:
            raise SiteError(f"{document} links to {link}, which is outside the repository.") from None
        if not path.exists():
            raise SiteError(f"{document} links to {link}, which does not exist.")
        depth = "../" * page.uri.count("/")
        if path.suffix in (".png", ".svg", ".jpg"):
            self._site.pictures[f"pictures/{path.name}"] = path
            return f"{depth}pictures/{path.name}"
        if (target, slug) not in self._places:
            if path.suffix == ".md":
                raise SiteError(f"{document} links to {link}, and the site has no such heading: see pages.toml.")
            self._add_example(target)
        return depth + self._places[target, slug]

    def _add_example(self, target: str) -> None:
        """Make a page of a file or a folder that a document links to: it shows the files as they are."""
        path = self._root / target
        inside = sorted(one for one in path.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
        names = tuple(one.relative_to(self._root).as_posix() for one in inside) if path.is_dir() else (target,)
        page = SitePage(MAIN, EXAMPLES, target, path.name, files=names)
        self._site.pages.append(page)
        self._place(page, [])
        self._places[target, ""] = page.uri
        self._write(page, [])


def shown_file(path: pathlib.Path, *, is_alone: bool) -> list[str]:
    """Return the lines of Markdown that show a file as it is, below its name unless it is the only file."""
    text = path.read_text(encoding="utf-8").rstrip()
    fence = "`" * max(4, *(len(run) + 1 for run in re.findall(r"`+", text)), 4)
    heading = [] if is_alone else [f"## {path.name}", ""]
    return [*heading, f"{fence}{_FENCE.get(path.suffix, 'text')}", text, fence, ""]
