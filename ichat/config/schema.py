"""The gateway's configuration as frozen sections, with the checks of their values.

Names follow `ichat.toml.example`, which explains each of them. Units stand last: `_s` seconds, `_bytes_max` bytes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from attrs import field, frozen

from ichat.config import checks
from ichat.config.downloads import DownloadSettings
from ichat.config.hubs import HUBS
from ichat.config.litellm import WHOLE_FILE, GeneralSettings, LitellmSettings, RouterSettings
from ichat.config.models import AliasConfig, ShadowConfig, SwapSetConfig, TargetConfig
from ichat.config.openai_params import check_paths
from ichat.config.ray import Label, RayEngine, RaySettings, are_labels, is_place
from ichat.config.replicas import REPLICAS_SCHEMA, Replicas, Scale, are_replicas
from ichat.config.strict import Between, checked, one_of
from ichat.config.usage import PRICE, Price, UsageSettings

Scalar = str | int | float | bool
EngineValue = Scalar | list[Scalar] | dict[str, Any]
"""The types of an engine argument in TOML."""

LINE_BYTES_LIMIT = 64 * 1024
"""The upper limit of `logs.line_bytes_max`; every buffer of lines holds at least a line of this size."""
DRAIN_S_MAX = 3600.0
"""The longest time that a request to stop a worker may allow for its unfinished requests."""
POLICY_NAMES = ("prefix_aware", "least_loaded", "power_of_two", "round_robin", "random")
"""The policies of `routing/policies.py`, and that of `routing/prefix_policy.py`."""

_PORT = Between(0, 65535)
_SECONDS, _SECONDS_OR_0 = Between(0.001, 1e9), Between(0, 1e9)
_COUNT, _AMOUNT, _PERIOD_AMOUNT = Between(1, 1_000_000), Between(1, 10**12), Between(1, 10**15)
_BYTES = Between(LINE_BYTES_LIMIT, 1024**4)


@frozen
class ServerSettings:
    """`[server_settings]`: where the gateway listens, its state, and its headers."""

    host: str = checked(None, "127.0.0.1", reload="later")
    port: int = checked(_PORT, 4000, reload="later")
    log_level: str = checked(one_of("debug", "info", "warning", "error"), "info")
    tls_certificate: str | None = None
    tls_key: str | None = None
    worker_header: bool = True
    overhead_header: bool = True
    prefix_header: bool = True
    hosts: list[str] = checked(checks.are_hosts, attrs.Factory(list[str]))
    cors_origins: list[str] = checked(checks.are_origins, attrs.Factory(list[str]))
    state_directory: str | None = checked(checks.is_path, None, reload="later")
    watch_config: bool = True
    console: bool = True
    relays: checks.Relays = checked(checks.are_relays, 0, {"minimum": 0, "maximum": checks.RELAYS_MAX})


@frozen
class Routing:
    """`[routing]`: which worker gets a request."""

    policy: str = checked(one_of(*POLICY_NAMES), "prefix_aware")
    session_header: str = checked(checks.is_header_name, "x-session-id")
    max_in_flight: int = checked(_COUNT, 4096)
    queue_max: int = checked(Between(0, 1_000_000), 1024)
    prefix_entries_max: int = checked(Between(1000, 100_000_000), 65_536)
    shadows_max: int = checked(Between(0, 10_000), 16)
    prefix_ttl_s: float = checked(Between(1, 86400), 600.0)


@frozen
class Logs:
    """`[logs]`: the gateway's log of requests, and the kept part of its workers' output."""

    access_log: str = checked(None, "-", reload="later")
    format: str = checked(one_of("auto", "text", "json"), "auto", reload="later")
    access_lines_max: int = checked(_COUNT, 10_000, reload="later")
    finished_requests_max: int = checked(Between(0, 10_000), 500)
    ring_lines_max: int = checked(_COUNT, 10_000)
    ring_bytes_max: int = checked(_BYTES, 2 * 1024 * 1024)
    line_bytes_max: int = checked(Between(256, LINE_BYTES_LIMIT), 16 * 1024)
    echo: bool = True
    echo_bytes_max: int = checked(_BYTES, 4 * 1024 * 1024)
    directory: str | None = checked(checks.is_path, None, reload="later")
    file_bytes_max: int = checked(_BYTES, 16 * 1024 * 1024)
    keep_days: float = checked(Between(0.01, 36500), 30.0)
    files_max: int = checked(Between(1, 1000), 3)
    last_lines_max: int = checked(Between(0, 1000), 50)
    followers_max: int = checked(_COUNT, 256)
    followed_max: int = checked(Between(0, 4096), 256)


@frozen
class Limits:
    """`[limits]`."""

    head_bytes_max: int = checked(Between(1024, 16 * 1024 * 1024), 64 * 1024, reload="workers")
    body_bytes_max: int = checked(Between(1024, 64 * 1024**3), 128 * 1024 * 1024, reload="workers")
    connections_max: int = checked(_COUNT, 8192, reload="workers")
    connections_per_address_max: int = checked(_COUNT, 4096)
    workers_max: int = checked(_COUNT, 16384)
    joined_bytes_max: int = checked(_BYTES, 44 * 1024 * 1024)
    joined_bytes_per_address_max: int = checked(_BYTES, 16 * 1024 * 1024)
    joined_names_max: int = checked(_COUNT, 20_000)
    joined_names_per_address_max: int = checked(_COUNT, 10_000)
    scraped_workers_max: int = checked(Between(0, 1_000_000), 100)
    heartbeats_per_second_max: int = checked(_COUNT, 500)
    made_keys_max: int = checked(_COUNT, 10_000)
    max_in_flight: int | None = checked(_COUNT, None)
    requests_per_minute: int | None = checked(_AMOUNT, None)
    tokens_per_minute: int | None = checked(_AMOUNT, None)
    tokens_per_day: int | None = checked(_PERIOD_AMOUNT, None)
    tokens_per_month: int | None = checked(_PERIOD_AMOUNT, None)
    budget_per_month: float | None = checked(PRICE, None)
    event_streams_max: int = checked(_COUNT, 64)


@frozen
class HistorySettings:
    """`[history]`: the samples of the last hour that the console and `ichat.pyz top` draw."""

    sample_s: float = checked(Between(1, 3600), 5.0)
    seconds: float = checked(Between(1, 86400), 3600.0)


@frozen
class Key:
    """`[[security.keys]]`: a client's key, given by its hash or by a variable, and its permissions."""

    name: str = checked(checks.is_key_name)
    """The key's name in the access log, in limits and in messages."""
    key_hash: str | None = checked(checks.is_key_hash, None)
    """The key's SHA-256, as `./ichat.pyz key` prints it."""
    key_env: str | None = checked(checks.is_variable, None)
    """A variable of the gateway's environment that has the key."""
    models: list[str] | None = None
    """The models that it may use; None: all."""
    metrics: bool = False
    """Whether it may read /metrics."""
    engine_control: bool = False
    """Whether it may send workers what steers their engines."""
    max_in_flight: int | None = checked(_COUNT, None)
    """The most requests under way at the same time; None: no limit."""
    requests_per_minute: int | None = checked(_AMOUNT, None)
    """The most requests in a minute; None: no limit."""
    tokens_per_minute: int | None = checked(_AMOUNT, None)
    """The most tokens in a minute; None: no limit."""
    tokens_per_day: int | None = checked(_PERIOD_AMOUNT, None)
    """The most tokens in a day (UTC); None: no limit."""
    tokens_per_month: int | None = checked(_PERIOD_AMOUNT, None)
    """The most tokens in a calendar month (UTC); None: no limit."""
    budget_per_month: float | None = checked(PRICE, None)
    """The most that its requests may cost in a calendar month, by `[prices]`; None: no limit."""


