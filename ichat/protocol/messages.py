"""The heartbeat: a worker's report to the gateway, at every change of its state and at intervals in between.

A heartbeat has two parts: the *registration*, with the worker's identity, address, engine and model, and the *status*,
which changes all the time. A whole heartbeat has both, and registers the worker. A gateway that says so accepts short
heartbeats as well, which have a digest in place of the registration. Every value is checked: headers get some.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.checks import MODEL_NAME_CHARACTERS_MAX, is_worker_id
from ichat.config.strict import Between, Schema, checked, problems_of, section_hook, strict_converter
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.field_checks import (
    FAILURE_CHARACTERS_MAX,
    GPUS_MAX,
    HEARTBEAT_INTERVAL_MAX_S,
    MODELS_MAX,
    NAMES_MAX,
    PHASE_CHARACTERS_MAX,
    PHASES_MAX,
    SECONDS_MAX,
    TOKENS_MAX,
    are_args,
    are_names,
    are_versions,
    at_most,
    is_host,
    is_name,
    is_progress,
    is_short,
    is_text,
    printable,
)
from ichat.protocol.usage import LATE_MAX, LateUsage

# Headers, in lower case. Clients may see the first four; the gateway and its workers use the others among themselves.
WORKER_HEADER = b"x-ichat-worker"
"""The id of the worker or external route that answered the request."""
OVERHEAD_HEADER = b"x-ichat-overhead-ms"
"""The milliseconds that the gateway spent before it asked the upstream."""
DROPPED_HEADER = b"x-ichat-dropped"
"""The parameters that the gateway removed from the request."""
ERROR_HEADER = b"x-ichat-error"
"""The source of an error: `gateway` or `worker`."""
CODE_HEADER = b"x-ichat-code"
"""Gives the gateway the code of an error that its control plane or a worker made."""
WHY_HEADER = b"x-ichat-why"
"""Gives the gateway in a few words the reason why a worker declines a request."""
CALLER_HEADER = b"x-ichat-caller"
"""Names the sender of a request to the control plane."""
PROOF_HEADER = b"x-ichat-proof"
"""Proves to a worker that a request is from its gateway."""
HOP_HEADER = b"x-ichat-hop"
"""The number of gateways that a request has passed."""
PEER_HEADER = b"x-ichat-peer"
"""Names the client's address and port to the process of the gateway that decides."""
INTERNAL = b"x-ichat-"
"""The prefix of all of them."""

HEARTBEAT_PATHS = frozenset((b"/v1/workers/heartbeat", b"/register"))
"""Where the gateway receives them."""

WorkerState = Literal["starting", "loading", "ready", "asleep", "waking", "following", "draining", "gone"]
"""The state that a worker reports; a `following` worker works for the leader of its group, a `gone` worker has ended.

The engine of an `asleep` worker has given its memory back, and the engine of a `waking` worker allocates it again.
"""

Count = Annotated[int, Between(0)]
"""A number of things or bytes in a response."""
Share = Annotated[float, Between(0, 1)]
"""A part of a whole in a response."""


def sentence(text: str) -> str:
    """Return any text as the `failure` of a heartbeat: a single printable line of bounded length."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= FAILURE_CHARACTERS_MAX else line[: FAILURE_CHARACTERS_MAX - 2] + " …"


_SIZE = Between(0, 2**63)
_SHARE = Between(0, 1)
_PID = Between(0, 2**32)
_FROM_0: Schema = {"minimum": 0}
_NAME: Schema = {"maxLength": MODEL_NAME_CHARACTERS_MAX}
_NAMES: Schema = {"maxItems": NAMES_MAX, "items": {"type": "string", **_NAME}}
_PHASES: Schema = {"maxItems": PHASES_MAX}
_are_phases = at_most(PHASES_MAX, "phases")


@attrs.frozen
class MachineGpu:
    """A GPU of a machine; a field that is None is not known."""

    index: int = checked(Between(0, 65535))
    """The GPU's number in the order of the PCI bus, as the process that reports it counts."""
    uuid: str = checked(is_text, "")
    name: str = checked(is_text, "")
    memory_total_bytes: int | None = checked(_SIZE, None, _FROM_0)
    memory_used_bytes: int | None = checked(_SIZE, None, _FROM_0)
    use: float | None = checked(_SHARE, None)
    """The share of the last moments in which the GPU computed, 0 to 1."""
    failure: str = checked(is_text, "")
    """Why the GPU does not answer; empty if it does."""
    held_bytes: int | None = checked(_SIZE, None, _FROM_0)
    """The GPU memory that the reporting worker holds; None: not known."""


