"""The bytes of a frame.

    u32 size | u8 kind | u8 bits | u16 head_bytes | fixed fields | u8 strings | u16 length … | strings | JSON

`size` counts everything. `head_bytes` is where the number of strings stands: a newer sender may append fixed fields and
strings. An older reader skips both, and a missing field is 0 or empty. The JSON is an object and mostly left out. All
integers are little-endian. Where the bit `OPTIONAL` is set, a reader that does not know the kind ignores the frame.
"""

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ichat.relays.frame_parts import json_of, object_in
from ichat.relays.layouts import LAYOUTS, OPTIONAL, Layout
from ichat.relays.values import NOTHING, Frame, FrameError, Note, SentAsk

FRAME_BYTES_MAX = 1024 * 1024
ASK_BYTES_MAX = 16 * 1024
"""A request with a larger ask is refused: 431."""
OWN_BYTES_MAX = ASK_BYTES_MAX - 4 * 1024
"""Of an ask when it is asked first: its attempts are appended, and its time in queues."""
_HEAD = struct.Struct("<IBBH")
_DAMAGES = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, struct.error)
"""The errors of a table that is fed with something else."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raises FrameError if a value is out of bounds, or the frame is too large."""
    write = _WRITERS.get(frame.kind)
    if write is None:
        raise FrameError(f"There is no kind of frame with the name {frame.kind!r}.")
    try:
        data = write(frame)
    except _DAMAGES as error:
        raise FrameError(f"A frame `{frame.kind}` cannot be written: {error}.") from error
    if len(data) > ASK_BYTES_MAX:
        _check_size(frame.kind, len(data))
    return data


def has_large_ask(asked: SentAsk) -> bool:
    """Return whether an ask is too large to be sent, now or after its attempts."""
    texts = len(asked.id) + len(asked.model) + len(asked.peer) + len(asked.previous_response_id)
    most = 512 + 12 * (texts + len(asked.path) + len(asked.method))
    most += len(asked.credential) + len(asked.host) + len(asked.session) + 4 * len(asked.checksums)
    for name, value in (*asked.before, *asked.headers):
        most += 8 + 6 * (len(name) + len(value))
    if most <= OWN_BYTES_MAX:
        return False
    try:
        return len(encode(asked)) > OWN_BYTES_MAX
    except FrameError:
        return True


def decode(data: bytes) -> Frame | None:
    """Return the value of a whole frame, or None if its kind is unknown and optional. Raises FrameError."""
    if len(data) < _HEAD.size:
        raise FrameError(f"A frame of {len(data)} bytes has no head.")
    head = _HEAD.unpack_from(data)
    if head[0] != len(data):
        raise FrameError(f"A frame of {len(data)} bytes says that it has {head[0]}.")
    return _value_of(data, 0, head)


def _value_of(data: bytes, at: int, head: tuple[int, int, int, int]) -> Frame | None:
    """Return the value of the frame that stands there and has this head; see `decode`."""
    size, number, bits, head_bytes = head
    end = at + size
    known = _READERS.get(number)
    if known is None:
        if bits & OPTIONAL:
            return None
        raise FrameError(f"The kind {number} of a frame is unknown.")
    kind, read, known_bytes, strings = known
    if size > ASK_BYTES_MAX:
        _check_size(kind, size)
    try:
        if head_bytes != known_bytes or data[at + head_bytes] != strings:
            data = _as_known(data[at:end], head_bytes, known_bytes, strings)
            at, end = 0, len(data)
        return read(data, at, end)
    except _DAMAGES as error:
        raise FrameError(f"A frame `{kind}` is damaged: {error}.") from error


def _check_size(kind: str, size: int) -> None:
    most = ASK_BYTES_MAX if kind == "ask" else FRAME_BYTES_MAX
    if size > most:
        raise FrameError(f"A frame `{kind}` has {size} bytes, more than {most}.")


def _write(layout: Layout, head: struct.Struct, frame: Frame) -> bytes:
    """Return the bytes of a frame of which there are few."""
    fixed, strings, rest = layout.parts_of(frame)
    after = b"".join(strings) + (json_of(rest) if rest else b"")
    head_bytes, size = head.size - 1 - 2 * layout.strings, head.size + len(after)
    return head.pack(size, layout.number, layout.bits, head_bytes, *fixed, layout.strings, *map(len, strings)) + after


def _read(form: tuple[str, Layout, struct.Struct], data: bytes, at: int, end: int) -> Frame:
    """Return the value of a frame of which there are few; `form` is its name, its layout, and its fields."""
    kind, layout, head = form
    fields, at = head.unpack_from(data, at), at + head.size
    count = len(fields) - layout.strings
    strings: list[bytes] = []
    for length in fields[count:]:
        strings.append(data[at : at + length])
        at += length
    if at > end:
        raise ValueError("its strings are cut off")
    rest = NOTHING if at == end else object_in(data[at:end])
    fixed = fields[4 : count - 1]
    return Note(kind, fixed[0], rest) if layout.value_of is None else layout.value_of(fixed, strings, rest)


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


class _Reader(NamedTuple):
    """The reader of a kind, and the form that it knows: the bytes before the number of strings, and that number."""

    kind: str
    read: Callable[[bytes, int, int], Frame]
    head_bytes: int
    strings: int


_STRUCTS = {name: struct.Struct(f"<IBBH{one.fixed}B{one.strings}H") for name, one in LAYOUTS.items()}
"""The fields of each kind before its strings, all together."""
_WRITERS: dict[str, Callable[[Frame], bytes]] = {
    name: layout.write or partial(_write, layout, _STRUCTS[name]) for name, layout in LAYOUTS.items()
}
_READERS = {
    layout.number: _Reader(
        name, layout.read or partial(_read, (name, layout, _STRUCTS[name])),
        _STRUCTS[name].size - 1 - 2 * layout.strings, layout.strings,
    )
    for name, layout in LAYOUTS.items()
}  # fmt: skip


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
                head = _HEAD.unpack_from(data, at)
                size = head[0]
                if not _HEAD.size <= size <= FRAME_BYTES_MAX:
                    raise FrameError(f"A frame cannot have {size} bytes.")
                if end - at < size:
                    break
                at += size
                frame = _value_of(data, at - size, head)
                if frame is not None:
                    yield frame
        finally:
            self._rest = data[at:]
