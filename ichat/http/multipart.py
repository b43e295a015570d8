"""Multipart forms (RFC 7578), used for audio: find their fields and the model they name.

Files are skipped, never copied. A form that two parsers could read differently is refused.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ichat.errors import ApiError, bad_request
from ichat.http.json_body import NAME_BYTES_MAX, Body, Cursor, Member, spliced

PARTS_MAX = 1000
PART_HEAD_BYTES_MAX = 8192
_STEPS_A_PART = 50
"""The cost of reading the head of a part."""

_LEADING_NEWLINES = re.compile(rb"[\r\n]{0,64}")
_BEHIND_DELIMITER = re.compile(rb"(\r\n)|--[ \t]{0,64}(?:\r?\n|\Z)")
_PART_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*)")
_PARAMETER = re.compile(
    rb"[ \t]*;[ \t]*(?:([!#$%&'*+\-.^_`|~0-9A-Za-z]+)[ \t]*=[ \t]*"
    rb'(?:"((?:\\.|[^"\\])*)"|([^\s";]+)))?[ \t]*'
)
_BOUNDARY = re.compile(rb"[ -~]{0,69}[!-~]")


@attrs.frozen
class Field:
    """One part of a form, and its place in the body."""

    name: bytes
    start: int
    """Index of its head, after the line of the boundary."""
    value_start: int
    end: int
    is_file: bool


async def model_in_form(body: Body, content_type: bytes) -> str:
    """Return the model that a multipart form names. Raises ApiError 400, also if it names two."""
    return model_of_form(body, await fields_of(body, content_type))


def model_of_form(body: Body, fields: Iterable[Field]) -> str:
    """Return the model that a form with these fields names. Raises ApiError 400, also if it names two."""
    named = [field for field in fields if field.name == b"model"]
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
    """Return the parts of a multipart/form-data body in their order; values are not read.

    Raises ApiError 400 for a form that is not whole, has too many parts, or could be read in two ways.
    """
    delimiter = b"\r\n--" + _boundary_of(content_type)
    newlines = _LEADING_NEWLINES.match(body)
    cursor = Cursor(body, newlines.end() if newlines else 0)
    if not cursor.takes(delimiter[2:]):
        raise _bad_form("it does not begin with the boundary that its content type names")
    fields: list[Field] = []
    while True:
        match = _BEHIND_DELIMITER.match(body, cursor.at)
        if match is None:
            raise _bad_form(f"a boundary is not followed by a line break, at byte {cursor.at}")
        if not match[1]:
            return fields
        if len(fields) == PARTS_MAX:
            raise _bad_form(f"it has more than {PARTS_MAX} parts")
        start = match.end()
        cursor.at = body.find(b"\r\n\r\n", start, start + PART_HEAD_BYTES_MAX) + 4
        if cursor.at < 4:
            raise _bad_form(f"a part's head does not end within {PART_HEAD_BYTES_MAX} bytes, at byte {start}")
        name, is_file = _read_part_head(body[start : cursor.at - 4])
        value_start = cursor.at
        if cursor.takes(delimiter[2:]):
            raise _bad_form(f"a part has no line break before its boundary, at byte {value_start}")
        await cursor.step(_STEPS_A_PART)
        if not await cursor.skip_to_delimiter(delimiter):
            raise _bad_form("it ends without its closing boundary; send the whole of it")
        fields.append(Field(name, start, value_start, cursor.at - len(delimiter), is_file))


def as_members(fields: Iterable[Field]) -> list[Member]:
    """Return the fields for `json_body.rewrite_json`, which drops a field of a form as it drops a member of an object.

    One field at least must stay, and a new value must not contain a line break.
    """
    return [Member(field.name.decode("latin-1"), field.start, field.value_start, field.end) for field in fields]


def written_fields(body: Body, fields: Sequence[Field], values: Mapping[str, bytes]) -> bytes:
    """Return further fields as they are written before the first one, with its boundary behind each.

    A value must not contain a line break: it could be taken for a boundary.
    """
    boundary = bytes(body[: fields[0].start]).lstrip(b"\r\n") if values else b""
    head = b'Content-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return b"".join(head % (name.encode(), value) + boundary for name, value in values.items())


def rewrite_form(body: Body, fields: Iterable[Field], replace: Mapping[bytes, bytes]) -> bytes:
    """Return the body with new values for all fields of some names (files too); all else stays byte for byte.

    A value must not contain a line break: it could be taken for a boundary.
    """
    named = (field for field in fields if field.name in replace)
    return spliced(body, [(field.value_start, field.end, replace[field.name]) for field in named])


def _boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a content type names. Raises ApiError 400."""
    try:
        kind, parameters = _read_parameters(content_type)
    except ValueError as error:
        raise bad_request(f"The content type cannot be read: {error}.") from error
    boundary = parameters.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        raise bad_request(
            "The content type must be multipart/form-data with a valid boundary; "
            "HTTP clients write it themselves when it is not set by hand."
        )
    if parameters.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise bad_request("A form must be in UTF-8.")
    return boundary


def _read_part_head(head: Body) -> tuple[bytes, bool]:
    """Return the name of a part, and whether it is a file. Raises ApiError 400."""
    dispositions: list[bytes] = []
    for line in head.split(b"\r\n"):
        match = _PART_HEADER.fullmatch(line)
        if match is None:
            raise _bad_form("a part has a header line that is not valid")
        if match[1].lower() == b"content-disposition":
            dispositions.append(match[2])
    if len(dispositions) != 1:
        raise _bad_form("each part must have one Content-Disposition")
    try:
        kind, parameters = _read_parameters(dispositions[0])
    except ValueError as error:
        raise _bad_form(f"a Content-Disposition cannot be read: {error}") from error
    if kind != b"form-data" or b"name" not in parameters or b"name*" in parameters:
        raise _bad_form('each part must be `Content-Disposition: form-data; name="..."`')
    return parameters[b"name"], not parameters.keys().isdisjoint((b"filename", b"filename*"))


def _read_parameters(value: Body) -> tuple[bytes, dict[bytes, bytes]]:
    """Return the first word of a header's value, in lower case, and its parameters. Raises ValueError."""
    kind, semicolon, _ = value.partition(b";")
    at = len(kind)
    parameters: dict[bytes, bytes] = {}
    while semicolon and at < len(value):
        match = _PARAMETER.match(value, at)
        if match is None:
            raise ValueError(f"a parameter is not valid, at byte {at}")
        name, quoted, plain = match.groups()
        if name is not None:
            name = name.lower()
            if name in parameters:
                raise ValueError(f"{name.decode()!r} is given twice")
            parameters[name] = plain or quoted.replace(b"\\\\", b"\\").replace(b'\\"', b'"')
        at = match.end()
    return bytes(kind.strip().lower()), parameters


def _bad_form(why: str) -> ApiError:
    return bad_request(f"The request body is not a valid multipart/form-data form: {why}.")
