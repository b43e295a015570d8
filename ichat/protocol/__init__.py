"""The heartbeat: what a worker tells the gateway, at every change of its state and at intervals in between.

A heartbeat has two parts: the worker's *registration*, which says who and where it is and what it runs, and its
*status*, which changes all the time. A whole heartbeat has both, and registers the worker. A gateway that says so
accepts short ones as well, which have a digest in place of the registration. Every value is checked, because a name
that is not plain text would end up in a header.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, Literal, TypeVar, cast

import attrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.checks import MODEL_NAME_CHARACTERS_MAX
from ichat.config.strict import Between, Check, Schema, checked, problems_of, section_hook, strict_converter

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
"""Tells the gateway the code of an error that its control plane or a worker made."""
WHY_HEADER = b"x-ichat-why"
"""Tells the gateway in a few words why a worker declines a request."""
CALLER_HEADER = b"x-ichat-caller"
"""Tells the control plane who sent a request."""
PROOF_HEADER = b"x-ichat-proof"
"""Proves to a worker that a request comes from its gateway."""
HOP_HEADER = b"x-ichat-hop"
"""The number of gateways that a request has passed."""
INTERNAL = b"x-ichat-"
"""The prefix of all of them."""

WorkerState = Literal["starting", "loading", "ready", "asleep", "waking", "following", "draining", "gone"]
"""The state that a worker reports; a `following` worker works for the leader of its group, a `gone` one has ended.

The engine of an `asleep` worker has given its memory back, and a `waking` one takes it again.
"""

NAMES_MAX = 256
MODELS_MAX = 2048
ARGS_BYTES_MAX = 256 * 1024
ARGS_DEPTH_MAX = 32
FAILURE_CHARACTERS_MAX = 2000
HEARTBEAT_INTERVAL_MAX_S = 3600.0
SHORT_CHARACTERS_MAX = 4096
"""The limit of a path, and of the description of what a worker is doing."""
MACHINE_NAME_CHARACTERS_MAX = 256
GPUS_MAX = 64
ID = re.compile(r"(?!\.{1,2}$|external:)[A-Za-z0-9._:-]{1,128}")
"""What the id of a worker or a machine may be: no step of a path, and not like an external route's."""
PROGRESS_MAX = 64
PROGRESS_NAME_CHARACTERS_MAX = 64
TOKENS_MAX = 10**12
"""The longest context that a model may have."""
_PROGRESS_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{PROGRESS_NAME_CHARACTERS_MAX}}}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")

Count = Annotated[int, Between(0)]
"""A number of things or bytes in a response."""
Share = Annotated[float, Between(0, 1)]
"""A part of a whole in a response."""


def _is_id(value: str) -> None:
    if not ID.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits or any of . _ : -, not a dot or two, nor external:…")


def _is_host(value: str) -> None:
    labels = value.removesuffix(".").split(".")
    if not _HOST.fullmatch(value) or not all(0 < len(label) < 64 for label in labels):
        raise ValueError("must be a host name or an address")


def _printable(characters_max: int) -> Check:
    """Return the check that a text is printable and not too long."""

    def check(value: str) -> None:
        if len(value) > characters_max or not value.isprintable():
            raise ValueError(f"must be at most {characters_max} printable characters")

    return check


_is_name = _printable(MODEL_NAME_CHARACTERS_MAX)
_is_short = _printable(SHORT_CHARACTERS_MAX)
_is_text = _printable(MACHINE_NAME_CHARACTERS_MAX)


