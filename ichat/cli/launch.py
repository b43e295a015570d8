"""Launching and ordering workers from the command line, and watching until they are ready."""

import argparse
import os
import re
import shlex
import time
from collections.abc import Sequence
from typing import Any, cast

from ichat.cli.client import EXIT_REFUSED, Api, JsonReply, Unreachable, pause, worker_path
from ichat.cli.copies import read_replicas
from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.screen import NONE, Screen, Spinner, duration, log_line, note, one_line
from ichat.cli.views import failure_of, progress_of, rest_of
from ichat.errors import EXIT_USAGE, Exit
from ichat.program import as_typed_here

ORDERS = "/v1/admin/orders"
LAUNCH_S = 120.0
"""The longest time to check a launch, in seconds: the engine is asked for its flags if they are not known yet."""
MISSED_MAX = 10
"""Polls that may fail in a row, before a gateway counts as gone."""
TOLD_S = 0.5
"""A phase of a load that is over gets a line of its own if it lasted this many seconds."""
_NUMBER = re.compile(r"-(\d|\.\d)")
ENDING_POLLS_MAX = 60
"""Polls for which a managed worker may be down before the reason is known: its process ends meanwhile."""
_READY, _ENDED = ("ready", "following", "cold"), ("failed", "broken", "stopped", "gone")
"""States in which a launch is over; a cold worker waits for the first request for its model."""


def add_launch_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `launch`."""
    add_spec_flags(usage)
    usage.add_argument("--wait", action="store_true", help="show its progress until it is ready or has failed")
    usage.add_argument("--timeout-s", type=float, metavar="S", help="with --wait: the longest wait")


def add_spec_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags that describe a worker; `split` separates the engine's flags."""
    usage.epilog = (
        "Every other flag after MODEL_PATH is a key of [[managed_workers]] (--share-gpus, --load on_demand) or one of"
        " the engine's (--max-model-len 8192); after -- all of them are."
    )
    usage.add_argument("model_path", metavar="MODEL_PATH", help="a directory, or a name on the model hub")
    usage.add_argument(
        "--model-name",
        "--served-model-name",
        "-n",
        metavar="NAME",
        help="what clients call it; else made of MODEL_PATH",
    )
    usage.add_argument("--backend", "-be", metavar="NAME", help="the engine: vllm, sglang, …")
    add_gpu_flag(usage)
    usage.add_argument("--replicas", type=read_replicas, metavar="N", help="copies of it, such as 3 or 1-4")
    usage.add_argument("--on", metavar="PLACE", help="where it runs: here, or ray, a node of the cluster")
    usage.add_argument("--labels", type=_labels, metavar="A=B", help="with --on ray: labels of the node, as A=B,C=D")
    usage.add_argument("--memory-gib", type=float, metavar="GIB", help="with --on ray: the main memory that Ray books")
    usage.add_argument("--host", help="where it listens")
    usage.add_argument("--port", type=int, help="0: any free port")
    usage.add_argument("--heartbeat-interval", type=float, metavar="S", help="seconds between two heartbeats")


def add_gpu_flag(usage: argparse.ArgumentParser) -> None:
    """Add the flags for the GPUs of a worker."""
    usage.add_argument("--gpus", type=_gpus, metavar="N", help="the GPUs to choose for it: N, a share, or auto")
    usage.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="with --gpus: the memory it needs on each")
    usage.add_argument("--gpu-ids", type=_gpu_ids, metavar="0,1", help="the GPUs that it may use, or none; else all")


