"""How a managed worker is started: its id, its command line and its environment."""

import json
import os
import re
import sys
import zipfile
from collections.abc import Collection, Mapping, Sequence

import ichat
from ichat.config.schema import Config, EngineValue, ManagedWorkerConfig
from ichat.security.keys import TOKEN_FD_VARIABLE, read_key, without_keys
from ichat.supervisor import processes
from ichat.supervisor.orphans import WORKER_TAG_VAR

HEAD_BYTES_MORE = 8192
"""What the gateway may add to the head of a request."""
SLEEP_FLAGS: Mapping[str, Sequence[str]] = {
    "vllm": ("enable_sleep_mode",),
    "sglang": ("enable_memory_saver", "enable_weights_cpu_backup"),
}
"""What each engine needs in order to sleep; without the last one, SGLang would lose the model's weights."""
_SLEEP_SWITCHES = ("enable_sleep_mode", "enable_memory_saver")
"""One name of it in each engine's vocabulary: both engines know both."""


def id_for(model_name: str, taken: Collection[str]) -> str:
    """Return a worker id for a model's name: readable, fit for a path, and the same at every start."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name)[:100].strip("-") or "worker"
    number = 0
    while f"{slug}-{number}" in taken:
        number += 1
    return f"{slug}-{number}"


def engine_flags(arguments: Mapping[str, EngineValue]) -> list[str]:
    """Return engine arguments as flags: `max_model_len = 2048` is ``--max-model-len 2048``.

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
            flags += [f"--{name}", *(json.dumps(one) if isinstance(one, dict | list) else str(one) for one in value)]
        elif isinstance(value, dict):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags.append(f"--{name}={value}")
    return flags


def python_of(config: Config, worker: ManagedWorkerConfig) -> str:
    """Return the interpreter that runs a worker."""
    engine = config.engines.get(worker.backend)
    return worker.python or (engine.python if engine else None) or sys.executable


def sleep_flags(worker: ManagedWorkerConfig, *, has_gpus: bool) -> list[str]:
    """Return the flags with which the engine of a worker can sleep, if the worker is to and the flags are not set.

    `has_gpus` says whether the machine has any: without them no engine can, and vLLM refuses the flag.
    """
    given = {name.replace("-", "_"): value for name, value in worker.backend_args.items()}
    is_on_the_cpu = not has_gpus or worker.gpu_ids == [] or given.get("device") == "cpu"
    if worker.when_idle != "sleep" or is_on_the_cpu or any(given.get(name) is False for name in _SLEEP_SWITCHES):
        return []
    return engine_flags({name: True for name in SLEEP_FLAGS.get(worker.backend, ()) if name not in given})


def command_of(
    config: Config,
    worker: ManagedWorkerConfig,
    worker_id: str,
    unix_socket: str,
    control: str,
    *,
    has_gpus: bool = False,
) -> list[str]:
    """Return the command of a worker that listens on `unix_socket` and sends its heartbeats to `control`.

    `has_gpus` says whether the machine has any.
    """
    limits, timeouts, address = config.limits, config.timeouts, worker.tcp_address()
    keeps = worker.on_gateway_exit == "keep"
    return [
        *program_of(python_of(config, worker)),
        "worker",
        f"--backend={worker.backend}",
        f"--worker-id={worker_id}",
        f"--gateway-address=unix:{control}",
        f"--heartbeat-interval={worker.heartbeat_interval:g}",
        f"--served-model-name={worker.model_name}",
        *(["--port=none"] if address is None else [f"--host={address[0]}", f"--port={address[1]}"]),
        f"--unix-socket={unix_socket}",
        f"--log-streaming={'true' if worker.log_streaming else 'false'}",
        f"--responses-max={worker.responses_max}",
        f"--reasoning-field={worker.reasoning_field}",
        f"--prefix-reports={worker.prefix_reports}",
        *(["--media-domains", *worker.media_domains] if worker.media_domains else []),
        f"--orphan-after-s={timeouts.orphan_after_s if keeps else 0:g}",
        # the gateway's own bounds: what it lets through, its worker must not refuse
        f"--head-bytes-max={limits.head_bytes_max + HEAD_BYTES_MORE}",
        f"--body-bytes-max={limits.body_bytes_max}",
        f"--connections-max={limits.connections_max}",
        f"--client-stall-s={timeouts.client_stall_s:g}",
        f"--drain-s={timeouts.stop_s / 2:g}",
        f"--stop-s={timeouts.stop_s / 3:g}",
        f"--model={worker.model_path}",
        *engine_flags(worker.backend_args),
        *sleep_flags(worker, has_gpus=has_gpus),
    ]


def token_of(config: Config) -> str:
    """Return the token with which workers join; "" if there is none."""
    variable = config.security.join_token_env
    return read_key(variable) if variable is not None else ""


def environment_of(
    config: Config, worker: ManagedWorkerConfig, mark: str, watched: int | None = None, token: int | None = None
) -> dict[str, str]:
    """Return a worker's environment, without the keys that the gateway has in its own, or has had.

    `watched` is the descriptor by which the worker sees that its gateway is gone, `token` that of the pipe with its
    token. `mark` says which worker a process belongs to.
    """
    ours = {processes.LAUNCHER_FD, *config.security.variables()}
    ours |= {route.api_key_env for route in config.external_routes if route.api_key_env is not None}
    environment = {name: value for name, value in without_keys(os.environ).items() if name not in ours}
    environment |= {"PYTHONUNBUFFERED": "1", WORKER_TAG_VAR: mark}
    if watched is not None:
        environment[processes.LAUNCHER_FD] = str(watched)
    if token is not None:
        environment[TOKEN_FD_VARIABLE] = str(token)
    if worker.gpu_ids is not None:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, worker.gpu_ids))
    if not zipfile.is_zipfile(sys.argv[0]):
        source = os.path.dirname(os.path.dirname(os.path.abspath(ichat.__file__)))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**environment, **worker.env}


def program_of(python: str) -> Sequence[str]:
    """Return the command that runs iChat as this process was started: the same pyz, or the same source."""
    if zipfile.is_zipfile(sys.argv[0]):
        return [python, os.path.abspath(sys.argv[0])]
    return [python, "-m", "ichat"]
