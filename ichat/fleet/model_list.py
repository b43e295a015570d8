"""The models and other names that clients see: one of them, some that are near to a name, or all of them in steps."""

from collections.abc import Generator, Mapping

from ichat.fleet.fleet_view import DirectoryView
from ichat.fleet.model_directory import ModelDirectory
from ichat.protocol.messages import ModelCard
from ichat.routing.aliases import Alias, Aliases
from ichat.routing.near_names import near_names, nearest
from ichat.texts import NAMED_MAX, plain_model

Listed = tuple[ModelCard, str]
"""The card of a model, and its owner."""


def listed_model(name: str, directory: ModelDirectory, aliases: Aliases) -> Listed | None:
    """Return the model that is listed by this name, of its own or of the first model there that it leads to.

    A name that only a pattern matches is in no list, and yet found.
    """
    alias = aliases.by_name.get(aliases.name_for(name, directory.has))
    if alias is not None and name == alias.name and alias.is_pattern:
        return None
    if alias is None:
        return directory.model(name)
    found = next((one for model in alias.models if (one := directory.model(model)) is not None), None)
    return None if alias.is_hidden or found is None else _with_owner(found, alias, directory)


def _with_owner(found: Listed, alias: Alias, directory: ModelDirectory) -> Listed:
    """Return an entry of a name with the owner of the target that gets most of its requests, ready or not."""
    main = max(alias.targets, key=lambda one: one.weight)
    return found[0], directory.owner_of(main.model) or found[1]


def near_models(model: str, directory: DirectoryView, aliases: Aliases, allowed: frozenset[str] | None) -> list[str]:
    """Return some of the names that are listed, the nearest to this name first; all of them if they are few.

    There are at most `NAMED_MAX` + 1 names: the last says that there are others. `allowed` has the names of a key
    that is not for all.
    """

    def is_listed(name: str) -> bool:
        alias = aliases.by_name.get(name)
        if alias is None:
            return directory.lists(name)
        return not alias.is_hidden and any(directory.lists(one) for one in alias.models)

    found = set[str]()
    for asked in {model, plain_model(model)}:
        if allowed is not None:
            found |= near_names(allowed).around(asked, is_listed)
        else:
            found |= directory.names_near(asked, is_listed) | aliases.near.around(asked, is_listed)
    return nearest(model, found, NAMED_MAX + 1)


def listed_models(directory: ModelDirectory, aliases: Aliases) -> Generator[None, None, Mapping[str, Listed]]:
    """Return all models and other names that are listed, in steps of a millisecond or so."""
    found = aliases.listed((yield from directory.model_steps()))
    yield
    for name, alias in aliases.by_name.items():
        if name in found:
            found[name] = _with_owner(found[name], alias, directory)
    return found
