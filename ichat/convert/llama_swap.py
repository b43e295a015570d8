"""llama-swap's configuration as iChat's.

A model with a command that starts vLLM or SGLang becomes a worker on demand. Any other server program is not started
here: it becomes a registered server, or an external route where only that says the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ichat.convert.document import NO_COUNTERPART, Document, sentence_for
from ichat.convert.llama_swap_models import (
    SENTENCES,
    Swap,
    add_model,
    changes_of,
    others_in,
    remark_macros,
    stripped,
)
from ichat.convert.macros import Macros, variable_of
from ichat.convert.yaml_text import table_in, texts_in
from ichat.security.keys import CHARACTERS_MIN, hash_of

KEYS = frozenset((
    "healthCheckTimeout", "logRequests", "logLevel", "logTimeFormat", "logToStdout", "metricsMaxInMemory",
    "captureBuffer", "store", "ui", "performance", "globalTTL", "unloadTimeout", "profiles", "selectors", "groups",
    "matrix", "macros", "startPort", "hooks", "sendLoadingState", "includeAliasesInList", "apiKeys", "peers",
    "upstream",
))  # fmt: skip
"""The keys of a file by which it is llama-swap's, beside `models` and `routing`."""
START_PORT = 5800
"""The first port for ${PORT} where the file names none."""
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


def convert(given: Mapping[str, Any], document: Document) -> None:
    """Write llama-swap's configuration into a document."""
    port = given.get("startPort")
    macros = Macros.of(table_in(given.get("macros")), port if type(port) is int else START_PORT)
    swap = Swap(given, document, macros)
    for name, value in sorted(table_in(given.get("models")).items()):  # ports follow the order of names
        add_model(name, table_in(value), swap)
    for key, act in _ACTIONS.items():
        if given.get(key) is not None:
            act(macros.expand(given[key], key), swap)
    remark_macros(", ".join(key for key in _ACTIONS if key in given), macros, swap)
    for key in others_in(given, _ACTIONS.keys() | _READ_ELSEWHERE):
        document.remark(key, sentence_for(key, SENTENCES["whole_file"]))
    if not {"groups", "matrix"} & given.keys() and "router" not in table_in(given.get("routing")):
        _add_swap_set(swap.workers, "group", swap)
    for name, values in swap.names.items():
        document.add("models", {"name": name, **values})


def _add_swap_set(members: list[str], name: str, swap: Swap) -> None:
    """Add a set of models that exclude each other."""
    loaded = [one for one in members if one in swap.workers]
    if len(loaded) > 1:
        note = f"{name}: iChat unloads for need of GPUs or ports, and by this set; another set does not unload these."
        swap.document.add("swap_sets", {"members": loaded, "loaded_max": 1}, [note])


def _set_groups(given: Any, swap: Swap) -> None:
    """Write groups as swap sets. Groups that unload each other, member by member, are a single set."""
    together: list[str] = []
    grouped: set[str] = set()
    for name, value in table_in(given).items():
        group = table_in(value)
        members = texts_in(group.get("members"))
        grouped.update(members)
        swaps, exclusive = group.get("swap", True) is True, group.get("exclusive", True) is True
        if group.get("persistent") is True:
            swap.document.remark(f"groups.{name}.persistent", 'use load = "start": such a worker is never unloaded')
        if swaps and exclusive:
            together += members
        elif swaps:
            _add_swap_set(members, f"groups.{name}", swap)
        elif exclusive:
            why = (
                "a set of models that stay together does not unload others: give workers gpu_ids, or use [[swap_sets]]"
            )
            swap.document.remark(f"groups.{name}.exclusive", why)
        for key in others_in(group, {"members", "swap", "exclusive", "persistent"}):
            swap.document.remark(f"groups.{name}.{key}", NO_COUNTERPART)
    together += [one for one in swap.workers if one not in grouped]
    _add_swap_set(together, "groups", swap)


def _set_routing(given: Any, swap: Swap) -> None:
    routing = table_in(given)
    router, scheduler = table_in(routing.get("router")), table_in(routing.get("scheduler"))
    settings = table_in(router.get("settings"))
    if "router" in routing:
        _set_groups(settings.get("groups"), swap)
    if "matrix" in settings or router.get("use") == "matrix":
        swap.document.remark("routing.router.settings.matrix", sentence_for("matrix", SENTENCES["routing"]))
    if table_in(table_in(scheduler.get("settings")).get("fifo")).get("priority"):
        swap.document.remark("routing.scheduler.settings.fifo.priority", sentence_for("priority", SENTENCES["routing"]))
    elif "scheduler" in routing:
        swap.document.remark("routing.scheduler", sentence_for("scheduler", SENTENCES["routing"]))
    for key in others_in(routing, {"router", "scheduler"}):
        swap.document.remark(f"routing.{key}", NO_COUNTERPART)


