"""Request bodies: what the scanner sees is what a parser sees, and nothing changes but what was asked for."""

import itertools
import json
import math
import random

import pytest
import trio
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.peers import outcome, turns_during

from ichat.errors import ApiError
from ichat.http import json_body as bodies
from ichat.http.json_body import members_of, rewrite_json, value_of
from ichat.http.multipart import model_in_form
from ichat.http.request_body import read_json_body, read_model_body

SPACE = " \t\n\r"
NAMES = st.sampled_from(["model", "n", "a b", "", 'q"', "\\", "ü", "\ud800", "\U0001f600"]) | st.text(max_size=8)
TRICKY = st.text(st.sampled_from('"\\{}[],:ab\n/u0\ud800') | st.characters(), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
    max_leaves=12,
)
SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


async def read_members(body, wanted):
    return (await read_json_body(body, wanted))[1]


async def model_in_json(body):
    return (await read_model_body(body, {"model"}))[0]


@pytest.fixture(autouse=True, scope="module", params=["tiny windows", "real windows"])
def windows(request):
    """Every invariant holds wherever a window ends."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiny windows":
            patch.setattr(bodies, "_WINDOW_BYTES_MIN", 2)
            patch.setattr(bodies, "_NESTED_BYTES_MAX", 7)
            patch.setattr(bodies, "WINDOW_BYTES_MAX", 5)
        yield


def written(value, rng):
    """Write JSON in one of the ways there are."""

    def space():
        return "".join(rng.choices(SPACE, k=rng.choice([0, 0, 0, 1, 2])))

    def char(c):
        ways = [SHORT[c]] if c in SHORT else []
        if ord(c) < 0x10000:
            ways.append(rng.choice(["\\u%04x", "\\u%04X"]) % ord(c))
        if c not in '"\\' and ord(c) >= 0x20:
            ways += [c] * 4
        return rng.choice(ways)

    def text(value):
        return f'"{"".join(map(char, value))}"'

    def any_(value):
        if isinstance(value, str):
            return text(value)
        if isinstance(value, list):
            return "[" + space() + f"{space()},{space()}".join(map(any_, value)) + space() + "]"
        if isinstance(value, dict):
            return object_(value.items())
        return json.dumps(value)

    def object_(pairs):
        members = [f"{text(name)}{space()}:{space()}{any_(value)}" for name, value in pairs]
        return "{" + space() + f"{space()},{space()}".join(members) + space() + "}"

    return (space() + object_(value) + space()).encode("utf-8", "surrogatepass")


@st.composite
def objects(draw):
    """Make the bytes of a JSON object, perhaps with a name more than once."""
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=6))
    body = written(pairs, random.Random(draw(st.integers(0, 2**32))))
    body = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + body
    return draw(st.sampled_from([bytes, bytearray]))(body)


JUNK = st.sampled_from([b"", *(bytes([byte]) for byte in b'"\\{}[],: 0e\0\xc3\xff')])


def pairs_of(body):
    return json.loads(bytes(body), object_pairs_hook=list)


def gaps(body, members):
    ends = [0, *(member.end for member in members)]
    starts = [*(member.start for member in members), len(body)]
    return [bytes(body[end:start]) for end, start in zip(ends, starts, strict=True)]


def parsed_or_none(body):
    try:
        return json.loads(body, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None


@given(objects())
async def test_members_are_those_that_a_parser_finds(body):
    """However an object is written, its members are the parser's, and between them is nothing but commas and space."""
    members = await members_of(body)
    found = [
        (member.name, json.loads(body[member.value_start : member.end], object_pairs_hook=list)) for member in members
    ]
    assert found == pairs_of(body)
    for member in members:
        assert body[member.start] == ord('"')
        assert value_of(body, member) == json.loads(body[member.value_start : member.end])
        assert body[member.value_start : member.value_start + 1].strip()
        assert body[member.end - 1 : member.end].strip()
    between = b"".join(gaps(body, members)).removeprefix(b"\xef\xbb\xbf").translate(None, SPACE.encode())
    assert between == b"{" + b"," * (len(members) - 1) + b"}"


