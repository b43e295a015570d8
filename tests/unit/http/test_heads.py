"""Response heads: read as h11 reads them, or refused."""

import re

import h11
import h11._abnf
import h11._readers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.http import h11_patch
from ichat.http.framing import Chunked, Length, UntilClose
from ichat.http.h11_patch import HEADER_FIELD
from ichat.http.heads import (
    HOP_BY_HOP,
    LINE_BYTES_MAX,
    LINES_MAX,
    HeadError,
    RememberedLines,
    hop_by_hop_of,
    parse_plain_request_head,
    parse_response_head,
    response_head,
)

TOKEN = st.text("abcXYZ-_09", min_size=1, max_size=12).map(str.encode)
VALUE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20).map(str.encode)


@given(st.integers(200, 599), st.lists(st.tuples(TOKEN.map(lambda name: b"x-" + name), VALUE), max_size=6))
def test_reads_what_h11_reads(status, headers):
    """Status and headers are the ones that h11 sees."""
    data = b"HTTP/1.1 %d Some Reason\r\n" % status + b"".join(b"%b:  %b \r\n" % pair for pair in headers)
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    reader.receive_data(data + b"\r\n")
    theirs = reader.next_event()
    ours = parse_response_head(data.removesuffix(b"\r\n"), b"GET")
    assert ours.status == theirs.status_code
    assert ours.reason == theirs.reason
    assert ours.headers == [(bytes(name), bytes(value)) for name, value in theirs.headers]


@pytest.mark.parametrize(
    "head",
    [
        b"", b"HTTP/1.1", b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 200 O\0K", b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\n folded", b"HTTP/1.1 200 OK\r\na : b", b"HTTP/1.1 200 OK\r\n: b", b"HTTP/1.1 200 OK\r\na",
        b"HTTP/1.1 200 OK\r\na: b\rc", b"HTTP/1.1 200 OK\r\na: b\nc: d", b"HTTP/1.1 200 OK\r\na: \0",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2", b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1, 1", b"HTTP/1.1 200 OK\r\ncontent-length: 1_0",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip", b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3",
    ],
)  # fmt: skip
def test_refuses_what_could_be_read_in_two_ways(head):
    """An ambiguous head never reaches a client."""
    with pytest.raises(HeadError):
        parse_response_head(head, b"GET")


@pytest.mark.parametrize(
    ("head", "method", "kind", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5", b"GET", Length, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nContent-Length: 5", b"GET", Length, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: Close", b"GET", Length, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5", b"GET", Length, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", b"GET", Chunked, True),
        (b"HTTP/1.1 200", b"GET", UntilClose, False),
        (b"HTTP/1.1 204 No Content", b"GET", Length, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5", b"HEAD", Length, True),
    ],
)
def test_framing(head, method, kind, reusable):
    """The framing follows RFC 9112, section 6.3."""
    found = parse_response_head(head, method)
    assert type(found.framing) is kind
    assert found.reusable is reusable
    if method == b"HEAD" or found.status == 204:
        assert found.framing.done


def test_a_line_is_read_once_until_the_bound_is_reached():
    """Lines are remembered, but no more than a number of them, and none that is long or not valid."""
    read = []

    def note(line):
        read.append(line)
        if line == b"bad":
            raise HeadError("no")
        return line.upper()

    lines = RememberedLines(note)
    assert [lines[b"a"], lines[b"a"], read] == [b"A", b"A", [b"a"]]
    long = b"x" * (LINE_BYTES_MAX + 1)
    assert lines[long] == long.upper()
    with pytest.raises(HeadError):
        lines[b"bad"]
    assert set(lines) == {b"a"}
    for number in range(3 * LINES_MAX):
        assert lines[b"%d" % number] == b"%d" % number
        assert len(lines) <= LINES_MAX


def test_lenient_response_lines_are_not_plain_in_requests():
    """Lines of responses are read less strictly; that they were read says nothing about a request with the same."""
    line = b"x-name: \xe9\x01"
    for _ in range(2):
        assert parse_response_head(b"HTTP/1.1 200 OK\r\n" + line, b"GET").headers == [(b"x-name", b"\xe9\x01")]
        assert parse_plain_request_head(b"GET / HTTP/1.1\r\nhost: x\r\n" + line) is None


def test_a_repeated_header_keeps_every_value():
    """All values are forwarded; by its name one finds the first. Any of several `Connection` may say `close`."""
    head = b"HTTP/1.1 200 OK\r\nset-cookie: a\r\nConnection: Close\r\nset-cookie: b\r\nconnection: x"
    found = parse_response_head(head + b"\r\ncontent-length: 2", b"GET")
    assert [value for name, value in found.headers if name == b"set-cookie"] == [b"a", b"b"]
    assert found.by_name[b"set-cookie"] == b"a"
    assert not found.reusable
    asked = parse_plain_request_head(b"GET /p?q HTTP/1.1\r\nx-a: 1\r\nhost: x\r\nX-A: 2")
    assert (asked.path, asked.by_name[b"x-a"], len(asked.headers)) == (b"/p", b"1", 3)


def test_hop_by_hop_headers_end_here():
    """Headers of one connection, and those that `Connection` names, are not forwarded."""
    headers = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"keep-alive", b"5"), (b"te", b"x"), (b"a", b"b")]
    assert hop_by_hop_of(headers) == HOP_BY_HOP | {b"close", b"x-mine"}
    twice = [(b"connection", b"x-mine"), (b"x-mine", b"1"), (b"connection", b"keep-alive"), (b"a", b"b")]
    assert hop_by_hop_of(twice) == HOP_BY_HOP | {b"x-mine"}