def sentence(text: str) -> str:
    """Return any text as the `failure` of a heartbeat: one printable line of bounded length."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= FAILURE_CHARACTERS_MAX else line[: FAILURE_CHARACTERS_MAX - 2] + " …"


def _at_most(count: int, things: str) -> Check:
    """Return the check that there are not too many of something."""

    def check(values: Sized) -> None:
        if len(values) > count:
            raise ValueError(f"must be at most {count} {things}")

    return check


def _are_versions(values: dict[str, str]) -> None:
    _at_most(NAMES_MAX, "versions")(values)
    for name, version in values.items():
        _is_name(name)
        _is_name(version)


def _are_names(values: list[str]) -> None:
    _at_most(NAMES_MAX, "names")(values)
    for value in values:
        _is_name(value)


def _depth_of(value: object) -> int:
    """Return how deep lists and tables are nested; counting stops above the limit."""
    depth, level = 0, [value]
    while level and depth <= ARGS_DEPTH_MAX:
        inner = [list(cast("dict[str, object]", one).values()) if isinstance(one, dict) else one for one in level]
        level = [item for one in inner if isinstance(one, list) for item in cast("list[object]", one)]
        depth += bool(level)
    return depth


def _are_args(value: dict[str, Any]) -> None:
    if _depth_of(value) > ARGS_DEPTH_MAX or len(json.dumps(value, allow_nan=False)) > ARGS_BYTES_MAX:
        raise ValueError(f"must be at most {ARGS_BYTES_MAX} bytes of JSON, and not nested too deep")


def _is_progress(value: dict[str, float | None]) -> None:
    if any(number is not None and not 0 <= number <= 1e15 for number in value.values()):
        raise ValueError("must be numbers from 0 to 1e15")
    if len(value) > PROGRESS_MAX or not all(map(_PROGRESS_NAME.fullmatch, value)):
        words = f"must be at most {PROGRESS_MAX} numbers"
        raise ValueError(f"{words}, with names of at most {PROGRESS_NAME_CHARACTERS_MAX} letters, digits or _ . : -")


_SIZE = Between(0, 2**63)
_SHARE = Between(0, 1)
_PID = Between(0, 2**32)
_FROM_0: Schema = {"minimum": 0}
_NAME: Schema = {"maxLength": MODEL_NAME_CHARACTERS_MAX}
_NAMES: Schema = {"maxItems": NAMES_MAX, "items": {"type": "string", **_NAME}}
_AN_ID: Schema = {"pattern": f"^{ID.pattern}$"}


@attrs.frozen
class MachineGpu:
    """One GPU of a machine; what is None is not known."""

    index: int = checked(Between(0, 65535))
    """The GPU's number in the order of the PCI bus, as the process that reports it counts."""
    uuid: str = checked(_is_text, "")
    name: str = checked(_is_text, "")
    memory_total_bytes: int | None = checked(_SIZE, None, _FROM_0)
    memory_used_bytes: int | None = checked(_SIZE, None, _FROM_0)
    use: float | None = checked(_SHARE, None)
    """The share of the last moments in which the GPU computed, 0 to 1."""
    failure: str = checked(_is_text, "")
    """Why the GPU does not answer; empty if it does."""
    held_bytes: int | None = checked(_SIZE, None, _FROM_0)
    """The GPU memory that the reporting worker holds; None: not known."""


@attrs.frozen
class Machine:
    """One machine; what is None is not known."""

    id: str = checked(_is_id, schema=_AN_ID)
    """Identifies this boot of the machine: the kernel's boot id, which containers on the machine share."""
    name: str = checked(_is_text)
    """The host name of the machine, or of the container."""
    cpus: int | None = checked(_SIZE, None, _FROM_0)
    """The number of processors."""
    cpu_use: float | None = checked(_SHARE, None)
    """The busy share of all processors, 0 to 1, in steps of 0.05."""
    memory_total_bytes: int | None = checked(_SIZE, None, _FROM_0)
    memory_available_bytes: int | None = checked(_SIZE, None, _FROM_0)
    """The available memory, in steps of a twentieth of the total."""
    gpus: list[MachineGpu] | None = checked(_at_most(GPUS_MAX, "GPUs"), None, {"maxItems": GPUS_MAX})
    """The GPUs in the order of the PCI bus; None: NVIDIA's library is missing or did not answer."""


