"""The old process's side: it listens for a new process, becomes quiet, hands over, and leaves."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import trio

from ichat.listeners import Listeners, wait_any
from ichat.relays.values import FrameError
from ichat.takeover.connection import OtherProcess, forget, listen, real_path, to_memory
from ichat.takeover.handover import ANSWER_S, Act, Message, OldSide

log = logging.getLogger(__name__)

GREETING_S = 5.0
"""How long a new connection may need for its first message."""

LOOK_S = 1.0
"""The longest time between two looks at a takeover that is under way."""


class CannotFreezeError(Exception):
    """Says in a sentence why the gateway cannot become quiet."""


class Handed(NamedTuple):
    """Everything that a new process gets."""

    snapshot: Mapping[str, Any]
    about: Mapping[str, Any]
    """A message about the descriptors."""
    descriptors: Sequence[int]
    """They stay this process's."""
    more: Sequence[tuple[Mapping[str, Any], Sequence[int]]] = ()
    """Further messages with descriptors, which are sent before the snapshot."""


class Giver(Protocol):
    """A gateway that can be handed over."""

    def busy(self, new_pid: int) -> str:
        """Return in a sentence why that process cannot get it now; "" if it can."""
        ...

    async def freeze(self) -> Handed:
        """Become quiet: decide nothing, and write nothing. Raises CannotFreezeError; `thaw` follows in any case."""
        ...

    def thaw(self) -> None:
        """Go on."""
        ...

    def let_go(self) -> None:
        """Stop everything that the new process will do; called just before `go`."""
        ...

    def hold_on(self) -> None:
        """Undo `let_go`: `go` could not be sent."""
        ...


GiverT = TypeVar("GiverT", bound=Giver)


