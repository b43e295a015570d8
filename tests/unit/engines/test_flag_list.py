"""What an engine's parser says of its flags, in the forms that vLLM's and SGLang's parsers have."""

import argparse
import enum
import json

import attrs
import pytest

from ichat.engines.flag_list import TEXT_CHARACTERS_MAX, flags_of


class Level(enum.Enum):
    LOW = 1


def optional(read):
    """Wrap what reads a value as vLLM does for one that may be None."""

    def _optional_type(text):
        return None if text in ("", "None") else read(text)

    return _optional_type


def human_readable_int(text):
    return int(text)


@pytest.fixture
def flags():
    """Return the one flag that a parser with these parameters has, as a dictionary."""

    def make(*names, **parameters):
        parser = argparse.ArgumentParser()
        parser.add_argument_group("Cache").add_argument(*names, **parameters)
        return [attrs.asdict(flag) for flag in flags_of(parser)]

    return make


def test_a_flag_is_described_whole(flags):
    """Its name, its key in a configuration, its other names, its default, and its help with the placeholders filled."""
    assert flags("--max_len", "--context-length", "-l", type=int, default=7, help="At most %(default)s,\n  or 5%%.") == [{
        "name": "--max-len", "key": "max_len", "aliases": ["--context-length", "-l"], "kind": "integer",
        "is_list": False, "choices": [], "default": 7, "help": "At most 7, or 5%.", "group": "Cache",
        "off_names": [], "needs_value": True, "is_hidden": False,
    }]  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"action": "store_true"}, "switch"),
        ({"action": argparse.BooleanOptionalAction}, "switch"),
        ({"type": optional(int)}, "integer"),
        ({"type": human_readable_int}, "integer"),
        ({"type": optional(optional(float))}, "number"),
        ({"type": optional(json.loads)}, "json"),
        ({"type": optional(str)}, "text"),
        ({"type": lambda text: print(text)}, "text"),
        ({}, "text"),
    ],
)
def test_the_kind_of_a_value(flags, parameters, kind):
    """What reads the value says it, also from inside the wrappers of an engine."""
    [flag] = flags("--x", **parameters)
    assert flag["kind"] == kind
    assert flag["aliases"] == []


def test_choices_and_lists(flags):
    """None is no choice that can be written, and a value of an enumeration is written as its value."""
    [flag] = flags("--x", choices=["a", None, Level.LOW], nargs="+", default=Level.LOW)
    assert (flag["choices"], flag["is_list"], flag["default"]) == (["a", "1"], True, 1)


def test_defaults_that_json_cannot_hold(flags):
    """A short one is shown as text, a long one and one that stands for none are left out."""
    for default, shown in ((range(3), "range(0, 3)"), ("y" * 999, None), (argparse.SUPPRESS, None), (None, None)):
        [flag] = flags("--x", default=default)
        assert flag["default"] == shown


def test_how_a_flag_is_written(flags):
    """What turns it off, and whether it may stand alone."""
    [flag] = flags("--x", action=argparse.BooleanOptionalAction)
    assert (flag["off_names"], flag["needs_value"]) == (["--no-x"], False)
    assert not flags("--x", nargs="?")[0]["needs_value"]
    [flag] = flags("--no-x", action="store_true")
    assert (flag["name"], flag["off_names"], flag["is_hidden"]) == ("--no-x", [], True)


def test_hidden_flags_are_marked_and_the_help_flag_left_out(flags):
    """Hidden: what help does not show. Left out: what has no name, and the help flag. A long text is cut off."""
    [flag] = flags("--x", help=argparse.SUPPRESS)
    assert (flag["is_hidden"], flag["help"]) == (True, "")
    assert flags("model", nargs="?") == []
    assert len(flags("--x", help="y" * 99_999)[0]["help"]) == TEXT_CHARACTERS_MAX
    assert flags("--x", help="99 % of it")[0]["help"] == "99 % of it"
    [flag] = flags("--x", help="One\n  line:\n\n- a\n  b\n- c\n\nLast\n")
    assert flag["help"] == "One line:\n\n- a b\n- c\n\nLast"
    parser = argparse.ArgumentParser()
    parser.add_argument("--kept")
    parser.add_argument("--ssl-keyfile")
    found = flags_of(parser, without=["ssl_keyfile"])
    assert [(flag.name, flag.is_hidden) for flag in found] == [("--kept", False), ("--ssl-keyfile", True)]
