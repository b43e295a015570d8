"""What the gateway reads of a request for a model."""

from ichat.http.request import Request
from ichat.proxy.model_request import read_model_request


async def test_a_body_is_not_kept_by_what_was_read_of_it():
    """A stream may last an hour: the body is freed as one thing, and nothing else has what a client has written."""
    body = b'{"model": "m", "messages": [{"content": "long"}], "stream": true}'
    path = b"/v1/chat/completions"
    request = Request(b"POST", path, path, b"1.1", [], body, b"id", keep_alive=True)
    asked, read = await read_model_request(request, b"s")
    assert asked == ("m", b"s", True, None, False, False, ())
    assert (read.data, read.names) == (body, ("model", "messages", "stream"))
