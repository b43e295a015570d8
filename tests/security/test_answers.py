"""Heads on their way: what a hostile upstream may say to a client, what a browser may ask, what upstreams are told."""

import json

import pytest
import trio
from support.exposition import heartbeat
from support.peers import LIMIT_S, SSE_END, SSE_HEAD, code_of, event, plain

from ichat.http.heads import parse_plain_request_head
from ichat.protocol.messages import response_tag
from ichat.proxy.header_filter import NOT_OF_ANSWERS_BEGIN, left_out
from ichat.roles.worker_server import WorkerServer
from ichat.security.keys import hash_of

POLICY = b"sandbox; default-src 'none'"
PAGE = b"<script>document.title = 'ran'</script>"
ORDERS = [
    b"Set-Cookie: session=evil", b"Set-Cookie2: a=b", b"Service-Worker-Allowed: /", b'Clear-Site-Data: "*"',
    b"Refresh: 0; url=http://evil.example/", b"Strict-Transport-Security: max-age=63072000",
    b"Public-Key-Pins: pin-sha256=x", b"Public-Key-Pins-Report-Only: pin-sha256=x", b'Alt-Svc: h2="evil.example:443"',
    b'NEL: {"report_to": "x"}', b'Report-To: {"group": "x"}', b'Reporting-Endpoints: x="http://evil.example/"',
    b"Link: <http://evil.example/>; rel=preload", b"Content-Security-Policy: default-src *",
    b"Content-Security-Policy-Report-Only: default-src *; report-uri http://evil.example/", b"X-WebKit-CSP: default-src *",
    b"X-Content-Type-Options: sniff", b"X-Frame-Options: ALLOWALL", b"Referrer-Policy: unsafe-url",
    b"Cross-Origin-Resource-Policy: cross-origin", b"Cross-Origin-Opener-Policy: unsafe-none",
    b"Access-Control-Allow-Origin: *", b"Access-Control-Anything-New: *", b"Timing-Allow-Origin: *",
    b'Speculation-Rules: "/x"', b"Accept-CH: Sec-CH-UA-Model", b"No-Vary-Search: params", b"Origin-Trial: x",
    b"Attribution-Reporting-Register-Source: {}", b"Sec-Session-Registration: (ES256)", b"SourceMap: http://evil.example/",
    b"Location: http://evil.example/", b"Proxy-Authenticate: Basic", b'WWW-Authenticate: Basic realm="the console"',
    b"X-Accel-Redirect: /etc/passwd", b"X-Accel-Limit-Rate: 1", b"X-Sendfile: /etc/passwd",
    b"X-Lighttpd-Send-File: /etc/passwd", b"X-Reproxy-URL: http://evil.example/",
    b"X-Ichat-Error: gateway", b"X-Ichat-Dropped: priority", b"X-Ichat-Model: other", b"X-Ichat-Usage: 1,2,3",
    b"X-Ichat-Worker: other", b"X-Ichat-Anything-New: 1", b"X-Request-Id: other",
]  # fmt: skip
HARMLESS = [
    b"cache-control: no-store", b"content-disposition: attachment", b"etag: x", b"openai-processing-ms: 5",
    b"retry-after: 3", b"server: x", b"vary: accept", b"x-accel-buffering: no", b"x-ratelimit-remaining-tokens: 7",
]  # fmt: skip
OURS = {
    b"date", b"content-type", b"content-length", b"content-security-policy", b"x-content-type-options", b"x-request-id",
    b"x-ichat-worker", b"x-ichat-overhead-ms",
}  # fmt: skip
GOES_ON = {b"accept: */*", b"user-agent: x", b"content-type: application/json", b"x-stainless-os: linux", b"x-title: y"}
KEYS_OF_CLIENT = [b"Cookie: session=1", b"Proxy-Authorization: Basic eDp5"]
OF_CLIENT = [
    *KEYS_OF_CLIENT, b"Origin: http://app.example", b"Referer: http://app.example/people/7", b"Sec-Fetch-Site: cross-site",
    b"Sec-Fetch-Mode: cors", b"Sec-Fetch-Dest: empty", b"Sec-CH-UA-Platform: x", b"Sec-GPC: 1",
    *(b"%b: 203.0.113.7" % name for name in (
        b"CF-Connecting-IP", b"CF-Connecting-IPv6", b"True-Client-IP", b"X-Client-IP", b"X-Cluster-Client-IP",
        b"X-Original-Forwarded-For", b"X-Envoy-External-Address", b"Fastly-Client-IP", b"Fly-Client-IP", b"X-Real-IP",
        b"X-Forwarded-For", b"X-Forwarded-Port", b"X-Forwarded-Server", b"Forwarded", b"Via", b"X-Azure-ClientIP",
        b"CloudFront-Viewer-Address", b"X-Appengine-User-IP", b"X-NF-Client-Connection-IP", b"DO-Connecting-IP",
    )),
    *(b"%b: somebody" % name for name in (
        b"X-Forwarded-User", b"X-Forwarded-Access-Token", b"X-Forwarded-Client-Cert", b"X-Auth-Request-Email",
        b"CF-Access-Jwt-Assertion", b"X-Amzn-Oidc-Data", b"X-Goog-IAP-JWT-Assertion", b"X-MS-Client-Principal-Name",
        b"Remote-User", b"X-Remote-User", b"Tailscale-User-Login", b"SSL-Client-Cert", b"X-SSL-Client-S-DN",
    )),
]  # fmt: skip


