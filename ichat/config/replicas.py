"""The bounds of a number of copies, as the file has them (`replicas`)."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ichat.config.strict import shown

REPLICAS_MAX = 64
"""The most copies of a managed worker."""
REPLICAS_SCHEMA: Mapping[str, Any] = {"type": ["integer", "object"], "minimum": 1, "maximum": REPLICAS_MAX}
"""How JSON schema says that a single number is allowed, too."""


@frozen
class Replicas:
    """The bounds of a number of copies. A single number in the file is both bounds."""

    min: int
    """The fewest copies; 0: the model is loaded on demand."""
    max: int
    """The most copies."""

    @property
    def wanted(self) -> int:
        """The number of workers that the gateway has for the table; a single worker may be cold."""
        return max(1, self.min)

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min} to {self.max}"


def are_replicas(value: Replicas) -> None:
    """Raise ValueError unless this is a number of copies that may run."""
    if value.max < value.min:
        raise ValueError(f"max ({value.max}) is below min ({value.min})")
    if value.min < 0 or value.max < 1:
        raise ValueError("begins at 1; { min = 0, max = 1 } loads the model on demand")
    if value.max > REPLICAS_MAX:
        raise ValueError(f"max may be at most {REPLICAS_MAX}, not {value.max}")
    if value.min == 0 and value.max > 1:
        raise ValueError(f"with min = 0, max must be 1, not {value.max}: a single copy is loaded on demand")


def replicas_of(value: Any) -> Replicas | None:
    """Return the bounds that a single number stands for; None: it is a table. Raises ValueError for anything else."""
    if type(value) is int:
        return Replicas(value, value)
    if type(value) is not dict:
        raise ValueError(f"must be a whole number, or {{ min = 1, max = 4 }}, not {shown(value)}")
    return None
