"""The bytes of a frame.

    u32 size | u8 kind | u8 bits | u16 head_bytes | fixed fields | u8 strings | u16 length … | strings | JSON

`size` counts everything. `head_bytes` is where the number of strings stands: a newer sender may append fixed fields and
strings. An older reader skips both, and a missing field is 0 or empty. The JSON is an object and mostly left out. All
integers are little-endian. Where the bit `OPTIONAL` is set, a reader that does not know the kind ignores the frame.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ichat.relays.layouts import LAYOUTS, OPTIONAL, Parts
from ichat.relays.values import NOTHING, Frame, FrameError, Note

FRAME_BYTES_MAX = 1024 * 1024
ASK_BYTES_MAX = 16 * 1024
"""A request with a larger ask is refused: 431."""
_HEAD = struct.Struct("<IBBH")
_WHOLE = {name: struct.Struct(f"<IBBH{one.fixed}B{one.strings}H") for name, one in LAYOUTS.items()}
"""The fields of each kind before its strings, all together."""
_HEAD_BYTES = {name: whole.size - 1 - 2 * LAYOUTS[name].strings for name, whole in _WHOLE.items()}
_NAMES = {layout.number: name for name, layout in LAYOUTS.items()}
_DAMAGES = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, struct.error)
"""The errors of a table that is fed with something else."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raises FrameError if a value is out of bounds, or the frame is too large."""
    layout = LAYOUTS.get(frame.kind)
    if layout is None:
        raise FrameError(f"There is no kind of frame with the name {frame.kind!r}.")
    kind, whole = frame.kind, _WHOLE[frame.kind]
    try:
        fixed, strings, rest = layout.parts_of(frame)
        after = b"".join(strings)
        if rest:
            after += json.dumps(rest, separators=(",", ":"), allow_nan=False).encode()
        size = whole.size + len(after)
        head = whole.pack(
            size, layout.number, layout.bits, _HEAD_BYTES[kind], *fixed, layout.strings, *map(len, strings)
        )
    except _DAMAGES as error:
        raise FrameError(f"A frame `{kind}` cannot be written: {error}.") from error
    _check_size(kind, size)
    return head + after


def decode(data: bytes) -> Frame | None:
    """Return the value of a whole frame, or None if its kind is unknown and optional. Raises FrameError."""
    if len(data) < _HEAD.size:
        raise FrameError(f"A frame of {len(data)} bytes has no head.")
    size, number, bits, head_bytes = _HEAD.unpack_from(data)
    if size != len(data):
        raise FrameError(f"A frame of {len(data)} bytes says that it has {size}.")
    kind = _NAMES.get(number)
    if kind is None:
        if bits & OPTIONAL:
            return None
        raise FrameError(f"The kind {number} of a frame is unknown.")
    _check_size(kind, size)
    layout = LAYOUTS[kind]
    try:
        if head_bytes != _HEAD_BYTES[kind] or data[head_bytes] != layout.strings:
            data = _as_known(data, head_bytes, _HEAD_BYTES[kind], layout.strings)
        fixed, strings, rest = _parts_in(data, _WHOLE[kind], layout.strings)
        return Note(kind, fixed[0], rest) if layout.value_of is None else layout.value_of(fixed, strings, rest)
    except _DAMAGES as error:
        raise FrameError(f"A frame `{kind}` is damaged: {error}.") from error


def _check_size(kind: str, size: int) -> None:
    most = ASK_BYTES_MAX if kind == "ask" else FRAME_BYTES_MAX
    if size > most:
        raise FrameError(f"A frame `{kind}` has {size} bytes, more than {most}.")


def _parts_in(data: bytes, whole: struct.Struct, count: int) -> Parts:
    """Return the fixed fields of a frame, its strings and its JSON."""
    fields, at = whole.unpack_from(data), whole.size
    end = len(fields) - count
    strings: list[bytes] = []
    for length in fields[end:]:
        if length:
            strings.append(data[at : at + length])
            at += length
        else:
            strings.append(b"")
    if at > len(data):
        raise ValueError("its strings are cut off")
    return fields[4 : end - 1], strings, NOTHING if at == len(data) else _json_of(data[at:])


def _as_known(data: bytes, head_bytes: int, known: int, count: int) -> bytes:
    """Return a frame of an older or a newer program with `known` bytes of fixed fields and `count` strings."""
    if head_bytes < _HEAD.size:
        raise ValueError("it has no fixed fields")
    start = head_bytes + 1 + 2 * data[head_bytes]
    lengths = struct.unpack(f"<{data[head_bytes]}H", data[head_bytes + 1 : start])
    kept, end = start + sum(lengths[:count]), start + sum(lengths)
    if end > len(data):
        raise ValueError("its strings are cut off")
    lengths = (*lengths, *(0 for _ in range(count)))[:count]
    head = data[:head_bytes][:known].ljust(known, b"\0") + struct.pack(f"<B{count}H", count, *lengths)
    return b"".join((head, data[start:kept], data[end:]))


def _json_of(data: bytes) -> Mapping[str, Any]:
    rest = json.loads(data.decode(), parse_constant=_no_number)
    if not isinstance(rest, dict):
        raise TypeError("its JSON is no object")
    return cast("dict[str, Any]", rest)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


class FrameReader:
    """Makes frames of a stream of bytes, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        """The beginning of a frame."""

    def __repr__(self) -> str:
        return f"<FrameReader with {len(self._rest)} bytes>"

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole with these bytes. Raises FrameError; nothing can be read after that."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while end - at >= _HEAD.size:
                size = int.from_bytes(data[at : at + 4], "little")
                if not _HEAD.size <= size <= FRAME_BYTES_MAX:
                    raise FrameError(f"A frame cannot have {size} bytes.")
                if end - at < size:
                    break
                whole = data[at : at + size]
                at += size
                frame = decode(whole)
                if frame is not None:
                    yield frame
        finally:
            self._rest = data[at:]
