"""A request's body: scanned once at most, and changed by names, as if each change were the only one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.http import request_body
from ichat.http.json_body import PARSED_BYTES_MAX, members_of
from ichat.http.multipart import read_form
from ichat.http.request_body import NO_BODY, form_body, read_json_body

NAMES = st.sampled_from(["model", "a", "b", "c", "d"])
EDITS = st.lists(st.tuples(st.dictionaries(NAMES, st.integers()), st.sets(NAMES)), max_size=4)
PAD = "x" * PARSED_BYTES_MAX


@pytest.fixture
def scans(monkeypatch):
    """Count how often a body is scanned."""
    found = []

    async def counted(data):
        found.append(len(data))
        return await members_of(data)

    monkeypatch.setattr(request_body, "members_of", counted)
    return found


def written(values):
    return {name: json.dumps(value).encode() for name, value in values.items()}


@given(st.dictionaries(NAMES, st.integers(), min_size=1), EDITS, st.booleans())
async def test_edits_add_up(members, edits, is_large):
    """The body is the edited object, its names are in the order of its bytes, and its values are what is there."""
    members = {**members, "pad": PAD} if is_large else members
    data = json.dumps(members).encode()
    body, read = await read_json_body(data, ())
    assert list(read) == list(members)
    expected = members
    for values, drop in edits:
        drop = {name for name in drop if name in expected}
        body = await body.edited(written(values), drop)
        expected = {name: value for name, value in {**expected, **values}.items() if name not in drop}
        assert json.loads(body.data) == expected
        assert list(json.loads(body.data)) == list(body.names)
        assert dict(await body.values(expected)) == written(expected)
    assert body.original.data is data
    assert list(body.original.names) == list(members)


async def test_a_body_is_scanned_once(scans):
    """However often it is changed or asked; a small body that gets another model is only searched."""
    small, _ = await read_json_body(b'{"model":"m","n":1,"user":"u"}', ())
    fitted = await small.edited({"model": b'"a"', "top_k": b"1"})
    assert (fitted.data, scans) == (b'{"top_k":1,"model":"a","n":1,"user":"u"}', [])
    assert await fitted.values(("n", "top_k")) == [("top_k", b"1"), ("n", b"1")]
    dropped = await fitted.edited({}, ("n",))
    assert (await dropped.edited({"user": b'"v"'})).data == b'{"top_k":1,"model":"a","user":"v"}'
    assert (await fitted.original.edited({"user": b"null"})).data == b'{"model":"m","n":1,"user":null}'
    assert len(scans) == 1
    large, _ = await read_json_body(json.dumps({"model": "m", "n": 1, "pad": PAD}).encode(), ())
    for name in ("n", "pad"):
        large = await large.edited({"model": b'"b"'}, (name,))
    assert (json.loads(large.data), len(scans)) == ({"model": "b"}, 2)


async def test_members_that_the_gateway_set_are_known_from_the_clients():
    """Also where the client has sent the same name; what is dropped later was not set."""
    body, _ = await read_json_body(b'{"model":"m","priority":1,"n":1}', ())
    body = await body.edited({"priority": b"2", "seed": b"3"})
    assert [name for name in body.names if body.has_set(name)] == ["seed", "priority"]
    assert not (await body.edited({}, ("priority",))).has_set("priority")


async def test_all_may_go_but_what_is_new():
    """The comma goes with the members that it stood before."""
    body, _ = await read_json_body(b'{ "a" : 1, "b":2 }', ())
    assert (await body.edited({"c": b"3"}, ("a", "b"))).data == b'{ "c":3 }'
    assert (await body.edited({}, ("a", "b"))).data == b"{  }"


async def test_a_form_is_read_once_and_changed_the_same_way(scans):
    """Its fields were found when it was read; values are text, and names may be there twice."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    fields = ((b"model", b"m"), (b"a", b"1"), (b"a", b"2"))
    form = await read_form(b"".join(part % one for one in fields) + b"--b--\r\n", b"multipart/form-data; boundary=b")
    body = form_body(form.body, form.fields)
    assert (body.is_form, body.names) == (True, ["model", "a", "a"])
    assert await body.values(("a",)) == [("a", b"1"), ("a", b"2")]
    given = body.written({"language": b'"en"', "table": b"{}", "t": b"0.5"})
    assert given == {"language": b"en", "t": b"0.5"}
    body = await (await body.edited({**given, "model": body.text("x")})).edited({"t": b"1"}, ("a",))
    expected = ((b"language", b"en"), (b"t", b"1"), (b"model", b"x"))
    assert (body.data, scans) == (b"".join(part % one for one in expected) + b"--b--\r\n", [])
    assert list(body.names) == ["language", "t", "model"]


def test_a_freed_body_is_empty():
    """Nothing is kept in its place."""
    assert (NO_BODY.data, NO_BODY.names, repr(NO_BODY)) == (b"", (), "<RequestBody 0 bytes, 0 changes>")
