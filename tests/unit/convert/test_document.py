"""The written TOML: every value comes back, and no text of the given file leaves its place."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.convert.document import COLUMNS, Document, comment_of, key_of, value_of
from ichat.errors import Exit

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=10)


@given(TEXTS, VALUES)
def test_every_value_is_read_back(name, value):
    """Whatever characters a key or a text has."""
    assert tomllib.loads(f"{key_of(name)} = {value_of(value)}") == {name: value}


def test_nulls_are_left_out():
    """TOML has none; other numbers than numbers are written as TOML has them."""
    assert value_of({"a": None, "b": [None, 1]}) == "{ b = [1] }"
    assert tomllib.loads(f"a = {value_of(math.inf)}") == {"a": math.inf}


@given(TEXTS, TEXTS, TEXTS)
def test_comments_hold_what_is_given(title, path, sentence):
    """A line feed in a key or a value begins no setting."""
    document = Document(title)
    document.remark(path, sentence)
    document.add("models", {"name": "a"}, [sentence])
    assert tomllib.loads(document.text()) == {"models": [{"name": "a"}]}


def test_comments_are_folded():
    """They are read on a terminal; a long word stays whole."""
    lines = comment_of("word " * 60 + "x" * 150)
    assert all(line.startswith("# word") for line in lines[:-1])
    assert max(map(len, lines[:-1])) <= COLUMNS
    assert lines[-1] == "# " + "x" * 150


def test_refused_parts_become_comments():
    """A table or a key that iChat refuses is left out, with the reason; the rest stays."""
    document = Document("t")
    document.set("timeouts", "drain_s", -1)
    document.set("timeouts", "queue_s", 5)
    document.set("limits", "max_in_flight", 0)
    document.add("external_routes", {"model_name": "a", "api_base": "ftp://x"})
    document.add("external_routes", {"model_name": "b", "api_base": "http://x/v1"})
    document.judge()
    assert tomllib.loads(document.text()) == {
        "timeouts": {"queue_s": 5},
        "external_routes": [{"model_name": "b", "api_base": "http://x/v1"}],
    }
    text = document.text()
    assert "# - timeouts.drain_s: must be from 0 to 1e+09, not -1" in text
    assert "# - limits.max_in_flight: " in text
    assert "# Left out: api_base: must be like https://host/v1" in text
    assert '#api_base = "ftp://x"' in text


def test_contradictions_that_remain_are_said():
    """Two tables that are right alone and not together are the user's own: each problem is named."""
    document = Document("t")
    document.add("models", {"name": "a"})
    document.add("models", {"name": "a"})
    with pytest.raises(Exit, match="'a' is taken"):
        document.judge()


def test_many_places_of_a_list_are_counted():
    """A file with a hundred models does not make a hundred comments of the same words."""
    document = Document("t")
    for number in range(50):
        document.remark(f"model_list[{number}].rpm", "no rate")
    document.remark("model_list[3].tpm", "no rate")
    assert "# - model_list[…].rpm (50 times), model_list[3].tpm: no rate" in document.text()
