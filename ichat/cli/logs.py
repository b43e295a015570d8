"""A worker's captured output on the operator's terminal: its past lines, then new lines, over every break."""

import argparse
import datetime as dt
import re
import time
from typing import Any, NoReturn

from ichat.cli.client import Api, Event, RequestRefused, Unreachable, pause, worker_path
from ichat.cli.json_values import Json, objects_of, parse_object
from ichat.cli.screen import Screen, duration, log_line, note, one_line
from ichat.cli.views import failure_of, has_ended, load_in_words, phase_of
from ichat.errors import EXIT_USAGE, Exit

SILENCE_S = 60.0
"""Seconds without a line after which a connection may be dead: another connection continues where it stood."""
AWAY_S = 120.0
"""The longest silence of a gateway while its logs are followed, in seconds; more than SILENCE_S."""
STATE_S = 5.0
"""The longest wait for a worker's state when it has no lines, in seconds."""
OWN = "/v1/logs/gateway"
"""The gateway's own lines."""
_ENDED = ("failed", "stopped", "gone")

OLD_LINES = 200
"""Lines that are shown, if `--tail` names no number."""
PAGE_LINES_MAX = 1000
"""The most lines of a page."""
PAGE_S = 30.0
"""The longest wait for a page, in seconds."""
_POSITION = re.compile(r"\d+\.\d+\.\d+")


def add_log_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `logs`."""
    usage.add_argument("worker_id", metavar="ID", nargs="?", help="the worker, as `workers` has it")
    usage.add_argument("--own", action="store_true", help="the gateway's own lines, in place of a worker's")
    which = usage.add_mutually_exclusive_group()
    which.add_argument("--follow", "-f", action="store_true", help="follow new lines, until Ctrl-C")
    which.add_argument("--previous", action="store_true", help="of the process before the newest start")
    usage.add_argument("--tail", type=_count, metavar="N", help="begin with the last N lines")
    usage.add_argument("--grep", metavar="TEXT", help="only lines with this text, of all files that are kept")
    usage.add_argument("--before", metavar="TIME", help="only lines before a time (2026-11-23T04:00), of these files")
    usage.add_argument("--timestamps", "-t", action="store_true", help="each line with its time")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return int(text)


def run_logs(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show a worker's lines, and those that follow if the flags say so. Raises Exit 64."""
    if (args.worker_id is None) != args.own:
        raise Exit(EXIT_USAGE, "Name a worker (./ichat.pyz workers lists them), or give --own, and not both.")
    if args.before is not None or args.grep is not None:
        if args.follow or args.own:
            raise Exit(EXIT_USAGE, "--grep and --before read a worker's files: leave out --follow and --own.")
        return show_pages(api, screen, args)
    logs = LogCommand(api, screen, args)
    return logs.follow() if args.follow else logs.show()


class LogCommand:
    """A worker's lines."""

    def __init__(self, api: Api, screen: Screen, args: argparse.Namespace) -> None:
        self._api = api
        self._screen = screen
        self._args = args
        self._last_id = ""
        self._is_explained = args.tail == 0
        """Whether lines were shown, or the reason why there are none; with `--tail 0`, old lines are not wanted."""
        self._heard_at = time.monotonic()
        """When the gateway last sent something."""

    def __repr__(self) -> str:
        return f"<Logs of {self._args.worker_id or 'the gateway'}, last {self._last_id or 'none'}>"

    def show(self) -> int:
        """Show the existing lines. Raises Exit if there can be none."""
        try:
            self._read()
        except RequestRefused as refusal:
            self._refuse(refusal)
        self._explain()
        return 0

    def follow(self) -> int:
        """Show existing and new lines until the worker has ended. Raises Exit if the gateway stays away."""
        pauses, has_begun, is_away = 0, False, False
        while True:
            last_id = self._last_id
            try:
                self._read()
                has_begun, is_away = True, False
                if self._has_ended():
                    return 0
            except (Unreachable, RequestRefused) as error:
                is_silent = isinstance(error, Unreachable) and error.timed_out
                has_begun = has_begun or is_silent or self._last_id != ""
                if not has_begun and isinstance(error, RequestRefused):
                    self._refuse(error)
                if not has_begun or not _may_pass(error) or time.monotonic() - self._heard_at > AWAY_S:
                    raise
                if not is_away and not is_silent:
                    note(f"{error} Trying again.", "dim")
                is_away = not is_silent
            pauses = 0 if self._last_id != last_id else pauses + 1
            pause(self._api.waits.again_s[min(pauses, len(self._api.waits.again_s) - 1)])

    def _read(self) -> None:
        args = self._args
        params = {"follow": "true" if args.follow else "false"}
        if args.tail is not None and not self._last_id:
            params["tail"] = str(args.tail)
        if args.previous:
            params["previous"] = "1"
        path = OWN if args.own else worker_path(args.worker_id).replace("/v1/admin/workers/", "/v1/logs/stream/")
        headers = {"last-event-id": self._last_id} if self._last_id else None
        with self._api.events(
            "GET", path, silence_s=SILENCE_S, params=params, headers=headers, on_comment=lambda _: self._explain()
        ) as events:
            self._heard_at = time.monotonic()
            for event in events:
                self._heard_at, self._is_explained = time.monotonic(), True
                self._last_id = event.id or self._last_id
                self._show(event)

    def _show(self, event: Event) -> None:
        screen = self._screen
        if self._args.json:
            screen.line(event.data)
            return
        entry = parse_object(event.data)
        if event.name == "gap":
            screen.line(f"--- {entry.get('lost', 'some')} lines are lost ---", "yellow")
        elif event.name == "message":
            line = log_line(str(entry.get("line", event.data)), colours=screen.has_colours)
            screen.line(_time(entry) + line if self._args.timestamps else line)

    def _explain(self) -> None:
        """Write once why no line has been shown, if the gateway knows the worker."""
        if not (self._is_explained or self._args.own) and (worker := self._state()):
            self._is_explained = True
            note(one_line(silence_of(worker, goes_on=self._args.follow)), "dim")

    def _refuse(self, refusal: RequestRefused) -> NoReturn:
        """Raise the refusal of the first request, with the worker's failure if that is why no lines are known."""
        worker = self._state() if refusal.status == 404 and self._args.worker_id and not self._args.previous else {}
        if has_ended(worker):
            raise Exit(refusal.code, one_line(silence_of(worker, goes_on=False)))
        raise refusal

    def _state(self) -> Json:
        """Return the worker as the gateway knows it; nothing if the gateway does not answer, or does not know it."""
        try:
            return self._api.call("GET", worker_path(self._args.worker_id), answer_s=STATE_S).value
        except Exit:
            return {}

    def _has_ended(self) -> bool:
        """Return whether a stream that has ended properly was the worker's last stream."""
        if self._args.own:
            return False
        try:
            worker: Json = self._api.get(worker_path(self._args.worker_id)).value
        except RequestRefused as refusal:
            if refusal.status == 404:
                return True
            raise
        return worker.get("state") in _ENDED