def test_reasons():
    """A response keeps its reason phrase, and gets the usual one where it has none."""
    assert response_head(404, []).startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert response_head(404, [], b"Gone Fishing").startswith(b"HTTP/1.1 404 Gone Fishing\r\n")
    assert response_head(799, []).startswith(b"HTTP/1.1 799 \r\n")


REQUEST_LINES = st.sampled_from(
    [b"POST /v1/x?y#z HTTP/1.1", b"GET / HTTP/1.1", b"PUT /\xe9 HTTP/1.1", b"get / HTTP/1.1"]
)
HEADER_LINES = st.sampled_from(
    [
        b"Host: x", b"host:y", b"Content-Length: 3", b"content-length:0003 ", b"Content-Length: +3", b"Content-Length: 3, 3",
        b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Upgrade: h2c",
        b"X-A: \tb c\t ", b"X-B:", b"X-C : d", b"X-\xe9: f", b"X-D: \xe9", b"X-E: a\0b", b"X-F: a\nb", b"X-G: a\rb", b" folded",
        b"X-H: \x7f", b"X-I: a:b", b"Connection: close", b"", b":",
    ]
)  # fmt: skip


@given(REQUEST_LINES, st.lists(HEADER_LINES | st.builds(lambda a, b: a + b": " + b, TOKEN, VALUE), max_size=6))
def test_a_plain_request_head_is_what_h11_reads(line, headers):
    """Whatever is taken for plain, h11 reads in the same way; it has no say only where nothing is special."""
    data = b"\r\n".join([line, *headers])
    ours = parse_plain_request_head(data)
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(data + b"\r\n\r\n")
    try:
        theirs = reader.next_event()
    except h11.RemoteProtocolError:
        assert ours is None
        return
    if ours is not None:
        assert (ours.method, ours.target, ours.version) == (theirs.method, theirs.target, theirs.http_version)
        sizes = [int(value) for name, value in theirs.headers if name == b"content-length"]
        assert [pair for pair in ours.headers if pair[0] != b"content-length"] == [
            pair for pair in theirs.headers if pair[0] != b"content-length"
        ]
        assert ours.length == (sizes[0] if sizes else 0)
        assert len(sizes) <= 1


def test_heads_of_common_clients_are_plain():
    """The heads of openai-python and curl are read the short way."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:4000\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
        b"Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 3.54.0\r\nX-Stainless-Lang: python\r\n"
        b"Authorization: Bearer sk-1\r\nContent-Length: 98"
    )
    found = parse_plain_request_head(head)
    assert found is not None
    assert (found.length, len(found.headers)) == (98, 9)
    assert (
        parse_plain_request_head(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUser-Agent: curl/8\r\nAccept: */*") is not None
    )


@given(st.text("ab:: \t\0\x01é\n", max_size=20).map(lambda text: text.encode("latin-1")))
def test_headers_cost_linear_time_and_read_as_h11_does(line):
    """The expression that stands in for h11's own takes the same lines apart in the same way."""
    theirs = re.compile(h11._abnf.header_field.encode()).fullmatch(line)
    ours = HEADER_FIELD.fullmatch(line)
    assert (ours and ours.groupdict()) == (theirs and theirs.groupdict())


def test_h11_reads_headers_by_it():
    """The expression that it replaces is the one of the installed h11."""
    h11_patch.apply()
    assert h11._readers.header_field_re is HEADER_FIELD


@pytest.mark.parametrize(
    "parse", [parse_plain_request_head, lambda head: HEADER_FIELD.fullmatch(head.split(b"\r\n")[1])]
)
def test_a_head_full_of_blanks_is_refused_in_no_time(parse):
    """With quadratic expressions this would take hours."""
    assert parse(b"GET / HTTP/1.1\r\nx:" + b" " * 3_000_000 + b"\0") is None
    with pytest.raises(HeadError):
        parse_response_head(b"HTTP/1.1 200 OK\r\nx:" + b" " * 3_000_000 + b"\0", b"GET")
