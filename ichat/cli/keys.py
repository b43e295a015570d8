"""Clients' keys from the command line: the list, and keys that are made, changed, rotated and withdrawn."""

import argparse
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping

from ichat.cli.client import Api
from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.screen import NONE, Screen, duration, note, one_line
from ichat.errors import EXIT_USAGE, Exit

KEYS = "/v1/admin/keys"
ACTIONS = ("list", "make", "change", "rotate", "withdraw")
SYNONYMS = {"ls": "list", "create": "make", "delete": "withdraw"}
"""Other words for them."""
NEVER = "never"
_NAME_HELP = "the key's name: letters, digits and any of . _ : @ -"
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_WHOLE = ("max_in_flight", "requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month")
_BUDGET = "budget_per_month"
_SHORT = {
    "max_in_flight": "at once",
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
    _BUDGET: "budget/month",
}
"""The limits, in the words of the table."""


def add_key_flags(usage: argparse.ArgumentParser) -> None:
    """Add the arguments of `keys`."""
    actions = (*ACTIONS, *SYNONYMS)
    usage.add_argument("action", metavar="ACTION", nargs="?", choices=actions, help=", ".join(ACTIONS))
    usage.add_argument("name", metavar="NAME", nargs="?", help=_NAME_HELP)
    _add_terms(usage)
    _add_overlap(usage, "of rotate: ")


def add_action_flags(usage: argparse.ArgumentParser, action: str) -> None:
    """Add the arguments of `keys ACTION`."""
    if action != "list":
        usage.add_argument("name", metavar="NAME", help=_NAME_HELP)
    if action in ("make", "change"):
        _add_terms(usage)
    elif action == "rotate":
        _add_overlap(usage)


def _add_terms(usage: argparse.ArgumentParser) -> None:
    terms = usage.add_argument_group("of a key that is made or changed")
    terms.add_argument("--models", metavar="NAME,…", help="the models that it may use; left out: all")
    terms.add_argument(
        "--expires-in",
        type=_seconds,
        default=argparse.SUPPRESS,
        metavar="TIME",
        help=f"such as 30d, 12h, 90m or 45s; `{NEVER}`: it does not",
    )
    for name in _WHOLE:
        terms.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{_SHORT[name]}, at most")
    terms.add_argument("--budget-per-month", type=float, metavar="X", help="what its requests may cost, by [prices]")
    terms.add_argument("--metrics", action="store_true", default=None, help="let it read /metrics")


def _add_overlap(usage: argparse.ArgumentParser, of: str = "") -> None:
    words = f"{of}for how long the old secret is accepted (24h)"
    usage.add_argument("--overlap", type=_overlap, metavar="TIME", help=words)


def _seconds(text: str) -> float | None:
    if text == NEVER:
        return None
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be like 30d, 12h, 90m or 45s, or {NEVER}")
    return float(found[1]) * _UNIT_S[found[2]]


def _overlap(text: str) -> float:
    if text == NEVER:
        raise argparse.ArgumentTypeError("must be like 7d, 24h or 0s")
    return _seconds(text) or 0.0


def run_keys(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """List keys, or make, change, rotate or withdraw a key. Raises Exit 64 for a wrong command line."""
    action = SYNONYMS.get(args.action, args.action) or "list"
    terms = _terms(args)
    is_list = action == "list"
    refusals = (
        (is_list is (args.name is not None), f"NAME is {'for the other actions' if is_list else 'needed'}"),
        (terms and action not in ("make", "change"), "the flags of a key are for make and change"),
        (args.overlap is not None and action != "rotate", "--overlap is for rotate"),
    )
    for is_wrong, sentence in refusals:
        if is_wrong:
            raise Exit(EXIT_USAGE, f"ichat.pyz keys {action}: {sentence}.")
    overlap = {} if args.overlap is None else {"overlap_s": args.overlap}
    bodies: dict[str, Json] = {"make": {"name": args.name, **terms}, "change": terms, "rotate": overlap}
    method, below, show = _ACTIONS[action]
    path = KEYS + below.format(urllib.parse.quote(args.name or "", safe=""))
    answer = api.call(method, path, body=bodies.get(action))
    if args.json:
        screen.line(answer.text.rstrip("\n"))
    else:
        show(screen, answer.value)
    return 0


def _terms(args: argparse.Namespace) -> Json:
    """Return a key's terms by the flags."""
    terms: Json = {name: getattr(args, name) for name in (*_WHOLE, _BUDGET, "metrics")}
    terms["models"] = None if args.models is None else [name for name in args.models.split(",") if name]
    given = {name: value for name, value in terms.items() if value is not None}
    return given | ({"expires_in_s": args.expires_in} if hasattr(args, "expires_in") else {})


def _show_list(screen: Screen, answer: Json) -> None:
    keys = objects_of(answer.get("keys"))
    if not keys and screen.is_terminal:
        closed = answer.get("keys_needed")
        screen.line("There is no key: every client is refused." if closed else "No client needs a key.")
        return
    columns = ("key", "from", "state", "models", "expires in", "limits", "in flight", "last used")
    screen.table(columns, map(_row, keys), ("last used", "in flight", "from", "limits"))


def _row(key: Json) -> list[object]:
    now, expires_at, used_at = time.time(), key.get("expires_at"), key.get("last_used_at")
    limits = object_of(key.get("limits"))
    return [
        key.get("name"),
        key.get("source"),
        key.get("state"),
        "all" if key.get("models") is None else ",".join(map(str, list_of(key.get("models")))) or "none",
        duration(expires_at - now) if isinstance(expires_at, int | float) and expires_at > now else NONE,
        ", ".join(f"{limits[name]:g} {words}" for name, words in _SHORT.items() if limits.get(name) is not None),
        object_of(key.get("usage_now")).get("in_flight"),
        duration(max(0.0, now - used_at)) + " ago" if isinstance(used_at, int | float) else NONE,
    ]


def _show_made(screen: Screen, made: Json) -> None:
    screen.line(one_line(made.get("key")))
    note(f"The key {one_line(made.get('name'))} is stored nowhere: give it to its owner now. The gateway has its hash.")


def _show_changed(screen: Screen, changed: Json) -> None:
    _show_list(screen, {"keys": [changed]})


def _show_rotated(screen: Screen, made: Json) -> None:
    _show_made(screen, made)
    until = made.get("old_secret_until")
    rest_s = max(0.0, round(until - time.time())) if isinstance(until, int | float) else 0.0
    note(
        f"The old secret is accepted for another {duration(rest_s)}."
        if rest_s
        else "The old secret is refused from now on."
    )


def _show_withdrawn(screen: Screen, withdrawn: Json) -> None:
    screen.line(f"{one_line(withdrawn.get('name'))} withdrawn")
    if withdrawn.get("keys_left") == 0:
        note("No key is left: every client is refused until a key is made.")


_ACTIONS: Mapping[str, tuple[str, str, Callable[[Screen, Json], None]]] = {
    "list": ("GET", "", _show_list),
    "make": ("POST", "", _show_made),
    "change": ("PATCH", "/{}", _show_changed),
    "rotate": ("POST", "/{}/rotate", _show_rotated),
    "withdraw": ("DELETE", "/{}", _show_withdrawn),
}
"""The method, the path below KEYS, and what shows the answer."""
