"""Fuzz the front door: bytes that nobody would send, from clients and from upstreams, against a real gateway.

    python tests/soak/fuzz_front_door.py [--minutes 10] [--seed N] [--what both] [--keys] [--only NUMBER] [--report FILE]

Requests and responses are made by mutation, each from the seed and its own number, so that one alone can be repeated.
What h11 makes of a request's bytes says what the upstream may see, and how often; what it makes of a response's bytes
says what the client may get. Ends with 1 where there is a finding.
"""

import argparse
import collections
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import pathlib
import random
import re
import socket
import ssl
import sys
import tempfile
import time

import attrs
import h11
import psutil
import trio
import trustme
from running import ROOT, end, port_in, start_gateway

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.corpus import CASES, passed_on, read_by_h11  # noqa: E402
from support.forms import at_once  # noqa: E402
from support.peers import AS_OWN, OWN_SECRET, code_of, write_secret  # noqa: E402

from ichat.errors import ApiError  # noqa: E402
from ichat.http.heads import form_type  # noqa: E402
from ichat.http.json_body import PARSED_BYTES_MAX  # noqa: E402
from ichat.http.multipart import read_form  # noqa: E402
from ichat.proxy.planes import is_control  # noqa: E402
from ichat.security.keys import hash_of  # noqa: E402

HEAD_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 256 * 1024
LIMIT_S = 30
"""By when anything here has happened, on a machine that stands still at times."""
LEAVE_S = 0.01
"""How long a client waits that knows of nothing more to come."""
PATIENCE = 0.01
"""How often it waits for the gateway's own deadline instead."""
TASKS = 64
FIRST_OF_ALL = 5_000_000
"""Numbers of what is asked through TLS before anything else, so that what is opened only once is open."""
RESPONSES = {"requests": 0.0, "both": 0.2, "responses": 1.0}
"""The share of inputs whose response is mutated, and not their requests."""
PROBES_MAX = 3
PROBE_EVERY = 50
"""Inputs of each task between two requests that must be answered."""
SETTLE_S = 8.0
"""By when kept connections have ended."""
KEPT_S = 60.0
"""How long a request may still arrive at the upstream after its client has left."""
FINDINGS_MAX = 50
REFUSED = (400, 401, 403, 405, 408, 411, 413, 415, 431)
"""With these the gateway refuses what is no request, or whose body need not be read."""
JSON = b"Content-Type: application/json"
OWN = AS_OWN[:-2]
_UNCLEAR = re.compile(rb"(?i)(?<!\r)\n|\n[ \t]|[\0-\x08\x0b-\x0c\x0e-\x1f\x7f]|content-length:[^\r\n]*,|HTTP/1\.0")
_TWO_LENGTHS = re.compile(rb"(?is)content-length:(?:(?!\r\n\r\n).)*content-length:")
_REPEATED = re.compile(r"(.{1,80}?)\1{7,}")
TOML = """
[server_settings]
hosts = ["*"]
port = 0
state_directory = "{directory}"
watch_config = false
{tls}
[limits]
head_bytes_max = {head}
body_bytes_max = {body}
[timeouts]
head_s = 4.0
body_s = 5.0
keep_alive_s = 3.0
client_stall_s = 3.0
first_byte_s = 10.0
stream_stall_s = 10.0
upstream_idle_s = 2.0
[logs]
access_log = "/dev/null"
[circuit_breaker]
failures_max = 0
[[external_routes]]
model_name = "m"
api_base = "http://127.0.0.1:{port}/v1"
{keys}
"""
KEY = b"fuzz-0123456789abcdef"
KEYS = f'[[security.keys]]\nname = "fuzz"\nkey_hash = "{hash_of(KEY.decode())}"'
BEARER = b"Authorization: Bearer %b\r\n" % KEY
CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
NOT_COMPARED = (
    b"cookie", b"proxy-authorization", b"traceparent", b"tracestate", b"x-ichat-", b"x-forwarded-", b"forwarded", b"origin",
    b"x-real-ip", b"accept-encoding", b"sec-", b"referer", *CREDENTIALS,
)  # fmt: skip
"""What headers of requests begin with that the gateway leaves out, or makes itself."""


def settings(port, directory, tls="", *, keyed=False):
    """Write the gateway's configuration; `port` is the upstream's, `keyed` says whether clients need a key."""
    write_secret(pathlib.Path(directory))
    more = {"head": HEAD_BYTES_MAX, "body": BODY_BYTES_MAX, "keys": KEYS if keyed else ""}
    return TOML.format(port=port, directory=directory, tls=tls, **more)


# What is sent.

