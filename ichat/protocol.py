"""The beat: what a worker tells the gateway, at every change of its state and at intervals in between.

It is registration and heartbeat in one: the gateway learns everything from it, every time. What comes in one is
checked: a name that is not plain text would end up in a header.
"""

import hashlib
import json
import re
from typing import Any, Literal, cast

import attrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.schema import MODEL_NAME_CHARACTERS_MAX
from ichat.config.strict import between, checked, problems_of, section_hook, strict_converter

# Headers, in lower case. Clients may see the first four; the gateway and its workers use the others among themselves.
WORKER_HEADER = b"x-ichat-worker"
"""The id of the worker or external route that answered."""
OVERHEAD_HEADER = b"x-ichat-overhead-ms"
"""The gateway's own time before it asked the upstream."""
DROPPED_HEADER = b"x-ichat-dropped"
"""What of the request the worker did not get."""
ERROR_HEADER = b"x-ichat-error"
"""Who made an error: `gateway` or `worker`."""
CODE_HEADER = b"x-ichat-code"
"""Tells the gateway the code of an error of its control plane, or of one that a worker itself has made."""
WHY_HEADER = b"x-ichat-why"
"""Tells the gateway why a worker declines a request, in a few words."""
CALLER_HEADER = b"x-ichat-caller"
"""Tells the control plane who sent a request."""
PROOF_HEADER = b"x-ichat-proof"
"""Shows a worker that a request comes from its gateway."""
HOP_HEADER = b"x-ichat-hop"
"""How many gateways a request has come through."""
INTERNAL = b"x-ichat-"
"""The beginning of all of them."""

WorkerState = Literal["starting", "loading", "ready", "following", "draining", "gone"]
"""What a worker says of itself; `following` is a worker that works for the leader of its group, `gone` a good-bye."""

NAMES_MAX = 256
MODELS_MAX = 4096
ARGS_BYTES_MAX = 256 * 1024
ARGS_DEPTH_MAX = 32
FAILURE_CHARACTERS_MAX = 2000
SHORT_CHARACTERS_MAX = 4096
"""Of a path, or of what a worker is doing."""
MACHINE_NAME_CHARACTERS_MAX = 256
GPUS_MAX = 64
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MACHINE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


def _is_id(value: str) -> None:
    if not _ID.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits or any of . _ : -")


def _is_host(value: str) -> None:
    labels = value.removesuffix(".").split(".")
    if not _HOST.fullmatch(value) or not all(0 < len(label) < 64 for label in labels):
        raise ValueError("must be a host name or an address")


def _is_name(value: str) -> None:
    if len(value) > MODEL_NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be at most {MODEL_NAME_CHARACTERS_MAX} printable characters")


def _is_sentence(value: str) -> None:
    if len(value) > FAILURE_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be at most {FAILURE_CHARACTERS_MAX} printable characters")


