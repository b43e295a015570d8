"""How answers of the admin API look. Keys that an older or newer gateway leaves out show as `-`, or not at all."""

import json
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from ichat.cli.copies import copies_of, copy_of
from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.machine_views import free_of, show_machines
from ichat.cli.relay_views import facts_of, show_relays, time_of
from ichat.cli.screen import NONE, Screen, clean, duration, log_line, one_line, percent

REMARK_CHARS_MAX = 100
"""The most characters of a remark in a table on a terminal; `worker-show` has all of it."""
_ORIGINS = {"configuration": "the gateway, by its configuration", "api": "the gateway, by its API"}


def show_workers(screen: Screen, answer: Json) -> None:
    """Show every worker in a line: its identity, its load, and a remark."""
    workers = objects_of(answer.get("data"))
    copy = ["copy"] if any(map(copy_of, workers)) else []
    where = ["where"] if any(map(_is_elsewhere, workers)) else []
    rows: list[list[object]] = []
    for worker in workers:
        progress = object_of(worker.get("progress"))
        rows.append([
            worker.get("worker_id"),
            worker.get("state"),
            ",".join(names_of(worker)),
            *([copy_of(worker)] if copy else []),
            worker.get("backend"),
            *([worker.get("where")] if where else []),
            _address(worker),
            worker.get("in_flight"),
            _count(progress.get("running")),
            _count(progress.get("waiting")),
            percent(progress.get("kv_use")),
            percent(_hits(progress)),
            duration(worker.get("heartbeat_age_s")),
            worker.get("restarts"),
            _remark(worker, chars_max=REMARK_CHARS_MAX if screen.is_terminal else None),
        ])  # fmt: skip
    if not rows and screen.is_terminal:
        screen.line("There are no workers.")
        return
    can_go = ("last heartbeat", "kv use", "waiting", "running", "restarts", "backend", "address", "hits")
    load = ("in flight", "running", "waiting", "kv use", "hits", "last heartbeat", "restarts")
    screen.table(("worker", "state", "model", *copy, "backend", *where, "address", *load, "remark"), rows, can_go)


def _is_elsewhere(worker: Json) -> bool:
    """Return whether the gateway starts a worker on another machine, or chooses its GPUs."""
    return bool(worker.get("managed")) and ":" in str(worker.get("where"))


def show_worker(screen: Screen, worker: Json, *, all_args: bool = False) -> None:
    """Show all facts about a worker; its arguments as far as they differ from the defaults, or all of them."""
    group, progress = object_of(worker.get("group")), object_of(worker.get("progress"))
    steps, tokens = _count(progress.get("steps")), _count(progress.get("tokens_out"))
    screen.facts([
        ("worker", worker.get("worker_id")),
        ("state", worker.get("state")),
        ("phase", worker.get("phase")),
        ("failure", worker.get("failure")),
        ("cause", worker.get("cause") if has_ended(worker) else None),
        ("starts in", duration(worker["retry_in_s"]) if worker.get("retry_in_s") is not None else None),
        ("ready in", duration(worker["ready_in_s"]) if worker.get("ready_in_s") is not None else None),
        ("loading", load_in_words(worker) or None),
        ("last load", _last_load(worker)),
        ("load", "on demand" if worker.get("on_demand") else None),
        ("ended last", _last_end(worker)),
        ("lost", _lost(worker)),
        ("models", ", ".join(names_of(worker))),
        ("copy", copy_of(worker)),
        ("where", worker.get("where")),
        ("model path", worker.get("model_path")),
        ("backend", " ".join([str(worker.get("backend") or ""), *_versions(worker)])),
        ("address", _address(worker)),
        ("process", worker.get("pid")),
        ("started by", _ORIGINS.get(str(worker.get("origin")), "the gateway" if worker.get("managed") else "hand")),
        ("gpus", _gpus(worker)),
        ("log file", worker.get("log_file")),
        ("group", f"rank {group.get('rank')} of {group.get('size')} in {group.get('id')}" if group else None),
        ("load time", duration(worker["load_s"]) if worker.get("load_s") is not None else None),
        ("restarts", worker.get("restarts")),
        ("last heartbeat", f"{duration(age_s)} ago" if (age_s := worker.get("heartbeat_age_s")) is not None else None),
        ("in flight", worker.get("in_flight")),
        ("requests", _running(progress)),
        ("kv use", percent(progress["kv_use"]) if progress.get("kv_use") is not None else None),
        ("prefix cache", _hits_in_words(progress)),
        ("engine", f"{steps or NONE} steps, {tokens or NONE} tokens" if steps or tokens else None),
    ])  # fmt: skip
    _show_args(screen, worker, show_all=all_args)
    show_last_lines(screen, worker)


