"""The configuration read from TOML or JSON: every problem is reported at once and with its path."""

import difflib
import functools
import json
import math
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config import checks
from ichat.config.aliases import contradictions_of_aliases
from ichat.config.copies import contradictions_of_replicas
from ichat.config.downloads import contradictions_of_hub
from ichat.config.engine_args import contradictions_of_gpus
from ichat.config.package_data import parse_toml
from ichat.config.ray import Label, label_of
from ichat.config.ray_workers import contradictions_of_place, contradictions_of_ray
from ichat.config.replicas import Replicas, are_replicas, replicas_of
from ichat.config.schema import (
    SECTIONS,
    Config,
    EngineSettings,
    EngineValue,
    Key,
    ManagedWorkerConfig,
    Security,
    ServerSettings,
)
from ichat.config.strict import problems_of, section_hook, shown, strict_converter
from ichat.config.usage import contradictions_of_limits
from ichat.errors import EXIT_USAGE, Exit

SAMPLES_MAX = 3600
"""The most samples that the history may hold: about ten megabytes."""
_YAML = re.compile(r"---\s*$|- |[\"']?[\w.-]+[\"']?:(\s|$)")
"""How the first line of a YAML file begins."""
_OF_PLACE = ("host", "port", "state_directory", "tls_certificate")
"""The keys of `[server_settings]` by which a gateway is found."""


def load(path: pathlib.Path) -> Config:
    """Return the configuration in a file. Raises Exit 64 with every problem in it, each on its own line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Exit(EXIT_USAGE, f"The configuration {path} cannot be read: {reason}.") from error
    return parse(text, str(path))


def settings_of_refused(path: pathlib.Path) -> ServerSettings | None:
    """Return the gateway's place from a file with mistakes: it runs with an earlier version. None: it has no place."""
    try:
        given: Any = parse_toml(path.read_text(encoding="utf-8")).get("server_settings", {})
        place = {name: given[name] for name in _OF_PLACE if name in given}
        return _converter().structure({"server_settings": place}, Config).server_settings
    except (OSError, ValueError, TypeError, RecursionError, BaseValidationError):
        return None


def parse(text: str, source: str) -> Config:
    """Return the configuration in a text, which messages call `source`. Raises Exit 64."""
    try:
        tables = parse_toml(text)
    except (ValueError, RecursionError) as error:  # tomllib lets errors of int() and of deep nesting through
        if _is_yaml(text, source):
            command = f"./ichat.pyz convert {shlex.quote(source)} -o ichat.toml"
            sentence = f"is YAML, and iChat reads TOML: `{command}` converts LiteLLM's file or llama-swap's."
            raise Exit(EXIT_USAGE, f"{source} {sentence}") from error
        raise Exit(EXIT_USAGE, f"{source} is not valid TOML: {error}.") from error
    try:
        config = _converter().structure(tables, Config)
    except BaseValidationError as error:
        problems = sorted(problems_of(error))
    else:
        problems = sorted(_contradictions(config))
        if not problems:
            return config
    raise Exit(EXIT_USAGE, "\n".join([f"{source} was not accepted:", *(f"  {problem}" for problem in problems)]))


