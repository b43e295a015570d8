"""Tables that are TOML files beside the code that uses them."""

import importlib.resources
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Return the content of the file `name` in a package of the product, such as `ichat.engines`."""
    return tomllib.loads(importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8"))