@attrs.frozen
class ModelCard:
    """One model, as in the `/v1/models` of OpenAI and vLLM."""

    id: str = checked(_is_name, schema=_NAME)
    """The name that requests use."""
    root: str = checked(_is_short, "")
    """Where the model was loaded from: a path, or a name on a model hub."""
    parent: str | None = checked(_is_short, None)
    """For an adapter, the `id` of the model that it adapts; otherwise None."""
    max_model_len: int | None = checked(Between(0, TOKENS_MAX), None, {"minimum": 0})
    """The most tokens of prompt and completion together; None: not known."""


@attrs.frozen
class Group:
    """A model that several machines serve together: each runs a worker, and one of the workers answers requests."""

    id: str = checked(_is_name, schema=_NAME)
    """The address at which the workers of the group meet, which all of them know."""
    rank: int = checked(Between(0, 65535))
    """0 leads the group and answers requests; the others follow."""
    size: int = checked(Between(1, 65536))
    """The number of workers in the group."""


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


@attrs.frozen
class Heartbeat:
    """Everything that a worker tells the gateway, sent at every change and at intervals. Unknown keys are ignored.

    A worker that is not iChat's own needs only the first four fields.
    """

    worker_id: str = checked(_is_id, schema=_AN_ID)
    """Chosen by the worker, and unique for its life."""
    model_name: str = checked(_is_name, schema=_NAME)
    host: str = checked(_is_host)
    """The name or address at which the gateway reaches the worker."""
    port: int = checked(Between(0, 65535))
    """0: none; only a worker that the gateway has started may listen on its unix socket alone."""
    model_names: list[str] = checked(_are_names, attrs.Factory(list[str]), _NAMES)
    """Every name that requests may use for the worker's model, `model_name` included."""
    models: list[ModelCard] = checked(
        _at_most(MODELS_MAX, "models"), attrs.Factory(list[ModelCard]), {"maxItems": MODELS_MAX}
    )
    """The same names with what is known of each, and the model's adapters; may be empty."""
    group: Group | None = None
    """The machines that serve the model together; None: the worker serves it alone."""
    backend: str = checked(_is_name, "")
    """The engine: `vllm`, `sglang`, or the name of another one."""
    model_path: str = checked(_is_short, "")
    state: WorkerState = attrs.field(default="ready", metadata={"schema": {"type": "string"}})
    phase: str = checked(_is_short, "")
    """What the worker is doing, in a few words."""
    failure: str = checked(_printable(FAILURE_CHARACTERS_MAX), "", {"maxLength": FAILURE_CHARACTERS_MAX})
    """One line: why the engine ended unexpectedly; otherwise empty."""
    heartbeat_interval: float = checked(Between(0.01, HEARTBEAT_INTERVAL_MAX_S), 30.0)
    """The most seconds until the next heartbeat. After three missed heartbeats the worker gets no requests."""
    unix_socket: bool = False
    """Whether the worker also listens on the unix socket that the gateway named when it started the worker."""
    max_in_flight: int = checked(Between(0, 1_000_000), 0)
    """The most requests that the worker wants at the same time; 0: no limit of its own."""
    pid: int = checked(_PID, 0, {"minimum": 0})
    """The worker's first process, on its own machine."""
    start_id: str = checked(_is_name, "")
    """Different at each start of the worker, since ids and pids are reused."""
    args: dict[str, Any] = checked(_are_args, attrs.Factory(dict[str, Any]))
    """Every effective argument of the engine, with secrets masked: at most 256 KiB of JSON."""
    backend_args: dict[str, Any] = checked(_are_args, attrs.Factory(dict[str, Any]))
    """Another name for `args`: the gateway shows under both what a worker sends under either."""
    changed_args: list[str] | None = checked(_are_names, None, _NAMES)
    """The names in `args` whose values differ from the engine's defaults; None: not known."""
    versions: dict[str, str] = checked(_are_versions, attrs.Factory(dict[str, str]))
    """The versions of the engine and of its main packages, by package name."""
    progress: dict[str, float | None] = checked(
        _is_progress, attrs.Factory(dict[str, float | None]), {"$ref": "#/components/schemas/Progress"}
    )
    """What the engine is doing, by its own account; other engines' workers may send other numbers too."""
    machine: Machine | None = None
    """The worker's machine, if the gateway has not been told yet or it has changed; otherwise None."""
    can_sleep: bool = False
    """Whether the engine can give its memory back, and take it again."""
    prefix_reports: bool = False
    """Whether the worker wants the chains of prefixes, and reports what its engine's cache has lost; see `prefixes`."""
    usage_reports: bool = False
    """Whether the worker tells how many tokens a request used, if it is asked to; see `usage`."""
    registration: str = checked(_is_name, "")
    """A digest of everything here but `state`, `phase`, `failure`, `progress` and `machine`, for short heartbeats."""


