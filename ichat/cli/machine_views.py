"""How machines and their GPUs look in `status`.

A machine reports itself by the gateway or a worker on it, or Ray reports it as a node of its cluster.
"""

import time
from collections.abc import Sequence

from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.screen import NONE, Screen, duration, percent, size

_OF_GPU = ("gpu", "name", "use", "memory used", "memory total", "held by")


def show_machines(screen: Screen, machines: Sequence[Json], own_gpus: Sequence[Json]) -> None:
    """Show the machines, if there are several or Ray has a part of any, and their GPUs.

    `own_gpus` are those of the gateway's machine.
    """
    gpus = [[machine.get("name"), *_gpu(gpu)] for machine in machines for gpu in objects_of(machine.get("gpus"))]
    has_ray = any(machine.get("ray") for machine in machines)
    are_shown = len(machines) > 1 or has_ray
    if are_shown:
        screen.line("")
        columns = ("machine", "cpu", "memory", *(["ray"] if has_ray else []), "workers")
        screen.table(columns, (_machine(machine, has_ray=has_ray) for machine in machines))
    if are_shown and gpus:
        screen.line("")
        screen.table(("machine", *_OF_GPU), gpus)
    elif own_gpus or gpus:
        screen.line("")
        screen.table(_OF_GPU, [*map(_gpu, own_gpus)] or [gpu[1:] for gpu in gpus])


def free_of(memory: Json, prefix: str = "") -> str:
    """Return how much memory is free, by two numbers with this prefix."""
    return f"{size(_bytes(memory, f'{prefix}available'))} free of {size(_bytes(memory, f'{prefix}total'))}"


def share_of_ray(machine: Json) -> str:
    """Return the GPUs that Ray gives to jobs on a machine, in words; "" if it is no node of Ray."""
    share = object_of(machine.get("ray"))
    if not share:
        return ""
    total, free = share.get("gpus"), share.get("gpus_free")
    kinds = " ".join(map(str, list_of(share.get("kinds"))))
    which = f"{kinds} GPUs" if kinds else "GPUs"
    words = f"{_number(free)} of {_number(total)} {which} free" if total else "no GPUs"
    since = share.get("unanswered_since")
    if not isinstance(since, int | float):
        return words
    return f"{words}, no answer for {duration(max(0.0, time.time() - since))}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else NONE


def _machine(machine: Json, *, has_ray: bool) -> list[object]:
    """Return the row of a machine."""
    name = f"{machine.get('name')} (gateway)" if machine.get("has_gateway") else machine.get("name")
    workers = ", ".join(map(str, list_of(machine.get("workers"))))
    use = f"{percent(machine.get('cpu_use'))} of {machine.get('cpus') or NONE}"
    return [name, use, free_of(machine, "memory_"), *([share_of_ray(machine)] if has_ray else []), workers]


def _gpu(gpu: Json) -> list[object]:
    """Return the row of a GPU, of the gateway's own machine or of a report."""
    holders = objects_of(gpu.get("held_by"))
    held = (str(holder.get("worker_id") or f"process {holder.get('pid')}") for holder in holders)
    numbers = [percent(gpu.get("use")), size(_bytes(gpu, "memory_used")), size(_bytes(gpu, "memory_total"))]
    return [gpu.get("index"), gpu.get("name"), *numbers, gpu.get("failure") or ", ".join(dict.fromkeys(held))]


def _bytes(table: Json, name: str) -> object:
    """Return a number of bytes; an older gateway leaves out the unit in its name."""
    return table.get(f"{name}_bytes", table.get(name))
