"""The objects of the control plane as JSON schemas, for `openapi.py`.

What has a class is derived from it (`types_as_schemas.py`); what a reader needs beside names and types (units, what
null means) stands here and nowhere else.
"""

from ichat.admin.json_schema import Notes, Schema, list_of, object_of, or_null, properties_of, ref, schema_of, taken
from ichat.config.schema import MODEL_NAME_CHARACTERS_MAX, ManagedWorkerConfig
from ichat.hardware.gpus import Gpu, GpuProcess
from ichat.protocol import (
    ARGS_BYTES_MAX,
    FAILURE_CHARACTERS_MAX,
    GPUS_MAX,
    MODELS_MAX,
    NAMES_MAX,
    Group,
    Heartbeat,
    Machine,
    MachineGpu,
    ModelCard,
    PeerLoss,
)
from ichat.routing.worker_record import HEALTHY, State, WorkerEnd
from ichat.supervisor.reload_plan import ReloadStep

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_PORT: Schema = {"minimum": 1, "maximum": 65535}
_NAME: Schema = {"maxLength": MODEL_NAME_CHARACTERS_MAX}

_MODEL: Notes = {
    "id": {**_NAME, "description": "The name that requests use."},
    "root": "Where it was loaded from: a path, or a name on a model hub.",
    "parent": "Of an adapter, the id of the model that it adapts; else null.",
    "max_model_len": "Tokens that prompt and answer may have together; null: not known.",
}
_GROUP: Notes = {
    "id": {**_NAME, "description": "What all of its workers know alike: where they meet."},
    "rank": {"minimum": 0, "maximum": 65535, "description": "0 answers the requests, the others follow."},
    "size": {"minimum": 1, "maximum": 65536, "description": "Workers in the group."},
}
_LOST: Notes = {
    "why": "In a few words, to be put after the worker's name.",
    "is_certain": "Whether it has ended; otherwise it is only silent, and is to be asked itself.",
}
_PROGRESS = {
    "running": "Requests that it works on.",
    "waiting": "Requests in its queue.",
    "kv_use": "Share of the KV cache in use, 0 to 1.",
    "steps": "Grows whenever the scheduler does something: busy while it stands still, the engine is stuck.",
    "tokens_out": "Tokens made since its start.",
}
_BEAT: Notes = {
    "worker_id": {
        "pattern": "^[A-Za-z0-9._:-]{1,128}$",
        "description": "Made by the worker, unique for its life.",
    },
    "model_name": _NAME,
    "host": "A name or an address, where the gateway reaches it.",
    "port": _PORT,
    "model_names": {
        "maxItems": NAMES_MAX,
        "items": {**_TEXT, **_NAME},
        "description": "Every name that requests may use for it, `model_name` included.",
    },
    "models": {
        "maxItems": MODELS_MAX,
        "description": "The same names with what is known of each, and its adapters; may be empty.",
    },
    "group": "The machines that serve its model together; null: it is alone.",
    "backend": "Its engine: `vllm`, `sglang`, or another's name.",
    "phase": "What it is doing, in a few words.",
    "failure": {
        "maxLength": FAILURE_CHARACTERS_MAX,
        "description": "One line: why its engine ended, where nobody had asked for that; else empty.",
    },
    "heartbeat_interval": {
        "minimum": 0.01,
        "maximum": 3600,
        "description": "Seconds until its next beat, at the latest; three missed ones and it gets no requests.",
    },
    "unix_socket": "Whether it also listens on the socket that the gateway named when it started it.",
    "max_in_flight": {
        "minimum": 0,
        "maximum": 1_000_000,
        "description": "Requests that it wants to be sent at the same time, at most; 0: no wish.",
    },
    "pid": "Its first process, on its own machine.",
    "start_id": "Another one at each start of the worker.",
    "args": f"Every effective argument of the engine, secrets masked; {ARGS_BYTES_MAX} bytes of JSON at most.",
    "backend_args": "The same, by another name: what a worker tells in either is shown in both.",
    "changed_args": {
        "maxItems": NAMES_MAX,
        "items": {**_TEXT, **_NAME},
        "description": "Names in `args` whose values are not the engine's defaults; null: not known.",
    },
    "versions": "Versions of the engine and of what it stands on, by package.",
    "progress": {
        "$ref": "#/components/schemas/Progress",
        "description": "What the engine says it is doing. Of workers that are not iChat's, other numbers may be in it.",
    },
    "machine": "Where it runs, if the gateway has not been told yet or that has changed; else null.",
}
_MACHINE: Notes = {
    "id": {
        "pattern": "^[A-Za-z0-9._:-]{1,128}$",
        "description": "Of this start of the machine: the kernel's boot id, which its containers share.",
    },
    "name": "Its host name.",
    "cpus": {"minimum": 0, "description": "Processors."},
    "cpu_use": {**_SHARE, "description": "Busy share of all processors, 0 to 1, in steps of 0.05."},
    "memory_total_bytes": {"minimum": 0},
    "memory_available_bytes": {"minimum": 0, "description": "In steps of a twentieth of all of it."},
    "gpus": {
        "maxItems": GPUS_MAX,
        "description": "In the order of the PCI bus; null: NVIDIA's library is not there, or did not answer.",
    },
}
_MACHINE_GPU: Notes = {
    "index": {"minimum": 0, "maximum": 65535, "description": "In the order of the PCI bus, as its teller sees them."},
    "memory_total_bytes": {"minimum": 0},
    "memory_used_bytes": {"minimum": 0},
    "use": {**_SHARE, "description": "Share of the last moments in which it computed, 0 to 1."},
    "failure": "Why it does not answer; empty: it does.",
    "held_bytes": {"minimum": 0, "description": "What the worker itself holds of its memory; null: not known."},
}
_STATE = """\
`starting`, `loading`: not yet. `ready`: gets requests. `following`: works for the leader of its group. `draining`: \
about to end, gets no new requests. `gone`: has said good-bye. `unhealthy`: three beats are missing, or no connection. \
`wedged`: has requests and makes no step. `stale`: known from before the gateway's start, not heard of since. \
`restarting`: has ended, is started again. `failed`: has ended, is not. `broken`: has lost another of its group."""


