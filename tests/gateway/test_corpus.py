"""Requests that are malformed, or that two readers could read in two ways: refused, or passed on as h11 reads them.

Each entry of the corpus says what comes of it; h11 itself, asked in the test, says whether that is right. Behind nearly
all of them stands a request that must reach the upstream as a request of its own or not at all.
"""

import contextlib
import itertools
import json
import random

import attrs
import h11
import pytest
import trio
import trio.testing
from support.peers import Upstream, code_of, plain, turns_until, until
from support.programs import LIMIT_S

from ichat.proxy.handler import is_control

HEAD_BYTES_MAX = 8192
BODY_BYTES_MAX = 65536
"""By when anything here has happened, on the slowest machine."""
PIECES_MAX = 500
"""A longer entry is not sent byte by byte, but cut at so many places."""


@attrs.frozen
class Answer:
    """What the gateway answers: forwarded and 200, or refused with a sentence in which `says` stands."""

    status: int = 200
    says: str = ""
    code: str = "bad_request"
    closes: bool = False
    stricter: str = ""
    """Why the gateway refuses what h11 reads, or does not refuse: a rule of its own."""


def by_h11(says):
    """Refused since h11 refuses it, with a reason in which `says` stands."""
    return Answer(400, says, closes=True)


FORWARDED = Answer()
LENGTH_FIRST = Answer(
    411, "Content-Length only", "length_required", closes=True, stricter="the control plane takes small bodies only"
)
FORWARDED_LAST = Answer(closes=True)
TWO_LENGTHS = Answer(
    400,
    "A request has either Content-Length or Transfer-Encoding, not both.",
    closes=True,
    stricter="h11 lets Transfer-Encoding win; RFC 9112, section 6.3, allows to refuse what smells of smuggling",
)
BODY_MAX = Answer(
    413, "The request body is larger than", "request_too_large", closes=True, stricter="limits.body_bytes_max"
)
HEAD_MAX = Answer(
    431, "The request head is larger than", "head_too_large", closes=True, stricter="limits.head_bytes_max"
)
VERSION = Answer(
    400, "is not spoken here, only HTTP/1.1 is.", closes=True, stricter="h11 takes every version of the form HTTP/d.d"
)
TWO_WAYS = Answer(400, "The path must be plain", stricter="an upstream may take it for another route")
PATH_ONLY = Answer(
    400,
    "The request target must be a path that begins with '/'.",
    closes=True,
    stricter="h11 takes every form of target; an absolute one names a host beside Host",
)
NOT_JSON = Answer(400, "The request body is not JSON", stricter="what goes by model must name it")
METHOD = Answer(405, "does not take", "method_not_allowed", stricter="only POST goes by model")
NO_ROUTE = Answer(404, "There is no route", "not_found", stricter="no such route")
CLOSE_WORD = Answer(closes=True, stricter="any `Connection` with the word close in it ends the connection")


@attrs.frozen
class Case:
    """Bytes, and what they are answered; `unfinished`: nothing more is said, since h11 waits for more."""

    id: str
    data: bytes
    answers: tuple[Answer, ...]
    unfinished: bool = False


BODY = b'{"model":"m"}'
LENGTH = b"Content-Length: 13"
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"


def post(*lines, body=b"", line=b"POST /v1/completions HTTP/1.1", host=b"Host: x"):
    return b"\r\n".join([line, host, *lines, b"", body])


def sized(*lines, body=BODY, line=b"POST /v1/completions HTTP/1.1"):
    return post(*lines, b"Content-Length: %d" % len(body), body=body, line=line)


def chunked(body, *lines):
    return post(*lines, CHUNKED, body=body)


def asking(line):
    return sized(line=line)


SMUGGLED = sized(body=b'{"model":"m","smuggled":1}')
PROBE = sized(b"Connection: close", body=b'{"model":"m","probe":1}')


def reads(id_, data, *answers):
    """An entry that h11 reads, and behind it a request of its own, answered unless the connection is closed before."""
    answers = answers or (FORWARDED,)
    return Case(id_, data + SMUGGLED, answers if answers[-1].closes else (*answers, FORWARDED))


def refused(id_, data, says, *before):
    """An entry that h11 refuses, and behind it a request that must not be served."""
    return Case(id_, data + SMUGGLED, (*before, by_h11(says)))


def unfinished(id_, data, *before):
    """An entry to which, by h11, the request behind it belongs, and still more."""
    return Case(id_, data + SMUGGLED, before, unfinished=True)


NOT_HTTP_1 = "This is not valid HTTP/1.1: "
NO_CODING = "Only Transfer-Encoding: chunked is supported"
BAD_HEADER = "illegal header line"
BAD_LINE = "illegal request line"
BAD_LENGTH = "bad Content-Length"
TWO_VALUES = "conflicting Content-Length headers"
BAD_CHUNK = "illegal chunk header"
BAD_FOOTER = "malformed chunk footer"

