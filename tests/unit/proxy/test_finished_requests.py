"""The requests that have ended: which are kept, how much memory they need, and what is derived of them."""

import sys

import attrs
import pytest
from support.peers import code_of

from ichat.admin.lists import read_finished_query, to_json
from ichat.config.load import parse
from ichat.errors import ApiError, invalid_api_key
from ichat.http.heads import RequestHead
from ichat.observability.request_record import RequestRecord, UsedTokens
from ichat.proxy.finished_requests import FinishedQuery, FinishedRequests
from ichat.routing.prefix_chain import PrefixChain

ALL = FinishedQuery(1000)


def record(number=0, **more):
    return RequestRecord(**{
        "id": f"req-{number}", "client": "1.2.3.4:5", "method": "POST", "path": "/v1/chat/completions",
        "route": "/v1/chat/completions", "key_name": "team", "model": "m", "status": 200, "error": "", "phase": "",
        "started_at": float(number), "ended_at": number + 0.5, "queued_s": 0.0, "bytes_in": 1000, "bytes_out": 2000,
        "usage": None, "trace_id": "", "worker": "m-0", **more,
    })  # fmt: skip


def kept(*records, kept_max=500):
    found = FinishedRequests(kept_max)
    for one in records:
        found.ended(one)
    return found


def ids(found, query=ALL):
    return [one.id for one in found.select(query)]


def size_of(value, seen):
    """Return the bytes of an object and of everything in it that is not counted yet."""
    if id(value) in seen or value is None or isinstance(value, bool):
        return 0
    seen.add(id(value))
    parts = ()
    if attrs.has(type(value)):
        parts = [getattr(value, one.name) for one in attrs.fields(type(value))]
    elif isinstance(value, PrefixChain):
        parts = [value.digests]
    elif isinstance(value, tuple | list):
        parts = value
    elif hasattr(value, "maxlen"):
        parts = list(value)
    return sys.getsizeof(value) + sum(size_of(part, seen) for part in parts)


async def test_five_hundred_requests_of_hostile_clients_need_at_most_a_megabyte(autojump_clock):
    """Names, paths and methods of any length, in characters of four bytes, are cut; so are prefixes."""
    found, seen = FinishedRequests(500), set()
    for number in range(2000):
        wide = f"{number}" + "\U0001d518" * 10_000
        prefix = PrefixChain(8192, [bytes([number % 256]) * 16 for _ in range(500)])
        found.ended(record(
            id=f"{number:0>128}", client=f"[{number:0>39}]:65535", method=f"{number:M>9999}", path=f"/v1/{number:x>252}",
            model=wide, alias="m" if number % 2 else wide + "\u202e", own_id=f"req-{number:0>24}", prefix=prefix,
            worker=f"w-{number:0>60}", status=1000 + number, trace_id=f"{number:0>32}",
            usage=UsedTokens(10**6 + number, 10**6 + number, 10**6 + number), bytes_in=10**9 + number, chunks=10**6 + number,
            started_at=number + 0.1, ended_at=number + 0.9, answered_at=number + 0.2, first_at=number + 0.3,
            overhead_s=number * 0.001, queued_s=number * 0.01, bytes_out=10**9 + number,
        ))  # fmt: skip
        head = RequestHead(b"GET" * 4000, b"/" + b"%d" % number * 4000, b"1.1", [], 0)
        found.refused(invalid_api_key("wrong"), f"{number:1>128}", f"[{number:1>39}]:1", "", head)
    assert len(ids(found)) == 550
    size = sum(size_of(one, seen) for one in (found._to_models, found._refused))
    assert 200_000 < size <= 1_000_000


async def test_a_name_that_is_short_stays_and_a_long_one_ends_with_an_ellipsis(autojump_clock):
    """Texts that are shorter than the limit are as the client has sent them."""
    one, two = kept(record(model="\u202e模型" * 10), record(1, model="m" * 97)).select(ALL)
    assert (one.model, two.model) == ("m" * 96 + "…", "\u202e模型" * 10)


