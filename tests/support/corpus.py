"""Requests, what h11 makes of each, and what the gateway makes of it."""

import random

import attrs
import h11

HEAD_BYTES_MAX = 8192
BODY_BYTES_MAX = 65536


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
    400, "is not supported: use HTTP/1.1.", closes=True, stricter="h11 takes every version of the form HTTP/d.d"
)


def unclear(says):
    """Refused though h11 reads it: other parsers may read it in another way."""
    return Answer(400, says, closes=True, stricter="what two parsers may read differently has no one reading")


LINE_FEED = unclear("a line ends with a line feed alone")
BLANK = unclear("a line begins with a blank")
CONTROL = unclear("there is a control character")
LENGTHS = unclear("Content-Length is given more than once")
OLD_CHUNKS = unclear("HTTP/1.0 has no Transfer-Encoding")
UNCLEAR = (LINE_FEED, BLANK, CONTROL, LENGTHS, OLD_CHUNKS)
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
    reads("te-behind-bare-lf", post(LENGTH, b"X: y\nTransfer-Encoding: chunked", body=CHUNKS), LINE_FEED),
    reads("te-upper-case", post(b"TRANSFER-ENCODING: CHUNKED", body=CHUNKS)),
    reads("te-tab", post(b"Transfer-Encoding:\tchunked", body=CHUNKS)),
    reads("te-trailing-space", post(b"Transfer-Encoding: chunked \t ", body=CHUNKS)),
    reads("te-no-space", post(b"Transfer-Encoding:chunked", body=CHUNKS)),
    reads("te-underscore", sized(b"Transfer_Encoding: chunked")),
    reads("te-prefixed", sized(b"X-Transfer-Encoding: chunked")),
    refused("te-underscore-alone", post(b"Transfer_Encoding: chunked", body=CHUNKS), BAD_LINE, NOT_JSON),
    reads("te-named-by-connection", post(b"Connection: transfer-encoding", CHUNKED, body=CHUNKS)),
    reads("cl-named-by-connection", sized(b"Connection: content-length, host")),
    reads("te-in-1.0", post(CHUNKED, body=CHUNKS, line=b"POST /v1/completions HTTP/1.0"), OLD_CHUNKS),
    reads("cl-te-in-1.0", post(LENGTH, CHUNKED, body=CHUNKS, line=b"POST /v1/completions HTTP/1.0"), TWO_LENGTHS),
]
CONTENT_LENGTH = [
    reads("cl-twice-the-same", post(LENGTH, LENGTH, body=BODY), LENGTHS),
    reads("cl-list-of-the-same", post(b"Content-Length: 13, 13", body=BODY), LENGTHS),
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
    reads("fold", sized(b"X: y\r\n z"), BLANK),
    reads("fold-by-tab", sized(b"X: y\r\n\tz"), BLANK),
    reads("fold-to-nothing", sized(b"X: y\r\n "), BLANK),
    reads("fold-of-a-length", sized(b"X: y\r\n Content-Length: 5"), BLANK),
    reads("fold-of-a-coding", sized(b"X: y\r\n\tTransfer-Encoding: chunked"), BLANK),
    reads("fold-many", sized(b"X: y" + b"\r\n z" * 500), BLANK),
    refused("fold-first", post(LENGTH, body=BODY, host=b" Host: x"), "continuation line at start of headers"),
    refused("fold-of-the-request-line", post(LENGTH, body=BODY, line=b"POST /v1/completions\r\n HTTP/1.1"), BAD_LINE),
    refused("fold-in-cl", post(b"Content-Length: 1\r\n 3", body=BODY), BAD_LENGTH),
    reads("fold-before-cl", post(b"Content-Length:\r\n 13", body=BODY), BLANK),
    refused("fold-in-te", post(b"Transfer-Encoding: chun\r\n ked", body=CHUNKS), NO_CODING),
    reads("fold-before-te", post(b"Transfer-Encoding:\r\n chunked", body=CHUNKS), BLANK),
    refused("fold-behind-te", post(b"Transfer-Encoding: chunked\r\n , identity", body=CHUNKS), NO_CODING),
    refused("fold-of-a-name", post(b"Content-Length\r\n : 13", body=BODY), BAD_HEADER),
    reads("lf-everywhere", post(LENGTH).replace(b"\r\n", b"\n") + BODY, LINE_FEED),
    reads(
        "lf-behind-the-request-line",
        b"POST /v1/completions HTTP/1.1\nHost: x\r\n" + LENGTH + b"\r\n\r\n" + BODY,
        LINE_FEED,
    ),
    reads("lf-behind-a-header", b"POST /v1/completions HTTP/1.1\r\nHost: x\n" + LENGTH + b"\r\n\r\n" + BODY, LINE_FEED),
    reads(
        "lf-as-the-empty-line", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\r\n\n" + BODY, LINE_FEED
    ),
    reads("lf-and-crlf", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\n\r\n" + BODY, LINE_FEED),
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
    reads("controls-in-a-value", sized(b"X: a\x01\x1b\x7fb"), CONTROL),
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
    reads("last-empty-line-lf", chunked(CHUNKS.replace(b"0\r\n\r\n", b"0\r\n\n")), LINE_FEED),
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
    reads("trailer-lf", chunked(CHUNKS[:-2] + b"X-Sum: 1\n\n"), LINE_FEED),
    reads("trailer-cl", chunked(CHUNKS[:-2] + b"Content-Length: 99\r\n\r\n")),
    reads("trailer-te", chunked(CHUNKS[:-2] + CHUNKED + b"\r\n\r\n")),
    reads("trailer-host", chunked(CHUNKS[:-2] + b"Host: y\r\nConnection: close\r\nAuthorization: no\r\n\r\n")),
    reads("trailer-folded", chunked(CHUNKS[:-2] + b"X: y\r\n z\r\n\r\n"), BLANK),
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
CASES_BY_KIND = {
    "transfer encoding": TRANSFER_ENCODING,
    "content length": CONTENT_LENGTH,
    "lines": LINES,
    "headers": HEADERS,
    "request lines": REQUEST_LINES,
    "chunked bodies": CHUNKED_BODIES,
    "huge heads": HUGE_HEADS,
    "expecting": EXPECTING,
    "one after another": ONE_AFTER_ANOTHER,
    "not http": NOT_HTTP,
}
CASES = [case for cases in CASES_BY_KIND.values() for case in cases]


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
    """Return the headers that a gateway passes on as they are."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    kept = [header for header in headers if header[0] not in OF_THE_CONNECTION | REWRITTEN | named]
    return [header for header in kept if not header[0].startswith(b"sec-")]
