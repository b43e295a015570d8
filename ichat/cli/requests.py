"""The command `requests`: requests in flight, requests that have ended, and the timeline of a request."""

import argparse
from collections.abc import Sequence

from ichat.cli.client import Api
from ichat.cli.json_values import Json, object_of, objects_of
from ichat.cli.relay_views import time_of
from ichat.cli.screen import NONE, Screen, duration, size
from ichat.errors import Exit

IN_FLIGHT = "/v1/admin/requests"
FINISHED = "/v1/admin/requests/finished"
EXIT_UNKNOWN = 1
BAR_WIDTH = 40
"""The width of the whole time in a timeline, in characters."""
PHASES = (
    ("queued_s", "queue"),
    ("overhead_s", "gateway"),
    ("head_s", "until the head"),
    ("first_s", "until the first token"),
    ("body_s", "until the end"),
)
"""The phases of a request that has ended, in their order."""


def add_requests_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `requests`."""
    usage.add_argument(
        "request_id", metavar="ID", nargs="?", help="this request: the `x-request-id` of its response, or its own id"
    )
    usage.add_argument("--done", action="store_true", help="requests that have ended, newest first")
    usage.add_argument("--failed", action="store_true", help="only requests that ended with an error, or were cut off")
    usage.add_argument("--model", metavar="MODEL", help="only of this model or name")
    usage.add_argument("--key", metavar="NAME", help="only of this key")
    usage.add_argument("--worker", metavar="ID", help="only of this worker or external route")
    usage.add_argument("--limit", metavar="N", type=int, default=20, help="the most requests that have ended; 20")


def run_requests(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show requests, or a request. Raises Exit 1 for an id that is not known."""
    if args.request_id is not None:
        return _show_one(api, screen, args)
    selects = {"model": args.model, "key": args.key, "worker": args.worker}
    params = {name: value for name, value in selects.items() if value is not None}
    if args.failed:
        params["failed"] = "1"
    is_done = args.done or bool(params)
    answer = api.call("GET", FINISHED, params={**params, "limit": str(args.limit)}) if is_done else api.get(IN_FLIGHT)
    if args.json:
        screen.line(answer.text.rstrip("\n"))
    elif is_done:
        _show_finished(screen, answer.value)
    else:
        _show_in_flight(screen, answer.value)
    return 0


def _show_one(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show each request of an id: clients may give several requests the same id."""
    params = {"id": args.request_id}
    running = api.call("GET", IN_FLIGHT, params=params)
    ended = api.call("GET", FINISHED, params=params)
    answers = [one for one in (running, ended) if objects_of(one.value.get("requests"))]
    if not answers:
        raise Exit(EXIT_UNKNOWN, unknown_words(args.request_id, ended.value))
    if args.json:
        for answer in answers:
            screen.line(answer.text.rstrip("\n"))
        return 0
    blocks = [(show_in_flight, one) for one in objects_of(running.value.get("requests"))]
    blocks += [(show_timeline, one) for one in objects_of(ended.value.get("requests"))]
    for number, (show, one) in enumerate(blocks):
        if number:
            screen.line("")
        show(screen, one)
    return 0


def unknown_words(request_id: str, finished: Json) -> str:
    """Return why a request may not be known, and where to look for it."""
    kept, since = finished.get("kept_max"), time_of(finished.get("since"))
    if kept == 0:
        return (
            f"No request {request_id} is in flight, and logs.finished_requests_max = 0 keeps none that have ended."
            " Look for the id in the access log (logs.access_log)."
        )
    return (
        f"No request {request_id} is known: the gateway keeps the last {kept} requests that have ended, since"
        f" {since or NONE}. Look for the id in the access log (logs.access_log)."
    )


def _show_in_flight(screen: Screen, answer: Json) -> None:
    """Show every request in flight in a line."""
    requests = objects_of(answer.get("requests"))
    if not requests and screen.is_terminal:
        screen.line("No request is in flight. `requests --done` shows requests that have ended.")
        return
    rows = (
        [
            duration(one.get("age_s")), one.get("phase"), name_of(one), one.get("worker"), one.get("key"),
            duration(one.get("queued_s")), one.get("client"), one.get("id"),
        ]
        for one in requests
    )  # fmt: skip
    screen.table(("age", "phase", "model", "worker", "key", "queued", "client", "id"), rows, ("client", "queued"))


def _show_finished(screen: Screen, answer: Json) -> None:
    """Show every request that has ended in a line."""
    requests = objects_of(answer.get("requests"))
    if not requests and screen.is_terminal:
        since = time_of(answer.get("since")) or NONE
        screen.line(
            "No request that has ended is kept (logs.finished_requests_max = 0)."
            if answer.get("kept_max") == 0
            else f"No such request has ended since {since}, when this process of the gateway began."
        )
        return
    columns = ("ended", "status", "model", "worker", "key", "time", "queued", "first token", "tokens", "error", "id")
    screen.table(columns, map(_finished_row, requests), ("queued", "first token", "worker", "key"))


def _finished_row(one: Json) -> Sequence[object]:
    phases, tokens = object_of(one.get("phases")), object_of(one.get("tokens"))
    return [
        time_of(one.get("ended_at")), one.get("status"), name_of(one), one.get("worker"), one.get("key"),
        duration(one.get("duration_s")), duration(phases.get("queued_s")), duration(_first_token_s(phases)),
        f"{tokens.get('input')}+{tokens.get('output')}" if tokens else None, one.get("error"), one.get("id"),
    ]  # fmt: skip


def _first_token_s(phases: Json) -> float | None:
    """Return the seconds from a request's beginning to its first token; None: it had none."""
    values = [phases.get(name) for name, _ in PHASES[:4]]
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) if len(known) == len(values) else None