def answering(data):
    async def reply(stream, head, body):
        await stream.send_all(data)

    return reply


def request(method=b"POST", path=b"/v1/chat/completions", lines=(), body=b'{"model": "m"}', length=None):
    length = len(body) if length is None else length
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: localhost", *lines, b"Content-Length: %d" % length]
    return b"\r\n".join([*lines, b"", b""]) + body


@pytest.fixture
def ask(connect):
    """Send a request, and return the head's first line, its other lines in lower case, and what follows it."""

    async def send(port, *pieces, **of_request):
        client = await connect(port)
        await client.send(request(**of_request))
        received = b""
        with trio.fail_after(LIMIT_S):
            while b"\r\n\r\n" not in received or not received.endswith(pieces or (b"",)):
                more = await client.stream.receive_some()
                if not more:
                    break
                received += more
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        return int(status.split()[1]), sorted(line.lower() for line in lines), rest

    return send


@pytest.fixture
def site(serve, gateway_to, connect):
    """Start an upstream that is an external route or a worker, and a gateway: `upstream, port = await site(reply)`."""

    async def start(reply, *, worker=False, more="", **known):
        upstream, port = await serve(reply)
        if not worker:
            return upstream, await gateway_to({"m": port}, more)
        gateway = await gateway_to({}, more)
        await heartbeat(connect, gateway, port, heartbeat_interval=3600, start_id="s", **known)
        return upstream, gateway

    return start


def names_of(lines):
    return {line.partition(b":")[0] for line in lines}


# What an upstream says to a client.


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("status", [b"200 OK", b"400 no", b"404 no", b"500 no", b"307 elsewhere"])
async def test_no_answer_of_an_upstream_commands_a_browser(site, ask, worker, status):
    """It is sealed, once and in the gateway's words; of its headers those remain that speak of the answer alone."""
    hostile = b"HTTP/1.1 %b\r\ncontent-type: text/html\r\n%b\r\ncontent-length: %d\r\n\r\n%b"
    hostile %= (status, b"\r\n".join(ORDERS + HARMLESS), len(PAGE), PAGE)
    _, port = await site(answering(hostile), worker=worker, more="[circuit_breaker]\nfailures_max = 0\n")
    is_told_anew = not worker and int(status.split()[0]) >= 400
    code, lines, body = await ask(port, b"}" if is_told_anew else PAGE)
    assert code == int(status.split()[0])
    assert b"answered %d" % code in body and b"<" not in body if is_told_anew else body == PAGE
    assert b"content-security-policy: " + POLICY in lines
    assert b"x-content-type-options: nosniff" in lines
    assert len(names_of(lines)) == len(lines), "a header is there twice"
    assert names_of(lines) == OURS | names_of(HARMLESS)
    assert set(HARMLESS) <= set(lines)


