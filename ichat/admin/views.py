"""The responses of the control plane; `schemas.py` describes them from these classes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from ichat.admin.config_state import ConfigState
from ichat.config.models import ShadowConfig, TargetConfig
from ichat.engines.engine import EngineFlag
from ichat.fleet.worker_record import State
from ichat.hardware.host import HostResources
from ichat.hardware.machines import MachineView
from ichat.protocol.messages import Count
from ichat.relays.figures import RelayCrash, RelayView
from ichat.supervisor.engine_flags import InstalledEngine
from ichat.supervisor.reload_plan import ReloadStep
from ichat.supervisor.starts import GatewayCrash, GatewayTakeover


@frozen
class GatewayHealth:
    """The gateway answers."""

    status: Literal["ok"] = "ok"


@frozen
class Welcome:
    """What answers here, for a program that asks for `/`."""

    version: str
    console: str | None
    """The path of the console; None: it is switched off."""
    name: Literal["ichat"] = "ichat"
    openapi: str = "/openapi.json"
    api_base: str = "/v1"


@frozen
class Launched:
    """A worker that was launched."""

    worker_id: str
    """The first copy."""
    state: State
    worker_ids: Sequence[str]
    """All of its copies."""


@frozen
class LaunchCheck:
    """What would become of a worker that was not launched."""

    objections: Sequence[str]
    """What would keep it from starting now, each in a sentence that says what to do; empty: it would be started."""
    unchecked: str | None
    """Why its engine's arguments could not be checked, in a sentence; None: they were, or it has none."""
    command: str
    """What would be run, as a shell would read it, without secrets."""
    settings: Mapping[str, Any]
    """Every key of `[[managed_workers]]` with the value that it would have; secrets are masked."""


@frozen
class NewOrder:
    """An order for a worker on another machine, with its code: no other answer shows the code."""

    worker_id: str
    launch: int
    """The number of the launch: higher than that of any earlier order."""
    code: str
    """Starts the worker, once."""
    expires_at: float
    """Until then the code can be used, in seconds since 1970."""
    gateway_address: str
    """The gateway's address for other machines, as far as the gateway knows it."""
    is_local_only: bool
    """Whether the gateway listens on this machine's loopback address alone: no other machine reaches it."""


@frozen
class OrderView:
    """An order, without its code."""

    worker_id: str
    launch: int
    model_name: str
    """Empty once the launch has ended."""
    made_at: float
    expires_at: float
    fetched_at: float | None
    """When the order was fetched; None: not yet."""
    fetched_from: str
    """The address from which it was fetched."""
    ended: str
    """How the launch has ended, in a few words after the worker's name; empty: it has not."""


@frozen
class OrderList:
    """The orders that wait or have a worker, and the newest of those that have ended, newest first."""

    orders: Sequence[OrderView]


@frozen
class EngineList:
    """The engines that are built in or configured."""

    engines: Sequence[InstalledEngine]


@frozen
class EngineFlagList:
    """The flags of an engine, without those that are the worker's own."""

    engine: str
    python: str
    """The interpreter that was asked."""
    flags: Sequence[EngineFlag]


@frozen
class ConfigView:
    """The configuration that is in force."""

    path: str | None
    """The file that it is from; None: it is from none."""
    file: ConfigState
    """How that file stands to the configuration in force."""
    file_changed: bool
    """Whether the file differs from the configuration in force, or is gone."""
    watched: bool
    """Whether the gateway reloads a changed file by itself (`server_settings.watch_config`)."""
    settings: Mapping[str, Any]
    """Every section with the values in force; secrets are masked, and hashes of keys are cut short."""
    changed: Sequence[str]
    """The keys with values other than the defaults, for example `server_settings.port`."""


@frozen
class Stopped:
    """A worker that was stopped."""

    worker_id: str
    in_config: bool
    """Whether the worker is in the configuration."""
    stays: bool
    """Whether it is listed as `stopped` until it is started, or its table changes; else it is forgotten: the next
    reload, or start of the gateway, starts a worker of the configuration again."""
    state: Literal["stopped"] = "stopped"