def _worker() -> Schema:
    """Write what `Registry.describe` gives."""
    heartbeat = properties_of(Heartbeat, _BEAT, without=("machine",))
    settings: dict[str, Schema] = {
        "gpu_ids": or_null({"type": "array", "items": _COUNT})
        | {"description": "In the order of the PCI bus; null: all of them."},
        "on_gateway_exit": {"enum": ["stop", "keep"], "description": "What becomes of it when the gateway ends."},
        "origin": {"enum": ["configuration", "api"], "description": "Who asked for it."},
        "log_file": {**_TEXT, "description": "On the gateway's machine: the lines of its newest start."},
    }
    ours: dict[str, Schema] = {
        "model_names": {"type": "array", "items": _TEXT, "description": "Every name that it serves or will serve."},
        "status": {
            "enum": ["healthy", "unhealthy"],
            "description": "`healthy`: it gets requests, or follows the one of its group that does (`state` is one of"
            f" {', '.join(sorted(HEALTHY))}). `unhealthy`: every other state.",
        },
        "state": ref("State"),
        "managed": {"type": "boolean", "description": "Whether this gateway starts and ends it."},
        "machine": {"type": ["string", "null"], "description": "The host name of where it runs; null: not known."},
        "in_flight": {**_COUNT, "description": "Requests of this gateway under way there now."},
        "circuit": or_null(ref("Circuit")) | {"description": "Null: it has not been heard of yet."},
        "restarts": {**_COUNT, "description": "Times that the gateway started it again."},
        "failure": {
            "type": ["string", "null"],
            "description": "Why it is down, or that it fails its health checks, in a few words; null: neither.",
        },
        "retry_in_s": {
            "type": ["number", "null"],
            "minimum": 0,
            "description": "Seconds until it is started again; null: it is not down, or stays so.",
        },
        **properties_of(WorkerEnd, _END, without=("why", "at")),
        "ended_at": {
            "type": ["number", "null"],
            "description": "When it ended last without being asked to, in seconds since 1970; null: never.",
        },
        "lost": {"type": "array", "items": ref("Lost"), "description": "Others of its group that are not there."},
        "beat_age_s": {"type": ["number", "null"], "description": "Seconds since its newest beat; null: none yet."},
    }
    ours["cause"] = or_null(ours["cause"])
    return object_of(
        {**heartbeat, **settings, **ours},
        "A worker as the gateway knows it. What it says of itself is there from its first beat on. Only of one that the"
        f" gateway started there are {', '.join(settings)}; `backend` and `model_path` are there from the beginning."
        " How it ended last (`cause` to `last_lines`) stays after it was started again.",
        required=["worker_id", "model_name", *ours],
    )