@attrs.frozen
class ShortHeartbeat:
    """A heartbeat of a worker whose registration has not changed, to a gateway that said `accepts_short`."""

    worker_id: str = checked(_is_id, schema=_AN_ID)
    registration: str = checked(_is_name)
    """As in the worker's newest whole heartbeat; a gateway that does not know it answers 404."""
    state: WorkerState = attrs.field(default="ready", metadata={"schema": {"type": "string"}})
    phase: str = checked(_is_short, "")
    failure: str = checked(_printable(FAILURE_CHARACTERS_MAX), "", {"maxLength": FAILURE_CHARACTERS_MAX})
    progress: dict[str, float | None] = checked(
        _is_progress, attrs.Factory(dict[str, float | None]), {"$ref": "#/components/schemas/Progress"}
    )
    machine: Machine | None = None


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
    """The seconds until the worker's next heartbeat: what its last one says, or more if there are many workers."""
    lost: Sequence[PeerLoss]
    """Workers that the worker's group has lost."""
    wants_machine: bool
    """Whether the next heartbeat should have `machine`."""
    accepts_short: bool
    """Whether the gateway accepts short heartbeats."""


_Kind = TypeVar("_Kind", Heartbeat, ShortHeartbeat)
_converter = strict_converter(forbid_extra_keys=False)
for _nested in (ModelCard, Group, MachineGpu, Machine):
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


def response_tag(worker_id: str, start_id: str) -> str:
    """Return the 12 hexadecimal digits that the ids of all responses have that this start of a worker keeps."""
    return hashlib.blake2b(f"{worker_id}\0{start_id}".encode(), digest_size=6).hexdigest()


def registration_of(heartbeat: Heartbeat) -> Heartbeat:
    """Return a heartbeat without its status: equal to another one if both workers say the same of themselves."""
    return attrs.evolve(heartbeat, state="ready", phase="", failure="", progress={}, machine=None, registration="")


def digest_of(registration: Heartbeat) -> str:
    """Return what a worker sends in place of its registration."""
    return hashlib.blake2b(json.dumps(attrs.asdict(registration)).encode(), digest_size=8).hexdigest()


def shortened(heartbeat: Heartbeat) -> Mapping[str, object]:
    """Return a heartbeat in its short form, as JSON can hold it: some 300 bytes without `failure` and `machine`."""
    known = {name: getattr(heartbeat, name) for name in ("worker_id", "registration", *STATUS)}
    machine = {"machine": attrs.asdict(heartbeat.machine)} if heartbeat.machine is not None else {}
    return {name: value for name, value in known.items() if value} | machine


def names_of(heartbeat: Heartbeat) -> list[str]:
    """Return every name that the worker serves."""
    return [model.id for model in heartbeat.models] or list(heartbeat.model_names) or [heartbeat.model_name]
