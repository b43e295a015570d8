"""Usage and its cost, by key, model, endpoint or time: `usage`."""

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import Any

from ichat.cli.client import Api, JsonReply
from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.screen import Screen, duration, note

ALL = "/v1/admin/usage"
OWN = "/v1/usage"
_COUNTED = (
    "requests", "errors", "input_tokens", "output_tokens", "cached_tokens", "estimated_tokens", "busy_s", "cost",
)  # fmt: skip
_COLUMNS = ("requests", "errors", "tokens in", "tokens out", "cached", "estimated", "busy", "cost")
_CAN_GO = ("estimated", "busy", "cached", "errors")
_ANSWER_S = 60.0


def add_usage_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `usage`."""
    usage.add_argument(
        "--by",
        metavar="NAMES",
        help="the columns of a row, with commas: key, model, endpoint, minute, hour, day, month",
    )
    usage.add_argument("--from", dest="since", metavar="TIME", help="2026-11-23 or 2026-11-23T04:00 (UTC); this month")
    usage.add_argument("--to", dest="until", metavar="TIME", help="the same; now")
    usage.add_argument("--key", metavar="NAME", help="only of this key")
    usage.add_argument("--model", metavar="MODEL", help="only of this model")
    usage.add_argument("--own", action="store_true", help="of the key in ICHAT_API_KEY, and what its limits leave")
    usage.add_argument("--csv", action="store_true", help="write CSV, for a spreadsheet")


def ask(api: Api, args: argparse.Namespace) -> JsonReply:
    """Ask the gateway for the usage that the flags select."""
    given = {"by": args.by, "from": args.since, "to": args.until, "model": args.model, "key": args.key}
    params = {name: value for name, value in given.items() if value is not None}
    return api.call("GET", OWN if args.own else ALL, params=params, answer_s=_ANSWER_S)


def show(screen: Screen, answer: Json, *, as_csv: bool) -> None:
    """Show each row, the sum of all, and the rest of each limit."""
    by, rows = [str(name) for name in list_of(answer.get("by"))], objects_of(answer.get("rows"))
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow((*by, *_COUNTED))
        writer.writerows([row.get(name) for name in (*by, *_COUNTED)] for row in rows)
    elif not rows and screen.is_terminal:
        screen.line(f"Nothing was used from {answer.get('from')} to {answer.get('to')}.")
    else:
        shown = [[*(row.get(name) for name in by), *_cells(row)] for row in rows]
        if by and len(rows) > 1 and screen.is_terminal:
            shown.append(["all", *[""] * (len(by) - 1), *_cells(object_of(answer.get("totals")))])
        screen.table((*by, *_COLUMNS), shown, _CAN_GO)
    if not as_csv:
        _show_limits(screen, objects_of(answer.get("limits")))
    storage = answer.get("storage")
    if storage not in (None, "ok"):
        note(f"This may not be all: {storage}.", "yellow")


def _show_limits(screen: Screen, limits: Sequence[Json]) -> None:
    if limits:
        keys = ("limit", "allowed", "used", "left", "begins_anew")
        rows = [[_number(one.get(key)) for key in keys] for one in limits]
        screen.line("")
        screen.table(("limit", "allowed", "used", "left", "begins anew"), rows)


def _cells(row: Json) -> list[object]:
    cells: list[object] = [_number(row.get(name)) for name in _COUNTED]
    cells[_COUNTED.index("busy_s")] = duration(row.get("busy_s"))
    return cells


def _number(value: Any) -> object:
    """Write a count without a fraction, and an amount of money with six digits at most."""
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
