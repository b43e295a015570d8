"""The configuration as operators may see it: every value that is in force, and nothing secret."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from ichat.config.schema import Config, ExternalRoute, Key, ManagedWorkerConfig, Security
from ichat.security.redact import MASK, masked

HASH_CHARACTERS = len("sha256:") + 8
"""How much of a key's hash is shown: enough to identify it, too little to find a weak key by it."""
_MASKED: Mapping[type[Any], Sequence[str]] = {ExternalRoute: ("headers",), ManagedWorkerConfig: ("env",)}
"""Tables that are shown with names only: any value may be a secret, under any name."""
_HASHES: Mapping[type[Any], Sequence[str]] = {Security: ("admin_key_hash",), Key: ("key_hash",)}


def shown_section(section: Any) -> dict[str, Any]:
    """Return a section as JSON can hold it, without its secrets."""
    kind, found = cast("type[Any]", type(section)), dict[str, Any]()
    for field in _fields_of(section):
        value = getattr(section, field.name)
        if field.name in _MASKED.get(kind, ()):
            found[field.name] = dict.fromkeys(value, MASK)
        elif field.name in _HASHES.get(kind, ()):
            found[field.name] = value and f"{value[:HASH_CHARACTERS]}…"
        else:
            found[field.name] = _shown(value)
    return found


def _is_section(value: Any) -> bool:
    return attrs.has(cast("type[Any]", type(value)))


def _fields_of(section: Any) -> "Sequence[attrs.Attribute[Any]]":
    return attrs.fields(cast("type[Any]", type(section)))


def _shown(value: Any) -> Any:
    if _is_section(value):
        return shown_section(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        table = cast("dict[str, Any]", masked(value))
        return {name: _shown(one) for name, one in table.items()}
    return masked(value)


def changed_keys(config: Config) -> list[str]:
    """Return the keys with values other than the defaults. Lists, and tables with free names, count as a whole."""
    found: list[str] = []
    for field in attrs.fields(Config):
        section: Any = getattr(config, field.name)
        default: Any = getattr(Config(), field.name)
        if _is_section(section):
            names = [one.name for one in _fields_of(section)]
            found += [f"{field.name}.{name}" for name in names if getattr(section, name) != getattr(default, name)]
        elif section != default:
            found.append(field.name)
    return found
