"""LiteLLM's configuration as iChat's: the settings, and the names with fallbacks.

What LiteLLM spreads over several tables stands in `[[models]]` here. iChat's own tables in the file stay as they are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import attrs

from ichat.config.aliases import ANY_FAILURE
from ichat.config.litellm import WHOLE_FILE, GeneralSettings, LitellmSettings, RouterSettings
from ichat.config.models import ANY_TEXT
from ichat.config.schema import Config
from ichat.convert.document import NO_COUNTERPART, Document, sentence_for
from ichat.convert.litellm_routes import DATA, Routes, add_routes, variable_in
from ichat.convert.yaml_text import table_in, texts_in
from ichat.security.keys import CHARACTERS_MIN, hash_of

SETTINGS = {
    "litellm_settings": LitellmSettings, "router_settings": RouterSettings, "general_settings": GeneralSettings,
}  # fmt: skip
"""LiteLLM's tables of settings, which exist here too, with fewer keys."""
KEYS = frozenset(("model_list", *SETTINGS, *WHOLE_FILE))
"""The keys of a file by which it is LiteLLM's."""
_OWN = frozenset(field.name for field in attrs.fields(Config)) - SETTINGS.keys()
"""iChat's own tables, which a file may have beside LiteLLM's."""
OWN_KEYS = _OWN - {"models", "routing"}
"""Those by which a file is not llama-swap's."""
_CARRIED = ("drop_params", "additional_drop_params", "allowed_openai_params", "num_retries")
_POLICIES = {"simple-shuffle": "random", "least-busy": "least_loaded"}
_NAMES = ("fallbacks", "context_window_fallbacks", "default_fallbacks", "model_group_alias")
"""Settings that become `[[models]]`."""
_MONTHS = ("30d", "31d", "1mo")
_CLIENTS = (
    "LiteLLM's master key opens everything; here clients and operators have keys of their own. This is a client's:"
    " make the operators' with `./ichat.pyz key` (security.admin_key_hash), and a key for each client with"
    " `./ichat.pyz keys make NAME`. Keys in LiteLLM's database are not known here."
)


@attrs.define
class _Name:
    """A name of `[[models]]`."""

    target: str | None = None
    fallbacks: list[str] = attrs.field(factory=list[str])
    longer: str | None = None
    members: dict[str, Any] = attrs.field(factory=dict[str, Any])
    notes: list[str] = attrs.field(factory=list[str])
    is_hidden: bool = False


def convert(given: Mapping[str, Any], document: Document) -> None:
    """Write LiteLLM's configuration into a document."""
    for key in given:
        if key in _OWN:
            _carry(key, given[key], document)
        elif key != "model_list" and key not in SETTINGS:
            document.remark(key, _of_whole_file(key))
    for key in table_in(given.get("environment_variables")):
        document.remark(f"environment_variables.{key}", WHOLE_FILE["environment_variables"])
    for section in SETTINGS:
        if given.get(section) is not None and not isinstance(given[section], dict):
            document.remark(section, "is no table")
    litellm, router, general = (table_in(given.get(section)) for section in SETTINGS)
    routes = add_routes(given["model_list"], document) if given.get("model_list") is not None else Routes({}, {})
    _add_settings(litellm, router, general, document)
    _add_names(routes, litellm | router, document)


def _carry(section: str, value: Any, document: Document) -> None:
    """Write a table of iChat's own as it is."""
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            document.add(section, table_in(one))
        return
    if not isinstance(value, dict):
        document.remark(section, "is no table")
    for key, inner in table_in(value).items():
        items = cast("list[Any]", inner) if isinstance(inner, list) else []
        if isinstance(inner, dict) or (items and all(isinstance(one, dict) for one in items)):
            _carry(f"{section}\0{key}", inner, document)
        else:
            document.set(section, key, inner)


def _of_whole_file(key: str) -> str:
    return WHOLE_FILE[key] if key in WHOLE_FILE else sentence_for(key, DATA["whole_file"])