PIECES = st.sampled_from(["\\\\", '\\"', "\\n", "\\u005c", "\\u0022", "a", "{", "}", "[", "]", ",", ":", "é"])
STRINGS = st.lists(PIECES, max_size=20).map("".join)


@given(st.lists(STRINGS, min_size=5, max_size=5))
async def test_strings_end_where_they_end(texts):
    """Escaped quotes and backslashes, and brackets in strings, never hide where a member ends."""
    a, b, c, d, name = (f'"{text}"' for text in texts)
    values = [a, f"[{b}]", f"[[{a},{b}],{{{c}:[{d}], {a} : {{}}}},{c}]", f"{{{d}:{c}}}", "0"]
    names = ['"a"', name, '"b"', '"c"', '"d"']
    text = ",".join(f"{name}:{value}" for name, value in zip(names, values, strict=True))
    body = f"{{{text}}}".encode()
    members = await members_of(body)
    assert [member.name for member in members] == [json.loads(name) for name in names]
    assert [body[member.value_start : member.end].decode() for member in members] == values


@given(objects(), st.data())
async def test_mutilated_objects_are_refused_unless_they_are_right(body, data):
    """What a parser takes, the scanner takes in the same way; what it refuses is wrong in a value, or refused too."""
    body = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(body) - 1)) if body else 0
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(JUNK)
    body = bytes(body)
    assume(not body[:4].count(0))  # UTF-16 and UTF-32, which json.loads takes as well
    expected = parsed_or_none(body)
    is_object = expected is not None and body.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    members = await outcome(members_of(body))
    if isinstance(members, ApiError):
        assert not is_object
        return
    values = [parsed_or_none(body[member.value_start : member.end]) for member in members]
    if is_object:
        assert [(member.name, value) for member, value in zip(members, values, strict=True)] == expected
    else:
        nulls = [body[member.value_start : member.end] == b"null" for member in members]
        assert any(value is None and not null for value, null in zip(values, nulls, strict=True))


PIECES = st.lists(
    st.sampled_from(['"model"', '"mod\\u0065l"', '"\\u006Dodel"', "model", "a", '\\"', "\\\\", '"', ":", ",", " ", "{", "}", '"n"', '{"', '"}']),
    max_size=12,
).map("".join)  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from(['"model"', '"mod\\u0065l"', '"a"', '"b\\u00e4"']), PIECES, st.booleans()), max_size=4
    ),
    PIECES,
)
async def test_the_model_that_is_found_quickly_is_the_one_that_a_scan_finds(members, model):
    """Or none is found: whatever else looks like it, as a value, within one, or by escapes."""
    written = [
        f"{name}: {json.dumps(text) if is_string else '{' + json.dumps(text) + ':1}'}"
        for name, text, is_string in members
    ]
    body = ("{" + ", ".join([*written, f'"model" :{json.dumps(model)}', *written[:1]]) + "}").encode()
    found = bodies.find_model(body)
    if found is not None:
        assert [found] == [member for member in await members_of(body) if member.name == "model"]


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        (b'{"model": "a"}', True),
        (b'{"x": {"y": "a \\" b"}, "model"\n:\t"a\\"b" }', True),
        (b'{"x": "\\"model\\"", "model":"a"}', True),
        (b'{"x": {"model": 1}, "model":"a"}', False),
        (b'{"x": "model", "model":"a"}', False),
        (b'{"mod\\u0065l": "a", "x": {"model": "b"}}', False),
        (b'{"x": "\\u006f", "model": "a"}', False),
    ],
)
def test_where_a_quick_search_is_enough(body, is_found):
    """A name that stands in one place only, and nothing that could be another way to write it."""
    assert (bodies.find_model(body) is not None) == is_found


