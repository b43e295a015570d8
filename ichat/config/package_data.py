"""Tables that are files beside the code that uses them."""

import importlib.resources
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


parse_toml = tomllib.loads
"""Return the tables in a text. Raises ValueError, and RecursionError if they are nested too deep."""


def read_text(package: str, name: str) -> str:
    """Return the text of the file `name` in a package of the product, such as `ichat.engines`."""
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Return the content of a TOML file; see `read_text`."""
    return parse_toml(read_text(package, name))
