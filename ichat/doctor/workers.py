"""The managed workers: preflight for all of them at once, and models that are still to be fetched from the hub."""

import os
import pathlib
import re
import shlex
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import trio

from ichat.config.schema import Config, ManagedWorkerConfig
from ichat.doctor.engines import UNCHANGED
from ichat.doctor.findings import Finding
from ichat.doctor.machine import GIB, hub_cache
from ichat.hardware.gpus import Gpu
from ichat.supervisor.launch import environment_of, id_for, python_of
from ichat.supervisor.model_files import lack_of, weight_bytes
from ichat.supervisor.preflight import problems_of
from ichat.supervisor.preflight_facts import ENGINES, Facts, is_path, read_facts

PROBE_S = 5.0
"""How long an interpreter may take to say whether it has the engine, before the doctor says nothing about it."""
HUB_S = 4.0
CHECKED_AT_ONCE_MAX = 8

_HUB = "https://huggingface.co"
_USER = re.compile(r"//[^/@]*@")
"""A name and a password in an address."""
_TRUE = ("1", "on", "true", "yes")

HubAnswer = Literal["there", "gated", "absent", "unreachable"]


@attrs.frozen
class HubFacts:
    """What is known of a model that is named as on the Hugging Face hub."""

    cache: str
    is_cached: bool
    is_offline: bool
    has_token: bool = False
    answer: HubAnswer | None = None
    """What the hub says; None: it was not asked."""
    hub: str = _HUB
    lack: str = ""
    """What the cache lacks of the model, in a few words; empty if nothing is known to be missing."""


@attrs.frozen
class WorkerCheckFacts:
    """What is known of a managed worker before it is started."""

    worker: ManagedWorkerConfig
    worker_id: str
    python: str
    facts: Facts | None
    """None: the system did not answer in time."""
    hub: HubFacts | None = None
    """None: its model is a path."""
    model_bytes: int | None = None

    def beside(self, gpus: Sequence[Gpu] | None, running: Collection[str]) -> "WorkerCheckFacts":
        """Return the same with these GPUs; what a worker that runs itself holds is not in its way."""
        if self.facts is None:
            return self
        if self.worker_id in running:
            return attrs.evolve(self, facts=attrs.evolve(self.facts, port="free", port_holders=(), gpus=None))
        return attrs.evolve(self, facts=attrs.evolve(self.facts, gpus=gpus))


def ids_of(config: Config) -> list[str]:
    """Return the ids that the gateway gives to the managed workers."""
    ids: list[str] = []
    for worker in config.managed_workers:
        ids.append(id_for(worker.model_name, ids))
    return ids


async def read_worker_facts(config: Config, ends_at: float) -> list[WorkerCheckFacts]:
    """Ask the system about all managed workers, several at the same time."""
    found: dict[str, WorkerCheckFacts] = {}
    turn = trio.CapacityLimiter(CHECKED_AT_ONCE_MAX)

    async def read(worker: ManagedWorkerConfig, worker_id: str) -> None:
        python, environment = python_of(config, worker), {**environment_of(config, worker, ""), **UNCHANGED}
        ask = partial(read_facts, worker, python, environment, probe_s=PROBE_S)
        hub: HubFacts | None = None
        found[worker_id] = WorkerCheckFacts(worker, worker_id, python, None)
        with trio.move_on_at(ends_at):
            async with turn:
                facts = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
                size, hub = await trio.to_thread.run_sync(_read_model, worker, environment, abandon_on_cancel=True)
            found[worker_id] = WorkerCheckFacts(worker, worker_id, python, facts, hub, size)
        if hub is not None and hub.answer == "unreachable":
            await ask_hub(worker_id, hub, environment)

    async def ask_hub(worker_id: str, hub: HubFacts, environment: Mapping[str, str]) -> None:
        with trio.move_on_at(ends_at), trio.move_on_after(HUB_S):
            ask = partial(_ask_hub, hub.hub, found[worker_id].worker.model_path, _token_of(environment))
            answer = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
            found[worker_id] = attrs.evolve(found[worker_id], hub=attrs.evolve(hub, answer=answer))

    ids = ids_of(config)
    async with trio.open_nursery() as nursery:
        for worker, worker_id in zip(config.managed_workers, ids, strict=True):
            nursery.start_soon(read, worker, worker_id)
    return [found[worker_id] for worker_id in ids]


