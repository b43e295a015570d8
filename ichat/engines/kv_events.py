"""The engine's events about its KV cache: how the engine is asked for them, and how they are read.

The engine's scheduler publishes them by ZeroMQ, to a socket in a directory that only this user may enter: they contain
the tokens of prompts. The directory is removed once the connection is there. vLLM and SGLang encode events alike;
the tokens are skipped while they are decoded.
"""

# ZeroMQ and msgspec are installed with the engines and are not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from ichat.engines.adapter import AdapterSettings
from ichat.engines.asgi import call_under_way
from ichat.engines.held_prefixes import HeldPrefixes
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol.prefixes import PREFIX_HEADER, parse_chain

log = logging.getLogger(__name__)

GATHER_S = 0.1
"""How long events are gathered, so that a busy engine costs a wake-up for many of its steps."""
BATCHES_MAX = 100
"""Batches of events that are read before other work gets its turn."""
WAITING_MAX = 100_000
"""Batches that ZeroMQ keeps; more are lost, which the gap in their numbers shows."""
CONNECT_S = 5.0
WHY = "the worker reports the losses of the engine's cache to the gateway (--prefix-reports)"
_ON_THE_GPU = (None, "GPU")


def wanted_events(settings: AdapterSettings, obstacle: str | None, too_dear: str | None = None) -> "KvEvents | None":
    """Return the listener to the engine's events, or None if they are not wanted, or not available.

    `obstacle` is a clause that says why not, and `too_dear` why not unless it is asked for. Raises Exit 64.
    """
    if settings.prefix_reports == "true" and obstacle is not None:
        raise Exit(EXIT_USAGE, f"--prefix-reports true is not possible here: {obstacle}.")
    if settings.prefix_reports == "auto" and (obstacle := obstacle or too_dear):
        log.info("the worker reports no prefixes: %s", obstacle)
    return None if obstacle or settings.prefix_reports == "false" else KvEvents(settings.events_directory)


class KvEvents:
    """Listens to the events of an engine."""

    def __init__(self, directory: str) -> None:
        """`directory` is made here, and only this user may enter it."""
        os.mkdir(directory, 0o700)
        self.held = HeldPrefixes()
        self._directory = directory
        self._endpoint = f"ipc://{directory}/kv"
        self._next: int | None = None
        """The number of the next batch."""
        self._decode: Callable[[bytes], Any]
        self._unreadable: type[Exception] = ValueError
        """The exception that it raises."""
        self._context: Any = None
        self._socket: Any
        self._loop: asyncio.AbstractEventLoop
        self._gathering: asyncio.TimerHandle | None = None

    def flag(self, **more: object) -> list[str]:
        """Return the engine's flag; `more` has further settings for this engine."""
        settings = {**more, "publisher": "zmq", "endpoint": self._endpoint, "buffer_steps": 1}
        return ["--kv-events-config", json.dumps(settings)]

    def open(self) -> None:
        """Listen on the loop of this thread. The engine is loaded, so its socket is there."""
        import msgspec
        import zmq

        self._loop = asyncio.get_running_loop()
        self._decode, self._unreadable = _decoder(), msgspec.MsgspecError
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, WAITING_MAX)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SUBSCRIBE, b"")
        monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self._endpoint)
        if not monitor.poll(CONNECT_S * 1000):
            log.warning("the engine publishes no events about its cache, so no prefixes are reported")
        self._socket.disable_monitor()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._loop.add_reader(self._socket.fileno(), self._gather)

    def close(self) -> None:
        """Stop listening."""
        if self._context is not None:
            self._loop.remove_reader(self._socket.fileno())
            if self._gathering is not None:
                self._gathering.cancel()
            self._context.destroy(linger=0)
            self._context = None

    def tag(self, request: Any, prompt_tokens: int) -> None:
        """Tag a request of the engine's own, made for a call with a chain: its events will have this session id.

        Only the first request of a call is tagged: others may have other prompts. A session id of the client's is
        replaced, since nothing else that is allowed beside these events uses it.
        """
        call = call_under_way()
        value = call.request.by_name.get(PREFIX_HEADER) if call is not None else None
        if call is None or value is None or call.is_tagged:
            return
        call.is_tagged = True
        if (chain := parse_chain(value)) is not None:
            request.session_id = self.held.expect(chain, prompt_tokens, call.bytes_in)

    def _gather(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._gathering = self._loop.call_later(GATHER_S, self._read)

    def _read(self) -> None:
        """Read all events, then wait for more: ZeroMQ's descriptor signals new events only after all have been read."""
        import zmq

        for _ in range(BATCHES_MAX):
            try:
                _, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._loop.add_reader(self._socket.fileno(), self._gather)
                return
            self.note(int.from_bytes(number, "big"), payload)
        self._gathering = self._loop.call_later(0, self._read)

    def note(self, number: int, payload: bytes) -> None:
        """Note the events of a batch."""
        try:
            events: Sequence[Any] = self._decode(payload).events
        except self._unreadable as error:
            log.warning("the engine's events cannot be read: %s", error)
            events, self._next = (), -1
        if self._next not in (None, number):
            log.warning("events about the engine's cache are missing: nothing is known of it for now")
            self.held.cleared()
        self._next = number + 1
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.held.cleared()
            elif event.medium not in _ON_THE_GPU or event.group_idx:
                continue
            elif kind == "BlockStored":
                self.held.stored(event.block_hashes, event.parent_block_hash, event.block_size, event.session_id)
            else:
                self.held.removed(event.block_hashes)


def _decoder() -> Callable[[bytes], Any]:
    """Return a function that decodes a batch of events.

    A model with several kinds of attention has several groups of blocks; the first is followed.
    """
    import msgspec

    hashes, where = ("block_hashes", list[int | bytes]), [("medium", str | None, None), ("group_idx", int | None, None)]
    parent, tag = ("parent_block_hash", int | bytes | None, None), ("session_id", str | None, None)
    stored = msgspec.defstruct("BlockStored", [hashes, ("block_size", int), parent, tag, *where], tag=True)
    removed = msgspec.defstruct("BlockRemoved", [hashes, *where], tag=True)
    cleared = msgspec.defstruct("AllBlocksCleared", [], tag=True)
    events = ("events", list[stored | removed | cleared])
    batch = msgspec.defstruct("Batch", [("ts", float), events], array_like=True)
    return msgspec.msgpack.Decoder(batch).decode
