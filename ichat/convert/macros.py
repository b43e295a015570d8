"""llama-swap's macros: `${NAME}` in any value, `${PORT}` and `${MODEL_ID}` of a model, `${env.NAME}`.

A macro may hold others, but expanding has a bound: values that double with each macro do not fill the memory.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import attrs

from ichat.errors import EXIT_USAGE, Exit

CHARACTERS_MAX = 8 * 1024 * 1024
"""How much text the macros of a file may make in all."""
ROUNDS_MAX = 64
"""How deep macros may hold others."""
_MACRO = re.compile(r"\$\{([a-zA-Z0-9_-]+)\}")
_ENVIRONMENT = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRETS = ("apiKeys", "apiKey", "env")
"""Settings in which the variables of the environment stay names."""
SECRET = "apiKey"  # noqa: S105
"""A key for a text that is treated so, too."""


def variable_of(text: str) -> str | None:
    """Return the variable of the environment that is a text, or a part of it; None: there is none."""
    found = _ENVIRONMENT.search(text)
    return None if found is None else found[1]


@attrs.define
class _Shared:
    """What all macros of a file have together."""

    ports: Iterator[int]
    characters: int = 0
    """How much text was made."""


@attrs.define
class Macros:
    """The macros that hold in a part of the file."""

    values: dict[str, Any]
    _shared: _Shared
    port: int | None = None
    """The value of ${PORT}, if the model's command has it."""
    unset: set[str] = attrs.field(factory=set[str])
    """Names without a value."""
    read: set[str] = attrs.field(factory=set[str])
    """Variables of the environment that were read."""

    @classmethod
    def of(cls, given: Mapping[str, Any], start_port: int) -> "Macros":
        """Return the macros of the whole file."""
        return cls(dict(given), _Shared(iter(range(start_port, 65536))))

    def for_model(self, name: str, given: Mapping[str, Any], command: str) -> "Macros":
        """Return the macros of a model; its command may ask for a port, itself or by a macro."""
        found = Macros({"MODEL_ID": name, **self.values, **given}, self._shared)
        if "${PORT}" in str(found.expand(command, SECRET)):
            found.port = next(self._shared.ports, None)
            found.values["PORT"] = found.port
        found.unset.clear()
        return found

    def expand(self, value: Any, key: str = "") -> Any:
        """Return a value of the file, which a key has, with its macros replaced.

        Raises Exit 64 if the texts become too long.
        """
        if isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            return {str(self.expand(name)): self.expand(one, name) for name, one in table.items()}
        if isinstance(value, list):
            return [self.expand(one, key) for one in cast("list[Any]", value)]
        return self._text(value, key) if isinstance(value, str) else value

    def _text(self, text: str, key: str) -> Any:
        for _ in range(ROUNDS_MAX):
            found = _MACRO.findall(text)
            whole = _MACRO.fullmatch(text)
            if whole is not None and not isinstance(self.values.get(whole[1], ""), str):
                return self.values[whole[1]]
            self._count(len(text) + sum(len(str(self.values.get(name, ""))) for name in found))
            replaced = _MACRO.sub(lambda match: str(self.values.get(match[1], match[0])), text)
            if replaced == text:
                break
            text = replaced
        self.unset.update(name for name in _MACRO.findall(text) if name != "PID")
        return text if key in _SECRETS else _ENVIRONMENT.sub(self._from_environment, text)

    def _count(self, characters: int) -> None:
        self._shared.characters += characters
        if self._shared.characters > CHARACTERS_MAX:
            raise Exit(EXIT_USAGE, f"Its macros make more than {CHARACTERS_MAX} characters: write them plainly.")

    def _from_environment(self, found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        (self.unset if value is None else self.read).add(found[1])
        return found[0] if value is None else value
