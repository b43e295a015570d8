"""The workers on nodes of a Ray cluster: the keys of their tables that do not go together, each with the reason."""

import ipaddress
import urllib.parse
from collections.abc import Iterable, Mapping

import attrs

from ichat.config.engine_args import arguments_of
from ichat.config.ray import RayEngine, RaySettings
from ichat.config.schema import Config, ManagedWorkerConfig


def contradictions_of_ray(config: Config) -> Iterable[str]:
    """Return why the nodes of a cluster cannot reach the gateway, if that is so."""
    ray, settings = config.ray, config.server_settings
    is_used = any(worker.on == "ray" for worker in config.managed_workers)
    if ray.address is None or ray.gateway_address is not None or not is_used:
        return
    is_ours = _is_loopback(settings.host)
    host = urllib.parse.urlsplit(ray.address).hostname or ""
    if is_ours and not _is_loopback(host):
        place = f"{settings.host}:{settings.port}"
        yield f"ray: the nodes cannot reach {place}: set server_settings.host, or ray.gateway_address"


_LOCAL: Mapping[str, str] = {
    "gpu_ids": "Ray chooses the GPUs: leave gpu_ids out, and write gpus = N",
    "share_gpus": "Ray chooses the GPUs: leave share_gpus out, and write gpus = 0.5 for half a GPU",
    "host": "Ray chooses the node: leave host out",
    "port": "Ray chooses the node: leave port out; ray.ports limits the ports of all workers",
    "gpu_memory_gib": "Ray books GPUs, not their memory: leave gpu_memory_gib out, and choose nodes by labels",
}
"""The keys of workers on this machine alone, each with the reason."""
_ELSEWHERE = (
    "on", "labels", "memory_gib", "replicas", "scale", "load", "idle_s", "when_idle", "min_loaded_s", "on_gateway_exit",
)  # fmt: skip
"""The keys of workers that concern the gateway alone."""
_BOOKED = ("labels", "memory_gib")
"""The keys of workers on Ray alone."""


def contradictions_of_place(worker: ManagedWorkerConfig, config: Config) -> Iterable[str]:
    """Return the keys of a table that do not go with the place where its worker runs, each with the reason."""
    if worker.on == "here":
        given = (name for name in _BOOKED if getattr(worker, name))
        why = 'is for workers on Ray, and this worker runs here: leave it out, or write on = "ray"'
        yield from (f"{name}: {why}" for name in given)
        return
    if config.ray.address is None:
        yield "on: the worker runs on Ray, and [ray] has no address: give that of Ray's dashboard"
    yield from (f"{name}: {why}" for name, why in _LOCAL.items() if getattr(worker, name) not in (None, False))
    if worker.when_idle == "sleep":
        yield 'when_idle: Ray keeps the GPU booked for a worker that sleeps: write when_idle = "stop"'
    yield from _contradictions_of_gpus(worker)


def _contradictions_of_gpus(worker: ManagedWorkerConfig) -> Iterable[str]:
    if arguments_of(worker).get("distributed_executor_backend") == "ray":
        if worker.gpus is not None:
            yield "gpus: vLLM's Ray executor books its GPUs itself: leave gpus out"
    elif worker.gpus is None:
        yield "gpus: write how many GPUs Ray books for the worker; 0: none"
    if worker.gpus == "auto":
        yield "gpus: the gateway does not see the model's files on the nodes: write a number of GPUs"


def on_node(worker: ManagedWorkerConfig, ray: RaySettings) -> ManagedWorkerConfig:
    """Return the table of a worker on Ray as its node has it: nothing there concerns the cluster, or its copies.

    A job without GPUs sees all GPUs of its node, so `gpu_ids` is empty then.
    """
    usual = ManagedWorkerConfig(worker.model_name, worker.model_path)
    there = {name: getattr(usual, name) for name in _ELSEWHERE}
    engine = ray.engines.get(worker.backend, RayEngine())
    gpu_ids = list[int]() if worker.gpus == 0 else None
    gpus = None if worker.gpus == 0 else worker.gpus
    return attrs.evolve(worker, **there, gpus=gpus, gpu_ids=gpu_ids, python=worker.python or engine.python)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
