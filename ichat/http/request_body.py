"""A request's body: scanned once at most, and changed by the names of its members.

A change gives a new body and always refers to the original body, so that the places that its scan has found stay
true. What need not change stays as it is, byte for byte. The members of a form are its fields.
"""

import codecs
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import cast

from ichat.errors import bad_request
from ichat.http.json_body import (
    NAME_BYTES_MAX,
    PARSED_BYTES_MAX,
    Body,
    Member,
    find_model,
    members_of,
    rewrite_json,
    value_of,
)
from ichat.http.multipart import is_field_name, rewrite_form

_decode = json.JSONDecoder().decode
"""`json.loads` without its options."""
_LINE_BREAK = re.compile(rb"[\r\n]")


class RequestBody:
    """A JSON object, or any body that is not looked into. Its values never change."""

    __slots__ = ("_changes", "_members", "_names_before", "_original", "data", "names")
    is_form = False

    def __init__(self, data: Body, names: Sequence[str] = (), members: Sequence[Member] | None = None) -> None:
        """`names` are those of its members, `members` are known if it was scanned."""
        self.data = data
        self.names = names
        """The names of its members in their order; a form's fields may have a name in common."""
        self._original = data
        self._names_before = names
        self._members = members
        """The members of the original body, once it was scanned."""
        self._changes: Mapping[str, bytes | None] = {}
        """The new values of members; None for a member that is left out."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.data)} bytes, {len(self._changes)} changes>"

    @property
    def original(self) -> "RequestBody":
        """The body without its changes."""
        return type(self)(self._original, self._names_before, self._members) if self._changes else self

    def has_set(self, name: str) -> bool:
        """Return whether a member has its value from this side, and not from the client."""
        return self._changes.get(name) is not None

    def text(self, value: str) -> bytes:
        """Return a text as the value of a member."""
        return json.dumps(value).encode()

    def written(self, values: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return JSON values by name as the values of members, without those that this kind of body cannot have."""
        return values

    async def values(self, wanted: Container[str]) -> list[tuple[str, bytes]]:
        """Return the members of these names with their values as they are written; the last of a name counts.

        Raises ApiError 400 for a body that cannot be scanned.
        """
        changes = self._changes
        found = [(name, value) for name, value in changes.items() if value is not None and name in wanted]
        if any(name in wanted and name not in changes for name in self._names_before):
            found += [
                (member.name, bytes(self._original[member.value_start : member.end]))
                for member in await self._scanned()
                if member.name in wanted and member.name not in changes
            ]
        return found

    async def edited(self, values: Mapping[str, bytes], drop: Iterable[str] = ()) -> "RequestBody":
        """Return the body with these values, and without the members of `drop` that are there.

        Values are as this kind of body has them (`text`, `written`). A name that is not there is new, before all that
        is. Both apply to every member of a name. Raises ApiError 400 for a body that cannot be scanned.
        """
        before = self._names_before
        changes = {**self._changes, **values, **dict.fromkeys(name for name in drop if name in self.names)}
        there = [name for name in before if name in changes]
        is_plain = self._members is None and there == ["model"] and changes["model"] is not None
        model = find_model(self._original) if is_plain else None
        members = await self._scanned() if model is None else (model,)
        kept = {name: value for name, value in changes.items() if value is not None}
        new = {name: value for name, value in kept.items() if name not in before}
        place = 0 if model is None else before.index("model")
        body = type(self)(
            self._rewritten(members, kept, changes.keys() - kept.keys(), new),
            (*before[:place], *new, *(name for name in before[place:] if name in kept or name not in changes)),
            self._members,
        )
        body._original, body._names_before, body._changes = self._original, before, changes
        return body

    async def _scanned(self) -> Sequence[Member]:
        if self._members is None:
            self._members = await members_of(self._original)
        return self._members

    def _rewritten(
        self, members: Sequence[Member], replace: Mapping[str, bytes], drop: Container[str], new: Mapping[str, bytes]
    ) -> Body:
        before = b"".join(b"%b:%b," % (json.dumps(name).encode(), value) for name, value in new.items())
        return rewrite_json(self._original, members, replace, drop, before=before)


class FormBody(RequestBody):
    """A multipart form, as `multipart.read_form` has read it; its members are its fields."""

    __slots__ = ()
    is_form = True

    def text(self, value: str) -> bytes:
        return value.encode()

    def written(self, values: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return those values that a form can have: of a single line, and no tables or arrays."""
        parsed = ((name, value, json.loads(value)) for name, value in values.items())
        found = {
            name: given.encode() if isinstance(given, str) else value
            for name, value, given in parsed
            if isinstance(given, str | int | float)
        }
        return {name: value for name, value in found.items() if is_field_name(name) and not _LINE_BREAK.search(value)}

    def _rewritten(
        self, members: Sequence[Member], replace: Mapping[str, bytes], drop: Container[str], new: Mapping[str, bytes]
    ) -> Body:
        return rewrite_form(self._original, members, replace, drop, new)


def form_body(data: Body, fields: Sequence[Member]) -> FormBody:
    """Return the body of a form with these fields."""
    return FormBody(data, [field.name for field in fields], fields)


def object_of(body: Body) -> dict[str, object]:
    """Return the JSON object in a body of at most PARSED_BYTES_MAX. Raises ApiError 400."""
    try:
        parsed: object = _decode(body.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The request body is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise bad_request("The request body must be a JSON object.")
    return cast("dict[str, object]", parsed)


def model_of(members: Mapping[str, object]) -> str:
    """Return the model that a request names. Raises ApiError 400."""
    model = members.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("The request must name its model: a string `model`.", param="model")
    return model


async def read_model_body(data: Body, wanted: Container[str]) -> tuple[str, RequestBody, dict[str, object]]:
    """Return the model that a JSON body names, the body, and its members (`read_json_body`). Raises ApiError 400."""
    if len(data) <= PARSED_BYTES_MAX:  # as most have
        members = object_of(data)
        return model_of(members), RequestBody(data, (*members,)), members
    body, members = await read_json_body(data, wanted)
    return model_of(members), body, members


async def read_json_body(data: Body, wanted: Container[str]) -> tuple[RequestBody, dict[str, object]]:
    """Return a JSON body, and its members by name; the last one of a name counts. Raises ApiError 400.

    In a body over PARSED_BYTES_MAX only `wanted` members have their value, and must not have more than NAME_BYTES_MAX;
    others have None.
    """
    if len(data) <= PARSED_BYTES_MAX:
        found = object_of(data)
        return RequestBody(data, (*found,)), found
    found = dict[str, object]()
    members = await members_of(data)
    for member in members:
        is_wanted = member.name in wanted
        if is_wanted and member.end - member.value_start > NAME_BYTES_MAX:
            message = f"`{member.name}` must have at most {NAME_BYTES_MAX} bytes in a request of this length."
            raise bad_request(message, param=member.name)
        found[member.name] = value_of(data, member) if is_wanted else None
    return RequestBody(data, (*found,), members), found


NO_BODY = RequestBody(b"")
"""For the place of a body that is freed."""