@attrs.frozen
class Machine:
    """A machine; a field that is None is not known."""

    id: str = checked(is_worker_id)
    """Identifies this boot of the machine: the kernel's boot id, which containers on the machine share."""
    name: str = checked(is_text)
    """The host name of the machine, or of the container."""
    cpus: int | None = checked(_SIZE, None, _FROM_0)
    """The number of processors."""
    cpu_use: float | None = checked(_SHARE, None)
    """The busy share of all processors, 0 to 1, in steps of 0.05."""
    memory_total_bytes: int | None = checked(_SIZE, None, _FROM_0)
    memory_available_bytes: int | None = checked(_SIZE, None, _FROM_0)
    """The available memory, in steps of a twentieth of the total."""
    gpus: list[MachineGpu] | None = checked(at_most(GPUS_MAX, "GPUs"), None, {"maxItems": GPUS_MAX})
    """The GPUs in the order of the PCI bus; None: NVIDIA's library is missing or did not answer."""


@attrs.frozen
class ModelCard:
    """A model, as in the `/v1/models` of OpenAI and vLLM."""

    id: str = checked(is_name, schema=_NAME)
    """The name that requests use."""
    root: str = checked(is_short, "")
    """Where the model was loaded from: a path, or a name on a model hub."""
    parent: str | None = checked(is_short, None)
    """For an adapter, the `id` of the model that it adapts; otherwise None."""
    max_model_len: int | None = checked(Between(0, TOKENS_MAX), None, {"minimum": 0})
    """The most tokens of prompt and completion together; None: not known."""


@attrs.frozen
class Group:
    """A model that several machines serve together: each runs a worker, and one of the workers answers requests."""

    id: str = checked(is_name, schema=_NAME)
    """The address at which the workers of the group meet, which all of them know."""
    rank: int = checked(Between(0, 65535))
    """0 leads the group and answers requests; the others follow."""
    size: int = checked(Between(1, 65536))
    """The number of workers in the group."""


@attrs.frozen
class LoadPhase:
    """A phase of a load, as the worker that loads reports it."""

    name: str = checked(printable(PHASE_CHARACTERS_MAX), schema={"maxLength": PHASE_CHARACTERS_MAX})
    """For example `loading weights`."""
    seconds: float = checked(Between(0, SECONDS_MAX), schema={"minimum": 0})
    """Its duration so far."""
    detail: str = checked(printable(PHASE_CHARACTERS_MAX), "", {"maxLength": PHASE_CHARACTERS_MAX})
    """How far it is, for example `3 of 8 shards`; empty: not known."""


@attrs.frozen
class PeerLoss:
    """A worker that its group has lost, as the gateway reports it to the others of the group."""

    worker_id: str
    why: str
    """In a few words that follow the worker's name."""
    host: str
    port: int
    is_certain: bool
    """Whether the worker is known to have ended; otherwise it is only silent, and should be asked itself."""


_PROGRESS: Schema = {"$ref": "#/components/schemas/Progress"}


