"""Obstacles that would keep a managed worker from starting: every problem at once, each with its remedy.

`obstacles_of` only decides; `facts.collect_facts` asks the system. Unknown facts are no problem: the worker
itself reports the rest.
"""

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from ichat import __version__
from ichat.config.engine_args import PIPELINE, SHARE, TENSOR, arguments_of, is_over_machines
from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.flag_check import refusals_of
from ichat.engines.flags import KEY_VARIABLE, engine_flags
from ichat.hardware.gpus import Gpu, GpuProcess
from ichat.placement.estimate import VLLM_SHARE
from ichat.preflight.claims import Claims, claims_of, have_one_port, memory_share, number_in_arguments, overfull_gpus
from ichat.preflight.facts import (
    ENGINES,
    PROBE_S,
    PYTHON_NEEDED,
    VISIBLE,
    Facts,
    Holder,
    PortState,
)
from ichat.preflight.hub import problems_of_hub
from ichat.preflight.learnt_file import need_on
from ichat.program import as_typed_here

HOLDERS_MAX = 3
BALANCE = 0.9
"""SGLang refuses GPUs if any of them has less free memory than this share of another's."""

OF_THE_WORKER = frozenset((
    "backend", "be", "gateway_address", "ga", "served_model_name", "model_name", "n", "heartbeat_interval", "hi",
    "worker_id", "host", "port", "ports", "advertise_host", "unix_socket", "max_in_flight", "gateway_ca",
    "orphan_after_s", "log_streaming", "no_log_streaming", "ls", "head_bytes_max", "body_bytes_max", "connections_max",
    "client_stall_s", "drain_s", "stop_s", "log_format", "responses_max", "responses_bytes_max", "reasoning_field",
    "prefix_reports", "media_domains", "explain_args", "list_flags", "help", "order",
))  # fmt: skip
"""The worker's own flags, which no engine gets, as they would be arguments of a managed worker."""

Subject = Literal["port", "python", "model", "hub", "flags", "sharing", "gpus", "memory"]


@attrs.frozen
class Obstacle:
    """An obstacle to a worker's start."""

    subject: Subject
    """The subject of the problem."""
    sentence: str = attrs.field(converter=as_typed_here)
    """The problem, and the remedy."""


def obstacles_of(
    worker: ManagedWorkerConfig,
    python: str,
    others: Mapping[str, ManagedWorkerConfig],
    facts: Facts,
    *,
    is_later: bool = False,
) -> list[Obstacle]:
    """Return everything that would keep this worker from starting.

    `others` are the managed workers that run or are about to, by their ids; `python` is this worker's interpreter.
    `is_later` leaves out resources that another worker may have now and will give back: the port, and GPU memory.
    """
    if is_later and facts.port == "taken":
        facts = attrs.evolve(facts, port="free", port_holders=())
    found: Sequence[tuple[Subject, Iterable[str]]] = (
        ("port", _problems_of_port(worker, others, facts)),
        ("python", _problems_of_python(worker, python, facts)),
        ("model", problems_of_model(worker.model_path, facts, "model_path")),
        ("hub", problems_of_hub(facts.hub) if facts.hub is not None else ()),
        ("flags", _problems_of_flags(worker, facts)),
        ("sharing", _problems_of_sharing(worker, others, facts)),
        ("gpus", _problems_of_gpus(worker, facts)),
        ("memory", _problems_of_need(worker, facts)),
        ("memory", () if is_later else _problems_of_memory(worker, facts)),
    )
    return [Obstacle(subject, sentence) for subject, sentences in found for sentence in sentences]


def _problems_of_flags(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    given = {name: value for name, value in arguments_of(worker).items() if name not in OF_THE_WORKER}
    if given and facts.flags is not None:
        for refusal in refusals_of(worker.backend, engine_flags(given), facts.flags):
            yield f"{refusal}."
    if facts.has_engine_key:
        yield (
            f"{KEY_VARIABLE} in the worker's environment has the engine ask for a key that no request has: take it"
            " out of the environment of the gateway, or of the worker's env."
        )


def _problems_of_port(
    worker: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig], facts: Facts
) -> list[str]:
    address = worker.tcp_address()
    if address is None:
        return []
    host, port = address
    if same := [name for name, other in others.items() if have_one_port(worker, other)]:
        return [f"Port {port} is worker {same[0]}'s as well: give each a port of its own, or 0 for any free port."]
    return problems_of_port(host, port, facts.port, facts.port_holders)


