"""The cluster of Ray: dashboard, token, nodes and their log services, and GPUs that two programs give away."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.findings import Finding
from ichat.errors import Exit
from ichat.hardware.machines import own_addresses
from ichat.http import client
from ichat.ray.api import RayApi, RayRefused, RayUnknown
from ichat.ray.reading import ClusterReading, read_cluster
from ichat.ray.values import RayNode, RayRoom, RayVersion
from ichat.security.keys import ray_token

TESTED = "2.60"
"""The version of Ray that the tests start."""
NODES_NAMED_MAX = 3
_CAREFUL = "set RAY_AUTH_MODE=token on all nodes, and ray.token_env"
_OWN_PORT = "give each raylet on it a --dashboard-agent-listen-port of its own"


@attrs.frozen
class RayFacts:
    """The facts about the cluster of `[ray]`."""

    version: RayVersion | None = None
    """None: it is not known; then nothing else is."""
    why: str = ""
    """Why it is not known."""
    refusal: int = 0
    """The status of a refusal; 0: there was none."""
    is_open: bool = False
    """Whether it answers without a token."""
    cluster: ClusterReading = ClusterReading()
    mute: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Why the log services of nodes do not answer, by the ids of the nodes."""
    own: frozenset[str] = frozenset()
    """The addresses of this machine."""


async def read_ray_facts(config: Config, ends_at: float) -> RayFacts:
    """Ask the cluster of `[ray]`; facts that are unknown at `ends_at` are missing. Raises Exit without its token."""
    assert config.ray.address is not None
    facts = RayFacts(why="no answer in time", own=own_addresses())
    api = RayApi(config.ray.address, ray_token(config.ray))
    with trio.move_on_at(ends_at):
        try:
            facts = attrs.evolve(facts, version=await api.version(), why="")
        except RayUnknown as unknown:
            return attrs.evolve(facts, why=str(unknown))
        except RayRefused as refused:
            return attrs.evolve(facts, why=str(refused), refusal=refused.status)
        facts = attrs.evolve(facts, is_open=await _is_open(RayApi(config.ray.address)))
        facts = attrs.evolve(facts, cluster=await read_cluster(api))
        mute = dict.fromkeys([node.id for node in facts.cluster.nodes], "no answer in time")
        facts = attrs.evolve(facts, mute=mute)

        async def ask(node: RayNode) -> None:
            try:
                await api.log_files(node.id, "raylet*")
            except (RayUnknown, RayRefused) as error:
                mute[node.id] = str(error)
            else:
                del mute[node.id]

        await client.ask_each(facts.cluster.nodes, ask)
    return facts


async def _is_open(api: RayApi) -> bool:
    try:
        await api.version()
    except (RayUnknown, RayRefused):
        return False
    return True


def find_in_ray(config: Config, facts: RayFacts) -> list[Finding]:
    """Return the findings about the cluster."""
    if facts.version is None:
        return [_why_unknown(config, facts)]
    found = [*_check_access(config, facts, facts.version), *_check_nodes(facts.cluster)]
    return [*found, *_check_logs(facts), *_check_shared_addresses(facts.cluster), *_check_books(config, facts)]


def no_token(exit_: Exit, variable: str | None) -> Finding:
    """Return the finding that the environment has no token for the cluster."""
    return Finding("error", "token", str(exit_), f"export {variable}=…")


def _why_unknown(config: Config, facts: RayFacts) -> Finding:
    address, variable = config.ray.address, config.ray.token_env
    if facts.refusal in (401, 403):
        remedy = "correct ray.token_env" if variable else "set ray.token_env"
        sentence = f"Ray refuses this gateway ({facts.why}): {remedy}."
        return Finding("error", "token", sentence, f"export {variable}=…" if variable else "")
    if facts.refusal:
        return Finding("error", "Ray", f"{address} is not Ray's dashboard ({facts.why}): correct ray.address.")
    sentence = f"Ray at {address} does not answer ({facts.why}): its workers go on, and launches wait."
    return Finding("error", "Ray", f"{sentence[:-1]}; start its head, or correct ray.address.", _curl(address))


def _curl(address: str | None) -> str:
    return f"curl -v {shlex.quote(f'{address}/api/version')}"


