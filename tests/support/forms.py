"""Forms for the tests: as honest clients write them, and as nobody should; and other parsers that read them."""

import email
import email.policy
import io
import json
import logging
import random

import attrs
import python_multipart
from starlette.datastructures import Headers
from starlette.formparsers import FormParser, MultiPartParser

from ichat.errors import ApiError
from ichat.http.multipart import model_of_form, read_form
from ichat.http.request_body import form_body
from ichat.proxy.engine_control import CARRIER, MEMBERS, without_control

ALNUM = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HEX = "0123456789abcdef"


def at_once(awaitable):
    """Return what is awaited, where there is nothing to wait for."""
    try:
        next(awaitable.__await__())
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


# Other parsers. Each returns name, whether it is a file, and value of each part; names are bytes.


class _Pieces:
    """A body, as Starlette receives it: in two pieces."""

    def __init__(self, body):
        self._left = [body[:7], body[7:]]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)


def by_starlette(content_type, body):
    """Read a form as FastAPI's applications do, vLLM and SGLang among them."""
    headers = Headers(raw=[(b"content-type", content_type)])
    if content_type.lower().startswith(b"application/x-www-form-urlencoded"):
        return [
            (name.encode(), False, value.encode())
            for name, value in at_once(FormParser(headers, _Pieces(body)).parse()).multi_items()
        ]
    parser = MultiPartParser(headers, _Pieces(body))
    try:
        found = []
        for name, value in at_once(parser.parse()).multi_items():
            is_file = not isinstance(value, str)
            found.append(
                (name.encode(), is_file, value.file.read() if is_file else value.encode("utf-8", "surrogatepass"))
            )
        return found
    finally:
        for file in parser._files_to_close_on_error:
            file.close()


def by_python_multipart(content_type, body):
    """Read a form by the parser below Starlette's, which then reads the heads of parts itself."""
    found = []

    def on_file(file):
        file.file_object.seek(0)
        found.append((file.field_name, True, file.file_object.read()))
        file.close()

    parser = python_multipart.create_form_parser(
        {"Content-Type": content_type},
        lambda field: found.append((field.field_name, False, field.value or b"")),
        on_file,
    )
    half = len(body) // 2
    parser.write(body[:half])
    parser.write(body[half:])
    parser.finalize()
    return found


def by_email(content_type, body, policy=email.policy.compat32):
    """Read a form as mail, as frameworks did that took the parameters' grammar from there."""
    message = email.message_from_bytes(b"Content-Type: %b\r\n\r\n%b" % (content_type, body), policy=policy)
    if not message.is_multipart():
        raise ValueError("no parts")
    found = []
    for part in message.walk():
        if part is message:
            continue
        names = [value for name, value in part.get_params([], "content-disposition") if name == "name"]
        name = names[-1] if names else ""
        if isinstance(name, tuple):
            name = name[2]
        is_file = part.get_param("filename", header="content-disposition") is not None
        found.append((name.encode("utf-8", "replace"), is_file, part.get_payload(decode=True)))
    return found


def by_new_email(content_type, body):
    """Read a form as mail, by the newer of its two parsers of headers."""
    return by_email(content_type, body, email.policy.HTTP)


READERS = (by_starlette, by_python_multipart, by_email, by_new_email)


def reading(reader, content_type, body):
    """Return what a parser makes of a form that may be wrong; None if it refuses it."""
    try:
        return reader(content_type, body)
    except Exception:
        return None


# What is to be true.


@attrs.define
class Verdicts:
    """What became of many forms."""

    read: int = 0
    rewritten: int = 0
    refused: int = 0
    steering: int = 0
    """Those of which something was taken off."""
    two_readings: int = 0
    """Those that other parsers read differently as they came, in the model or what steers an engine."""


def parts_of(form):
    return [
        (field.name.encode(), field.is_file, bytes(form.body[field.value_start : field.end])) for field in form.fields
    ]


def _alike(parts):
    """Return parts in which no parser's own decoding shows: mail has no names of other letters, Starlette only text."""
    return [
        (name if name.isascii() else b"?", is_file, value if is_file else _text(value))
        for name, is_file, value in parts
    ]


