"""The interface of an engine, and how an engine is found by its name.

An engine is a class. It is either built in or, without any change to iChat, an entry point of the group
`ichat.engines` in a package that is installed beside iChat. Such a package needs no other module than this.
"""

import importlib
import importlib.metadata
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import attrs

from ichat.engines.adapter import BodyTransform, ProtocolAdapter
from ichat.engines.flag_list import EngineFlag
from ichat.engines.flags import FlagOutcome
from ichat.engines.held_prefixes import HeldPrefixes
from ichat.engines.load_phases import LoadLines, LoadMark
from ichat.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, ApiError, Exit, model_not_found
from ichat.http.json_body import Member, members_of, spliced, value_of
from ichat.http.request import Request
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import Group, ModelCard

__all__ = [
    "EXIT_SOFTWARE", "EXIT_UNAVAILABLE", "EXIT_USAGE", "ApiError", "Application", "BodyTransform", "Describer",
    "Engine", "EngineFlag", "EngineInfo", "EngineMemory", "Exit", "FlagOutcome", "Group", "HeldPrefixes", "LoadLines",
    "LoadMark", "Measured", "Member", "Message", "ModelCard", "Narrator", "Progress", "ProtocolAdapter", "Receive",
    "Request", "Scope", "Send", "Serve", "Sleeper", "find", "members_of", "model_not_found", "spliced", "value_of",
]  # fmt: skip

BUILT_IN = {"vllm": "ichat.engines.vllm.engine:VLLM", "sglang": "ichat.engines.sglang.engine:SGLang"}
ENTRY_POINTS = "ichat.engines"

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI 3 application."""
Serve = Callable[[Application | None], Awaitable[None]]
"""Returns when serving must end; None is served by a follower of a group, which answers no requests."""


@attrs.frozen
class Progress:
    """The figures that an engine reports about its load; a field that is None is not known."""

    running: int | None = None
    """Requests that the engine works on."""
    waiting: int | None = None
    """Requests in the engine's queue."""
    kv_use: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    steps: int | None = None
    """A count that grows with each step of the scheduler: if it stands still, a busy engine is stuck."""
    tokens_out: int | None = None
    """Tokens generated since the engine's start."""
    prompt_tokens: int | None = None
    """Tokens of prompts that the engine has looked up in its prefix cache since its start."""
    cached_tokens: int | None = None
    """How many of those the prefix cache had."""


@attrs.frozen
class EngineInfo:
    """The facts about an engine that are known once its arguments are parsed."""

    model_path: str
    model_names: list[str]
    """The names that requests may use, never empty; `Engine.models` has more once the model is loaded."""
    args: dict[str, Any]
    """Every effective argument, secrets masked; values that JSON can hold."""
    versions: dict[str, str]
    changed_args: Sequence[str] | None = None
    """The names of those that differ from the engine's defaults; None: not known."""
    flag_outcomes: Sequence[FlagOutcome] = ()
    """The outcome of each argument that was given."""
    group: Group | None = None
    held: HeldPrefixes | None = None
    """The prefixes known to be in the engine's cache; None: they are not known, and none are reported."""
    why_no_sleep: str = "it has no way to give its memory back"
    """Why the engine cannot sleep, as a clause; empty for an engine that can sleep (a `Sleeper`)."""


class Engine(Protocol):
    """A model in an engine.

    `parse` and then `run` are called once each, on a thread of their own that outlives all children of the engine.
    Everything else may be called from any thread.
    """

    name: str
    adapter: ProtocolAdapter
    """How its requests and responses differ from a worker's."""

    def check(self) -> None:
        """Check quickly, without importing the engine, that it is installed. Raises Exit 69 with what to type."""
        ...

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """Import the engine, parse its arguments. Raises Exit 64 for wrong arguments, Exit 69 for a wrong version."""
        ...

    def run(self, *, phase: Callable[[str], None], serve: Serve) -> None:
        """Load the model and await ``serve(application)`` inside an asyncio loop; then unload.

        `phase` is called with each step of the loading. A follower of a group serves None. Raises Exit 64 for an
        argument that proves wrong only during the load, any other exception if loading fails.
        """
        ...

    def why_dead(self) -> str | None:
        """Return the reason why no request can be served any more, or None.

        Called before each request, so it must be cheap (`children.ProcessFamily`). Later requests are refused and may
        go to another worker; the engine may have worked on earlier requests.
        """
        ...

    def progress(self) -> Progress:
        """Return the figures that the engine reports about its load."""
        ...

    def models(self) -> Sequence[ModelCard]:
        """Return the models that requests can name now: the model itself, then its LoRA adapters."""
        ...


class Sleeper(Protocol):
    """The additional methods of an engine that can sleep. Both are called on the loop in which it serves."""

    async def sleep(self) -> None:
        """Release the memory of the GPUs, with all that is cached there, and keep the model's weights elsewhere.

        Called while the worker has no requests for it, and gives it none. Raises ApiError if the engine cannot do so
        now, and everything is as before; after any other exception the engine is given up.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again: afterwards the engine is as it was. After an exception it is given up."""
        ...


@runtime_checkable
class Describer(Protocol):
    """The additional method of an engine that can list its flags."""

    def flags(self) -> Sequence[EngineFlag]:
        """Import the engine and return its flags, which need no model. Called instead of `Engine.parse`."""
        ...


@runtime_checkable
class Measured(Protocol):
    """The additional method of an engine that knows its memory."""

    def memory(self) -> EngineMemory | None:
        """Return the memory of the loaded engine: the same value from then on; None: not known."""
        ...


@runtime_checkable
class Narrator(Protocol):
    """The additional attribute of an engine that logs the phases of its load."""

    load_lines: LoadLines


def progress_of(metrics: Iterable[Any], samples: Mapping[str, str]) -> Progress:
    """Return an engine's figures from its Prometheus metrics; `samples` has the name of each figure's sample.

    Samples of equal names are from several processes: they are added, and of KV caches the fullest counts.
    """
    found: dict[str, list[float]] = {}
    for metric in metrics:
        for sample in metric.samples:
            found.setdefault(sample.name, []).append(sample.value)
    kv_use = found.pop(samples["kv_use"], None)
    counts = {figure: int(sum(found[name])) for figure, name in samples.items() if name in found}
    if "prompt_tokens" in counts:
        counts.setdefault("cached_tokens", 0)  # there is no sample before the first hit
    return attrs.evolve(Progress(kv_use=max(kv_use) if kv_use else None), **counts)


def cards_of(info: EngineInfo, longest: int | None, adapters: Mapping[str, str]) -> list[ModelCard]:
    """Return the model under each of its names, and its adapters; `longest` is the model's length in tokens.

    `adapters` has their paths by their names.
    """
    own = [ModelCard(name, info.model_path, None, longest) for name in info.model_names]
    return [*own, *(ModelCard(name, path, info.model_names[0]) for name, path in adapters.items())]


def find(name: str) -> Engine:
    """Return a new engine of this name. Raises Exit 64 if there is none."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return cast("Engine", getattr(importlib.import_module(module), attribute)())
    others = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name in others:
        return cast("Engine", others[name].load()())
    known = ", ".join(sorted({*BUILT_IN, *others}))
    raise Exit(EXIT_USAGE, f"There is no engine {name!r}; known here: {known}.")