def _check_access(config: Config, facts: RayFacts, version: RayVersion) -> Iterator[Finding]:
    token = "" if facts.is_open else ", and accepts the token"
    yield Finding("ok", "Ray", f"Ray {version.ray} answers at {config.ray.address}{token}.")
    if not version.ray.startswith(f"{TESTED}."):
        sentence = (
            f"Ray {version.ray} is not tested with this iChat, Ray {TESTED} is: try a launch before you rely on it."
        )
        yield Finding("warning", "version", sentence)
    if facts.is_open:
        sentence = f"Ray wants no token: all programs that reach {config.ray.address} may run anything on its nodes"
        yield Finding("warning", "token", f"{sentence}; {_CAREFUL}.")


def _check_nodes(cluster: ClusterReading) -> Iterator[Finding]:
    for what, why in cluster.missing.items():
        yield Finding("warning", what, f"Ray does not report its {what} ({why}).")
    if "nodes" in cluster.missing:
        return
    total = sum(node.gpus for node in cluster.nodes)
    dead = f"; {_are(cluster.dead)} dead" if cluster.dead else ""
    if not cluster.nodes:
        yield Finding("error", "nodes", f"Ray has no node that is alive{dead}.", "ray status")
    elif not total:
        yield Finding("warning", "nodes", f"{_are(len(cluster.nodes), 'node')} alive, without a GPU for jobs{dead}.")
    else:
        free = "" if cluster.room is None or not cluster.room.free else f", {_free_gpus(cluster.room):g} free"
        sentence = f"{_are(len(cluster.nodes), 'node')} alive, with {total:g} GPUs for jobs{free}{dead}."
        yield Finding("ok", "nodes", sentence)


def _check_logs(facts: RayFacts) -> Iterator[Finding]:
    """Yield the findings about the agents that read the logs of nodes, and prepare jobs."""
    nodes, at = facts.cluster.nodes, facts.cluster.by_address()
    for node in nodes:
        if node.id in facts.mute:
            remedy = _OWN_PORT if len(at[node.ip]) > 1 else "see dashboard_agent.log in its session's logs"
            sentence = f"The log service of {_named(node)} does not answer ({facts.mute[node.id]}): {remedy}."
            yield Finding("warning", "logs", sentence)
    if nodes and not facts.mute:
        yield Finding("ok", "logs", "The log services of all nodes answer.")


def _check_shared_addresses(cluster: ClusterReading) -> Iterator[Finding]:
    for ip, nodes in cluster.by_address().items():
        total = sum(node.gpus for node in nodes)
        seen = {gpu.uuid for node in nodes if node.id in cluster.hardware for gpu in cluster.hardware[node.id].gpus}
        if seen and total > len(seen):
            sentence = f"Ray gives away {total:g} GPUs of {ip}, and it has {len(seen)}"
            yield Finding("error", ip, f"{sentence}: start its raylets with fewer --num-gpus.")
        elif len(nodes) > 1:
            yield Finding("ok", ip, f"Ray has {len(nodes)} raylets on this address, with {total:g} GPUs for jobs.")


def _check_books(config: Config, facts: RayFacts) -> Iterator[Finding]:
    """Yield the findings about GPUs of this machine that both Ray and the gateway give to workers."""
    booked = sum(node.gpus for node in facts.cluster.nodes if node.ip in facts.own)
    here = list(filter(_is_here, config.managed_workers)) if booked else []
    remedy = 'write on = "ray", or start Ray here with --num-gpus=0'
    whose = f"Ray gives away {booked:g} GPUs of this machine, and does not see the workers here"
    if placed := [worker.model_name for worker in here if worker.gpus]:
        yield Finding("error", "GPUs", f"{whose} ({_some(placed)}): {remedy}.")
    elif named := [worker.model_name for worker in here if worker.gpus is None and worker.gpu_ids != []]:
        yield Finding("warning", "GPUs", f"{whose} ({_some(named)}): see that they use other GPUs, or {remedy}.")


def _is_here(worker: ManagedWorkerConfig) -> bool:
    return worker.on == "here"


def _free_gpus(room: RayRoom) -> float:
    return sum(one.get("GPU", 0.0) for one in room.free.values())


def _are(count: int, what: str = "") -> str:
    verb = "is" if count == 1 else "are"
    return f"{count} {what}{'s' if what and count != 1 else ''} {verb}" if what else f"{count} {verb}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - NODES_NAMED_MAX
    return ", ".join(names[:NODES_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _named(node: RayNode) -> str:
    return f"node {node.ip} ({node.id[:8]})"
