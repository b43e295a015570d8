"""The requests of a kept connection: each has its own answer, however it arrives and whatever came before it."""

import json

from support.peers import AS_OWN, SSE_END, SSE_HEAD, code_of, event, plain, post_of

JSON = b"content-type: application/json\r\nx-request-id: %b\r\n"


def request_for(body, name):
    """Return a chat request with this id."""
    return post_of(body, b"/v1/chat/completions", JSON % name)


def body_for(model="m", **more):
    return json.dumps({"model": model, "messages": [], **more}).encode()


async def test_each_request_of_a_connection_has_its_own_answer(serve, gateway_to, connect):
    """Answered, refused and broken requests, streams, other routes, requests in pieces and two at once."""

    async def reply(stream, head, body):
        name = dict(head.headers)[b"x-request-id"]
        if json.loads(body).get("stream"):
            await stream.send_all(SSE_HEAD + event(0) + SSE_END)
        else:
            await stream.send_all(plain(b'{"of": "%b"}' % name))

    _, upstream = await serve(reply)
    client = await connect(await gateway_to({"m": upstream}))
    sent = 0

    async def answer_to(body, *, pieces=1):
        nonlocal sent
        sent += 1
        name = b"id-%d" % sent
        data = request_for(body, name)
        for at in range(0, len(data), -(-len(data) // pieces)):
            await client.send(data[at : at - (-len(data) // pieces)])
        status, headers, content = await client.response()
        assert headers[b"x-request-id"] == name
        return status, content, name

    async def is_answered(**how):
        status, content, name = await answer_to(body_for(), **how)
        assert (status, content) == (200, b'{"of": "%b"}' % name)

    await is_answered()
    for _ in range(2):
        await is_answered()
        status, content, _ = await answer_to(body_for("unknown"))
        assert (status, code_of(content)) == (404, "model_not_found")
        await is_answered()
        status, content, _ = await answer_to(b'{"model": ')
        assert (status, code_of(content)) == (400, "bad_request")
        await is_answered(pieces=3)
        status, content, _ = await answer_to(body_for(stream=True))
        assert (status, content.startswith(b"data: ")) == (200, True)
        await is_answered()
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + AS_OWN + b"\r\n")
        assert (await client.response(b"GET"))[0] == 200
        await is_answered()
    await client.send(request_for(body_for(), b"one"))
    assert (await client.response())[1][b"x-request-id"] == b"one"
    await client.send(post_of(body_for(), b"/v1/chat/completions", JSON % b"last" + b"connection: close\r\n"))
    assert (await client.response())[1][b"x-request-id"] == b"last"
    assert await client.everything() == b""