ROUTES = [
    b"/v1/chat/completions", b"/v1/chat/completions", b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings",
    b"/v1/rerank", b"/v2/rerank", b"/tokenize", b"/v1/responses", b"/v1/messages", b"/v1/%63hat/completions",
    b"/v1/x/../chat", b"/v1/anything?a=%00", b"/nothing", b"//v1/x",
]  # fmt: skip
ASKED = [
    b"/health", b"/v1/models", b"/v1/models/m", b"/v1/models/a/b", b"/v1/models/%ff%00", b"/v1/admin/workers",
    b"/v1/admin/workers/x%2fy", b"/v1/admin/cluster/version", b"/v1/admin/nothing", b"/openapi.json",
    b"/v1/logs/stream/w?follow=false&tail=3", b"/v1/logs/stream/w?tail=-1", b"/v1/logs/stream/%0d%0aX:y?follow=no",
]  # fmt: skip
BEAT = {
    "worker_id": "w", "model_name": "beaten", "backend": "vllm", "host": "127.0.0.1", "port": 1, "model_path": "/m",
    "state": "ready", "heartbeat_interval": 3, "start_id": "s", "pid": 1,
}  # fmt: skip
LINES = [
    b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: 18446744073709551616",
    b"content-length:\t7 ", b"Content-Length: 5, 5", b"Content-Length: 0x5", b"Content-Length : 5",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding: identity", b"Transfer-Encoding\t: chunked", b"TE: trailers", b"Trailer: x-sum",
    b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: close", b"Connection: keep-alive, x-a, content-length",
    b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk", b"Host: y",
    b" folded", b"\tContent-Length: 9", b"X-Request-Id: \xc3\xa9", b"X-Request-Id: " + b"i" * 200, b"X-A: \xff\xfe",
    b"Content-Type: multipart/form-data; boundary=b", b'Content-Type: multipart/form-data; boundary="\\b', b":",
    b"Content-Encoding: gzip", b"Sec-Fetch-Mode: navigate", b"X-Session-Id: a", b"Authorization: Bearer \x01", b"Cookie: a=b", b"A", b"\x00: b",
    b"X : y", b"X\t: y", b"X\x0b: y", b"X: a\x0bb", b"X: a\x0cb", b"X: a\x7fb", b"X: a\rb", b"X: a\nb", b"X: a\0b", b"X(: y",
    b"\xc3\xa9: y", b"X: y ", b"X:y:z", b"Host : x", b"Content-Length: 13\x0b", b"Content-Length: +13",
    b"X-Ichat-Hop: 1", b"X-Ichat-Caller: admin here - 127.0.0.1", b"X-Forwarded-For: 127.0.0.1", b"Origin: http://localhost",
    b"Accept-Encoding: br", b"Range: bytes=0-1", b"Last-Event-ID: 99999999999999999999", b"x: " + b"y" * 3000,
]  # fmt: skip
TOKENS = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b"\x0b", b"\x0c", b"\x85", b"\xa0", b":", b";", b",", b"%", b"%0d%0a",
    b"\r\n\r\n", b"\n\n", b"0\r\n\r\n", b"\r\n ", b"\xef\xbb\xbf", b"\xc3\xa9", b"\xed\xa0\x80", b"\xff", b'"', b"\\",
    b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"http://y/", b"..", b"/", b"*", b"?", b"#", b"chunked", b"-", b"+", b"_",
    b"4294967296", b"18446744073709551615", b"1" * 400, b"ffffffffffffffff", b"1e999", b"NaN", b"null", b"{", b"[",
    b'"model":"m",', b'"model":"x",', b'"mod\\u0065l":"m",', b"\\ud800", b"--b", b"--b--", b"\r\n--b\r\n",
]  # fmt: skip


def mark_of(number):
    """Return what makes an input's requests different from those of all others."""
    return b"mark%08dz" % number


def member(dice):
    """Make one member of a JSON object: long, deep, large, twice, or wrong."""
    kind = dice.randrange(8)
    if kind == 0:
        return b'"n":' + b"9" * dice.choice([3, 30, 5000])
    if kind == 1:
        depth = dice.choice([3, 300, 3000, 20000])
        return b'"deep":' + b"[" * depth + b"]" * depth
    if kind == 2:
        return b'"deep":' + b'{"a":' * 500 + b"1" + b"}" * dice.choice([499, 500, 501])
    if kind == 3:
        return b'"model":' + dice.choice([b'"m"', b'"x"', b"null", b"[]", b'""', b'"\\u006d"', b"1e400"])
    if kind == 4:
        return b'"text":"%b"' % (dice.choice([b"a", b"\\\\", b'\\"', b"\xc3\xa9", b"\xff", b"\\u00e9"]) * 400)
    if kind == 5:
        return b'"long":"%b"' % (b"x" * dice.choice([1000, 70_000, 200_000]))
    if kind == 6:
        return b'"e":1e%d,"f":-0.0,"g":NaN,"h":-Infinity' % dice.randrange(1000)
    return b'"messages":[{"role":"user","content":"hi"}],"stream":true'


def json_body(dice, mark):
    """Make the body of a request: JSON, most of the time."""
    members = [b'"model":"m"', b'"mark":"%b"' % mark]
    members += [member(dice) for _ in range(dice.choice([0, 0, 1, 1, 2, 4]))]
    dice.shuffle(members)
    space = dice.choice([b"", b"", b" ", b"\r\n", b"\t" * 50])
    body = b"{" + space + (space + b"," + space).join(members) + space + b"}"
    return dice.choice([b""] * 12 + [b"\xef\xbb\xbf", b"\n", b"\0"]) + body


def form_body(dice, mark):
    """Make a multipart form, its boundary `b`."""
    file = dice.randbytes(dice.choice([0, 50, 5000]))
    parts = [(b'name="model"', b"m"), (b'name="mark"', mark), (b'name="file"; filename="a%22.wav"', file)]
    if dice.random() < 0.2:
        parts.append(dice.choice(parts))
    dice.shuffle(parts)
    head = b"--b\r\nContent-Disposition: form-data; "
    return b"".join(head + b"%b\r\n\r\n%b\r\n" % part for part in parts) + b"--b--\r\n"


def framed(dice, line, body, *more, host=b"Host: x"):
    """Write a request with one of the framings there are."""
    lines = [line, host, *more]
    if dice.random() < 0.15:
        lines.append(b"Expect: 100-continue")
    if dice.random() < 0.35:
        lines.append(b"Transfer-Encoding: chunked")
        size = dice.choice([1, 7, 100, 5000]) if len(body) < 2000 else dice.choice([3000, 70_000])
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        extension = dice.choice([b"", b"", b";a=b", b';c="d"'])
        data = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
        body = data + b"0\r\n" + dice.choice([b"", b"", b"X-Sum: 1\r\n"]) + b"\r\n"
    else:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def with_mark(target, mark):
    return target + (b"&" if b"?" in target else b"?") + mark


def valid_request(dice, mark):
    """Make a request that has one reading, though not always an answer of 200."""
    kind = dice.random()
    version = b"HTTP/1.0" if dice.random() < 0.05 else b"HTTP/1.1"
    if kind < 0.6:
        line = b"POST %b %b" % (with_mark(dice.choice(ROUTES), mark), version)
        return framed(dice, line, json_body(dice, mark), b"Content-Type: application/json")
    if kind < 0.7:
        line = b"POST %b %b" % (with_mark(b"/v1/audio/transcriptions", mark), version)
        return framed(dice, line, form_body(dice, mark), b"Content-Type: multipart/form-data; boundary=b")
    if kind < 0.75:
        heartbeat = {
            **BEAT,
            dice.choice(list(BEAT)): dice.choice([None, -1, "", "w", [], {"a": [1]}, 1e300, "x" * 500]),
        }
        body = json.dumps(dice.choice([BEAT, heartbeat])).encode()
        return framed(dice, b"POST /v1/workers/heartbeat %b" % version, body, JSON, OWN, host=b"Host: localhost")
    if kind < 0.78:
        body = json.dumps({"model_name": 5, "model_path": dice.choice(["", None, "/m"]), "mark": mark.decode()})
        line = b"POST /v1/admin/workers/launch %b" % version
        return framed(dice, line, body.encode(), JSON, OWN, host=b"Host: localhost")
    if kind < 0.8:
        line = b"%b /v1/admin/workers/%b %b" % (dice.choice([b"DELETE", b"PUT"]), mark, version)
        return b"%b\r\nHost: localhost\r\n%b\r\n\r\n" % (line, OWN)
    if kind < 0.9:
        method = dice.choice([b"GET", b"GET", b"GET", b"HEAD", b"OPTIONS", b"get", b"PROPFIND"])
        return b"%b %b %b\r\nHost: localhost\r\n\r\n" % (method, with_mark(dice.choice(ASKED), mark), version)
    return dice.choice(CASES).data.replace(b"/v1/completions", b"/v1/completions?" + mark)


