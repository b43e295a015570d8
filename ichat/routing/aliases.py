"""Names that the configuration maps to models: which models get requests for a name. Purely synchronous.

A session stays with its target. When weights change, sessions move only as necessary, and only to or from the targets
whose weights have changed. Each target draws a number for each session, and the smallest in relation to its weight
wins (weighted rendezvous hashing). Where a target cannot answer, only its own sessions move, and return later.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from ichat.config.aliases import aliases_of, retries_of
from ichat.config.models import ANY_TEXT, AliasConfig, ShadowConfig, TargetConfig
from ichat.config.schema import Config
from ichat.routing.availability import Prospect
from ichat.routing.near_names import NearNames

_NUMBERS = 2.0**64
_Card = TypeVar("_Card")


@attrs.frozen(eq=False)
class Alias:
    """A name in requests, and what becomes of a request for it."""

    name: str
    targets: tuple[TargetConfig, ...]
    """The models that share its requests: never empty, all with a weight."""
    fallbacks: tuple[str, ...] = ()
    """The models that are asked where the chosen target cannot answer, in this order."""
    goes_on: frozenset[str] = frozenset()
    """The reasons for which one of those is asked (`config.models.REASONS`)."""
    longer: str | None = None
    """The model for prompts that are too long for the chosen model."""
    shadow: ShadowConfig | None = None
    set: Mapping[str, bytes] = attrs.field(factory=dict[str, bytes])
    """Members of the body that requests get, as JSON."""
    drop: frozenset[str] = frozenset()
    """Members of the body that no model gets."""
    is_hidden: bool = False
    """Whether lists of models leave it out."""
    retries: int = 0
    """How often an external route that has failed is asked again."""
    strict_shares: bool = False
    """Whether targets that cannot answer now keep their shares of the requests."""
    _draws: Mapping[str, "hashlib.blake2b"] = attrs.field(init=False, repr=False)
    """The hash from which each target's number for a session is made."""

    def __attrs_post_init__(self) -> None:
        models = (one.model for one in self.targets)
        draws = {model: hashlib.blake2b(f"{self.name}\0{model}\0".encode(), digest_size=8) for model in models}
        object.__setattr__(self, "_draws", draws)

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for all names that begin and end as its own."""
        return ANY_TEXT in self.name

    @property
    def models(self) -> tuple[str, ...]:
        """The models that may answer its clients."""
        longer = () if self.longer is None else (self.longer,)
        return tuple(dict.fromkeys((*(one.model for one in self.targets), *self.fallbacks, *longer)))

    def counted(self, prospect_of: Callable[[str], Prospect]) -> Sequence[TargetConfig]:
        """Return the targets that share the requests now: those that can answer soonest, or all if none can."""
        targets = self.targets
        if self.strict_shares or len(targets) == 1:
            return targets
        prospects = [prospect_of(one.model) for one in targets]
        best = min(prospects)
        return [one for one, prospect in zip(targets, prospects, strict=True) if prospect == best]

    def share_of(self, model: str, counted: Sequence[TargetConfig]) -> float | None:
        """Return the share of requests that goes to a target while these are counted; None if it is no target."""
        if all(one.model != model for one in self.targets):
            return None
        total = sum(one.weight for one in counted)
        return next((one.weight / total for one in counted if one.model == model), 0.0)

    def choose(self, session: bytes, draw: Callable[[], float], targets: Sequence[TargetConfig]) -> str:
        """Return which of these targets a session belongs to, or a request without a session.

        The latter is decided by `draw`, which returns from 0 to below 1.
        """
        if len(targets) == 1:
            return targets[0].model
        if session:
            return min(targets, key=lambda one: _rank(one, self._draws[one.model], session)).model
        at = draw() * sum(one.weight for one in targets)
        for one in targets:
            at -= one.weight
            if at < 0:
                return one.model
        return targets[-1].model

    def plan(self, chosen: str) -> "Plan":
        """Return the plan of a request that this target has been chosen for."""
        return Plan(tuple(dict.fromkeys((chosen, *self.fallbacks))), self)


def _rank(target: TargetConfig, draw: "hashlib.blake2b", session: bytes) -> float:
    """Return the rank of a target for a session: the target with the lowest rank gets it."""
    drawn = draw.copy()
    drawn.update(session)
    number = (int.from_bytes(drawn.digest(), "big") + 1) / _NUMBERS
    return -math.log(number) / target.weight


@attrs.frozen
class Plan:
    """The models that a request goes to in turn, until a model can answer."""

    targets: tuple[str, ...]
    """The chosen target, then the fallbacks; none twice."""
    alias: Alias


class NamePatterns:
    """Some names, each with a single `*`, which stands for any text.

    The pattern with the most other characters wins, among equals that with the longer beginning. To look up a name
    costs some lookups in dictionaries, however many patterns there are.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._by_start: dict[str, dict[str, str]] = {}
        """The patterns by their beginnings, and then by their ends."""
        for pattern in patterns:
            start, _, end = pattern.partition(ANY_TEXT)
            self._by_start.setdefault(start, {})[end] = pattern
        self._starts = sorted({len(start) for start in self._by_start}, reverse=True)
        """How long their beginnings are."""
        self._ends = {
            start: sorted({len(end) for end in by_end}, reverse=True) for start, by_end in self._by_start.items()
        }
        """How long their ends are, for each beginning."""

    def __repr__(self) -> str:
        return f"<NamePatterns {sum(map(len, self._by_start.values()))}>"

    def find(self, name: str) -> str | None:
        """Return the pattern that matches a name; None if none does."""
        found, literals = None, -1
        for length in self._starts:
            start = name[:length]
            by_end = self._by_start.get(start) if length <= len(name) else None
            if by_end is None:
                continue
            for end_length in self._ends[start]:
                at = len(name) - end_length
                if at >= length and name[at:] in by_end:
                    if length + end_length > literals:
                        found, literals = by_end[name[at:]], length + end_length
                    break
        return found