async def test_only_the_newest_are_kept_and_refusals_replace_no_requests(autojump_clock):
    """Newest first; a reload keeps as many as it says, and 0 keeps none."""
    found = kept(*map(record, range(30)), kept_max=20)
    for number in range(100):
        found.ended(record(100 + number, is_counted=False, status=401, error="invalid_api_key"))
    assert ids(found) == ["req-199", "req-198", *(f"req-{number}" for number in range(29, 9, -1))]
    found.reconfigure(parse("[logs]\nfinished_requests_max = 1\n", "x.toml"))
    assert (ids(found), found.kept_max) == (["req-199", "req-29"], 1)
    found.reconfigure(parse("[logs]\nfinished_requests_max = 0\n", "x.toml"))
    found.ended(record())
    found.ended(record(is_counted=False, status=404, path="/"))
    assert ids(found) == []


@pytest.mark.parametrize("path", ["/v1/admin/requests", "/v1/workers/heartbeat", "/metrics", "/console/x.js"])
async def test_requests_to_the_control_plane_are_not_kept(autojump_clock, path):
    """Neither those that went well nor failures; a preflight of a browser is none either."""
    preflight = record(method="OPTIONS", status=204, is_counted=False)
    assert not ids(kept(preflight, *(record(path=path, is_counted=False, status=status) for status in (200, 401))))


async def test_filters_select_by_id_model_key_worker_and_failure(autojump_clock):
    """A name that stands for models finds its requests; an id is the client's or the gateway's."""
    found = kept(
        record(1, alias="name", own_id="own"), record(2, key_name="", status=404, error="model_not_found", worker=""),
        record(3, error="upstream_broken", model="other"), record(4, status=499, error="client_left", phase="queued"),
    )  # fmt: skip
    expected = {
        "id=own": [1], "id=req-1": [1], "id=nobody": [], "model=name": [1], "model=m": [4, 2, 1], "key=": [2],
        "key=team": [4, 3, 1], "worker=m-0": [4, 3, 1], "failed=1": [4, 3, 2], "failed=1&limit=1": [4], "limit=2": [4, 3],
        "": [4, 3, 2, 1],
    }  # fmt: skip
    got = {query: ids(found, read_finished_query(query)) for query in expected}
    assert got == {query: [f"req-{number}" for number in numbers] for query, numbers in expected.items()}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "failed=maybe", "modle=m", "id=1&id=2"])
def test_a_wrong_query_is_refused(query):
    """400, with the parameter's name."""
    with pytest.raises(ApiError) as refused:
        read_finished_query(query)
    assert (refused.value.status, code_of(refused.value.body())) == (400, "bad_request")
    assert refused.value.param in ("limit", "failed", "modle", "id")


async def test_the_phases_follow_each_other_and_add_up(autojump_clock):
    """Queue, gateway, head, first token and the rest are the whole time; what did not happen is null."""
    whole = record(
        10, queued_s=1.0, overhead_s=0.25, answered_at=12.0, first_at=14.0, ended_at=20.0, chunks=7, passed=(("a", "full"),),
        usage=UsedTokens(9, 7, 4), alias="name",
    )  # fmt: skip
    refused = record(1, status=503, error="model_not_ready", queued_s=0.5)
    cut = record(0, status=499, error="client_left", phase="waiting", overhead_s=0.125)
    one, two, three = kept(cut, refused, whole).select(ALL)
    assert attrs.astuple(one.phases) == (1, 0.25, 0.75, 2, 6)
    assert one.duration_s == 10
    assert attrs.astuple(one.tokens) == (9, 7, 4, False)
    assert [(passed.model, passed.reason) for passed in one.passed] == [("a", "full")]
    assert one.ended_at - one.started_at == pytest.approx(10)
    assert attrs.astuple(two.phases) == (0.5, None, None, None, None)
    assert (two.tokens, two.own_id) == (None, "req-1")
    assert (three.phases.overhead_s, three.phases.head_s, three.phase) == (0.125, None, "waiting")
    assert '"own_id": "req-10"' in to_json(one)