def flip(dice, data):
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def put_token(dice, data):
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(TOKENS) + data[at + dice.choice([0, 0, 1, 2]) :]


def put_line(dice, data):
    ends = [found.end() for found in itertools.islice(re.finditer(rb"\n", data), 50)] or [0]
    at = dice.choice(ends)
    return data[:at] + dice.choice(LINES) + dice.choice([b"\r\n"] * 6 + [b"\n", b"\r", b"\r\r\n"]) + data[at:]


def drop(dice, data):
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.choice([1, 1, 2, 5, 50]) :]


def repeat(dice, data):
    at = dice.randrange(len(data))
    span = data[at : at + dice.choice([1, 2, 8, 40, 400])]
    return data[:at] + span * dice.choice([2, 2, 3, 20, 200 if len(span) < 10 else 2]) + data[at:]


def repeat_line(dice, data):
    lines = data.split(b"\r\n")
    at = dice.randrange(min(len(lines), 20))
    lines.insert(dice.randrange(min(len(lines), 20)), lines[at])
    return b"\r\n".join(lines)


def lengthen(dice, data):
    """Make a head about as long as is allowed, by one line or by many."""
    at = data.find(b"\r\n") + 2
    size = max(HEAD_BYTES_MAX - data.find(b"\r\n\r\n") + dice.choice([-300, -8, -7, -6, -5, -4, -3, 0, 1, 5000]), 10)
    more = b"X: " + b"y" * (size - 5) + b"\r\n" if dice.random() < 0.5 else b"X: y\r\n" * (size // 6)
    return data[:at] + more + data[at:]


def renumber(dice, data):
    found = list(itertools.islice(re.finditer(rb"(?<=: )[0-9]+|(?<=\r\n)[0-9a-f]+(?=\r\n)", data), 20))
    if not found:
        return data
    number = dice.choice(found)
    new = dice.choice(
        [b"0", b"1", b"00", b"-1", b"+5", b"%d" % dice.randrange(3000), b"9" * 19, b"f" * 16, b"0x5", b""]
    )
    return data[: number.start()] + new + data[number.end() :]


def other_newlines(dice, data):
    return data.replace(b"\r\n", dice.choice([b"\n", b"\r", b"\n\r", b"\r\n\r\n"]), dice.choice([1, 2, 5, -1]))


MUTATIONS = (
    [flip] * 3 + [put_token] * 4 + [put_line] * 4 + [drop] * 2 + [repeat, repeat_line, lengthen]
    + [renumber] * 2 + [other_newlines]
)  # fmt: skip


def mutated(dice, data, times):
    for _ in range(times):
        data = dice.choice(MUTATIONS)(dice, data) or b"\r\n"
    return data


def split(dice, data):
    """Cut into pieces, each with the pause behind it in seconds."""
    count = min(dice.choice([0, 0, 0, 1, 2, 5, 40]), len(data) - 1)
    cuts = [0, *sorted(dice.sample(range(1, len(data)), max(count, 0))), len(data)]
    pause = dice.choice([0.0, 0.0, 0.001])
    return [(data[start:end], pause) for start, end in itertools.pairwise(cuts)]


KEEP_S = 0.5
"""How long the upstream waits for the gateway to find that a response is whole, before it closes the connection."""
UNSPLIT_BYTES_MAX = 16 * 1024
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" tok"}}]}\n\n'


@attrs.define(eq=False)
class Script:
    """What the upstream does with an input's request, and what it has sent by now."""

    pieces: list[tuple[bytes, float]]
    end: str
    """`keep`, `close`, `reset` or `hang`: what becomes of the connection."""
    sent: bytes = b""
    attempts: int = 0


def make_script(dice):
    """Make a response, most of the time mutated, and an end."""
    body = b'{"object":"x","poison":false}'
    events = b"".join(b"%x\r\n%b\r\n" % (len(EVENT), EVENT) for _ in range(dice.choice([1, 3, 30])))
    sse = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    data = dice.choice(
        [
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
            sse + b"transfer-encoding: chunked\r\n\r\n" + events + b"0\r\n\r\n",
            sse + b"transfer-encoding: chunked\r\n\r\n" + events + b"0\r\nx-sum: 1\r\n\r\n",
            sse + b"connection: close\r\n\r\n" + EVENT * 3,
            b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + body,
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 304 \r\ncontent-length: 10\r\n\r\n",
            b'HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 25\r\n\r\n{"error":{"message":"a"}}',
            b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b"
            % (len(packed := gzip.compress(body, mtime=0)), packed),
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 300_000 + b"x" * 300_000,
        ]
    )
    data = mutated(dice, data, dice.choice([0, 1, 1, 2, 4]))
    if dice.random() < 0.1:
        data += b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"poison": true}'
    if dice.random() < 0.15:
        data = data[: dice.randrange(len(data))]
    end = dice.choice(["keep", "close", "reset"] * 12 + ["hang"])
    response, surplus = read_response(data, b"POST", ended=False)
    if surplus or response.error:  # at once: what comes later than its response can only be taken for the next one
        return Script([(data[:UNSPLIT_BYTES_MAX], 0.0)], end)
    return Script(split(dice, data) if data else [], end)


