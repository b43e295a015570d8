"""YAML read as plain values, bounded: a small file cannot stand for huge values, and nothing in it is run.

The node graph is walked here, not by PyYAML's constructors: these accept equal keys in a table, and have no bounds.
"""

from collections.abc import Iterator
from typing import Any, NoReturn, cast

from ichat.errors import EXIT_USAGE, Exit

TEXT_BYTES_MAX = 1024 * 1024
"""The largest file that is read; PyYAML needs some seconds for it."""
NODES_MAX = 100_000
"""The most values in a file, each counted wherever an anchor repeats it."""
DEPTH_MAX = 64
"""How deep values may be nested."""
_WHOLE_MAX = 2**63
"""TOML's whole numbers end here."""
_MERGE = "tag:yaml.org,2002:merge"
_MAP, _LIST = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"


def read_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text, which messages call `source`: dicts with string keys, lists and scalars.

    Dates stay texts. Raises Exit 64 with a sentence.
    """
    import yaml

    try:
        root = cast("Any", yaml.compose(text, Loader=yaml.SafeLoader))
        return None if root is None else _Walk(source).value_of(root, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}" if mark is not None else ""
        raise Exit(EXIT_USAGE, f"{source} is not valid YAML{place}: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise Exit(EXIT_USAGE, f"{source} is not valid YAML: {str(error).splitlines()[0]}.") from error
    except RecursionError as error:
        raise Exit(EXIT_USAGE, _too_deep(source)) from error


def table_in(value: Any) -> dict[str, Any]:
    """Return a value if it is a table, else an empty table."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def texts_in(value: Any) -> list[str]:
    """Return the items of a list as texts; nothing if the value is no list."""
    return [str(one) for one in cast("list[Any]", value)] if isinstance(value, list) else []


def _too_deep(source: str) -> str:
    return f"{source} has values nested deeper than {DEPTH_MAX} levels, or an anchor inside itself: write it plainly."


class _Walk:
    """A walk through the nodes of a file, which counts them."""

    def __init__(self, source: str) -> None:
        from yaml.constructor import SafeConstructor

        scalars = SafeConstructor()
        self._source, self._nodes = source, 0
        self._scalars: dict[str, Any] = {
            "tag:yaml.org,2002:null": scalars.construct_yaml_null,
            "tag:yaml.org,2002:bool": scalars.construct_yaml_bool,
            "tag:yaml.org,2002:int": scalars.construct_yaml_int,
            "tag:yaml.org,2002:float": scalars.construct_yaml_float,
            "tag:yaml.org,2002:str": self._text_of,
            "tag:yaml.org,2002:timestamp": self._text_of,
            "tag:yaml.org,2002:value": self._text_of,
        }

    def value_of(self, node: Any, depth: int) -> Any:
        """Return the value of a node. Raises Exit 64."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            self._refuse(node, f"the file has more than {NODES_MAX} values, with all that its anchors repeat")
        if depth > DEPTH_MAX:
            raise Exit(EXIT_USAGE, _too_deep(self._source))
        if node.tag == _MAP:
            return self._mapping(node, depth)
        if node.tag == _LIST:
            return [self.value_of(one, depth + 1) for one in node.value]
        construct = self._scalars.get(node.tag)
        if construct is None or not isinstance(node.value, str):
            self._refuse(node, f"the tag {node.tag} is not read: write a plain value")
        value: Any = None
        try:
            value = construct(node)
        except (ValueError, LookupError):  # such as a number of thousands of digits, or `!!bool x`
            self._refuse(node, "this is no number, or does not fit its tag")
        if type(value) is int and not -_WHOLE_MAX <= value < _WHOLE_MAX:
            self._refuse(node, "this number has more than 64 bits")
        return value

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                for table in self._merged(value, depth):
                    merged = table | merged
                continue
            if not isinstance(key.value, str):
                self._refuse(key, "a key is a list or a table: write a text")
            name = self._text_of(key)
            if name in own:
                self._refuse(key, f"{name!r} is there twice in the same table: remove one of them")
            own[name] = self.value_of(value, depth + 1)
        return merged | own

    def _merged(self, node: Any, depth: int) -> Iterator[dict[str, Any]]:
        value = self.value_of(node, depth + 1)
        for table in cast("list[Any]", value) if isinstance(value, list) else [value]:
            if not isinstance(table, dict):
                self._refuse(node, "<< merges tables only")
            yield cast("dict[str, Any]", table)

    def _text_of(self, node: Any) -> str:
        try:
            node.value.encode()
        except UnicodeError:  # an escape of half a character
            self._refuse(node, "this text has a character that Unicode does not have")
        return node.value

    def _refuse(self, node: Any, why: str) -> NoReturn:
        raise Exit(EXIT_USAGE, f"{self._source} cannot be read, line {node.start_mark.line + 1}: {why}.")