def sentence(text: str) -> str:
    """Make of any text what a beat takes as a failure: one line, printable, and of a bounded length."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
    return line if len(line) <= FAILURE_CHARACTERS_MAX else line[: FAILURE_CHARACTERS_MAX - 2] + " …"


def _is_short(value: str) -> None:
    if len(value) > SHORT_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be at most {SHORT_CHARACTERS_MAX} printable characters")


def _is_parent(value: str | None) -> None:
    _is_short(value or "")


def _are_versions(values: dict[str, str]) -> None:
    if len(values) > NAMES_MAX:
        raise ValueError(f"must be at most {NAMES_MAX} versions")
    for name, version in values.items():
        _is_name(name)
        _is_name(version)


def _are_names(values: list[str] | None) -> None:
    values = values or []
    if len(values) > NAMES_MAX:
        raise ValueError(f"must be at most {NAMES_MAX} names")
    for value in values:
        _is_name(value)


def _are_models(values: "list[ModelCard]") -> None:
    if len(values) > MODELS_MAX:
        raise ValueError(f"must be at most {MODELS_MAX} models")


def _depth_of(value: object) -> int:
    """Say how deep lists and tables are nested, up to one more than is taken."""
    depth, level = 0, [value]
    while level and depth <= ARGS_DEPTH_MAX:
        inner = [list(cast("dict[str, object]", one).values()) if isinstance(one, dict) else one for one in level]
        level = [item for one in inner if isinstance(one, list) for item in cast("list[object]", one)]
        depth += bool(level)
    return depth


def _are_args(value: dict[str, Any]) -> None:
    if _depth_of(value) > ARGS_DEPTH_MAX or len(json.dumps(value)) > ARGS_BYTES_MAX:
        raise ValueError(f"must be at most {ARGS_BYTES_MAX} bytes of JSON, and not nested too deep")


def _is_progress(value: dict[str, float | None]) -> None:
    if len(value) > NAMES_MAX or any(number is not None and not 0 <= number <= 1e15 for number in value.values()):
        raise ValueError("must be numbers from 0 to 1e15")


def _is_machine_id(value: str) -> None:
    if not MACHINE_ID.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits or any of . _ : -")


def _is_text(value: str) -> None:
    if len(value) > MACHINE_NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"must be at most {MACHINE_NAME_CHARACTERS_MAX} printable characters")


def _is_size(value: int | None) -> None:
    if value is not None:
        between(0, 2**63)(value)


def _is_share(value: float | None) -> None:
    if value is not None:
        between(0, 1)(value)


def _are_gpus(values: "list[MachineGpu] | None") -> None:
    if values is not None and len(values) > GPUS_MAX:
        raise ValueError(f"must be at most {GPUS_MAX} GPUs")


@attrs.frozen
class MachineGpu:
    """One GPU; what is None is not known."""

    index: int = checked(between(0, 65535))
    """Its number in the order of the PCI bus, among those that the teller sees."""
    uuid: str = checked(_is_text, "")
    name: str = checked(_is_text, "")
    memory_total_bytes: int | None = checked(_is_size, None)
    memory_used_bytes: int | None = checked(_is_size, None)
    use: float | None = checked(_is_share, None)
    """Share of the last moments in which it computed, 0 to 1."""
    failure: str = checked(_is_text, "")
    """Why it does not answer; empty where it does."""
    held_bytes: int | None = checked(_is_size, None)
    """What the worker that tells of it holds of its memory; 0: nothing."""


@attrs.frozen
class Machine:
    """One machine; what is None is not known."""

    id: str = checked(_is_machine_id)
    """Of this start of the machine; containers on it have the same."""
    name: str = checked(_is_text)
    """Its host name, or that of the container."""
    cpus: int | None = checked(_is_size, None)
    cpu_use: float | None = checked(_is_share, None)
    """Busy share of all processors, 0 to 1."""
    memory_total_bytes: int | None = checked(_is_size, None)
    memory_available_bytes: int | None = checked(_is_size, None)
    gpus: list[MachineGpu] | None = checked(_are_gpus, None)
    """None where NVIDIA's library is not there, or did not answer."""


@attrs.frozen
class ModelCard:
    """One entry of the list of models, as OpenAI's and vLLM's `/v1/models` have it."""

    id: str = checked(_is_name)
    """The name that requests use."""
    root: str = checked(_is_short, "")
    """Where it was loaded from: a path, or a name on a model hub."""
    parent: str | None = checked(_is_parent, None)
    """Of an adapter, the `id` of the model that it adapts."""
    max_model_len: int | None = None
    """Tokens that prompt and answer may have together."""


def entry_of(model: ModelCard, created: int, owner: str) -> dict[str, object]:
    """Write a model as an entry of `/v1/models`: since when there is it (Unix time), and who serves it."""
    known = {**attrs.asdict(model), "root": model.root or model.id}
    return {**known, "object": "model", "created": created, "owned_by": owner}


@attrs.frozen
class Group:
    """A model that several machines serve together; each of them runs a worker, and one of these answers requests."""

    id: str = checked(_is_name)
    """What all of its workers know alike: where they meet."""
    rank: int = checked(between(0, 65535))
    """0 leads: it answers the requests. The others follow."""
    size: int = checked(between(1, 65536))