@attrs.define(eq=False)
class Input:
    """What one client sends, and how it leaves."""

    number: int
    pieces: list[tuple[bytes, float]]
    end: str
    """`read`: when all has been answered; `patient`: the gateway must end it; `close`, `half`, `reset`: after the pieces."""
    script: Script | None

    @property
    def data(self):
        return b"".join(piece for piece, _ in self.pieces)


def make_input(seed, number, *, keyed=False, what="both"):
    """Make an input; always the same one from the same seed and number. `keyed`: most of its requests have the key.

    `what` says whether requests or responses are mutated, or now these, now those.
    """
    dice = random.Random(f"{seed}/{number}")
    mark = mark_of(number)
    if dice.random() < RESPONSES[what]:
        body = b'{"model":"m","mark":"%b"}' % mark
        line = b"POST /v1/completions?%b HTTP/1.%d\r\nHost: x\r\n" + BEARER * keyed
        post = line + b"Content-Length: %d\r\n\r\n%b"
        data = post % (mark, dice.random() < 0.9, len(body), body)
        if dice.random() < 0.3:
            data += post % (b"again", 1, len(body), body)
        return Input(number, split(dice, data), "patient" if dice.random() < PATIENCE else "read", make_script(dice))
    data = b"".join(valid_request(dice, mark) for _ in range(dice.choice([1, 1, 1, 2, 4])))
    if keyed and dice.random() < 0.8:
        data = data.replace(b"Host: x\r\n", b"Host: x\r\n" + BEARER)
    data = mutated(dice, data, dice.choice([0, 1, 1, 2, 3, 6]))
    if dice.random() < 0.3:
        data += valid_request(dice, mark + b"last")
    end = "patient" if dice.random() < PATIENCE else dice.choice(["read"] * 17 + ["close", "half", "reset"])
    if end in ("close", "half", "reset"):
        data = data[: dice.randrange(len(data)) + 1]
    return Input(number, split(dice, data), end, None)


# What comes back.


@attrs.define
class Response:
    """One response as h11 reads it; `complete`: up to its end; `error`: why it is no HTTP."""

    status: int = 0
    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    body: bytes = b""
    complete: bool = False
    error: str = ""
    continues: int = 0


def read_response(data, method, *, ended):
    """Read one response to a request of this method; give it and what follows. `ended`: the connection, in good order."""
    response = Response()
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=10_000_000)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    try:
        parser.receive_data(data)
        if ended:
            parser.receive_data(b"")
        while not response.complete:
            event = parser.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                break
            if isinstance(event, h11.Response):
                response.status, response.headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.InformationalResponse):
                response.continues += 1
            elif isinstance(event, h11.Data):
                response.body += event.data
            else:
                response.complete = True
    except h11.RemoteProtocolError as error:
        is_short = str(error).startswith("peer ") or "ConnectionClosed" in str(error)  # which is not wrong
        response.error = "" if is_short else str(error)
    return response, parser.trailing_data[0] if response.complete else b""


def read_responses(data, methods, *, ended):
    """Read the responses on one connection, the last perhaps incomplete; give them and what follows."""
    responses = []
    for method in methods:
        if not data:
            break
        response, rest = read_response(data, method, ended=ended)
        if method == b"HEAD" and rest and b"close" in response.headers.get(b"connection", b""):
            response, rest = read_response(data, b"POST", ended=ended)  # a head that was not read has no method
        data = rest
        responses.append(response)
        if not response.complete:
            break
    return responses, data


def digest_of(method, target, headers, body):
    """Return what two readings of one request have in common."""
    kept = [header for header in passed_on(headers) if not header[0].startswith(NOT_COMPARED)]
    text = repr((method, target.removeprefix(b"/v1"), kept, bytes(body)))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest().encode()


def as_passed_on(headers, body):
    """Return the headers and the body of a request as its upstream gets them: a form's heads are written anew."""
    content_type = form_type(dict(reversed(headers)))
    if not content_type or len(body) > PARSED_BYTES_MAX:
        return headers, body
    try:
        form = at_once(read_form(bytes(body), content_type))
    except ApiError:
        return headers, body
    return [(name, form.content_type if name == b"content-type" else value) for name, value in headers], form.body


def reset(sock):
    """Close a connection the hard way."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


@attrs.define
class Row:
    """One request, as its digest has it."""

    allowed: int = 0
    seen: int = 0
    inputs: int = 0
    """Inputs that have it and are not forgotten."""


@attrs.define
class Ledger:
    """How often each request may have reached the upstream, and has."""

    found: collections.abc.Callable
    rows: dict[bytes, Row] = attrs.field(factory=lambda: collections.defaultdict(Row))
    _old: collections.deque = attrs.field(factory=collections.deque)

    def allow(self, digest):
        self.rows[digest].allowed += 1

    def saw(self, digest, request):
        row = self.rows[digest]
        row.seen += 1
        if row.seen > row.allowed:
            self.found("the upstream sees what no client sent, or sees it too often", None, request[:2000])

    def begin(self, digests):
        """Allow the requests of an input."""
        for digest in digests:
            self.allow(digest)
            self.rows[digest].inputs += 1

    def settle(self, digests, refused, number):
        """Lower what is allowed by what was refused; the rest is forgotten later."""
        for digest in refused:
            self.rows[digest].allowed -= 1
        for digest in refused:
            if self.rows[digest].seen > self.rows[digest].allowed:
                self.found("a request that was refused reached the upstream", number, self.rows[digest])
        self._old.append((time.monotonic(), digests))
        while self._old and self._old[0][0] < time.monotonic() - KEPT_S:
            for digest in self._old.popleft()[1]:
                self.rows[digest].inputs -= 1
                if not self.rows[digest].inputs:
                    del self.rows[digest]


class Upstream:
    """Answers each request with its digest, or as the input's script says; reads only what is framed by one length."""

    def __init__(self, found):
        self.found = found
        self.ledger = Ledger(found)
        self.scripts = {}
        self.requests = 0

    async def serve(self, stream):
        sock = stream.socket
        data = b""
        first = True
        with contextlib.suppress(OSError):
            while True:
                while (end := data.find(b"\r\n\r\n")) < 0:
                    if not (more := await sock.recv(65536)):
                        break
                    data += more
                if end < 0:
                    break
                line, *lines = data[:end].split(b"\r\n")
                headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
                lengths = [int(value) for name, value in headers if name == b"content-length"]
                if len(lengths) != 1 or b"transfer-encoding" in dict(headers) or b"\n" in line.join(lines):
                    self.found("the upstream gets an unclear head", None, data[:end])
                    break
                begin = end + 4
                while len(data) < begin + lengths[0] and (more := await sock.recv(65536)):
                    data += more
                if len(data) < begin + lengths[0]:
                    break
                request, data = data[: begin + lengths[0]], data[begin + lengths[0] :]
                method, target, _ = line.split(b" ")
                digest = digest_of(method, target, headers, request[begin:])
                self.requests += 1
                self.ledger.saw(digest, request)
                if not await self.answer(sock, digest, first=first):
                    return
                first = False
        sock.close()

    async def answer(self, sock, digest, *, first):
        """Answer one request; say whether the connection goes on."""
        script = self.scripts.get(digest)
        if script is None:
            await send_all(sock, b"HTTP/1.1 200 OK\r\nx-echo: %b\r\ncontent-length: 2\r\n\r\n{}" % digest)
            return True
        if not first and not script.pieces and script.end != "hang":
            self.ledger.allow(digest)  # nothing was said on a kept connection: it may be asked again
        script.attempts += 1
        script.sent = b""
        for piece, pause in script.pieces:
            script.sent += piece
            await send_all(sock, piece)
            if pause:
                await trio.sleep(pause)
        if script.end in ("keep", "hang"):
            with trio.move_on_after(KEEP_S if script.end == "keep" else LIMIT_S):
                if await sock.recv(1, socket.MSG_PEEK):
                    return True  # the response was whole for the gateway, and this is the next request
        if script.end == "reset":
            reset(sock)
        sock.close()
        return False