def _text(value):
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def steering(parts):
    """Return what of a form decides on the model and steers an engine."""
    names = {b"model", *(name.encode() for name in (*MEMBERS, CARRIER))}
    return [part for part in parts or () if part[0] in names]


def judge(content_type, body, verdicts, *, where="", compares_original=False):
    """Assert that a form has one reading or is refused; return its parts, None where it is refused."""
    if compares_original:
        ways = {
            repr(steering(found)) for reader in READERS if (found := reading(reader, content_type, body)) is not None
        }
        verdicts.two_readings += len(ways) > 1
    try:
        form = at_once(read_form(body, content_type))
    except ApiError as error:
        assert (error.status, error.code) == (400, "bad_request"), error  # noqa: PT017
        verdicts.refused += 1
        return None
    verdicts.read += 1
    verdicts.rewritten += form.body is not body
    mine = parts_of(form)
    for reader in READERS:
        theirs = reading(reader, form.content_type, bytes(form.body))
        assert theirs is not None, (where, reader.__name__, content_type, body, form.body)
        assert _alike(theirs) == _alike(mine), (where, reader.__name__, content_type, body, form.body)
    again = at_once(read_form(form.body, form.content_type))
    assert again.body is form.body
    _judge_steering(form, verdicts, where)
    return mine


def _judge_steering(form, verdicts, where):
    """Assert that what goes to a worker names one model, and steers no engine, for each parser."""
    by_name = {b"content-type": form.content_type}
    try:
        model = model_of_form(form.body, form.fields)
        left, names = at_once(without_control(form_body(form.body, form.fields), by_name))
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
        return
    verdicts.steering += bool(names)
    for reader in READERS:
        found = steering(reader(form.content_type, bytes(left.data)))
        assert {value for name, _, value in found if name == b"model"} == {model.encode()}, (where, form.body)
        assert MEMBERS.keys().isdisjoint(
            name for part in found if part[0] == CARRIER.encode() for name in _members(part[2])
        )
        assert {name for name, *_ in found} <= {b"model", CARRIER.encode()}, (
            where,
            reader.__name__,
            form.body,
            left.data,
        )


def _members(value):
    """Return the names in a value that an engine would read as JSON."""
    try:
        found = json.loads(value)
    except ValueError:
        return ()
    return found if isinstance(found, dict) else ()


# Forms as clients write them.


def _word(dice, letters, size):
    return "".join(dice.choice(letters) for _ in range(size))


def _uuid(dice):
    return "-".join(_word(dice, HEX, size) for size in (8, 4, 4, 4, 12))


