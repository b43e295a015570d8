"""The file with the orders for workers on other machines: for the gateway's user alone, as it has keys and variables.

It is replaced as a whole, or not at all, and is on the disk before a code or a key is given out.
"""

import json

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.fleet.orders import Orders, RemoteOrder
from ichat.security.key_file import replace_private_file

VERSION = 1


def load_orders(path: str) -> Orders:
    """Return the orders in a file; none where there is no file. Raises Exit 69 for a file that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if found["version"] != VERSION:
            raise ValueError(f"it is of version {found['version']}, not {VERSION}")
        orders = cattrs.structure(found["orders"], list[RemoteOrder])
        return Orders({one.launch: one for one in orders}, int(found["newest"]))
    except FileNotFoundError:
        return Orders()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, BaseValidationError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise Exit(
            EXIT_UNAVAILABLE,
            f"The orders of workers on other machines cannot be read from {path} ({why}). Put a copy of the file in its"
            " place, or remove it: then these workers are not known any more.",
        ) from error


def save_orders(path: str, orders: Orders) -> None:
    """Write all of them; it blocks until the disk has them. Raises OSError."""
    kept = [attrs.asdict(one) for one in orders.by_launch.values()]
    replace_private_file(path, [json.dumps({"version": VERSION, "newest": orders.newest, "orders": kept})])
