"""The gateway's configuration: TOML in, frozen objects out, every problem reported at once and with its path.

Names follow `ichat.toml.example`, which explains each of them. Units stand last: `_s` seconds, `_bytes_max` bytes.
"""

import difflib
import json
import math
import pathlib
import re
import tomllib
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, get_origin

import attrs
import cattrs
from attrs import field, frozen
from cattrs.errors import (
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
)
from cattrs.gen import make_dict_structure_fn, override

from ichat.errors import EXIT_USAGE, Exit
from ichat.params import KNOWN, check_paths

Scalar = str | int | float | bool
EngineValue = Scalar | list[Scalar] | dict[str, Any]
"""What an engine argument may be in TOML."""


_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?|")
_PATH = re.compile(r"[!-~]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(^|[-_])((api|access|private|secret)[-_]key|token|password|passphrase|secret|credentials?|authorization)$",
    re.IGNORECASE,
)
_FRAMING_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection", "expect", "x-request-id"))

MODEL_NAME_CHARACTERS_MAX = 256
POLICY_NAMES = ("least_loaded", "power_of_two", "round_robin", "random")
"""The policies of `balance.py`."""

Check = Callable[[Any], None]
"""Raises ValueError with what is wrong about a value of the right type."""


def between(low: float, high: float) -> Check:
    """Make the check that a number is in this range, both ends included."""

    def check(value: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}, not {value:g}")

    return check


_PORT = between(0, 65535)
_SECONDS = between(0.001, 1e9)
_COUNT = between(1, 1_000_000)


def _one_of(*allowed: str) -> Check:
    def check(value: str) -> None:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, not {value!r}")

    return check


