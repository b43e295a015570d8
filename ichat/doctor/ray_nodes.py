"""The nodes of a cluster of Ray from within, by a small job on each (`doctor --deep`).

A job looks for the interpreters and the models of the workers that may run on its node, and asks the gateway for its
health from there. It changes nothing.
"""

import secrets
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.doctor.findings import Finding
from ichat.doctor.network import ask_way
from ichat.errors import Exit
from ichat.http import client
from ichat.http.pool import Upstream
from ichat.http.tls import client_context
from ichat.protocol.json_text import object_in, to_json
from ichat.ray.api import RayApi, RayRefused, RayUnknown, job_log
from ichat.ray.values import RayJob, RayNode, RaySubmission

DEEP_S = 30.0
"""The longest time for the jobs on all nodes, in seconds."""
NODES_MAX = 64
"""The most nodes that get a job."""
CPUS = 0.01
"""The share of a CPU that each job books."""
ASK_AGAIN_S = 0.5
END_S = 3.0
"""The time to delete the jobs, at the end."""
_MARK = "ichat-node "
_LINES = 40
_NOT_FOUND = 127
"""The exit code of a shell that does not find a program."""
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_SCRIPT = """
import importlib.util, json, os, shutil, subprocess, sys, urllib.request
asked = json.loads(sys.argv[1])
probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
found = {"python": list(sys.version_info[:2]), "engines": {}, "models": {}, "gateway": ""}
for engine, python in asked["engines"]:
    if shutil.which(python) is None:
        found["engines"][engine] = "missing"
    else:
        try:
            done = subprocess.run([python, "-c", probe, engine], timeout=10, capture_output=True)
            found["engines"][engine] = "there" if done.returncode == 0 else "without"
        except (OSError, subprocess.SubprocessError):
            found["engines"][engine] = "silent"
for path in asked["models"]:
    found["models"][path] = os.path.exists(path)
if asked["gateway"]:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(asked["gateway"] + "/health", timeout=5).close()
    except (OSError, ValueError) as error:
        found["gateway"] = str(getattr(error, "reason", error)) or type(error).__name__
print("ichat-node " + json.dumps(found), flush=True)
"""
"""Runs in the interpreter of `ray.python`, any Python 3."""


@attrs.frozen
class NodeQuestion:
    """The question to a node."""

    engines: Mapping[str, str]
    """The interpreters of engines there, by the engines' names."""
    models: Sequence[str]
    """The directories of models."""
    gateway: str = ""
    """The URL of the gateway; "": it is not asked for its health."""

    def entrypoint(self, python: str) -> str:
        """Return the command of the job."""
        asked = to_json({"engines": list(self.engines.items()), "models": self.models, "gateway": self.gateway})
        return f"exec {shlex.quote(python)} -I -S -c {shlex.quote(_SCRIPT)} {shlex.quote(asked)}"


@attrs.frozen
class NodeAnswer:
    """The outcome of a job on a node."""

    node: RayNode
    job: RayJob | None = None
    """The job, as it was known last; None: it could not be submitted."""
    found: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """Its findings; empty if it has not ended well."""
    why: str = ""
    """Why the job could not be submitted, or asked."""


def question_for(config: Config, node: RayNode, gateway: str) -> NodeQuestion:
    """Return the question to a node: about the workers that its labels admit."""
    workers = [one for one in config.managed_workers if one.on == "ray" and node.has_labels(one.labels)]
    engines = {worker.backend: python for worker in workers if (python := _python_of(config, worker))}
    models = dict.fromkeys(worker.model_path for worker in workers if worker.model_path.startswith("/"))
    return NodeQuestion(engines, list(models), gateway)


def _python_of(config: Config, worker: ManagedWorkerConfig) -> str | None:
    """Return the interpreter of a worker's engine on the nodes; None: none is configured."""
    named = config.ray.engines.get(worker.backend)
    here = config.engines.get(worker.backend, EngineSettings())
    return worker.python or (named.python if named is not None else None) or here.python


async def ask_nodes(config: Config, api: RayApi, nodes: Sequence[RayNode], gateway: str) -> list[NodeAnswer]:
    """Run a job on each node, for DEEP_S at most; none of them is left, except jobs that have no room."""
    asked = sorted(nodes, key=lambda node: (-node.gpus, node.ip))[:NODES_MAX]
    answers = {node.id: NodeAnswer(node, why="no answer in time") for node in asked}
    number = secrets.token_hex(4)

    async def ask(node: RayNode) -> None:
        job = RaySubmission(
            f"ichat-doctor-{number}-{node.id[:12]}",
            question_for(config, node, gateway).entrypoint(config.ray.python),
            cpus=CPUS,
            labels={"ray.io/node-id": node.id},
        )
        try:
            await api.submit(job)
            await _follow(api, job.id, node, answers)
        except (RayUnknown, RayRefused) as error:
            answers[node.id] = attrs.evolve(answers[node.id], why=str(error))
        finally:
            with trio.move_on_after(END_S, shield=True):
                await _end(api, job.id)

    with trio.move_on_after(DEEP_S):
        await client.ask_each(asked, ask)
    return list(answers.values())