async def send_all(sock, data):
    view = memoryview(data)
    while view:
        view = view[await sock.send(view) :]


@attrs.define(eq=False)
class Fuzz:
    """Plays inputs against a gateway on this machine, and notes what is wrong."""

    seed: object
    keyed: bool = False
    """Whether the gateway asks clients for KEY."""
    what: str = "both"
    """See `make_input`."""
    port: int = 0
    findings: list[str] = attrs.field(factory=list)
    inputs: int = 0
    probes: int = 0
    probe_ms_max: float = 0.0
    slow: int = 0
    """Probes that had to be repeated."""
    statuses: collections.Counter = attrs.field(factory=collections.Counter)
    """How inputs' requests were answered."""
    upstreams: collections.Counter = attrs.field(factory=collections.Counter)
    """How mutated responses of the upstream were passed on."""
    _numbers: itertools.count = attrs.field(factory=itertools.count)
    upstream: Upstream = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.upstream = Upstream(self.found)

    @property
    def is_over(self):
        return len(self.findings) >= FINDINGS_MAX

    def found(self, what, number, detail=b""):
        """Note a finding; more than FINDINGS_MAX are not kept."""
        if not self.is_over:
            text = _REPEATED.sub(lambda run: f"{run[1]}<{len(run[0]) // len(run[1])} times>", repr(detail))
            self.findings.append(f"{what} (input {self.seed}/{number}): {text[:3000]}")
            print(self.findings[-1], flush=True)

    async def run(self, count, deadline=float("inf")):
        """Play so many inputs, or until a time on Trio's clock."""
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(self._play_on, count, deadline)

    async def _play_on(self, count, deadline):
        for played in itertools.count():
            number = next(self._numbers)
            if number >= count or trio.current_time() > deadline or self.is_over:
                return
            await self.play(make_input(self.seed, number, keyed=self.keyed, what=self.what))
            if played % PROBE_EVERY == 0:
                await self.probe()

    async def connect(self):
        sock = trio.socket.socket()
        try:
            await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    async def probe(self):
        """Ask as anybody would, on a connection of its own; whatever else goes on, that must be answered."""
        self.probes += 1
        started = time.monotonic()
        for attempt in range(PROBES_MAX):
            number = 90_000_000 + PROBES_MAX * self.probes + attempt
            status, answer = await self._ask(mark_of(number))
            if status == 200:
                break
            self.slow += 1
        else:
            self.found("a valid request is not answered", number, answer)
        self.probe_ms_max = max(self.probe_ms_max, (time.monotonic() - started) * 1000)

    async def _ask(self, mark):
        """Send a request that is right; give status and answer. A machine that stands still may make it a 504."""
        body = b'{"model":"m","mark":"%b"}' % mark
        line = b"POST /v1/completions?%b HTTP/1.1\r\nHost: x\r\n" + BEARER * self.keyed
        request = line + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b"
        self.upstream.ledger.allow(digest_of(b"POST", b"/v1/completions?" + mark, [], body))
        answer = b""
        with trio.move_on_after(LIMIT_S):
            sock = await self.connect()
            with sock, contextlib.suppress(OSError):
                await send_all(sock, request % (mark, len(body), body))
                while more := await sock.recv(65536):
                    answer += more
        response, _ = read_response(answer, b"POST", ended=True)
        return response.status if response.complete else 0, answer

    async def play(self, input_):
        """Play one input, and check what comes of it."""
        data = input_.data
        reading = read_by_h11([data])
        digests = [
            digest_of(head.method, head.target, *as_passed_on(list(head.headers), body))
            for head, body in reading.requests
            if self._may_pass(head)
        ]
        self.upstream.ledger.begin(digests)
        if input_.script is not None:
            self.upstream.scripts[digests[0]] = input_.script
        received, how = b"", "hang"
        with trio.move_on_after(LIMIT_S):
            sock = await self.connect()
            try:
                received, how = await self._exchange(sock, input_, reading)
            finally:
                sock.close()
        if input_.script is not None:
            del self.upstream.scripts[digests[0]]
        self.inputs += 1
        if how == "hang":
            self.found(f"not over within {LIMIT_S} s", input_.number, (data, received))
        methods = [head.method for head, _ in reading.requests] + [b"POST"]
        responses, surplus = read_responses(received, methods, ended=how == "eof")
        unseen = self._check(input_, reading, responses, surplus, how)
        self.upstream.ledger.settle(digests, unseen, input_.number)

    def _may_pass(self, head):
        """Return whether a request may reach the upstream."""
        return head.method == b"POST" and (not self.keyed or _has_key(head))

    async def _exchange(self, sock, input_, reading):
        """Send an input and read until nothing more can come; give what came, and how it ended."""
        received = b""
        methods = [head.method for head, _ in reading.requests] + [b"POST"]
        is_torn = False
        try:
            for piece, pause in input_.pieces:
                await send_all(sock, piece)
                if pause:
                    await trio.sleep(pause)
            if input_.end == "reset":
                reset(sock)
                return b"", "left"
            if input_.end == "half":
                sock.shutdown(socket.SHUT_WR)
            if input_.end == "close":
                return b"", "left"
        except OSError:
            is_torn = True  # an answer is still to be read, but the error that it may have ended in is gone
        try:
            while True:
                left = True
                with trio.move_on_after(self._patience(input_, reading, received, methods)):
                    more = await sock.recv(262144)
                    left = False
                if left:
                    return received, "left"
                if not more:
                    return received, "reset" if is_torn else "eof"
                received += more
        except OSError:
            return received, "reset"

    def _patience(self, input_, reading, received, methods):
        """Return how many seconds a client waits for more."""
        if input_.end in ("patient", "half"):
            return LIMIT_S
        responses, _ = read_responses(received, methods, ended=False)
        answered = sum(response.complete for response in responses)
        if answered > len(reading.requests) or any(
            b"close" in one.headers.get(b"connection", b"") for one in responses
        ):
            return LIMIT_S  # the end must come
        if any(response.error for response in responses):
            return LEAVE_S
        if answered < len(reading.requests):
            follows = any(head.target.startswith(b"/v1/logs/") for head, _ in reading.requests)
            return 10 * LEAVE_S if follows else LIMIT_S
        if reading.refusal or reading.ends:
            return LIMIT_S
        return LEAVE_S

    def _check(self, input_, reading, responses, surplus, how):
        """Check the answers to an input; give the digests of requests that must not reach the upstream."""
        number, requests = input_.number, reading.requests
        data = input_.data
        if surplus:
            self.found("more answers than requests", number, (data, surplus))
        unseen = []
        closed = False
        for index, (head, body) in enumerate(requests):
            digest = digest_of(head.method, head.target, *as_passed_on(list(head.headers), body))
            may_pass = self._may_pass(head)
            if index >= len(responses):
                if closed:
                    unseen += [digest] * may_pass
                elif input_.end == "patient" and how == "eof" and input_.script is None:
                    self.found("a request is not answered", number, (data, responses))
                continue
            response = responses[index]
            self._check_answer(input_, head, body, digest, response, how)
            closed = closed or b"close" in response.headers.get(b"connection", b"")
            if _is_refused(response):
                unseen += [digest] * may_pass
        if len(responses) > len(requests):
            self._check_refusal(input_, reading, responses[-1], how)
        return unseen

    def _check_refusal(self, input_, reading, response, how):
        """Check the answer to what is no request."""
        if not response.status and not response.error:
            return
        if response.status and (response.status not in REFUSED or b"x-ichat-error" not in response.headers):
            self.found("an answer to what is no request", input_.number, (input_.data, response))
        says_h11 = b"This is not valid HTTP/1.1" in response.body
        if says_h11 and not reading.refusal and not _is_unclear(input_.data):
            self.found("refused, though h11 takes it", input_.number, (input_.data, response))
        self.statuses[f"{response.status} no request"] += 1
        self._check_error(input_, response, b"POST", how)

    def _check_answer(self, input_, head, body, digest, response, how):
        """Check the answer to a request that h11 reads."""
        number, path = input_.number, head.target.partition(b"?")[0]
        ours = b"x-ichat-error" in response.headers
        self.statuses[f"{response.status or 'none'}{' by the gateway' if ours else ''}"] += 1
        if input_.script is not None and mark_of(number) in head.target:
            self._check_relayed(input_, response, how)
            return
        if response.error:
            self.found("not HTTP", number, (input_.data, response))
        if response.continues > (b"expect" in dict(head.headers)):
            self.found("100 unasked", number, (input_.data, response))
        if not response.status:
            return
        if b"x-request-id" not in response.headers:
            self.found("no request id", number, (input_.data, response))
        if response.status >= 400:
            self._check_error(input_, response, head.method, how)
            if b"This is not valid HTTP/1.1" in response.body and not _is_unclear(input_.data):
                self.found("refused, though h11 takes it", number, (input_.data, response))
            is_long = response.status == 431 and len(input_.data) > HEAD_BYTES_MAX
            if (
                _must_be_answered(head, body, path, keyed=self.keyed)
                and not is_long
                and not _is_unclear(input_.data)
                and response.status not in (408, 504)
                and not _is_late_reset(response)
            ):
                self.found("refused, though it is right", number, (input_.data, response))
        elif path.startswith(b"/v1/admin/") and head.method != b"OPTIONS" and not _is_here(head):
            self.found("a stranger may do what is the operator's", number, (input_.data, response))
        elif not is_control(path) and response.headers.get(b"x-echo") != digest:
            self.found("the answer to something else", number, (input_.data, response))
        # What a client sends behind a connection's last answer resets the rest of that away, if it reads too slowly.
        may_be_cut = how == "reset" and (len(input_.pieces) > 1 or input_.data.count(b"HTTP/1.") > 1)
        if not response.complete and how in ("eof", "reset") and input_.end != "half" and not may_be_cut:
            self.found("a whole answer was cut", number, (input_.data, response))

    def _check_error(self, input_, response, method, how):
        """Check the body of an error of ours."""
        if response.status == 500 or (response.status > 500 and response.status not in (502, 503, 504, 508)):
            self.found("a bug", input_.number, (input_.data, response))
        if b"x-ichat-error" not in response.headers:
            self.found("an error without a name", input_.number, (input_.data, response))
        if method == b"HEAD" or not response.complete:
            if not response.complete and how == "eof" and input_.end != "half":
                self.found("half an error", input_.number, (input_.data, response))
            return
        try:
            code_of(response.body)
        except (AssertionError, ValueError, KeyError, TypeError):
            self.found("an error that is not OpenAI's", input_.number, (input_.data, response))

    def _check_relayed(self, input_, response, how):
        """Check what became of a mutated response."""
        script, number = input_.script, input_.number
        facts = (script.sent, script.end, response, how)
        theirs, _ = read_response(script.sent, b"POST", ended=script.end in ("close", "keep"))
        state = "refused by h11" if theirs.error else "whole" if theirs.complete else "short"
        if b"x-ichat-error" in response.headers:
            self.upstreams[f"{state}, {response.status}"] += 1
            self._check_error(input_, response, b"POST", how)
            if response.status in (400, 404, 500):
                self.found("the upstream's failure is the client's", number, facts)
            return
        if b'poison": true' in response.body and b'poison": true' not in theirs.body:
            self.found("what stands behind a response is another's answer", number, facts)
        outcome = "refused by h11" if response.error else "whole" if response.complete else "short"
        self.upstreams[f"{state}, passed on {outcome}"] += 1
        reported = _reported(response.body)
        if response.error and not theirs.error:
            self.found("not HTTP", number, facts)
        elif response.complete and state == "short" and reported is None:
            self.found("a truncated answer looks whole", number, facts)
        elif theirs.status >= 400 and b" answered %d: " % theirs.status in response.body:
            pass  # an error of an external route in another shape than the client's
        elif (
            response.complete and state == "whole" and (response.status, response.body) != (theirs.status, theirs.body)
        ):
            self.found("a changed answer", number, facts)
        elif response.complete and reported is not None and not theirs.body.startswith(reported):
            self.found("a changed answer before its error", number, facts)
        elif not response.complete and not theirs.error and not theirs.body.startswith(response.body):
            self.found("a changed part of an answer", number, facts)


