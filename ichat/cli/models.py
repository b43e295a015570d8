"""Loading, unloading, sleep and wake of models that are loaded on demand, from the command line."""

import argparse
import contextlib
from collections.abc import Callable

from ichat.cli.client import Api, JsonReply, RequestRefused, Unreachable
from ichat.cli.explain import ROUTE, sentence_of_load
from ichat.cli.json_values import Json, object_of, objects_of
from ichat.cli.screen import Screen, Spinner, duration, note, one_line
from ichat.cli.stop import DRAIN_S, STOP_MORE_S, draining, in_background

LOAD_S = 2 * 3600.0
"""The longest wait for a load, in seconds: the gateway answers earlier, by its own timeouts."""
_GOES_ON = {"load": "loading", "unload": "being unloaded", "sleep": "going to sleep", "wake": "waking"}


def add_model_flags(usage: argparse.ArgumentParser) -> None:
    """Add the arguments of `load`, `sleep` and `wake`."""
    usage.add_argument("model", metavar="MODEL", help="its name, as `models` has it")


def add_unload_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `unload`."""
    add_model_flags(usage)
    add_drain_flag(usage)


def add_drain_flag(usage: argparse.ArgumentParser) -> None:
    """Add the time for which requests may continue before their worker ends."""
    usage.add_argument(
        "--drain-s", type=_seconds, metavar="S", help="the time that its requests may still have; 0: none"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 1e9:
        raise argparse.ArgumentTypeError("must be from 0 to 1e9")
    return seconds


def load(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Load a model, and first show the workers that it evicts."""
    if (found := _load_view(api, args.model)) is not None:
        note(sentence_of_load(found))
    return _change(api, screen, args, "load", LOAD_S)


def unload(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Unload a model."""
    drain_s = DRAIN_S if args.drain_s is None else args.drain_s
    return _change(api, screen, args, "unload", drain_s + STOP_MORE_S)


def sleep(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Put the worker of a model to sleep."""
    return _change(api, screen, args, "sleep", DRAIN_S + STOP_MORE_S)


def wake(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Wake the worker of a model."""
    return _change(api, screen, args, "wake", LOAD_S)


def _load_view(api: Api, model: str) -> Json | None:
    """Return the load that the model would need; None if it is loaded, or the gateway does not say."""
    try:
        return object_of(api.call("POST", ROUTE, body={"model": model}).value.get("load")) or None
    except RequestRefused:
        return None  # the request that follows says why


def _change(api: Api, screen: Screen, args: argparse.Namespace, verb: str, answer_s: float) -> int:
    """Make the gateway do this with a model, and show its workers' progress until it is done."""
    drain_s = getattr(args, "drain_s", None)
    params = {} if drain_s is None else {"drain_s": f"{drain_s:g}"}
    path, body = f"/v1/admin/models/{verb}", {"model": args.model}
    outcome = in_background(api, lambda: api.call("POST", path, params=params, body=body, answer_s=answer_s))
    try:
        answer = _wait(api, args.model, outcome)
    except KeyboardInterrupt:
        note(f"Not waiting any longer; the model {one_line(args.model)} goes on {_GOES_ON[verb]}.")
        raise
    if args.json:
        screen.line(answer.text.rstrip("\n"))
    else:
        shown = [answer.value.get(name) for name in ("worker_id", "state")]
        screen.line(f"{' '.join(map(one_line, shown))} after {duration(answer.value.get('seconds'))}")
    return 0


def _wait(api: Api, model: str, outcome: Callable[[], JsonReply | None]) -> JsonReply:
    """Return the answer once it has arrived. Raises Exit if the gateway refuses."""
    with Spinner() as progress:
        while (answer := outcome()) is None:
            with contextlib.suppress(RequestRefused, Unreachable):
                workers = objects_of(api.call("GET", "/v1/admin/workers", params={"model": model}).value.get("data"))
                progress.show("; ".join(map(draining, workers)))
    return answer