TRANSFER_ENCODING = [
    reads("cl-te", post(LENGTH, CHUNKED, body=CHUNKS), TWO_LENGTHS),
    reads("te-cl", post(CHUNKED, LENGTH, body=CHUNKS), TWO_LENGTHS),
    reads("cl-te-empty-chunks", post(b"Content-Length: 6", CHUNKED, body=b"0\r\n\r\n"), TWO_LENGTHS),
    reads(
        "te-cl-inner",
        post(b"Content-Length: 4", CHUNKED, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)),
        TWO_LENGTHS,
    ),
    reads("te-cl-zero", post(CHUNKED, b"Content-Length: 0", body=CHUNKS), TWO_LENGTHS),
    reads("cl-te-far-apart", post(LENGTH, *[b"a: b"] * 50, CHUNKED, body=CHUNKS), TWO_LENGTHS),
    refused("te-identity", post(b"Transfer-Encoding: identity", body=BODY), NO_CODING),
    refused("cl-te-identity", post(LENGTH, b"Transfer-Encoding: identity", body=BODY), NO_CODING),
    refused("te-xchunked", post(LENGTH, b"Transfer-Encoding: xchunked", body=BODY), NO_CODING),
    refused("te-gzip", post(b"Transfer-Encoding: gzip", body=CHUNKS), NO_CODING),
    refused("te-chunked-chunked", post(b"Transfer-Encoding: chunked, chunked", body=CHUNKS), NO_CODING),
    refused("te-gzip-chunked", post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS), NO_CODING),
    refused("te-chunked-gzip", post(b"Transfer-Encoding: chunked, gzip", body=CHUNKS), NO_CODING),
    refused("te-list-with-nothing", post(b"Transfer-Encoding: ,chunked", body=CHUNKS), NO_CODING),
    refused("te-parameter", post(b"Transfer-Encoding: chunked;q=1", body=CHUNKS), NO_CODING),
    refused("te-quoted", post(b'Transfer-Encoding: "chunked"', body=CHUNKS), NO_CODING),
    refused("te-empty", post(LENGTH, b"Transfer-Encoding:", body=BODY), NO_CODING),
    refused("te-8-bit", post(b"Transfer-Encoding: chunked\xff", body=CHUNKS), NO_CODING),
    refused("te-nbsp", post(b"Transfer-Encoding:\xa0chunked", body=CHUNKS), NO_CODING),
    refused("te-control", post(b"Transfer-Encoding: \x01chunked", body=CHUNKS), NO_CODING),
    refused("te-twice", post(CHUNKED, CHUNKED, body=CHUNKS), "multiple Transfer-Encoding headers"),
    refused(
        "te-twice-identity", post(CHUNKED, b"Transfer-Encoding: identity", body=CHUNKS), "multiple Transfer-Encoding"
    ),
    refused("te-identity-first", post(b"Transfer-Encoding: identity", CHUNKED, body=CHUNKS), NO_CODING),
    refused("te-vertical-tab", post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS), BAD_HEADER),
    refused("te-vertical-tab-at-once", post(LENGTH, b"transfer-encoding:\x0bchunked", body=BODY), BAD_HEADER),
    refused("te-form-feed-behind", post(LENGTH, b"Transfer-Encoding: chunked\x0c", body=BODY), BAD_HEADER),
    refused("te-nul-behind", post(LENGTH, b"Transfer-Encoding: chunked\0", body=BODY), BAD_HEADER),
    refused("te-cr-behind", post(LENGTH, b"Transfer-Encoding: chunked\r\r\nX: y", body=BODY), BAD_HEADER),
    refused("te-space-before-colon", post(LENGTH, b"Transfer-Encoding : chunked", body=BODY), BAD_HEADER),
    refused("te-tab-before-colon", post(LENGTH, b"Transfer-Encoding\t: chunked", body=BODY), BAD_HEADER),
    refused("te-behind-bare-cr", post(LENGTH, b"X: y\rTransfer-Encoding: chunked", body=BODY), BAD_HEADER),
    reads("te-behind-bare-lf", post(LENGTH, b"X: y\nTransfer-Encoding: chunked", body=CHUNKS), TWO_LENGTHS),
    reads("te-upper-case", post(b"TRANSFER-ENCODING: CHUNKED", body=CHUNKS)),
    reads("te-tab", post(b"Transfer-Encoding:\tchunked", body=CHUNKS)),
    reads("te-trailing-space", post(b"Transfer-Encoding: chunked \t ", body=CHUNKS)),
    reads("te-no-space", post(b"Transfer-Encoding:chunked", body=CHUNKS)),
    reads("te-underscore", sized(b"Transfer_Encoding: chunked")),
    reads("te-prefixed", sized(b"X-Transfer-Encoding: chunked")),
    refused("te-underscore-alone", post(b"Transfer_Encoding: chunked", body=CHUNKS), BAD_LINE, NOT_JSON),
    reads("te-named-by-connection", post(b"Connection: transfer-encoding", CHUNKED, body=CHUNKS)),
    reads("cl-named-by-connection", sized(b"Connection: content-length, host")),
    reads("te-in-1.0", post(CHUNKED, body=CHUNKS, line=b"POST /v1/completions HTTP/1.0"), FORWARDED_LAST),
    reads("cl-te-in-1.0", post(LENGTH, CHUNKED, body=CHUNKS, line=b"POST /v1/completions HTTP/1.0"), TWO_LENGTHS),
]

CONTENT_LENGTH = [
    reads("cl-twice-the-same", post(LENGTH, LENGTH, body=BODY)),
    reads("cl-list-of-the-same", post(b"Content-Length: 13, 13", body=BODY)),
    reads("cl-leading-zeros", post(b"Content-Length: 0013", body=BODY)),
    reads("cl-20-digits-of-zeros", post(b"Content-Length: 00000000000000000013", body=BODY)),
    reads("cl-white-space-around", post(b"Content-Length: \t 13 \t", body=BODY)),
    refused("cl-twice-different", post(LENGTH, b"Content-Length: 14", body=BODY), TWO_VALUES),
    refused("cl-twice-in-zeros", post(LENGTH, b"Content-Length: 013", body=BODY), TWO_VALUES),
    refused("cl-twice-one-empty", post(LENGTH, b"Content-Length:", body=BODY), BAD_LENGTH),
    refused("cl-list-of-different", post(b"Content-Length: 13, 14", body=BODY), TWO_VALUES),
    refused("cl-list-with-nothing", post(b"Content-Length: 13,", body=BODY), TWO_VALUES),
    refused("cl-plus", post(b"Content-Length: +13", body=BODY), BAD_LENGTH),
    refused("cl-negative", post(b"Content-Length: -13", body=BODY), BAD_LENGTH),
    refused("cl-minus-zero", post(b"Content-Length: -0", body=BODY), BAD_LENGTH),
    refused("cl-inner-space", post(b"Content-Length: 1 3", body=BODY), BAD_LENGTH),
    refused("cl-hex", post(b"Content-Length: 0xd", body=BODY), BAD_LENGTH),
    refused("cl-underscore", post(b"Content-Length: 1_3", body=BODY), BAD_LENGTH),
    refused("cl-fraction", post(b"Content-Length: 13.0", body=BODY), BAD_LENGTH),
    refused("cl-exponent", post(b"Content-Length: 1e1", body=BODY), BAD_LENGTH),
    refused("cl-semicolon", post(b"Content-Length: 13;a=b", body=BODY), BAD_LENGTH),
    refused("cl-empty", post(b"Content-Length:", body=BODY), BAD_LENGTH),
    refused("cl-nul", post(b"Content-Length: 13\0", body=BODY), BAD_HEADER),
    refused("cl-vertical-tab", post(b"Content-Length:\x0b13", body=BODY), BAD_HEADER),
    refused("cl-other-digits", post("Content-Length: ١٣".encode(), body=BODY), BAD_LENGTH),
    refused("cl-wide-digits", post("Content-Length: １３".encode(), body=BODY), BAD_LENGTH),
    refused("cl-superscript", post("Content-Length: 1³".encode("latin-1"), body=BODY), BAD_LENGTH),
    refused("cl-21-digits", post(b"Content-Length: 000000000000000000013", body=BODY), BAD_LENGTH),
    refused("cl-5000-digits", post(b"Content-Length: " + b"1" * 5000, body=BODY), BAD_LENGTH),
    refused("cl-space-before-colon", post(b"Content-Length : 13", body=BODY), BAD_HEADER),
    reads("cl-beyond-64-bits", post(b"Content-Length: 18446744073709551629", body=BODY), BODY_MAX),
    reads("cl-over-the-limit", post(b"Content-Length: %d" % (BODY_BYTES_MAX + 1), body=BODY), BODY_MAX),
    refused("cl-too-short", post(b"Content-Length: 10", body=BODY), BAD_LINE, NOT_JSON),
    unfinished("cl-too-long", post(b"Content-Length: %d" % (len(BODY + SMUGGLED) + 1), body=BODY)),
    refused("no-length", post(body=BODY), BAD_LINE, NOT_JSON),
    reads("no-length-and-no-body", post(), NOT_JSON),
    reads("cl-zero", post(b"Content-Length: 0"), NOT_JSON),
    reads("cl-underscore-name", sized(b"Content_Length: 0")),
    reads("get-with-a-body", sized(line=b"GET /v1/completions HTTP/1.1"), METHOD),
    reads("get-with-chunks", post(CHUNKED, body=CHUNKS, line=b"GET /v1/completions HTTP/1.1"), METHOD),
    reads("get-control-with-a-body", sized(line=b"GET /health HTTP/1.1")),
    reads("get-control-with-chunks", post(CHUNKED, body=CHUNKS, line=b"GET /v1/models HTTP/1.1"), LENGTH_FIRST),
    refused("get-without-a-length", post(body=BODY, line=b"GET /v1/completions HTTP/1.1"), BAD_LINE, METHOD),
    reads("head", post(line=b"HEAD /v1/completions HTTP/1.1"), METHOD),
    reads("head-with-a-body", sized(line=b"HEAD /v1/completions HTTP/1.1"), METHOD),
    reads("head-control", post(line=b"HEAD /health HTTP/1.1")),
]

