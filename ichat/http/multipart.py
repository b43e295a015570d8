"""Multipart forms (RFC 7578), used for audio: read strictly, and written so that every parser finds the same fields.

Parsers differ in escapes, extended parameters, repeated and folded headers, encodings of parts, and in what ends a
part. A form that needs any of that is refused. Of each part's head only `name`, `filename` and the media type stay,
in a single way of writing. Files are skipped, and copied only where the form was written in another way.
"""

import re
import urllib.parse
from collections.abc import Container, Iterable, Mapping, Sequence

import attrs

from ichat.errors import ApiError, bad_request
from ichat.http.json_body import NAME_BYTES_MAX, Body, Cursor, Member, rewrite_json

PARTS_MAX = 1000
PART_HEAD_BYTES_MAX = 8192
FIELD_NAME_CHARACTERS_MAX = 256
FILE_NAME_CHARACTERS_MAX = 200
"""Of a longer name of a file the end is kept, since it has the file's type."""
_STEPS_A_PART = 50
"""The cost of reading the head of a part."""

_TOKEN = rb"[!#$%&'+\-.^_`|~0-9A-Za-z]+"
"""A token of HTTP without `*`, which begins the extended parameters of RFC 2231."""
_PART_HEADER = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\0-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(rb"[ \t]*;[ \t]*([A-Za-z]+\*?)=(?:\"([^\"\\\0-\x1f\x7f]*)\"|(" + _TOKEN + rb"))")
_MEDIA_TYPE = re.compile(rb"(" + _TOKEN + rb"/" + _TOKEN + rb")[ \t]*(?:;.*)?")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=?]{1,70}")
"""A boundary of RFC 2046 without blanks."""
_PLAIN_BOUNDARY = re.compile(rb"[0-9A-Za-z+_\-.]+")
"""A boundary that needs no quotes."""
_END = re.compile(rb"(?:\r?\n){0,2}")
_UTF_8 = (b"utf-8", b"utf8", b"us-ascii")
_CHARSET = "_charset_"
"""The field in which a form may say how its values are written (RFC 7578, section 4.6)."""
_AS_IT_IS = (b"binary", b"8bit", b"7bit")
"""The transfer encodings that change nothing."""
_HOLDS_PARTS = (b"multipart/", b"message/")
_NOT_IN_NAMES = frozenset('"\\;=%<>')
_NOT_IN_FILE_NAMES = frozenset('"\\;\ufffd')
_FIELD = b'Content-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@attrs.frozen
class Field(Member):
    """A part of a form, and its place in the body; it begins with its head, after the line of the boundary."""

    is_file: bool
    head: bytes
    """Its head as all parsers read it."""


@attrs.frozen
class Form:
    """A form in which all parsers find the same fields."""

    body: Body
    content_type: bytes
    fields: Sequence[Field]


async def read_form(body: Body, content_type: bytes) -> Form:
    """Return the form in a request's body, as upstreams get it; the body is the same object where it is so already.

    Raises ApiError 400; see `fields_of`.
    """
    boundary = _boundary_of(content_type)
    fields = await fields_of(body, content_type)
    charsets = [
        body[field.value_start : min(field.end, field.value_start + 16)] for field in fields if field.name == _CHARSET
    ]
    if any(charset.lower() not in _UTF_8 for charset in charsets):
        raise bad_request("A form must be in UTF-8.", param=_CHARSET)
    plain = boundary if _PLAIN_BOUNDARY.fullmatch(boundary) else b'"%b"' % boundary
    content_type = b"multipart/form-data; boundary=" + plain
    opening, closing = b"--%b\r\n" % boundary, b"--%b--\r\n" % boundary
    is_so_already = (
        fields[0].start == len(opening)
        and fields[-1].end + 2 + len(closing) == len(body)
        and body.endswith(b"\n")
        and all(body[field.start : field.value_start] == field.head for field in fields)
    )
    if is_so_already:
        return Form(body, content_type, fields)
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    written: list[Field] = []
    at = 0
    for field in fields:
        pieces += (opening, field.head, view[field.value_start : field.end], b"\r\n")
        start = at + len(opening)
        value_start = start + len(field.head)
        end = value_start + field.end - field.value_start
        written.append(Field(field.name, start, value_start, end, field.is_file, field.head))
        at = end + 2
    return Form(b"".join([*pieces, closing]), content_type, written)