class Aliases:
    """All names that the configuration maps to models."""

    def __init__(self, by_name: Mapping[str, Alias]) -> None:
        self.by_name = by_name
        self.near = NearNames(by_name)
        """All of the names."""
        self._patterns = NamePatterns(name for name, alias in by_name.items() if alias.is_pattern)
        self._has_patterns = any(alias.is_pattern for alias in by_name.values())

    def __repr__(self) -> str:
        return f"<Aliases {', '.join(self.by_name)}>"

    @classmethod
    def from_config(cls, config: Config) -> "Aliases":
        """Return the names of a configuration that was found right."""
        retries = retries_of(config)
        return cls({one.name: _alias_of(one, retries) for one in aliases_of(config)})

    def name_for(self, model: str, is_model: Callable[[str], bool]) -> str:
        """Return the name that counts for a request: the model's as it was sent, or the pattern that matches it.

        A name without a `*`, and a model that there is (`is_model`), have precedence over all patterns.
        """
        if not self._has_patterns or model in self.by_name or is_model(model):
            return model
        return self._patterns.find(model) or model

    def plan(
        self,
        name: str,
        session: bytes,
        prospect_of: Callable[[str], Prospect],
        draw: Callable[[], float] = random.random,
    ) -> Plan | None:
        """Return the plan of a request for a name; None if it is only a model's.

        `prospect_of` returns when a model can answer.
        """
        alias = self.by_name.get(name)
        if alias is None:
            return None
        chosen = alias.choose(session, draw, alias.counted(prospect_of))
        return alias.plan(chosen)

    def models_of(self, names: Iterable[str]) -> set[str]:
        """Return the models to which these names lead; a name that is only a model's leads nowhere."""
        return {model for name in names if name in self.by_name for model in self.by_name[name].models}

    def listed(self, models: Mapping[str, _Card]) -> dict[str, _Card]:
        """Return the list of models by their names, with the names that lead to a listed model.

        A name has the entry of the first of its models that is there. A model that it hides is left out, and so is a
        pattern: a client could not ask for it by name.
        """
        found = dict(models)
        for name, alias in self.by_name.items():
            found.pop(name, None)
            first = next((model for model in alias.models if model in models), None)
            if first is not None and not alias.is_hidden and not alias.is_pattern:
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
        given.strict_shares,
    )
