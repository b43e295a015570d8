"""One worker as the gateway knows it, and the state that follows from that. Purely synchronous."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from ichat.protocol import Heartbeat, Machine, ModelCard, PeerLoss, WorkerState, names_of, response_tag
from ichat.routing.packed_args import PackedArgs
from ichat.routing.prefix_hits import PrefixHits

HEARTBEATS_MISSED_MAX = 3
"""A worker that has been silent for so many of its intervals is unhealthy."""

State = WorkerState | Literal["cold", "unhealthy", "wedged", "stale", "restarting", "failed", "broken"]
"""What a worker says of itself, or what the gateway knows better.

`cold` is loaded on demand and has no process now; `wedged` has requests and makes no step; `stale` is from before the
gateway's start, with no heartbeat since then; `restarting` has ended and will be started again, `failed` has not;
`broken` has lost another member of its group.
"""
HEALTHY: frozenset[State] = frozenset(("ready", "following", "cold", "asleep"))
"""The states in which a worker gets requests, works for the one of its group that does, or waits to be wanted."""
LOADABLE: frozenset[State] = frozenset(("cold", "asleep", "waking", "starting", "loading", "draining"))
"""The states of workers loaded on demand that will be ready once somebody has asked for them and waited."""
AWAY: frozenset[State] = frozenset(("unhealthy", "stale", "failed", "gone"))
"""The states of workers that have been silent for a while, or have ended."""


@attrs.frozen
class WorkerEnd:
    """How a worker's process ended, and why."""

    why: str
    """In a few words, to be put after the worker's name."""
    at: float
    """In seconds since 1970."""
    exit_code: int | None = None
    signal: str | None = None
    oom_killed: bool = False
    """Whether the kernel ended it, or a process of it, since there was no memory left."""
    cause: str = ""
    """In a sentence, if it is known."""
    last_lines: Sequence[str] = ()

    def __str__(self) -> str:
        """Return all of this as a part of a sentence."""
        return f"{self.why}: {self.cause.removesuffix('.')}" if self.cause else self.why