async def model_in_form(body: Body, content_type: bytes) -> str:
    """Return the model that a multipart form names. Raises ApiError 400, also if it names two."""
    return model_of_form(body, await fields_of(body, content_type))


def model_of_form(body: Body, fields: Iterable[Field]) -> str:
    """Return the model that a form with these fields names. Raises ApiError 400, also if it names two."""
    named = [field for field in fields if field.name == "model"]
    if any(field.is_file or field.end - field.value_start > NAME_BYTES_MAX for field in named):
        raise bad_request("The form's `model` must be a field with the model's name, not a file.", param="model")
    values = {bytes(body[field.value_start : field.end]) for field in named}
    if len(values) > 1:
        raise bad_request("The form has several fields `model`, and they differ: send one.", param="model")
    try:
        model = values.pop().decode() if values else ""
    except UnicodeDecodeError as error:
        raise bad_request("The form's field `model` must be UTF-8.", param="model") from error
    if not model:
        raise bad_request("The request must name its model: a form field `model`.", param="model")
    return model


async def fields_of(body: Body, content_type: bytes) -> list[Field]:
    """Return the parts of a multipart/form-data body in their order, never none; values are not read.

    Raises ApiError 400 for a form that is not whole, has too many parts, or could be read in two ways.
    """
    delimiter = b"--" + _boundary_of(content_type)
    cursor = Cursor(body, 2 if body.startswith(b"\r\n") else 0)
    if not cursor.takes(delimiter):
        raise _bad_form("it does not begin with the boundary that its content type names")
    fields: list[Field] = []
    while not cursor.takes(b"--"):
        if not cursor.takes(b"\r\n"):
            raise _bad_form(f"a boundary is not followed by a line break, at byte {cursor.at}")
        if len(fields) == PARTS_MAX:
            raise _bad_form(f"it has more than {PARTS_MAX} parts")
        start = cursor.at
        cursor.at = body.find(b"\r\n\r\n", start, start + PART_HEAD_BYTES_MAX) + 4
        if cursor.at < 4:
            raise _bad_form(f"a part's head does not end within {PART_HEAD_BYTES_MAX} bytes, at byte {start}")
        value_start = cursor.at
        name, head, is_file = _read_part_head(bytes(body[start : value_start - 4]))
        await cursor.step(_STEPS_A_PART)
        if not await cursor.skip_behind(delimiter):
            raise _bad_form("it ends without its closing boundary; send the whole of it")
        end = cursor.at - len(delimiter) - 2
        if end < value_start or body[end : end + 2] != b"\r\n" or delimiter in head:
            raise _bad_form(f"its boundary stands inside of a part, at byte {end + 2}; choose another boundary")
        fields.append(Field(name, start, value_start, end, is_file, head))
    if not _END.fullmatch(body, cursor.at):
        raise _bad_form("something follows its closing boundary")
    if not fields:
        raise _bad_form("it has no fields")
    return fields