@given(st.dictionaries(st.text(max_size=5), st.none() | st.text() | st.integers(), min_size=1, max_size=5), st.data())
async def test_members_are_added_before_the_others(values, data):
    """Whichever is replaced or dropped, as long as one stays; the rest of the body is the same byte for byte."""
    body = json.dumps(values).encode()
    kept, *others = values
    drop = data.draw(st.sets(st.sampled_from(others))) if others else set()
    changed = rewrite_json(body, await members_of(body), {kept: b"[1]"}, drop, before=b'"new member":2,')
    left = {name: value for name, value in values.items() if name not in drop}
    assert json.loads(changed) == {"new member": 2, **left, kept: [1]}


@given(st.binary(max_size=40) | st.text('{}[]":,\\ab1 ', max_size=40).map(str.encode))
async def test_garbage_is_refused_or_an_object(body):
    """No bytes make anything happen but an answer or a 400."""
    for read in (members_of(body), model_in_json(body), model_in_form(body, b"multipart/form-data; boundary=a")):
        await outcome(read)


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"}", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b"{,}", b'{"a" 1}', b'{"a":1 "b":2}',
        b'{"a":1}}', b'{"a":1} x', b'{"a":1}{}', b"{'a':1}", b"{a:1}", b'{"a":tru}', b'{"a":truee}', b'{"a":01}', b'{"a":1.}',
        b'{"a":.5}', b'{"a":+1}', b'{"a":-}', b'{"a":1e}', b'{"a":0x1}', b'{"a":"b}', b'{"a":"b\\"}', b'{"a":[}', b'{"a":[1}',
        b'{"a":{"b":1}', b'{"\xff":1}', b'{"a\n":1}', b'{"\\x":1}', b'{"a":}', b'{"a"::1}', b'{"a":1,,"b":1}', b'{"a":]}',
        b'{"a":1}\0', b"\xa0{}", b"\x0b{}", b'{"a":/**/1}', '{"model":"m"}'.encode("utf-16"), b"x", b"nope",
    ],
)  # fmt: skip
async def test_a_body_that_is_no_json_is_refused(body):
    """A body whose top level is not JSON never gets through."""
    with pytest.raises(ApiError, match=r"is not JSON|must be a JSON object") as caught:
        await members_of(body)
    assert (caught.value.status, caught.value.code) == (400, "bad_request")