@attrs.frozen
class PeerLoss:
    """What the gateway answers to a worker whose group has lost one of the others."""

    worker_id: str
    why: str
    """In a few words, to be put after "node 1"."""
    host: str
    port: int
    is_certain: bool
    """Whether it is known to have ended; otherwise it has only been silent, and is to be asked itself."""


@attrs.frozen
class Heartbeat:
    """One beat. Of a worker that is not iChat's own, only the first four are needed."""

    worker_id: str = checked(_is_id)
    """Made by the worker, unique for its life."""
    model_name: str = checked(_is_name)
    host: str = checked(_is_host)
    """Where the gateway reaches it."""
    port: int = checked(between(1, 65535))
    model_names: list[str] = checked(_are_names, attrs.Factory(list[str]))
    """Every name that it serves, `model_name` included."""
    models: list[ModelCard] = checked(_are_models, attrs.Factory(list[ModelCard]))
    """The same names with what is known of each, and its adapters; empty where nothing more is known."""
    group: Group | None = None
    backend: str = checked(_is_name, "")
    model_path: str = checked(_is_short, "")
    state: WorkerState = "ready"
    phase: str = checked(_is_short, "")
    """What it is doing, in a few words."""
    failure: str = checked(_is_sentence, "")
    """Why its engine ended, where nobody had asked for that; empty otherwise."""
    heartbeat_interval: float = checked(between(0.01, 3600), 30.0)
    """Seconds until the next beat, at the latest."""
    unix_socket: bool = False
    """Whether it also listens on the unix socket that its launcher named."""
    max_in_flight: int = checked(between(0, 1_000_000), 0)
    """Requests that it wants to be sent at the same time, at most; 0: it has no wish."""
    pid: int = 0
    start_id: str = checked(_is_name, "")
    """Another one at each start of the worker: ids and pids come again."""
    args: dict[str, Any] = checked(_are_args, attrs.Factory(dict[str, Any]))
    backend_args: dict[str, Any] = checked(_are_args, attrs.Factory(dict[str, Any]))
    """The same, as workers may call it that are not iChat's own; `read_beat` puts it into `args`."""
    changed_args: list[str] | None = checked(_are_names, None)
    """The names of those in `args` that are not as the engine has them by default; None: that is not known."""
    versions: dict[str, str] = checked(_are_versions, attrs.Factory(dict[str, str]))
    progress: dict[str, float | None] = checked(_is_progress, attrs.Factory(dict[str, float | None]))
    """`ichat.engines.Progress`."""
    machine: Machine | None = None
    """Where it runs, if the gateway has not been told of this already."""


_converter = strict_converter(forbid_extra_keys=False)
for _nested in (ModelCard, Group, MachineGpu, Machine):
    _converter.register_structure_hook(_nested, section_hook(_nested, _converter))
_structure = section_hook(Heartbeat, _converter)


def parse_heartbeat(body: object) -> Heartbeat:
    """Return the beat in parsed JSON; keys that it does not know are left to newer gateways. Raises ApiError 400."""
    try:
        heartbeat: Heartbeat = _structure(body, Heartbeat)
    except BaseValidationError as error:
        raise errors.bad_request(f"This is not a beat: {'; '.join(problems_of(error))}.") from error
    except ValueError as error:
        raise errors.bad_request(f"A beat is a JSON object: {error}.") from error
    return (
        attrs.evolve(heartbeat, args=heartbeat.args or heartbeat.backend_args, backend_args={})
        if heartbeat.backend_args
        else heartbeat
    )


def response_tag(worker_id: str, start_id: str) -> str:
    """Return what the ids of the responses have in them that this start of a worker keeps: 12 hexadecimal digits."""
    return hashlib.blake2b(f"{worker_id}\0{start_id}".encode(), digest_size=6).hexdigest()


def names_of(heartbeat: Heartbeat) -> list[str]:
    """Give every name that the worker serves."""
    return [model.id for model in heartbeat.models] or list(heartbeat.model_names) or [heartbeat.model_name]