def _not_empty(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def _is_http(value: str) -> None:
    try:
        url = urllib.parse.urlsplit(value)
        is_right = url.scheme in ("http", "https") and url.hostname and url.port != 0
        is_right = is_right and all(0 < len(label) < 64 for label in str(url.hostname).removesuffix(".").split("."))
    except ValueError:
        is_right = False
    else:
        is_right = is_right and not (url.query or url.fragment or url.username) and _PATH.fullmatch(url.path)
    if not is_right:
        raise ValueError("must be like https://host/v1 or http://host:8000/v1, without a user, a query or a fragment")


def _is_variable(value: str | None) -> None:
    if value is not None and not _VARIABLE.fullmatch(value):
        raise ValueError("must be the name of an environment variable, which holds the key")


def _are_params(values: list[str] | None) -> None:
    unknown = sorted(set(values or ()) - KNOWN)
    if unknown:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no parameter of OpenAI's that could be dropped")


def _are_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is not the name of a header, or has a value that cannot be sent")
        if name.lower() in _FRAMING_HEADERS:
            raise ValueError(f"{name!r} is made by the gateway")


def _is_header_name(value: str) -> None:
    if value and not _HEADER_NAME.fullmatch(value):
        raise ValueError(f"must be the name of a header, not {value!r}")


def _is_model_name(value: str) -> None:
    if not value or len(value) > MODEL_NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be 1 to {MODEL_NAME_CHARACTERS_MAX} printable characters")


def _is_one_line(value: str | None) -> None:
    if value is not None and not value.isprintable():
        raise ValueError("must be one line of printable characters")


def _is_count(value: int | None) -> None:
    if value is not None:
        _COUNT(value)


def checked(check: Check, default: Any = attrs.NOTHING) -> Any:
    """Declare a field whose value must pass a check, which is run while structuring: all problems are found at once."""
    return field(default=default, metadata={"check": check})


@frozen
class ServerSettings:
    """`[server_settings]`."""

    host: str = "127.0.0.1"
    port: int = checked(_PORT, 4000)
    log_level: str = checked(_one_of("debug", "info", "warning", "error"), "info")
    tls_certificate: str | None = None
    tls_key: str | None = None
    worker_header: bool = True
    overhead_header: bool = True


@frozen
class Routing:
    """`[routing]`: who gets a request."""

    policy: str = checked(_one_of(*POLICY_NAMES), "least_loaded")
    session_header: str = checked(_is_header_name, "x-session-id")
    max_in_flight: int = checked(_COUNT, 4096)
    queue_max: int = checked(between(0, 1_000_000), 1024)


@frozen
class Logs:
    """`[logs]`."""

    access_log: str = "-"
    access_lines_max: int = checked(_COUNT, 10_000)


@frozen
class Limits:
    """`[limits]`."""

    head_bytes_max: int = checked(between(1024, 16 * 1024 * 1024), 64 * 1024)
    body_bytes_max: int = checked(between(1024, 64 * 1024**3), 128 * 1024 * 1024)
    connections_max: int = checked(_COUNT, 8192)


@frozen
class Timeouts:
    """`[timeouts]`."""

    head_s: float = checked(_SECONDS, 30.0)
    body_s: float = checked(_SECONDS, 300.0)
    keep_alive_s: float = checked(_SECONDS, 120.0)
    client_stall_s: float = checked(_SECONDS, 60.0)
    queue_s: float = checked(_SECONDS, 30.0)
    connect_s: float = checked(_SECONDS, 5.0)
    upstream_idle_s: float = checked(_SECONDS, 30.0)
    first_byte_s: float = checked(_SECONDS, 600.0)
    stream_stall_s: float = checked(_SECONDS, 600.0)
    drain_s: float = checked(between(0, 1e9), 30.0)
    stop_s: float = checked(_SECONDS, 15.0)


@frozen
class ManagedWorker:
    """`[[managed_workers]]`: a worker that the gateway starts; keys that are not iChat's are the engine's arguments."""

    model_name: str = checked(_is_model_name)
    model_path: str = checked(_not_empty)
    backend: str = checked(_not_empty, "vllm")
    gpu_ids: list[int] | None = None
    host: str = "127.0.0.1"
    port: int = checked(_PORT, 0)
    heartbeat_interval: float = checked(between(0.1, 3600), 3.0)
    max_in_flight: int | None = checked(_is_count, None)
    python: str | None = None
    env: dict[str, str] = field(factory=dict[str, str])
    backend_args: dict[str, EngineValue] = field(factory=dict[str, EngineValue])


@frozen
class ExternalRoute:
    """`[[external_routes]]`: a model that is served elsewhere, by anything that speaks OpenAI's protocol."""

    model_name: str = checked(_is_model_name)
    api_base: str = checked(_is_http)
    upstream_model: str | None = checked(_is_one_line, None)
    api_key_env: str | None = checked(_is_variable, None)
    headers: dict[str, str] = checked(_are_headers, attrs.Factory(dict[str, str]))
    ca_certificates: str | None = None
    max_in_flight: int | None = checked(_is_count, None)
    drop_params: bool | None = None
    additional_drop_params: list[str] = checked(check_paths, attrs.Factory(list[str]))
    allowed_openai_params: list[str] = checked(_are_params, attrs.Factory(list[str]))
    supported_openai_params: list[str] | None = checked(_are_params, None)


@frozen
class LitellmSettings:
    """`[litellm_settings]`: the defaults of all external routes."""

    drop_params: bool = False
    additional_drop_params: list[str] = checked(check_paths, attrs.Factory(list[str]))
    allowed_openai_params: list[str] = checked(_are_params, attrs.Factory(list[str]))


@frozen
class EngineSettings:
    """`[engines.NAME]`."""

    python: str | None = None


@frozen
class Config:
    """The whole file."""

    server_settings: ServerSettings = ServerSettings()
    routing: Routing = Routing()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    logs: Logs = Logs()
    litellm_settings: LitellmSettings = LitellmSettings()
    managed_workers: list[ManagedWorker] = field(factory=list[ManagedWorker])
    external_routes: list[ExternalRoute] = field(factory=list[ExternalRoute])
    engines: dict[str, EngineSettings] = field(factory=dict[str, EngineSettings])


_SECTIONS: tuple[type[Any], ...] = (
    ServerSettings, Routing, Limits, Timeouts, Logs, LitellmSettings,
    ManagedWorker, ExternalRoute, EngineSettings, Config,
)  # fmt: skip


def load(path: pathlib.Path) -> Config:
    """Read a configuration file. Raises Exit 64 with every problem in it, one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Exit(EXIT_USAGE, f"The configuration {path} cannot be read: {reason}.") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Config:
    """Read a configuration from text; `source` is what messages call it. Raises Exit 64."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
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


def is_secret(name: str) -> bool:
    """Say whether an argument of this name has a value that is shown to nobody."""
    return _SECRET.search(name) is not None


def engine_flags(arguments: Mapping[str, EngineValue]) -> list[str]:
    """Write engine arguments as flags: `max_model_len = 2048` is ``--max-model-len 2048``.

    true is the flag alone, false its ``--no-`` form, a list several values, a table JSON.
    """
    flags: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags.append(f"--{name}={value}")
    return flags


def strict_converter(*, forbid_extra_keys: bool) -> cattrs.Converter:
    """Make a converter that coerces nothing: strings, whole numbers, numbers and booleans are what they are."""
    converter = cattrs.Converter(forbid_extra_keys=forbid_extra_keys, detailed_validation=True)
    exact: list[tuple[type, str]] = [(str, "a string"), (int, "a whole number"), (bool, "true or false")]
    for kind, words in exact:
        converter.register_structure_hook(kind, _exactly(kind, words))
    converter.register_structure_hook(float, _number)
    return converter


def _converter() -> cattrs.Converter:
    converter = strict_converter(forbid_extra_keys=True)
    converter.register_structure_hook(EngineValue, _engine_value)
    for section in _SECTIONS:
        prepare = _with_engine_arguments if section is ManagedWorker else None
        converter.register_structure_hook(section, section_hook(section, converter, prepare))
    return converter


def section_hook(
    section: type[Any],
    converter: cattrs.Converter,
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Callable[[Any, Any], Any]:
    """Structure one table: exactly its keys, each of the right type and past its check."""

    def hook(attribute: "attrs.Attribute[Any]") -> Callable[[Any, Any], Any]:
        check: Check | None = attribute.metadata.get("check")
        container = get_origin(attribute.type)

        def structure(value: Any, kind: Any) -> Any:
            if container in (list, dict) and type(value) is not container:
                raise ValueError(f"must be {'an array' if container is list else 'a table'}, not {_shown(value)}")
            structured = converter.structure(value, kind)
            if check is not None:
                check(structured)
            return structured

        return structure

    overrides: Any = {attribute.name: override(struct_hook=hook(attribute)) for attribute in attrs.fields(section)}
    structure = make_dict_structure_fn(section, converter, **overrides)

    def table(value: Any, kind: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"must be a table, not {_shown(value)}")
        mapping = cast("Mapping[str, Any]", value)
        return structure(prepare(mapping) if prepare else mapping, kind)

    return table


def _exactly(kind: type, words: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"must be {words}, not {_shown(value)}")
        return value

    return structure


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"must be a number, not {_shown(value)}")
    return float(value)


def _engine_value(value: Any, _: Any) -> EngineValue:
    if type(value) not in (str, int, float, bool, list, dict):
        raise ValueError(f"must be a string, number, boolean, list or table, not {_shown(value)}")
    return cast("EngineValue", value)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


def _with_engine_arguments(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move what is not iChat's into `backend_args`, unless it looks like a typing error in one of iChat's keys."""
    ours = [attribute.name for attribute in attrs.fields(ManagedWorker)]
    kept = {key: table[key] for key in table if key in ours or difflib.get_close_matches(key, ours, 1, 0.85)}
    inline = {key: table[key] for key in table if key not in kept}
    if inline and isinstance(kept.get("backend_args", {}), dict):
        kept["backend_args"] = {**inline, **kept.get("backend_args", {})}
    return kept


_NOT_THE_ENGINES = frozenset((
    "served_model_name", "model", "backend", "host", "port", "worker_id", "gateway_address", "heartbeat_interval",
    "advertise_host", "unix_socket", "max_in_flight", "drain_s", "stop_s",
))  # fmt: skip


def _contradictions(config: Config) -> Iterable[str]:
    routes = {route.model_name for route in config.external_routes}
    settings = config.server_settings
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        yield "server_settings: tls_certificate and tls_key go together"
    for index, worker in enumerate(config.managed_workers):
        for name in sorted(_NOT_THE_ENGINES.intersection(worker.backend_args)):
            yield f"managed_workers[{index}].backend_args.{name}: is iChat's, not the engine's"
        if worker.model_name in routes:
            yield f"managed_workers[{index}].model_name: {worker.model_name!r} is also an external route"


def problems_of(error: Exception, path: str = "") -> Iterable[str]:
    """Turn cattrs' tree of errors into one line for each leaf, with its path."""
    if isinstance(error, ClassValidationError):
        for inner, note in error.group_exceptions()[0]:
            yield from problems_of(inner, f"{path}.{note.name}" if path else note.name)
        for inner in error.group_exceptions()[1]:
            yield from problems_of(inner, path)
    elif isinstance(error, IterableValidationError):
        for inner, note in error.group_exceptions()[0]:
            index = note.index if isinstance(note.index, int) else f"{note.index}"
            yield from problems_of(inner, f"{path}[{index}]" if isinstance(index, int) else f"{path}.{index}")
        for inner in error.group_exceptions()[1]:
            yield from problems_of(inner, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [attribute.name for attribute in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields):
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
            yield f"{path}.{key}: unknown key{hint}" if path else f"{key}: unknown key{hint}"
    elif isinstance(error, KeyError):
        yield f"{path}: is missing"
    elif ".headers" in path or ".env" in path:
        yield f"{path}: {str(error).partition(', not ')[0]}"  # what is there may be a secret
    else:
        yield f"{path}: {error}"
