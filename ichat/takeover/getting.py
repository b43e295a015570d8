"""The new process's side: it asks for a gateway, builds everything of the snapshot, and begins at `go`."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import trio

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.relays.values import FrameError
from ichat.takeover.connection import OtherProcess, connect, from_memory, real_path
from ichat.takeover.handover import PROTOCOL, Act, NewSide

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """Everything that the old process has handed over; the descriptors are this process's."""

    snapshot: Mapping[str, Any]
    about: Mapping[str, Any]
    descriptors: Sequence[int]
    more: Sequence[tuple[Mapping[str, Any], Sequence[int]]]


class Takeover:
    """A takeover by this process."""

    def __init__(self, peer: OtherProcess) -> None:
        self._peer = peer
        self.side = NewSide()
        self.received: Received | None = None
        """Set from the snapshot on."""
        self.frozen_ns = 0
        """When the old process was asked to become quiet, by the system's monotonic clock."""
        self._why = ""
        """Why this process will not get the gateway."""
        self._reports: list[Mapping[str, Any]] = []
        """Of the time after `go`."""
        self._more: list[tuple[Mapping[str, Any], Sequence[int]]] = []

    def __repr__(self) -> str:
        return f"<Takeover {self.side!r}>"

    @property
    def old_pid(self) -> int:
        """The process that has, or had, the gateway."""
        return self._peer.pid

    async def follow_old(self, received: Callable[[Mapping[str, Any]], None]) -> None:
        """Pass the reports of the old process on, and return when it has ended."""
        has_ended = False
        while not has_ended:
            has_ended = self._peer.has_ended
            self._receive_all()
            reports, self._reports = self._reports, []
            for report in reports:
                received(report)
            if not has_ended:
                await self._wait()

    async def ask(self, directory: str, build: str) -> bool:
        """Ask for the gateway, and return whether `received` is there. If not, there is no gateway any more.

        Raises Exit 69 if the old process refuses, or does not answer.
        """
        hello = {"protocol": PROTOCOL, "directory": real_path(directory), "build": build, "pid": os.getpid()}
        self._do(self.side.begin(hello, trio.current_time()))
        while self.side.state in ("greeting", "freezing") and not self._why:
            await self._wait_and_step()
        self._check()
        return self.side.state == "building"

    async def begin(self, signals: AsyncIterator[int]) -> None:
        """Report that everything is ready, and return when this process decides. Raises Exit 69 if it never will.

        A signal of `signals` ends the takeover. If this process decides already, it is raised again: for the gateway.
        """
        self._do(self.side.built(trio.current_time()))
        async with trio.open_nursery() as nursery:

            async def obey() -> None:
                number = await anext(signals)
                self._do(self.side.stop())
                if not self._why:
                    signal.raise_signal(number)
                nursery.cancel_scope.cancel()

            nursery.start_soon(obey)
            while self.side.state != "owner" and not self._why:
                await self._wait_and_step()
            nursery.cancel_scope.cancel()
        self._check()

    def _check(self) -> None:
        """Raise Exit 69 if this process will not get the gateway."""
        if self._why:
            raise Exit(EXIT_UNAVAILABLE, f"There was no takeover: {self._why}")

    def close(self) -> None:
        """Close the connection."""
        self._peer.forget()

    async def _wait_and_step(self) -> None:
        """Wait until something has happened, and do what follows: all that has arrived counts first."""
        await self._wait()
        self._receive_all()
        if self._peer.has_ended:
            self._receive_all()  # of the time before its end
            self._do(self.side.old_ended(trio.current_time()))
        self._do(self.side.tick(trio.current_time()))

    async def _wait(self) -> None:
        """Wait until there is something to receive, the old process has ended, or the deadline is over."""
        async with trio.open_nursery() as nursery:

            async def first(wait: Callable[[], Any]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.cancel_scope.deadline = self.side.deadline
            nursery.start_soon(first, self._peer.wait_end)
            if not self._is_cut:
                nursery.start_soon(first, self._peer.wait_readable)

    _is_cut = False
    """Whether nothing more can arrive."""

    def _receive_all(self) -> None:
        while not self._is_cut:
            try:
                received = self._peer.receive()
            except BlockingIOError:
                return
            except (OSError, FrameError):
                received = None
            if received is None:
                self._is_cut = True
                return
            message, descriptors = received
            if message.kind == "more":
                content: Any = message.content.get("more")
                self._more.append((content, descriptors))
            elif message.kind == "report":
                self._reports.append(message.content)
            elif message.kind == "snapshot" and descriptors and self.side.state == "freezing":
                memory, *rest = descriptors
                try:
                    self.received = Received(from_memory(memory), message.content, rest, self._more)
                except FrameError as error:
                    self._why = str(error)
                    return
                finally:
                    os.close(memory)
                self._do(self.side.receive(message, trio.current_time()))
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._do(self.side.receive(message, trio.current_time()))

    def _do(self, acts: Sequence[Act]) -> None:
        for act in acts:
            if act.kind == "send" and act.message is not None:
                if act.message.kind == "freeze":
                    self.frozen_ns = time.monotonic_ns()
                with contextlib.suppress(OSError):  # the end is an event of its own
                    self._peer.send(act.message)
            elif act.kind == "close_reading":
                self._peer.close_reading()
                self._receive_all()
                self._do(self.side.closed())
            elif act.kind == "end":
                self._why = act.why or "it was stopped"


async def ask_for_gateway(directory: str, build: str) -> Takeover | None:
    """Ask the gateway of a state directory to hand over; None if there is none, or if it has ended meanwhile.

    Raises Exit 69 if it refuses, or cannot be reached. The connection stays then until this process has ended: once
    it is closed, the old process kills a process that has its snapshot, before that says why it ends.
    """
    peer = connect(directory)
    if peer is None:
        log.info("no gateway runs with %s: this process starts as usual", directory)
        return None
    takeover = Takeover(peer)
    if await takeover.ask(directory, build):
        return takeover
    takeover.close()
    return None
