"""README.md and README.zh.md say the same: all but the prose is equal, section by section.

The reference has every route of the control plane, command, state and exit code.
"""

import itertools
import pathlib
import re
import tomllib
import typing

import pytest

from ichat import errors
from ichat.admin.openapi import document
from ichat.cli.commands import COMMANDS
from ichat.fleet.worker_record import State

ROOT = pathlib.Path(__file__).parent.parent
ENGLISH, CHINESE, REFERENCE = "README.md", "README.zh.md", "docs/reference.md"
LINES_MAX = 200
ROLES = {"gateway", "worker", "key", "doctor", "convert", "estimate", "config schema", "completion bash"}
"""The commands that need no running gateway, as the reference writes them."""
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
    return [[_COMMENT.sub("", block) for block in blocks] for blocks in (fenced, indented)]


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
def test_both_readmes_have_the_same_code_links_and_numbers(kind):
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
def test_a_readme_is_short(name):
    """A visitor reads it to the end; recipes and reference have their own files."""
    assert len(text_of(name).splitlines()) <= LINES_MAX


def test_the_clients_page_has_the_versions_that_are_tested():
    """The page of clients names the versions that pyproject.toml pins for the tests."""
    project = tomllib.loads(text_of("pyproject.toml"))
    groups, agents = project["dependency-groups"], project["tool"]["ichat"]["agents"]
    pins = dict(one.split("==") for name in ("test", "clients", "clients-llama-index") for one in groups[name])
    pins |= {name: agent["version"] for name, agent in agents.items()}
    shown = dict(re.findall(r"^\| \[([^\]]+)\]\([^)]+\) ([\d.]+) \|", text_of("docs/clients.md"), re.MULTILINE))
    packages = {
        "OpenAI SDK": "openai",
        "LangChain": "langchain-openai",
        "LlamaIndex": "llama-index-llms-openai-like",
        "pydantic-ai": "pydantic-ai-slim[openai]",
        "Claude Code": "@anthropic-ai/claude-code-linux-x64",
        "Codex": "@openai/codex",
    }
    tested = {name: ".".join(pins[package].split(".")[:2]) for name, package in packages.items()}
    assert {name: shown.get(name) for name in packages} == tested


def reference_section(title):
    """Return a section of the reference without its heading."""
    return text_of(REFERENCE).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title):
    """Return the first cells of the rows of a section's tables, with the table's head."""
    return re.findall(r"^\| ([^|]+?) \|", reference_section(title), re.MULTILINE)


def test_the_reference_has_the_routes_of_the_control_plane():
    """All routes of usage and administration in the OpenAPI document; a row may also hold the routes below its own."""
    routes = {
        "/".join(path.split("/")[:4]) for path in document()["paths"] if path.startswith(("/v1/admin", "/v1/usage"))
    }
    text = reference_section("Routes")
    assert [route for route in sorted(routes) if f"{route}`" not in text and f"{route}/" not in text] == []


def test_the_reference_has_every_command():
    """The operators' commands, and those that need no gateway."""
    spans = _SPAN.findall(reference_section("Commands"))
    words = {span.removeprefix("./ichat.pyz ").split(" [")[0] for span in spans}
    heads = {word.split()[0] for word in words if word}
    assert COMMANDS.keys() - heads == set()
    assert [role for role in ROLES if not any(f"ichat.pyz {role}" in span for span in spans)] == []


def test_the_reference_has_every_state():
    """A row for each state that a worker can have; a worker that is `gone` is in no list."""
    states = {name for part in typing.get_args(State) for name in (typing.get_args(part) or (part,))}
    found = {name for cell in first_cells("States of a worker") for name in _SPAN.findall(cell)}
    assert found == states - {"gone"}


def test_the_reference_has_every_exit_code():
    """The codes that a service manager sees, and that of Ctrl-C."""
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)}
    found = {int(cell) for cell in first_cells("Exit codes") if cell.isdigit()}
    assert codes - found == set()