@frozen
class Security:
    """`[security]`: keys and permissions."""

    admin_key_hash: str | None = checked(checks.is_key_hash, None)
    admin_key_env: str | None = checked(checks.is_variable, None)
    join_token_env: str | None = checked(checks.is_variable, None)
    trusted_proxies: list[str] = checked(checks.are_networks, attrs.Factory(list[str]))
    worker_networks: list[str] = checked(checks.are_networks, attrs.Factory(list[str]))
    open_metrics: bool = False
    keys: list[Key] = field(factory=list[Key])

    def variables(self) -> list[str]:
        """Return the names of the environment variables that hold keys."""
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
    """`[health]`: health checks of external routes, and of workers that are not iChat's own."""

    interval_s: float = checked(_SECONDS_OR_0, 10.0)
    timeout_s: float = checked(_SECONDS, 5.0)
    failures_max: int = checked(_COUNT, 3)
    path: str = checked(checks.is_target, "/health")


@frozen
class Timeouts:
    """`[timeouts]`."""

    head_s: float = checked(_SECONDS, 30.0)
    body_s: float = checked(_SECONDS, 300.0)
    keep_alive_s: float = checked(_SECONDS, 120.0)
    client_stall_s: float = checked(_SECONDS, 60.0, reload="workers")
    unread_s: float = checked(_SECONDS, 10.0)
    queue_s: float = checked(_SECONDS, 30.0)
    load_wait_s: float = checked(_SECONDS, 600.0)
    restart_wait_s: float = checked(_SECONDS_OR_0, 600.0)
    load_comment_s: float = checked(_SECONDS_OR_0, 10.0)
    connect_s: float = checked(_SECONDS, 5.0)
    upstream_idle_s: float = checked(_SECONDS, 30.0)
    first_byte_s: float = checked(_SECONDS, 600.0)
    stream_stall_s: float = checked(_SECONDS, 600.0)
    sse_keepalive_s: float = checked(_SECONDS_OR_0, 0.0)
    drain_s: float = checked(_SECONDS_OR_0, 30.0)
    takeover_s: float = checked(_SECONDS, 3600.0)
    stop_s: float = checked(_SECONDS, 15.0, reload="workers")
    load_s: float = checked(_SECONDS, 3600.0)
    wedged_after_s: float = checked(_SECONDS, 120.0)
    stuck_s: float = checked(_SECONDS_OR_0, 300.0)
    orphan_after_s: float = checked(_SECONDS_OR_0, 600.0, reload="workers")
    relay_silent_s: float = checked(_SECONDS, 10.0)
    owner_wait_s: float = checked(_SECONDS, 10.0)
    ownerless_s: float = checked(_SECONDS, 60.0)
    engine_flags_s: float = checked(_SECONDS, 120.0)


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

    model_name: str = checked(checks.is_model_name)
    """The name that requests use."""
    model_path: str = checked(checks.not_empty)
    """A directory, or a name on the model hub."""
    hub: str | None = checked(one_of(*HUBS), None)
    """The hub from which the gateway downloads the model before the worker's start; None: the engine downloads it."""
    backend: str = checked(checks.not_empty, "vllm")
    """`vllm`, `sglang`, or the name of another engine that is installed."""
    gpu_ids: list[int] | None = None
    """GPU numbers as nvidia-smi shows them; None: all of them, without `gpus`."""
    gpus: checks.Gpus | None = checked(checks.are_gpus, None, {"minimum": 0, "maximum": checks.GPUS_MAX})
    """The GPUs that the gateway chooses for the worker: a number, a share of a GPU, or `auto`; None: none."""
    gpu_memory_gib: float | None = checked(Between(0.01, 1e6), None)
    """The memory that the worker needs on each GPU, for `gpus`; None: by an estimate."""
    on: str = checked(is_place, "here", {"enum": ["here", "ray"]})
    """Where the worker runs: on the gateway's machine, or on a node of the cluster of `[ray]`."""
    labels: dict[str, Label] = checked(are_labels, attrs.Factory(dict[str, Label]))
    """The labels of the nodes of Ray that may run the worker."""
    memory_gib: float | None = checked(Between(0.01, 1e6), None)
    """The main memory that Ray books for the worker; None: none."""
    replicas: Replicas = checked(are_replicas, Replicas(1, 1), REPLICAS_SCHEMA, reload="now")
    """The number of copies, or its bounds `min` and `max`; a `min` of 0 means that the model is loaded on demand."""
    scale: Scale = field(default=Scale(), metadata={"reload": "now"})
    """When copies are added, and when a copy ends, between the bounds of `replicas`."""
    host: str | None = None
    """The address on which the worker listens beside its unix socket; None: 127.0.0.1 if there is a `port`."""
    port: int | None = checked(_PORT, None)
    """The port on which the worker listens beside its unix socket; 0: any free port; None: none, without a `host`."""
    heartbeat_interval: float = checked(Between(0.1, 3600), 3.0)
    """Seconds between two heartbeats of the worker."""
    max_in_flight: int | None = checked(_COUNT, None, reload="now")
    """The most requests that the worker serves at the same time; None: `routing.max_in_flight`."""
    share_gpus: bool = checked(None, False, reload="now")
    """Whether the worker may use GPUs that another worker uses too; both must allow it."""
    on_gateway_exit: str = checked(one_of("stop", "keep"), "stop")
    """Whether the worker ends with the gateway, or keeps running until the next gateway adopts it."""
    load: str = checked(one_of("start", "on_demand"), "start", reload="now")
    """Whether the worker has a process from the start on, or only while its model is wanted."""
    idle_s: float = checked(_SECONDS_OR_0, 0.0, reload="now")
    """Seconds without a request after which an on-demand worker is unloaded; 0: it stays until its room is needed."""
    when_idle: str = checked(one_of("stop", "sleep"), "stop", reload="now")
    """Whether an on-demand worker that is not needed ends, or sleeps where its engine can."""
    min_loaded_s: float = checked(_SECONDS_OR_0, 30.0, reload="now")
    """Seconds for which an on-demand worker that is in use stays loaded while other models want its room."""
    log_streaming: bool = True
    """Whether the worker streams its own lines at /logs/stream."""
    responses_max: int = checked(Between(0, 1_000_000), 1000)
    """The most responses of /v1/responses that the worker keeps."""
    reasoning_field: str = checked(one_of("engine", "reasoning", "reasoning_content", "both"), "engine")
    """The name of the field of a chat that holds the model's reasoning."""
    media_domains: list[str] = checked(checks.are_media_domains, attrs.Factory(list[str]))
    """The domains of pictures, sounds and videos that the engine may fetch; `file:`: SGLang opens files here, too."""
    prefix_reports: str = checked(one_of("auto", "true", "false"), "auto")
    """Whether the worker reports which beginnings of prompts its engine's cache has lost; `auto`: where it can."""
    python: str | None = None
    """The Python interpreter that has the engine; None: the one of `[engines.NAME]`."""
    env: dict[str, str] = field(factory=dict[str, str])
    """Variables to add to the worker's environment."""
    backend_args: dict[str, EngineValue] = field(factory=dict[str, EngineValue])
    """Arguments of the engine, also those with the names of keys of this table."""

    def tcp_address(self) -> tuple[str, int] | None:
        """Return the worker's host and port (0: any free port); None: it listens on its unix socket only."""
        if self.host is None and self.port is None:
            return None
        return "127.0.0.1" if self.host is None else self.host, self.port or 0


