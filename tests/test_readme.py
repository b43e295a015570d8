"""README.md and README.zh.md say the same: what is not prose is equal, section by section."""

import itertools
import pathlib
import re

import pytest

from ichat.admin.openapi import document

ROOT = pathlib.Path(__file__).parent.parent
ENGLISH, CHINESE = "README.md", "README.zh.md"
_COMMENT = re.compile(r" *# .*$", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)*(?![\w-])")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def sections_of(name):
    """Return the sections of a file, what stands above the first heading left out."""
    return re.split(r"^(?=#{1,6} )", text_of(name), flags=re.MULTILINE)[1:]


def blocks_of(section):
    """Return the blocks of code, without their comments."""
    fenced = re.findall(r"^```.*?^```$", section, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
    return [_COMMENT.sub("", block) for block in fenced], indented


def prose_of(section):
    """Return a section without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?:^ {4}.*\n)+", "", text, flags=re.MULTILINE)


def links_of(section):
    return sorted(re.findall(r"\]\(([^)]+)\)", section))


def table_of(section):
    """Return the number of cells in each row of the tables."""
    return [line.count("|") for line in section.splitlines() if line.startswith("|")]


def numbers_of(section):
    """Return the numbers of the prose, as they are written with digits."""
    return set(_NUMBER.findall(_SPAN.sub("", re.sub(r"\]\([^)]+\)", "]", prose_of(section))).replace("\u00a0", "")))


def test_each_names_the_other_in_its_first_line():
    """A reader of one language finds the other."""
    assert f"]({CHINESE})" in text_of(ENGLISH).partition("\n")[0]
    assert f"]({ENGLISH})" in text_of(CHINESE).partition("\n")[0]


def test_the_sections_are_the_same():
    """Both have the same number of headings, with the same ranks in the same order."""
    ranks = [[section.partition(" ")[0] for section in sections_of(name)] for name in (ENGLISH, CHINESE)]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("kind", ["blocks", "commands, routes and keys", "links", "tables", "numbers", "emphasis"])
def test_what_is_not_prose_is_the_same(kind):
    """Each section has the same code, but for its comments; the same names, links, tables and numbers."""
    part_of = {
        "blocks": blocks_of,
        "commands, routes and keys": lambda section: set(_SPAN.findall(prose_of(section))),
        "links": links_of,
        "tables": table_of,
        "numbers": numbers_of,
        "emphasis": lambda section: prose_of(section).count("**"),
    }[kind]
    for english, chinese in itertools.zip_longest(sections_of(ENGLISH), sections_of(CHINESE), fillvalue=""):
        title = english.partition("\n")[0]
        assert (title, part_of(chinese)) == (title, part_of(english))


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_the_tables_have_the_routes_of_the_control_plane(name):
    """What the OpenAPI document has of usage and administration; routes below one of them may be in its row."""
    routes = {
        "/".join(path.split("/")[:4]) for path in document()["paths"] if path.startswith(("/v1/admin", "/v1/usage"))
    }
    told = text_of(name)
    assert [route for route in sorted(routes) if f"{route}`" not in told and f"{route}/" not in told] == []