def problems_of_port(host: str, port: int, state: PortState, holders: Sequence[Holder]) -> list[str]:
    """Return why nothing can listen on this port of a host, in a sentence that says what to do."""
    if state == "taken" and (relay := next((one for one in holders if one.relay_of), None)) is not None:
        return [_held_by_relay(host, port, relay)]
    by = " and ".join(f"{one.program} (process {one.pid})" for one in holders[:HOLDERS_MAX])
    by = by or "a process that this user cannot see"
    sentences = {
        "taken": f"Port {port} of {host} is taken by {by}: end that, or choose another port (0: any free port).",
        "forbidden": f"Port {port} is not for this user to take: choose a port above 1023, or 0 for any free port.",
        "elsewhere": (
            f"The host {host} is no address of this machine: use 127.0.0.1, 0.0.0.0 or an address that it has."
        ),
        "unknown_host": f"The host {host!r} cannot be resolved: correct its name, or use an address.",
        "refused": f"{host}:{port} cannot be bound: choose another host or port.",
    }
    return _only(sentences, state)


def _held_by_relay(host: str, port: int, relay: Holder) -> str:
    directory = relay.relay_of
    if not relay.is_waiting:
        return f"Port {port} of {host} is used by the gateway in {directory}: end that, or choose another port."
    return (
        f"Port {port} of {host} is held by a relay (process {relay.pid}) of the gateway in {directory}, which waits for"
        f" its gateway: start that gateway, or run `./ichat.pyz sweep {shlex.quote(directory)}`."
    )


def _only(sentences: Mapping[str, str], state: str) -> list[str]:
    """Return the sentence about this state, if there is any."""
    return [sentences[state]] if state in sentences else []


def _problems_of_python(worker: ManagedWorkerConfig, python: str, facts: Facts) -> list[str]:
    engine, words = ENGINES.get(worker.backend, worker.backend), facts.python_words
    make = f"make one with `./build engine {worker.backend}`"
    if worker.backend not in ENGINES:
        make = "install the package that brings it there"
    says = f"set python of this worker, or of [engines.{worker.backend}]"
    meant = f" ({words} may be meant)" if words else ""
    inside = f"probably to {words}" if words else "to the interpreter in it"
    it, needed = f"The interpreter {python}", ".".join(map(str, PYTHON_NEEDED))
    sentences = {
        "missing": f"There is no interpreter {python}{meant}: {says}, or {make}.",
        "directory": f"{it} is a directory: {says}, {inside}.",
        "not_executable": f"{it} may not be executed by this user: correct its permissions, or {says}.",
        "old": f"{it} is older than Python {needed}, which iChat needs: {says}, to a newer Python.",
        "without_engine": f"{engine} is not installed for {python}: {says}, to an interpreter that has it, or {make}.",
        "without_ichat": (
            f"iChat {__version__} is not installed for {python}, where this gateway starts the worker: run"
            f" `uv pip install --python {shlex.quote(python)} ichat=={__version__}`."
        ),
        "broken": f"{it} does not run ({words or 'it writes nothing'}): repair it, or {says}.",
        "silent": f"{it} did not answer within {PROBE_S:g} s: see what holds it up, or {says}.",
    }
    return _only(sentences, facts.python)


def problems_of_model(path: str, facts: Facts, key: str) -> list[str]:
    """Return why a model here cannot be loaded, each in a sentence; `key` is where its path was given."""
    hint = f"; {facts.model_hint} may be meant" if facts.model_hint else ""
    here = "" if os.path.isabs(path) else f" (seen from {facts.directory})"
    lack = facts.model_hint
    sentences = {
        "missing": f"There is no model {path}{here}: correct {key}{hint}.",
        "unreadable": f"The model {path} may not be read by this user: correct the permissions of its files, or {key}.",
        "without_config": f"The directory {path} has no config.json: set {key} to a model's own directory{hint}.",
        "incomplete": f"The model {path} is not whole ({lack}): download what is missing, or correct {key}.",
        "not_a_model": (
            f"The file {path} is no GGUF model: set {key} to the model's directory, or to a GGUF file{hint}."
        ),
        "without_architecture": (
            f"The config.json of {path} names no architectures, so no engine knows what it is: download it again, or"
            f" correct {key}."
        ),
    }
    return _only(sentences, facts.model)


