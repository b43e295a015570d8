"""Engine arguments of workers, kept small: they are large, and only operators ask for them."""

import hashlib
import json
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(eq=False, weakref_slot=True)
class PackedArgs:
    """The arguments of an engine, compressed."""

    data: bytes = attrs.field(repr=False)

    def unpack(self) -> dict[str, Any]:
        """Return the arguments."""
        return json.loads(zlib.decompress(self.data))


class ArgsPacker:
    """Packs arguments; workers with the same arguments share them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[bytes, PackedArgs] = weakref.WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<ArgsPacker of {len(self._known)}>"

    def pack(self, args: Mapping[str, Any]) -> PackedArgs:
        """Return arguments that JSON can hold in their packed form."""
        text = json.dumps(args).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        packed = self._known.get(digest)
        if packed is None:
            packed = self._known[digest] = PackedArgs(zlib.compress(text))
        return packed