@frozen
class WorkerCommanded:
    """A worker that was started, restarted, drained or resumed."""

    worker_id: str
    state: State
    """Its state now."""


@frozen
class RequestCancelled:
    """A request that was cancelled."""

    id: str
    cancelled: Count
    """How many it were: 1."""


@frozen
class ModelChange:
    """A model that was loaded, unloaded, put to sleep, or woken."""

    model: str
    worker_id: str
    """The worker that this was about."""
    state: State
    """The worker's state since then."""
    seconds: float
    """The duration of the request."""


@frozen
class ReplicasChange:
    """Another number of copies of a model."""

    model: str
    min: Count
    max: Count
    started: Sequence[str]
    """The ids of new workers, which are not ready yet."""
    ending: Sequence[str]
    """The ids of workers that get no new requests, and end after their last request."""


@frozen
class CopyCounts:
    """The copies of a model."""

    ready: Count
    starting: Count
    """Copies that will be ready without being asked for."""
    wanted: Count


@frozen
class GatewayView:
    """The gateway's process."""

    id: str
    """Different at each start of the gateway."""
    version: str
    pid: Count
    uptime_s: float
    """Seconds since the gateway's start."""
    relays: Sequence[RelayView] = ()
    """The processes that have the clients' connections; none: this process has them."""
    term: Count = 1
    """The number of this start of a gateway with its state directory."""
    last_crash: GatewayCrash | None = None
    """The last crash of a process that had this gateway."""
    last_takeover: GatewayTakeover | None = None
    last_relay_crash: RelayCrash | None = None
    """The last end of a relay without an order, since this process began."""
    retiring_pid: Count | None = None
    """The process that has handed the gateway over, while it ends its connections."""


@frozen
class ModelLoad:
    """The load of a model."""

    id: str
    workers: Count
    """Workers or external routes that can serve the model now."""
    in_flight: Count
    """Unfinished requests that these have."""
    circuits_open: Count
    """How many of these have a circuit that is not closed."""
    queued: Count
    """Requests that wait in the gateway for a free worker, or for the model to be loaded."""
    waiting_s: float | None
    """Seconds for which the oldest of these has waited; None: there are none."""
    loaded: bool | None
    """Whether a model that is loaded on demand is loaded; None: it is no such model."""
    copies: CopyCounts | None = None
    """The copies of a model with `replicas`; None: it has none."""


@frozen
class AliasView:
    """A name that the configuration maps to models."""

    name: str
    targets: Sequence[TargetConfig]
    """The models that share its requests."""
    fallbacks: Sequence[str]
    """The models that are asked where the chosen target cannot answer, in this order."""
    longer: str | None
    """The model for prompts that are too long for the chosen model."""
    shadow: ShadowConfig | None
    """The model that gets copies of a share of the requests."""


@frozen
class ClusterStatus:
    """The gateway, its machine, and the load."""

    gateway: GatewayView
    resources: HostResources
    machines: Sequence[MachineView]
    """The gateway's machine, and those of all workers that report theirs and are heard of."""
    workers: Mapping[State, Count]
    """How many workers are in each state; a state without workers is left out."""
    models: Sequence[ModelLoad]
    """All model names, whether served now or not."""
    config: ConfigState
    """How the configuration file stands to the configuration in force."""


@frozen
class WorkerVersions:
    """The engine of a worker, and the packages it consists of."""

    worker_id: str
    backend: str
    versions: Mapping[str, str]


@frozen
class Version:
    """The versions of the gateway and of its workers."""

    version: str
    python: str
    packages: Mapping[str, str]
    workers: Sequence[WorkerVersions]
    """The engine and packages of each worker that has sent a heartbeat."""


@frozen
class ReloadResult:
    """The effect of a reload, or of a dry run."""

    applied: bool
    """False: the reload was a dry run, and nothing was changed."""
    summary: str
    """For example `+1 start, ~0 restart, -0 stop, 3 untouched`."""
    plan: Sequence[ReloadStep]