def _reported(body):
    """Return what stands before the gateway's own last event, if there is one."""
    before, found, last = body.rpartition(b'\n\ndata: {"error": ')
    return before if found and b"upstream_" in last else None


def _is_refused(response):
    return response.status in (*REFUSED, 404, 405) and b"x-ichat-error" in response.headers


def _is_unclear(data):
    """Return whether there is anything in these bytes that the gateway does not take in heads, though h11 does."""
    return bool(_UNCLEAR.search(data) or _TWO_LENGTHS.search(data))


def _is_here(head):
    """Return whether a request may read, or be the operator's: it has the secret, or is for this machine by name."""
    headers = dict(head.headers)
    if OWN_SECRET.encode() in headers.get(b"authorization", b""):
        return True
    return headers.get(b"host", b"").lower().startswith(b"localhost") and b"x-forwarded-for" not in headers


def _has_key(head):
    """Return whether the key stands anywhere where it may."""
    return any(KEY in value for name, value in head.headers if name in CREDENTIALS)


def _is_late_reset(response):
    """Return whether a kept connection broke, which another input's upstream had left, and too late for a second try.

    The gateway tries again where that comes within `KEPT_RACE_S`, which a busy machine may miss.
    """
    return response.status == 502 and b"Connection reset by peer" in response.body


