"""TLS on the front door and to upstreams: the same behaviour, and no trust without proof."""

import json
import ssl

import h11
import openai
import pytest
import trio
import trio.testing
import trustme
from support.peers import SSE_END, SSE_HEAD, Client, chunk, code_of, event, plain, post_of, reset, until

from ichat.config import load as configuration
from ichat.errors import Exit
from ichat.roles import gateway


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture(scope="session")
def files(authority, tmp_path_factory):
    """Certificate, key and authority as files."""
    directory = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(directory / "cert.pem"), append=number > 0)
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    return directory


@pytest.fixture
def trusting(authority):
    """What a client verifies the front door with."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def doors(files):
    """The configuration of an encrypted front door."""
    return f'tls_certificate = "{files}/cert.pem"\ntls_key = "{files}/key.pem"\n'


@pytest.fixture
async def connect_tls(trusting):
    streams = []

    async def open_(port):
        stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=trusting, https_compatible=True)
        streams.append(stream)
        return Client(stream)

    yield open_
    for stream in streams:
        await trio.aclose_forcefully(stream)


@pytest.fixture
def serve_tls(nursery, authority):
    """Start an encrypted upstream: `port = await serve_tls(reply)`."""

    async def start(reply):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)

        async def serve(stream):
            encrypted = trio.SSLStream(stream, context, server_side=True)
            try:
                while True:
                    parser = h11.Connection(h11.SERVER)
                    head, body = None, b""
                    while not isinstance(happened := parser.next_event(), h11.EndOfMessage):
                        if happened is h11.NEED_DATA:
                            parser.receive_data(await encrypted.receive_some() or b"")
                        elif isinstance(happened, h11.ConnectionClosed):
                            return
                        elif isinstance(happened, h11.Request):
                            head = happened
                        else:
                            body += happened.data
                    how = await reply(encrypted, head, body)
                    if how == "close":
                        await encrypted.aclose()
                        return
                    if how == "cut":
                        await stream.aclose()
                        return
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                pass

        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        return listeners[0].socket.getsockname()[1]

    return start


@pytest.fixture
def gateway_to_tls(nursery, files):
    """Start a gateway with an external route over https: `port = await gateway_to_tls(upstream_port, more)`."""

    async def start(port, more="", *, ca=True):
        text = f'[server_settings]\nport = 0\n[[external_routes]]\nmodel_name = "m"\napi_base = "https://localhost:{port}/v1"\n'
        text += f'ca_certificates = "{files}/ca.pem"\n' if ca else ""
        return await nursery.start(gateway.run, configuration.parse(text + more, "test.toml"))

    return start


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


async def test_an_encrypted_front_door_answers_like_a_plain_one(serve, gateway_to, connect_tls, doors):
    """Plain answers, streams, errors, keep-alive and pipelining, all over one connection."""

    async def reply(stream, head, body):
        if json.loads(body).get("stream"):
            await stream.send_all(SSE_HEAD)
            for number in range(3):
                await stream.send_all(event(number))
            await stream.send_all(SSE_END)
        else:
            await hello(stream, head, body)

    _, port = await serve(reply)
    client = await connect_tls(await gateway_to({"m": port}, doors))
    assert (await client.ask())[0::2] == (200, b'{"hello": 1}')
    assert (await client.ask(stream=True))[2].endswith(b"data: [DONE]\n\n")
    assert code_of((await client.ask("nobody"))[2]) == "model_not_found"
    assert (await client.get(b"/health"))[0::2] == (200, b'{"status": "ok"}')


async def test_openai_over_tls(serve, gateway_to, doors, trusting):
    """The client that most users have, with the certificate verified."""
    _, port = await serve(lambda stream, head, body: stream.send_all(plain(b'{"object": "list", "data": []}')))
    url = f"https://localhost:{await gateway_to({'m': port}, doors)}/v1"
    async with (
        openai.DefaultAsyncHttpxClient(verify=trusting, trust_env=False) as http,
        openai.AsyncOpenAI(base_url=url, api_key="k", http_client=http) as client,
    ):
        assert (
            await client.embeddings.with_raw_response.create(model="m", input="x", encoding_format="float")
        ).status_code == 200
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_big_bodies_both_ways(serve, gateway_to, connect_tls, doors):
    """What does not fit into any buffer arrives whole, in both directions."""
    big = bytes(range(256)) * 20_000

    async def reply(stream, head, body):
        assert json.loads(body)["text"] == "x" * 5_000_000
        await stream.send_all(plain(big))

    _, port = await serve(reply)
    client = await connect_tls(await gateway_to({"m": port}, doors))
    assert (await client.ask(text="x" * 5_000_000))[2] == big


@pytest.mark.parametrize("when", ["waiting", "streaming"])
async def test_an_encrypted_client_that_hangs_up_closes_its_upstream(serve, gateway_to, connect_tls, doors, when):
    """Encrypted or not: nobody generates for a client that has left."""

    async def reply(stream, head, body):
        if when == "streaming":
            await stream.send_all(SSE_HEAD + event(1))
        await stream.receive_some()
        return "close"

    upstream, port = await serve(reply)
    client = await connect_tls(await gateway_to({"m": port}, doors))
    body = b'{"model": "m"}'
    await client.send(post_of(body))
    await until(lambda: upstream.requests)
    if when == "streaming":
        await client.stream.receive_some()
    await trio.aclose_forcefully(client.stream)
    await until(lambda: upstream.closed == 1)


async def test_an_encrypted_client_that_never_reads_is_given_up(serve, gateway_to, connect_tls, doors):
    """Backpressure passes through the encryption, and `client_stall_s` bounds it."""

    async def reply(stream, head, body):
        await stream.send_all(SSE_HEAD)
        while True:
            await stream.send_all(chunk(b"x" * 60_000))

    upstream, port = await serve(reply)
    client = await connect_tls(await gateway_to({"m": port}, doors + "[timeouts]\nclient_stall_s = 0.5\n"))
    body = b'{"model": "m"}'
    await client.send(post_of(body))
    await until(lambda: upstream.closed == 1)


async def test_a_refused_upload_reads_its_refusal(gateway_to, connect_tls, doors):
    """A body that is too large is 413, though the client is still sending it."""
    client = await connect_tls(await gateway_to({}, doors + "[limits]\nbody_bytes_max = 2000\n"))
    await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n")
    await client.send(b"x" * 3_000_000)
    assert (await client.response())[0] == 413


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_an_encrypted_end_is_announced(serve, gateway_to, trusting, doors, how):
    """A body that ends with its connection ends with TLS's own good-bye if it is whole, and with an error if not."""

    async def reply(stream, head, body):
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        if how == "reset":
            await trio.testing.wait_all_tasks_blocked()  # the gateway has read what was sent
            reset(stream)
        return "close"

    _, port = await serve(reply)
    port = await gateway_to({"m": port}, doors)
    strict = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=trusting)
    client = Client(strict)
    await client.send(post_of(b'{"model": "m"}'))
    if how == "close":
        assert (await client.everything()).endswith(b"all of it")
    else:
        with pytest.raises(trio.BrokenResourceError):
            await client.everything()
    await trio.aclose_forcefully(strict)