LINES = [
    reads("fold", sized(b"X: y\r\n z")),
    reads("fold-by-tab", sized(b"X: y\r\n\tz")),
    reads("fold-to-nothing", sized(b"X: y\r\n ")),
    reads("fold-of-a-length", sized(b"X: y\r\n Content-Length: 5")),
    reads("fold-of-a-coding", sized(b"X: y\r\n\tTransfer-Encoding: chunked")),
    reads("fold-many", sized(b"X: y" + b"\r\n z" * 500)),
    refused("fold-first", post(LENGTH, body=BODY, host=b" Host: x"), "continuation line at start of headers"),
    refused("fold-of-the-request-line", post(LENGTH, body=BODY, line=b"POST /v1/completions\r\n HTTP/1.1"), BAD_LINE),
    refused("fold-in-cl", post(b"Content-Length: 1\r\n 3", body=BODY), BAD_LENGTH),
    reads("fold-before-cl", post(b"Content-Length:\r\n 13", body=BODY)),
    refused("fold-in-te", post(b"Transfer-Encoding: chun\r\n ked", body=CHUNKS), NO_CODING),
    reads("fold-before-te", post(b"Transfer-Encoding:\r\n chunked", body=CHUNKS)),
    refused("fold-behind-te", post(b"Transfer-Encoding: chunked\r\n , identity", body=CHUNKS), NO_CODING),
    refused("fold-of-a-name", post(b"Content-Length\r\n : 13", body=BODY), BAD_HEADER),
    reads("lf-everywhere", post(LENGTH).replace(b"\r\n", b"\n") + BODY),
    reads("lf-behind-the-request-line", b"POST /v1/completions HTTP/1.1\nHost: x\r\n" + LENGTH + b"\r\n\r\n" + BODY),
    reads("lf-behind-a-header", b"POST /v1/completions HTTP/1.1\r\nHost: x\n" + LENGTH + b"\r\n\r\n" + BODY),
    reads("lf-as-the-empty-line", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\r\n\n" + BODY),
    reads("lf-and-crlf", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\n\r\n" + BODY),
    refused("lf-in-the-target", asking(b"POST /v1/comp\nletions HTTP/1.1"), BAD_LINE),
    refused("cr-everywhere", post(LENGTH).replace(b"\r\n", b"\r"), BAD_LINE),
    refused(
        "cr-behind-the-request-line",
        b"POST /v1/completions HTTP/1.1\rHost: x\r\n" + LENGTH + b"\r\n\r\n" + BODY,
        BAD_LINE,
    ),
    refused("cr-in-a-value", sized(b"X: a\rb"), BAD_HEADER),
    refused("cr-in-a-name", sized(b"X\ra: b"), BAD_HEADER),
    refused("cr-twice", sized(b"X: y\r"), BAD_HEADER),
    refused("cr-in-the-target", asking(b"POST /v1/comp\rletions HTTP/1.1"), BAD_LINE),
    refused("lfcr-everywhere", post(LENGTH).replace(b"\r\n", b"\n\r") + BODY, BAD_HEADER),
    refused(
        "lfcr-behind-a-header",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\n\r" + LENGTH + b"\r\n\r\n" + BODY,
        BAD_HEADER,
    ),
    refused("crlf-first", b"\r\n" + sized(), "no request line received"),
    refused("crlf-twice-first", b"\r\n\r\n" + sized(), "no request line received"),
    refused("lf-first", b"\n" + sized(), "no request line received"),
    refused("cr-first", b"\r" + sized(), BAD_LINE),
    refused("crlf-between", sized() + b"\r\n", "no request line received", FORWARDED),
    refused("space-between", sized() + b" ", BAD_LINE, FORWARDED),
]

HEADERS = [
    refused("nul-in-a-value", sized(b"X: a\0b"), BAD_HEADER),
    refused("nul-in-a-name", sized(b"X\0: a"), BAD_HEADER),
    refused("nul-in-the-target", asking(b"POST /v1/completions\0 HTTP/1.1"), BAD_LINE),
    refused("nul-in-the-method", asking(b"PO\0ST /v1/completions HTTP/1.1"), BAD_LINE),
    reads("controls-in-a-value", sized(b"X: a\x01\x1b\x7fb")),
    refused("control-in-a-name", sized(b"X\x01: a"), BAD_HEADER),
    refused("control-in-the-target", asking(b"POST /v1/\x1fcompletions HTTP/1.1"), BAD_LINE),
    refused("delete-in-the-target", asking(b"POST /v1/completions\x7f HTTP/1.1"), BAD_LINE),
    reads("8-bit-value", sized(b"X: \xc3\xa9\xff\x80\x85\xa0")),
    refused("8-bit-name", sized(b"X\xe9: a"), BAD_HEADER),
    refused("8-bit-target", asking(b"POST /v1/\xc3\xa9 HTTP/1.1"), BAD_LINE),
    refused("8-bit-method", asking(b"P\xd6ST /v1/completions HTTP/1.1"), BAD_LINE),
    refused("space-before-the-colon", sized(b"X : a"), BAD_HEADER),
    refused("space-in-a-name", sized(b"X y: a"), BAD_HEADER),
    refused("no-name", sized(b": a"), BAD_HEADER),
    refused("only-a-colon", sized(b":"), BAD_HEADER),
    refused("no-colon", sized(b"X"), BAD_HEADER),
    refused("no-colon-but-an-equals", sized(b"X=a"), BAD_HEADER),
    refused("bracket-in-a-name", sized(b"X[a]: b"), BAD_HEADER),
    refused("quote-in-a-name", sized(b'"X": b'), BAD_HEADER),
    reads("empty-value", sized(b"X:", b"Y: ", b"Z:\t \t")),
    reads("colons-in-a-value", sized(b"X:y:z: :")),
    reads("odd-but-right-name", sized(b"!#$%&'*+-.^_`|~09aZ: a")),
    refused("space-first", post(LENGTH, body=BODY, host=b" X: y\r\nHost: x"), "continuation line at start of headers"),
    refused("tab-first", post(LENGTH, body=BODY, host=b"\tX: y\r\nHost: x"), "continuation line at start of headers"),
    refused("a-request-as-a-header", post(b"GET /v1/completions HTTP/1.1", LENGTH, body=BODY), BAD_HEADER),
    refused("host-missing", post(LENGTH, body=BODY, host=b"X: y"), "Missing mandatory Host: header"),
    refused("host-twice", sized(b"Host: y"), "Found multiple Host: headers"),
    refused("host-twice-the-same", sized(b"Host: x"), "Found multiple Host: headers"),
    refused("host-folded-away", post(LENGTH, body=BODY, host=b"X: y\r\n Host: x"), "Missing mandatory Host: header"),
    reads("host-empty", post(LENGTH, body=BODY, host=b"Host:")),
    reads("host-of-two-names", post(LENGTH, body=BODY, host=b"Host: x, y@z:1/v1")),
    reads("host-missing-in-1.0", b"POST /v1/completions HTTP/1.0\r\n" + LENGTH + b"\r\n\r\n" + BODY, FORWARDED_LAST),
]

REQUEST_LINES = [
    refused("two-spaces", asking(b"POST  /v1/completions HTTP/1.1"), BAD_LINE),
    refused("two-spaces-behind", asking(b"POST /v1/completions  HTTP/1.1"), BAD_LINE),
    refused("tab", asking(b"POST\t/v1/completions HTTP/1.1"), BAD_LINE),
    refused("tab-behind", asking(b"POST /v1/completions\tHTTP/1.1"), BAD_LINE),
    refused("space-before-the-method", asking(b" POST /v1/completions HTTP/1.1"), BAD_LINE),
    refused("space-at-the-end", asking(b"POST /v1/completions HTTP/1.1 "), BAD_LINE),
    refused("version-missing", asking(b"POST /v1/completions"), BAD_LINE),
    refused("version-lower-case", asking(b"POST /v1/completions http/1.1"), BAD_LINE),
    refused("version-of-two-digits", asking(b"POST /v1/completions HTTP/1.10"), BAD_LINE),
    refused("version-with-zeros", asking(b"POST /v1/completions HTTP/01.1"), BAD_LINE),
    refused("version-with-a-comma", asking(b"POST /v1/completions HTTP/1,1"), BAD_LINE),
    refused("version-without-minor", asking(b"POST /v1/completions HTTP/1"), BAD_LINE),
    refused("version-without-number", asking(b"POST /v1/completions HTTP/"), BAD_LINE),
    refused("version-of-another", asking(b"POST /v1/completions HTTPS/1.1"), BAD_LINE),
    refused("version-with-a-suffix", asking(b"POST /v1/completions HTTP/1.1x"), BAD_LINE),
    refused("version-twice", asking(b"POST /v1/completions HTTP/1.1 HTTP/1.1"), BAD_LINE),
    reads("version-1.2", asking(b"POST /v1/completions HTTP/1.2"), VERSION),
    reads("version-0.9", asking(b"POST /v1/completions HTTP/0.9"), VERSION),
    reads("version-2.0", asking(b"POST /v1/completions HTTP/2.0"), VERSION),
    reads(
        "version-2.0-without-host",
        post(LENGTH, body=BODY, host=b"X: y", line=b"POST /v1/completions HTTP/2.0"),
        VERSION,
    ),
    reads("version-0.9-chunked", post(CHUNKED, body=CHUNKS, line=b"POST /v1/completions HTTP/0.9"), VERSION),
    reads("http-2-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), VERSION),
    Case("http-0.9", b"GET /v1/models\r\n", (), unfinished=True),
    refused("http-0.9-and-more", b"GET /v1/models\r\n", BAD_LINE),
    refused("only-the-version", asking(b"HTTP/1.1"), BAD_LINE),
    refused("a-response", asking(b"HTTP/1.1 200 OK"), BAD_LINE),
    reads("absolute", asking(b"POST http://x/v1/completions HTTP/1.1"), PATH_ONLY),
    reads("absolute-of-another-host", asking(b"POST https://other:1/v1/completions HTTP/1.1"), PATH_ONLY),
    reads("absolute-of-a-file", asking(b"POST file:///etc/passwd HTTP/1.1"), PATH_ONLY),
    reads("authority", asking(b"POST x:80 HTTP/1.1"), PATH_ONLY),
    reads("connect", post(line=b"CONNECT x:443 HTTP/1.1"), PATH_ONLY),
    reads("connect-with-a-path", post(line=b"CONNECT /v1/completions HTTP/1.1"), METHOD),
    reads("connect-with-a-length", sized(line=b"CONNECT x:443 HTTP/1.1"), PATH_ONLY),
    reads("options-of-all", post(line=b"OPTIONS * HTTP/1.1"), PATH_ONLY),
    reads("target-of-a-query", asking(b"POST ?/v1/completions HTTP/1.1"), PATH_ONLY),
    reads("target-of-a-fragment", asking(b"POST #/v1/completions HTTP/1.1"), PATH_ONLY),
    reads("target-backslash", asking(b"POST \\v1\\completions HTTP/1.1"), PATH_ONLY),
    reads("target-two-slashes", asking(b"POST //v1/completions HTTP/1.1"), NO_ROUTE),
    reads("target-with-a-fragment", asking(b"POST /v1/completions#a?b HTTP/1.1"), TWO_WAYS),
    reads("target-escaped", asking(b"POST /v1/%63ompletions HTTP/1.1"), TWO_WAYS),
    reads("target-with-an-escaped-query", asking(b"POST /v1/completions?a=%20%0d%0a#b HTTP/1.1")),
    reads("target-with-two-slashes", asking(b"POST /v1//completions HTTP/1.1"), TWO_WAYS),
    reads("target-with-dots", asking(b"POST /v1/x/../completions HTTP/1.1"), TWO_WAYS),
    reads("target-with-escaped-dots", asking(b"POST /v1/%2E%2e/completions HTTP/1.1"), TWO_WAYS),
    reads("target-with-odd-characters", asking(b'POST /v1/completions?<>"{}|\\^`[] HTTP/1.1')),
    reads("target-long", asking(b"POST /v1/completions?" + b"a" * 5000 + b" HTTP/1.1")),
    refused("target-with-a-space", asking(b"POST /v1/comp letions HTTP/1.1"), BAD_LINE),
    refused("target-empty", asking(b"POST  HTTP/1.1"), BAD_LINE),
    refused("target-missing", asking(b"POST HTTP/1.1"), BAD_LINE),
    reads("method-lower-case", asking(b"post /v1/completions HTTP/1.1"), METHOD),
    reads("method-of-our-own", asking(b"P0ST! /v1/completions HTTP/1.1"), METHOD),
    reads("method-long", asking(b"POST" * 1000 + b" /v1/completions HTTP/1.1"), METHOD),
    refused("method-with-a-parenthesis", asking(b"P(ST /v1/completions HTTP/1.1"), BAD_LINE),
    refused("method-with-a-colon", asking(b"POST: /v1/completions HTTP/1.1"), BAD_LINE),
    refused("method-empty", asking(b"/v1/completions HTTP/1.1"), BAD_LINE),
]

LONG_NUMBER = b"0000000000000000000d"
ZERO_INSIDE = b'{"model":"m","x":[\r\n0\r\n\r\n]}'
CHUNKED_BODIES = [
    refused("size-empty", chunked(b"\r\n" + BODY + b"\r\n0\r\n\r\n"), BAD_CHUNK),
    refused("size-0x", chunked(b"0x" + CHUNKS), BAD_CHUNK),
    refused("size-plus", chunked(b"+" + CHUNKS), BAD_CHUNK),
    refused("size-minus", chunked(b"-" + CHUNKS), BAD_CHUNK),
    refused("size-space-before", chunked(b" " + CHUNKS), BAD_CHUNK),
    refused("size-crlf-before", chunked(b"\r\n" + CHUNKS), BAD_CHUNK),
    refused("size-underscore", chunked(b"0_" + CHUNKS), BAD_CHUNK),
    refused("size-not-hex", chunked(b"g" + CHUNKS[1:]), BAD_CHUNK),
    refused("size-nul-behind", chunked(b"d\0" + CHUNKS[1:]), BAD_CHUNK),
    refused("size-comma", chunked(b"d,d" + CHUNKS[1:]), BAD_CHUNK),
    refused("size-wide-digit", chunked("１".encode() + CHUNKS), BAD_CHUNK),
    refused("size-vertical-tab", chunked(b"d\x0b" + CHUNKS[1:]), BAD_CHUNK),
    refused("size-of-21-digits", chunked(b"0" + LONG_NUMBER + CHUNKS[1:]), BAD_CHUNK),
    reads("size-of-20-digits", chunked(LONG_NUMBER + CHUNKS[1:])),
    reads("size-upper-case", chunked(b"D" + CHUNKS[1:])),
    reads("size-space-behind", chunked(b"d \t" + CHUNKS[1:])),
    unfinished("size-overflow-64", chunked(b"10000000000000000d" + CHUNKS[1:])),
    unfinished("size-overflow-32", chunked(b"10000000d" + CHUNKS[1:])),
    unfinished("size-of-20-f", chunked(b"f" * 20 + CHUNKS[1:])),
    reads(
        "size-over-the-limit",
        chunked(b"%x\r\n" % (BODY_BYTES_MAX + 1) + b" " * (BODY_BYTES_MAX + 1) + b"\r\n0\r\n\r\n"),
        BODY_MAX,
    ),
    reads("sizes-over-the-limit", chunked((b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 3 + b"0\r\n\r\n"), BODY_MAX),
    reads("ext", chunked(b"d;ext" + CHUNKS[1:])),
    reads("ext-with-a-value", chunked(b'd;a=b;c="d;\\"e"' + CHUNKS[1:])),
    reads("ext-empty", chunked(b"d;" + CHUNKS[1:])),
    reads("ext-with-controls", chunked(b"d;\0\x01\xff" + CHUNKS[1:])),
    reads("ext-with-a-bare-cr", chunked(b"d;a\rb" + CHUNKS[1:])),
    refused("ext-with-a-bare-lf", chunked(b"d;a\nb" + CHUNKS[1:]), BAD_CHUNK),
    refused("ext-with-a-quoted-crlf", chunked(b'd;a="\r\nb"' + CHUNKS[1:]), BAD_FOOTER),
    refused("ext-behind-a-space", chunked(b"d ;ext" + CHUNKS[1:]), BAD_CHUNK),
    refused("ext-hiding-a-chunk", chunked(b"2;\nxx\r\n50\r\n" + CHUNKS), BAD_CHUNK),
    reads("ext-huge", chunked(b"d;" + b"a" * 200_000 + CHUNKS[1:]), HEAD_MAX),
    refused("size-lf", chunked(CHUNKS.replace(b"d\r\n", b"d\n")), BAD_CHUNK),
    refused("size-cr", chunked(CHUNKS.replace(b"d\r\n", b"d\r")), BAD_CHUNK),
    refused("size-lfcr", chunked(CHUNKS.replace(b"d\r\n", b"d\n\r")), BAD_CHUNK),
    refused("last-size-lf", chunked(CHUNKS.replace(b"0\r\n\r\n", b"0\n\n")), BAD_CHUNK),
    reads("last-empty-line-lf", chunked(CHUNKS.replace(b"0\r\n\r\n", b"0\r\n\n"))),
    refused("data-longer", chunked(b"5" + CHUNKS[1:]), BAD_FOOTER),
    refused("data-shorter", chunked(b"f" + CHUNKS[1:]), BAD_FOOTER),
    refused("data-without-crlf", chunked(CHUNKS.replace(b"}\r\n", b"}")), BAD_FOOTER),
    refused("data-with-lf", chunked(CHUNKS.replace(b"}\r\n", b"}\n")), BAD_FOOTER),
    refused("data-with-cr", chunked(CHUNKS.replace(b"}\r\n", b"}\r")), BAD_FOOTER),
    refused("data-with-crlf-twice", chunked(CHUNKS.replace(b"}\r\n", b"}\r\n\r\n")), BAD_CHUNK),
    refused("last-missing", chunked(b"d\r\n" + BODY + b"\r\n"), BAD_CHUNK),
    refused("last-without-its-empty-line", chunked(b"d\r\n" + BODY + b"\r\n0\r\n"), BAD_HEADER),
    refused("last-with-data", chunked(b"d\r\n" + BODY + b"\r\n0\r\n" + BODY + b"\r\n\r\n"), BAD_HEADER),
    reads("last-of-zeros", chunked(CHUNKS.replace(b"0\r\n\r\n", b"000\r\n\r\n"))),
    reads("last-with-ext", chunked(CHUNKS.replace(b"0\r\n\r\n", b"0;a=b\r\n\r\n"))),
    reads("last-first", chunked(b"0\r\n\r\n"), NOT_JSON),
    reads("chunks-of-one-byte", chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n")),
    reads("chunk-that-holds-a-last-one", chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(ZERO_INSIDE), ZERO_INSIDE))),
    reads("chunk-that-holds-a-request", chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)), NOT_JSON),
    reads("trailer", chunked(CHUNKS[:-2] + b"X-Sum: 1\r\nX-Two: 2\r\n\r\n", b"Trailer: x-sum")),
    reads("trailer-lf", chunked(CHUNKS[:-2] + b"X-Sum: 1\n\n")),
    reads("trailer-cl", chunked(CHUNKS[:-2] + b"Content-Length: 99\r\n\r\n")),
    reads("trailer-te", chunked(CHUNKS[:-2] + CHUNKED + b"\r\n\r\n")),
    reads("trailer-host", chunked(CHUNKS[:-2] + b"Host: y\r\nConnection: close\r\nAuthorization: no\r\n\r\n")),
    reads("trailer-folded", chunked(CHUNKS[:-2] + b"X: y\r\n z\r\n\r\n")),
    refused("trailer-cl-twice", chunked(CHUNKS[:-2] + b"Content-Length: 9\r\nContent-Length: 8\r\n\r\n"), TWO_VALUES),
    refused("trailer-te-gzip", chunked(CHUNKS[:-2] + b"Transfer-Encoding: gzip\r\n\r\n"), NO_CODING),
    refused("trailer-without-colon", chunked(CHUNKS[:-2] + b"X\r\n\r\n"), BAD_HEADER),
    refused("trailer-space-before-colon", chunked(CHUNKS[:-2] + b"X : y\r\n\r\n"), BAD_HEADER),
    refused("trailer-nul", chunked(CHUNKS[:-2] + b"X: \0\r\n\r\n"), BAD_HEADER),
    refused("trailer-fold-first", chunked(CHUNKS[:-2] + b" X: y\r\n\r\n"), "continuation line at start of headers"),
    reads("trailer-huge", chunked(CHUNKS[:-2] + b"X: " + b"y" * 200_000 + b"\r\n\r\n"), HEAD_MAX),
    reads("trailers-by-thousands", chunked(CHUNKS[:-2] + b"X: y\r\n" * 40_000 + b"\r\n"), HEAD_MAX),
]

HUGE_HEADS = [
    reads("head-at-the-limit", sized(b"X: " + b"y" * (HEAD_BYTES_MAX - len(post(LENGTH)) - 5))),
    reads("head-over-the-limit", sized(b"X: " + b"y" * (HEAD_BYTES_MAX - len(post(LENGTH)) + 500)), HEAD_MAX),
    reads("head-of-one-big-header", sized(b"X: " + b"y" * 20_000), HEAD_MAX),
    reads("head-of-thousands", sized(*[b"X: y"] * 5000), HEAD_MAX),
    reads("head-of-a-big-target", asking(b"POST /v1/completions?" + b"a" * 20_000 + b" HTTP/1.1"), HEAD_MAX),
    reads("head-of-a-big-method", asking(b"P" * 20_000 + b" /v1/completions HTTP/1.1"), HEAD_MAX),
    reads("head-of-a-big-fold", sized(b"X: y" + b"\r\n z" * 5000), HEAD_MAX),
    reads("head-over-the-limit-behind-another", sized() + sized(b"X: " + b"y" * 20_000), FORWARDED, HEAD_MAX),
    Case("head-without-end", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000, (HEAD_MAX,)),
    Case("head-of-thousands-without-end", post(*[b"X: y"] * 40_000)[:-2], (HEAD_MAX,)),
    Case("request-line-without-end", b"POST /" + b"a" * 200_000, (HEAD_MAX,)),
]

EXPECTING = [
    reads("expect-continue", sized(b"Expect: 100-continue")),
    reads("expect-continue-chunked", chunked(CHUNKS, b"Expect: 100-Continue")),
    reads("expect-twice", sized(b"Expect: 100-continue", b"Expect: 100-continue")),
    reads("expect-unknown", sized(b"Expect: 200-maybe")),
    reads("expect-empty", sized(b"Expect:")),
    reads("expect-in-1.0", sized(b"Expect: 100-continue", line=b"POST /v1/completions HTTP/1.0"), FORWARDED_LAST),
    reads("expect-too-much", post(b"Expect: 100-continue", b"Content-Length: 999999"), BODY_MAX),
    reads("expect-without-a-body", post(b"Expect: 100-continue"), NOT_JSON),
    reads("upgrade-websocket", sized(b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")),
    reads(
        "upgrade-websocket-get",
        post(b"Connection: Upgrade", b"Upgrade: websocket", line=b"GET /v1/completions HTTP/1.1"),
        METHOD,
    ),
    reads(
        "upgrade-h2c", sized(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQ")
    ),
    reads("upgrade-h2c-control", post(b"Connection: Upgrade", b"Upgrade: h2c", line=b"GET /health HTTP/1.1")),
    reads("upgrade-tls", sized(b"Connection: upgrade", b"Upgrade: TLS/1.0, HTTP/1.1")),
    reads("upgrade-unasked", sized(b"Upgrade: websocket")),
]

ONE_AFTER_ANOTHER = [
    reads("two", sized(body=b'{"model":"m","n":1}'), FORWARDED),
    reads("three", sized(body=b'{"model":"m","n":1}') + chunked(CHUNKS), FORWARDED, FORWARDED),
    reads(
        "four-of-every-kind",
        post(line=b"GET /v1/models HTTP/1.1") + sized() + post() + chunked(CHUNKS),
        FORWARDED,
        FORWARDED,
        NOT_JSON,
        FORWARDED,
    ),
    refused("good-then-bad", sized() + asking(b"BAD"), BAD_LINE, FORWARDED),
    refused(
        "good-then-two-codings", chunked(CHUNKS) + post(CHUNKED, CHUNKED, body=CHUNKS), "multiple Transfer", FORWARDED
    ),
    reads("good-then-two-lengths", sized() + post(LENGTH, CHUNKED, body=CHUNKS), FORWARDED, TWO_LENGTHS),
    unfinished("good-then-half", sized() + post(b"Content-Length: 5000"), FORWARDED),
    reads("close-then-more", sized(b"Connection: close"), FORWARDED_LAST),
    reads("close-among-others-then-more", sized(b"Connection: keep-alive, Close ,x"), FORWARDED_LAST),
    reads("close-twice-then-more", sized(b"Connection: keep-alive", b"Connection: close"), FORWARDED_LAST),
    reads("close-then-garbage", sized(b"Connection: close") + b"\0garbage", FORWARDED_LAST),
    reads("closed-then-more", sized(b"Connection: closed"), CLOSE_WORD),
    reads("keep-alive-then-more", sized(b"Connection: keep-alive", b"Keep-Alive: timeout=1")),
    reads("old-then-more", sized(line=b"POST /v1/completions HTTP/1.0"), FORWARDED_LAST),
    reads(
        "old-that-would-stay", sized(b"Connection: keep-alive", line=b"POST /v1/completions HTTP/1.0"), FORWARDED_LAST
    ),
]

CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(64)) + bytes.fromhex("1301130213030100")
NOT_HTTP = [
    refused("tls", CLIENT_HELLO, BAD_LINE),
    refused("tls-and-newlines", CLIENT_HELLO + b"\n\n", BAD_LINE),
    refused("ssl-2", bytes.fromhex("802e0100020015000000") + b"\n\n", BAD_LINE),
    refused("socks-4", b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", BAD_LINE),
    refused("socks-5", b"\x05\x01\x00", BAD_LINE),
    refused("proxy-1", b"PROXY TCP4 10.0.0.1 10.0.0.2 1234 80\r\n", BAD_LINE),
    refused("proxy-1-unknown", b"PROXY UNKNOWN\r\n", BAD_LINE),
    refused("proxy-2", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12), "no request line received"),
    refused("ssh", b"SSH-2.0-OpenSSH_9.9\r\n", BAD_LINE),
    refused("redis", b"*1\r\n$4\r\nPING\r\n", BAD_LINE),
    refused("byte-order-mark", b"\xef\xbb\xbf" + sized(), BAD_LINE),
    refused("utf-16", sized().decode().encode("utf-16-le"), BAD_LINE),
    refused("gzip", bytes.fromhex("1f8b0800000000000003"), BAD_LINE),
    refused("zeros", bytes(2000), BAD_LINE),
    refused("random-1", b"\xf1" + random.Random(1).randbytes(1000), BAD_LINE),
    refused("random-2", b"\x02" + random.Random(2).randbytes(1000), BAD_LINE),
    refused("random-3", b"X" + random.Random(3).randbytes(5000), BAD_LINE),
    Case("random-without-lines", b"\xff" + random.Random(4).randbytes(3000).replace(b"\n", b""), (), unfinished=True),
]

CASES = [
    *TRANSFER_ENCODING,
    *CONTENT_LENGTH,
    *LINES,
    *HEADERS,
    *REQUEST_LINES,
    *CHUNKED_BODIES,
    *HUGE_HEADS,
    *EXPECTING,
    *ONE_AFTER_ANOTHER,
    *NOT_HTTP,
]


@attrs.define
class Reading:
    """What h11 makes of some bytes: whole requests, and what comes behind the last of them."""

    requests: list[tuple[h11.Request, bytes]] = attrs.field(factory=list)
    refusal: str = ""
    ends: bool = False
    """Whether the last request is the connection's last by its own word, so that nothing behind it is read."""
    complete: bool = True


def read_by_h11(pieces):
    """Read as a server does that answers each request as soon as it is there, and switches to nothing."""
    reading = Reading()
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=10_000_000)
    head, body = None, b""
    for piece in pieces:
        parser.receive_data(piece)
        while not reading.ends:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                reading.refusal = str(error)
                return reading
            if event is h11.NEED_DATA:
                break
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert isinstance(event, h11.EndOfMessage)
                reading.requests.append((head, body))
                head = None
                parser.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                parser.send(h11.EndOfMessage())
                if parser.our_state is h11.DONE:
                    parser.start_next_cycle()
                else:
                    reading.ends = True
    reading.complete = head is None and not parser.trailing_data[0]
    return reading


def cut(data):
    """Cut into single bytes, or at places that are always the same ones."""
    dice = random.Random(data)
    places = min(len(data) - 1, PIECES_MAX)
    cuts = [0, *sorted(dice.sample(range(1, len(data)), places)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(cuts)]


class Recorder(Upstream):
    """An upstream that also keeps what it received byte for byte."""

    def __init__(self):
        super().__init__(self.answer)
        self.raw = b""

    async def answer(self, stream, head, body):
        await stream.send_all(plain(b"{}", b"x-recorded: 1\r\n"))

    async def serve(self, stream):
        await super().serve(Recorded(stream, self))


class Recorded:
    """A stream whose received bytes are kept."""

    def __init__(self, stream, recorder):
        self.stream = stream
        self.recorder = recorder
        self.send_all = stream.send_all
        self.aclose = stream.aclose

    async def receive_some(self):
        data = await self.stream.receive_some()
        self.recorder.raw += data
        return data


def read_by_the_length(raw):
    """Read requests as the simplest upstream does, which knows CRLF and one Content-Length and nothing else."""
    requests = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        headers = [tuple(line.split(b": ", 1)) for line in lines]
        [length] = [int(value) for name, value in headers if name.lower() == b"content-length"]
        assert not [name for name, _ in headers if b"transfer-encoding" == name.lower()]
        assert b"\n" not in head.replace(b"\r\n", b"")
        method, target, _ = line.split(b" ")
        requests.append((method, target, headers, raw[:length]))
        raw = raw[length:]
    return requests


OF_THE_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
REWRITTEN = {b"host", b"content-length", b"expect", b"x-request-id", b"x-ichat-hop", b"traceparent"}


def passed_on(headers):
    """Give the headers that a gateway passes on as they are."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [header for header in headers if header[0] not in OF_THE_CONNECTION | REWRITTEN | named]


class Answers:
    """The responses on one connection, one after another."""

    def __init__(self, stream):
        self.stream = stream
        self.data = b""

    async def next(self, method):
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        if self.data:
            parser.receive_data(self.data)
        head, body = None, b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self.stream.receive_some())
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.data = parser.trailing_data[0]
                return head.status_code, dict(head.headers), body
            else:
                assert isinstance(event, h11.InformationalResponse), event
                assert event.status_code == 100

    async def rest(self):
        try:
            while data := await self.stream.receive_some():
                self.data += data
        except trio.BrokenResourceError:
            pass  # closed is closed
        return self.data


def check_entry(case, reading):
    """An entry says of itself what h11 says of it, and names its rule where the gateway is stricter."""
    read = len(reading.requests)
    for number, answer in enumerate(case.answers):
        if answer.stricter:
            assert number < read or not (reading.refusal or reading.complete)
        elif answer.status == 200:
            assert number < read
        else:
            assert number == read
            assert answer.says in reading.refusal
            assert reading.refusal
    last = case.answers[-1] if case.answers else FORWARDED
    if last is FORWARDED_LAST:
        assert reading.ends
    if not last.closes:
        assert (len(case.answers), reading.refusal, reading.ends) == (read, "", False)
        assert reading.complete != case.unfinished


async def send(stream, pieces):
    for piece in pieces:
        await stream.send_all(piece)
        await trio.lowlevel.checkpoint()  # nearly always enough for the gateway to read it


async def expect_answer(answers, answer, method, refusal=""):
    """The next response is the one that the entry announces, in OpenAI's shape where it refuses."""
    status, headers, body = await answers.next(method if not answer.closes else b"POST")
    assert status == answer.status, body
    assert (headers.get(b"connection") == b"close") == answer.closes, headers
    if status != 200:
        assert headers[b"x-ichat-error"] == b"gateway"
        if method != b"HEAD" or answer.closes:
            assert code_of(body) == answer.code
            assert (answer.says if answer.stricter else refusal) in json.loads(body)["error"]["message"]
    return b"x-recorded" in headers


@pytest.fixture
async def recorder(nursery):
    """An upstream that records, and its port."""
    recorder = Recorder()
    listeners = await nursery.start(trio.serve_tcp, recorder.serve, 0)
    recorder.port = listeners[0].socket.getsockname()[1]
    return recorder


def test_the_corpus_is_one():
    """Every entry can be told from all others."""
    assert len({case.id for case in CASES}) == len(CASES) >= 75
    assert len({case.data for case in CASES}) == len(CASES)


@pytest.mark.parametrize("how", ["whole", "bytes"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_refused_or_passed_on_as_h11_reads_it(recorder, gateway_to, connect, caplog, case, how):
    """What h11 does not read is refused and ends the connection; what it reads arrives so, framed by one length."""
    pieces = [case.data] if how == "whole" else cut(case.data)
    reading, in_pieces = read_by_h11([case.data]), read_by_h11(pieces)
    assert (in_pieces.requests, bool(in_pieces.refusal)) == (reading.requests, bool(reading.refusal))
    check_entry(case, reading)
    refusal = reading.refusal if how == "whole" else NOT_HTTP_1  # in pieces h11 may say something else first
    limits = f"[limits]\nhead_bytes_max = {HEAD_BYTES_MAX}\nbody_bytes_max = {BODY_BYTES_MAX}\n"
    client = await connect(await gateway_to({"m": recorder.port}, limits))
    methods = [head.method for head, _ in reading.requests] + [b"POST"]
    expected = []
    with trio.fail_after(LIMIT_S):
        try:
            await send(client.stream, pieces)
        except trio.BrokenResourceError:
            assert case.answers[-1].closes
        answers = Answers(client.stream)
        for number, answer in enumerate(case.answers):
            is_recorded = await expect_answer(answers, answer, methods[number], refusal)
            if answer.status == 200:
                head, body = reading.requests[number]
                assert is_recorded != is_control(head.target.partition(b"?")[0])
                if is_recorded:
                    expected.append((head.method, head.target, passed_on(list(head.headers)), body))
        if case.unfinished:
            await trio.testing.wait_all_tasks_blocked(0.01)
            await client.stream.send_eof()
        elif not case.answers[-1].closes:
            await client.send(PROBE)
            await expect_answer(answers, FORWARDED_LAST, b"POST")
            expected.append((b"POST", b"/v1/completions", [], b'{"model":"m","probe":1}'))
        assert await answers.rest() == b""
        await trio.testing.wait_all_tasks_blocked(0.001)
    received = [
        (head.method, head.target, passed_on(list(head.headers)), bytes(body)) for head, body in recorder.requests
    ]
    assert received == expected
    simplest = read_by_the_length(recorder.raw)
    assert [(method, target, body) for method, target, _, body in simplest] == [
        (method, target, body) for method, target, _, body in expected
    ]
    assert "a bug" not in caplog.text
    assert recorder.raw.count(b"smuggled") == sum(body.count(b"smuggled") for *_, body in expected)


async def trickle(stream, more):
    """Send single bytes, again and again, until the connection is closed."""
    try:
        for byte in itertools.cycle(more):
            await stream.send_all(bytes([byte]))
            await trio.sleep(0.01)
    except trio.BrokenResourceError:
        pass


async def flood(stream, more):
    """Send as much as is taken until the connection is closed."""
    try:
        while True:
            await stream.send_all(more)
    except trio.BrokenResourceError:
        pass


async def expect_timeout(answers):
    status, headers, body = await answers.next(b"POST")
    assert status == 408, body
    assert (code_of(body), headers[b"connection"]) == ("request_timeout", b"close")
    assert await answers.rest() == b""


SLOW_HEADS = {
    "request line": (b"POST /", b"a"),
    "names": (b"POST / HTTP/1.1\r\n", b"a"),
    "values": (b"POST / HTTP/1.1\r\nhost: x\r\na: ", b"b"),
    "headers": (b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
    "folds": (b"POST / HTTP/1.1\r\nhost: x", b"\r\n "),
    "headers of a second request": (sized() + b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("what", SLOW_HEADS)
async def test_a_head_that_does_not_end_is_given_up(recorder, gateway_to, connect, nursery, what):
    """No byte of a head prolongs its time."""
    begin, more = SLOW_HEADS[what]
    client = await connect(await gateway_to({"m": recorder.port}, "[timeouts]\nhead_s = 0.3\n"))
    await client.send(begin)
    nursery.start_soon(trickle, client.stream, more)
    answers = Answers(client.stream)
    with trio.fail_after(LIMIT_S):
        if begin.startswith(sized()):
            assert (await answers.next(b"POST"))[0] == 200
        await expect_timeout(answers)
    assert len(recorder.requests) == (what == "headers of a second request")


SLOW_BODIES = {
    "length": (post(b"Content-Length: 60000"), b"a", trickle),
    "chunks": (chunked(b""), b"1\r\na\r\n", trickle),
    "extension": (chunked(b"1;"), b"a", trickle),
    "trailers": (chunked(b"d\r\n" + BODY + b"\r\n0\r\n"), b"X: y\r\n", trickle),
    "length behind 100": (post(b"Content-Length: 60000", b"Expect: 100-continue"), b"a", trickle),
    "many chunks": (chunked(b""), b"1\r\na\r\n" * 100_000, flood),
    "many extensions": (chunked(b""), (b"1;" + b"a" * 5000 + b"\r\na\r\n") * 100, flood),
}


@pytest.mark.parametrize("what", SLOW_BODIES)
async def test_a_body_that_does_not_end_is_given_up(recorder, gateway_to, connect, nursery, what):
    """No byte of a body prolongs its time, however slowly or fast they come."""
    begin, more, how = SLOW_BODIES[what]
    client = await connect(await gateway_to({"m": recorder.port}, "[timeouts]\nbody_s = 0.3\n"))
    await client.send(begin)
    nursery.start_soon(how, client.stream, more)
    with trio.fail_after(LIMIT_S):
        await expect_timeout(Answers(client.stream))
    assert not recorder.requests


async def test_slow_clients_are_bounded_in_number(recorder, gateway_to, connect, nursery, mock_clock):
    """While slow clients hold all connections a further one is told so; their time ends, and others are served."""
    limits = "[limits]\nconnections_max = 4\n[timeouts]\nhead_s = 0.3\n"
    port = await gateway_to({"m": recorder.port}, limits)
    slow = [await connect(port) for _ in range(4)]
    for client in slow:
        await client.send(b"POST / HTTP/1.1\r\n")
        nursery.start_soon(trickle, client.stream, b"a: b\r\n")
    for _ in range(3):
        status, headers, body = await (await connect(port)).ask()
        assert (status, code_of(body), headers[b"connection"]) == (503, "overloaded", b"close")
    for _ in range(2):
        mock_clock.jump(0.3)
        await trio.testing.wait_all_tasks_blocked()
    for client in slow:
        await expect_timeout(Answers(client.stream))
    while (await (await connect(port)).ask())[0] != 200:
        mock_clock.jump(0.1)
        await trio.testing.wait_all_tasks_blocked()
    assert len(recorder.requests) == 1


@pytest.mark.parametrize("pad", [0, 1_000_000])
async def test_a_client_that_only_asks_is_bounded(serve, gateway_to, connect, nursery, pad, mock_clock):
    """Of one that never reads no more requests are read than answers find room; it is dropped, others are served."""

    async def reply(stream, head, body):
        await stream.send_all(plain(b"x" * 2_000_000 if b"big" in body else b"{}"))

    upstream, port = await serve(reply)
    port = await gateway_to({"m": port}, "[timeouts]\nclient_stall_s = 0.5\n")
    greedy, other = await connect(port), await connect(port)
    sent = []

    async def ask_on():
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(50):
                await greedy.send(sized(body=b'{"model":"m","big":"' + b"x" * pad + b'"}'))
                sent.append(1)

    nursery.start_soon(ask_on)
    await turns_until(lambda: upstream.requests)
    await trio.testing.wait_all_tasks_blocked(0.02)
    served = 0
    while not upstream.closed:
        assert (await other.ask())[0] == 200
        served += 1
        mock_clock.jump(0.1)
        await trio.testing.wait_all_tasks_blocked()
    assert served > 1
    asked = len(upstream.requests) - served
    assert 0 < asked < 25
    if pad:
        assert len(sent) < 50
    answers = await Answers(greedy.stream).rest()
    assert len(answers) < asked * 2_000_000
    assert answers.count(b"HTTP/1.1 200 OK") <= asked
    assert len(upstream.requests) == asked + served


@pytest.mark.parametrize("behind", [SMUGGLED, b"\r\n"], ids=["request", "empty line"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_what_comes_behind_the_last_request_costs_no_answer(serve, gateway_to, connect, version, behind):
    """The last answer arrives whole though the client has sent more, which nobody reads."""
    whole = b"x" * 3_000_000
    more = trio.Event()

    async def reply(stream, head, body):
        await more.wait()
        await stream.send_all(plain(whole))

    upstream, port = await serve(reply)
    client = await connect(await gateway_to({"m": port}))
    await client.send(sized(b"Connection: close", line=b"POST /v1/completions HTTP/" + version))
    await until(lambda: upstream.requests)
    await client.send(behind)
    more.set()
    answers = Answers(client.stream)
    with trio.fail_after(LIMIT_S):
        status, headers, body = await answers.next(b"POST")
        assert (status, headers[b"connection"], len(body)) == (200, b"close", len(whole))
        assert await answers.rest() == b""
    assert len(upstream.requests) == 1
