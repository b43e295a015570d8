"""LiteLLM's settings that mean the same here; for the other settings, `litellm.toml` names the replacement."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import attrs
from attrs import frozen

from ichat.config import checks
from ichat.config.openai_params import check_paths
from ichat.config.package_data import read_toml
from ichat.config.strict import Between, checked

RETRIES_MAX = 100
_REPLACED = read_toml("ichat.config", "litellm.toml")


def _check_followers(name: str, models: Any) -> None:
    if name == "*":
        raise ValueError('"*" is not read: name each model that has fallbacks')
    if not isinstance(models, list) or not models:
        raise ValueError('must be like [{ "a" = ["b", "c"] }], a model and those that follow it')
    for model in [name, *cast("list[Any]", models)]:
        if type(model) is not str:
            raise ValueError("must have names of models as strings")
        checks.is_model_name(model)


def _are_fallbacks(values: Sequence[Any]) -> None:
    """Raise ValueError unless these are like [{ "a" = ["b", "c"] }]."""
    for value in values:
        table = cast("dict[str, Any]", value if isinstance(value, dict) else {"": None})
        for name, models in table.items():
            _check_followers(name, models)
    names = [name for value in values for name in value]
    taken = next((name for name in names if names.count(name) > 1), None)
    if taken is not None:
        raise ValueError(f"{taken!r} is named twice")


def _are_longer(values: Sequence[Any]) -> None:
    """Raise ValueError unless these are like [{ "a" = ["b"] }]."""
    _are_fallbacks(values)
    for value in values:
        for name, models in value.items():
            if len(models) > 1:
                raise ValueError(f"give {name!r} a single model, with the longest context")


def _are_group_aliases(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are like { "a" = "b", "c" = { model = "d", hidden = true } }."""
    for name, value in values.items():
        checks.is_model_name(name)
        table = cast("dict[str, Any]", value if isinstance(value, dict) else {"model": value})
        is_right = type(table.get("model")) is str and type(table.get("hidden", False)) is bool
        if not is_right or table.keys() - {"model", "hidden"}:
            raise ValueError(f'{name!r} must be a model\'s name, or like {{ model = "b", hidden = true }}')
        checks.is_model_name(table["model"])


def _replacements(*tables: str) -> Mapping[str, str]:
    """Return the sentence for each setting in these tables of `litellm.toml`."""
    found: dict[str, str] = {}
    for keys, given in (entry for table in tables for entry in _REPLACED[table].items()):
        group = {"settings": keys, "use": given} if isinstance(given, str) else given
        found |= dict.fromkeys(group["settings"].split(), group["use"])
    return found


@frozen
class _Reliability:
    """Settings that LiteLLM reads in both of its tables."""

    fallbacks: list[Any] | None = checked(_are_fallbacks, None)
    context_window_fallbacks: list[Any] | None = checked(_are_longer, None)
    num_retries: int | None = checked(Between(0, RETRIES_MAX), None)


@frozen
class LitellmSettings(_Reliability):
    """`[litellm_settings]`: the defaults of all external routes, and what happens where a model cannot answer."""

    drop_params: bool = False
    additional_drop_params: list[str] = checked(check_paths, attrs.Factory(list[str]))
    allowed_openai_params: list[str] = checked(checks.are_params, attrs.Factory(list[str]))

    ELSEWHERE: ClassVar[Mapping[str, str]] = _replacements("shared", "litellm_settings")


@frozen
class RouterSettings(_Reliability):
    """`[router_settings]`: other names for models, and what overrides `[litellm_settings]`."""

    model_group_alias: dict[str, Any] = checked(_are_group_aliases, attrs.Factory(dict[str, Any]))

    ELSEWHERE: ClassVar[Mapping[str, str]] = _replacements("shared", "router_settings")


@frozen
class GeneralSettings:
    """`[general_settings]`: none of them is read."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = _replacements("general_settings")


WHOLE_FILE = _replacements("whole_file")
"""LiteLLM's tables that have no counterpart here."""


def table_of(given: Sequence[Any] | None) -> dict[str, list[str]]:
    """Return the models that follow each model, of fallbacks that were checked."""
    return {name: models for one in given or () for name, models in cast("dict[str, list[str]]", one).items()}


def first_given(router: Any, general: Any) -> Any:
    """Return the value of `[router_settings]`, or of `[litellm_settings]` if the former has none."""
    return general if router is None else router
