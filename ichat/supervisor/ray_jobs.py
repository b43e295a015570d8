"""The job of a launch on Ray, and why it waits: values and pure functions."""

import math
import shlex
import socket
import urllib.parse
from collections.abc import Collection, Mapping, Sequence

import attrs

from ichat.config.ray import Label, RaySettings
from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.fleet.orders import OrderPlace
from ichat.placement.estimate import GIB
from ichat.ray.values import RayJob, RayNode, RayRoom, RaySubmission
from ichat.supervisor.remote_wait import RemoteLack

OWNER, WORKER, LAUNCH = "ichat.owner", "ichat.worker", "ichat.launch"
"""The metadata of a job: the gateway's state directory, the worker's id, and the number of the launch."""
STOP_MORE_S = 5.0
"""How much longer than a worker's own `stop_s` Ray waits before it kills the processes of a job."""
KIND = "ray.io/accelerator-type"
"""The label with the kind of a node's GPUs."""
_ANY = ("", "0.0.0.0", "::")
_NAMED_MAX = 3
_LOOPBACK, _OWN_NAMES = ("127.0.0.0/8", "::1"), ("127.0.0.1", "::1", "localhost")


@attrs.frozen
class LaunchNames:
    """The names of a launch on Ray."""

    owner: str
    """That of the gateway's state directory."""
    worker_id: str
    number: int

    @property
    def job_id(self) -> str:
        """The id of the launch's job: no other launch of any gateway has it."""
        return f"{self.owner}-{self.worker_id.replace(':', '_')[:100]}-{self.number}"