@frozen
class ExternalRoute:
    """`[[external_routes]]`: a model that another server with OpenAI's API serves."""

    model_name: str = checked(checks.is_model_name)
    api_base: str = checked(checks.is_http)
    upstream_model: str | None = checked(checks.is_one_line, None)
    api_key_env: str | None = checked(checks.is_variable, None)
    headers: dict[str, str] = checked(checks.are_headers, attrs.Factory(dict[str, str]))
    ca_certificates: str | None = None
    health_path: str | None = checked(checks.is_target, None)
    max_in_flight: int | None = checked(_COUNT, None)
    drop_params: bool | None = None
    additional_drop_params: list[str] = checked(check_paths, attrs.Factory(list[str]))
    allowed_openai_params: list[str] = checked(checks.are_params, attrs.Factory(list[str]))
    supported_openai_params: list[str] | None = checked(checks.are_params, None)


@frozen
class RegisteredServer:
    """`[[registered_servers]]`: a server with OpenAI's API that is a worker of the fleet."""

    model_name: str = checked(checks.is_model_name)
    """The name that requests use, and that the server itself has for its model."""
    api_base: str = checked(checks.is_http)
    """The server's URL, http or https, with or without `/v1` at its end."""
    worker_id: str | None = checked(checks.is_worker_id, None)
    """The worker's id; None: made from the model's name."""
    api_key_env: str | None = checked(checks.is_variable, None)
    """A variable of the gateway's environment that has the server's key."""
    ca_certificates: str | None = None
    """A PEM file with the authorities to trust for https; None: those that the system trusts."""
    max_in_flight: int | None = checked(_COUNT, None)
    """The most requests under way; None: `routing.max_in_flight`."""


