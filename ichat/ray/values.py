"""The answers of Ray's dashboard as frozen values: jobs, nodes, and resources.

Each function reads a part of parsed JSON, and raises TypeError or ValueError if it has another form.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import attrs

from ichat.ray.sentences import shortened_reason

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Ids that do no harm in Ray: a job with a slash in its id stays pending for ever."""
MEMORY_BYTES_MAX = 2**50 // 100
"""The most memory that a job may book: 10^15 bytes overflow in Ray, and are placed."""
_MIB = 1 << 20

JobStatus = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
Resources = Mapping[str, float]
"""Amounts by Ray's names of resources: `CPU`, `GPU`, `memory` in bytes, and others."""
_Kind = TypeVar("_Kind")


@attrs.frozen
class RayVersion:
    """What answers at an address."""

    ray: str
    """The version of Ray's package."""
    session: str
    """The name of this start of the cluster: after another start of the head it is another name."""


@attrs.frozen
class RaySubmission:
    """A job for Ray. All users of the dashboard can read all of it."""

    id: str = attrs.field(validator=attrs.validators.matches_re(JOB_ID))
    entrypoint: str
    """A command for the shell of the node."""
    metadata: Mapping[str, str] = attrs.field(factory=dict[str, str])
    gpus: float = 0.0
    """A share of a GPU up to 1, or a whole number; with 0 the job may see all GPUs of its node."""
    cpus: float = 1.0
    """A job without any resource runs on the head."""
    memory_bytes: int = attrs.field(default=0, validator=attrs.validators.in_(range(MEMORY_BYTES_MAX + 1)))
    labels: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """The labels of its node, each with a value of Ray's: `b`, `!b`, `in(a,b)`, `!in(a,b)`."""
    package: str = ""
    """The URI of an uploaded package; Ray unpacks it into the job's working directory."""
    env: Mapping[str, str] = attrs.field(factory=dict[str, str])
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """Other keys of Ray's runtime environment: `pip`, `uv`, `conda`, `image_uri`."""

    def describe(self) -> Mapping[str, Any]:
        """Return the body of the request, without empty values."""
        own = {"working_dir": self.package, "env_vars": dict(self.env)}
        body = {
            "submission_id": self.id,
            "entrypoint": self.entrypoint,
            "metadata": dict(self.metadata),
            "entrypoint_num_gpus": self.gpus,
            "entrypoint_num_cpus": self.cpus,
            "entrypoint_memory": self.memory_bytes,
            "entrypoint_label_selector": dict(self.labels),
            "runtime_env": {**self.runtime_env, **{key: value for key, value in own.items() if value}},
        }
        return {key: value for key, value in body.items() if value}


@attrs.frozen
class RayJob:
    """A submitted job."""

    id: str
    status: JobStatus
    message: str = ""
    """Ray's sentence about the status, without a traceback."""
    error_type: str = ""
    node_id: str = ""
    """The node that runs the entrypoint; "" before it runs."""
    exit_code: int | None = None
    metadata: Mapping[str, str] = attrs.field(factory=dict[str, str])
    submitted_at: float | None = None
    """In seconds of the Unix clock of the head."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and Ray lets it be deleted."""
        return self.status not in ("PENDING", "RUNNING")


@attrs.frozen
class RayNode:
    """A node of the cluster: a raylet, alive or dead."""

    id: str
    ip: str
    is_alive: bool
    is_head: bool
    total: Resources
    labels: Mapping[str, str]
    state_message: str = ""
    """Why it is dead, in Ray's words."""

    @property
    def gpus(self) -> float:
        """How many GPUs Ray may give away there."""
        return self.total.get("GPU", 0.0)


