"""The gateway on the operator's terminal, live: `top`. A thread follows the event stream, another the keys."""

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Generator

from ichat.cli.client import Api, RequestRefused, Unreachable, pause
from ichat.cli.json_values import Json, parse_object
from ichat.cli.screen import Screen, width_of
from ichat.cli.top_state import TopState
from ichat.cli.top_view import STYLES, Choice, cells_of, frame, pane_of
from ichat.cli.troubles import config_sentence
from ichat.errors import EXIT_USAGE, Exit

SILENCE_S = 45.0
"""A connection without even a comment for this many seconds is dead."""
PAUSES_S = (0.5, 1.0, 2.0, 5.0)
DRAW_S = 1.0
"""Seconds between two drawings if nothing happens: ages grow."""
LEAST_S = 0.1
"""The least time between two drawings, in seconds."""
EVENTS_MAX = 1000
"""The most events that wait to be shown. Beyond it the reading thread waits, and the gateway sends the state anew."""
_EVENTS = "/v1/admin/events"
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To another screen without a cursor, and back."""
_CLEAR_LINE, _CLEAR_BELOW, _PLAIN = "\x1b[K", "\x1b[J", "\x1b[0m"


def add_top_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `top`."""
    usage.add_argument("--once", action="store_true", help="show everything once, as plain text or with --json")


def run_top(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show the gateway until `q`, or once."""
    if args.once or args.json:
        return _show_once(api, screen, args)
    if not screen.is_terminal or not sys.stdin.isatty():
        raise Exit(EXIT_USAGE, "top needs a terminal; --once shows everything once, --json for programs.")
    if os.environ.get("TERM") == "dumb":
        raise Exit(EXIT_USAGE, "top needs a terminal that moves its cursor (TERM is dumb); --once shows all once.")
    return _Top(api).run()


def _show_once(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show the state, or as JSON; without `--once` every event as a line of JSON."""
    state, seen = TopState(), set[str]()
    with api.events("GET", _EVENTS, silence_s=SILENCE_S, params={"requests": "1"}) as events:
        for event in events:
            data = parse_object(event.data)
            if args.json and not args.once:
                screen.line(json.dumps({"event": event.name, "data": data}))
                continue
            state.update(event.name, data)
            seen.add(event.name)
            if args.json and event.name == "state":
                screen.line(event.data)
                return 0
            if {"state", "requests"} <= seen:
                break
    if not state.has_state and (args.once or not args.json):
        raise Unreachable("The gateway has ended the stream.")
    if not args.json:
        if trouble := config_sentence(state.config):
            screen.line(trouble, "red")
        for pane in "mwgr":
            columns, rows = pane_of(state, pane)
            screen.table([one.title for one in columns], cells_of(columns, rows))
    return 0


class _Top:
    """The live screen."""

    def __init__(self, api: Api) -> None:
        self._api = api
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        self._state, self._choice = TopState(), Choice(has_unicode=is_utf8 and os.environ.get("TERM") != "dumb")
        self._events: queue.Queue[tuple[str, Json] | Exception] = queue.Queue(EVENTS_MAX)
        self._note = "connecting"
        self._refusal: RequestRefused | None = None

    def run(self) -> int:
        threading.Thread(target=self._follow_forever, daemon=True).start()
        with _raw_terminal():
            drawn_at, drawn_size = 0.0, None
            while not self._choice.is_over:
                has_changed = self._read_events()
                if self._refusal is not None and not self._state.has_state:
                    break
                for key in _pressed(LEAST_S):
                    self._choice.press(key)
                    has_changed = True
                size = os.get_terminal_size(sys.stdout.fileno())
                if has_changed or size != drawn_size or time.monotonic() - drawn_at >= DRAW_S:
                    self._draw(size.columns or 80, size.lines or 24)
                    drawn_at, drawn_size = time.monotonic(), size
        if self._refusal is not None and not self._state.has_state:
            raise self._refusal
        return 0

    def _follow_forever(self) -> None:
        """Hand over the events of successive connections."""
        failures = 0
        while True:
            try:
                with self._api.events("GET", _EVENTS, silence_s=SILENCE_S, params={"requests": "1"}) as events:
                    for event in events:
                        failures = 0
                        self._events.put((event.name, parse_object(event.data)))
                self._events.put(Unreachable("The gateway has ended the stream."))
            except (Unreachable, RequestRefused) as error:
                self._events.put(error)
            pause(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1

    def _read_events(self) -> bool:
        """Process the waiting events; return whether there were any."""
        has_any = False
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                has_any = True
                if isinstance(event, tuple):
                    self._note = ""
                    self._state.update(*event)
                else:
                    self._note = f"Trying again: {event}"
                    self._refusal = event if isinstance(event, RequestRefused) else None
        return has_any

    def _draw(self, width: int, height: int) -> None:
        lines = frame(self._state, self._choice, width, height, self._note)
        has_styles = not os.environ.get("NO_COLOR")
        parts = ["\x1b[H"]
        for number, (text, style) in enumerate(lines):
            styled = f"{STYLES[style]}{text}{_PLAIN}" if style and (has_styles or style == "reverse") else text
            rest = _CLEAR_LINE if width_of(text) < width else ""  # in the last column it would erase a letter
            parts.append(f"{'' if number == 0 else chr(13) + chr(10)}{styled}{rest}")
        sys.stdout.write("".join(parts) + _CLEAR_BELOW)
        sys.stdout.flush()


def _pressed(wait_s: float) -> list[str]:
    """Return the keys that are pressed within some time, each as a character or as the sequence that it sends."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], wait_s)[0]:
        return []
    try:
        text = os.read(descriptor, 1024).decode(errors="replace")
    except OSError:
        text = ""  # the terminal is gone
    if not text:
        return ["q"]
    keys = list[str]()
    while text:
        length = 1
        if text.startswith("\x1b[") and len(text) > 2:
            length = next((at + 1 for at in range(2, len(text)) if text[at].isalpha() or text[at] == "~"), len(text))
        keys.append(text[:length])
        text = text[length:]
    return keys


@contextlib.contextmanager
def _raw_terminal() -> Generator[None]:
    """Make keys arrive singly and without echo, on a screen of our own.

    Both are restored at the end, unless SIGKILL ends this process, and while Ctrl-Z stops it.
    """
    import termios
    import tty

    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    before = termios.tcgetattr(keys)

    def begin() -> None:
        tty.setcbreak(keys)
        os.write(screen, _BEGIN.encode())

    def end() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            os.write(screen, _END.encode())
            termios.tcsetattr(keys, termios.TCSANOW, before)

    def stop(*_: object) -> None:
        end()
        os.kill(os.getpid(), signal.SIGSTOP)
        begin()

    def quit_(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGTERM: quit_, signal.SIGHUP: quit_, signal.SIGTSTP: stop}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        begin()
        yield
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        end()
        for number, handler in earlier.items():
            signal.signal(number, handler)
