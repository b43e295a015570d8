"""The models of llama-swap's configuration, as workers or servers, with their other names."""

import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from ichat.config.package_data import read_toml
from ichat.convert.document import Document, sentence_for
from ichat.convert.engine_command import EngineCommand, engine_command, without_comments, words_of
from ichat.convert.macros import SECRET, Macros, variable_of
from ichat.convert.yaml_text import table_in, texts_in
from ichat.errors import Exit

SENTENCES: Mapping[str, Mapping[str, str]] = read_toml("ichat.convert", "llama_swap.toml")
"""The sentences for settings that are not carried over, by the table that has them."""
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_READ = frozenset((
    "cmd", "proxy", "aliases", "env", "checkEndpoint", "ttl", "useModelName", "filters", "concurrencyLimit", "unlisted",
    "macros",
))  # fmt: skip
"""Keys of a model that are read here."""
_OF_A_PROCESS = ("cmdStop", "unloadTimeout", "healthCheckTimeout")


@attrs.define
class Swap:
    """A file that is converted."""

    given: Mapping[str, Any]
    document: Document
    macros: Macros
    workers: list[str] = attrs.field(factory=list[str])
    """Models that became workers on demand."""
    models: set[str] = attrs.field(factory=set[str])
    """All models that answer here."""
    names: dict[str, dict[str, Any]] = attrs.field(factory=dict[str, dict[str, Any]])
    """The tables of `[[models]]`, by their names."""

    def model_of(self, name: str) -> str:
        """Return the model that a name stands for."""
        targets = self.names.get(name, {}).get("targets")
        return targets[0]["model"] if targets else name


