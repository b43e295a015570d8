"""The gateway's configuration: TOML in, frozen objects out, every problem reported at once and with its path.

Names follow `ichat.toml.example`, which explains each of them. Units stand last: `_s` seconds, `_bytes_max` bytes.
"""

import difflib
import functools
import ipaddress
import json
import pathlib
import re
import tomllib
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import cattrs
from attrs import field, frozen
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.openai_params import KNOWN, check_paths
from ichat.config.strict import Between, checked, one_of, problems_of, section_hook, shown, strict_converter
from ichat.errors import EXIT_USAGE, Exit

Scalar = str | int | float | bool
EngineValue = Scalar | list[Scalar] | dict[str, Any]
"""What an engine argument may be in TOML."""

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?|")
_PATH = re.compile(r"[!-~]*")
_TARGET = re.compile(r"/[!-\"$-~]{0,1023}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""What a key may be called."""
_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_FRAMING_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection", "expect", "x-request-id"))

MODEL_NAME_CHARACTERS_MAX = 256
LINE_BYTES_LIMIT = 64 * 1024
"""What `logs.line_bytes_max` may be at most; what holds lines holds one of that length."""
DRAIN_S_MAX = 3600.0
"""How long a request to stop a worker may give it to answer what it has."""
POLICY_NAMES = ("least_loaded", "power_of_two", "round_robin", "random")
"""The policies of `routing/policies.py`."""

_PORT = Between(0, 65535)
_SECONDS = Between(0.001, 1e9)
_SECONDS_OR_0 = Between(0, 1e9)
_COUNT = Between(1, 1_000_000)
_AMOUNT = Between(1, 10**12)
_BYTES = Between(LINE_BYTES_LIMIT, 1024**4)


def _not_empty(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def _is_target(value: str) -> None:
    if not _TARGET.fullmatch(value):
        raise ValueError("must be a path that begins with a slash, such as /health")


def _is_path(value: str) -> None:
    if not value or "\0" in value:
        raise ValueError("must be a path")


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


def _is_variable(value: str) -> None:
    if not _VARIABLE.fullmatch(value):
        raise ValueError("must be the name of an environment variable, which holds the key")


def _is_key_name(value: str) -> None:
    if not KEY_NAME.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits or any of . _ : @ -")


def _is_key_hash(value: str) -> None:
    if not _KEY_HASH.fullmatch(value):
        raise ValueError("must be like sha256:… (64 hexadecimal digits): `./ichat.pyz key` makes a key and its hash")


def _are_networks(values: list[str]) -> None:
    for value in values:
        try:
            ipaddress.ip_network(value, strict=False)
        except ValueError:
            raise ValueError(f"{value!r} is no address or network, such as 10.0.0.7 or 10.0.0.0/8") from None


def _are_params(values: list[str]) -> None:
    unknown = sorted(set(values) - KNOWN)
    if unknown:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no parameter of OpenAI's that could be dropped")


def _are_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is not the name of a header, or has a value that cannot be sent")
        if name.lower() in _FRAMING_HEADERS:
            raise ValueError(f"{name!r} is made by the gateway")


def _are_origins(values: list[str]) -> None:
    for value in values:
        usual_port = _USUAL_PORTS.get(value.partition(":")[0], "/")
        if value != "*" and (not _ORIGIN.fullmatch(value) or value.endswith(usual_port)):
            raise ValueError(
                f'{value!r} is neither "*" nor an origin as browsers send it, such as "https://chat.example": scheme,'
                " host and a port that is not the usual one, in lower case, without a path or a slash at the end"
            )


def _is_header_name(value: str) -> None:
    if value and not _HEADER_NAME.fullmatch(value):
        raise ValueError(f"must be the name of a header, not {value!r}")


def _is_model_name(value: str) -> None:
    if not value or len(value) > MODEL_NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be 1 to {MODEL_NAME_CHARACTERS_MAX} printable characters")


def _is_one_line(value: str) -> None:
    if not value.isprintable():
        raise ValueError("must be one line of printable characters")


@frozen
class ServerSettings:
    """`[server_settings]`."""

    host: str = "127.0.0.1"
    port: int = checked(_PORT, 4000)
    log_level: str = checked(one_of("debug", "info", "warning", "error"), "info")
    tls_certificate: str | None = None
    tls_key: str | None = None
    worker_header: bool = True
    overhead_header: bool = True
    cors_origins: list[str] = checked(_are_origins, attrs.Factory(list[str]))
    state_directory: str | None = checked(_is_path, None)
    watch_config: bool = True


@frozen
class Routing:
    """`[routing]`: who gets a request."""

    policy: str = checked(one_of(*POLICY_NAMES), "least_loaded")
    session_header: str = checked(_is_header_name, "x-session-id")
    max_in_flight: int = checked(_COUNT, 4096)
    queue_max: int = checked(Between(0, 1_000_000), 1024)


@frozen
class Logs:
    """`[logs]`: the gateway's log of requests, and what it keeps of its workers' output."""

    access_log: str = "-"
    access_lines_max: int = checked(_COUNT, 10_000)
    ring_lines_max: int = checked(_COUNT, 10_000)
    ring_bytes_max: int = checked(_BYTES, 2 * 1024 * 1024)
    line_bytes_max: int = checked(Between(256, LINE_BYTES_LIMIT), 16 * 1024)
    echo: bool = True
    echo_bytes_max: int = checked(_BYTES, 4 * 1024 * 1024)
    directory: str | None = checked(_is_path, None)
    file_bytes_max: int = checked(_BYTES, 16 * 1024 * 1024)
    keep_days: float = checked(Between(0.01, 36500), 30.0)
    files_max: int = checked(Between(1, 1000), 3)
    last_lines_max: int = checked(Between(0, 1000), 50)
    followers_max: int = checked(_COUNT, 256)
    followed_max: int = checked(Between(0, 4096), 256)


@frozen
class Limits:
    """`[limits]`."""

    head_bytes_max: int = checked(Between(1024, 16 * 1024 * 1024), 64 * 1024)
    body_bytes_max: int = checked(Between(1024, 64 * 1024**3), 128 * 1024 * 1024)
    connections_max: int = checked(_COUNT, 8192)
    connections_per_address_max: int = checked(_COUNT, 4096)
    max_in_flight: int | None = checked(_COUNT, None)
    requests_per_minute: int | None = checked(_AMOUNT, None)
    tokens_per_minute: int | None = checked(_AMOUNT, None)


@frozen
class Key:
    """`[[security.keys]]`: one client's key, by its hash or by the variable that holds it, and what it may ask for."""

    name: str = checked(_is_key_name)
    key_hash: str | None = checked(_is_key_hash, None)
    key_env: str | None = checked(_is_variable, None)
    models: list[str] | None = None
    metrics: bool = False
    engine_control: bool = False
    max_in_flight: int | None = checked(_COUNT, None)
    requests_per_minute: int | None = checked(_AMOUNT, None)
    tokens_per_minute: int | None = checked(_AMOUNT, None)


@frozen
class Security:
    """`[security]`: who may do what."""

    admin_key_hash: str | None = checked(_is_key_hash, None)
    admin_key_env: str | None = checked(_is_variable, None)
    join_token_env: str | None = checked(_is_variable, None)
    trusted_proxies: list[str] = checked(_are_networks, attrs.Factory(list[str]))
    worker_networks: list[str] = checked(_are_networks, attrs.Factory(list[str]))
    open_metrics: bool = False
    keys: list[Key] = field(factory=list[Key])

    def variables(self) -> list[str]:
        """Return the names of the environment's variables that hold keys."""
        named = [self.admin_key_env, self.join_token_env, *(key.key_env for key in self.keys)]
        return [name for name in named if name is not None]


@frozen
class CircuitBreaker:
    """`[circuit_breaker]`: when a worker or an external route that fails gets no requests for a while."""

    failures_max: int = checked(Between(0, 1_000_000), 5)
    open_s: float = checked(_SECONDS, 5.0)
    open_longest_s: float = checked(_SECONDS, 60.0)


@frozen
class Health:
    """`[health]`: how workers that are not iChat's own are asked whether they are well, and external routes."""

    interval_s: float = checked(_SECONDS_OR_0, 10.0)
    timeout_s: float = checked(_SECONDS, 5.0)
    failures_max: int = checked(_COUNT, 3)
    path: str = checked(_is_target, "/health")


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
    sse_keepalive_s: float = checked(_SECONDS_OR_0, 0.0)
    drain_s: float = checked(_SECONDS_OR_0, 30.0)
    stop_s: float = checked(_SECONDS, 15.0)
    load_s: float = checked(_SECONDS, 3600.0)
    wedged_after_s: float = checked(_SECONDS, 120.0)
    stuck_s: float = checked(_SECONDS_OR_0, 300.0)
    orphan_after_s: float = checked(_SECONDS_OR_0, 600.0)


@frozen
class Restart:
    """`[restart]`: when a managed worker that ended is started again."""

    first_s: float = checked(_SECONDS, 1.0)
    longest_s: float = checked(_SECONDS, 60.0)
    attempts_max: int = checked(_COUNT, 5)
    well_s: float = checked(_SECONDS_OR_0, 60.0)


@frozen
class ManagedWorkerConfig:
    """`[[managed_workers]]`: a worker that the gateway starts; keys that are not iChat's are the engine's arguments."""

    model_name: str = checked(_is_model_name, schema={"minLength": 1, "maxLength": MODEL_NAME_CHARACTERS_MAX})
    """The name that requests use."""
    model_path: str = checked(_not_empty, schema={"minLength": 1})
    """A directory, or a name on the model hub."""
    backend: str = checked(_not_empty, "vllm", {"minLength": 1})
    """`vllm`, `sglang`, or the name of another engine that is installed."""
    gpu_ids: list[int] | None = None
    """GPU numbers as nvidia-smi shows them; None: all of them."""
    host: str = "127.0.0.1"
    """The address on which the worker listens."""
    port: int = checked(_PORT, 0)
    """The port on which the worker listens; 0: any free one."""
    heartbeat_interval: float = checked(Between(0.1, 3600), 3.0)
    """Seconds between two heartbeats of the worker."""
    max_in_flight: int | None = checked(_COUNT, None)
    """The most requests that the worker serves at the same time; None: `routing.max_in_flight`."""
    share_gpus: bool = False
    """Whether the worker may use GPUs that another worker uses too; both must allow it."""
    on_gateway_exit: str = checked(one_of("stop", "keep"), "stop", {"enum": ["stop", "keep"]})
    """Whether the worker ends with the gateway, or keeps running until the next gateway takes it over."""
    log_streaming: bool = True
    """Whether the worker streams its own lines at /logs/stream."""
    responses_max: int = checked(Between(0, 1_000_000), 1000, {})
    """The most responses of /v1/responses that the worker keeps."""
    reasoning_field: str = checked(one_of("engine", "reasoning", "reasoning_content", "both"), "engine")
    """The name of the field of a chat that holds the model's reasoning."""
    python: str | None = None
    """The Python interpreter that has the engine; None: the one of `[engines.NAME]`."""
    env: dict[str, str] = field(factory=dict[str, str])
    """Variables to add to the worker's environment."""
    backend_args: dict[str, EngineValue] = field(factory=dict[str, EngineValue])
    """Arguments of the engine, also those whose names are keys of this table."""


@frozen
class ExternalRoute:
    """`[[external_routes]]`: a model that is served elsewhere, by anything that speaks OpenAI's protocol."""

    model_name: str = checked(_is_model_name)
    api_base: str = checked(_is_http)
    upstream_model: str | None = checked(_is_one_line, None)
    api_key_env: str | None = checked(_is_variable, None)
    headers: dict[str, str] = checked(_are_headers, attrs.Factory(dict[str, str]))
    ca_certificates: str | None = None
    health_path: str | None = checked(_is_target, None)
    max_in_flight: int | None = checked(_COUNT, None)
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
    security: Security = Security()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    circuit_breaker: CircuitBreaker = CircuitBreaker()
    health: Health = Health()
    restart: Restart = Restart()
    logs: Logs = Logs()
    litellm_settings: LitellmSettings = LitellmSettings()
    managed_workers: list[ManagedWorkerConfig] = field(factory=list[ManagedWorkerConfig])
    external_routes: list[ExternalRoute] = field(factory=list[ExternalRoute])
    engines: dict[str, EngineSettings] = field(factory=dict[str, EngineSettings])


_SECTIONS: tuple[type[Any], ...] = (
    ServerSettings, Routing, Limits, Key, Security, Timeouts, CircuitBreaker, Health, Restart, Logs, LitellmSettings,
    ManagedWorkerConfig, ExternalRoute, EngineSettings, Config,
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
    except (ValueError, RecursionError) as error:  # tomllib lets those of int() and of deep nesting through
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


def read_worker(table: object, config: Config) -> ManagedWorkerConfig:
    """Make a worker of parsed JSON that has the keys of `[[managed_workers]]`; a null means that a key is left out.

    `config` is what it must not contradict. Raises ApiError 400 with every problem.
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


def _without_nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


@functools.cache
def _converter() -> cattrs.Converter:
    converter = strict_converter(forbid_extra_keys=True)
    converter.register_structure_hook(EngineValue, _engine_value)
    for section in _SECTIONS:
        prepare = _with_engine_arguments if section is ManagedWorkerConfig else None
        converter.register_structure_hook(section, section_hook(section, converter, prepare))
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


def _with_engine_arguments(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move what is not iChat's into `backend_args`, unless it looks like a typing error in one of iChat's keys."""
    ours = [attribute.name for attribute in attrs.fields(ManagedWorkerConfig)]
    kept = {key: table[key] for key in table if key in ours or difflib.get_close_matches(key, ours, 1, 0.85)}
    inline = {key: table[key] for key in table if key not in kept}
    if inline and isinstance(kept.get("backend_args", {}), dict):
        kept["backend_args"] = {**inline, **kept.get("backend_args", {})}
    return kept


_NOT_THE_ENGINES = frozenset((
    "served_model_name", "model", "backend", "host", "port", "worker_id", "gateway_address", "heartbeat_interval",
    "advertise_host", "unix_socket", "max_in_flight", "drain_s", "stop_s", "log_streaming", "orphan_after_s",
))  # fmt: skip


def _contradictions(config: Config) -> Iterable[str]:
    settings = config.server_settings
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        yield "server_settings: tls_certificate and tls_key go together"
    yield from _contradictions_of_keys(config.security)
    for index, worker in enumerate(config.managed_workers):
        for problem in _contradictions_of(worker, config):
            yield f"managed_workers[{index}].{problem}"


def _contradictions_of_keys(security: Security) -> Iterable[str]:
    if security.admin_key_hash is not None and security.admin_key_env is not None:
        yield "security: admin_key_hash and admin_key_env are two ways to say the same: give one"
    for index, key in enumerate(security.keys):
        if (key.key_hash is None) == (key.key_env is None):
            yield f"security.keys[{index}]: needs either key_hash or key_env"
        if any(key.name == other.name for other in security.keys[:index]):
            yield f"security.keys[{index}].name: {key.name!r} is taken"


def _contradictions_of(worker: ManagedWorkerConfig, config: Config) -> Iterable[str]:
    settings = config.server_settings
    for name in sorted(_NOT_THE_ENGINES.intersection(worker.backend_args)):
        yield f"backend_args.{name}: is iChat's, not the engine's"
    if any(route.model_name == worker.model_name for route in config.external_routes):
        yield f"model_name: {worker.model_name!r} is also an external route"
    if worker.on_gateway_exit == "keep":
        if settings.port == 0 and settings.state_directory is None:
            yield 'on_gateway_exit: "keep" needs a server_settings.port that is not 0, or a state_directory there'
        if not worker.log_streaming:
            yield 'on_gateway_exit: "keep" needs log_streaming, or its output is lost with its gateway'