def _show_args(screen: Screen, worker: Json, *, show_all: bool) -> None:
    """Show the engine's arguments that differ from its defaults, if the worker reports the defaults."""
    args = object_of(worker.get("args"))
    if not args:
        return
    title, shown = "arguments", args
    if not show_all:
        shown = {name: value for name, value in args.items() if value is not None}
        if worker.get("changed_args") is not None:
            names = frozenset(map(str, list_of(worker["changed_args"])))
            shown = {name: value for name, value in args.items() if name in names}
            title += f" other than the engine's defaults ({len(shown)} of {len(args)}; --all shows all)"
    screen.line(f"\n{title}", "bold")
    screen.facts((f"  {name}", _value(value)) for name, value in sorted(shown.items()))


def show_last_lines(screen: Screen, worker: Json) -> None:
    """Show the last lines that a worker wrote, if they are known."""
    lines = list_of(worker.get("last_lines"))
    if lines:
        screen.line("\nlast lines" + (" before it ended" if worker.get("ended_at") else ""), "bold")
        for line in lines:
            screen.line("  " + log_line(str(line), colours=screen.has_colours))


def show_models(screen: Screen, answer: Json) -> None:
    """Show the models that clients can use now."""
    models = objects_of(answer.get("data"))
    if not models and screen.is_terminal:
        screen.line("No model can be asked for yet.")
        return
    keys = ("id", "owned_by", "max_model_len", "parent", "root")
    rows = [[*(model.get(key) for key in keys), _yes_or_no(model.get("loaded"))] for model in models]
    screen.table(("model", "served by", "length", "adapter of", "root", "loaded"), rows)


def show_troubles(screen: Screen, troubles: Sequence[str]) -> None:
    """Show each problem on a line; nothing if there are none."""
    for trouble in troubles:
        screen.line(f"! {trouble}", "red")
    if troubles:
        screen.line("")


def show_status(screen: Screen, status: Json) -> None:
    """Show the gateway, the free resources of its machine, its workers by state, and the load of its models."""
    gateway, resources = object_of(status.get("gateway")), object_of(status.get("resources"))
    cpu, memory = object_of(resources.get("cpu")), object_of(resources.get("memory"))
    workers = object_of(status.get("workers"))
    screen.facts([
        ("gateway", gateway.get("id")),
        ("version", gateway.get("version")),
        ("process", gateway.get("pid")),
        ("up", duration(gateway.get("uptime_s"))),
        *facts_of(gateway),
        ("cpu", f"{percent(cpu.get('use'))} of {cpu.get('count', NONE)}" if cpu else None),
        ("memory", free_of(memory) if memory else None),
        ("workers", ", ".join(f"{count} {state}" for state, count in sorted(workers.items())) or "none"),
    ])  # fmt: skip
    show_relays(screen, gateway)
    show_machines(screen, objects_of(status.get("machines")), objects_of(resources.get("gpus")))
    if models := objects_of(status.get("models")):
        screen.line("")
        keys = ("id", "workers", "in_flight", "queued")
        copies = ["copies"] if any(map(copies_of, models)) else []
        rows = (
            [
                *map(model.get, keys),
                _yes_or_no(model.get("loaded")),
                _waited(model),
                *([copies_of(model)] if copies else []),
            ]
            for model in models
        )
        screen.table(("model", "workers", "in flight", "queued", "loaded", "waiting for", *copies), rows)


def show_plan(screen: Screen, answer: Json) -> None:
    """Show the steps of a reload of the configuration, and the gateway's summary."""
    steps = objects_of(answer.get("plan"))
    columns = ("action", "what", "why")
    if steps:
        screen.table(columns, ([step.get(column) for column in columns] for step in steps))
    if answer.get("summary"):
        screen.line(one_line(answer["summary"]))
    elif not steps and screen.is_terminal:
        screen.line("Nothing has changed.")


def has_ended(worker: Json) -> bool:
    """Return whether a worker is down since its process ended; otherwise its cause is of an earlier end."""
    return worker.get("state") in ("failed", "restarting")


def reasons_of(worker: Json) -> list[str]:
    """Return why a worker is down, as far as it is known: the event, and its cause."""
    keys = ("failure", "cause") if has_ended(worker) else ("failure",)
    return [one_line(worker[key]).rstrip(".") for key in keys if worker.get(key)]


def failure_of(worker: Json) -> str:
    """Return in a single line why a worker has failed."""
    reasons, lost = reasons_of(worker), _lost(worker)
    return ": ".join(reasons or [f"has lost {lost}" if lost else f"is {one_line(worker.get('state'))}"])


def phase_of(worker: Json) -> str:
    """Return the phase that a worker reports, if it adds to its state; a drained worker reports `ready`."""
    phase = worker.get("phase")
    return "" if phase in (None, "ready", worker.get("state")) else one_line(phase)


def progress_of(worker: Json) -> str:
    """Return a worker's progress in a single line, with the reason if it is about to restart."""
    state, phase, restarts = worker.get("state"), phase_of(worker), worker.get("restarts")
    words = [f"{worker.get('worker_id')}: {state}"]
    if state in ("restarting", "pending"):
        words.append(f"since it {failure_of(worker)}" if worker.get("failure") else "")
    elif phase:
        words.append(f"({phase})")
    if restarts:
        words.append(f"after {restarts} restart{'' if restarts == 1 else 's'}")
    return one_line(" ".join(words))


