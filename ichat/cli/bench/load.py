"""The load of a benchmark: when requests are sent, and what their client sees of each answer."""

import math
import random
from collections.abc import Awaitable, Callable, Sequence

import trio

from ichat.cli.bench.figures import BenchPlan
from ichat.cli.bench.samples import BenchRequest
from ichat.cli.json_values import Json, object_of, objects_of, parse_object
from ichat.http.client import FAILURES, HttpResponse, request
from ichat.http.pool import Upstream
from ichat.http.sse import CONTENT_TYPE, Event, EventDecoder

UNDER_WAY_MAX = 4096
"""The most requests of an open loop under way; further requests wait, and their time counts from the planned moment."""
PAUSE_AFTER_ERROR_S = 0.1
"""How long a place of a closed loop waits after a failed request: a server that refuses all gets no flood."""
EVENT_BYTES_MAX = 16 * 1024 * 1024
ERROR_BYTES_MAX = 64 * 1024
CODE_LENGTH_MAX = 60
TIMEOUT, NOT_REACHED, BROKEN_OFF, NO_STREAM = "timeout", "not reached", "broken off", "no stream"
"""The codes of errors that no server sends."""

Ask = Callable[[BenchRequest], Awaitable[None]]


class BenchLoad:
    """Sends the requests of a plan."""

    def __init__(self, plan: BenchPlan, ask: Ask, seed: int | None = None) -> None:
        """`ask` sends a request and notes what happens."""
        self._plan = plan
        self._ask = ask
        self._random = random.Random(seed)
        self._until = math.inf
        self.requests: list[BenchRequest] = []
        """All requests that were planned so far."""

    def __repr__(self) -> str:
        return f"<BenchLoad {len(self.requests)} requests>"

    async def run(self) -> None:
        """Send all requests, and wait for their ends."""
        plan = self._plan
        self._until = trio.current_time() + (math.inf if plan.seconds_max is None else plan.seconds_max)
        async with trio.open_nursery() as nursery:
            if plan.rate is not None:
                await self._arrive(nursery, plan.rate)
            for _ in range(plan.concurrency or 0):
                nursery.start_soon(self._ask_in_turn)

    async def _ask_in_turn(self) -> None:
        """Send a request whenever the last request has ended: a place of a closed loop."""
        while self._is_more_at(now := trio.current_time()):
            sent = self._planned(now)
            await self._ask(sent)
            if sent.error:
                await trio.sleep(PAUSE_AFTER_ERROR_S)

    async def _arrive(self, nursery: trio.Nursery, rate: float) -> None:
        """Send requests at random moments, also while answers are slow: an open loop."""
        limiter, at = trio.CapacityLimiter(UNDER_WAY_MAX), trio.current_time()
        while self._is_more_at(at):
            await trio.sleep_until(at)
            nursery.start_soon(self._ask_if_free, self._planned(at), limiter)
            at += self._random.expovariate(rate)

    async def _ask_if_free(self, planned: BenchRequest, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            await self._ask(planned)

    def _is_more_at(self, at: float) -> bool:
        most = self._plan.requests_max
        return at < self._until and (most is None or len(self.requests) < most)

    def _planned(self, at: float) -> BenchRequest:
        self.requests.append(BenchRequest(at))
        return self.requests[-1]


class ChatClient:
    """Sends a chat completion, streamed, and notes when each piece of its answer arrives."""

    def __init__(
        self,
        upstream: Upstream,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Callable[[], bytes],
        timeout_s: float,
    ) -> None:
        """`body` returns the body of the next request. Each request has a connection of its own."""
        self._upstream = upstream
        self._target = target
        self._headers = [*headers, (b"content-type", b"application/json"), (b"accept", CONTENT_TYPE.encode())]
        self._body = body
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<ChatClient of {self._upstream.name}>"

    async def ask(self, sent: BenchRequest) -> None:
        """Send a request, and note what happens to it."""
        body = self._body()
        sent.sent_at = trio.current_time()
        try:
            with trio.fail_after(self._timeout_s):
                response = await request(self._upstream, self._target, self._headers, method="POST", body=body)
                async with response:
                    await _read(sent, response)
        except trio.TooSlowError:
            sent.error = TIMEOUT
        except OSError:
            sent.error = NOT_REACHED
        except FAILURES:
            sent.error = BROKEN_OFF
        sent.ended_at = trio.current_time()


async def _read(sent: BenchRequest, response: HttpResponse) -> None:
    """Read an answer. Raises one of `FAILURES`."""
    if response.status != 200:
        sent.error = await _refusal(response)
    elif not response.headers.get(b"content-type", b"").startswith(CONTENT_TYPE.encode()):
        sent.error = NO_STREAM
    else:
        decoder, is_done = EventDecoder(EVENT_BYTES_MAX), False
        async for piece in response:
            now = trio.current_time()
            for event in decoder.feed(piece):
                is_done = is_done or (event is not None and note_event(sent, event, now))
        if not is_done and not sent.error:
            sent.error = BROKEN_OFF


def note_event(sent: BenchRequest, event: Event, now: float) -> bool:
    """Note an event of an answer that has arrived now; return whether it is the last."""
    if event.data == "[DONE]":
        return True
    chunk = parse_object(event.data)
    if "error" in chunk:
        sent.error = _code_in(chunk) or "error"
    if usage := object_of(chunk.get("usage")):
        sent.input_tokens, sent.output_tokens = _whole(usage, "prompt_tokens"), _whole(usage, "completion_tokens")
        sent.cached_tokens = _whole(object_of(usage.get("prompt_tokens_details")), "cached_tokens") or 0
    for choice in objects_of(chunk.get("choices"))[:1]:
        delta = object_of(choice.get("delta"))
        if any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")):
            sent.pieces_at.append(now)
    return False


async def _refusal(response: HttpResponse) -> str:
    """Return the code of an error that a server has answered."""
    body = bytearray()
    async for piece in response:
        body += piece
        if len(body) > ERROR_BYTES_MAX:
            break
    return " ".join(filter(None, (str(response.status), _code_in(parse_object(bytes(body[:ERROR_BYTES_MAX]))))))


def _code_in(answer: Json) -> str:
    error = object_of(answer.get("error"))
    return str(error.get("code") or error.get("type") or "")[:CODE_LENGTH_MAX]


def _whole(values: Json, name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