@attrs.define(eq=False)
class WorkerRecord:
    """One worker as the gateway knows it."""

    id: str
    managed: bool
    heartbeat: Heartbeat | None = None
    """The newest one, without its arguments; None for a managed worker before its first."""
    args: PackedArgs | None = None
    """The engine's arguments, once a heartbeat of this start had them."""
    _served: frozenset[str] = frozenset()
    """The names in that heartbeat."""
    tag: str = ""
    """What the ids of the responses have in them that it keeps."""
    heartbeat_at: float = -math.inf
    known_since: float = math.inf
    """When the first heartbeat of its newest start came."""
    last_healthy_at: float = -math.inf
    """When its newest heartbeat came that was no good-bye: later workers are not in its group."""
    lost: PeerLoss | None = None
    """What its group has lost for good."""
    expected: list[str] = attrs.field(factory=list[str])
    """The names that a managed worker will serve, known before its first heartbeat."""
    end: WorkerEnd | None = None
    """How it last ended by itself; it may have been started again since."""
    is_down: bool = False
    """Whether `end` is how things are now."""
    retry_at: float | None = None
    """When a worker that is down will be started again; one that is loaded on demand, not before somebody asks."""
    on_demand: bool = False
    """Whether a managed worker has a process only while its model is wanted."""
    is_cold: bool = False
    """Whether it has none now, since nobody wants its model."""
    ready_at: float | None = None
    """When a worker that is being loaded will probably be ready."""
    cards: Sequence[ModelCard] = ()
    """Of a worker that is cold: its models, as its last process described them."""
    restarts: int = 0
    is_draining: bool = False
    """Whether it gets no more requests, since it is about to be stopped."""
    is_stale: bool = False
    """Whether its heartbeat is from before the gateway's start."""
    can_return: bool = False
    """Whether a worker that is stale is known again by a health check, as it has shown the token that is needed."""
    answers: bool = False
    """Whether it answers its health checks: then it need not send heartbeats."""
    heard_at: float = -math.inf
    """When it sent a heartbeat, or answered a health check."""
    busy_steps: float | None = None
    """The count of its engine's steps by which it is known to be busy."""
    stuck_since: float = math.inf
    """Since when it has had requests and that count has stood still."""
    is_piped: bool = False
    """Whether its lines come through a pipe, since its newest start was here."""
    unix_socket: str | None = None
    """Where it is reached by a shorter way than its port, known of a managed worker."""
    max_in_flight: int | None = None
    """Requests under way at once, at most, where the gateway's configuration says so."""
    settings: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """What operators see of how a managed worker is run."""
    machine: Machine | None = None
    """Its machine, by the newest heartbeat that told of one."""
    prefix_hits: PrefixHits = attrs.field(factory=PrefixHits)
    """How much of its prompts its engine had in its cache lately."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is not iChat's own: those say of each start of theirs which one it is."""
        return not self.managed and self.heartbeat is not None and not self.heartbeat.start_id

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and will not be started again by itself."""
        return self.is_down and self.retry_at is None

    def serves(self, model: str) -> bool:
        """Return whether it serves a model of this name, or will."""
        if self.on_demand:
            return model in self.names
        return model in (self._served if self.heartbeat and self.heartbeat.model_name else self.expected)

    @property
    def names(self) -> list[str]:
        """Every model name that it serves or will serve.

        While a worker that is loaded on demand loads or ends, its engine names no adapters: they are those of before.
        """
        if not (self.heartbeat and self.heartbeat.model_name):
            return self.expected
        named = names_of(self.heartbeat)
        return named if self.heartbeat.models or not self.on_demand else list(dict.fromkeys([*named, *self.expected]))

    @property
    def context_tokens(self) -> int | None:
        """The most tokens of prompt and completion together, by its newest heartbeat; None: not known."""
        cards = self.heartbeat.models if self.heartbeat is not None else ()
        return next((card.max_model_len for card in cards if card.max_model_len), None)

    def state(
        self, now: float, wedged_after_s: float = math.inf, trouble: str = "", *, sees_drain: bool = True
    ) -> State:
        """Return the state, by its newest heartbeat and how long ago that was; `trouble` is its endpoint's.

        Without `sees_drain` it is that of a worker that is drained as if it were not: it may be stuck as well.
        """
        if self.is_down:
            return "failed" if self.has_failed else "restarting"
        if self.is_cold:
            return "cold"
        if self.is_draining and sees_drain:
            return "draining"
        if self.heartbeat is None:
            return "starting"
        if self.is_stale:
            return "stale"
        if trouble:
            return "unhealthy"
        if now > self._silent_at and not self.answers:
            return "unhealthy"
        if self.lost is not None:
            return "broken"
        if self.heartbeat.state == "ready" and now > self.stuck_since + wedged_after_s:
            return "wedged"
        return self.heartbeat.state

    def state_until(self, now: float, wedged_after_s: float) -> float:
        """Return the time from which the state is another one if nothing is heard of it until then."""
        ends = (self._silent_at, self.stuck_since + wedged_after_s)
        return math.nextafter(min((end for end in ends if end >= now), default=math.inf), math.inf)

    @property
    def _silent_at(self) -> float:
        """When it has missed too many heartbeats."""
        interval_s = self.heartbeat.heartbeat_interval if self.heartbeat else math.inf
        return self.heartbeat_at + interval_s * HEARTBEATS_MISSED_MAX

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record its newest heartbeat, and what that tells of the machine, if anything."""
        self.machine = heartbeat.machine or self.machine
        self.heartbeat = attrs.evolve(heartbeat, machine=None) if heartbeat.machine else heartbeat
        self.heartbeat_at, self.heard_at, self.is_stale = now, now, False
        self.tag = response_tag(heartbeat.worker_id, heartbeat.start_id)
        self._served = frozenset(names_of(heartbeat))
        if self.on_demand and heartbeat.models:
            self.expected, self.cards = self.names, heartbeat.models

    def note_steps(self, heartbeat: Heartbeat, now: float) -> None:
        """Record the engine's progress: an engine that is busy while its count of steps stands still is stuck."""
        progress = heartbeat.progress
        self.prefix_hits.record(progress.get("prompt_tokens"), progress.get("cached_tokens"), now)
        steps = progress.get("steps")
        steps = progress.get("tokens_out") if steps is None else steps
        busy = any((progress.get(name) or 0) > 0 for name in ("running", "waiting"))
        if not busy or steps is None or steps != self.busy_steps:
            self.stuck_since = math.inf if not busy or steps is None else now
            self.busy_steps = steps if busy else None

    def begin(self) -> None:
        """Forget what was known of its earlier start: there is a new one."""
        self.heartbeat, self.args, self.heartbeat_at, self.lost, self.machine = None, None, -math.inf, None, None
        self.known_since, self.last_healthy_at = math.inf, -math.inf
        self.is_down, self.retry_at, self.is_draining, self.is_cold = False, None, False, False
        self.tag = ""
        self.busy_steps, self.stuck_since = None, math.inf
        self.answers = False
        self.prefix_hits = PrefixHits()

    def is_loadable(self, now: float, state: State) -> bool:
        """Return whether it will be ready once somebody has asked for it and waited, if this is its state now."""
        if not self.on_demand:
            return False
        return state in LOADABLE or (state == "restarting" and self.retry_at is not None and now >= self.retry_at)

    def overlapped_with(self, other: "WorkerRecord") -> bool:
        """Return whether the other was healthy at some time during this run, with a tolerance of one heartbeat."""
        interval = other.heartbeat.heartbeat_interval if other.heartbeat else 0
        return self.known_since <= other.last_healthy_at + interval

    def why_not_ready(self, now: float, wedged_after_s: float, trouble: str) -> str:
        """Return in a few words why it gets no requests; `trouble` is its endpoint's."""
        state = self.state(now, wedged_after_s, trouble)
        if self.is_down:
            words = "it can be asked for again" if self.on_demand else "it is started again"
            again = "" if self.retry_at is None else f"; {words} in {max(0, self.retry_at - now):.0f} s"
            return f"worker {self.id} {self.end}{again}"
        if state == "wedged":
            return f"worker {self.id} has had requests for {now - self.stuck_since:.0f} s and made no step"
        if state == "stale":
            return f"worker {self.id} has not been heard of since the gateway was started"
        if trouble and state == "unhealthy":
            return f"worker {self.id} {trouble}"
        if state == "unhealthy":
            return f"worker {self.id} has not been heard of for {now - self.heard_at:.0f} s"
        if self.lost is not None:
            return f"worker {self.id} lost {self.lost.worker_id}, which {self.lost.why}"
        phase = self.heartbeat.phase if self.heartbeat else ""
        return f"worker {self.id} is {state}" + (f" ({phase})" if phase and phase != state else "")