def _read_model(worker: ManagedWorkerConfig, environment: Mapping[str, str]) -> tuple[int | None, HubFacts | None]:
    """Return the size of a model's weights here, or what is known of it on the hub."""
    if os.path.isdir(worker.model_path):
        try:
            return weight_bytes(worker.model_path), None
        except OSError:
            return None, None
    is_name = worker.backend in ENGINES and not os.path.exists(worker.model_path) and not is_path(worker.model_path)
    return None, read_hub(worker, environment) if is_name else None


def read_hub(worker: ManagedWorkerConfig, environment: Mapping[str, str]) -> HubFacts | None:
    """Look for a model in the hub's cache; None: it is no name on the hub.

    Where the hub is to be asked, the answer is `unreachable` until it comes.
    """
    name = worker.model_path
    if "://" in name or name.count("/") > 1 or environment.get("VLLM_USE_MODELSCOPE", "").lower() in _TRUE:
        return None
    given = worker.backend_args.get("download_dir") or worker.backend_args.get("download-dir")
    cache = str(given) if given else hub_cache(environment)
    snapshots = os.path.join(cache, f"models--{name.replace('/', '--')}", "snapshots")
    is_cached = os.path.isdir(snapshots) and bool(os.listdir(snapshots))
    is_offline = any(environment.get(one, "").lower() in _TRUE for one in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    hub = (environment.get("HF_ENDPOINT") or _HUB).rstrip("/")
    token = _token_of(environment)
    lack = _lack_in_cache(os.path.dirname(snapshots)) if is_cached and "revision" not in worker.backend_args else ""
    facts = HubFacts(cache, is_cached, is_offline, bool(token), hub=hub, lack=lack)
    return facts if is_cached or is_offline else attrs.evolve(facts, answer="unreachable")


def _lack_in_cache(directory: str) -> str:
    """Return what the newest version of a model lacks in the hub's cache."""
    try:
        commit = pathlib.Path(directory, "refs", "main").read_text(encoding="ascii").strip()
        return lack_of(os.path.join(directory, "snapshots", commit))
    except (OSError, ValueError):
        return ""


def find_in_workers(workers: Sequence[WorkerCheckFacts], memory_bytes: int) -> list[Finding]:
    """Return what would keep each managed worker from starting."""
    if not workers:
        return [Finding("ok", "workers", "The configuration has no managed workers.")]
    findings: list[Finding] = []
    others: dict[str, ManagedWorkerConfig] = {}
    for one in workers:
        stay = others if one.worker.load == "start" else {}
        problems = list(_check_worker(one, stay, memory_bytes))
        findings += problems or [Finding("ok", one.worker_id, f"{one.worker.model_path} can be loaded as it stands.")]
        if one.worker.load == "start":
            others[one.worker_id] = one.worker
    return findings


def _check_worker(
    one: WorkerCheckFacts, others: Mapping[str, ManagedWorkerConfig], memory_bytes: int
) -> Iterator[Finding]:
    facts = one.facts
    if facts is None:
        sentence = f"What it needs was not known in time: see what holds up {one.python}, or the disk of its model."
        yield Finding("warning", one.worker_id, sentence)
        return
    if facts.python == "silent":
        sentence = f"The interpreter {one.python} did not answer within {PROBE_S:g} s: see what holds it up."
        yield Finding("warning", one.worker_id, sentence, f"time {shlex.quote(one.python)} --version")
        facts = attrs.evolve(facts, python="right")
    for sentence in problems_of(one.worker, one.python, others, facts):
        yield Finding("error", one.worker_id, sentence, _command_for(one, facts))
    if one.hub is not None:
        yield from _check_hub(one.worker_id, one.worker.model_path, one.hub)
    size = one.model_bytes or 0
    if size > memory_bytes and (one.worker.gpu_ids == [] or not facts.gpus):
        sentence = f"The model's files have {size / GIB:.1f} GiB, and this machine gives {memory_bytes / GIB:.1f} GiB."
        yield Finding("error", one.worker_id, f"{sentence[:-1]}: choose a smaller or quantized one.", "free -h")


def _command_for(one: WorkerCheckFacts, facts: Facts) -> str:
    if facts.python in ("missing", "without_engine") and one.worker.backend in ENGINES:
        return f"./build engine {one.worker.backend}"
    if facts.model == "unreadable":
        return f"sudo chmod -R a+rX {shlex.quote(one.worker.model_path)}"
    if facts.port == "taken" and facts.port_holders:
        return f"ps -fp {facts.port_holders[0].pid}"
    return ""


def _check_hub(worker_id: str, name: str, hub: HubFacts) -> Iterator[Finding]:
    fetch, place = f"hf download {shlex.quote(name)}", _USER.sub("//", hub.hub)
    if hub.is_cached and hub.lack and hub.is_offline:
        sentence = f"{name} in {hub.cache} is not whole ({hub.lack}), and HF_HUB_OFFLINE keeps the rest away."
        yield Finding("error", worker_id, sentence, f"HF_HUB_OFFLINE=0 {fetch}")
    elif hub.is_cached and hub.lack:
        sentence = f"{name} in {hub.cache} is not whole ({hub.lack}): the first start fetches the rest."
        yield Finding("warning", worker_id, sentence, fetch)
    elif hub.is_cached:
        return
    elif hub.is_offline:
        sentence = f"{name} is not in {hub.cache}, and HF_HUB_OFFLINE keeps the engine from fetching it."
        yield Finding("error", worker_id, sentence, f"HF_HUB_OFFLINE=0 {fetch}")
    elif hub.answer == "absent":
        private = "" if hub.has_token else ", or log in if it is private"
        sentence = f"There is no model {name} on {place} and no such directory here: correct model_path{private}."
        yield Finding("error", worker_id, sentence, "" if hub.has_token else "hf auth login")
    elif hub.answer == "gated":
        why = "refuses this token" if hub.has_token else "asks for a token (HF_TOKEN)"
        sentence = f"{place} {why} for {name}: accept the model's terms there, and log in."
        yield Finding("error", worker_id, sentence, "hf auth login")
    elif hub.answer == "unreachable":
        sentence = f"{name} is not in {hub.cache}, and {place} cannot be reached: fetch it where it can."
        yield Finding("error", worker_id, sentence, fetch)
    else:
        sentence = f"{name} is not in {hub.cache} yet: the first start fetches it, which takes its time."
        yield Finding("warning", worker_id, sentence, fetch)


def _token_of(environment: Mapping[str, str]) -> str:
    if token := environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    home = os.path.dirname(hub_cache({name: environment[name] for name in ("HF_HOME",) if name in environment}))
    try:
        with open(environment.get("HF_TOKEN_PATH") or os.path.join(home, "token"), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect as the answer: the token is for the hub alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return no other request."""


def _ask_hub(hub: str, name: str, token: str) -> HubAnswer:
    """Ask for the model's config.json, without reading it."""
    url = f"{hub}/{urllib.parse.quote(name)}/resolve/main/config.json"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers, method="HEAD")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=HUB_S):
            return "there"
    except urllib.error.HTTPError as error:
        with error:
            answers: dict[int, HubAnswer] = {401: "gated", 403: "gated"}
            if error.code == 404 and error.headers.get("x-error-code") == "EntryNotFound":
                return "there"
            is_no_model = error.headers.get("x-error-code") == "RepoNotFound" or error.code == 404
            return "absent" if is_no_model else answers.get(error.code, "there")
    except (OSError, ValueError):
        return "unreachable"