def split(usage: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into our words and the engine's flags after the model. Raises Exit 64."""
    ours, engine = list[str](), list[str]()
    known = usage._option_string_actions
    has_model = False
    words = iter(argv)
    for word in words:
        action = known.get(word.partition("=")[0] if word.startswith("--") else word)
        if word == "--":
            engine += words
        elif action is not None:
            ours.append(word)
            if action.nargs is None and "=" not in word:
                ours += [value for value in [next(words, None)] if value is not None]
        elif has_model:
            engine.append(word)
        elif word.startswith("-"):
            raise Exit(EXIT_USAGE, f"{usage.prog}: {word} is no flag of it; the engine's flags stand after MODEL_PATH.")
        else:
            ours.append(word)
            has_model = True
    return ours, engine


def engine_arguments(words: Sequence[str]) -> Json:
    """Read an engine's flags as the arguments of the API: ``--max-model-len 8192`` is max_model_len = 8192.

    A flag alone is true, its ``--no-`` form false, several values are a list, ``--name.key`` is a key of a table.
    Raises Exit 64 if that could not be turned back into the same flags.
    """
    given: list[tuple[str, list[str]]] = []
    for word in words:
        if not word.startswith("-") or _NUMBER.match(word):
            if not given:
                raise Exit(EXIT_USAGE, f"{word} belongs to no flag.")
            given[-1][1].append(word)
        elif not re.match(r"--\w", word):
            raise Exit(EXIT_USAGE, f"{word}: write the long form of an engine's flag.")
        else:
            name, equals, value = word[2:].partition("=")
            given.append((name, [value] if equals else []))
    arguments: Json = {}
    for flag, values in given:
        name, *keys = flag.split(".")
        name = name.replace("-", "_")
        value: Any = [_value(value) for value in values]
        if not values and name.startswith("no_") and not keys:
            name, value = name.removeprefix("no_"), False
        elif len(values) < 2:
            value = value[0] if value else True
        _put(arguments, [name, *keys], value, flag)
    return arguments


def _put(table: Json, keys: Sequence[str], value: Any, flag: str) -> None:
    *above, last = keys
    for key in above:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise Exit(EXIT_USAGE, f"--{flag}: --{key} has a value already.")
        table = cast("Json", inner)
    if last in table or not last or last.endswith("+"):
        why = "is given twice" if last in table else "is not understood; give JSON instead"
        raise Exit(EXIT_USAGE, f"--{flag} {why}.")
    table[last] = value


def _value(text: str) -> str | int | float:
    """Read a text as a number only if that number is usually written so: 007 and 1e3 stay texts."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and text not in ("nan", "inf", "-inf"):
            return number
    return text


def _gpus(text: str) -> str | int | float:
    value = _value(text)
    if value != "auto" and isinstance(value, str):
        raise argparse.ArgumentTypeError(f"must be a number of GPUs, a share of a GPU, or auto, not {text!r}")
    return value


def _gpu_ids(text: str) -> list[int]:
    if text == "none":
        return []
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"must be like 0,1 or none, not {text!r}")
    return [int(one) for one in text.split(",")]


def _labels(text: str) -> dict[str, str]:
    found = {one.partition("=")[0]: one.partition("=")[2] for one in text.split(",")}
    if not all(found.values()):
        raise argparse.ArgumentTypeError(f"must be like zone=b,kind=H100, not {text!r}")
    return found


def launch(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Launch a worker; wait until it is ready, unless the flags say otherwise."""
    body = spec_of(args, *path_and_name(api, args.model_path))
    answer = api.call("POST", "/v1/admin/workers/launch", body=body, answer_s=LAUNCH_S)
    worker_ids = [*map(str, list_of(answer.value.get("worker_ids")))] or [str(answer.value.get("worker_id") or "")]
    if not args.wait:
        for worker_id in [] if args.json else worker_ids[1:]:
            screen.line(f"{one_line(worker_id)} {one_line(answer.value.get('state', ''))}")
        show(screen, answer, is_json=args.json)
        return 0
    began_at = time.monotonic()
    for worker_id in worker_ids:
        waited_s = round(time.monotonic() - began_at, 3)
        rest_s = None if args.timeout_s is None else max(0.0, args.timeout_s - waited_s)
        try:
            ready = wait_until_ready(api, worker_id, rest_s)
        except KeyboardInterrupt:
            note(f"Not waiting any longer; worker {worker_id} goes on loading.")
            raise
        show(screen, ready, is_json=args.json)
    return 0


def spec_of(args: argparse.Namespace, path: str, name: str) -> Json:
    """Return the worker that the flags describe, with this path, and with this name unless they have another.

    Raises Exit 64.
    """
    ours = (
        "backend", "gpus", "gpu_memory_gib", "gpu_ids", "on", "labels", "memory_gib", "replicas", "host", "port",
        "heartbeat_interval", "worker_id", "valid_s", "ports",
    )  # fmt: skip
    body: Json = {"model_name": args.model_name or name, "model_path": path}
    body |= {key: getattr(args, key) for key in ours if getattr(args, key, None) is not None}
    twice = sorted(body.keys() & args.engine.keys())
    if twice:
        raise Exit(EXIT_USAGE, f"--{twice[0].replace('_', '-')} is given twice.")
    return {**args.engine, **body}


def name_of(path: str) -> str:
    """Return the name that is made of a model's path."""
    return os.path.basename(path.rstrip("/")) if path[:1] in "/.~" else path


def path_and_name(api: Api, model_path: str) -> tuple[str, str]:
    """Return a model's path for the gateway (it may run in another directory), and the name made of it."""
    path = os.path.abspath(model_path) if api.place.is_here and os.path.exists(model_path) else model_path
    return path, name_of(path)


def show(screen: Screen, answer: JsonReply, *, is_json: bool) -> None:
    """Show the answer about a worker: its id and state, or the JSON."""
    if is_json:
        screen.line(answer.text.rstrip("\n"))
    else:
        worker = answer.value
        screen.line(f"{one_line(worker.get('worker_id', ''))} {one_line(worker.get('state', ''))}")


def wait_until_ready(api: Api, worker_id: str, timeout_s: float | None = None, *, restarts: bool = True) -> JsonReply:
    """Return the worker once it is ready, and show its load until then.

    Raises Exit 1 if it fails for good, disappears, or exceeds `timeout_s`; without `restarts`, if it fails at all.
    """
    missed = ending = 0
    with Spinner() as spinner:
        progress = LoadProgress(spinner)
        while True:
            try:
                answer = api.get(worker_path(worker_id))
                missed = 0
            except Unreachable:
                missed += 1
                if missed > MISSED_MAX:
                    raise
            else:
                state = answer.value.get("state")
                if state in _READY:
                    return answer
                ending = ending + 1 if _is_ending(answer.value) else 0
                has_failed = state in _ENDED or (state == "restarting" and not restarts)
                if has_failed and not 0 < ending < ENDING_POLLS_MAX:
                    break
                progress.show(answer.value)
            if timeout_s is not None and spinner.elapsed_s > timeout_s:
                sentence = f"Worker {worker_id} was not ready within {timeout_s:g} s; it goes on loading."
                raise Exit(EXIT_REFUSED, sentence)
            pause(api.waits.poll_s)
    for line in list_of(answer.value.get("last_lines")):
        if one_line(line) != one_line(answer.value.get("cause")):  # it is shown below
            note(log_line(str(line), colours=False))
    raise Exit(EXIT_REFUSED, f"Worker {worker_id} {failure_of(answer.value)}.")


def _is_ending(worker: Json) -> bool:
    """Return whether the reason of a managed worker's end may follow: its process has just ended, or is about to."""
    if worker.get("state") == "restarting":
        return worker.get("exit_code") is None and not (worker.get("signal") or worker.get("cause"))
    return worker.get("state") == "gone" and bool(worker.get("managed"))


class LoadProgress:
    """Shows a worker's load: a line that changes, and a line for each phase that is over."""

    def __init__(self, spinner: Spinner) -> None:
        self._spinner = spinner
        self._told = 0
        """How many phases have their line."""

    def __repr__(self) -> str:
        return f"<LoadProgress, {self._told} phases>"

    def show(self, worker: Json) -> None:
        """Show the worker's load."""
        phases = objects_of(object_of(worker.get("load")).get("phases"))
        if len(phases) <= self._told:
            self._told = max(0, len(phases) - 1)  # it was started again
        for phase in phases[self._told : -1]:
            seconds = phase.get("seconds")
            if isinstance(seconds, int | float) and seconds >= TOLD_S:
                self._spinner.write_line(f"{worker.get('worker_id')}: {phase.get('name')} took {duration(seconds)}")
        self._told = max(0, len(phases) - 1)
        self._spinner.show(progress_of(worker), rest_of(worker))


def add_order_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `order`: those that describe a worker, and its own."""
    add_spec_flags(usage)
    usage.add_argument("--worker-id", metavar="ID", help="replace the worker of this earlier order; else a new worker")
    usage.add_argument("--valid-s", type=float, metavar="S", help="how long the line can be used (3600)")
    usage.add_argument("--ports", metavar="FIRST-LAST", help="listen on a free port of this range, in place of --port")


def order(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Order a worker, and print the line that starts it on another machine."""
    body = spec_of(args, args.model_path, name_of(args.model_path))
    answer = api.call("POST", ORDERS, body=body)
    if args.json:
        screen.line(answer.text.rstrip("\n"))
        return 0
    made, worker_id = answer.value, one_line(answer.value.get("worker_id"))
    is_local_only = api.place.is_here and made.get("is_local_only")
    address = one_line(made.get("gateway_address")) if api.place.is_here and not is_local_only else api.place.url
    words = ["worker", "--order", one_line(made.get("code")), "--gateway-address", address]
    screen.line(f"{as_typed_here('python3 ichat.pyz')} {shlex.join(words)}")
    note(f"Type this line on the other machine: it starts worker {worker_id} there, once. `stop {worker_id}` ends it.")
    if is_local_only:
        note("This gateway listens on loopback alone: set server_settings.host, or no other machine reaches it.")
    return 0


def show_orders(screen: Screen, answer: Json) -> None:
    """Show the orders."""
    names = ("worker_id", "launch", "model_name", "fetched_from")
    rows = [[*(one.get(name) or NONE for name in names), _order_state(one)] for one in objects_of(answer.get("orders"))]
    screen.table(("worker", "launch", "model", "from", "state"), rows, ("from", "launch"))


def _order_state(one: Json) -> str:
    """Return the state of an order, in a few words."""
    expires_at = one.get("expires_at")
    left_s = expires_at - time.time() if isinstance(expires_at, int | float) else 0.0
    unused = f"waits for {duration(left_s)} more" if left_s > 0 else "was not used in time"
    return one_line(one.get("ended")) or ("fetched" if one.get("fetched_at") else unused)