def _circuit() -> Schema:
    """Write what `Circuit.describe` gives."""
    return object_of(
        {
            "state": {
                "enum": ["closed", "open", "half-open"],
                "description": "`open`: gets no requests, since the last ones failed. `half-open`: gets one, as a try.",
            },
            "failures": {
                **_COUNT,
                "description": "Requests in a row that failed.",
            },
            "retry_in_s": {
                "type": ["number", "null"],
                "description": "Seconds until it gets one; null: it does.",
            },
        },
        "Whether a worker gets requests, by how the last ones ended (`[circuit_breaker]`).",
    )


_END: Notes = {
    "exit_code": "Null: a signal ended it, or it is not known.",
    "signal": "The signal that ended it, for example `SIGKILL`, or null.",
    "oom_killed": "Whether the kernel ended it, or a process of it, since there was no memory left.",
    "cause": "Why it ended last, in a sentence; null: not known, or it has never ended unasked.",
    "last_lines": "Of what it wrote before that end, oldest first.",
}
_LAUNCH: Notes = {
    "model_name": {**_NAME, "minLength": 1, "description": "The name that requests use."},
    "model_path": {"minLength": 1, "description": "A directory, or a name on the model hub."},
    "backend": {"minLength": 1, "description": "`vllm`, `sglang`, or the name of another engine that is installed."},
    "gpu_ids": "As nvidia-smi counts them; null: all of them.",
    "host": "Where it listens.",
    "port": {"minimum": 0, "maximum": 65535, "description": "0: any free one."},
    "heartbeat_interval": {"minimum": 0.1, "maximum": 3600, "description": "Seconds between two of its beats."},
    "max_in_flight": {
        "minimum": 1,
        "maximum": 1_000_000,
        "description": "Requests under way there at the same time, at most; null: `routing.max_in_flight`.",
    },
    "share_gpus": "Whether it may have GPUs that another worker has as well; both must say so.",
    "on_gateway_exit": {
        "enum": ["stop", "keep"],
        "description": "Whether it ends with the gateway, or goes on and is taken over by the next one.",
    },
    "responses_max": "Responses of /v1/responses that it keeps.",
    "reasoning_field": "What a model's thoughts are called in chats.",
    "log_streaming": "Whether it streams its own lines at /logs/stream.",
    "python": "The interpreter that has the engine; null: that of `[engines.NAME]`.",
    "env": "Variables that are added to its environment.",
    "backend_args": {
        "additionalProperties": {"anyOf": [{"$ref": "#/components/schemas/EngineValue"}, {"type": "null"}]},
        "description": "Arguments of the engine that have the name of one of the keys here, or any others.",
    },
}


def _launch() -> Schema:
    """Write what `read_worker` takes: as in the file, but that null means left out."""
    schema = taken(ManagedWorkerConfig, _LAUNCH)
    left_out = {name: or_null(one) for name, one in schema["properties"].items() if name not in schema["required"]}
    return {
        **schema,
        "properties": {**schema["properties"], **left_out},
        "additionalProperties": or_null(ref("EngineValue")),
        "description": "The keys of `[[managed_workers]]`; null is a key that is left out. Every other key is an"
        " argument of the engine, named like vLLM's flag with _ for -; one that looks like a misspelt key of these is"
        " refused.",
    }