def _is_yaml(text: str, source: str) -> bool:
    """Return whether a text that is no TOML is YAML: by its file's name, or its first key."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return source.endswith((".yaml", ".yml")) or _YAML.match(next(lines, "")) is not None


def read_worker(table: object, config: Config) -> ManagedWorkerConfig:
    """Return the worker in parsed JSON with the keys of `[[managed_workers]]`; a null means that a key is left out.

    The worker must not contradict `config`. Raises ApiError 400 with every problem.
    """
    if isinstance(table, dict):
        table = _without_nulls(cast("dict[str, Any]", table))
        if isinstance(table.get("backend_args"), dict):
            table["backend_args"] = _without_nulls(table["backend_args"])
    try:
        worker = _converter().structure(table, ManagedWorkerConfig)
    except BaseValidationError as error:
        problems = sorted(problems_of(error))
    except ValueError as error:
        raise errors.bad_request(f"A worker is a JSON object: {error}.") from error
    else:
        problems = sorted(_contradictions_of(worker, config))
        if not problems:
            return worker
    raise errors.bad_request(f"This is not a worker that can be launched: {'; '.join(problems)}.")


def read_key(table: Mapping[str, Any], config: Config | None = None) -> Key:
    """Return the key in parsed JSON with the keys of `[[security.keys]]`; a null means that a key is left out.

    The key must not contradict `config`. Raises ApiError 400 with every problem.
    """
    try:
        key = _converter().structure(_without_nulls(table), Key)
    except BaseValidationError as error:
        problems = sorted(problems_of(error))
    else:
        problems = [] if config is None else sorted(contradictions_of_limits("key", key, config.usage, config.prices))
        if not problems:
            return key
    raise errors.bad_request(f"This is not a key that can be made: {'; '.join(problems)}.")


def read_replicas(value: object) -> Replicas:
    """Return the number of copies in parsed JSON: a number, or an object with `min` and, if it differs, `max`.

    Raises ApiError 400 with every problem.
    """
    given = value
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        given = {"max": table["min"], **table} if "min" in table else table
    try:
        replicas = _converter().structure(given, Replicas)
        are_replicas(replicas)
    except BaseValidationError as error:
        problems = sorted(problems_of(error))
    except ValueError as error:
        problems = [f"replicas: {error}"]
    else:
        return replicas
    raise errors.bad_request(f"This is no number of copies: {'; '.join(problems)}.")


def _without_nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


@functools.cache
def _converter() -> cattrs.Converter:
    converter = strict_converter(forbid_extra_keys=True)
    converter.register_structure_hook(EngineValue, _engine_value)
    converter.register_structure_hook(Label, label_of)
    converter.register_structure_hook(checks.Relays, _relays)
    converter.register_structure_hook(checks.Gpus, _gpus)
    converter.register_structure_hook(checks.Gpus | None, _gpus)
    for section in SECTIONS:
        prepare = _prepared_worker if section is ManagedWorkerConfig else None
        converter.register_structure_hook(section, section_hook(section, converter, prepare))
    table = section_hook(Replicas, converter)
    converter.register_structure_hook(Replicas, lambda value, kind: replicas_of(value) or table(value, kind))
    return converter


def _engine_value(value: Any, _: Any) -> EngineValue:
    if type(value) not in (str, int, float, bool, list, dict):
        raise ValueError(f"must be a string, number, boolean, list or table, not {shown(value)}")
    if type(value) is list and None in value:
        raise ValueError("must not hold a null")
    try:
        json.dumps(value, allow_nan=True)
    except TypeError as error:
        raise ValueError("must hold no dates or times: JSON has none, write them as strings") from error
    return cast("EngineValue", value)


def _relays(value: Any, _: Any) -> checks.Relays:
    if type(value) is not int and value != "cores":
        raise ValueError(f'must be a whole number, or "cores", not {shown(value)}')
    return value


def _gpus(value: Any, _: Any) -> checks.Gpus | None:
    if value is None or value == "auto":
        return value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f'must be a number of GPUs, a share of a GPU, or "auto", not {shown(value)}')
    return int(value) if value == int(value) else float(value)


def _prepared_worker(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table with unknown keys moved to `backend_args`, except keys that look like misspelt known keys.

    Without `load`, a model with `replicas.min = 0` is loaded on demand.
    """
    ours = [attribute.name for attribute in attrs.fields(ManagedWorkerConfig)]
    kept = {key: table[key] for key in table if key in ours or difflib.get_close_matches(key, ours, 1, 0.85)}
    inline = {key: table[key] for key in table if key not in kept}
    if inline and isinstance(kept.get("backend_args", {}), dict):
        kept["backend_args"] = {**inline, **kept.get("backend_args", {})}
    replicas: Any = kept.get("replicas")
    if isinstance(replicas, dict) and cast("Mapping[str, Any]", replicas).get("min") == 0:
        kept.setdefault("load", "on_demand")
    return kept


def _contradictions_of_servers(config: Config) -> Iterable[str]:
    routes, ids = {route.model_name for route in config.external_routes}, set[str]()
    slugs = {checks.slug_of(worker.model_name): worker.model_name for worker in config.managed_workers}
    for index, server in enumerate(config.registered_servers):
        where = f"registered_servers[{index}]"
        if server.model_name in routes:
            yield f"{where}.model_name: {server.model_name!r} is also an external route"
        if server.worker_id in ids:
            yield f"{where}.worker_id: {server.worker_id!r} is taken"
        slug, _, number = (server.worker_id or "").rpartition("-")
        if slug in slugs and number.isdecimal():
            yield f"{where}.worker_id: {server.worker_id!r} may be the id of a managed worker of {slugs[slug]!r}"
        if server.worker_id is not None:
            ids.add(server.worker_id)
        if server.ca_certificates is not None and not server.api_base.startswith("https:"):
            yield f"{where}.ca_certificates: is for https, and api_base is http"
    if config.registered_servers and not config.health.interval_s:
        yield "health.interval_s: must not be 0: only health checks show that registered_servers can be reached again"