CLIENTS = {  # a boundary, its quotes, the head of a field, the head of a file, the end
    "Chromium": (lambda d: "----WebKitFormBoundary" + _word(d, ALNUM, 16), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n"),
    "Firefox": (lambda d: "----geckoformboundary" + _word(d, HEX, 32), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n"),
    "curl": (lambda d: "-" * 24 + _word(d, HEX, 16), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n"),
    "requests": (lambda d: _word(d, HEX, 32), "", "{d}{n}", "{d}{n}; {f}", "\r\n"),
    "httpx": (lambda d: _word(d, HEX, 32), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n"),
    "aiohttp": (
        lambda d: _word(d, HEX, 32), "", "Content-Type: text/plain; charset=utf-8\r\n{d}{n}", "{t}\r\n{d}{n}; {p}", "\r\n",
    ),
    "older aiohttp": (
        lambda d: _word(d, HEX, 32), "", "Content-Type: text/plain; charset=utf-8\r\nContent-Length: 9\r\n{d}{n}",
        "{t}\r\n{d}{n}; {f}; {x}", "\r\n",
    ),
    "Go": (lambda d: _word(d, HEX, 60), "", "{d}{n}", "{d}{n}; {f}\r\nContent-Type: application/octet-stream", "\r\n"),
    "Node's fetch": (
        lambda d: "----formdata-undici-0" + _word(d, "0123456789", 11), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n",
    ),
    "Node's form-data": (lambda d: "-" * 26 + _word(d, "0123456789", 24), "", "{d}{n}", "{d}{n}; {f}\r\n{t}", "\r\n"),
    ".NET": (
        _uuid, '"', "Content-Type: text/plain; charset=utf-8\r\n{d}{u}", "{d}{u}; filename=a.wav; {x}", "\r\n",
    ),
    "OkHttp": (_uuid, "", "{d}{n}\r\nContent-Length: 9", "{d}{n}; {f}\r\n{t}\r\nContent-Length: 3", "\r\n"),
    "Apache HttpClient": (
        lambda d: _word(d, ALNUM + "-_", 30), "",
        "{d}{n}\r\nContent-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit",
        "{d}{n}; {f}\r\n{t}\r\nContent-Transfer-Encoding: binary", "\r\n",
    ),
    "Ruby": (
        lambda d: "-" * 12 + "RubyMultipartPost-" + _word(d, HEX, 32), "", "{d}{n}",
        "{d}{n}; {f}\r\nContent-Length: 3\r\n{t}\r\nContent-Transfer-Encoding: binary", "\r\n\r\n",
    ),
    "reqwest": (
        lambda d: "-".join(_word(d, HEX, 16) for _ in range(4)), "", "{d}{n}", "{d}{n}; {x}\r\n{t}", "\r\n",
    ),
    "Python's email": (lambda d: "=" * 15 + _word(d, "0123456789", 19) + "==", '"', "MIME-Version: 1.0\r\n{d}{n}", "{d}{n}; {f}", ""),
}  # fmt: skip
TYPES = ("audio/wav", "audio/webm;codecs=opus", "application/octet-stream", 'text/plain; charset="utf-8"')
FILE_NAMES = (
    ("a.wav", "a.wav"), ("ü%20b.wav", "%C3%BC%2520b.wav"), ("", ""), ("a b; name=model.wav", "a%20b%3B%20name%3Dmodel.wav"),
    ("录音.m4a", "%E5%BD%95%E9%9F%B3.m4a"), ("x%22y.wav", "x%22y.wav"),
)  # fmt: skip
"""Names of files, as they are and in per cents."""
NAMES = (
    "language", "prompt", "response_format", "temperature", "timestamp_granularities[]", "stream", "priority", "rid", "vllm_xargs",
    "n", "x.y",
)  # fmt: skip
VALUES = (
    b"", b"en", b"0.5", b"a\r\nb", b"\n", b"\r", b"--", b"\r\n--", b'{"a": 1, "priority": -1}', b"-1", "schön".encode(), b"\0\xff",
    b"\r\n\r\n", b"Content-Disposition: form-data; name=model\r\n\r\nwhisper-secret",
)  # fmt: skip


def honest_form(dice):
    """Return the name of a client, a content type, a body, and the parts that it means."""
    client = dice.choice(list(CLIENTS))
    make, quote, field, file, end = CLIENTS[client]
    boundary = make(dice)
    parts = [("model", False, dice.choice((b"whisper-a", b"org/m:1", b"whisper-1")))]
    parts += [(dice.choice(NAMES), False, dice.choice(VALUES)) for _ in range(dice.randrange(4))]
    for _ in range(dice.choice((0, 1, 1, 2))):
        value = dice.choice(VALUES) + dice.randbytes(dice.choice((0, 3, 300)))
        parts += [(dice.choice(("file", "image[]")), True, value)]
    dice.shuffle(parts)
    text = io.BytesIO()
    for name, is_file, value in parts:
        plain, coded = dice.choice(FILE_NAMES)
        head = (file if is_file else field).format(
            d="Content-Disposition: form-data; ", n=f'name="{name}"', u=f"name={name}" if name.isalpha() else f'name="{name}"',
            f=f'filename="{plain}"', p=f'filename="{coded}"', x=f"filename*=utf-8''{coded}",
            t=f"Content-Type: {dice.choice(TYPES)}",
        )  # fmt: skip
        text.write(f"--{boundary}\r\n{head}\r\n\r\n".encode() + value + b"\r\n")
    text.write(f"--{boundary}--{end}".encode())
    content_type = f"multipart/form-data; boundary={quote}{boundary}{quote}".encode()
    meant = [(name.encode(), is_file, value) for name, is_file, value in parts]
    return client, content_type, text.getvalue(), meant


# Forms that nobody should write.

BOUNDARIES = (
    "bound",
    "b",
    "----WebKitFormBoundaryAbCdEf0123456789",
    "=_x",
    "-",
    "a b",
    "a.b",
    "a'b",
    "b" * 71,
    "a;b",
    "x--",
)
SWITCHES = (
    "multipart/form-data; boundary={0}", 'multipart/form-data; boundary="{0}"', "multipart/form-data; boundary={0}; boundary=other",
    "multipart/form-data; boundary=other; boundary={0}", "multipart/form-data; boundary*0={0}",
    "multipart/form-data; boundary=other; boundary*=utf-8''{0}", 'multipart/form-data; x="\\\\"; boundary={0}; y="',
    'multipart/form-data; boundary="{0}"; charset=utf-8', "multipart/form-data; boundary={0}; charset=utf-7",
    "multipart/form-data;boundary={0} ", "multipart/mixed; boundary={0}", 'multipart/form-data; boundary="\\{0}"',
    "Multipart/Form-Data; BOUNDARY={0}", "multipart/form-data; boundary = {0}", 'multipart/form-data; boundary="{0}',
)  # fmt: skip
"""Content types; the first ones are right."""
HEADS = (
    'Content-Disposition: form-data; name="{0}"', "Content-Disposition: form-data; name={0}",
    'Content-Disposition: form-data; name="{0}"; filename="a.wav"\r\nContent-Type: audio/wav',
    'content-disposition:form-data;name="{0}"', 'Content-Disposition: form-data; filename="x"; name="{0}"',
    'X-A: b\r\nContent-Disposition: form-data; name="{0}"\r\nContent-Length: 3',
    'Content-Disposition: form-data; name="x"; a="\\\\"; c="; name={0}; d="', 'Content-Disposition: form-data; name="x"; name*0="{0}"',
    'Content-Disposition: form-data; name="x"; name*=utf-8\'\'{0}', 'Content-Disposition: form-data; name="x"; name="{0}"',
    'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="{0}"',
    'Content-Disposition: form-data;\r\n name="{0}"', 'Content-Disposition: form-data; name="x"\r\n ; name="{0}"',
    'Content-Disposition: form-data; name="x"\nContent-Disposition: form-data; name="{0}"', 'Content-Disposition: attachment; name="{0}"',
    'Content-Disposition : form-data; name="{0}"', 'Content-Disposition: form-data; name="x\\"; name={0}; y="',
    'Content-Disposition: form-data; filename="a\\"; name="{0}"', 'Content-Disposition: form-data; name="\\{0}"',
    'Content-Disposition: form-data; name="{0}"\r\nContent-Transfer-Encoding: quoted-printable',
    'Content-Disposition: form-data; name="{0}"\r\nContent-Transfer-Encoding: base64',
    'Content-Disposition: form-data; name="{0}"\r\nContent-Type: multipart/mixed; boundary=in',
    'Content-Disposition: form-data; name="{0}"\r\nContent-Type: message/rfc822', 'Content-Disposition: form-data; name="=?utf-8?q?{0}?="',
    'Content-Disposition: form-data; name="{0}"\r\nContent-Type: text/plain; charset=utf-16', 'Content-Disposition: form-data; NAME="{0}"',
    "Content-Disposition: form-data; filename*=utf-8''a%22%3B%20name%3D%22{0}", 'Content-Disposition: form-data; name="{0}";',
    'Content-Disposition: form-data; name="<{0}>"', 'Content-Disposition: form-data; name=" {0} "', 'Content-Disposition: form-data; name=""',
    'Content-Disposition: form-data; name="{0}"; x', 'Content-Disposition: form-data; name = "{0}"', "X: y", "",
    'Content-Disposition: form-data; name="x"\rContent-Disposition: form-data; name="{0}"', 'Content-Disposition: form-data; name="x\x85{0}"',
    'Content-Disposition: form-data; name="x"; filename="\u2028Content-Disposition: form-data; name={0}"',
)  # fmt: skip
"""Heads of parts; the first six are right."""
STRANGE_NAMES = (
    "model", "model", "model", "model", "model", "priority", "rid", "vllm_xargs", "kv_transfer_params", "_charset_", "prompt", "file", "Model", "n", "x[]", "mоdel"
)  # fmt: skip
STRANGE_VALUES = (
    *VALUES, b"whisper-a", b"whisper-a", b"whisper-a", b"whisper-secret", b"-1000", b"utf-8", b"whisper=2Dsecret", b"d2hpc3Blcg==",
    b"--in\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper-secret\r\n--in--", b"+AG0-", b"w\0h\0",
    b'{"\\u0070riority": 1, "a": "\\u002d-bound"}',
)  # fmt: skip
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b"\x0b", b"\x85", b'"', b"\\", b'\\"', b'\\\\"', b";", b"=", b"*", b"*0", b"'", b"%22",
    b"--", b"-", b"--bound", b"\r\n--bound\r\n", b"\n--bound\n", b"\r\n--bound--\r\n", b"--bound--", b"; name=model", b'; name="model"',
    b"; filename=x", b"\xff", b"\xc3\xbc", b"\xe2\x80\xa8", b"\r\n\r\n", b"\r\n ", b"\n\n", b"Content-Disposition: form-data; name=model\r\n",
    b"<", b">", b",", b":", b"=?", b"\xef\xbb\xbf",
)  # fmt: skip


def strange_form(dice):
    """Return a content type and a body: by the grammar and its borders, and then with some bytes changed."""
    boundary = dice.choice(BOUNDARIES) if dice.random() < 0.15 else "bound"
    switch = dice.choice(SWITCHES) if dice.random() < 0.1 else SWITCHES[dice.randrange(2)]
    body = bytearray(dice.choice((b"",) * 80 + (b"\r\n", b"\n", b"preamble\r\n", b"\r\n\r\n", b" ")))
    delimiter = b"--" + boundary.encode()
    between = (b"\r\n",) * 300 + (b"\n", b"\r", b"", b" \r\n", b"\r\n\r\n")
    for _ in range(dice.choice((0, 1, 1, 2, 2, 2, 3, 4))):
        head = dice.choice(HEADS) if dice.random() < 0.1 else HEADS[dice.randrange(6)]
        body += (
            delimiter
            + dice.choice(between)
            + head.replace("{0}", dice.choice(STRANGE_NAMES)).encode("utf-8")
            + dice.choice(between)
        )
        body += b"\r\n" + dice.choice(STRANGE_VALUES) + dice.choice(between)
    body += delimiter + dice.choice(
        (b"--\r\n",) * 80 + (b"--", b"", b"--\n", b"-- \r\n", b"--\r\nepilogue", b"--\r\n--bound\r\n")
    )
    for _ in range(dice.choice((0, 0, 0, 0, 0, 0, 1, 1, 2, 3))):
        at = dice.randrange(len(body) + 1)
        if dice.random() < 0.2:
            body[at : at + 1] = bytes([dice.randrange(256)])
        else:
            body[at : at + dice.choice((0, 0, 1, 2, 5))] = dice.choice(TOKENS)
    return switch.replace("{0}", boundary).encode("latin-1"), bytes(body)


HONEST_EVERY = 4
COMPARED_EVERY = 40
"""How many forms there are for one of which the parsers' readings are compared as it came."""


def judge_many(seed, numbers, verdicts):
    """Judge forms, each made of the seed and its own number; see `judge`."""
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    for number in numbers:
        dice = random.Random(f"{seed}-{number}")
        where = f"ICHAT_FUZZ_SEED={seed}, form {number}"
        if number % HONEST_EVERY:
            content_type, body = strange_form(dice)
            judge(content_type, body, verdicts, where=where, compares_original=number % COMPARED_EVERY == 1)
        else:
            client, content_type, body, meant = honest_form(dice)
            assert judge(content_type, body, verdicts, where=where) == meant, (where, client, content_type, body)
