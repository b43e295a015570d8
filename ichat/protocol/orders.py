"""Messages about workers on other machines: orders, fetched once with a code, and the reports of their ends.

The gateway makes an order and its code. The guard on the other machine (`roles/guard.py`) fetches the order with the
code, and gets a key that counts for this worker and this launch alone.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.checks import is_worker_id
from ichat.config.ray import ports_in
from ichat.config.strict import Between, checked, problems_of, section_hook, strict_converter
from ichat.protocol.field_checks import FAILURE_CHARACTERS_MAX, are_args, at_most, is_name, printable

ORDER_PATH = b"/v1/workers/order"
END_PATH = b"/v1/workers/end"
LINES_MAX = 1000
"""The last lines of a worker's output in a report of its end."""
LINE_CHARACTERS_MAX = 2000
REPORT_BYTES_MAX = 4 * 1024 * 1024
"""The largest body of a request for an order, or of a report of an end."""
_WHY_CHARACTERS_MAX = 200
_BOUNDS_MAX = 64
_is_sentence = printable(FAILURE_CHARACTERS_MAX)


def are_ports(value: str) -> None:
    """Raise ValueError unless this is a range of ports, or empty."""
    if value:
        ports_in(value)


def _is_name_or_empty(value: str) -> None:
    if value:
        is_name(value)


def shown_line(text: str) -> str:
    """Return a line of output as a report may have it."""
    return text[:LINE_CHARACTERS_MAX]


def _are_lines(lines: list[str]) -> None:
    at_most(LINES_MAX, "lines")(lines)
    if any(len(line) > LINE_CHARACTERS_MAX for line in lines):
        raise ValueError(f"must have at most {LINE_CHARACTERS_MAX} characters in each line")


@attrs.frozen
class OrderRequest:
    """Asks for an order."""

    code: str = checked(is_name)
    """The order's code, as `ichat.pyz order` prints it."""
    start_id: str = checked(is_name)
    """Made at random by the process that asks: for a minute it gets the same answer again; others are refused."""


@attrs.frozen
class WorkerOrder:
    """An order as it is answered: everything by which a worker is started."""

    worker_id: str = checked(is_worker_id)
    launch: int = checked(Between(0, 2**63))
    """The number of the launch: higher than that of any earlier order of this gateway."""
    key: str = checked(is_name)
    """The worker's key, in place of the workers' token."""
    worker: dict[str, Any] = checked(are_args)
    """The keys of `[[managed_workers]]`, without those with the default's value."""
    limits: dict[str, int] = checked(at_most(_BOUNDS_MAX, "limits"))
    """The gateway's bounds on requests, by their names in `[limits]`."""
    timeouts: dict[str, float] = checked(at_most(_BOUNDS_MAX, "timeouts"))
    """The gateway's bounds on waits, by their names in `[timeouts]`."""
    address: str = checked(_is_name_or_empty, "")
    """The machine's own address, by which others reach the worker; "": the address towards the gateway."""
    ports: str = checked(are_ports, "")
    """The range of ports on which the worker may listen, such as "20000-20999"; "": the port in its table, or any."""
    ends_with_parent: bool = False
    """Whether the worker ends with the program that has started its guard, also if that program ignores hang-ups."""


@attrs.frozen
class LaunchEnd:
    """The end of a launch, as its guard reports it."""

    worker_id: str = checked(is_worker_id)
    launch: int = checked(Between(0, 2**63))
    why: str = checked(printable(_WHY_CHARACTERS_MAX))
    """In a few words, for use after the worker's name."""
    is_failure: bool = False
    """Whether neither the gateway nor an operator has asked for this end."""
    exit_code: int | None = checked(Between(0, 255), None)
    signal: str | None = checked(printable(_WHY_CHARACTERS_MAX), None)
    oom_killed: bool = False
    """Whether the kernel ended it for lack of memory."""
    cause: str = checked(_is_sentence, "")
    """In a sentence, if it is known."""
    last_lines: list[str] = checked(_are_lines, attrs.Factory(list[str]), {"maxItems": LINES_MAX})


_Kind = TypeVar("_Kind", OrderRequest, WorkerOrder, LaunchEnd)
_converter = strict_converter(forbid_extra_keys=False)


def _reader_of(kind: type[_Kind], what: str) -> Callable[[object], _Kind]:
    structure = section_hook(kind, _converter)

    def read(body: object) -> _Kind:
        try:
            return structure(body, kind)
        except BaseValidationError as error:
            raise errors.bad_request(f"This is not {what}: {'; '.join(problems_of(error))}.") from error
        except ValueError as error:
            raise errors.bad_request(f"This is not {what}: {error}.") from error

    return read


parse_order_request = _reader_of(OrderRequest, "a request for an order")
"""Return the request in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
parse_order = _reader_of(WorkerOrder, "an order")
"""Return the order in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
parse_end = _reader_of(LaunchEnd, "a report of a worker's end")
"""Return the report in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