@attrs.frozen
class Heartbeat:
    """A worker's full report to the gateway, sent at every change and at intervals. Unknown keys are ignored.

    A worker that is not iChat's own needs only the first four fields.
    """

    worker_id: str = checked(is_worker_id)
    """Chosen by the worker, and unique for its life."""
    model_name: str = checked(is_name, schema=_NAME)
    host: str = checked(is_host)
    """The name or address at which the gateway reaches the worker."""
    port: int = checked(Between(0, 65535))
    """0: none; only a worker that the gateway has started may listen on its unix socket alone."""
    model_names: list[str] = checked(are_names, attrs.Factory(list[str]), _NAMES)
    """Every name that requests may use for the worker's model, `model_name` included."""
    models: list[ModelCard] = checked(
        at_most(MODELS_MAX, "models"), attrs.Factory(list[ModelCard]), {"maxItems": MODELS_MAX}
    )
    """The same names with the known facts of each, and the model's adapters; may be empty."""
    group: Group | None = None
    """The machines that serve the model together; None: the worker serves it alone."""
    backend: str = checked(is_name, "")
    """The engine: `vllm`, `sglang`, or the name of another engine."""
    model_path: str = checked(is_short, "")
    state: WorkerState = attrs.field(default="ready", metadata={"schema": {"type": "string"}})
    phase: str = checked(is_short, "")
    """The worker's present activity, in a few words."""
    load: list[LoadPhase] = checked(_are_phases, attrs.Factory(list[LoadPhase]), _PHASES)
    """While the worker loads: the phases until now, of which the last is under way; otherwise empty."""
    loaded: list[LoadPhase] = checked(_are_phases, attrs.Factory(list[LoadPhase]), _PHASES)
    """Once the worker has loaded: the phases of the load."""
    failure: str = checked(printable(FAILURE_CHARACTERS_MAX), "", {"maxLength": FAILURE_CHARACTERS_MAX})
    """Why the engine ended unexpectedly, in a single line; otherwise empty."""
    heartbeat_interval: float = checked(Between(0.01, HEARTBEAT_INTERVAL_MAX_S), 30.0)
    """The most seconds until the next heartbeat. After three missed heartbeats the worker gets no requests."""
    unix_socket: bool = False
    """Whether the worker also listens on the unix socket that the gateway named when it started the worker."""
    max_in_flight: int = checked(Between(0, 1_000_000), 0)
    """The most requests that the worker wants at the same time; 0: no limit of its own."""
    pid: int = checked(_PID, 0, {"minimum": 0})
    """The worker's first process, on its own machine."""
    start_id: str = checked(is_name, "")
    """Different at each start of the worker, since ids and pids are reused."""
    args: dict[str, Any] = checked(are_args, attrs.Factory(dict[str, Any]))
    """Every effective argument of the engine, with secrets masked: at most 256 KiB of JSON."""
    backend_args: dict[str, Any] = checked(are_args, attrs.Factory(dict[str, Any]))
    """Another name for `args`: the gateway shows the arguments under both names if a worker sends either."""
    changed_args: list[str] | None = checked(are_names, None, _NAMES)
    """The names in `args` with values that differ from the engine's defaults; None: not known."""
    versions: dict[str, str] = checked(are_versions, attrs.Factory(dict[str, str]))
    """The versions of the engine and of its main packages, by package name."""
    progress: dict[str, float | None] = checked(is_progress, attrs.Factory(dict[str, float | None]), _PROGRESS)
    """The engine's own figures about its load; other engines' workers may send other numbers too."""
    machine: Machine | None = None
    """The worker's machine, if the gateway does not know it yet or it has changed; otherwise None."""
    memory: EngineMemory | None = None
    """Once the worker has loaded: the memory of its engine; None: not known."""
    can_sleep: bool = False
    """Whether the engine can give its memory back, and allocate it again."""
    prefix_reports: bool = False
    """Whether the worker wants the chains of prefixes, and reports the losses of its engine's cache; see `prefixes`."""
    usage_reports: bool = False
    """Whether the worker reports how many tokens a request used, if it is asked to; see `usage`."""
    late_usage_reports: bool = False
    """Whether it reports, in `late_usage`, the tokens of responses that were made in the background."""
    late_usage: list[LateUsage] = checked(at_most(LATE_MAX, "late usages"), attrs.Factory(list[LateUsage]))
    registration: str = checked(is_name, "")
    """A digest of all fields here except the fields of a `ShortHeartbeat`."""


@attrs.frozen
class ShortHeartbeat:
    """A heartbeat of a worker with an unchanged registration, to a gateway that said `accepts_short`."""

    worker_id: str = checked(is_worker_id)
    registration: str = checked(is_name)
    """As in the worker's newest whole heartbeat; a gateway that does not know it answers 404."""
    state: WorkerState = attrs.field(default="ready", metadata={"schema": {"type": "string"}})
    phase: str = checked(is_short, "")
    load: list[LoadPhase] = checked(_are_phases, attrs.Factory(list[LoadPhase]), _PHASES)
    failure: str = checked(printable(FAILURE_CHARACTERS_MAX), "", {"maxLength": FAILURE_CHARACTERS_MAX})
    progress: dict[str, float | None] = checked(is_progress, attrs.Factory(dict[str, float | None]), _PROGRESS)
    machine: Machine | None = None
    late_usage: list[LateUsage] = checked(at_most(LATE_MAX, "late usages"), attrs.Factory(list[LateUsage]))


STATUS = tuple(field.name for field in attrs.fields(ShortHeartbeat)[2:])
"""The keys of a heartbeat that are not the worker's registration."""