def submission_of(
    names: LaunchNames, spec: ManagedWorkerConfig, config: Config, *, entrypoint: str, package: str
) -> RaySubmission:
    """Return the job of a launch. Its only secret is the code in `entrypoint`, for a single use."""
    ray = config.ray
    return RaySubmission(
        id=names.job_id,
        entrypoint=entrypoint,
        metadata={OWNER: names.owner, WORKER: names.worker_id, LAUNCH: str(names.number)},
        gpus=float(spec.gpus or 0),
        cpus=ray.cpus,
        memory_bytes=round((spec.memory_gib or 0) * GIB),
        labels={name: _selector_of(value) for name, value in spec.labels.items()},
        package=package,
        env={"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(config.timeouts.stop_s + STOP_MORE_S))},
        runtime_env=ray.runtime_env,
    )


def entrypoint_of(ray: RaySettings, code: str, address: str, *, source: str = "") -> str:
    """Return the command of a job: the guard of the order with this code.

    It runs from the pyz in the job's package, or from the PYTHONPATH `source` of a gateway that runs from its source.
    """
    python = shlex.quote(ray.python)
    program = f"env PYTHONPATH={shlex.quote(source)} {python} -m ichat" if source else f"{python} -I -S ichat.pyz"
    return f"exec {program} worker --order {code} --gateway-address {shlex.quote(address)}"


def address_for(config: Config, node_ip: str) -> str:
    """Return the URL by which the nodes reach the gateway, where a node has this address. Raises OSError."""
    settings = config.server_settings
    if config.ray.gateway_address is not None:
        return config.ray.gateway_address.rstrip("/")
    host = settings.host
    if host in _ANY:
        with socket.socket(socket.AF_INET6 if ":" in node_ip else socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((node_ip, 9))  # nothing is sent
            host = str(way.getsockname()[0])
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def place_on(config: Config, node_ip: str, *, is_own: bool) -> OrderPlace:
    """Return the place of an order, when its job runs on a node. Raises OSError.

    `is_own` says that the node is the gateway's own machine: its connections may be from loopback, and if the gateway
    listens there alone, its workers do so, too.
    """
    senders = [node_ip, *config.security.worker_networks, *(_LOOPBACK if is_own else ())]
    is_loopback = is_own and urllib.parse.urlsplit(address_for(config, node_ip)).hostname in _OWN_NAMES
    return OrderPlace(senders, "" if is_loopback else node_ip, config.ray.ports or "", ends_with_parent=True)


def is_own_address(ip: str) -> bool:
    """Return whether an address is this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def why_pending(spec: ManagedWorkerConfig, job: RayJob, nodes: Sequence[RayNode], room: RayRoom | None) -> str:
    """Return why a pending job has no place, in a sentence, by the newest facts about the cluster."""
    alive = [node for node in nodes if node.is_alive]
    fitting = [node for node in alive if node.has_labels(spec.labels)]
    if not alive:
        return "Ray has no node that is alive."
    if not fitting:
        kinds = _kinds_of(alive) if KIND in spec.labels else ""
        return f"No node of Ray has {_labels_shown(spec.labels)}{kinds}."
    coming = f"; Ray is starting {', '.join(sorted(set(room.coming)))}" if room and room.coming else ""
    if lack := _lack_of_gpus(spec, fitting, room):
        return f"{lack}{coming}."
    return f"{job.message.rstrip('.') or 'Ray has not started its job'}{coming}."


def _lack_of_gpus(spec: ManagedWorkerConfig, nodes: Sequence[RayNode], room: RayRoom | None) -> str:
    """Return why none of these nodes has a worker's GPUs; "" if that is not known."""
    count = float(spec.gpus or 0)
    wanted, most = "1 GPU" if count == 1 else f"{count:g} GPUs", max(node.gpus for node in nodes)
    if count > most:
        largest = ", ".join([node.ip for node in nodes if node.gpus == most][:_NAMED_MAX])
        which = f" with {_labels_shown(spec.labels)}" if spec.labels else ""
        return f"No node of Ray{which} has {wanted}: the largest have {most:g} ({largest})"
    return _lack_of_room(wanted, count, [node.id for node in nodes if node.gpus >= count], room)


def _lack_of_room(wanted: str, count: float, able: Sequence[str], room: RayRoom | None) -> str:
    """Return that no able node has these GPUs free; "" if that is not so, or not known of each of them."""
    if room is None or not room.free.keys() >= set(able):
        return ""
    free = max(room.free[one].get("GPU", 0.0) for one in able)
    return f"{wanted} are wanted on a node, and at most {free:g} are free on any" if free < count else ""


def lacking_on(spec: ManagedWorkerConfig, nodes: Sequence[RayNode], room: RayRoom | None) -> RemoteLack:
    """Return the lack of GPUs for a worker.

    There is none if Ray waits for no such number of GPUs, or that is not known: a job with a place is pending for
    seconds, too.
    """
    count = float(spec.gpus or 0)
    able = [node.id for node in nodes if node.is_alive and node.gpus >= count and node.has_labels(spec.labels)]
    if not count or room is None or not room.free.keys() >= set(able):
        return RemoteLack()
    unplaced = sum(demand.count for demand in room.demand if demand.resources.get("GPU") == count)
    by_node = {one: count - room.free[one].get("GPU", 0.0) for one in able}
    return RemoteLack(unplaced, by_node) if unplaced and by_node else RemoteLack()


def _selector_of(value: Label) -> str:
    return value if isinstance(value, str) else f"in({','.join(value)})"


def _values_of(value: Label) -> Collection[str]:
    return [value] if isinstance(value, str) else value


def _labels_shown(labels: Mapping[str, Label]) -> str:
    shown = [f"{name} = {' or '.join(_values_of(value))}" for name, value in labels.items()]
    return f"the labels {', '.join(shown)}" if len(shown) > 1 else f"the label {shown[0]}" if shown else ""


def _kinds_of(nodes: Sequence[RayNode]) -> str:
    totals: dict[str, float] = {}
    for node in nodes:
        if node.gpus:
            kind = node.labels.get(KIND, "of unknown kind")
            totals[kind] = totals.get(kind, 0.0) + node.gpus
    return "; Ray has " + ", ".join(f"{count:g} {kind}" for kind, count in sorted(totals.items())) if totals else ""