@frozen
class EngineSettings:
    """`[engines.NAME]`: an engine, `vllm`, `sglang` or another that is installed."""

    python: str | None = None
    """The Python interpreter that has the engine; None: the first that is found (`config/interpreters.py`)."""
    devices: str = checked(checks.is_devices, "CUDA_VISIBLE_DEVICES")
    """The variable that `gpu_ids` sets, for example HIP_VISIBLE_DEVICES for AMD's GPUs."""


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
    history: HistorySettings = HistorySettings()
    logs: Logs = Logs()
    usage: UsageSettings = UsageSettings()
    prices: dict[str, Price] = checked(checks.are_named_models, attrs.Factory(dict[str, Price]))
    litellm_settings: LitellmSettings = LitellmSettings()
    router_settings: RouterSettings = RouterSettings()
    general_settings: GeneralSettings = GeneralSettings()
    ray: RaySettings = RaySettings()
    downloads: DownloadSettings = DownloadSettings()
    managed_workers: list[ManagedWorkerConfig] = field(factory=list[ManagedWorkerConfig])
    swap_sets: list[SwapSetConfig] = field(factory=list[SwapSetConfig])
    registered_servers: list[RegisteredServer] = field(factory=list[RegisteredServer])
    external_routes: list[ExternalRoute] = field(factory=list[ExternalRoute])
    models: list[AliasConfig] = field(factory=list[AliasConfig])
    engines: dict[str, EngineSettings] = field(factory=dict[str, EngineSettings])

    ELSEWHERE: ClassVar[Mapping[str, str]] = WHOLE_FILE


SECTIONS: tuple[type[Any], ...] = (
    ServerSettings, Routing, Limits, Key, Security, Timeouts, CircuitBreaker, Health, Restart, HistorySettings, Logs,
    UsageSettings, Price, LitellmSettings, RouterSettings, GeneralSettings, AliasConfig, TargetConfig, ShadowConfig,
    Replicas, Scale, RayEngine, RaySettings, ManagedWorkerConfig, SwapSetConfig, RegisteredServer, ExternalRoute,
    EngineSettings, DownloadSettings, Config,
)  # fmt: skip