@attrs.frozen
class HeartbeatResponse:
    """The response to a heartbeat."""

    status: Literal["registered", "ok"]
    """`registered`: the worker is new to the gateway. `ok`: the gateway knew the worker."""
    gateway_id: str
    """Different at each start of the gateway."""
    heartbeat_interval: float
    """The seconds until the worker's next heartbeat: as in its last heartbeat, or more if there are many workers."""
    lost: Sequence[PeerLoss]
    """Workers that the worker's group has lost."""
    wants_machine: bool
    """Whether the next heartbeat should have `machine`."""
    accepts_short: bool
    """Whether the gateway accepts short heartbeats."""


_Kind = TypeVar("_Kind", Heartbeat, ShortHeartbeat)
_converter = strict_converter(forbid_extra_keys=False)
for _nested in (ModelCard, Group, LoadPhase, MachineGpu, Machine, EngineMemory, LateUsage):
    _converter.register_structure_hook(_nested, section_hook(_nested, _converter))
_structures = {one: section_hook(one, _converter) for one in (Heartbeat, ShortHeartbeat)}


def _parse(body: object, kind: type[_Kind]) -> _Kind:
    try:
        return _structures[kind](body, kind)
    except BaseValidationError as error:
        raise errors.bad_request(f"This is not a heartbeat: {'; '.join(problems_of(error))}.") from error
    except ValueError as error:
        raise errors.bad_request(f"A heartbeat is a JSON object: {error}.") from error


def parse_short_heartbeat(body: object) -> ShortHeartbeat:
    """Return the short heartbeat in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
    return _parse(body, ShortHeartbeat)


def parse_heartbeat(body: object) -> Heartbeat:
    """Return the whole heartbeat in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
    heartbeat = _parse(body, Heartbeat)
    return (
        attrs.evolve(heartbeat, args=heartbeat.args or heartbeat.backend_args, backend_args={})
        if heartbeat.backend_args
        else heartbeat
    )


def saved_form(heartbeat: Heartbeat, args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a heartbeat as JSON can hold it, without parts that are empty by default."""
    fields = attrs.fields(Heartbeat)
    known = {field.name: getattr(heartbeat, field.name) for field in fields}
    needed = {field.name for field in fields if field.default is attrs.NOTHING}
    known["models"] = [attrs.asdict(model) for model in heartbeat.models]
    known["group"] = attrs.asdict(heartbeat.group) if heartbeat.group is not None else None
    known["memory"] = attrs.asdict(heartbeat.memory) if heartbeat.memory is not None else None
    known["load"], known["loaded"] = [], [attrs.asdict(phase) for phase in heartbeat.loaded]
    known["args"] = args
    return {name: value for name, value in known.items() if value or name in needed}


def response_tag(worker_id: str, start_id: str) -> str:
    """Return the 12 hexadecimal digits that the ids of all responses have that this start of a worker keeps."""
    return hashlib.blake2b(f"{worker_id}\0{start_id}".encode(), digest_size=6).hexdigest()


def registration_of(heartbeat: Heartbeat) -> Heartbeat:
    """Return a heartbeat without its status: two workers with the same registration have equal results."""
    status: dict[str, Any] = {"state": "ready", "phase": "", "load": [], "failure": "", "progress": {}}
    return attrs.evolve(heartbeat, **status, machine=None, late_usage=[], registration="")


def digest_of(registration: Heartbeat) -> str:
    """Return the digest that a worker sends in place of its registration."""
    return hashlib.blake2b(json.dumps(attrs.asdict(registration)).encode(), digest_size=8).hexdigest()


def shortened(heartbeat: Heartbeat) -> Mapping[str, object]:
    """Return a heartbeat in its short form, as JSON can hold it: some 300 bytes without `failure` and `machine`."""
    known = {name: getattr(heartbeat, name) for name in ("worker_id", "registration", *STATUS)}
    known["machine"] = heartbeat.machine and attrs.asdict(heartbeat.machine)
    known["load"] = [attrs.asdict(one) for one in heartbeat.load]
    known["late_usage"] = [attrs.asdict(one) for one in heartbeat.late_usage]
    return {name: value for name, value in known.items() if value}


def names_of(heartbeat: Heartbeat) -> list[str]:
    """Return every name that the worker serves."""
    return [model.id for model in heartbeat.models] or list(heartbeat.model_names) or [heartbeat.model_name]