def _resources() -> Schema:
    """Write what `read_resources` gives."""
    bytes_: Schema = {**_COUNT, "description": "Bytes."}
    number = or_null(_COUNT)
    cpu = {
        "count": {**number, "description": "Processors of the machine."},
        "usable": {**number, "description": "Those that the gateway may use."},
        "use": {
            **_SHARE,
            "description": "Busy share of all, 0 to 1, over a second or more; null: no two readings yet.",
        },
        "load": or_null({"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3})
        | {"description": "Load averages of 1, 5 and 15 minutes."},
    }
    return object_of(
        {
            "cpu": object_of(cpu),
            "memory": object_of({"total_bytes": bytes_, "available_bytes": bytes_}),
            "gateway": object_of({"pid": _COUNT, "memory_bytes": {**_COUNT, "description": "Resident, in bytes."}}),
            "gpus": or_null({"type": "array", "items": ref("Gpu")})
            | {"description": "In the order of the PCI bus; null: NVIDIA's library is not there, or did not answer."},
        },
        "The gateway's machine. What is null is not known.",
    )


def _gpu() -> Schema:
    holder = {
        **properties_of(GpuProcess, {"pid": "As the driver counts: in a container it may be another process's."}),
        "program": {"type": ["string", "null"]},
        "worker_id": {"type": ["string", "null"], "description": "The managed worker that it belongs to, or null."},
    }
    notes: Notes = {"use": "Share of the last moments in which it computed, 0 to 1."}
    return object_of({
        **properties_of(Gpu, notes, without=("processes", "is_split")),
        "failure": {"type": ["string", "null"], "description": "Why it does not answer; null: it does."},
        "held_by": {"type": "array", "items": object_of(holder), "description": "Processes that use it."},
    })  # fmt: skip


def _machine() -> Schema:
    """Write what `cluster/status` says of one machine."""
    size = {**_COUNT, "description": "Bytes that its processes hold."}
    held = object_of({"worker_id": _TEXT, "memory_bytes": size})
    gpu = object_of({
        **properties_of(MachineGpu, _MACHINE_GPU, without=("held_bytes",)),
        "failure": {"type": ["string", "null"], "description": "Why it does not answer; null: it does."},
        "held_by": {"type": "array", "items": held, "description": "Workers that hold memory of it."},
    })  # fmt: skip
    name = "Its host name, or that of a container on it; with the beginning of its id where another has the same."
    return object_of(
        {
            **properties_of(Machine, {**_MACHINE, "name": name}, without=("gpus",)),
            "has_gateway": {"type": "boolean", "description": "Whether it is this gateway's own."},
            "workers": {"type": "array", "items": _TEXT, "description": "Ids of the workers that are there."},
            "gpus": or_null({"type": "array", "items": gpu})
            | {"description": "In the order of the PCI bus; null: not known."},
        },
        "A machine as those who run on it tell of it; what is null is not known.",
    )


def _status() -> Schema:
    gateway: dict[str, Schema] = {
        "id": {**_TEXT, "description": "Another one at each start of the gateway."},
        "version": _TEXT,
        "pid": _COUNT,
        "uptime_s": {"type": "number", "description": "Seconds."},
    }
    model: dict[str, Schema] = {
        "id": _TEXT,
        "workers": {**_COUNT, "description": "Workers or external routes that can serve it now."},
        "in_flight": {**_COUNT, "description": "Requests under way there."},
        "circuits_open": {
            **_COUNT,
            "description": "How many of those have a circuit that is not closed.",
        },
        "queued": {**_COUNT, "description": "Requests that wait for room in the gateway."},
    }
    return object_of({
        "gateway": object_of(gateway),
        "resources": _resources(),
        "machines": {
            "type": "array",
            "items": ref("Machine"),
            "description": "The gateway's, and those of all workers that tell of theirs and have been heard of.",
        },
        "workers": {
            "type": "object",
            "propertyNames": ref("State"),
            "additionalProperties": _COUNT,
            "description": "How many workers are in each state; states that no worker is in are left out.",
        },
        "models": {"type": "array", "items": object_of(model), "description": "All names, served now or not."},
    })  # fmt: skip


def _beat_answer() -> Schema:
    """Write what a worker hears when it has beaten."""
    answer: dict[str, Schema] = {
        "status": {"enum": ["registered", "ok"], "description": "Whether the gateway did not know it before, or did."},
        "gateway_id": {**_TEXT, "description": "Another one at each start of the gateway."},
        "heartbeat_interval": {"type": "number", "description": "The one of the beat, in seconds."},
        "lost": {"type": "array", "items": ref("Lost"), "description": "Others of its group that are not there."},
        "wants_machine": {"type": "boolean", "description": "Whether its next beat shall have `machine`."},
    }
    return object_of(answer)


def _version() -> Schema:
    worker = object_of({"worker_id": _TEXT, "backend": _TEXT, "versions": schema_of(dict[str, str])})
    return object_of(
        {
            "version": _TEXT,
            "python": _TEXT,
            "packages": schema_of(dict[str, str]),
            "workers": {
                "type": "array",
                "items": worker,
                "description": "Of each that has been heard of: its engine, and what that consists of.",
            },
        }
    )


def schemas() -> dict[str, Schema]:
    """Give the schema of each object by its name, which `ref` takes."""
    number: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1e15}
    scalars = ["string", "number", "boolean", "array", "object"]
    entry: dict[str, Schema] = {
        "object": {"const": "model"},
        "created": {**_COUNT, "description": "Seconds since 1970: the gateway's start."},
        "owned_by": {**_TEXT, "description": "The engine that serves it, or `external`."},
    }
    error: dict[str, Schema] = {
        "message": {**_TEXT, "description": "For people."},
        "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        "param": {"type": ["string", "null"], "description": "The key of the request that is wrong, or null."},
        "code": {**_TEXT, "description": "For programs, for example `model_not_found`."},
    }
    reload: dict[str, Schema] = {
        "applied": {"type": "boolean", "description": "False: it was a dry run, and nothing was changed."},
        "summary": {**_TEXT, "description": "For example `+1 start, ~0 restart, -0 stop, 3 untouched`."},
        "plan": {"type": "array", "items": ref("Step")},
    }
    step: Notes = {
        "action": "`update` changes what runs without a restart of it; `later` waits for the gateway's next start.",
        "what": "A worker, an external route, or a path in the configuration.",
        "why": "What is different; secrets are masked.",
    }
    line: dict[str, Schema] = {
        "seq": {"type": "integer", "minimum": 1, "description": "Grows by one with each line; also the event's id."},
        "time": {**_TEXT, "format": "date-time", "description": "When it was read: RFC 3339, UTC, milliseconds."},
        "line": _TEXT,
    }
    stopped = {"worker_id": _TEXT, "state": {"const": "stopped"}}
    return {
        "Error": object_of({"error": object_of(error)}, "The shape of OpenAI's errors."),
        "State": {**schema_of(State), "description": _STATE},
        "Model": object_of(properties_of(ModelCard, _MODEL)),
        "ModelEntry": object_of({**properties_of(ModelCard, _MODEL), **entry}),
        "Models": list_of(ref("ModelEntry")),
        "Group": object_of(properties_of(Group, _GROUP)),
        "Lost": object_of(properties_of(PeerLoss, _LOST)),
        "Progress": {
            "type": "object",
            "properties": {name: {**number, "description": note} for name, note in _PROGRESS.items()},
            "additionalProperties": number,
            "description": "Null: not known.",
        },
        "TakenModel": taken(ModelCard, _MODEL),
        "TakenGroup": taken(Group, _GROUP),
        "TakenMachine": taken(Machine, _MACHINE),
        "TakenMachineGpu": taken(MachineGpu, _MACHINE_GPU),
        "Machine": _machine(),
        "Beat": taken(
            Heartbeat,
            _BEAT,
            "All that a worker tells of itself, at every change and at intervals. Keys that are not known are ignored.",
        ),
        "BeatAnswer": _beat_answer(),
        "Worker": _worker(),
        "Circuit": _circuit(),
        "Workers": list_of(ref("Worker")),
        "EngineValue": {"type": scalars, "items": {"type": scalars}},
        "Launch": _launch(),
        "Launched": object_of({"worker_id": _TEXT, "state": ref("State")}),
        "Stopped": object_of(stopped),
        "Gpu": _gpu(),
        "Status": _status(),
        "Version": _version(),
        "Step": object_of(properties_of(ReloadStep, step)),
        "Reload": object_of(reload),
        "LogLine": object_of(line, "The data of a plain event of a log stream."),
        "LogGap": object_of(
            {"lost": {"type": "integer", "minimum": 1}},
            "The data of an event `gap`: so many lines are not kept any more.",
        ),
        "Health": object_of({"status": {"const": "ok"}}),
    }
