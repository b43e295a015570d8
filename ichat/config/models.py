"""`[[models]]`: names that the configuration maps to models, and when a request goes on to another model."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from ichat.config import checks
from ichat.config.strict import Between, checked

NOTHING_SENT = ("unreachable", "not_ready", "queue_full", "circuit")
"""Reasons to go on to the next model that are in force by default: no model has had the request."""
REASONS = (*NOTHING_SENT, "busy", "loading", "5xx", "429", "timeout")
"""All reasons. The last three are answers of external routes, or none, so that these may have worked on the request."""
ANY_TEXT = "*"
"""In a name of `[[models]]`: any characters, or none."""
NAMED_MAX = 64
"""The most targets of a name, and the most fallbacks."""
_FIXED = ("model", "stream", "messages", "prompt", "input", "previous_response_id", "file")
"""The subject of a request: these members are never set or dropped."""
_MEMBER = re.compile(r"[A-Za-z0-9._$-]{1,128}")


def _are_reasons(values: Sequence[str]) -> None:
    unknown = [value for value in values if value not in REASONS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no reason to go on: these are {', '.join(REASONS)}")


def _are_models(values: Sequence[str]) -> None:
    _are_few(values)
    for value in values:
        checks.is_model_name(value)


def _are_few(values: Sequence[object]) -> None:
    if len(values) > NAMED_MAX:
        raise ValueError(f"must be at most {NAMED_MAX}, not {len(values)}")


def _are_not_fixed(names: Collection[str]) -> None:
    for name in names:
        if name in _FIXED:
            raise ValueError(f"{name!r} is the subject of the request, and stays as the client sent it")
        if not _MEMBER.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a member: letters, digits and any of . _ $ -")


def _are_members(values: Mapping[str, Any]) -> None:
    _are_not_fixed(values)
    try:
        json.dumps(values, allow_nan=False)
    except TypeError as error:
        raise ValueError("must hold no dates or times: JSON has none, write them as strings") from error
    except ValueError as error:
        raise ValueError("must hold no inf and no nan: JSON has none") from error


@frozen
class TargetConfig:
    """`[[models]] targets`: a model that a share of the requests goes to."""

    model: str = checked(checks.is_model_name)
    """The model's name."""
    weight: float = checked(Between(0, 1e6), 1.0)
    """Its share of the requests, in proportion to the weights of the others."""


@frozen
class ShadowConfig:
    """`[[models]] shadow`: a model that gets copies of a share of the requests."""

    model: str = checked(checks.is_model_name)
    """The model's name."""
    share: float = checked(Between(0, 1), 1.0)
    """The share of the requests that are copied, from 0 to 1."""


@frozen
class AliasConfig:
    """`[[models]]`: a name in requests, and the models that answer."""

    name: str = checked(checks.is_model_name)
    targets: list[TargetConfig] = checked(_are_few, attrs.Factory(list[TargetConfig]))
    """None: the model of that name itself."""
    fallbacks: list[str] = checked(_are_models, attrs.Factory(list[str]))
    fallback_on: list[str] = checked(_are_reasons, attrs.Factory(lambda: list(NOTHING_SENT)))
    longer: str | None = checked(checks.is_model_name, None)
    shadow: ShadowConfig | None = None
    set: dict[str, Any] = checked(_are_members, attrs.Factory(dict[str, Any]))
    drop: list[str] = checked(_are_not_fixed, attrs.Factory(list[str]))
    hidden: bool = False
    strict_shares: bool = False
    """Whether targets that cannot answer now keep their shares of the requests."""

    @property
    def models(self) -> list[str]:
        """The models that its requests may go to, copies included, in the order in which they are named."""
        named = [target.model for target in self.targets] or [self.name]
        named += self.fallbacks
        named += [self.longer] if self.longer is not None else []
        named += [self.shadow.model] if self.shadow is not None else []
        return list(dict.fromkeys(named))

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for all names that begin and end so."""
        return ANY_TEXT in self.name

    @property
    def is_other(self) -> bool:
        """Whether the name stands for other models than the one of that name."""
        return any(target.model != self.name for target in self.targets)


@frozen
class SwapSetConfig:
    """`[[swap_sets]]`: models of which only some may be loaded at once."""

    members: list[str] = checked(checks.are_model_names)
    """Models of on-demand workers."""
    loaded_max: int = checked(Between(1, 1_000_000), 1)
    """How many of them may be loaded at once."""