_NOT_THE_ENGINES = frozenset((
    "served_model_name", "model", "backend", "host", "port", "worker_id", "gateway_address", "heartbeat_interval",
    "advertise_host", "unix_socket", "max_in_flight", "drain_s", "stop_s", "log_streaming", "orphan_after_s",
    "media_domains",
))  # fmt: skip


_ON_DEMAND = ("idle_s", "when_idle", "min_loaded_s")
"""The keys of a worker that say when it is unloaded."""
_DEFAULTS = ManagedWorkerConfig(model_name="", model_path="")


def _contradictions(config: Config) -> Iterable[str]:
    settings = config.server_settings
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        yield "server_settings: tls_certificate and tls_key go together"
    if settings.relays and settings.port == 0:
        yield "server_settings.relays: needs a server_settings.port that is not 0, which all relays share"
    if config.history.seconds > SAMPLES_MAX * config.history.sample_s:
        yield f"history: seconds must be at most {SAMPLES_MAX} times sample_s"
    yield from _contradictions_of_keys(config.security)
    yield from contradictions_of_all_limits(config)
    yield from _contradictions_of_swap_sets(config)
    yield from contradictions_of_aliases(config)
    yield from contradictions_of_ray(config)
    for index, worker in enumerate(config.managed_workers):
        for problem in _contradictions_of(worker, config):
            yield f"managed_workers[{index}].{problem}"
    yield from _contradictions_of_servers(config)


def contradictions_of_all_limits(config: Config) -> Iterable[str]:
    """Return the contradictions in the limits for a day and a month, for all keys together and for each key."""
    yield from contradictions_of_limits("limits", config.limits, config.usage, config.prices)
    for index, key in enumerate(config.security.keys):
        yield from contradictions_of_limits(f"security.keys[{index}]", key, config.usage, config.prices)


def _contradictions_of_keys(security: Security) -> Iterable[str]:
    if security.admin_key_hash is not None and security.admin_key_env is not None:
        yield "security: admin_key_hash and admin_key_env are two ways to say the same: give one"
    for index, key in enumerate(security.keys):
        if (key.key_hash is None) == (key.key_env is None):
            yield f"security.keys[{index}]: needs either key_hash or key_env"
        if any(key.name == other.name for other in security.keys[:index]):
            yield f"security.keys[{index}].name: {key.name!r} is taken"


def _contradictions_of_swap_sets(config: Config) -> Iterable[str]:
    known = {worker.model_name for worker in config.managed_workers if worker.load == "on_demand"}
    for index, one in enumerate(config.swap_sets):
        for name in one.members:
            if name not in known:
                yield f'swap_sets[{index}].members: no managed worker of {name!r} has load = "on_demand"'
        if any(set(one.members) == set(other.members) for other in config.swap_sets[:index]):
            yield f"swap_sets[{index}].members: another set has the same members"


def _contradictions_of(worker: ManagedWorkerConfig, config: Config) -> Iterable[str]:
    settings = config.server_settings
    for name in sorted(_NOT_THE_ENGINES.intersection(worker.backend_args)):
        yield f"backend_args.{name}: is iChat's, not the engine's"
    if any(route.model_name == worker.model_name for route in config.external_routes):
        yield f"model_name: {worker.model_name!r} is also an external route"
    yield from contradictions_of_replicas(worker)
    yield from contradictions_of_place(worker, config)
    yield from contradictions_of_hub(worker.hub, worker.model_path, worker.on)
    if worker.load != "on_demand":
        given = (name for name in _ON_DEMAND if getattr(worker, name) != getattr(_DEFAULTS, name))
        yield from (f'{name}: is for workers with load = "on_demand": set that too, or leave it out' for name in given)
    engine = config.engines.get(worker.backend, EngineSettings())
    yield from contradictions_of_gpus(worker, engine.devices)
    if worker.on_gateway_exit == "keep":
        if settings.port == 0 and settings.state_directory is None:
            yield 'on_gateway_exit: "keep" needs a server_settings.port that is not 0, or a state_directory there'
        if not worker.log_streaming:
            yield 'on_gateway_exit: "keep" needs log_streaming, or its output is lost with its gateway'