def rest_of(worker: Json) -> str:
    """Return how far a load is and how long it will go on: `3 of 8 shards, 12 s (last time 14 s), about 40 s left`."""
    load = object_of(worker.get("load"))
    words: list[str] = []
    for phase in objects_of(load.get("phases"))[-1:]:
        seconds, expected = phase.get("seconds"), phase.get("expected_s")
        words.append(str(phase.get("detail") or ""))
        if isinstance(seconds, int | float):
            last = f" (last time {duration(expected)})" if isinstance(expected, int | float) else ""
            words.append(f"{math.floor(seconds)} s{last}")
    elapsed, expected = load.get("elapsed_s"), load.get("expected_s")
    rest = worker.get("ready_in_s")
    if isinstance(elapsed, int | float) and isinstance(expected, int | float):
        rest = expected - elapsed
    if isinstance(rest, int | float):
        words.append(f"about {duration(rest)} left" if rest > 0 else "it is slower than usual")
    return ", ".join(filter(None, words))


def _remark(worker: Json, *, chars_max: int | None) -> str:
    if worker.get("failure") or worker.get("lost"):
        why = failure_of(worker)
        why = why if chars_max is None else textwrap.shorten(why, chars_max, placeholder=" …")
        return f"{why}; starts in {duration(worker['retry_in_s'])}" if worker.get("retry_in_s") is not None else why
    if load := load_in_words(worker):
        return load
    words = [phase] if (phase := phase_of(worker)) else []
    if worker.get("ready_in_s") is not None:
        words.append(f"ready in about {duration(worker['ready_in_s'])}")
    return ", ".join(words)


def load_in_words(worker: Json) -> str:
    """Return the present progress of a worker's load; "" if none is under way."""
    if not worker.get("load"):
        return ""
    from ichat.protocol.load_story import read_story, story_of

    load = read_story(worker["load"])
    return one_line(story_of(load)) if load is not None else ""


def _last_load(worker: Json) -> str | None:
    """Return the durations of the phases of a worker's last load; None: not known."""
    if not worker.get("last_load"):
        return None
    from ichat.protocol.load_story import read_story, summary_of

    load = read_story(worker["last_load"])
    return summary_of(load) if load is not None else None


def _yes_or_no(value: object) -> str | None:
    return {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else None


def _waited(model: Json) -> str | None:
    """Return for how long the oldest request in a model's queue has waited."""
    return duration(model["waiting_s"]) if model.get("waiting_s") is not None else None


def _lost(worker: Json) -> str | None:
    lost = objects_of(worker.get("lost"))
    gone = " and ".join(f"worker {one.get('worker_id')}, which {one.get('why')}" for one in lost)
    return f"{gone}, of its group" if lost else None


def _last_end(worker: Json) -> str | None:
    """Return when and how a worker that runs again last ended; if it is down, only when: its failure says how."""
    when = time_of(worker.get("ended_at"))
    if when is None or has_ended(worker):
        return when
    code = worker.get("exit_code")
    how = worker.get("signal") or (f"exit code {code}" if code is not None else "")
    return ", ".join(str(word) for word in (when, how, worker.get("cause")) if word)


def _gpus(worker: Json) -> str | None:
    if "gpu_ids" not in worker:
        return None
    gpus = worker["gpu_ids"]
    return "all" if gpus is None else ", ".join(map(str, list_of(gpus))) or "none"


def names_of(worker: Json) -> list[str]:
    """Return the names of a worker's models."""
    return [str(name) for name in list_of(worker.get("model_names")) or [worker.get("model_name") or ""]]


def _address(worker: Json) -> str | None:
    host = str(worker.get("host") or "")
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{worker.get('port')}" if host and worker.get("port") else None


def _versions(worker: Json) -> list[str]:
    backend = worker.get("backend")
    versions = object_of(worker.get("versions"))
    return [str(version) if name == backend else f"{name} {version}" for name, version in versions.items()]


def _running(progress: Json) -> str | None:
    if progress.get("running") is None and progress.get("waiting") is None:
        return None
    running, waiting = _count(progress.get("running")), _count(progress.get("waiting"))
    return f"{running or NONE} running, {waiting or NONE} waiting"


def _hits(progress: Json) -> float | None:
    """Return the share of the prompts' tokens that the engine's prefix cache had, since its start."""
    asked, cached = progress.get("prompt_tokens"), progress.get("cached_tokens")
    if not isinstance(asked, int | float) or not isinstance(cached, int | float) or asked <= 0:
        return None
    return cached / asked


def _hits_in_words(progress: Json) -> str | None:
    share = _hits(progress)
    if share is None:
        return None
    asked, cached = _count(progress.get("prompt_tokens")), _count(progress.get("cached_tokens"))
    return f"had {cached} of {asked} prompt tokens ({percent(share)})"


def _count(number: object) -> str:
    return f"{number:.0f}" if isinstance(number, int | float) else ""


def _value(value: Any) -> str:
    return clean(value) if isinstance(value, str) and value else json.dumps(value)