def _add_settings(
    litellm: Mapping[str, Any], router: Mapping[str, Any], general: Mapping[str, Any], document: Document
) -> None:
    budget = _add_budget(litellm, document)
    for section, table in zip(SETTINGS, (litellm, router, general), strict=True):
        overridden: Collection[str] = router if section == "litellm_settings" else ()
        for key, value in table.items():
            if key in overridden:
                document.remark(f"{section}.{key}", "the same setting of router_settings counts")
            elif (key not in budget or table is not litellm) and not _set(section, key, value, document):
                elsewhere: Mapping[str, str] = SETTINGS[section].ELSEWHERE
                document.remark(f"{section}.{key}", elsewhere.get(key, NO_COUNTERPART))


def _set(section: str, key: str, value: Any, document: Document) -> bool:
    """Set the counterpart of a setting; return whether there is any."""
    if key in _NAMES and section != "general_settings":
        return True
    if key in _CARRIED and section != "general_settings":
        document.set("litellm_settings", key, value)
        return True
    action = _ACTIONS.get(f"{section.partition('_')[0]}.{key}") or _ACTIONS.get(key)
    return action is not None and action(value, document)


def _number(section: str, key: str, note: str = "", factor: int = 1, plus: int = 0) -> Callable[[Any, Document], bool]:
    """Return the action that sets a number."""

    def act(value: Any, document: Document) -> bool:
        if type(value) not in (int, float):
            return False
        document.set(section, key, value * factor + plus, note)
        return True

    return act


def _if_true(section: str, key: str, value: Any) -> Callable[[Any, Document], bool]:
    """Return the action that sets a value if LiteLLM's setting is true; false says nothing."""

    def act(given: Any, document: Document) -> bool:
        if given is True:
            document.set(section, key, value)
        return given is False or given is True

    return act


def _policy(value: Any, document: Document) -> bool:
    if not isinstance(value, str) or value not in _POLICIES:
        return False
    document.set("routing", "policy", _POLICIES[value], 'for engines of your own, "prefix_aware" is usually faster')
    return True


def _master_key(value: Any, document: Document) -> bool:
    if value is None or not str(value):
        return False
    key: dict[str, Any] = {"name": "litellm-master"}
    notes = [_CLIENTS]
    if (variable := variable_in(value)) is not None:
        key["key_env"] = variable
    else:
        key["key_hash"] = hash_of(str(value))
        if len(str(value)) < CHARACTERS_MIN:
            notes.append(f"This key has fewer than {CHARACTERS_MIN} characters, so that it can be guessed: replace it.")
    document.add("security\0keys", key, notes)
    return True


_TOTAL = "LiteLLM's is for the whole answer; here it is for the first byte of an upstream's"
_ACTIONS: Mapping[str, Callable[[Any, Document], bool]] = {
    "general.master_key": _master_key,
    "general.max_parallel_requests": _number("routing", "max_in_flight", "the default of each worker and route"),
    "general.global_max_parallel_requests": _number("limits", "max_in_flight"),
    "general.max_request_size_mb": _number("limits", "body_bytes_max", factor=1024 * 1024),
    "general.health_check_interval": _number("health", "interval_s", "a route needs a health_path for checks"),
    "request_timeout": _number("timeouts", "first_byte_s", _TOTAL),
    "timeout": _number("timeouts", "first_byte_s", _TOTAL),
    "stream_timeout": _number("timeouts", "stream_stall_s", "the longest pause within an answer"),
    "allowed_fails": _number("circuit_breaker", "failures_max", "failures in a row, not in a minute", plus=1),
    "cooldown_time": _number("circuit_breaker", "open_s"),
    "disable_cooldowns": _if_true("circuit_breaker", "failures_max", 0),
    "default_max_parallel_requests": _number("routing", "max_in_flight"),
    "routing_strategy": _policy,
    "set_verbose": _if_true("server_settings", "log_level", "debug"),
    "json_logs": _if_true("logs", "format", "json"),
}
"""What sets a counterpart, by the setting, with the first word of its table where others have another meaning."""


def _add_budget(litellm: Mapping[str, Any], document: Document) -> tuple[str, ...]:
    """Set the budget of a month, which needs prices; return the settings that it has used."""
    amount, has_prices = litellm.get("max_budget"), any(table.name.startswith("prices\0") for table in document.tables)
    if type(amount) not in (int, float) or litellm.get("budget_duration") not in _MONTHS or not has_prices:
        return ()
    document.set("limits", "budget_per_month", amount, "for a calendar month (UTC)")
    return ("max_budget", "budget_duration")