def _problems_of_sharing(
    worker: ManagedWorkerConfig, others: Mapping[str, ManagedWorkerConfig], facts: Facts
) -> Iterator[str]:
    """Apply the rule by which workers on demand are loaded at once, to the claims that are certain."""
    visible = _gateways_gpus(worker, facts)
    own = _certain_claims(worker, visible, facts.devices)
    held = {name: _certain_claims(other, visible, facts.devices) for name, other in others.items()}
    is_by_variable = facts.devices == VISIBLE and VISIBLE in worker.env
    choice = f"GPUs in {VISIBLE}" if is_by_variable else "gpu_ids"
    for number in sorted(overfull_gpus(own, list(held.values()))):
        share = own.gpus[number]
        shares = {name: claims.gpus[number] for name, claims in held.items() if number in claims.gpus}
        apart = [name for name, other in shares.items() if math.isinf(share + other)]
        if apart:
            yield (
                f"GPU {number} is worker {apart[0]}'s: choose other {choice}, or set share_gpus = true for both and"
                " see that their shares of its memory fit together."
            )
        elif worker.backend == "vllm":
            yield (
                f"The vLLM workers that share GPU {number} take {100 * (share + sum(shares.values())):.0f} % of its"
                f" memory together (this one and {', '.join(shares)}): lower their gpu_memory_utilization, to 100 % in"
                " all."
            )


def _gateways_gpus(worker: ManagedWorkerConfig, facts: Facts) -> Sequence[int]:
    """Return the GPUs that the gateway's own environment shows; empty unless the worker sees, and uses, the same."""
    return (_ids(worker, facts) or ()) if facts.gpus and _uses_first_gpus(worker) else ()


def _certain_claims(worker: ManagedWorkerConfig, visible: Sequence[int], devices: str) -> Claims:
    """Return the claims of a worker on GPUs by their numbers, as far as these are certain.

    `visible` are the GPUs that the gateway's own environment shows, empty if not known. `devices` is the variable
    that counts.
    """
    if visible and _uses_first_gpus(worker):
        worker = attrs.evolve(worker, gpu_ids=list(visible[: _ranks(worker)]))
    elif devices != VISIBLE:
        worker = attrs.evolve(worker, env={})
    return claims_of(worker, has_gpus=False)


def _uses_first_gpus(worker: ManagedWorkerConfig) -> bool:
    """Return whether a worker certainly uses the first of the GPUs that the gateway's own environment shows."""
    is_named = worker.gpu_ids is not None or VISIBLE in worker.env
    return worker.backend == "vllm" and worker.share_gpus and not is_named