async def test_every_way_to_answer_is_sealed(site, ask):
    """Streams, also those that begin with a comment of the gateway's own, and answers about stored responses."""

    async def slow(stream, head, body):
        if head.method == b"GET":
            await stream.send_all(
                plain(PAGE, b"Service-Worker-Allowed: /\r\n").replace(b"application/json", b"text/html")
            )
            return
        await release.wait()
        await stream.send_all(SSE_HEAD + event(1) + SSE_END)

    release = trio.Event()
    upstream, port = await site(slow, worker=True, more="[timeouts]\nsse_keepalive_s = 0.01\n")
    _, lines, rest = await ask(port, b"\n\n\r\n", body=b'{"model": "m", "stream": true}')
    assert b": keep-alive\n\n" in rest
    assert b"content-security-policy: " + POLICY in lines
    release.set()
    _, lines, _ = await ask(port, SSE_END, body=b'{"model": "m", "stream": true}')
    assert b"content-security-policy: " + POLICY in lines
    path = b"/v1/responses/resp_%b_%b" % (response_tag("w", "s").encode(), b"0" * 32)
    code, lines, _ = await ask(port, PAGE, method=b"GET", path=path, body=b"")
    assert (code, upstream.requests[-1][0].target) == (200, path)
    assert {b"content-security-policy: " + POLICY, b"x-content-type-options: nosniff"} <= set(lines)
    assert b"service-worker-allowed" not in names_of(lines)


async def test_the_gateways_own_responses_are_json_and_sealed(site, ask):
    """Errors that quote the request: no markup of it is shown as such."""
    _, port = await site(answering(b"no HTTP\r\n\r\n"))
    evil = b"<script>1</script>"
    for code, of_request in (
        (404, {"body": b'{"model": "%b"}' % evil}),
        (502, {}),
        (400, {"body": evil}),
        (400, {"path": b"/v1/x%3Cscript%3E"}),
        (404, {"path": b"/%b" % evil, "method": b"GET", "body": b""}),
        (404, {"path": b"/v1/responses/resp_%b" % evil, "method": b"GET", "body": b""}),
        (405, {"method": b"GET", "body": b""}),
        (403, {"lines": [b"Sec-Fetch-Dest: %b" % evil]}),
        (415, {"lines": [b"Content-Encoding: %b" % evil]}),
    ):
        found, lines, _ = await ask(port, b"}", **of_request)
        assert found == code, of_request
        assert b"content-type: application/json" in lines, of_request
        assert {b"content-security-policy: " + POLICY, b"x-content-type-options: nosniff"} <= set(lines), of_request


async def test_only_a_workers_error_is_attributed_to_a_worker(serve, site, ask):
    """`x-ichat-error: worker` is a worker's word on itself; an external route has none, and `gateway` is nobody's."""

    def saying(value):
        return answering(plain(b"{}", b"x-ichat-error: %b\r\n" % value).replace(b"200 OK", b"400 no"))

    for worker, value, expected in ((True, b"worker", True), (True, b"gateway", False), (False, b"worker", False)):
        _, port = await site(saying(value), worker=worker)
        _, lines, _ = await ask(port, b"}")
        assert (b"x-ichat-error: worker" in lines) is expected, (worker, value)
        assert b"x-ichat-error: gateway" not in lines


async def test_a_401_asks_for_what_the_gateway_asks_for(site, ask):
    """No browser asks a person for a password: a key is a bearer's (RFC 6750)."""
    refusal = b"HTTP/1.1 401 no\r\nWWW-Authenticate: Negotiate\r\nWWW-Authenticate: Basic\r\ncontent-length: 0\r\n\r\n"
    _, port = await site(answering(refusal))
    code, lines, _ = await ask(port)
    assert (code, [line for line in lines if b"authenticate" in line]) == (401, [b"www-authenticate: bearer"])


async def test_console_and_control_plane_keep_their_own_words(gateway_to, ask):
    """The console runs scripts of its own, and `/` leads to it."""
    port = await gateway_to({})
    _, lines, _ = await ask(port, method=b"GET", path=b"/console/", body=b"", lines=[b"Sec-Fetch-Mode: navigate"])
    assert [line for line in lines if line.startswith(b"content-security-policy: default-src 'none'; script-src")]
    code, lines, _ = await ask(port, method=b"GET", path=b"/", body=b"", lines=[b"Accept: text/html"])
    assert (code, b"location: /console/" in lines) == (303, True)
    code, lines, _ = await ask(port, method=b"GET", path=b"/v1/admin/none", body=b"")
    assert (code, b"x-ichat-error: gateway" in lines) == (404, True)


# Where an answer ends.


