"""Kills this process at a step of a write of its state, as the file `ICHAT_DIES_AT` says: `order renamed`.

A write is known by its news: `launch` has the number of a new launch, `order` a new order, `place` the place of an
order, `fetched` the key of an order that was fetched, and `ended` the end of an order; `owner` is the name of the state
directory. A write is about to be `renamed` to its place, and then it is `done`. An audit hook of Python sees the first
before it happens, and carries it out itself where the second is wanted. All steps are appended to `ICHAT_DIES_AT.seen`.
The process dies once there is a file `ICHAT_DIES_AT.go`, too.
"""

import json
import os
import signal
import sys
import time

WAIT_S = 120
_STEP = os.environ.pop("ICHAT_DIES_AT", "")
_is_busy = False


def _read(path):
    """Return the JSON in a file; an empty object if it is not there."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def _news(new, old):
    """Return the news of a write, by the new file and the file in its place."""
    now, before = _read(new), _read(old)
    if os.path.basename(old) == "workers.json":
        return ["launch"] * (now["launches"] > before.get("launches", 0))
    if now["newest"] > before.get("newest", 0):
        return ["order"]
    known = {one["launch"]: one for one in before["orders"]}
    names = {"place": "place", "fetched_at": "fetched", "ended": "ended"}
    return [
        name for one in now["orders"] for key, name in names.items() if one[key] != known.get(one["launch"], one)[key]
    ]


def _watch(event, arguments):
    global _is_busy
    if _is_busy:
        return
    _is_busy = True
    try:
        if event == "open" and str(arguments[0]).endswith("/owner") and str(arguments[1]).startswith("w"):
            _note(["owner opened"], arguments)
        elif event == "os.rename" and os.path.basename(arguments[1]) in ("workers.json", "orders.json"):
            for news in _news(arguments[0], arguments[1]):
                _note([f"{news} renamed", f"{news} done"], arguments)
    finally:
        _is_busy = False


def _note(steps, arguments):
    """Note the steps of a write, and die if one of them is the wanted step."""
    try:
        with open(_STEP, encoding="ascii") as file:
            wanted = file.read()
    except FileNotFoundError:
        return
    with open(f"{_STEP}.seen", "a", encoding="ascii") as file:
        file.write("".join(f"{step}\n" for step in steps))
    if wanted in steps:
        ends_at = time.monotonic() + WAIT_S
        while not os.path.exists(f"{_STEP}.go") and time.monotonic() < ends_at:
            time.sleep(0.01)
        if wanted.endswith(" done"):
            os.rename(arguments[0], arguments[1])
        os.unlink(_STEP)
        os.kill(os.getpid(), signal.SIGKILL)


if _STEP:
    sys.addaudithook(_watch)