def _problems_of_gpus(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    needed = _ranks(worker)
    ids = _ids(worker, facts)
    if ids is None:
        return
    key = "gpu_ids" if worker.gpu_ids is not None and facts.devices not in worker.env else facts.devices
    if len(set(ids)) < len(ids):
        yield f"{key} has a GPU twice ({', '.join(map(str, ids))}): name each GPU once."
    if ids and needed > len(set(ids)) and not is_over_machines(arguments_of(worker)):
        yield (
            f"The model is spread over {needed} GPUs, and the worker has {len(set(ids))} ({', '.join(map(str, ids))}):"
            " lower tensor_parallel_size or pipeline_parallel_size, or give it more gpu_ids."
        )
    if facts.gpus is None:
        return
    known = {gpu.index: gpu for gpu in facts.gpus}
    absent = [number for number in dict.fromkeys(ids) if number not in known]
    if absent and not known:
        yield (
            f"There is no GPU {' and no GPU '.join(map(str, absent))}: no NVIDIA GPU answers on this machine; set"
            f" {'gpu_ids = []' if key == 'gpu_ids' else f'{key} to nothing'} to use the processor, or name the variable"
            f" of another vendor's GPUs in [engines.{worker.backend}] devices."
        )
        return
    for number in absent:
        there = f"those here are {', '.join(map(str, sorted(known)))}"
        yield f"There is no GPU {number}: {there} (as nvidia-smi numbers them); correct {key}."
    for gpu in _used_gpus(worker, facts):
        if gpu.failure and gpu.memory_free_bytes is None:
            yield (
                f"GPU {gpu.index} does not answer ({gpu.failure}): choose other gpu_ids, or reset it"
                f" (nvidia-smi --gpu-reset -i {gpu.index})."
            )


def _used_gpus(worker: ManagedWorkerConfig, facts: Facts) -> list[Gpu]:
    """Return those of the GPUs here that the worker will use."""
    known = {gpu.index: gpu for gpu in facts.gpus or ()}
    return [known[number] for number in dict.fromkeys((_ids(worker, facts) or [])[: _ranks(worker)]) if number in known]


def _problems_of_memory(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    """Apply the engines' own rules: vLLM needs a share of all memory, SGLang GPUs with about equal free memory."""
    if {"base_gpu_id", "gpu_id_step"}.intersection(arguments_of(worker)):
        return
    gpus = _used_gpus(worker, facts)
    sizes = [(gpu, gpu.memory_total_bytes, gpu.memory_free_bytes) for gpu in gpus if not gpu.is_split]
    known = [(gpu, total, free) for gpu, total, free in sizes if total and free is not None]
    if worker.backend == "vllm":
        share = memory_share(worker)
        for gpu, total, free in known:
            if share * total > free:
                fitting = math.floor(100 * free / total) / 100
                lower = f"lower gpu_memory_utilization to {fitting:g}, " if fitting >= 0.05 else ""
                yield (
                    f"GPU {gpu.index} has {gib(free)} of {gib(total)} GiB free, and vLLM needs {gib(share * total)}"
                    f" (gpu_memory_utilization {share:g}): {_held(gpu)}; end what holds it, {lower}or choose another"
                    " GPU."
                )
    elif worker.backend == "sglang" and len(known) > 1:
        most = max(free for _, _, free in known)
        for gpu, _, free in known:
            if free < BALANCE * most:
                yield (
                    f"GPU {gpu.index} has {gib(free)} GiB free and another of this worker's {gib(most)}, and SGLang"
                    f" refuses GPUs that differ so much: {_held(gpu)}; end what holds it, or choose another GPU."
                )


def _problems_of_need(worker: ManagedWorkerConfig, facts: Facts) -> Iterator[str]:
    """Compare a model with the whole memory of its smallest GPU, by computed and learnt figures only."""
    gpus = [gpu for gpu in _used_gpus(worker, facts) if gpu.memory_total_bytes and not gpu.is_split]
    if not gpus:
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_total_bytes or 0)
    need, total = need_on(smallest, facts.need, facts.learnt), smallest.memory_total_bytes or 0
    has_share = worker.backend == "vllm" and "kv_cache_memory_bytes" not in arguments_of(worker)
    share = number_in_arguments(worker, *SHARE, default=VLLM_SHARE) if has_share else 1.0
    if need is None or need.certain_bytes <= share * total:
        return
    learnt = need.learnt_bytes
    parts = f"weights {gib(need.weights_bytes)}" if learnt is None else f"learnt: {gib(learnt)} beside its KV cache"
    remedy = "raise tensor_parallel_size"
    if need.sequence_bytes:
        parts += f", KV cache of {need.context} tokens {gib(need.sequence_bytes)}"
        remedy += ", lower max_model_len"
    used = f", of which vLLM uses {gib(share * total)}" if share < 1 else ""
    each = " on each GPU" if _ranks(worker) > 1 else ""
    yield (
        f"The model needs {gib(need.bytes)} GiB{each} ({parts}), and GPU {smallest.index} has {gib(total)}{used}:"
        f" {remedy}, or choose a larger GPU."
    )


def _held(gpu: Gpu) -> str:
    if not gpu.processes:
        return "what holds the rest cannot be seen from here"
    more = len(gpu.processes) - HOLDERS_MAX
    words = [_process(process) for process in gpu.processes[:HOLDERS_MAX]]
    return ", ".join([*words, f"{more} more"] if more > 0 else words)


def _process(process: GpuProcess) -> str:
    program = f" ({process.program})" if process.program else ""
    size = "some" if process.memory_bytes is None else f"{gib(process.memory_bytes)} GiB"
    return f"process {process.pid}{program} holds {size}"


def gib(size: float) -> str:
    """Write a number of bytes in GiB."""
    return f"{size / 1024**3:.1f}"


def _ids(worker: ManagedWorkerConfig, facts: Facts) -> list[int] | None:
    """Return the numbers of the GPUs that the worker sees, all by default; None where they are not known."""
    if facts.visible is None:
        if worker.gpu_ids is not None:
            return worker.gpu_ids
        return None if not facts.gpus else [gpu.index for gpu in facts.gpus]
    ids: list[int] = []
    for word in filter(None, map(str.strip, facts.visible.split(","))):
        named = [gpu.index for gpu in facts.gpus or () if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if word.isdecimal():
            ids.append(int(word))
        elif len(named) == 1:
            ids += named
        else:
            return None
    return ids


def _ranks(worker: ManagedWorkerConfig) -> int:
    if worker.backend not in ENGINES:
        return 1
    tensor = number_in_arguments(worker, *TENSOR, default=1)
    pipeline = number_in_arguments(worker, *PIPELINE, default=1)
    return max(int(tensor), 1) * max(int(pipeline), 1)
