"""Where a body ends: the same as h11 says, over every split."""

import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.http.framing import Chunked, FramingError, Length, UntilClose

BEHIND = b"HTTP/1.1 200 OK\r\n"


def split(data, cuts):
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def follow(framing, pieces):
    """Feed pieces; give how many bytes of the body are sent on."""
    total = 0
    for piece in pieces:
        buffer = bytearray(b"??" + piece + b"!!")
        end = framing.feed(buffer, 2, 2 + len(piece))
        total += end - 2
        if framing.done:
            break
    return total


@st.composite
def chunked_bodies(draw):
    out = b""
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = draw(st.sampled_from(["%x", "%X", "0%x", "00%X"])) % len(data)
        extension = draw(st.sampled_from(["", ";a=b", '; x="y"', ";"]))
        out += size.encode() + extension.encode() + b"\r\n" + data + b"\r\n"
    trailers = draw(st.sampled_from([b"", b"x-a: b\r\n", b"x-a: b\r\nx-c: \r\n"]))
    return out + b"0\r\n" + trailers + b"\r\n"


def without_trailers(body):
    trailers = next(lines for lines in (b"x-a: b\r\nx-c: \r\n", b"x-a: b\r\n", b"") if body.endswith(lines + b"\r\n"))
    return body.removesuffix(trailers + b"\r\n") + b"\r\n"


@given(chunked_bodies(), st.lists(st.integers(0, 400)), st.booleans())
def test_chunked_ends_where_h11_says(body, cuts, behind):
    """However a chunked body is split, it ends where h11 sees its end, and nothing behind it is taken."""
    framing = Chunked()
    assert follow(framing, split(body + (BEHIND if behind else b""), cuts)) == len(without_trailers(body))
    assert framing.done
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body)
    while not isinstance(reader.next_event(), h11.EndOfMessage):
        pass


@given(chunked_bodies(), st.lists(st.integers(0, 400)), st.booleans())
def test_trailers_are_gathered_and_left_out(body, cuts, behind):
    """However the body is split: its bytes without trailers go on, and what is behind it is seen to be there."""
    framing = Chunked()
    sent, surplus = b"", None
    for piece in split(body + (BEHIND if behind else b""), cuts):
        buffer = bytearray(piece)
        end = framing.feed(buffer, 0, len(piece))
        sent += buffer[:end]
        if framing.done:
            surplus = end + framing.cut < len(piece)
            break
    assert framing.done
    assert sent == without_trailers(body)
    assert bytes(framing.trailers) + b"\r\n" == body[len(sent) - 2 :]
    if surplus or not cuts:
        assert surplus == behind


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_garbage_is_an_error_or_not_the_end(body, cuts):
    """What h11 refuses is never taken for a complete body."""
    framing = Chunked()
    try:
        follow(framing, split(body, cuts))
    except FramingError:
        return
    if framing.done:
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        while not isinstance(reader.next_event(), h11.EndOfMessage):
            pass


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n", b"\r\n", b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"1_0\r\n", b" 1\r\na\r\n", b"1\na\n",
        b"1\r\nab\r\n", b"1\r\na\n", b"1\r\naX\n", b"1;\0\r\na\r\n", b"ffffffffffffffff\r\n", b"1" + b"0" * 5000,
        b"0\r\nbad trailer\r\n\r\n", b"0\r\n" + b"a: b\r\n" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_invalid_chunks_are_refused(body, step):
    """A body that two readers could read in two ways is refused, however it arrives."""
    framing = Chunked()
    with pytest.raises(FramingError):
        follow(framing, [body[at : at + step] for at in range(0, len(body), step)])


def test_events_may_be_inserted_between_chunks_only():
    """Between two chunks there is room for one of ours; inside one there is not."""
    framing = Chunked()
    follow(framing, [b"3\r\nabc\r\n"])
    assert framing.may_insert
    follow(framing, [b"3"])
    assert not framing.may_insert
    follow(framing, [b"\r\nab"])
    assert not framing.may_insert
    follow(framing, [b"c\r\n"])
    assert framing.may_insert
    assert not framing.ends_at_eof()


@given(st.integers(0, 50), st.binary(max_size=80), st.lists(st.integers(0, 80)))
def test_length_takes_exactly_its_bytes(length, data, cuts):
    """A body of a known length takes that many bytes and no more."""
    framing = Length(length)
    assert follow(framing, split(data, cuts)) == min(length, len(data))
    assert framing.done == (len(data) >= length)
    assert framing.ends_at_eof() == framing.done


def test_until_close_never_ends_by_itself():
    """Such a body takes everything and is complete only when the connection ends."""
    framing = UntilClose()
    assert follow(framing, [b"a", b"bc"]) == 3
    assert not framing.done
    assert framing.ends_at_eof()
