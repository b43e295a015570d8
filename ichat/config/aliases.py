"""The names of a configuration: `[[models]]`, and LiteLLM's settings that say the same in other words."""

from collections.abc import Iterator
from typing import Any, cast

import attrs

from ichat.config.litellm import first_given, table_of
from ichat.config.models import ANY_TEXT, NOTHING_SENT, AliasConfig, TargetConfig
from ichat.config.schema import Config

ANY_FAILURE = [*NOTHING_SENT, "5xx", "429", "timeout"]
"""The failures after which LiteLLM's `fallbacks` go on."""


def aliases_of(config: Config) -> list[AliasConfig]:
    """Return all names: the names of `[[models]]`, then names that only LiteLLM's settings have."""
    return [*config.models, *_in_litellms_words(config).values()]


def retries_of(config: Config) -> int:
    """Return how often a failed external route is asked again: LiteLLM's `num_retries`."""
    return first_given(config.router_settings.num_retries, config.litellm_settings.num_retries) or 0


def _in_litellms_words(config: Config) -> dict[str, AliasConfig]:
    """Return LiteLLM's settings as the tables that would say the same."""
    router, general = config.router_settings, config.litellm_settings
    found: dict[str, AliasConfig] = {}
    for name, given in router.model_group_alias.items():
        table = cast("dict[str, Any]", given if isinstance(given, dict) else {"model": given})
        target = TargetConfig(table["model"])
        found[name] = AliasConfig(name, [target], fallback_on=ANY_FAILURE, hidden=table.get("hidden", False))
    for name, models in table_of(first_given(router.fallbacks, general.fallbacks)).items():
        known = found.get(name, AliasConfig(name, fallback_on=ANY_FAILURE))
        found[name] = attrs.evolve(known, fallbacks=models)
    longer = table_of(first_given(router.context_window_fallbacks, general.context_window_fallbacks))
    for name, models in longer.items():
        found[name] = attrs.evolve(found.get(name, AliasConfig(name, fallback_on=ANY_FAILURE)), longer=models[0])
    if retries_of(config):
        mine = {one.name for one in config.models}
        for route in config.external_routes:
            if route.model_name not in mine:
                found.setdefault(route.model_name, AliasConfig(route.model_name, fallback_on=ANY_FAILURE))
    return found


def contradictions_of_aliases(config: Config) -> Iterator[str]:
    """Yield the contradictions between names, each with its path."""
    found = _in_litellms_words(config)
    others = {one.name for one in (*config.models, *found.values()) if one.is_other}
    taken: set[str] = set()
    for index, alias in enumerate(config.models):
        where = f"models[{index}]"
        if alias.name in taken:
            yield f"{where}.name: {alias.name!r} is taken"
        elif alias.name in found:
            yield f"{where}.name: litellm_settings or router_settings have {alias.name!r} too: name it once"
        taken.add(alias.name)
        yield from _contradictions_of(alias, where, others)
    patterns = {one.name for one in (*config.models, *found.values()) if one.is_pattern}
    yield from _contradictions_of_patterns(config, patterns)
    for alias in found.values():
        yield from _contradictions_of(alias, f"router_settings or litellm_settings, {alias.name}", others)


def _contradictions_of(alias: AliasConfig, where: str, others: set[str]) -> Iterator[str]:
    models = [target.model for target in alias.targets]
    if alias.name.count(ANY_TEXT) > 1:
        yield f"{where}.name: {alias.name!r} has several *: a single * stands for any characters"
    if alias.is_pattern and not alias.targets:
        yield f"{where}: {alias.name!r} stands for many names, so that it needs targets"
    if both := sorted(alias.set.keys() & set(alias.drop)):
        yield f"{where}: {', '.join(both)} is in set and in drop: a member that is set replaces the client's"
    if alias.targets and not any(target.weight for target in alias.targets):
        yield f"{where}.targets: at least a single weight must be more than 0"
    if len(set(models)) < len(models):
        yield f"{where}.targets: name each model once"
    for model in alias.models:
        if ANY_TEXT in model and model != alias.name:
            yield f"{where}: {model!r} has a *, and a request goes to one model: only names of [[models]] have it"
        if model in others and model != alias.name:
            yield f"{where}: {model!r} is a name for other models: name one of those"


def _contradictions_of_patterns(config: Config, patterns: set[str]) -> Iterator[str]:
    """Yield the places of each `*` that is in no name of `[[models]]`, and so would match nothing."""
    routes = [(f"external_routes[{index}]", "route", one) for index, one in enumerate(config.external_routes)]
    servers = [(f"registered_servers[{index}]", "server", one) for index, one in enumerate(config.registered_servers)]
    for where, kind, one in (*routes, *servers):
        if ANY_TEXT in one.model_name:
            yield (
                f"{where}.model_name: {one.model_name!r} has a *: give the {kind} a plain name, and"
                " that name as target to a name with * in [[models]]"
            )
    for index, key in enumerate(config.security.keys):
        for name in key.models or ():
            if ANY_TEXT in name and name not in patterns:
                yield f"security.keys[{index}].models: {name!r} has a *, and no name of [[models]] is written so"