def rewrite_form(
    body: Body,
    fields: Sequence[Member],
    replace: Mapping[str, bytes],
    drop: Container[str] = (),
    new: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return the body of a `Form` with other values, without some fields, and with new fields before the first.

    A field must stay. `replace` and `drop` apply to every field of a name; all else stays byte for byte.
    Raises ApiError 400 where the client's boundary is part of a value.
    """
    opening = bytes(body[: fields[0].start])
    more = [_FIELD % (name.encode(), value) for name, value in (new or {}).items()]
    if any(opening[:-2] in value for value in (*replace.values(), *more)):
        raise _bad_form("its boundary stands in the values that the gateway writes; choose another boundary")
    before = b"".join(one + opening for one in more)
    return rewrite_json(body, fields, replace, drop, before=before)


def is_field_name(name: str) -> bool:
    """Return whether all parsers read this name of a field as it is."""
    return (
        0 < len(name) <= FIELD_NAME_CHARACTERS_MAX
        and name.isprintable()
        and " " not in name
        and _NOT_IN_NAMES.isdisjoint(name)
    )


def _boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a content type names. Raises ApiError 400."""
    try:
        kind, parameters = _read_parameters(content_type)
    except ValueError as error:
        raise bad_request(f"The content type cannot be read: {error}.") from error
    boundary = parameters.pop(b"boundary", b"")
    charset = parameters.pop(b"charset", b"utf-8").lower()
    if kind != b"multipart/form-data" or parameters or not _BOUNDARY.fullmatch(boundary):
        raise bad_request(
            "The content type must be multipart/form-data with one valid boundary and nothing more; "
            "HTTP clients write it themselves when it is not set by hand."
        )
    if charset not in _UTF_8:
        raise bad_request("A form must be in UTF-8.")
    return boundary


def _read_part_head(head: bytes) -> tuple[str, bytes, bool]:
    """Return the name of a part, its head as all parsers read it, and whether it is a file. Raises ApiError 400."""
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        match = _PART_HEADER.fullmatch(line)
        if match is None:
            raise _bad_form("a part has a header line that is not valid")
        name = match[1].lower()
        if name in headers:
            raise _bad_form(f"a part has two headers {name.decode()}")
        headers[name] = match[2].rstrip(b" \t")
    name, file_name = _read_disposition(headers.get(b"content-disposition", b""))
    encoding = headers.get(b"content-transfer-encoding", b"binary").lower()
    if encoding not in _AS_IT_IS or b"content-encoding" in headers:
        raise _bad_form("a part is encoded; send its bytes as they are")
    written = b'Content-Disposition: form-data; name="%b"' % name.encode()
    if file_name is not None:
        written += b'; filename="%b"' % file_name
    if b"content-type" in headers:
        kind = _MEDIA_TYPE.fullmatch(headers[b"content-type"])
        if kind is None or kind[1].lower().startswith(_HOLDS_PARTS):
            raise _bad_form("a part's content type is not that of a field or a file")
        written += b"\r\nContent-Type: " + kind[1]
    return name, written + b"\r\n\r\n", file_name is not None


def _read_disposition(value: bytes) -> tuple[str, bytes | None]:
    """Return the name of a part, and that of its file as it is passed on, if it is a file. Raises ApiError 400."""
    try:
        kind, parameters = _read_parameters(value)
        name = parameters.pop(b"name", b"").decode()
    except ValueError as error:
        raise _bad_form(f"a Content-Disposition cannot be read: {error}") from error
    file_name = parameters.pop(b"filename", None)
    extended = parameters.pop(b"filename*", None)
    if kind != b"form-data" or parameters:
        raise _bad_form('each part must be `Content-Disposition: form-data; name="..."`, with a `filename` at most')
    if not is_field_name(name):
        raise _bad_form(
            f"the name of each part must have 1 to {FIELD_NAME_CHARACTERS_MAX} printable characters,"
            ' without blanks and any of " \\ ; = % < >'
        )
    if extended is not None:
        file_name = urllib.parse.unquote_to_bytes(extended.rpartition(b"'")[2])
    if file_name is None:
        return name, None
    text = file_name.decode(errors="replace")
    plain = "".join(one if one.isprintable() and one not in _NOT_IN_FILE_NAMES else "_" for one in text)
    return name, plain[-FILE_NAME_CHARACTERS_MAX:].strip().encode()


def _read_parameters(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return the first word of a header's value, in lower case, and its parameters. Raises ValueError."""
    kind = value.partition(b";")[0]
    at = len(kind)
    parameters: dict[bytes, bytes] = {}
    while at < len(value):
        match = _PARAMETER.match(value, at)
        if match is None:
            raise ValueError(f"a parameter is not valid, at byte {at} (no backslashes, no line breaks)")
        name, quoted, plain = match.groups()
        name = name.lower()
        if name in parameters:
            raise ValueError(f"{name.decode()!r} is given twice")
        parameters[name] = quoted if plain is None else plain
        at = match.end()
    return kind.strip().lower(), parameters


def _bad_form(why: str) -> ApiError:
    return bad_request(f"The request body is not a valid multipart/form-data form: {why}.")