@attrs.frozen
class RayGpu:
    """A GPU, as the driver of its node reports it."""

    index: int
    name: str
    uuid: str
    use: float | None
    """Share of the last moments in which it computed, 0 to 1."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@attrs.frozen
class RayHardware:
    """The hardware of a node, as the agent on it reports it."""

    hostname: str
    cpus: int | None
    cpu_use: float | None
    """0 to 1."""
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    gpus: Sequence[RayGpu]
    """Empty without a driver, also where GPUs are declared."""
    agent_port: int | None = None
    """Where its agent listens, which reads logs and starts jobs."""


@attrs.frozen
class RayDemand:
    """A shape of resources for which Ray has no room."""

    resources: Resources
    count: int


@attrs.frozen
class RayRoom:
    """The resources that are free, and those that Ray waits for."""

    free: Mapping[str, Resources]
    """By the id of the node."""
    demand: Sequence[RayDemand]
    coming: Sequence[str]
    """The nodes that an autoscaler is starting, by their types."""


def read_version(answer: object) -> RayVersion:
    """Return the version in an answer."""
    row = _object(answer)
    return RayVersion(_text(row, "ray_version"), _text(row, "session_name"))


def read_job(answer: object) -> RayJob:
    """Return the job in an answer."""
    row = _object(answer)
    status = _text(row, "status")
    if status not in get_args(JobStatus):
        raise ValueError(f"status {status!r}")
    started = _optional(row, "start_time", int)
    return RayJob(
        _text(row, "submission_id"),
        cast("JobStatus", status),
        shortened_reason(_text(row, "message", "")),
        _text(row, "error_type", ""),
        _text(row, "driver_node_id", ""),
        _optional(row, "driver_exit_code", int),
        {str(key): str(value) for key, value in _object(row.get("metadata") or {}).items()},
        None if started is None else started / 1000,
    )


def read_jobs(answer: object) -> list[RayJob]:
    """Return the submitted jobs in an answer, without drivers that Ray lists beside them."""
    rows = map(_object, _list(answer))
    return [read_job(row) for row in rows if row.get("type") == "SUBMISSION" and row.get("submission_id")]


def read_nodes(answer: object) -> list[RayNode]:
    """Return the living and dead nodes in an answer."""
    rows = _list(_inside(answer, "data", "result").get("result"))
    return [_node(_object(row)) for row in rows]


def _node(row: Mapping[str, Any]) -> RayNode:
    labels = {str(key): str(value) for key, value in _object(row.get("labels") or {}).items()}
    return RayNode(
        _text(row, "node_id"), _text(row, "node_ip"), _text(row, "state") == "ALIVE",
        row.get("is_head_node") is True, _amounts(row.get("resources_total") or {}), labels,
        shortened_reason(_text(row, "state_message", "")),
    )  # fmt: skip


def read_hardware(answer: object) -> dict[str, RayHardware]:
    """Return the hardware in an answer, by the ids of the nodes; a node without a report of its agent is missing."""
    found: dict[str, RayHardware] = {}
    for row in map(_object, _list(_inside(answer, "data").get("summary"))):
        raylet = _object(row.get("raylet") or {})
        if "hostname" in row:
            port = _optional(raylet, "dashboardAgentListenPort", int)
            found[_text(raylet, "nodeId")] = attrs.evolve(_hardware(row), agent_port=port)
    return found


def _hardware(row: Mapping[str, Any]) -> RayHardware:
    cpus = _list(row.get("cpus") or [None])[0]
    memory = [*_list(row.get("mem") or []), None, None]
    use = _optional(row, "cpu", float)
    return RayHardware(
        _text(row, "hostname"),
        cpus if isinstance(cpus, int) else None,
        None if use is None else use / 100,
        memory[0] if isinstance(memory[0], int) else None,
        memory[1] if isinstance(memory[1], int) else None,
        [_gpu(_object(gpu)) for gpu in _list(row.get("gpus") or [])],
    )


def _gpu(row: Mapping[str, Any]) -> RayGpu:
    use = _optional(row, "utilizationGpu", float)
    used, total = _optional(row, "memoryUsed", float), _optional(row, "memoryTotal", float)
    return RayGpu(
        _optional(row, "index", int) or 0,
        _text(row, "name", ""),
        _text(row, "uuid", ""),
        None if use is None else use / 100,
        None if used is None else int(used * _MIB),
        None if total is None else int(total * _MIB),
    )


def read_room(answer: object) -> RayRoom:
    """Return the free resources in an answer; none before the head's monitor has written its first report."""
    status = _inside(answer, "data").get("clusterStatus")
    if status is None:
        return RayRoom({}, [], [])
    loads = _inside(status, "loadMetricsReport")
    free = {
        node: {name: total - used for name, (used, total) in _pairs(amounts).items()}
        for node, amounts in _object(loads.get("usageByNode") or {}).items()
    }
    demand = [_demand(_list(row)) for row in _list(loads.get("resourceDemand") or [])]
    report = _object(_object(status).get("autoscalerReport") or {})
    pending = [str(_list(row)[1]) for row in _list(report.get("pendingNodes") or []) if len(_list(row)) > 1]
    launches = _object(report.get("pendingLaunches") or {})
    return RayRoom(free, demand, [*pending, *(name for name, count in launches.items() if count)])


def _demand(row: Sequence[Any]) -> RayDemand:
    if len(row) < 2 or not isinstance(row[1], int):
        raise ValueError("resourceDemand")
    return RayDemand(_amounts(row[0]), row[1])


def _pairs(value: object) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, pair in _object(value).items():
        used, total = (*_list(pair), None, None)[:2]
        if not isinstance(used, int | float) or not isinstance(total, int | float):
            raise TypeError(f"usageByNode {name}")
        found[name] = (used, total)
    return found


def _amounts(value: object) -> dict[str, float]:
    return {name: amount for name, amount in _object(value).items() if isinstance(amount, int | float)}


def read_files(answer: object) -> list[str]:
    """Return the names of files in an answer."""
    kinds = _inside(answer, "data", "result").values()
    return sorted(str(name) for names in kinds for name in _list(names))


def _inside(value: object, *keys: str) -> Mapping[str, Any]:
    found = _object(value)
    for key in keys:
        found = _object(found.get(key))
    return found


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"an object is missing: {str(value)[:40]}")
    return cast("dict[str, Any]", value)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is missing: {str(value)[:40]}")
    return cast("list[Any]", value)


def _text(row: Mapping[str, Any], key: str, absent: str | None = None) -> str:
    value = row.get(key)
    if value is None and absent is not None:
        return absent
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value


def _optional(row: Mapping[str, Any], key: str, kind: type[_Kind]) -> _Kind | None:
    value = row.get(key)
    if isinstance(value, int) and kind is float:
        return cast("_Kind", float(value))
    return value if isinstance(value, kind) else None
