"""The names of a configuration: `[[models]]`, and what LiteLLM's settings say in other words."""

from collections.abc import Iterator
from typing import Any, cast

import attrs

from ichat.config.litellm import first_given, table_of
from ichat.config.models import NOTHING_SENT, AliasConfig, TargetConfig
from ichat.config.schema import Config

ANY_FAILURE = [*NOTHING_SENT, "5xx", "429", "timeout"]
"""When LiteLLM's `fallbacks` go on."""


def aliases_of(config: Config) -> list[AliasConfig]:
    """Return all names: those of `[[models]]`, then those that only LiteLLM's settings have."""
    return [*config.models, *_in_litellms_words(config).values()]


def retries_of(config: Config) -> int:
    """Return how often an external route is asked again that has failed: LiteLLM's `num_retries`."""
    return first_given(config.router_settings.num_retries, config.litellm_settings.num_retries) or 0


def _in_litellms_words(config: Config) -> dict[str, AliasConfig]:
    """Return what LiteLLM's settings say, as the tables that would say the same."""
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
    """Yield what is wrong with names beside each other, each with its path."""
    found = _in_litellms_words(config)
    others = {one.name for one in (*config.models, *found.values()) if one.is_other}
    taken: set[str] = set()
    for index, alias in enumerate(config.models):
        where = f"models[{index}]"
        if alias.name in taken:
            yield f"{where}.name: {alias.name!r} is taken"
        elif alias.name in found:
            yield f"{where}.name: litellm_settings or router_settings have {alias.name!r} too: say it in one place"
        taken.add(alias.name)
        yield from _contradictions_of(alias, where, others)
    for alias in found.values():
        yield from _contradictions_of(alias, f"router_settings or litellm_settings, {alias.name}", others)


def _contradictions_of(alias: AliasConfig, where: str, others: set[str]) -> Iterator[str]:
    models = [target.model for target in alias.targets]
    if both := sorted(alias.set.keys() & set(alias.drop)):
        yield f"{where}: {', '.join(both)} is in set and in drop: a member that is set replaces the client's"
    if alias.targets and not any(target.weight for target in alias.targets):
        yield f"{where}.targets: one weight at least must be more than 0"
    if len(set(models)) < len(models):
        yield f"{where}.targets: name each model once"
    for model in alias.models:
        if model in others and model != alias.name:
            yield f"{where}: {model!r} is a name for other models: name one of those"
