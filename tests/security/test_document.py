"""SECURITY.md says who must not do what, and which test holds it: the table and the tests are compared."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = (ROOT / "SECURITY.md").read_text()
WHO = {
    "anyone", "a page in a browser", "a client", "a joined worker", "an external route", "another user of the machine",
    "code of a model",
}  # fmt: skip
"""Everybody the document speaks of who is not trusted with all."""
_REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows(name):
    """Return the cells of each row of the table between the markers of this name."""
    _, start, rest = DOCUMENT.partition(f"<!-- {name} -->")
    table, end, _ = rest.partition(f"<!-- /{name} -->")
    assert start, name
    assert end, name
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def names_in(path):
    """Return the names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("row", rows("promises"), ids=lambda row: row[1][:40])
def test_every_promise_names_tests_that_exist(row):
    """A promise without a test, or with one that was renamed, is none."""
    who, _, held_by = row
    assert who in WHO
    found = _REFERENCE.findall(held_by)
    assert found
    for path, name in found:
        assert name in names_in(path) if name else names_in(path), (path, name)


def test_every_attack_that_is_tested_is_in_the_table():
    """A file of attacks belongs to a promise, and everybody in the table of roles has one."""
    promises = rows("promises")
    named = {path for row in promises for path, _ in _REFERENCE.findall(row[2])}
    here = pathlib.Path(__file__)
    files = {str(path.relative_to(ROOT)) for path in here.parent.glob("test_*.py") if path != here}
    assert files <= named
    assert {row[0] for row in promises} == WHO
    assert {row[0] for row in rows("roles")} >= WHO