def name_of(one: Json) -> str:
    """Return the name that a request asked for, and the model that this became."""
    model, alias = str(one.get("model") or ""), str(one.get("alias") or "")
    return model if alias in ("", model) else f"{alias} -> {model}"


def show_in_flight(screen: Screen, one: Json) -> None:
    """Show all facts about a request in flight."""
    screen.facts(
        [
            *_identity(one),
            ("now", f"{one.get('phase')}, for {duration(one.get('age_s'))} in all"),
            ("queued", duration(one.get("queued_s"))),
            ("bytes", f"{size(one.get('bytes_in'))} in, {size(one.get('bytes_out'))} out"),
        ]
    )


def show_timeline(screen: Screen, one: Json) -> None:
    """Show all facts about a request that has ended, and its phases in proportion."""
    tokens = object_of(one.get("tokens"))
    passed = "; ".join(f"{skip.get('model')}: {skip.get('reason')}" for skip in objects_of(one.get("passed")))
    screen.facts(
        [
            *_identity(one),
            ("passed", passed),
            ("status", one.get("status")),
            ("error", one.get("error")),
            ("cut off", one.get("phase")),
            ("began", time_of(one.get("started_at"))),
            ("ended", time_of(one.get("ended_at"))),
            ("tokens", _tokens(tokens) if tokens else None),
            ("bytes", f"{size(one.get('bytes_in'))} in, {size(one.get('bytes_out'))} out, {one.get('chunks')} pieces"),
            ("trace", one.get("trace_id")),
        ]
    )
    screen.line("")
    rows = [*phases_of(one), ("in all", _seconds(one.get("duration_s")), 0.0)]
    total_s = max(rows[-1][1], 1e-9)
    width = max(len(name) for name, _, _ in rows)
    for name, seconds, begun in rows:
        left = min(BAR_WIDTH - 1, int(begun / total_s * BAR_WIDTH))
        bar = max(1, round(min(seconds, total_s) / total_s * BAR_WIDTH)) if seconds else 0
        line = f"{name.ljust(width)}  {precise(seconds).rjust(9)}  {' ' * left}{'#' * min(bar, BAR_WIDTH - left)}"
        screen.line(line.rstrip())


def phases_of(one: Json) -> list[tuple[str, float, float]]:
    """Return the phases of a request that has ended: name, seconds, and the seconds before it.

    The time that belongs to no phase is the last: a request that was refused or cut off has such a time.
    """
    phases, found, begun = object_of(one.get("phases")), list[tuple[str, float, float]](), 0.0
    for name, title in PHASES:
        if phases.get(name) is not None:
            seconds = _seconds(phases[name])
            found.append((title, seconds, begun))
            begun += seconds
    rest = _seconds(one.get("duration_s")) - begun
    if rest > 1e-4 and phases.get("body_s") is None:
        title = "in the gateway" if phases.get("overhead_s") is None else "without an answer"
        found.append((title, rest, begun))
    return found


def _identity(one: Json) -> list[tuple[str, object]]:
    own_id = one.get("own_id")
    return [
        ("request", one.get("id")),
        ("own id", own_id if own_id != one.get("id") else None),
        (
            "route",
            " ".join(filter(None, (str(one.get("method") or ""), str(one.get("path") or one.get("route") or "")))),
        ),
        ("model", name_of(one)),
        ("worker", one.get("worker")),
        ("key", one.get("key")),
        ("client", one.get("client")),
    ]


def _tokens(tokens: Json) -> str:
    estimate = ", estimated" if tokens.get("is_estimate") else ""
    return f"{tokens.get('input')} in ({tokens.get('cached')} cached), {tokens.get('output')} out{estimate}"


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def precise(seconds: float) -> str:
    """Write a phase: milliseconds below ten seconds."""
    return f"{seconds * 1000:.1f}ms" if seconds < 10 else duration(seconds)
