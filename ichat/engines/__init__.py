"""What an engine is to iChat, and how one is found by its name.

An engine is one class. It becomes known either here or, without any change to iChat, through an entry point of the
group `ichat.engines` in whatever package is installed beside it.
"""

import importlib
import importlib.metadata
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import attrs

from ichat.engines.adapter import ProtocolAdapter
from ichat.engines.flags import FlagOutcome
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol import Group, ModelCard

BUILT_IN = {"vllm": "ichat.engines.vllm:VLLM", "sglang": "ichat.engines.sglang:SGLang"}
ENTRY_POINTS = "ichat.engines"

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI 3 application."""
Serve = Callable[[Application | None], Awaitable[None]]
"""Returns when serving shall end."""


@attrs.frozen
class Progress:
    """What an engine is doing, by its own account; None is not known."""

    running: int | None = None
    """Requests that the engine works on."""
    waiting: int | None = None
    """Requests in the engine's queue."""
    kv_use: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    steps: int | None = None
    """A count that grows whenever the scheduler does something: a busy engine whose count stands still is stuck."""
    tokens_out: int | None = None
    """Tokens generated since the engine's start."""


@attrs.frozen
class EngineInfo:
    """What is known of an engine once its arguments are parsed."""

    model_path: str
    model_names: list[str]
    """The names that requests may use, at least one; `Engine.models` knows more once the model is loaded."""
    args: dict[str, Any]
    """Every effective argument, secrets masked; values that JSON can hold."""
    versions: dict[str, str]
    changed_args: Sequence[str] | None = None
    """The names of those that are not as the engine has them by default; None: the engine does not tell."""
    steps: Sequence[FlagOutcome] = ()
    """What became of each argument that was given."""
    group: Group | None = None


class Engine(Protocol):
    """One model in one engine.

    `parse` and then `run` are called once each, on a thread that exists for them and outlives all children of the
    engine; everything else may be called from any thread.
    """

    name: str
    wire: ProtocolAdapter
    """How its requests and responses differ from what a worker takes and gives."""

    def check(self) -> None:
        """See quickly, before any import, whether the engine is installed. Raises Exit 69 with what to type."""
        ...

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """Import the engine and parse its arguments. Raises Exit 64 for a wrong one, Exit 69 for a wrong version."""
        ...

    def run(self, *, phase: Callable[[str], None], serve: Serve) -> None:
        """Load the model and await ``serve(application)`` inside an asyncio loop; then unload.

        `phase` is called with each step of the loading. A follower of a group, which answers no requests, serves
        None. Raises Exit 64 for an argument that is found to be wrong so late, any other exception where loading
        fails.
        """
        ...

    def why_dead(self) -> str | None:
        """Give the reason why no request can be served any more; None while all is well.

        Asked before each request, so it must be cheap (`child.Family`); what was sent to it before may have been worked
        on, what comes later is refused, and may go to another worker.
        """
        ...

    def progress(self) -> Progress:
        """Give the engine's own account of its load."""
        ...

    def models(self) -> Sequence[ModelCard]:
        """Give what requests can ask for now, the model itself first, then its adapters."""
        ...


def find(name: str) -> Engine:
    """Make the engine of this name. Raises Exit 64 where there is none."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return cast("Engine", getattr(importlib.import_module(module), attribute)())
    others = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name in others:
        return cast("Engine", others[name].load()())
    known = ", ".join(sorted({*BUILT_IN, *others}))
    raise Exit(EXIT_USAGE, f"There is no engine {name!r}; known here: {known}.")
