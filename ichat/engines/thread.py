"""The thread that an engine runs on, as seen from Trio.

Engines are asyncio programs that block for long while they load, and their children must be started by a thread that
lasts (`children.py`). So a single thread belongs to the engine, from parsing its arguments to its end, and Trio
never waits for it without a limit.
"""

import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import trio

from ichat import errors
from ichat.engines.adapter import BodyTransform
from ichat.engines.admission import RETRY_AFTER_S, Admission
from ichat.engines.asgi import Call
from ichat.engines.engine import Application, Engine, EngineInfo
from ichat.engines.engine_loop import TIMES, EngineLoop, EngineTimes
from ichat.engines.kept import KeptConnection
from ichat.engines.load_phases import LoadTracker
from ichat.errors import EXIT_SOFTWARE, Exit
from ichat.http.heads import RequestHead
from ichat.http.request import Request
from ichat.http.server import Client

log = logging.getLogger(__name__)

Next = Callable[[RequestHead, bytes], Request | None]
"""Returns the request of this head and body if it is for the engine. Called on the engine's loop."""


class EngineThread:
    """An engine on its thread: start it, send it requests, stop it."""

    def __init__(
        self,
        engine: Engine,
        argv: Sequence[str],
        *,
        client_stall_s: float,
        load: LoadTracker | None = None,
        times: EngineTimes = TIMES,
    ) -> None:
        """`load` gets the phases of the engine's load."""
        self._engine = engine
        self.load = load or LoadTracker(engine.name)
        self._argv = argv
        self._stall_s = client_stall_s
        self._times = times
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop = EngineLoop(engine.why_dead, times)
        self._follows = False
        self.failure: Exit | None = None
        """Why the engine ended, if that was not requested."""
        self.info: EngineInfo | None = None
        self.parsed = trio.Event()
        self.ready = trio.Event()
        self.unready = trio.Event()
        """Set when it no longer serves, even if the thread has not ended."""
        self.ended = trio.Event()
        """Set when the thread has ended, or is no longer waited for; `failure` has the reason."""
        self.load_s = 0.0
        """The time from the engine's start until it was ready."""
        self._started_at = 0.0
        self.aborts = 0
        """Requests that their clients left before the end."""
        self.admission = Admission(engine.adapter)

    def __repr__(self) -> str:
        return f"<EngineThread of {self._engine.name}: {self.phase}, {self.in_flight} in flight>"

    @property
    def phase(self) -> str:
        """The engine's present activity, in a few words; `ready` or `following` once it serves."""
        return self.load.phase

    @property
    def connections(self) -> dict[KeptConnection, trio.Event]:
        """The connections on the engine's loop; the event returns a connection to Trio."""
        return self._loop.connections

    @property
    def in_flight(self) -> int:
        """How many requests the engine is answering."""
        return len(self.admission)

    def start(self) -> None:
        """Start the engine's thread; it goes on until ``stop`` or until the engine fails."""
        self._started_at = time.monotonic()
        self._thread.start()

    def is_ready(self) -> bool:
        """Return whether a request could be served now."""
        return self._loop.app is not None and not self.ended.is_set()

    async def watch_loading(self) -> None:
        """Give up an engine that dies while it loads and does not notice itself."""
        while not (self.ready.is_set() or self.ended.is_set()):
            await trio.sleep(self._times.watch_s)
            why = self._engine.why_dead()
            if why is not None:
                with trio.move_on_after(self._times.unnoticed_s):
                    await self.ended.wait()
                if not self.ended.is_set():
                    self.fail(why)

    def is_following(self) -> bool:
        """Return whether the engine works for the leader of its group, and answers no requests itself."""
        return self._follows and not self.unready.is_set()

    def fail(self, why: str) -> None:
        """End the engine as if it had died, for a reason that it cannot see itself; at once while it loads."""
        self._loop.failed_by = why
        if self._loop.is_there:
            self._loop.end()
        else:
            self.failure = Exit(EXIT_SOFTWARE, f"The engine was given up while {self.phase}: {why}")
            self.give_up()

    async def answer(
        self, request: Request, client: Client, rewrite: BodyTransform | None = None, next_request: Next | None = None
    ) -> None:
        """Let the engine answer a request on this connection. Raises ApiError if nothing has been sent.

        A response with status 200 is changed by `rewrite`, or else by the engine's adapter. With `next_request`, the
        engine's thread goes on with the connection's next requests, for as long as they are its own; see `kept.py`.
        """
        adapter = self._engine.adapter
        self.check_ready()
        found = await adapter.request(request)
        app = self.check_ready()
        self.admission.admit(request, self.name)  # no checkpoint until it is in `connections`
        may_keep = adapter.can_prepare and not client.reader.has_received()
        begin = functools.partial(self._begin_next, next_request) if next_request is not None and may_keep else None
        done = trio.Event()
        kept = KeptConnection(client, begin=begin, give_back=lambda: self.run_in_trio(done.set))
        first = kept.call = self._call(kept, request, rewrite or found)
        self.connections[kept] = done
        if begin is not None:
            client.leave_reading()
        try:
            self._loop.post(self._begin, first, app)
            try:
                await done.wait()
            except trio.Cancelled:
                self._loop.post(kept.client_left)
                abort_s = self._times.abort_s
                with trio.move_on_after(abort_s, shield=True) as waited:
                    await done.wait()
                if waited.cancelled_caught:
                    log.error("%r did not end within %g s of its client leaving", kept.call, abort_s)
                    client.leave_socket()
                raise
        finally:
            self.connections.pop(kept, None)
            if begin is not None:
                client.resume_reading()
            call = kept.call
            self.admission.discard(call.request)
            self.aborts += call.hung_up and not call.complete
            client.end_of_response(head_sent=call.head_sent, ending=call.ending)
        if call.hung_up:
            await client.abandon()
        if not call.complete:
            failure = call.failure or errors.engine_failed("it ended")
            if call is first or call.head_sent:
                raise failure
            last = call.request
            await client.send_all(client.error_response(failure, last.id, last.method, last.path))

    def _call(self, kept: KeptConnection, request: Request, rewrite: BodyTransform | None) -> Call:
        client = kept.client

        def ended() -> None:
            self.admission.discard(request)
            kept.call_ended(may_wait=self._loop.app is not None and not self._loop.gives_back)

        return Call(
            request,
            client.sock,
            client.peer,
            keep_alive=client.keep_alive,
            stall_s=self._stall_s,
            ended=ended,
            adapter=self._engine.adapter,
            rewrite=rewrite,
        )

    def run_soon(self, function: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[object], None]) -> None:
        """Run a function on the engine's loop; `ended` is called in Trio with the exception that ended it, or None.

        `ended` is not called if the engine ends first.
        """
        self._loop.run_soon(function, lambda error: self.run_in_trio(functools.partial(ended, error)))

    def _begin_next(self, next_request: Next, kept: KeptConnection, head: RequestHead, body: bytes) -> bool:
        """Begin a call on the engine's loop; return False if Trio must have the request, to refuse it for example."""
        app = self._loop.app
        if app is None or self._loop.check_alive() is not None:
            return False
        try:
            request = next_request(head, body)
            if request is None:
                return False
            rewrite = self._engine.adapter.prepare(request)
            self.admission.admit(request, self.name)
        except Exception:  # Trio reads the request again, and reports the mistake
            return False
        client = kept.client
        client.begin_exchange()
        if not request.keep_alive:
            client.close_after_response()
        kept.call = self._call(kept, request, rewrite)
        self._loop.start_call(kept.call, app)
        return True

    def give_back_connections(self) -> None:
        """Return each connection to Trio once no request is under way, as a drain needs it."""
        self._loop.gives_back = True
        if self._loop.is_there:
            self._loop.post(self._loop.give_back_idle)

    def check_ready(self) -> Application:
        """Return the engine's application. Raises ApiError 503 if it is not there yet, or the engine has died."""
        app = self._loop.app
        if self._loop.failed_by is not None or self.failure is not None:
            raise self._dead()
        if app is None or self.ended.is_set():
            raise errors.model_not_ready(self.name, self.phase, RETRY_AFTER_S)
        return app

    def _dead(self) -> errors.ApiError:
        why = self._loop.failed_by or str(self.failure).removeprefix("The engine ")
        return errors.engine_dead(self.name, why, RETRY_AFTER_S)

    def _begin(self, call: Call, app: Application) -> None:
        """Start a call on the engine's loop, unless the engine has died; that is checked just before.

        So a refused request was never worked on. A request that fails later may have been.
        """
        if self._loop.check_alive() is None:
            self._loop.start_call(call, app)
        else:
            call.refuse(self._dead())

    @property
    def name(self) -> str:
        """The model's first name, or the engine's while that is not known."""
        return self.info.model_names[0] if self.info else self._engine.name

    async def stop(self, stop_s: float) -> None:
        """Ask the engine to end and wait up to `stop_s`; while it loads it cannot listen, so do not wait."""
        self._loop.stop_asked = True
        if self._loop.is_there:
            self._loop.end()
            with trio.move_on_after(stop_s):
                await self.ended.wait()

    def run_in_trio(self, function: Callable[[], None]) -> None:
        """Have a function called in the worker's Trio thread; called in any thread."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def give_up(self) -> None:
        """Stop waiting for the engine: its thread has ended, or the process is about to end."""
        self.ended.set()
        for done in tuple(self.connections.values()):
            done.set()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            self._enter(self.load.importing)
            self._parsed(self._engine.parse(self._argv))
            self._enter(self.load.reading or f"loading {self.name}")
            self._engine.run(phase=self._enter, serve=self._serve)
        except Exit as exit_:
            if not self._loop.stop_asked:
                self.failure = exit_
        except BaseException as error:  # noqa: ASYNC103
            if not self._loop.stop_asked:
                log.exception("the engine failed after %.1f s", time.monotonic() - self._started_at)
                self.failure = Exit(EXIT_SOFTWARE, f"The engine failed while {self.phase}: {_one_line(error)}")
        self._loop.app = None
        self.run_in_trio(self.give_up)

    def _parsed(self, info: EngineInfo) -> None:
        self.info = info
        for outcome in info.flag_outcomes:
            if outcome.why:
                log.warning("%s", outcome)
        self.run_in_trio(self.parsed.set)

    def _enter(self, phase: str) -> None:
        self.load.enter(phase)
        log.info("%s", phase)

    async def _serve(self, app: Application | None) -> None:
        """Run on the engine's loop while it serves."""
        gc.collect()
        gc.freeze()  # the loaded objects stay, so no later collection need look at them
        self.load.end("following" if app is None else "ready")
        self._follows = app is None
        self.load_s = time.monotonic() - self._started_at
        log.info("%s after %.1f s", self.phase, self.load_s)
        try:
            why = await self._loop.serve(app, lambda: self.run_in_trio(self.ready.set))
            if why is not None:
                self.failure = Exit(EXIT_SOFTWARE, f"The engine died: {why}")
                self.load.end("dead")
        finally:
            self._loop.app = None
            self.run_in_trio(self.unready.set)
            failure = errors.engine_failed("it has died") if self.failure else errors.draining()
            await self._loop.abandon_calls(failure)  # noqa: ASYNC102


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 600 else text[:600] + " …"
