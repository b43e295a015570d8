"""SGLang's memory: its size after the load; its release by `/release_memory_occupation`, and by sleep.

SGLang's scheduler dies of either request at a wrong time: it asserts that it is idle, and that the memory to resume was
released. So such requests are refused, and so is work while memory is released.
"""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

import asyncio
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from ichat.engines.asgi import call_under_way
from ichat.errors import ApiError, model_not_ready
from ichat.http.request import Request
from ichat.protocol.engine_memory import EngineMemory

IDLE_S = 5.0
"""The limit for the scheduler to become idle after the last request has ended or was aborted."""
IDLE_POLL_S = 0.1
RETRY_AFTER_S = 5
REPORT_S = 10.0
"""The limit on the scheduler's answer about its memory after the load."""
_GIB = 1024**3

_RELEASE = b"/release_memory_occupation"
_WORK = re.compile(
    rb"/v1/(?!(?:de)?tokenize$|messages/count_tokens$).*"
    rb"|/(?:generate|encode|classify|invocations|vertex_generate|api/chat|api/generate)"
)
"""Routes that need the scheduler."""
_TAGS = frozenset(("kv_cache", "weights", "cuda_graph"))
"""The tags of memory that can be released; all of them if a request names none."""


class _Refused(Exception):
    """The call has been answered already."""


class Memory:
    """The memory that SGLang has released. Calls of `admit` never overlap, all else runs on the engine's loop."""

    def __init__(self, names: Callable[[], tuple[Sequence[str], Sequence[str]]], idle_s: float = IDLE_S) -> None:
        """`names` returns the model's names, SGLang's own first, and others."""
        self._names = names
        self._idle_s = idle_s
        self.released: set[str] = set()
        """The tags of the released memory."""
        self._release: Request | None = None
        """The last request to release memory."""

    def __repr__(self) -> str:
        return f"<Memory without {', '.join(sorted(self.released)) or 'nothing'}>"

    def admit(self, request: Request, under_way: Collection[Request]) -> None:
        """Raise ApiError 409 for a release while SGLang works, 503 for work while memory is released."""
        if request.path == _RELEASE:
            busy = sum(one.path == _RELEASE or _is_work(one) for one in under_way)
            if busy:
                raise _conflict(
                    f"The worker answers {busy} {'request' if busy == 1 else 'requests'}, and SGLang can let go of its"
                    " memory only when it is idle: ask again when they have ended."
                )
            self._release = request
        elif (self.released or self._release is not None) and _is_work(request):
            if self.released or self._release in under_way:
                why = "SGLang has let go of its memory, until POST /resume_memory_occupation"
                raise model_not_ready(self._names()[0][0], why, RETRY_AFTER_S)
            self._release = None

    def watch(self, manager: Any) -> None:
        """Let a tokenizer manager release memory only when the scheduler is idle, and resume only released memory."""
        release, resume = manager.release_memory_occupation, manager.resume_memory_occupation
        turn = asyncio.Lock()

        async def release_when_idle(asked: Any, *more: Any) -> None:
            async with turn:
                tags = _tags_of(asked)
                if gone := self.released.intersection(tags):
                    _refuse(f"SGLang has let go of {_listed(gone)} already: POST /resume_memory_occupation first.")
                until = time.monotonic() + self._idle_s
                while not (await manager.flush_cache()).success:
                    if time.monotonic() > until:
                        _refuse(f"SGLang's scheduler was not idle within {self._idle_s:g} s: ask again later.")
                    await asyncio.sleep(IDLE_POLL_S)
                self.released.update(tags)
                await release(asked, *more)

        async def resume_released(asked: Any, *more: Any) -> None:
            async with turn:
                tags = _tags_of(asked)
                there = set(tags) - self.released
                if there or len(set(tags)) < len(tags):
                    _refuse(f"SGLang has {_listed(there or tags)}: POST /release_memory_occupation lets go of it.")
                await resume(asked, *more)
                self.released.difference_update(tags)

        manager.release_memory_occupation = release_when_idle
        manager.resume_memory_occupation = resume_released


def why_no_sleep(args: Mapping[str, Any]) -> str:
    """Return why SGLang cannot give its memory back for a while, as a clause; empty if it can."""
    if args.get("device") == "cpu":
        return "SGLang gives no memory back on the CPU"
    if not args.get("enable_memory_saver"):
        return "SGLang was started without --enable-memory-saver"
    if not args.get("enable_weights_cpu_backup"):
        return "SGLang was started without --enable-weights-cpu-backup, and would lose the model's weights"
    if args.get("weight_cache_mode", "off") != "off":
        return "SGLang shares the model's weights with others (--weight-cache-mode)"
    return "several machines serve the model" if args.get("nnodes", 1) > 1 else ""


def _is_work(request: Request) -> bool:
    if request.method in (b"GET", b"HEAD"):
        return request.path == b"/health_generate"
    return _WORK.fullmatch(request.path) is not None


def _tags_of(asked: Any) -> Sequence[str]:
    if asked.tags:
        return asked.tags
    try:
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    except ImportError:
        return sorted(_TAGS)
    return GPU_MEMORY_ALL_TYPES


def _listed(tags: Collection[str]) -> str:
    return ", ".join(f"`{tag}`" for tag in sorted(tags))


def _conflict(message: str) -> ApiError:
    """Return the error of a request that does not fit the engine's present state."""
    return ApiError(409, "conflict", message, retry=False)


def _refuse(message: str) -> None:
    """Answer the call with 409, past SGLang, which answers all exceptions alike.

    Raises _Refused, or ApiError 409 if no call is under way.
    """
    call = call_under_way()
    if call is None:
        raise _conflict(message)
    call.abandon(_conflict(message))
    raise _Refused(message)


async def read_memory(manager: Any, within_s: float = REPORT_S) -> EngineMemory | None:
    """Return the memory that a tokenizer manager's first scheduler reports; None if it reports none in this time.

    A late answer is still received: SGLang would mistake it for the answer to its next question.
    """
    ask = getattr(manager, "get_internal_state", None)
    if ask is None:
        return None
    asking = asyncio.ensure_future(ask())
    await asyncio.wait([asking], timeout=within_s)
    if not asking.done() or asking.cancelled() or asking.exception() is not None:
        return None
    states = asking.result()
    told = states[0].get("memory_usage") if states else None
    return memory_in(cast("Mapping[str, Any]", told)) if isinstance(told, dict) else None


def memory_in(told: Mapping[str, Any]) -> EngineMemory:
    """Return the memory in a scheduler's report, in which sizes are in GiB; 0 is not known. Older releases have less.

    Models with windows have two caches; the number of tokens is that of the larger cache.
    """
    graphs = told.get("graph")
    if isinstance(graphs, dict):
        graphs = sum(_number(one) for one in graphs.values())
    return EngineMemory(
        tokens=int(_number(told.get("token_capacity"))) or None,
        cache_bytes=_size(told.get("kvcache")),
        weights_bytes=_size(told.get("weight")),
        graphs_bytes=_size(graphs),
    )


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and 0 < value < 1e15
    return float(value) if is_number else 0.0


def _size(value: Any) -> int | None:
    return int(_number(value) * _GIB) or None