async def test_a_client_without_a_handshake_is_dropped_after_head_s(gateway_to, connect, connect_tls, doors):
    """A client that says nothing, or no TLS, holds its connection for `head_s` at most, and disturbs nobody."""
    port = await gateway_to({}, doors + "[timeouts]\nhead_s = 3\n")
    silent, plain_http = await connect(port), await connect(port)
    await plain_http.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await (await connect_tls(port)).get(b"/health"))[0] == 200
    assert not (await plain_http.everything()).startswith(b"HTTP/")
    assert await silent.everything() == b""


async def test_an_upstream_over_https(serve_tls, gateway_to_tls, connect):
    """Requests go out encrypted, connections are kept, streams come back byte for byte."""
    seen = []

    async def reply(stream, head, body):
        seen.append(dict(head.headers)[b"host"])
        await stream.send_all(SSE_HEAD + event(0))
        await stream.send_all(event(1) + SSE_END)

    port = await serve_tls(reply)
    client = await connect(await gateway_to_tls(port))
    for _ in range(3):
        status, _, body = await client.ask(stream=True)
        assert (status, body) == (200, b'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: [DONE]\n\n')
    assert seen == [b"localhost:%d" % port] * 3


async def test_an_upstream_that_cannot_be_trusted_gets_nothing(serve_tls, gateway_to_tls, connect):
    """An unknown certificate is 502 with the reason, and no request leaves."""
    seen = []

    async def reply(stream, head, body):
        seen.append(body)

    client = await connect(await gateway_to_tls(await serve_tls(reply), ca=False))
    status, _, body = await client.ask()
    assert (status, code_of(body)) == (502, "upstream_unreachable")
    assert b"certificate is not trusted" in body
    assert not seen


async def test_an_upstream_that_speaks_no_tls(nursery, gateway_to_tls, connect):
    """A plain server behind an https route is 502, not a hang; so is one that says nothing."""

    async def serve(stream):
        if (await stream.receive_some())[:1] == b"\x16" and said:
            await stream.send_all(said.pop())
        await trio.sleep_forever()

    said = [b"HTTP/1.1 400 Bad Request\r\n\r\n"]
    listeners = await nursery.start(trio.serve_tcp, serve, 0)
    port = listeners[0].socket.getsockname()[1]
    assert b"no TLS handshake" in (await (await connect(await gateway_to_tls(port))).ask())[2]
    hurried = await gateway_to_tls(port, "[timeouts]\nconnect_s = 0.5\n")
    assert b"no connection" in (await (await connect(hurried)).ask())[2]


@pytest.mark.parametrize("how", ["close", "cut"])
async def test_an_end_that_is_not_announced_is_no_end(serve_tls, gateway_to_tls, connect, how):
    """A body that ends with the connection is whole only if TLS says that the connection ended; else the client's breaks."""

    async def reply(stream, head, body):
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
        return how

    port = await gateway_to_tls(await serve_tls(reply))
    client = await connect(port)
    await client.send(post_of(b'{"model": "m"}'))
    if how == "close":
        assert (await client.everything()).endswith(b"all of it")
    else:
        with pytest.raises(trio.BrokenResourceError):
            await client.everything()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ('tls_certificate = "x"\n', "go together"),
        ('tls_certificate = "/nowhere/c"\ntls_key = "/nowhere/k"\n', "/nowhere/c cannot be read: No such file"),
        ('tls_certificate = "{files}/ca.pem"\ntls_key = "{files}/key.pem"\n', "cannot be used"),
    ],
)
def test_a_wrong_certificate_is_found_before_anything_starts(files, settings, why):
    """One sentence and exit code 64, with `--check` too."""
    with pytest.raises(Exit, match=why) as caught:
        gateway.secure_parts(configuration.parse("[server_settings]\n" + settings.format(files=files), "test.toml"))
    assert caught.value.code == 64