def _set_selectors(given: Any, swap: Swap) -> None:
    """Write virtual names: the first target, and the others after it."""
    for name, value in table_in(given).items():
        selector = table_in(value)
        targets = [swap.model_of(one) for one in texts_in(selector.get("targets"))]
        strategy = selector.get("strategy")
        if not targets or name in swap.names:
            swap.document.remark(f"selectors.{name}", "needs targets, and a name that no model has")
            continue
        values: dict[str, Any] = {"targets": [{"model": targets[0]}]}
        if strategy != "pin" and targets[1:]:
            values["fallbacks"] = targets[1:]
            values["fallback_on"] = ["unreachable", "not_ready", "queue_full", "circuit", "busy", "loading"]
        if selector.get("unlisted") is True:
            values["hidden"] = True
        swap.names[name] = values
        for key in ("strategy", "settings") if strategy != "pin" else ():
            if key in selector:
                swap.document.remark(f"selectors.{name}.{key}", sentence_for(key, SENTENCES["selectors"]))
        for key in others_in(selector, {"strategy", "targets", "unlisted", "settings"}):
            swap.document.remark(f"selectors.{name}.{key}", sentence_for(key, SENTENCES["selectors"]))


def _set_peers(given: Any, swap: Swap) -> None:
    """Write each model of a peer as a route: with the peer's name before it, and alone if that name is free."""
    for peer, value in table_in(given).items():
        table = table_in(value)
        base = str(table.get("proxy") or "").rstrip("/")
        base += "" if base.endswith("/v1") else "/v1"
        access, notes = _key_of_peer(table.get("apiKey"), swap.document)
        filters = table_in(table.get("filters"))
        changes = changes_of(table_in(filters.get("setParams")), stripped(filters))
        for model in texts_in(table.get("models")):
            name = f"{peer}/{model}"
            swap.document.add(
                "external_routes", {"model_name": name, "api_base": base, "upstream_model": model, **access}, notes
            )
            if changes:
                swap.names[name] = changes
            if model not in swap.models and model not in swap.names:
                swap.names[model] = {"targets": [{"model": name}], **changes, "hidden": True}
        for key in others_in(table, {"proxy", "apiKey", "models", "filters"}):
            swap.document.remark(f"peers.{peer}.{key}", sentence_for(key, SENTENCES["peers"]))


def _key_of_peer(given: Any, document: Document) -> tuple[dict[str, Any], list[str]]:
    if not given:
        return {}, []
    if variable := variable_of(str(given)):
        return {"api_key_env": variable}, []
    document.has_secrets = True
    note = "The key belongs into a variable of the gateway's environment: name that in api_key_env."
    return {"headers": {"Authorization": f"Bearer {given}"}}, [note]


def _set_keys(given: Any, swap: Swap) -> None:
    for number, text in enumerate(dict.fromkeys(texts_in(given)), 1):
        name = f"llama-swap-{number}"
        if variable := variable_of(text):
            swap.document.add("security\0keys", {"name": name, "key_env": variable})
            continue
        notes = ["The key itself is not in this file: its hash is."]
        if len(text) < CHARACTERS_MIN:
            notes.append(f"It has fewer than {CHARACTERS_MIN} characters, so that it can be guessed: replace it.")
        swap.document.add("security\0keys", {"name": name, "key_hash": hash_of(text)}, notes)


def _set_hooks(given: Any, swap: Swap) -> None:
    hooks = table_in(given)
    startup = table_in(hooks.get("on_startup"))
    for model in texts_in(startup.get("preload")):
        why = 'use `./ichat.pyz load MODEL`; with load = "start" a worker is never unloaded'
        swap.document.remark(f"hooks.on_startup.preload, {model}", why)
    for key in [*others_in(hooks, {"on_startup"}), *(f"on_startup.{one}" for one in others_in(startup, {"preload"}))]:
        swap.document.remark(f"hooks.{key}", NO_COUNTERPART)


def _setter(section: str, key: str, note: str = "") -> Callable[[Any, Swap], None]:
    return lambda value, swap: swap.document.set(section, key, value, note)


def _set_level(value: Any, swap: Swap) -> None:
    if isinstance(value, str) and value in _LEVELS:
        swap.document.set("server_settings", "log_level", _LEVELS[value])
    else:
        swap.document.remark("logLevel", f"must be one of {', '.join(_LEVELS)}")


_ACTIONS: Mapping[str, Callable[[Any, Swap], None]] = {
    "logLevel": _set_level,
    "healthCheckTimeout": _setter("timeouts", "load_s"),
    "unloadTimeout": _setter("timeouts", "stop_s"),
    "apiKeys": _set_keys,
    "peers": _set_peers,
    "groups": _set_groups,
    "routing": _set_routing,
    "selectors": _set_selectors,
    "hooks": _set_hooks,
}
_READ_ELSEWHERE = {"models", "macros", "startPort", "globalTTL", "includeAliasesInList"}
"""The settings that were read for the models."""
