"""Ordering workers on other machines from the command line, and the list of orders."""

import argparse
import shlex
import time

from ichat.cli.client import Api
from ichat.cli.json_values import Json, objects_of
from ichat.cli.launch import add_spec_flags, name_of, spec_of
from ichat.cli.screen import NONE, Screen, duration, note, one_line

ORDERS = "/v1/admin/orders"


def add_order_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `order`: those that describe a worker, and its own."""
    add_spec_flags(usage)
    usage.add_argument("--worker-id", metavar="ID", help="replace the worker of this earlier order; else a new worker")
    usage.add_argument("--valid-s", type=float, metavar="S", help="how long the line can be used (3600)")


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
    words = ["python3", "ichat.pyz", "worker", "--order", one_line(made.get("code")), "--gateway-address", address]
    screen.line(shlex.join(words))
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