class TakeoverServer(Generic[GiverT]):
    """Hands a gateway over to the first new process that asks for it and is ready."""

    def __init__(self, directory: str, giver: GiverT, term: int) -> None:
        """`term` is the number of the gateway's start; a new process has the next number."""
        self._directory, self.giver, self._term = directory, giver, term
        self.side = OldSide(real_path(directory))
        self.changed: Listeners[[]] = Listeners()
        self._peer: OtherProcess | None = None
        self._may_stop = trio.Event()
        self.gone = trio.Event()
        """Set when the new process decides."""
        self._freezing = trio.CancelScope()
        self._handed: Handed | None = None
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        return f"<TakeoverServer {self.side!r}>"

    @property
    def new_pid(self) -> int:
        """The process that asked last; 0: none did."""
        return 0 if self._peer is None else self._peer.pid

    async def serve_forever(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        try:
            listener = listen(self._directory)
        except OSError as error:
            log.error("no other process can get this gateway: %s", error.strerror or error)
            task_status.started()
            return
        task_status.started()
        try:
            async with trio.open_nursery() as self._nursery:
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    with contextlib.suppress(OSError):
                        sock, _ = listener.accept()
                        self._nursery.start_soon(self._serve, sock)
        finally:
            listener.close()
            if not self.gone.is_set():
                forget(self._directory)

    async def wait_gone(self, told: Callable[[], Awaitable[object]]) -> bool:
        """Wait until another process has the gateway, or for a signal; return whether another process has it then.

        That process gets the signal if both happen at once.
        """

        async def stop() -> None:
            await told()
            if not await self.stop():
                self.stop_new()

        await wait_any(stop, self.gone.wait)
        return self.gone.is_set()

    async def stop(self) -> bool:
        """Wait until this process may stop as usual; return False if another process has the gateway instead."""
        self._do(self.side.stop(trio.current_time()))
        while not (self._may_stop.is_set() or self.gone.is_set()):
            await self.changed.wait()
        return not self.gone.is_set()

    def stop_new(self) -> None:
        """Pass a signal that stops the gateway on to the process that has it."""
        assert self._peer is not None
        log.info("a stop signal is passed on to process %d", self._peer.pid)
        self._peer.signal(signal.SIGTERM)

    async def report(self, content: Mapping[str, Any]) -> bool:
        """Send a report to the process that has the gateway now; return False if it has ended."""
        assert self._peer is not None
        with contextlib.suppress(OSError, trio.ClosedResourceError):
            while True:
                try:
                    self._peer.send(Message("report", content))
                except BlockingIOError:
                    await self._peer.wait_writable()
                else:
                    return True
        return False

    async def _serve(self, sock: socket.socket) -> None:
        """Answer a new process."""
        with contextlib.ExitStack() as closing:
            try:
                peer = OtherProcess(sock)
            except OSError as error:
                log.warning("a takeover is refused: %s", error)
                sock.close()
                return
            closing.callback(peer.forget)
            try:
                hello = await _first_message(peer)
            except (OSError, FrameError, trio.TooSlowError):
                return
            if why := self.side.refusal(hello.content, self.giver.busy(peer.pid)):
                log.warning("a takeover by process %d is refused: %s", peer.pid, why)
                with contextlib.suppress(OSError):
                    peer.send(Message("refuse", {"why": why}))
                return
            log.info("process %d asks for this gateway", peer.pid)
            self._peer = peer
            self._do(self.side.greet(os.getpid(), self._term, trio.current_time()))
            while self.side.state not in ("alone", "gone"):
                await self._wait(peer)
                self._step(peer)
            if self.side.state == "gone":
                await peer.wait_end()  # a connection that stays open says that this process is there

    async def _wait(self, peer: OtherProcess) -> None:
        """Wait until there may be something to do."""
        async with trio.open_nursery() as nursery:

            async def first(wait: Any) -> None:
                with contextlib.suppress(trio.ClosedResourceError, OSError):
                    await wait()
                nursery.cancel_scope.cancel()

            nursery.cancel_scope.deadline = min(self.side.deadline, trio.current_time() + LOOK_S)
            nursery.start_soon(first, peer.wait_end)
            nursery.start_soon(first, self.changed.wait)
            if self.side.state != "killing":
                nursery.start_soon(first, peer.wait_readable)

    def _step(self, peer: OtherProcess) -> None:
        """Do what follows from the state of the other process and the time."""
        now = trio.current_time()
        if peer.has_ended:
            self._do(self.side.new_ended(now))
        elif self.side.state != "killing" and peer.is_readable:
            try:
                received = peer.receive()
            except BlockingIOError:
                return
            except (OSError, FrameError):
                received = None
            if received is None:
                self._do(self.side.lost(now))
            else:
                for descriptor in received[1]:
                    os.close(descriptor)
                self._do(self.side.receive(received[0].kind, now))
        self._do(self.side.tick(trio.current_time()))

    def _do(self, acts: Sequence[Act]) -> None:
        """Carry out acts in their order."""
        for act in acts:
            if act.kind == "send" and act.message is not None:
                self._send(act.message)
            elif act.kind == "freeze":
                self._freezing = trio.CancelScope()
                self._nursery.start_soon(self._freeze, self._freezing)
            elif act.kind == "thaw":
                self._freezing.cancel()
                self._handed = None
                self.giver.thaw()
                log.warning("the takeover has failed: this process goes on")
            elif act.kind == "kill" and self._peer is not None:
                log.error("process %d, which asked for this gateway, is killed: it was silent", self._peer.pid)
                self._peer.signal(signal.SIGKILL)
            elif act.kind == "drop" and self._peer is not None:
                self._peer.close()
            elif act.kind == "go":
                self._go()
            elif act.kind == "stop":
                self._may_stop.set()
        self.changed()

    def _send(self, message: Message) -> None:
        handed, descriptors = self._handed, list[int]()
        assert self._peer is not None
        try:
            with contextlib.ExitStack() as closing:
                if message.kind == "snapshot" and handed is not None:
                    for content, more in handed.more:
                        self._peer.send(Message("more", {"more": content}), more)
                    memory = to_memory(message.content)
                    closing.callback(os.close, memory)
                    message, descriptors = Message("snapshot", handed.about), [memory, *handed.descriptors]
                self._peer.send(message, descriptors)
        except OSError as error:
            log.warning("a message to process %d cannot be sent: %s", self._peer.pid, error.strerror or error)
            self._do(self.side.lost(trio.current_time()))

    async def _freeze(self, scope: trio.CancelScope) -> None:
        """Become quiet, and say so."""
        with scope:
            try:
                self._handed = await self.giver.freeze()
            except CannotFreezeError as error:
                self._do(self.side.failed_to_freeze(str(error), trio.current_time()))
            else:
                self._do(self.side.froze(self._handed.snapshot, trio.current_time()))
        if scope.cancelled_caught:
            self.giver.thaw()  # the freeze may have gone on until its next wait

    def _go(self) -> None:
        """Let the new process decide, if it is there to hear of it."""
        assert self._peer is not None
        self.giver.let_go()
        try:
            self._peer.send(Message("go", {}))
        except OSError:
            self.giver.hold_on()
            self._do(self.side.lost(trio.current_time()))
        else:
            self.side.went()
            self.gone.set()
            log.info("process %d has this gateway now", self._peer.pid)


async def _first_message(peer: OtherProcess) -> Message:
    """Return the first message. Raises OSError, FrameError or trio.TooSlowError if there is none."""
    with trio.fail_after(min(GREETING_S, ANSWER_S)):
        await peer.wait_readable()
    received = peer.receive()
    if received is None:
        raise ConnectionResetError
    message, descriptors = received
    for descriptor in descriptors:
        os.close(descriptor)
    if message.kind != "hello":
        raise FrameError("The first message is no greeting.")
    return message