async def _follow(api: RayApi, job_id: str, node: RayNode, answers: dict[str, NodeAnswer]) -> None:
    """Note the state of a job until it is over, and then its finding. Raises RayUnknown, RayRefused."""
    while True:
        job = await api.job(job_id)
        answers[node.id] = NodeAnswer(node, job)
        if job is None or job.is_over:
            break
        await trio.sleep(ASK_AGAIN_S)
    if job is None:
        return
    lines = await api.last_lines(node.id, job_log(job_id), _LINES)
    texts = [line.partition(_MARK)[2] for line in lines if line.startswith(_MARK)]
    answers[node.id] = NodeAnswer(node, job, object_in(texts[-1]) if texts else {})


async def _end(api: RayApi, job_id: str) -> None:
    try:
        await api.stop(job_id)
        await api.delete(job_id)
    except (RayUnknown, RayRefused):
        return  # it is still pending: Ray deletes only jobs that are over


def find_on_nodes(config: Config, answers: Sequence[NodeAnswer], gateway: str) -> list[Finding]:
    """Return the findings of the jobs on nodes; `gateway` is the URL that was asked from there, or ""."""
    found = [finding for answer in answers for finding in _check_answer(config, answer, gateway)]
    if found:
        return found
    reach = f", and reach the gateway at {gateway}" if gateway else ""
    what = "1 node has" if len(answers) == 1 else f"{len(answers)} nodes have"
    return [Finding("ok", "on the nodes", f"{what} all that workers need{reach}.")] if answers else []


def _check_answer(config: Config, answer: NodeAnswer, gateway: str) -> Iterator[Finding]:
    name, found, python = answer.node.ip, answer.found, config.ray.python
    if not found:
        is_lack = answer.job is not None and answer.job.exit_code == _NOT_FOUND
        yield Finding("error" if is_lack else "warning", name, _why_no_answer(answer, python))
        return
    if found.get("python", [0, 0]) < [3, 10]:
        version = ".".join(map(str, found.get("python", [])))
        yield Finding("error", name, f"Its {python} is Python {version}: name Python 3.10 or newer in ray.python.")
    for engine, state in found.get("engines", {}).items():
        if state != "there":
            yield Finding("error" if state != "silent" else "warning", name, _of_engine(config, engine, state, answer))
    for path, is_there in found.get("models", {}).items():
        if not is_there:
            sentence = f"It has no directory {path}: choose nodes that have it by labels, or use a shared path."
            yield Finding("error", name, sentence)
    if why := found.get("gateway"):
        sentence = f"It cannot reach the gateway at {gateway} ({why}): open the way, or set ray.gateway_address."
        yield Finding("error", name, sentence)


def _why_no_answer(answer: NodeAnswer, python: str) -> str:
    job = answer.job
    if job is None:
        return f"Its job could not be run: {answer.why.rstrip('.')}."
    if job.exit_code == _NOT_FOUND:
        return f"It has no {python}: set ray.python, or choose nodes that have it by labels."
    if job.status == "PENDING":
        return f"It had no room for a job of {CPUS:g} CPU within {DEEP_S:g} s: {job.message.rstrip('.')}."
    if not job.is_over:
        return f"Its job did not end within {DEEP_S:g} s."
    return f"Its job failed: {job.message.rstrip('.') or job.status}."


def _of_engine(config: Config, engine: str, state: str, answer: NodeAnswer) -> str:
    python = question_for(config, answer.node, "").engines.get(engine, engine)
    remedy = f"set python in [ray.engines.{engine}], or choose nodes that have it by labels"
    if state == "missing":
        return f"It has no {python}: {remedy}."
    if state == "without":
        return f"Its {python} has no {engine}: install it there, or {remedy}."
    return f"Its {python} did not answer: see what holds it up."


async def find_from_within(config: Config, api: RayApi, nodes: Sequence[RayNode]) -> list[Finding]:
    """Return the findings of jobs on the nodes; nodes without GPUs count if no worker on Ray needs any."""
    needs_gpus = any(worker.on == "ray" and worker.gpus != 0 for worker in config.managed_workers)
    asked = [node for node in nodes if node.gpus] if needs_gpus else nodes
    gateway = await _gateway_url(config)
    return find_on_nodes(config, await ask_nodes(config, api, asked, gateway), gateway)


async def _gateway_url(config: Config) -> str:
    """Return the URL of a gateway that runs, for the nodes; "" if it is not known, or does not answer here either."""
    settings, url = config.server_settings, config.ray.gateway_address
    if url is None and settings.port and settings.host not in _ALL_ADDRESSES:
        url = f"http{'' if settings.tls_certificate is None else 's'}://{settings.host}:{settings.port}"
    if url is None:
        return ""
    parts = urllib.parse.urlsplit(url)
    try:
        tls = client_context(None) if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        way = await ask_way("gateway", Upstream("gateway", parts.hostname or "", port, tls), "/health", [])
    except (Exit, ValueError):
        return ""
    return url.rstrip("/") if way.way == "answered" else ""