def others_in(table: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the keys of a table that are not known."""
    return [key for key in table if key not in known]


def add_model(name: str, raw: Mapping[str, Any], swap: Swap) -> None:
    """Write a model, and its other names."""
    command = without_comments(str(raw.get("cmd") or ""))
    macros = swap.macros.for_model(name, table_in(raw.get("macros")), command)
    given = {key: macros.expand(value, key) for key, value in (dict(raw) | {"cmd": command}).items()}
    notes: list[str] = []
    engine: EngineCommand | None = None
    try:
        engine = engine_command(words_of(str(given.get("cmd") or "")))
    except (Exit, ValueError) as error:
        notes.append(f"Its command was not understood: {str(error).rstrip('.')}.")
    if engine is None:
        shown = " ".join(str(macros.expand(command, SECRET)).split())
        notes.append(f"iChat starts vLLM and SGLang only. Start this yourself: {shown or 'its server'}")
        if macros.port is not None:
            given.setdefault("proxy", f"http://localhost:{macros.port}")
        is_there = _add_server(name, given, notes, swap)
    else:
        is_there = _add_worker(name, given, engine, swap)
    if is_there:
        swap.models.add(name)
        _add_names(name, given, swap)
    remark_macros(f"models.{name}", macros, swap)
    for key in others_in(given, _READ):
        section = "servers" if engine is None and key in _OF_A_PROCESS else "models"
        swap.document.remark(f"models.{name}.{key}", sentence_for(key, SENTENCES[section]))


def remark_macros(where: str, macros: Macros, swap: Swap) -> None:
    """Add the remarks on macros without a value, and on variables that were read, in a part of the file."""
    if macros.unset:
        names = ", ".join(sorted(macros.unset))
        swap.document.remark(where, f"these macros or variables have no value here, and stand as they were: {names}")
    if macros.read:
        swap.document.has_secrets = True
        swap.document.remark(where, f"has the values that these variables have now: {', '.join(sorted(macros.read))}")


def _add_worker(name: str, given: Mapping[str, Any], engine: EngineCommand, swap: Swap) -> bool:
    notes: list[str] = []
    if engine.is_contained:
        notes.append("It ran in a container: check the paths, and the container's own options.")
    values: dict[str, Any] = {"model_name": name, "model_path": engine.model, "backend": engine.backend}
    env, devices = _environment(name, given.get("env"), swap)
    if devices is not None:
        values["gpu_ids"] = devices
    values["load"] = "on_demand"
    ttl = given.get("ttl")
    ttl = swap.given.get("globalTTL", 0) if ttl in (None, -1) else ttl
    if type(ttl) in (int, float) and ttl > 0:
        values["idle_s"] = ttl
    _add_limit(given, values, name, swap)
    if env:
        values["env"] = env
        swap.document.has_secrets = True
    if engine.arguments:
        values["backend_args"] = engine.arguments
    for key in ("proxy", "checkEndpoint", "useModelName"):
        if given.get(key):
            swap.document.remark(f"models.{name}.{key}", sentence_for(key, SENTENCES["workers"]))
    swap.document.add("managed_workers", values, notes)
    swap.workers.append(name)
    return True


def _environment(name: str, given: Any, swap: Swap) -> tuple[dict[str, str], list[int] | None]:
    """Return the variables of a worker, and its GPUs, which one of the variables may name."""
    env: dict[str, str] = {}
    devices: list[int] | None = None
    for text in texts_in(given):
        key, _, value = text.partition("=")
        numbers = value.split(",")
        if variable_of(value):
            where = f"models.{name}.env.{key}"
            swap.document.remark(where, "a worker has the gateway's environment: set the variable there")
        elif key in _DEVICES and all(one.strip().isdecimal() for one in numbers):
            devices = [int(one) for one in numbers]
        else:
            env[key] = value
    return env, devices


def _add_limit(given: Mapping[str, Any], values: dict[str, Any], name: str, swap: Swap) -> None:
    limit = given.get("concurrencyLimit")
    if type(limit) is int and limit > 0:
        values["max_in_flight"] = limit
    elif limit:
        swap.document.remark(f"models.{name}.concurrencyLimit", "must be a whole number")


def _add_server(name: str, given: Mapping[str, Any], notes: list[str], swap: Swap) -> bool:
    """Add a server that iChat does not start; return whether there is any."""
    document, where = swap.document, f"models.{name}"
    address = given.get("proxy")
    if not isinstance(address, str) or not address.startswith(("http://", "https://")):
        document.remark(where, "has no proxy that is a URL, so that no route leads there")
        return False
    values: dict[str, Any] = {"model_name": name, "api_base": address}
    upstream, health = given.get("useModelName"), given.get("checkEndpoint", "/health")
    is_route = bool(upstream and upstream != name) or health != "/health"
    if is_route:
        path = urllib.parse.urlsplit(address).path.rstrip("/")
        values["api_base"] = address.rstrip("/") + ("" if path.endswith("/v1") else "/v1")
        values["upstream_model"] = str(upstream) if upstream else None
        values["health_path"] = None if health == "none" else str(health)
    _add_limit(given, values, name, swap)
    document.add("external_routes" if is_route else "registered_servers", values, notes)
    for key in ("ttl", "env"):
        if given.get(key) not in (None, -1, 0, []):
            document.remark(f"{where}.{key}", sentence_for(key, SENTENCES["servers"]))
    return True


def _add_names(name: str, given: Mapping[str, Any], swap: Swap) -> None:
    """Add the other names of a model, and what each sets or drops in requests."""
    filters = table_in(given.get("filters"))
    by_name = {str(key): table_in(value) for key, value in table_in(filters.get("setParamsByID")).items()}
    common = table_in(filters.get("setParams"))
    drop = stripped(filters)
    are_listed = swap.given.get("includeAliasesInList") is True
    own = changes_of(common | by_name.get(name, {}), drop) | ({"hidden": True} if given.get("unlisted") is True else {})
    if own:
        swap.names[name] = own
    for other in dict.fromkeys([*texts_in(given.get("aliases")), *by_name]):
        if other != name:
            values: dict[str, Any] = {"targets": [{"model": name}]}
            values |= changes_of(common | by_name.get(other, {}), drop)
            if other in swap.names:
                swap.document.remark(f"models.{name}.aliases", f"{other!r} is a name of another model already")
            else:
                swap.names[other] = values | ({} if are_listed else {"hidden": True})


def stripped(filters: Mapping[str, Any]) -> list[str]:
    """Return the members that filters remove from requests."""
    names = (one.strip() for one in str(filters.get("stripParams") or "").split(","))
    return [one for one in names if one not in ("", "model")]


def changes_of(members: dict[str, Any], drop: list[str]) -> dict[str, Any]:
    """Return `set` and `drop` of a name: a member that is set replaces the client's in any case."""
    dropped = [one for one in dict.fromkeys(drop) if one not in members]
    return ({"set": members} if members else {}) | ({"drop": dropped} if dropped else {})
