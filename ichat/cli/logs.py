"""A worker's captured output on the operator's terminal: its past lines, then new lines, over every break."""

import argparse
import time
from typing import Any, NoReturn

from ichat.cli.client import Api, Event, RequestRefused, Unreachable, pause, worker_path
from ichat.cli.json_values import Json, parse_object
from ichat.cli.screen import Screen, duration, log_line, note, one_line
from ichat.cli.views import failure_of, has_ended, load_in_words, phase_of
from ichat.errors import Exit

SILENCE_S = 60.0
"""Seconds without a line after which a connection may be dead: another connection continues where it stood."""
AWAY_S = 120.0
"""The longest silence of a gateway while its logs are followed, in seconds; more than SILENCE_S."""
STATE_S = 5.0
"""The longest wait for a worker's state when it has no lines, in seconds."""
_ENDED = ("failed", "stopped", "gone")


def add_log_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `logs`."""
    usage.add_argument("worker_id", metavar="ID", help="the worker, as `workers` has it")
    which = usage.add_mutually_exclusive_group()
    which.add_argument("--follow", "-f", action="store_true", help="follow new lines, until Ctrl-C")
    which.add_argument("--previous", action="store_true", help="of the process before the newest start")
    usage.add_argument("--tail", type=_count, metavar="N", help="begin with the last N lines")
    usage.add_argument("--timestamps", "-t", action="store_true", help="each line with its time")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text!r}")
    return int(text)


def run_logs(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show a worker's lines, and those that follow if the flags say so."""
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
        return f"<Logs of {self._args.worker_id}, last {self._last_id or 'none'}>"

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
        path = worker_path(args.worker_id).replace("/v1/admin/workers/", "/v1/logs/stream/")
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
        if not self._is_explained and (worker := self._state()):
            self._is_explained = True
            note(one_line(silence_of(worker, goes_on=self._args.follow)), "dim")

    def _refuse(self, refusal: RequestRefused) -> NoReturn:
        """Raise the refusal of the first request, with the worker's failure if that is why no lines are known."""
        worker = self._state() if refusal.status == 404 and not self._args.previous else {}
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
        import datetime as dt

        at = dt.datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    return f"{at} " if at else ""
