"""A short run of the fuzzer, and what its long runs have found."""

import functools

import pytest
import trio
from fuzz_front_door import Fuzz, Input, Script, make_input, settings
from support.peers import until

from ichat.config import load as configuration
from ichat.http.framing import Chunked, FramingError
from ichat.http.heads import HeadError, parse_response_head
from ichat.roles import gateway

pytestmark = pytest.mark.one_process("what both kinds of processes have in common")

INPUTS = 400
REQUEST = b'POST /v1/completions?mark00000000z HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"model":"m"}'


@pytest.fixture
async def fuzz(nursery, tmp_path):
    """A gateway in this process, and what plays against it."""
    fuzz = Fuzz("test")
    serve = functools.partial(trio.serve_tcp, fuzz.upstream.serve, 0, host="127.0.0.1", backlog=1024)
    [listener] = await nursery.start(serve)
    text = settings(listener.socket.getsockname()[1], tmp_path)
    fuzz.port = await nursery.start(gateway.run, configuration.parse(text, "test.toml"))
    return fuzz


async def test_every_input_is_answered_as_h11_reads_it(fuzz, caplog):
    """Every input is answered as h11 reads it, nothing else reaches the upstream, and no task is left behind."""
    await fuzz.probe()
    before = trio.lowlevel.current_statistics().tasks_living
    await fuzz.run(INPUTS)
    assert fuzz.findings == []
    assert fuzz.inputs == INPUTS
    assert "a bug" not in caplog.text
    await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
    await fuzz.probe()
    assert fuzz.findings == []


def test_an_input_can_be_made_again():
    """A seed and a number are enough to repeat what was found."""
    for number in range(100):
        assert make_input(1, number).pieces == make_input(1, number).pieces


RESPONSES = {
    "vertical tab in the reason": b"HTTP/1.1 204 N\x0bo Content\r\n\r\n",
    "form feed in a header": b"HTTP/1.1 200 OK\r\nx: a\x0cb\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("what", RESPONSES)
async def test_responses_that_were_passed_on_though_no_client_reads_them(fuzz, what):
    """A client's parser would fail with them: they are the upstream's failure, and say so."""
    await fuzz.play(Input(0, [(REQUEST, 0.0)], "read", Script([(RESPONSES[what], 0.0)], "keep")))
    assert fuzz.findings == []
    assert dict(fuzz.upstreams) == {"refused by h11, 502": 1}
    with pytest.raises(HeadError):
        parse_response_head(RESPONSES[what].partition(b"\r\n\r\n")[0], b"POST")


async def test_a_chunk_that_h11_does_not_read(fuzz, caplog):
    """A client of HTTP/1.0 gets no chunks: where they cannot be taken off, its response breaks off, and no bug is logged."""
    old = REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0")
    response = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2 ;x\r\n{}\r\n0\r\n\r\n"
    await fuzz.play(Input(0, [(old, 0.0)], "read", Script([(response, 0.0)], "keep")))
    assert fuzz.findings == []
    assert not any("whole" in outcome for outcome in fuzz.upstreams)
    assert "a bug" not in caplog.text


@pytest.mark.parametrize("odd", [b"\x0b", b"\x0c"])
def test_trailers_that_no_client_reads(odd):
    """They are no end of a body."""
    body = bytearray(b"0\r\nx: a%bb\r\n\r\n" % odd)
    with pytest.raises(FramingError):
        Chunked().feed(body, 0, len(body))
