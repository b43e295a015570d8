"""Names that the configuration maps to models: which models a request for one goes to. Purely synchronous.

A session stays with its target. When weights change, only sessions move that have to, and only to or from the targets
whose weights have changed: each target draws a number for each session, and the smallest one in relation to its weight
wins (weighted rendezvous hashing).
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import attrs

from ichat.config.aliases import aliases_of, retries_of
from ichat.config.models import AliasConfig, ShadowConfig, TargetConfig
from ichat.config.schema import Config
from ichat.routing.near_names import NearNames

_NUMBERS = 2.0**64
_Card = TypeVar("_Card")


@attrs.frozen(eq=False)
class Alias:
    """A name in requests, and what becomes of a request for it."""

    name: str
    targets: tuple[TargetConfig, ...]
    """The models that share its requests: one at least, all with a weight."""
    fallbacks: tuple[str, ...] = ()
    """The models that are asked where the chosen target cannot answer, in this order."""
    goes_on: frozenset[str] = frozenset()
    """The reasons for which one of those is asked (`config.models.REASONS`)."""
    longer: str | None = None
    """The model for prompts that are too long for the chosen one."""
    shadow: ShadowConfig | None = None
    set: Mapping[str, bytes] = attrs.field(factory=dict[str, bytes])
    """Members of the body that requests get, as JSON."""
    drop: frozenset[str] = frozenset()
    """Members of the body that no model gets."""
    is_hidden: bool = False
    """Whether lists of models leave it out."""
    retries: int = 0
    """How often the same external route is asked again that has failed."""
    _draws: tuple["hashlib.blake2b", ...] = attrs.field(init=False, repr=False)
    """Of each target, what its number for a session is made from."""

    def __attrs_post_init__(self) -> None:
        draws = (hashlib.blake2b(f"{self.name}\0{one.model}\0".encode(), digest_size=8) for one in self.targets)
        object.__setattr__(self, "_draws", tuple(draws))

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose answers its clients may get."""
        longer = () if self.longer is None else (self.longer,)
        return tuple(dict.fromkeys((*(one.model for one in self.targets), *self.fallbacks, *longer)))

    def share_of(self, model: str) -> float | None:
        """Return the share of requests that goes to a target; None if it is none."""
        total = sum(one.weight for one in self.targets)
        return next((one.weight / total for one in self.targets if one.model == model), None)

    def choose(self, session: bytes, draw: Callable[[], float]) -> str:
        """Return the target of a session, or of a request without one by `draw`, which returns from 0 to below 1."""
        targets = self.targets
        if len(targets) == 1:
            return targets[0].model
        if session:
            return min(zip(targets, self._draws, strict=True), key=lambda pair: _rank(*pair, session))[0].model
        at = draw() * sum(one.weight for one in targets)
        for one in targets:
            at -= one.weight
            if at < 0:
                return one.model
        return targets[-1].model


def _rank(target: TargetConfig, draw: "hashlib.blake2b", session: bytes) -> float:
    """Return where a target stands for a session: the one that stands first gets it."""
    drawn = draw.copy()
    drawn.update(session)
    number = (int.from_bytes(drawn.digest(), "big") + 1) / _NUMBERS
    return -math.log(number) / target.weight


@attrs.frozen
class Plan:
    """The models that a request goes to, one after the other until one can answer."""

    targets: tuple[str, ...]
    """The chosen target, then the fallbacks; none twice."""
    alias: Alias


class Aliases:
    """All names that the configuration maps to models."""

    def __init__(self, by_name: Mapping[str, Alias]) -> None:
        self.by_name = by_name
        self.near = NearNames(by_name)
        """All of the names."""

    def __repr__(self) -> str:
        return f"<Aliases {', '.join(self.by_name)}>"

    @classmethod
    def from_config(cls, config: Config) -> "Aliases":
        """Return the names of a configuration that was found right."""
        retries = retries_of(config)
        return cls({one.name: _alias_of(one, retries) for one in aliases_of(config)})

    def plan(self, name: str, session: bytes, draw: Callable[[], float] = random.random) -> Plan | None:
        """Return the plan of a request for a name; None if it is only a model's."""
        alias = self.by_name.get(name)
        if alias is None:
            return None
        return Plan(tuple(dict.fromkeys((alias.choose(session, draw), *alias.fallbacks))), alias)

    def models_of(self, names: Iterable[str]) -> set[str]:
        """Return the models that those of the names lead to which are not only models'."""
        return {model for name in names if name in self.by_name for model in self.by_name[name].models}

    def listed(self, models: Mapping[str, _Card]) -> dict[str, _Card]:
        """Return what is listed of models, by their names, with the names that lead to one of them.

        A name has the entry of the first of its models that is there. A model that it hides is left out.
        """
        found = dict(models)
        for name, alias in self.by_name.items():
            found.pop(name, None)
            first = next((model for model in alias.models if model in models), None)
            if first is not None and not alias.is_hidden:
                found[alias.name] = models[first]
        return found


def _alias_of(given: AliasConfig, retries: int) -> Alias:
    return Alias(
        given.name,
        tuple(one for one in given.targets if one.weight) or (TargetConfig(given.name),),
        tuple(given.fallbacks),
        frozenset(given.fallback_on),
        given.longer,
        given.shadow,
        {name: json.dumps(value).encode() for name, value in given.set.items()},
        frozenset(given.drop),
        given.hidden,
        retries,
    )