def _must_be_answered(head, body, path, *, keyed):
    """Return whether a request is one that the upstream gets, by rules that are simpler than the gateway's."""
    headers = dict(head.headers)
    credentials = [value for name, value in head.headers if name in CREDENTIALS]
    if (keyed and credentials != [b"Bearer " + KEY]) or b"x-ichat-hop" in headers:
        return False
    if head.method != b"POST" or is_control(path) or not path.startswith(b"/v1/") or "multipart" in repr(head.headers):
        return False
    if (
        len(body) > BODY_BYTES_MAX
        or any(sign in path for sign in (b".", b"%", b"#", b";", b"\\", b"//"))
        or not head.target.isascii()
    ):
        return False
    if [name for name, _ in head.headers].count(b"content-type") > 1:
        return False
    if headers.keys() & {b"content-encoding", b"sec-fetch-mode"}:
        return False
    if (b"transfer-encoding" in headers and b"content-length" in headers) or head.http_version not in (b"1.1", b"1.0"):
        return False
    try:
        return json.loads(bytes(body)).get("model") == "m"
    except (ValueError, RecursionError, AttributeError):
        return False


# TLS.


class Garbling(trio.abc.Stream):
    """A stream that changes what is sent through it, after so many sendings."""

    def __init__(self, stream, dice, after):
        self.stream, self.dice, self.after = stream, dice, after

    async def send_all(self, data):
        self.after -= 1
        if self.after < 0 and data:
            data = mutated(self.dice, bytes(data), self.dice.choice([1, 1, 3]))
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        return await self.stream.receive_some(max_bytes)

    async def aclose(self):
        await trio.aclose_forcefully(self.stream)


async def play_tls(fuzz, port, context, number, *, garbled):
    """Send one request through TLS, maybe with changed records; say whether it was answered."""
    dice = random.Random(f"{fuzz.seed}/tls/{number}")
    after = dice.choice([0, 0, 1, 2, 3]) if garbled else float("inf")
    mark = mark_of(80_000_000 + number)
    body = b'{"model":"m","mark":"%b"}' % mark
    line = b"POST /v1/completions?%b HTTP/1.1\r\nHost: x\r\n" % mark + BEARER * fuzz.keyed
    request = line + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    fuzz.upstream.ledger.allow(digest_of(b"POST", b"/v1/completions?" + mark, [], body))
    received = b""
    with trio.move_on_after(LIMIT_S) as scope:
        stream = Garbling(await trio.open_tcp_stream("127.0.0.1", port), dice, after)
        with contextlib.suppress(trio.BrokenResourceError, ssl.SSLError):
            encrypted = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
            for piece, _ in split(dice, request):
                await encrypted.send_all(piece)
            received = await encrypted.receive_some()
        await stream.aclose()
    if scope.cancelled_caught:
        fuzz.found(f"TLS: not over within {LIMIT_S} s", f"tls/{number}")
    return received.startswith(b"HTTP/1.1 200")


# The program.


