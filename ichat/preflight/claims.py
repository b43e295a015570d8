"""The GPUs and the port that managed workers claim, by their tables alone, and whether the claims fit together."""

import math
from collections.abc import Mapping, Sequence

from attrs import Factory, evolve, frozen

from ichat.config.engine_args import SHARE, arguments_of, has_share, number_of
from ichat.config.schema import ManagedWorkerConfig
from ichat.placement.place import EVERY_GPU
from ichat.preflight.facts import VISIBLE

MEMORY_SHARE = 0.9
"""vLLM's default share of a GPU's memory: 0.9, in newer releases 0.92. The smaller share refuses nothing wrongly."""
_ALL_ADDRESSES = frozenset(("", "0.0.0.0", "::"))
_SHARES_MAX = 1 + 1e-9


@frozen
class Claims:
    """The GPUs and the port that a worker needs while it runs."""

    gpus: Mapping[int, float] = Factory(dict[int, float])
    """The share of the memory of each GPU; `inf` for a GPU that it shares with no other worker."""
    address: tuple[str, int] | None = None
    """Its host and port; None without a port of its own."""

    def without_gpus(self) -> "Claims":
        """Return the claims of a worker with a sleeping engine."""
        return Claims({}, self.address)


def claims_of(worker: ManagedWorkerConfig, *, has_gpus: bool) -> Claims:
    """Return the claims of a worker.

    `has_gpus` says whether the machine has any: a worker without named GPUs uses all of them. For engines other
    than vLLM the amount is not known, so workers that share a GPU claim none of its memory. A worker with `gpus` has
    no GPUs before it has a place. A worker on another machine claims nothing here.
    """
    if worker.on != "here":
        return Claims()
    share = math.inf
    if has_share(worker):
        share = float(worker.gpus or 0)
    elif worker.share_gpus:
        share = memory_share(worker) if worker.backend == "vllm" else 0.0
    numbers = _gpus_of(worker, has_gpus=has_gpus)
    gpus = {EVERY_GPU} if numbers is None else numbers
    address = worker.tcp_address()
    return Claims(dict.fromkeys(gpus, share), address if address is not None and address[1] else None)


def without_gpus(worker: ManagedWorkerConfig) -> ManagedWorkerConfig:
    """Return the table of a worker that uses no GPU now."""
    return evolve(worker, gpu_ids=[], env={name: value for name, value in worker.env.items() if name != VISIBLE})


def fit(one: Claims, other: Claims) -> bool:
    """Return whether two workers can run at once."""
    return not do_share_port(one, other) and not (one.gpus and other.gpus and overfull_gpus(one, [other]))


def overfull_gpus(one: Claims, others: Sequence[Claims]) -> set[int]:
    """Return the GPUs of a worker on which its claim and those of the others do not fit together."""
    numbers = set(one.gpus)
    if EVERY_GPU in numbers:
        numbers |= {number for other in others for number in other.gpus}
    found = set[int]()
    for number in numbers:
        shares = [share for other in others if (share := _share_of(other, number)) is not None]
        if shares and (_share_of(one, number) or 0.0) + sum(shares) > _SHARES_MAX:
            found.add(number)
    return found


def do_share_gpu(one: Claims, other: Claims) -> bool:
    """Return whether two workers use the same GPU."""
    is_every = EVERY_GPU in one.gpus or EVERY_GPU in other.gpus
    return bool(one.gpus and other.gpus) and (is_every or not one.gpus.keys().isdisjoint(other.gpus))


def do_share_port(one: Claims, other: Claims) -> bool:
    """Return whether both claim the same port of the same address."""
    first, second = one.address, other.address
    if first is None or second is None or first[1] != second[1]:
        return False
    return first[0] == second[0] or not _ALL_ADDRESSES.isdisjoint((first[0], second[0]))


def have_one_port(one: ManagedWorkerConfig, other: ManagedWorkerConfig) -> bool:
    """Return whether both listen on the same port of the same address."""
    return do_share_port(claims_of(one, has_gpus=False), claims_of(other, has_gpus=False))


def _share_of(claims: Claims, number: int) -> float | None:
    return claims.gpus.get(number, claims.gpus.get(EVERY_GPU))


def _gpus_of(worker: ManagedWorkerConfig, *, has_gpus: bool) -> set[int] | None:
    """Return the numbers of the GPUs that a worker uses; None: all of them, or it is not known which."""
    if worker.gpus is not None:
        return set(worker.gpu_ids or ())
    words = worker.env[VISIBLE].split(",") if VISIBLE in worker.env else None
    if words is None and worker.gpu_ids is not None:
        return set(worker.gpu_ids)
    named = [word.strip() for word in words or () if word.strip()]
    if words is not None and all(word.isdecimal() for word in named):
        return {int(word) for word in named}
    return None if has_gpus else set()


def memory_share(worker: ManagedWorkerConfig) -> float:
    """Return the configured share of its GPUs' memory for a worker."""
    return number_in_arguments(worker, *SHARE, default=MEMORY_SHARE)


def number_in_arguments(worker: ManagedWorkerConfig, *names: str, default: float) -> float:
    """Return an engine argument by any of its names. The engine itself refuses a value that is no number."""
    return number_of(arguments_of(worker), *names, default=default)
