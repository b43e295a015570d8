"""How a stream that the gateway asked for usage ends: with one piece, since clients leave at its last event."""

import asyncio
import contextvars

import pytest

from ichat.engines.asgi import DONE, Call, call_under_way
from ichat.errors import engine_aborted
from ichat.http.request import Request

EVENT = b"data: {}\n\n"
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Socket:
    """Takes everything, and keeps what came at once."""

    def __init__(self):
        self.pieces = []

    def send(self, data):
        self.pieces.append(bytes(data))
        return len(data)


def sent(*bodies, wanted=True, fails=False, aborted_after=None):
    """Return the pieces of a stream after its head; it is given up after so many, and the application goes on."""
    headers = [(b"x-ichat-usage", b"1")] if wanted else []
    request = Request(b"POST", b"/v1/completions", b"/v1/completions", b"1.1", headers, b"{}", b"id", keep_alive=True)
    sock = Socket()

    async def app(scope, receive, send):
        if wanted:
            call_under_way().usage.append(lambda: (7, 2, 1))
        await send(HEAD)
        for number, body in enumerate(bodies):
            if number == aborted_after:
                call_under_way().abandon(engine_aborted())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if fails:
            raise RuntimeError
        await send({"type": "http.response.body", "body": b""})

    async def run():
        done = asyncio.Event()
        call = Call(request, sock, "", keep_alive=True, stall_s=5, ended=done.set)
        call.start(app, set(), contextvars.copy_context())
        await done.wait()

    asyncio.run(run())
    return sock.pieces[1:]


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("last", [DONE, EVENT + DONE])
def test_the_last_event_goes_with_the_usage(last):
    """Nobody who has it has left before the usage was told."""
    assert sent(EVENT, last) == [chunk(EVENT), chunk(last) + b"0\r\nx-ichat-usage: 7,2,1\r\n\r\n"]


def test_without_a_question_every_event_goes_at_once():
    """The engine's own pieces stay what they are."""
    assert sent(EVENT, DONE, wanted=False) == [chunk(EVENT), chunk(DONE), b"0\r\n\r\n"]


def test_bytes_after_the_last_event_stay_behind_it():
    """An engine may say more."""
    assert sent(DONE, EVENT) == [chunk(DONE + EVENT), b"0\r\nx-ichat-usage: 7,2,1\r\n\r\n"]


def test_a_failure_at_the_end_keeps_the_last_event():
    """The failure stands behind it."""
    [piece] = sent(DONE, fails=True)
    assert 0 < piece.find(DONE) < piece.find(b"data: {")
    assert piece.endswith(b"0\r\nx-ichat-usage: 7,2,1\r\n\r\n")


def test_a_failure_after_the_engines_own_error_is_not_told():
    """The engine's error is the last event, and the chunks end cleanly."""
    first, last = sent(b'data: {"error": {"message": "It is dead.", "code": 500}}\n\n', fails=True)
    assert b"It is dead." in first
    assert last == b"0\r\nx-ichat-usage: 7,2,1\r\n\r\n"


@pytest.mark.parametrize("wanted", [True, False])
def test_output_after_the_engine_gave_up_is_dropped(wanted):
    """No end that looks whole reaches the client, only the error."""
    first, last = sent(EVENT, EVENT, DONE, wanted=wanted, aborted_after=1)
    assert first == chunk(EVENT)
    assert b'"engine_aborted"' in last
    assert DONE not in last
    assert b"\r\n0\r\n" in last
