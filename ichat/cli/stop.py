"""Commands for single workers: stop, watched until its end; start, restart, drain and resume."""

import argparse
import queue
import threading
import time
from collections.abc import Callable

from ichat.cli.client import EXIT_REFUSED, Api, JsonReply, RequestRefused, Unreachable, pause, worker_path
from ichat.cli.json_values import Json
from ichat.cli.launch import show
from ichat.cli.screen import Screen, Spinner, note
from ichat.cli.views import progress_of
from ichat.errors import Exit

STOP_MORE_S = 90.0
"""Seconds for a stop beyond the time to drain: the worker ends, and processes that it leaves are killed."""
DRAIN_S = 600.0
"""The longest wait for a drain, in seconds, if no time is given: the gateway's configuration sets the time then."""


def stop(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Stop a worker and show its progress until it is gone."""
    params = {} if args.drain_s is None else {"drain_s": f"{args.drain_s:g}"}
    wait_s = (DRAIN_S if args.drain_s is None else args.drain_s) + STOP_MORE_S
    path = worker_path(args.worker_id)
    outcome = in_background(api, lambda: api.call("DELETE", path, params=params, answer_s=wait_s))
    with Spinner() as progress:
        try:
            answer = _wait_until_gone(api, path, outcome, progress, wait_s)
        except KeyboardInterrupt:
            note(f"Not waiting any longer for worker {args.worker_id}.")
            raise
    show(screen, answer, is_json=args.json)
    if answer.value.get("stays"):
        note(f"It stays stopped until `./ichat.pyz start {args.worker_id}`, or until its table in the file changes.")
    elif answer.value.get("in_config"):
        note(
            "It is in the configuration: the next reload or start of the gateway starts it again. Remove it from the"
            " file to keep it stopped."
        )
    return 0


def add_command_flags(usage: argparse.ArgumentParser) -> None:
    """Add the argument of `start`, `drain` and `resume`."""
    usage.add_argument("worker_id", metavar="ID", help="the worker, as `workers` has it")


def command(verb: str) -> Callable[[Api, Screen, argparse.Namespace], int]:
    """Return the command that asks the gateway to `start`, `restart`, `drain` or `resume` a worker, without a wait."""

    def run(api: Api, screen: Screen, args: argparse.Namespace) -> int:
        drain_s = getattr(args, "drain_s", None)
        params = {} if drain_s is None else {"drain_s": f"{drain_s:g}"}
        show(screen, api.call("POST", f"{worker_path(args.worker_id)}/{verb}", params=params), is_json=args.json)
        return 0

    return run


def in_background(api: Api, ask: Callable[[], JsonReply]) -> Callable[[], JsonReply | None]:
    """Send the gateway a long request in a thread.

    Return a function that waits `Waits.poll_s` for the answer, and returns it, or None. It raises a refusal.
    """
    outcome: queue.SimpleQueue[JsonReply | Exit] = queue.SimpleQueue()

    def put() -> None:
        try:
            outcome.put(ask())
        except Exit as error:
            outcome.put(error)

    def poll() -> JsonReply | None:
        try:
            given = outcome.get(timeout=api.waits.poll_s)
        except queue.Empty:
            return None
        outcome.put(given)  # for the next call
        if isinstance(given, Exit):
            raise given
        return given

    threading.Thread(target=put, name="ask", daemon=True).start()
    return poll


def _wait_until_gone(
    api: Api, path: str, outcome: Callable[[], JsonReply | None], progress: Spinner, wait_s: float
) -> JsonReply:
    answer: JsonReply | None = None
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if answer is None:
            answer = outcome()
        else:
            pause(api.waits.poll_s)
        if answer is not None and answer.value.get("state", "stopped") in ("stopped", "gone"):
            return answer
        try:
            progress.show(draining(api.get(path).value))
        except RequestRefused as refusal:
            if refusal.status == 404 and answer is not None:
                return answer._replace(value={**answer.value, "state": "stopped"})
        except Unreachable:
            continue
    raise Exit(EXIT_REFUSED, f"The worker has not ended within {wait_s:g} s.")


def draining(worker: Json) -> str:
    """Return a worker's progress in a single line, with its requests under way."""
    in_flight = worker.get("in_flight")
    waits = f", {in_flight} requests under way" if isinstance(in_flight, int) and in_flight else ""
    return progress_of(worker) + waits