def _add_names(routes: Routes, settings: Mapping[str, Any], document: Document) -> None:
    """Write a table of `[[models]]` for each name that has another model, fallbacks or parameters."""
    names: dict[str, _Name] = {}
    for pattern, route in routes.patterns.items():
        names[pattern] = _Name(route)
    for name, members in routes.names.items():
        _add_members(name, members, names, document)
    _add_group_aliases(settings.get("model_group_alias"), names, document)
    _add_followers(settings, routes, names, document)
    for name, one in names.items():
        document.add("models", _table_of(name, one, names), one.notes)


def _add_members(name: str, members: list[dict[str, Any]], names: dict[str, _Name], document: Document) -> None:
    if not any(members):
        return
    if any(one != members[0] for one in members):
        keys = sorted({key for one in members for key in one})
        document.remark(
            f"{name}, {', '.join(keys)}", "its deployments differ: use a name for each, with set in [[models]]"
        )
        return
    one = names.setdefault(name, _Name())
    one.members = dict(members[0])
    one.notes.append("set replaces the client's members; LiteLLM's are for requests that have none of their own.")


def _add_group_aliases(given: Any, names: dict[str, _Name], document: Document) -> None:
    if given is not None and not isinstance(given, dict):
        document.remark("model_group_alias", "is no table")
    for name, value in table_in(given).items():
        table = table_in(value) if isinstance(value, dict) else {"model": value}
        if not isinstance(table.get("model"), str):
            document.remark(f"model_group_alias.{name}", "names no model")
            continue
        one = names.setdefault(name, _Name())
        one.target, one.is_hidden = table["model"], table.get("hidden") is True


def _add_followers(settings: Mapping[str, Any], routes: Routes, names: dict[str, _Name], document: Document) -> None:
    for name, models in _pairs("fallbacks", settings, document):
        names.setdefault(name, _Name()).fallbacks = models
    for name, models in _pairs("context_window_fallbacks", settings, document):
        names.setdefault(name, _Name()).longer = models[0]
        if models[1:]:
            document.remark(f"context_window_fallbacks.{name}", "a name has a single longer model: the first counts")
    defaults = settings.get("default_fallbacks")
    if defaults is not None and not isinstance(defaults, list):
        document.remark("default_fallbacks", "is no list")
    elif defaults:
        for name in [*routes.names, *names]:
            models = [one for one in cast("list[Any]", defaults) if isinstance(one, str) and one != name]
            one = names.setdefault(name, _Name())
            one.fallbacks = one.fallbacks or models


def _pairs(key: str, settings: Mapping[str, Any], document: Document) -> Iterator[tuple[str, list[str]]]:
    """Yield the models that follow a name, of a list of tables such as fallbacks."""
    given = settings.get(key)
    if given is not None and not isinstance(given, list):
        document.remark(key, "is no list")
        return
    for name, models in (pair for one in cast("list[Any]", given or []) for pair in table_in(one).items()):
        followers = texts_in(models)
        if ANY_TEXT in name:
            document.remark(f"{key}.{name}", "write fallbacks of [[models]] for each name that needs them")
        elif not followers:
            document.remark(f"{key}.{name}", "must be a list of names of models")
        else:
            yield name, followers


def _table_of(name: str, one: _Name, names: Mapping[str, _Name]) -> dict[str, Any]:
    """Return the table of a name; its models are no other names, as iChat requires."""

    def model_of(other: str) -> str:
        seen = set[str]()
        while other not in seen and other in names and names[other].target is not None:
            seen.add(other)
            other = str(names[other].target)
        return other

    of_model = names.get(model_of(name), one)
    fallbacks = dict.fromkeys(model_of(other) for other in one.fallbacks or of_model.fallbacks)
    longer, members = one.longer or of_model.longer, one.members or of_model.members
    values: dict[str, Any] = {"name": name}
    if one.target is not None:
        values["targets"] = [{"model": model_of(name)}]
    if fallbacks:
        values["fallbacks"] = [other for other in fallbacks if other != model_of(name)]
    if longer is not None:
        values["longer"] = model_of(longer)
    if members:
        values["set"] = members
    if one.is_hidden:
        values["hidden"] = True
    return values | {"fallback_on": list(ANY_FAILURE)}
