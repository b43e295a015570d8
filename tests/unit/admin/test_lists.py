"""The list of workers: its pages, its filters, and the pieces that its JSON is written in."""

import json

import pytest
import trio

from ichat.admin.lists import PIECE_BYTES, PIECE_PARTS_MAX, Pieces, WorkerQuery, read_worker_query, worker_parts
from ichat.errors import ApiError
from ichat.fleet.fleet import Fleet
from ichat.fleet.views import describe
from ichat.protocol.messages import Heartbeat

MANY = 1000


@pytest.fixture
def fleet():
    return Fleet({}, trio.current_time, max_in_flight=5)


def beat(fleet, worker_id, model="m", state="ready", args=None):
    fleet.registry.record_heartbeat(
        Heartbeat(worker_id=worker_id, model_name=model, host="h", port=1, state=state, args=args or {}, backend="vllm")
    )


def listed(fleet, query=""):
    """Return the list of workers as a client gets it."""
    return json.loads("".join(worker_parts(fleet.table, read_worker_query(query))))


async def turns_beside(pieces):
    """Return the pieces, and how often another task had its turn while they were made."""
    turns, found = 0, list[bytes]()

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        found += [piece async for piece in pieces]
        nursery.cancel_scope.cancel()
    return found, turns


async def test_pages_go_through_all_workers_once(fleet):
    """Pages have the order of the ids, so that workers that come or go between two of them repeat and hide none."""
    for number in (3, 1, 4, 0, 2):
        beat(fleet, f"w{number}")
    seen, page = [], listed(fleet, "limit=2")
    while page["has_more"]:
        seen += page["data"]
        fleet.table.remove(fleet.table.get(page["last_id"]))
        beat(fleet, "a")
        page = listed(fleet, f"limit=2&after={page['last_id']}")
    seen += page["data"]
    assert [one["worker_id"] for one in seen] == ["w0", "w1", "w2", "w3", "w4"]
    assert listed(fleet, "after=z") == {"object": "list", "data": [], "has_more": False, "last_id": None}
    assert listed(fleet, "limit=4")["has_more"] is False


async def test_filters_are_of_the_model_and_the_state(fleet):
    """What is left out by a filter counts for no page."""
    beat(fleet, "a", state="loading")
    beat(fleet, "b", model="n")
    beat(fleet, "c")
    beat(fleet, "d")
    assert [one["worker_id"] for one in listed(fleet, "state=ready&model=m")["data"]] == ["c", "d"]
    page = listed(fleet, "model=m&state=ready&limit=1")
    assert (page["has_more"], page["last_id"]) == (True, "c")
    assert listed(fleet, "model=m&state=loading&limit=1")["has_more"] is False


async def test_a_summary_has_no_arguments(fleet, mock_clock):
    """A summary is short; `full` is what the route of one worker says."""
    beat(fleet, "a", args={"name": "value" * 1000})
    assert len("".join(worker_parts(fleet.table, WorkerQuery()))) < 1000
    [worker] = listed(fleet, "full=1")["data"]
    assert worker == json.loads(json.dumps(describe(fleet.table, fleet.table.get("a")), default=vars))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limit=0", "limit must be a number of workers from 1 on, not '0'."),
        ("limit=-1", "limit must be a number of workers"),
        ("limit=1e3", "limit must be a number of workers"),
        ("state=well", "state must be one of asleep, broken, cold, draining, "),
        ("full=perhaps", "full must be true or false, not 'perhaps'."),
        ("page=2", "There is no parameter 'page' here; there are full, limit, after, model, state."),
        ("limit=1&limit=2", "limit is given twice."),
    ],
)
def test_an_invalid_query_is_refused(query, words):
    with pytest.raises(ApiError) as caught:
        read_worker_query(query)
    assert caught.value.status == 400
    assert words in str(caught.value)


async def test_other_tasks_have_a_turn_before_each_piece(fleet):
    """However many workers there are, and however few of them are wanted, no piece of work is longer than another."""
    for number in range(MANY):
        beat(fleet, f"w{number}")
    whole = "".join(worker_parts(fleet.table, WorkerQuery())).encode()
    pieces, turns = await turns_beside(Pieces(worker_parts(fleet.table, WorkerQuery())))
    assert len(b"".join(pieces)) == pytest.approx(len(whole), rel=0.01)
    assert turns >= len(pieces) >= MANY // PIECE_PARTS_MAX
    _, turns = await turns_beside(Pieces(worker_parts(fleet.table, WorkerQuery(state="failed"))))
    assert turns >= MANY // PIECE_PARTS_MAX


async def test_a_piece_is_not_much_longer_than_its_bound(fleet):
    """Workers with long arguments make pieces of few workers."""
    args = {f"argument_{number}": "value " * 8 for number in range(300)}
    for number in range(20):
        beat(fleet, f"w{number}", args=args)
    pieces = [piece async for piece in Pieces(worker_parts(fleet.table, WorkerQuery(full=True)))]
    longest = max(map(len, pieces))
    assert PIECE_BYTES <= longest <= PIECE_BYTES + 50_000
