"""The models and other names that clients see: one of them, some that are near to a name, or all of them in steps."""

from collections.abc import Generator, Mapping

from ichat.protocol import ModelCard
from ichat.routing.aliases import Aliases
from ichat.routing.near_names import near_names, nearest
from ichat.routing.registry import Registry
from ichat.texts import NAMED_MAX

Listed = tuple[ModelCard, str]
"""What is known of a model, and its owner."""


def listed_model(name: str, registry: Registry, aliases: Aliases) -> Listed | None:
    """Return the model that is listed by this name, of its own or of the first model there that it leads to."""
    alias = aliases.by_name.get(name)
    if alias is None:
        return registry.model(name)
    found = (registry.model(model) for model in alias.models)
    return None if alias.is_hidden else next((one for one in found if one is not None), None)


def near_models(model: str, registry: Registry, aliases: Aliases, allowed: frozenset[str] | None) -> list[str]:
    """Return some of the names that are listed, the nearest to this one first; all of them if they are few.

    There are at most `NAMED_MAX` and one more, which says that there are others. `allowed` has the names of a key
    that is not for all.
    """

    def is_listed(name: str) -> bool:
        alias = aliases.by_name.get(name)
        if alias is None:
            return registry.lists(name)
        return not alias.is_hidden and any(registry.lists(one) for one in alias.models)

    if allowed is not None:
        found = near_names(allowed).around(model, is_listed)
    else:
        found = registry.names_near(model, is_listed) | aliases.near.around(model, is_listed)
    return nearest(model, found, NAMED_MAX + 1)


def listed_models(registry: Registry, aliases: Aliases) -> Generator[None, None, Mapping[str, Listed]]:
    """Return all models and other names that are listed, in steps of a millisecond or so."""
    return aliases.listed((yield from registry.model_steps()))
