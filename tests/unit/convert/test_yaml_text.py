"""YAML of strangers: bounded, plain, and one sentence for everything else."""

import pytest

from ichat.convert.yaml_text import NODES_MAX, read_yaml
from ichat.errors import Exit

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
)


def refusal_of(text):
    with pytest.raises(Exit) as raised:
        read_yaml(text, "config.yaml")
    assert raised.value.code == 64
    sentence = str(raised.value)
    assert sentence.startswith("config.yaml ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_yaml_becomes_plain_values():
    """Scalars have their types, dates stay texts, and keys are texts."""
    found = read_yaml("a: 1\nb: [1.5, true, ~, 'x', 20_000]\nc: {1: 2024-05-01}\nd: |\n  two\n  lines\n", "x")
    assert found == {"a": 1, "b": [1.5, True, None, "x", 20000], "c": {"1": "2024-05-01"}, "d": "two\nlines\n"}


def test_anchors_and_merges_are_read():
    """A merged table does not replace the keys beside it; of several, the first counts."""
    text = "base: &b {x: 1, y: 2}\nmore: &m {x: 5, z: 6}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, *m]}\n"
    found = read_yaml(text, "x")
    assert found["one"] == {"x": 1, "y": 3}
    assert found["two"] == {"x": 1, "y": 2, "z": 6}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2", "is not valid YAML in line"),
        ("a: b: c", "is not valid YAML in line 1"),
        ("a: *nothing", "undefined alias"),
        ("a: &a [*a]", "an anchor inside itself"),
        ("a: &a {b: *a}", "an anchor inside itself"),
        ("a: " + "[" * 100 + "]" * 100, "nested deeper"),
        ("a: " + "[" * 5000, "nested deeper"),
        (LAUGHS, f"more than {NODES_MAX} values"),
        ("a: 1\na: 2", "line 2: 'a' is there twice in the same table"),
        ("a: !!python/object/apply:os.system [true]", "the tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !secret x", "the tag !secret is not read"),
        ("? [a, b]\n: 1", "a key is a list or a table"),
        ("<<: 3", "<< merges tables only"),
        ("a: 99999999999999999999", "more than 64 bits"),
        ("a: " + "9" * 5000, "this is no number"),
        ("a: !!bool x", "line 1: this is no number, or does not fit its tag"),
        ("a: !!int ''", "does not fit its tag"),
        ("a: !!float ''", "does not fit its tag"),
        ('a: "\\ud800"', "a character that Unicode does not have"),
        ('"\\ud800": a', "a character that Unicode does not have"),
        ("a: \x07", "is not valid YAML"),
        ("a: 1\n---\nb: 1", "is not valid YAML in line 2"),
    ],
)
def test_bad_yaml_is_one_sentence(text, words):
    """It says where, and what to write."""
    assert words in refusal_of(text)
