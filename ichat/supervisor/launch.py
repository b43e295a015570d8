"""How a managed worker is started: its id, its command line and its environment."""

import os
import sys
from collections.abc import Mapping, Sequence

from ichat.config.engine_args import implied_arguments
from ichat.config.interpreters import find_interpreter
from ichat.config.process_marks import RELAY_VARIABLE, WORKER_VARIABLE
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.engines.flags import engine_flags
from ichat.program import is_installed, is_pyz, own_command, package_directory
from ichat.security.keys import TOKEN_FD_VARIABLE, read_key, without_keys
from ichat.supervisor import processes

HEAD_BYTES_MORE = 8192
"""The most that the gateway adds to the head of a request."""
SLEEP_FLAGS: Mapping[str, Sequence[str]] = {
    "vllm": ("enable_sleep_mode",),
    "sglang": ("enable_memory_saver", "enable_weights_cpu_backup"),
}
"""The arguments of each engine for sleep; without SGLang's last argument, SGLang would lose the model's weights."""
_SLEEP_SWITCHES = ("enable_sleep_mode", "enable_memory_saver")
"""A name of it in each engine's vocabulary: both engines know both."""


def python_of(config: Config, worker: ManagedWorkerConfig) -> str:
    """Return the interpreter that runs a worker: the configured interpreter, else the first that has its engine.

    If none is configured it looks at files.
    """
    engine = config.engines.get(worker.backend)
    named = worker.python or (engine.python if engine else None)
    return named or find_interpreter(worker.backend) or sys.executable


def devices_of(config: Config, worker: ManagedWorkerConfig) -> str:
    """Return the variable that says which GPUs a worker may use."""
    engine = config.engines.get(worker.backend)
    return engine.devices if engine else EngineSettings().devices


def sleep_flags(worker: ManagedWorkerConfig, *, has_gpus: bool) -> list[str]:
    """Return the flags with which the engine of a worker can sleep, if the worker should and the flags are not set.

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
    address, keeps = worker.tcp_address(), worker.on_gateway_exit == "keep"
    place = [
        f"--gateway-address=unix:{control}",
        *(["--port=none"] if address is None else [f"--host={address[0]}", f"--port={address[1]}"]),
        f"--unix-socket={unix_socket}",
        f"--orphan-after-s={config.timeouts.orphan_after_s if keeps else 0:g}",
    ]
    return command_at(config, worker, worker_id, place, has_gpus=has_gpus)


def command_at(
    config: Config, worker: ManagedWorkerConfig, worker_id: str, place: Sequence[str], *, has_gpus: bool
) -> list[str]:
    """Return the command of a worker; `place` has the flags for its gateway and the addresses where it listens."""
    limits, timeouts = config.limits, config.timeouts
    return [
        *own_command(python_of(config, worker)),
        "worker",
        f"--backend={worker.backend}",
        f"--worker-id={worker_id}",
        *place,
        f"--heartbeat-interval={worker.heartbeat_interval:g}",
        f"--served-model-name={worker.model_name}",
        f"--log-streaming={'true' if worker.log_streaming else 'false'}",
        f"--responses-max={worker.responses_max}",
        f"--reasoning-field={worker.reasoning_field}",
        f"--prefix-reports={worker.prefix_reports}",
        *(["--media-domains", *worker.media_domains] if worker.media_domains else []),
        # the gateway's own bounds: its worker must accept every request that it lets through
        f"--head-bytes-max={limits.head_bytes_max + HEAD_BYTES_MORE}",
        f"--body-bytes-max={limits.body_bytes_max}",
        f"--connections-max={limits.connections_max}",
        f"--client-stall-s={timeouts.client_stall_s:g}",
        f"--drain-s={timeouts.stop_s / 2:g}",
        f"--stop-s={timeouts.stop_s / 3:g}",
        f"--model={worker.model_path}",
        *engine_flags({**implied_arguments(worker), **worker.backend_args}),
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
    environment = own_environment(config) | {"PYTHONUNBUFFERED": "1", WORKER_VARIABLE: mark}
    if watched is not None:
        environment[processes.LAUNCHER_FD] = str(watched)
    if token is not None:
        environment[TOKEN_FD_VARIABLE] = str(token)
    if worker.gpu_ids is not None:
        devices = devices_of(config, worker)
        if devices == "CUDA_VISIBLE_DEVICES":
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
        environment[devices] = ",".join(map(str, worker.gpu_ids))
    return {**environment, **worker.env}


def own_environment(config: Config) -> dict[str, str]:
    """Return the environment for a process of iChat, without the keys that the gateway has in its own, or has had."""
    ours = {processes.LAUNCHER_FD, WORKER_VARIABLE, RELAY_VARIABLE, *config.security.variables()}
    upstreams = (*config.external_routes, *config.registered_servers)
    ours |= {one.api_key_env for one in upstreams if one.api_key_env is not None}
    environment = {name: value for name, value in without_keys(os.environ).items() if name not in ours}
    if not is_pyz() and not is_installed():
        paths = [package_directory(), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