class Gateway:
    """A gateway in a process of its own, and what it costs."""

    def __init__(self, directory, port, tls="", *, keyed):
        directory.mkdir()
        self.directory = directory
        self.process = start_gateway(directory, settings(port, directory / "state", tls, keyed=keyed))
        self.log = directory / "log"
        self.family = psutil.Process(self.process.pid)
        self.samples = []
        self._read = 0

    async def wait_for_port(self):
        with trio.fail_after(LIMIT_S):
            while not (port := port_in(self.directory)):
                await trio.sleep(0.1)
        return port

    def sample(self):
        """Note how much memory is resident, in bytes."""
        self.samples.append((time.monotonic(), self.family.memory_info().rss))

    def bugs(self):
        """Return the tracebacks in its log that were not seen yet."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        found = re.search(rb"a bug|Traceback|Error:", text)
        return text[max(found.start() - 300, 0) : found.start() + 3000] if found else b""

    def figures(self):
        """Return how memory went: first, last, and the slope over the second half."""
        half = self.samples[len(self.samples) // 2 :]
        (t0, m0), (t1, m1) = half[0], half[-1]
        slope = (m1 - m0) / max(t1 - t0, 1) * 60
        first = self.samples[0][1]
        return f"RSS {first / 1e6:.1f} MB, at the end {m1 / 1e6:.1f} MB, second half {slope / 1e3:+.0f} kB a minute"


async def watch_forever(fuzz, gateways):
    """Sample memory, look for tracebacks, and say how far it is."""
    started = time.monotonic()
    for seconds in itertools.count(1):
        await trio.sleep(1)
        for gateway in gateways:
            gateway.sample()
            if bug := gateway.bugs():
                fuzz.found("a traceback in the log", None, bug)
            if gateway.process.poll() is not None:
                fuzz.found("the gateway has ended", None, gateway.process.returncode)
        if seconds % 30 == 0:
            print(
                f"{time.monotonic() - started:6.0f} s {fuzz.inputs:8d} inputs {len(fuzz.findings)} findings", flush=True
            )


async def wait_until_as_before(gateway, before):
    """Wait until all connections have ended; give how many descriptors remain beyond those there were."""
    with trio.move_on_after(LIMIT_S):
        while gateway.family.num_fds() > before:
            await trio.sleep(0.2)
    return gateway.family.num_fds() - before


@attrs.define
class Site:
    """Two gateways before one upstream, one of them encrypted, and what plays against them."""

    fuzz: Fuzz
    directory: pathlib.Path
    authority: trustme.CA = attrs.field(factory=trustme.CA)
    gateways: list[Gateway] = attrs.field(factory=list)
    tls_port: int = 0
    left: list[int] = attrs.field(factory=list)
    """Descriptors that each gateway has more than before."""

    async def start(self, nursery):
        both = self.directory / "both.pem"
        self.authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(both))
        serve = functools.partial(trio.serve_tcp, self.fuzz.upstream.serve, 0, host="127.0.0.1", backlog=1024)
        [listener] = await nursery.start(serve)
        port = listener.socket.getsockname()[1]
        tls = f'tls_certificate = "{both}"\ntls_key = "{both}"\n'
        keyed = self.fuzz.keyed
        self.gateways.append(Gateway(self.directory / "plain", port, keyed=keyed))
        self.gateways.append(Gateway(self.directory / "tls", port, tls, keyed=keyed))
        self.fuzz.port, self.tls_port = [await gateway.wait_for_port() for gateway in self.gateways]

    async def play(self, seconds, nursery):
        """Fuzz for so long, and see that nothing is left behind; give how long it took."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        for number in range(20):
            await self.fuzz.probe()
            await play_tls(self.fuzz, self.tls_port, context, FIRST_OF_ALL + number, garbled=False)
        await trio.sleep(SETTLE_S)
        before = [gateway.family.num_fds() for gateway in self.gateways]
        started = trio.current_time()
        nursery.start_soon(watch_forever, self.fuzz, self.gateways)
        async with trio.open_nursery() as players:
            players.start_soon(self.fuzz.run, float("inf"), started + seconds)
            players.start_soon(self._play_tls, context, started + seconds)
        took = trio.current_time() - started
        self.left = [await wait_until_as_before(*pair) for pair in zip(self.gateways, before, strict=True)]
        if any(number > 0 for number in self.left):
            self.fuzz.found("descriptors are left", None, self.left)
        await self.fuzz.probe()
        return took

    async def _play_tls(self, context, deadline):
        for number in itertools.count():
            if trio.current_time() > deadline or self.fuzz.is_over:
                return
            await play_tls(self.fuzz, self.tls_port, context, number, garbled=True)
            if number % 10 == 0:
                for _ in range(PROBES_MAX):
                    if await play_tls(self.fuzz, self.tls_port, context, number, garbled=False):
                        break
                else:
                    self.fuzz.found("TLS: a valid request is not answered", number)

    def report(self, seconds):
        fuzz = self.fuzz
        yield f"{fuzz.inputs} inputs in {seconds:.0f} s, {fuzz.inputs / seconds:.0f} a second, seed {fuzz.seed}"
        yield f"{fuzz.upstream.requests} requests reached the upstream"
        yield f"{fuzz.probes} probes, the slowest {fuzz.probe_ms_max:.0f} ms, {fuzz.slow} repeated"
        for name, gateway in zip(("plain", "TLS"), self.gateways, strict=True):
            yield f"{name}: {gateway.figures()}"
        yield f"descriptors left: {self.left}"
        yield "answers: " + ", ".join(f"{name}: {count}" for name, count in sorted(fuzz.statuses.items()))
        yield "responses: " + ", ".join(f"{name}: {count}" for name, count in sorted(fuzz.upstreams.items()))
        yield f"{len(fuzz.findings)} findings"
        yield from fuzz.findings


async def run(args, directory):
    """Do what the command line asks; give the report's lines."""
    site = Site(Fuzz(args.seed, keyed=args.keys, what=args.what), directory)
    try:
        async with trio.open_nursery() as nursery:
            await site.start(nursery)
            if args.only is None:
                seconds = await site.play(args.minutes * 60, nursery)
                lines = list(site.report(seconds))
            else:
                input_ = make_input(args.seed, args.only, keyed=args.keys, what=args.what)
                await site.fuzz.play(input_)
                lines = [str(input_), str(site.fuzz.statuses), *site.fuzz.findings]
            nursery.cancel_scope.cancel()
    finally:
        for gateway in site.gateways:
            end(gateway.process)
    return lines, not site.fuzz.findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", type=int, default=1, help="what the inputs are made from (1)")
    parser.add_argument("--what", choices=RESPONSES, default="both", help="what is mutated (both)")
    parser.add_argument("--keys", action="store_true", help="the gateway asks clients for a key")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this input alone")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="write the last lines there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines, is_well = trio.run(run, args, pathlib.Path(directory))
    text = "\n".join(lines)
    print(text)
    if args.report is not None:
        args.report.write_text(text + "\n")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