@pytest.mark.parametrize("body", [b"[]", b' ["a"]', b'"{}"', b"1", b"-1", b"null", b"true", b"NaN"])
@pytest.mark.parametrize("padding", [0, bodies.PARSED_BYTES_MAX])
async def test_json_that_is_no_object_is_refused(body, padding):
    """JSON that is no object is told so, in bodies of every size."""
    with pytest.raises(ApiError, match="must be a JSON object"):
        await members_of(body)
    with pytest.raises(ApiError, match="must be a JSON object"):
        await model_in_json(b" " * (padding // 2) + body + b" " * (padding // 2 + 1))


@given(objects(), st.sets(NAMES), st.dictionaries(NAMES, VALUES))
@settings(suppress_health_check=[HealthCheck.too_slow])
async def test_rewriting_changes_what_it_should_and_nothing_else(body, drop, replace):
    """A rewritten body parses as the edited pairs, and all its other bytes are those of the old one."""
    members = await members_of(body)
    new = {name: json.dumps(value).encode() for name, value in replace.items()}
    out = rewrite_json(body, members, new, drop)
    assert pairs_of(out) == [
        (name, pairs_of(new[name]) if name in new else value) for name, value in pairs_of(body) if name not in drop
    ]
    after = await members_of(out)
    kept = [index for index, member in enumerate(members) if member.name not in drop]
    for member, index in zip(after, kept, strict=True):
        old = members[index]
        assert out[member.start : member.value_start] == body[old.start : old.value_start]
        if old.name not in new:
            assert out[member.value_start : member.end] == body[old.value_start : old.end]
    before_gaps, after_gaps = gaps(body, members), gaps(out, after)
    if kept:
        assert after_gaps[0] == before_gaps[0]
        assert after_gaps[-1] == before_gaps[-1]
        for gap, (index, following) in zip(after_gaps[1:-1], itertools.pairwise(kept), strict=True):
            assert gap == before_gaps[following if following == index + 1 else index + 1]
    else:
        assert after_gaps == ([before_gaps[0] + before_gaps[-1]] if members else before_gaps)


@given(objects())
async def test_rewriting_nothing_is_the_same_body(body):
    """Values replaced by themselves, or names that are not there, leave every byte as it was."""
    members = await members_of(body)
    assert rewrite_json(body, members, {}, ()) == body
    last = {member.name: bytes(body[member.value_start : member.end]) for member in members}
    if len(last) == len(members):
        assert rewrite_json(body, members, last, ()) == body


@pytest.mark.parametrize(
    ("body", "drop", "expected"),
    [
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "a", b'{ "b": 2 , "c": 3 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "b", b'{ "a": 1 , "c": 3 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "c", b'{ "a": 1 , "b": 2 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "bc", b'{ "a": 1 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "ab", b'{ "c": 3 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "ac", b'{ "b": 2 }'),
        (b'{ "a": 1 , "b": 2 , "c": 3 }', "abc", b"{  }"),
        (b'{"a":1,"b":2,"a":3}', "a", b'{"b":2}'),
        (b"{ }", "a", b"{ }"),
    ],
)
async def test_commas_go_with_what_is_dropped(body, drop, expected):
    """A dropped member takes one comma along."""
    assert rewrite_json(body, await members_of(body), {}, set(drop)) == expected


@pytest.mark.parametrize("size", [0, bodies.PARSED_BYTES_MAX])
@pytest.mark.parametrize(
    ("text", "model"),
    [
        ('"model":"m"', "m"),
        ('"model" : "a\\u00fc\\"/b"', 'aü"/b'),
        ('"model":"first","x":{"model":"inner"},"mod\\u0065l":"last"', "last"),
        ('"model":1,"model":"last"', "last"),
        ('"x":"\\"model\\":\\"no\\"","model":"m"', "m"),
        ('"model":"m","model":null', None),
        ('"model":["m"]', None),
        ('"model":""', None),
        ('"x":{"model":"m"}', None),
    ],
)
async def test_the_model_is_the_last_one_named(text, model, size):
    """Small and large bodies name the same model: the one that a parser would give."""
    body = b'{"pad":"%b",%b}' % (b"x" * size, text.encode())
    assert json.loads(body).get("model") == model or model is None
    if model is not None:
        assert await model_in_json(body) == model
        return
    with pytest.raises(ApiError, match="must name its model") as caught:
        await model_in_json(body)
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize("size", [0, bodies.PARSED_BYTES_MAX])
@pytest.mark.parametrize("end", [b"", b"]", b"}x", b",}", b'"}', b'"model":}'])
async def test_a_broken_body_names_no_model(size, end):
    """A body that is cut short or goes on behind its end is refused, small or large."""
    with pytest.raises(ApiError, match="is not JSON"):
        await model_in_json(b'{"model":"m","pad":"%b"' % (b"x" * size) + end)


@pytest.mark.parametrize("size", [0, bodies.PARSED_BYTES_MAX])
async def test_json_is_utf_8(size):
    """UTF-16 and UTF-32 are refused, small or large, as nothing could be found in them; a byte order mark is no harm."""
    text = f'{{"model":"mü","pad":"{"x" * size}"}}'
    assert await model_in_json(text.encode("utf-8-sig")) == "mü"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        with pytest.raises(ApiError, match="is not JSON"):
            await model_in_json(text.encode(encoding))


async def test_nesting_has_no_depth():
    """A body that is nested a hundred thousand deep is a 400 where it is parsed, and no burden where it is not."""
    deep = b"[" * 100_000 + b"]" * 100_000
    assert await model_in_json(b'{"a":%b,"model":"m"}' % deep) == "m"
    with pytest.raises(ApiError, match="not JSON"):
        await model_in_json(b"[" * bodies.PARSED_BYTES_MAX)
    members = await members_of(b'{"model":%b}' % deep)
    with pytest.raises(ApiError, match="`model`"):
        value_of(b'{"model":%b}' % deep, members[0])


async def test_members_and_their_names_are_bounded():
    """A body with too many members, or too long a name or model, is refused; one at the bound is not."""
    many = [b'"%d":0' % number for number in range(bodies.MEMBERS_MAX + 1)]
    assert len(await members_of(b"{%b}" % b",".join(many[1:]))) == bodies.MEMBERS_MAX
    with pytest.raises(ApiError, match="more than 10000 members"):
        await members_of(b"{%b}" % b",".join(many))
    name = b"n" * (bodies.NAME_BYTES_MAX - 2)
    assert len(await members_of(b'{"%b":0}' % name)) == 1
    with pytest.raises(ApiError, match="at most 4096 bytes"):
        await members_of(b'{"n%b":0}' % name)
    with pytest.raises(ApiError, match="`model` must have at most 4096 bytes"):
        await model_in_json(b'{"model":"%b"}' % (b"m" * bodies.PARSED_BYTES_MAX))


@pytest.mark.parametrize("value", [b"1." + b"0" * 4200, b'"%b"' % (b" " * 4200), b"[" + b"1," * 3000 + b"1]"])
async def test_a_value_that_is_too_long_to_be_read_is_not_taken_for_an_absent_one(value):
    """In a large body it is refused, and the client is told which; nobody asks for what is read nowhere."""
    body = b'{"pad":"%b","a":%b,"model":"m"}' % (b"x" * bodies.PARSED_BYTES_MAX, value)
    with pytest.raises(ApiError, match="`a` must have at most 4096 bytes") as refused:
        await read_members(body, {"model", "a"})
    assert (refused.value.status, refused.value.param) == (400, "a")
    assert (await read_members(body, {"model"}))["model"] == "m"


SIZE = 2_000_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"%b"}' % (b'\\"' * (SIZE // 2)),
        b'{"a":"%b"}' % (b"\\" * SIZE),
        b'{"a":[%b]}' % (b'"",' * (SIZE // 3)),
        b'{"a":["%b"]}' % (b'\\"' * (SIZE // 2)),
        b'{"a":%b' % (b"[" * SIZE),
        b'{"a":[%b1]}' % (b"1234567," * (SIZE // 8)),
        b"{%b}" % b",".join(b'"%0400d":0' % number for number in range(SIZE // 405)),
        b"{%b}" % b",".join(b'"%d":%b0' % (number, b" " * 400) for number in range(SIZE // 410)),
    ],
    ids=["quotes", "backslashes", "strings", "quotes inside", "brackets", "numbers", "names", "space"],
)  # fmt: skip
async def test_others_have_their_turn_while_an_object_is_scanned(body):
    """Whatever stands in a large body, other tasks are not held up by it."""
    assert await turns_during(members_of(body)) >= SIZE // (2 * bodies.TURN_BYTES_MAX)


async def test_a_scan_ends_with_its_client():
    """Where the client leaves, its body is not read to the end."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await members_of(b'{"a":[%b1]}' % (b"1," * SIZE))
    assert scope.cancelled_caught


def test_values_survive_numbers_that_are_no_numbers():
    """Python's JSON has NaN and Infinity; a body with them is scanned like any other."""
    body = b'{"a":NaN,"b":-Infinity,"c":-0.5e+10}'
    a, b, c = trio.run(members_of, body)
    assert math.isnan(value_of(body, a))
    assert value_of(body, b) == -math.inf
    assert value_of(body, c) == -0.5e10