def silence_of(worker: Json, *, goes_on: bool) -> str:
    """Return why no line of a worker is known: its state, and the reason; `goes_on` says that new lines are shown."""
    state = worker.get("state")
    why = f"it is {state}"
    if has_ended(worker) or worker.get("failure") or worker.get("lost"):
        why += f", since it {failure_of(worker)}"
    elif state == "cold":
        why += ", and is started when a request needs its model"
    elif detail := load_in_words(worker) or phase_of(worker):
        why += f" ({detail})"
    if worker.get("retry_in_s") is not None:
        again = "can be loaded" if worker.get("on_demand") else "is started"
        why += f"; it {again} again in {duration(worker['retry_in_s'])}"
    rest = " Its lines are shown as soon as there are any." if goes_on else ""
    return f"{worker.get('worker_id')} has no lines yet: {why}.{rest}"


def _may_pass(error: Exit) -> bool:
    """Return whether a failure may be over soon: a restarted gateway has had no heartbeat of the worker yet."""
    return not isinstance(error, RequestRefused) or error.status == 404 or error.status >= 500


def _time(entry: Json) -> str:
    at: Any = entry.get("time")
    if isinstance(at, int | float):
        at = dt.datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    return f"{at} " if at else ""


def show_pages(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show the newest lines before a time, or with a text, oldest first. Raises Exit for a wrong time."""
    path = worker_path(args.worker_id).replace("/v1/admin/workers/", "/v1/logs/pages/")
    params = {"previous": "1"} if args.previous else {}
    if args.before is not None:
        params["before"] = _read_before(args.before)
    if args.grep:
        params["text"] = args.grep
    lines, older = _read_pages(api, path, params, OLD_LINES if args.tail is None else args.tail)
    for line in lines:
        _show_old(screen, args, line)
    if not lines:
        what = f"contains {args.grep!r}" if args.grep else "is older"
        note(one_line(f"No line that is kept of {args.worker_id} {what}."), "dim")
    elif older:
        note(f"Older lines: add --before {older}", "dim")
    return 0


def _read_pages(api: Api, path: str, params: dict[str, str], wanted: int) -> tuple[list[Json], str]:
    """Return the newest of these lines, oldest first, and the position before which older lines are, or ""."""
    lines: list[Json] = []
    while len(lines) < wanted:
        limit = str(min(PAGE_LINES_MAX, wanted - len(lines)))
        page = api.call("GET", path, params={**params, "limit": limit}, answer_s=PAGE_S).value
        lines, older = [*objects_of(page.get("lines")), *lines], page.get("before")
        if not isinstance(older, str):
            return lines, ""
        params = {**params, "before": older}
    return lines, params.get("before", "")


def _show_old(screen: Screen, args: argparse.Namespace, line: Json) -> None:
    if args.json:
        import json

        screen.line(json.dumps(line, ensure_ascii=False))
        return
    text = log_line(str(line.get("line", "")), colours=screen.has_colours)
    screen.line(f"{line.get('time') or '-'} {text}" if args.timestamps else text)


def _read_before(text: str) -> str:
    """Return a position as it is, or a time with its zone; a time without a zone is that of this machine's clock."""
    if _POSITION.fullmatch(text):
        return text
    try:
        at = dt.datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)
        return at.astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError) as error:
        raise Exit(
            EXIT_USAGE, f"--before must be a time such as 2026-11-23T04:00, or a position, not {text!r}."
        ) from error
