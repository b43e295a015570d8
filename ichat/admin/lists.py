"""Long responses of the control plane: the list of workers, in pages, and its JSON written piece by piece.

A piece is made in a few milliseconds. Other tasks get their turn before each piece, so that no stream waits for a
list, regardless of the number of workers.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import attrs
import trio
from typing_extensions import Self

from ichat.errors import bad_request
from ichat.fleet.views import describe, summarize
from ichat.fleet.worker_record import WorkerRecord
from ichat.fleet.worker_table import WorkerTable
from ichat.hardware.machines import MachineView
from ichat.observability.fleet_metrics import STATES
from ichat.observability.logs.stream import read_flag, read_parameters
from ichat.protocol.json_text import encoder
from ichat.proxy.finished_requests import FinishedQuery

PIECE_BYTES = 64 * 1024
"""A piece ends with the part that brings it to this length."""
PIECE_PARTS_MAX = 64
_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")
_Result = TypeVar("_Result")
_KNOWN = ("full", "limit", "after", "model", "state")


def _plain(value: Any) -> Mapping[str, Any]:
    return value.describe() if isinstance(value, MachineView) else attrs.asdict(value, recurse=False)


to_json = encoder(_plain)
"""Return a value of JSON types and of views as JSON."""


class Pieces:
    """A body that is made piece by piece from `parts`, with a turn for other tasks before each piece."""

    def __init__(self, parts: Iterable[str]) -> None:
        """`parts` are short; an empty part is work without a text."""
        self._parts = iter(parts)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while True:
            await trio.lowlevel.checkpoint()
            piece = list[str]()
            length, count = 0, 0
            for part in self._parts:
                piece.append(part)
                length, count = length + len(part), count + 1
                if length >= PIECE_BYTES or count == PIECE_PARTS_MAX:
                    break
            if not piece:
                raise StopAsyncIteration
            if length:
                return "".join(piece).encode(errors="replace")


async def in_turns(steps: Generator[None, None, _Result]) -> _Result:
    """Return the result of steps, with a turn for other tasks after each of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await trio.lowlevel.checkpoint()


def joined(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with commas between them; an empty text is only a turn for other tasks."""
    comma = ""
    for text in texts:
        yield text and comma + text
        comma = ", " if text else comma


def with_long_list(value: "attrs.AttrsInstance", name: str, items: Iterable[object]) -> Iterator[str]:
    """Return a view in parts, with these items in its field of this name."""
    short = {key: one for key, one in attrs.asdict(value, recurse=False).items() if key != name}
    yield f'{to_json(short)[:-1]}, "{name}": ['
    yield from joined(map(to_json, items))
    yield "]}"


@attrs.frozen
class WorkerQuery:
    """The query of a request for the list of workers."""

    full: bool = False
    """Whether each worker has everything that is known of it, rather than a summary."""
    limit: int | None = None
    """The most workers in the answer; None: all."""
    after: str = ""
    """Only workers with ids after this id."""
    model: str | None = None
    """Only workers that serve this model, or will."""
    state: str | None = None


def read_worker_query(query: str) -> WorkerQuery:
    """Read the query of a target (`limit=100&after=w-7`). Raises ApiError 400."""
    values = read_parameters(query, _KNOWN)
    limit, state = values.get("limit"), values.get("state")
    _check_limit(limit, "workers")
    if state is not None and state not in STATES:
        raise bad_request(f"state must be one of {', '.join(sorted(STATES))}, not {state!r}.", param="state")
    return WorkerQuery(
        full=read_flag(values, "full", default=False),
        limit=None if limit is None else int(limit),
        after=values.get("after", ""),
        model=values.get("model"),
        state=state,
    )


def read_finished_query(query: str) -> FinishedQuery:
    """Read the query of a target (`limit=20&failed=1`). Raises ApiError 400."""
    values = read_parameters(query, ("limit", "id", "model", "key", "worker", "failed"))
    limit = values.get("limit", "100")
    _check_limit(limit, "requests")
    return FinishedQuery(
        limit=int(limit),
        id=values.get("id"),
        model=values.get("model"),
        key=values.get("key"),
        worker=values.get("worker"),
        failed=read_flag(values, "failed", default=False),
    )


def _check_limit(limit: str | None, noun: str) -> None:
    if limit is not None and not _NUMBER.fullmatch(limit):
        raise bad_request(f"limit must be a number of {noun} from 1 on, not {limit!r}.", param="limit")


def worker_parts(table: WorkerTable, query: WorkerQuery) -> Iterator[str]:
    """Return the list of workers in parts, in the order of their ids, so that a page can begin after any id."""
    yield '{"object": "list", "data": ['
    shown, last_id, has_more = 0, None, False
    for worker in sorted(table, key=lambda worker: worker.id):
        if worker.id <= query.after:
            continue
        if table.get(worker.id) is not worker or not _is_wanted(table, worker, query):
            yield ""
            continue
        if shown == query.limit:
            has_more = True
            break
        yield (", " if shown else "") + to_json(describe(table, worker) if query.full else summarize(table, worker))
        shown, last_id = shown + 1, worker.id
    yield f'], "has_more": {to_json(has_more)}, "last_id": {to_json(last_id)}}}'


def _is_wanted(table: WorkerTable, worker: WorkerRecord, query: WorkerQuery) -> bool:
    if query.model is not None and not worker.serves(query.model):
        return False
    return query.state is None or table.state(worker) == query.state