@pytest.mark.parametrize(
    ("status", "framing", "method"),
    [
        (b"204 No Content", b"Content-Length: 7\r\n", b"POST"),
        (b"204 No Content", b"Transfer-Encoding: chunked\r\nContent-Length: 7\r\n", b"POST"),
        (b"304 Not Modified", b"Transfer-Encoding: chunked\r\n", b"GET"),
        (b"304 Not Modified", b"Content-Length: 7\r\n", b"GET"),
        (b"200 OK", b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", b"HEAD"),
    ],
)
async def test_a_response_without_a_body_has_no_framing(site, ask, connect, status, framing, method):
    """No length and no coding (RFC 9110, 8.6; RFC 9112, 6.1): no client waits for a body, and the connection goes on."""
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=preload\r\ncontent-length: 5\r\n\r\n"
    bodyless = early + b"HTTP/1.1 %b\r\n%b\r\n" % (status, framing)
    _, port = await site(answering(bodyless), worker=True)
    path = b"/v1/responses/resp_%b_%b" % (response_tag("w", "s").encode(), b"0" * 32)
    of_request = {} if method == b"POST" else {"method": method, "path": path, "body": b""}
    code, lines, rest = await ask(port, **of_request)
    assert (code, rest) == (int(status.split()[0]), b"")
    assert names_of(lines) == OURS - {b"content-type", b"content-length"}
    client = await connect(port)
    for _ in range(2):
        await client.send(request(**of_request))
        assert (await client.response(method))[0] == code


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_no_trailer_reaches_a_client(site, connect, worker, version):
    """Whoever sends them: a client may take one for a header."""
    ending = b"0\r\nset-cookie: a=b\r\nx-ichat-usage: 1,2,3\r\n\r\n"
    _, port = await site(answering(SSE_HEAD + event(1) + ending), worker=worker)
    client = await connect(port)
    await client.send(request(lines=[b"Connection: close"]).replace(b"HTTP/1.1", b"HTTP/" + version))
    received = await client.everything()
    assert received.endswith(b"\r\n0\r\n\r\n" if version == b"1.1" else b'data: {"n": 1}\n\n')
    assert b"set-cookie" not in received
    assert b"x-ichat-usage" not in received


# What a browser may ask.

REFUSED = [
    {b"mode": b"navigate", b"dest": b"document", b"site": b"cross-site"},
    {b"mode": b"navigate", b"dest": b"iframe", b"site": b"same-origin"},
    {b"mode": b"navigate"},
    {b"mode": b"nested-navigate"},
    {b"mode": b"websocket"},
    {b"mode": b"same-origin", b"dest": b"serviceworker"},
    {b"mode": b"no-cors", b"dest": b"empty", b"site": b"cross-site"},
    {b"mode": b"no-cors", b"dest": b"empty", b"site": b"same-site"},
    *({b"dest": kind} for kind in (
        b"document", b"iframe", b"frame", b"fencedframe", b"embed", b"object", b"serviceworker", b"sharedworker",
        b"worker", b"audioworklet", b"paintworklet", b"script", b"style", b"xslt", b"font", b"image", b"audio", b"video",
        b"track", b"manifest", b"report", b"json", b"webidentity", b"speculationrules", b"something-new", b"",
    )),
]  # fmt: skip
TAKEN = [
    {b"mode": b"cors", b"dest": b"empty", b"site": b"cross-site"},
    {b"mode": b"cors", b"dest": b"empty", b"site": b"same-origin"},
    {b"mode": b"same-origin", b"dest": b"empty", b"site": b"same-origin"},
    {b"mode": b"cors"},
    {b"mode": b"no-cors", b"dest": b"empty", b"site": b"none"},
    {},
]


KEY = "sk-client-0123456789"
KEYED = f'[security]\n[[security.keys]]\nname = "c"\nkey_hash = "{hash_of(KEY)}"\n'
"""With keys, nothing but what a test is about keeps a page from asking."""
BEARER = b"Authorization: Bearer " + KEY.encode()


def fetch_metadata(words):
    return [b"Sec-Fetch-%b: %b" % (name.title(), value) for name, value in words.items()]


@pytest.mark.parametrize("words", REFUSED, ids=repr)
async def test_requests_that_no_script_makes_are_refused_before_their_body(site, ask, words):
    """By one sentence, and the body need not come: forms, frames, pictures, scripts, service workers."""
    upstream, port = await site(answering(plain(b"{}")), more=KEYED)
    stored = b"/v1/responses/resp_%b_%b" % (response_tag("w", "s").encode(), b"0" * 32)
    lines = [BEARER, *fetch_metadata(words)]
    for of_request in (
        {"body": b"", "length": 100_000},
        {"path": b"/v1/anything"},
        {"method": b"GET", "path": stored, "body": b""},
    ):
        code, _, body = await ask(port, b"}", lines=lines, **of_request)
        assert (code, code_of(body)) == (403, "forbidden"), of_request
        assert b"send requests for models" in body
    assert upstream.requests == []
    assert (await ask(port, method=b"GET", path=b"/v1/models", body=b"", lines=lines))[0] == 200


@pytest.mark.parametrize("words", TAKEN, ids=repr)
async def test_requests_of_scripts_and_programs_are_answered(site, ask, words):
    """`fetch` in a page, Node's, and programs of Electron's, which say `no-cors` and that no page asks."""
    _, port = await site(answering(plain(b"{}")), more=KEYED)
    assert (await ask(port, b"{}", lines=[BEARER, *fetch_metadata(words)]))[0] == 200


@pytest.mark.parametrize("more", [b"gzip", b"br", b"gzip, identity", b"Deflate", b"x"])
async def test_a_coded_body_is_refused_before_it_comes(site, ask, more):
    """The gateway reads a body as it is: an upstream that decodes it would read another one."""
    upstream, port = await site(answering(plain(b"{}")))
    for lines in ([b"Content-Encoding: " + more], [b"Content-Encoding: identity", b"content-encoding: " + more]):
        code, _, body = await ask(port, b"}", lines=lines, body=b"", length=100_000)
        assert (code, code_of(body)) == (415, "unsupported_content_encoding")
        assert b"Content-Encoding: " + more in body
    assert upstream.requests == []
    assert (await ask(port, b"{}", lines=[b"Content-Encoding: Identity"]))[0] == 200


# What an upstream is told of a client.


@pytest.mark.parametrize("worker", [False, True])
async def test_upstreams_get_nothing_that_identifies_the_client(site, ask, worker):
    """No cookie, no key for a proxy, no address, no name: what a browser or a proxy added ends here."""
    upstream, port = await site(answering(plain(b"{}")), worker=worker, more='cors_origins = ["*"]\n')
    assert (await ask(port, b"{}", lines=[*OF_CLIENT, *GOES_ON]))[0] == 200
    head = next(head for head, _ in upstream.requests if head.method == b"POST")
    told = {b"%b: %b" % header for header in head.headers}
    assert told >= GOES_ON
    made = {b"host", b"content-length", b"x-request-id", b"x-ichat-hop", b"traceparent", b"accept-encoding"}
    assert names_of(told - GOES_ON) <= made


async def test_a_page_may_use_a_worker_of_the_same_machine(gateway_to, connect, make_worker, ask):
    """The gateway has judged its origin: the worker, which has no token, takes the request for the gateway's."""
    rig, worker = await make_worker()
    rig.door.authenticate = WorkerServer(rig.options, rig.engine, rig.host, worker).authenticate
    port = await gateway_to({}, 'cors_origins = ["https://chat.example"]\n')
    await heartbeat(connect, port, worker, heartbeat_interval=3600)
    page = [b"Origin: https://chat.example", b"Referer: https://chat.example/", b"Content-Type: application/json"]
    page += fetch_metadata({b"site": b"cross-site", b"mode": b"cors", b"dest": b"empty"})
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    code, lines, rest = await ask(port, b"}", lines=page, body=body)
    assert code == 200, rest
    assert b"access-control-allow-origin: https://chat.example" in lines


def test_names_are_judged_once_and_remembered_within_bounds():
    """A peer that sends ever new names does not fill the memory."""
    judge = left_out({b"a"}, NOT_OF_ANSWERS_BEGIN)
    assert [judge(name) for name in (b"a", b"b", b"x-ichat-b", b"access-control-x", b"a")] == [
        True,
        False,
        True,
        True,
        True,
    ]
    for number in range(2000):
        judge(b"x-%d" % number)
    assert len(judge.__self__) <= 512


async def test_the_odd_head_is_judged_by_all_its_lines(site, ask):
    """A repeated header counts each time."""
    _, port = await site(answering(plain(b"{}")))
    lines = [b"Sec-Fetch-Dest: empty", b"Sec-Fetch-Dest: document"]
    assert (await ask(port, b"}", lines=lines))[0] == 403
    assert parse_plain_request_head(request(lines=lines).partition(b"\r\n\r\n")[0]) is not None
