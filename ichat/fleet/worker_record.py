"""A worker as the gateway knows it, and the state that follows from that. Purely synchronous."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import attrs

from ichat.errors import DECLINED
from ichat.fleet.packed_args import PackedArgs
from ichat.fleet.registered_servers import Server
from ichat.fleet.worker_facts import PrefixHits, Registration, WorkerEnd
from ichat.fleet.worker_load import WorkerLoad, load_after, load_of
from ichat.protocol.messages import Heartbeat, Machine, ModelCard, PeerLoss, WorkerState, names_of, response_tag
from ichat.routing.availability import NOT_NOW

HEARTBEATS_MISSED_MAX = 3
"""A worker that has been silent for this many of its intervals is unhealthy."""

State = (
    WorkerState
    | Literal["cold", "stopped", "pending", "unhealthy", "wedged", "stale", "restarting", "failed", "broken"]
)
"""A worker's state by its own report, or by the gateway's observation.

`cold` is loaded on demand and has no process now; `stopped` has none until an operator starts it.
`pending` waits for free GPUs.
`wedged` has requests and makes no step. `stale` is from before the gateway's start, with no heartbeat since then.
`restarting` has ended and will be started again, `failed` has not.
`broken` has lost another member of its group.
"""
HEALTHY: frozenset[State] = frozenset(("ready", "following", "cold", "asleep"))
"""The states in which a worker gets requests, works for the worker of its group that does, or waits to be wanted."""
LOADABLE: frozenset[State] = frozenset(("cold", "pending", "asleep", "waking", "starting", "loading", "draining"))
"""The states of workers loaded on demand that will be ready once a request has waited for them."""
COMING: frozenset[State] = frozenset(("starting", "loading", "waking"))
"""The states of workers that are on their way, whether their models are wanted or not."""
AWAY: frozenset[State] = frozenset(("unhealthy", "stale", "failed", "gone"))
"""The states of workers that have been silent for a while, or have ended."""
_ENGINE_LOST = DECLINED[b"engine_dead"]
"""The trouble of a worker that ends soon, since its engine has died."""

_TOLD: Mapping[State, str] = {
    "loading": "it is being loaded",
    "starting": "it is being started",
    "waking": "it is being woken",
    "pending": "it waits until GPUs are free",
    "restarting": "it is being restarted",
    "draining": "it is being stopped",
    "cold": "it is not loaded",
    "stopped": "an operator has stopped it",
    "asleep": "it is asleep",
    "following": "the leader of its group is not ready",
    "stale": "its worker has not been heard of since the gateway was started",
    "unhealthy": "its worker is unhealthy",
    "wedged": "its worker is stuck",
    "broken": "its group of workers has lost a member",
    "gone": "its worker has ended",
    "failed": "it has failed; an operator sees why in the console, or with `ichat.pyz workers`",
}
"""The text for clients about a model with workers in these states: the first of them counts."""


def told_of(states: Collection[State]) -> str:
    """Return the text for clients about a model that nothing serves, by the states of its workers."""
    return next((words for state, words in _TOLD.items() if state in states), NOT_NOW)


@attrs.define(eq=False)
class WorkerRecord:
    """A worker as the gateway knows it."""

    id: str
    managed: bool
    heartbeat: Heartbeat | None = None
    """The newest heartbeat, without its arguments; None for a managed worker before its first."""
    args: PackedArgs | None = None
    """The engine's arguments, once a heartbeat of this start had them."""
    _served: frozenset[str] = frozenset()
    """The names in that heartbeat."""
    registration: Registration | None = None
    """That of its newest whole heartbeat, if this gateway has received any of this start."""
    tag: str = ""
    """The part of the ids of the responses that it keeps."""
    heartbeat_at: float = -math.inf
    known_since: float = math.inf
    """When the first heartbeat of its newest start arrived."""
    last_healthy_at: float = -math.inf
    """When its newest heartbeat arrived that was no good-bye: later workers are not in its group."""
    lost: PeerLoss | None = None
    """The member that its group has lost for good."""
    expected: list[str] = attrs.field(factory=list[str])
    """The names that a managed worker will serve, known before its first heartbeat."""
    end: WorkerEnd | None = None
    """How it last ended by itself; it may have been started again since."""
    absence: Literal["", "cold", "stopped", "down"] = ""
    """Why operators and clients see it without a process, if they do: `down` by `end`, `stopped`, or `cold`.

    A managed worker's is set by the supervisor at each change of its `actual` state, from which its actions follow.
    """
    retry_at: float | None = None
    """When a worker that is down will be started again; if it is loaded on demand, not before a request."""
    on_demand: bool = False
    """Whether a managed worker has a process only while its model is wanted."""
    ready_at: float | None = None
    """When a worker that is being loaded will probably be ready."""
    cards: Sequence[ModelCard] = ()
    """Of a worker that is cold: its models, as its last process described them."""
    lacks: str = ""
    """Why a managed worker has no place to start at now, in a sentence; empty if it has a place, or needs none."""
    is_unanswered: bool = False
    """Whether it has no place since the cluster that would start it does not answer."""
    restarts: int = 0
    began_at: float | None = None
    """When its newest start began, known of a managed worker."""
    was_ready: bool = False
    """Whether it was ready in its newest start."""
    returns: bool = False
    """Whether it is drained in order to be started anew."""
    is_drained: bool = False
    """Whether the supervisor sends it no more requests."""
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
    """Whether its lines arrive through a pipe, since its newest start was here."""
    unix_socket: str | None = None
    """Where it is reached by a shorter way than its port, known of a managed worker."""
    max_in_flight: int | None = None
    """Requests under way at once, at most, where the gateway's configuration says so."""
    server: Server | None = None
    """The server, if the configuration registers it; such a worker sends no heartbeats."""
    copy_number: int = 0
    """Its number among the copies of its table; 0: it is no copy."""
    copies_wanted: int = 0
    """How many copies of its table are wanted; 0: it is no copy."""
    settings: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    """The settings of a managed worker that operators see."""
    machine: Machine | None = None
    """Its machine, by the newest heartbeat that reported any."""
    load: WorkerLoad | None = None
    """The load that is under way."""
    last_load: WorkerLoad | None = None
    """The last load after which it was ready."""
    prefix_hits: PrefixHits = attrs.field(factory=PrefixHits)
    """How much of its prompts its engine had in its cache lately."""

    @property
    def is_foreign(self) -> bool:
        """Whether it is not iChat's own: iChat's own workers identify each of their starts."""
        return not self.managed and self.heartbeat is not None and not self.heartbeat.start_id

    @property
    def place(self) -> tuple[str, str, int] | None:
        """Its start, host and port; None if it must not be reached."""
        if self.heartbeat is None or self.is_down:
            return None
        return self.heartbeat.start_id, self.heartbeat.host, self.heartbeat.port

    @property
    def engine(self) -> str:
        """The name of its engine, by its heartbeat or its table; empty if it is not known."""
        return self.heartbeat.backend if self.heartbeat else str(self.settings.get("backend", ""))

    @property
    def is_down(self) -> bool:
        """Whether it has ended by itself, and has not been started again."""
        return self.absence == "down"

    @property
    def is_cold(self) -> bool:
        """Whether it has no process, since its model is not wanted."""
        return self.absence == "cold"

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
    def phase(self) -> str:
        """Its current phase, by its newest heartbeat or the gateway's own steps; nothing while it is down."""
        if self.absence:
            return ""
        if self.heartbeat is None:
            return self.load.phase if self.load else ""
        return self.heartbeat.phase

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

        With `sees_drain=False`, ignore that the worker is drained.
        """
        if self.is_down:
            return "failed" if self.has_failed else "restarting"
        if self.absence in {"cold", "stopped"}:
            return "cold" if self.is_cold else "stopped"
        if self.is_drained and sees_drain:
            return "draining"
        if self.heartbeat is None:
            return "pending" if self.lacks else "starting"
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
        """Return the time from which the state is different if nothing is heard of it until then."""
        ends = (self._silent_at, self.stuck_since + wedged_after_s)
        return math.nextafter(min((end for end in ends if end >= now), default=math.inf), math.inf)

    @property
    def _silent_at(self) -> float:
        """When it has missed too many heartbeats."""
        if self.server is not None:
            return math.inf
        interval_s = self.heartbeat.heartbeat_interval if self.heartbeat else math.inf
        return self.heartbeat_at + interval_s * HEARTBEATS_MISSED_MAX

    def is_heard(self, now: float) -> bool:
        """Return whether its process is there, by a heartbeat that is not old, or by its answers."""
        if self.heartbeat is None or self.heartbeat.state == "gone" or self.is_down or self.is_stale:
            return False
        return now <= self._silent_at or self.answers

    def registered(self, registration: Registration) -> None:
        """Record its registration."""
        self.registration = registration

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> WorkerLoad | None:
        """Record its newest heartbeat, and its machine if that is reported. Return a load that it has ended."""
        self.was_ready = self.was_ready or heartbeat.state == "ready"
        self.machine = heartbeat.machine or self.machine
        self.heartbeat = attrs.evolve(heartbeat, machine=None) if heartbeat.machine else heartbeat
        self.heartbeat_at, self.heard_at, self.is_stale = now, now, False
        self.tag = response_tag(heartbeat.worker_id, heartbeat.start_id)
        self._served = frozenset(names_of(heartbeat))
        if self.on_demand and heartbeat.models:
            self.expected, self.cards = self.names, heartbeat.models
        return self._record_load(heartbeat, now)

    def _record_load(self, heartbeat: Heartbeat, now: float) -> WorkerLoad | None:
        """Record a heartbeat's report on a load; return that load if it has ended."""
        load = load_after(self.load, heartbeat, now)
        if load is None or load.ended_at is None:
            self.load = load
            if self.last_load is None or (not self.managed and self.last_load.is_unlike(heartbeat)):
                self.last_load = load_of(heartbeat, now)
            return None
        self.load, self.last_load, self.ready_at = None, load, None
        return load

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
        """Forget the facts of its earlier start: there is a new start."""
        self.heartbeat, self.args, self.heartbeat_at, self.lost, self.machine = None, None, -math.inf, None, None
        self.known_since, self.last_healthy_at = math.inf, -math.inf
        self.absence, self.retry_at, self.is_drained = "", None, False
        self.was_ready, self.returns = False, False
        self.tag, self.registration = "", None
        self.busy_steps, self.stuck_since = None, math.inf
        self.answers = False
        self.load, self.lacks, self.is_unanswered = None, "", False
        self.prefix_hits = PrefixHits()

    def is_loadable(self, now: float, state: State) -> bool:
        """Return whether it will be ready once a request has waited for it, if this is its state now."""
        if not self.on_demand or self.is_unanswered:
            return False
        return state in LOADABLE or (state == "restarting" and self.retry_at is not None and now >= self.retry_at)

    def is_coming(self, state: State, trouble: str) -> bool:
        """Return whether it will probably be ready soon, without being asked for, if these are its state and trouble.

        A worker that ended before it was ready may end so again: it is not waited for until it is started again.
        """
        if self.on_demand:
            return False
        if state in COMING or (state == "restarting" and self.was_ready):
            return True
        return self.managed and (state == "gone" or trouble == _ENGINE_LOST or (state == "draining" and self.returns))

    def comes_at(self) -> float | None:
        """Return when a worker that is on its way will probably be ready; None: not known."""
        if self.ready_at is not None or self.last_load is None or self.began_at is None:
            return self.ready_at
        begins_at = self.began_at if not self.is_down or self.retry_at is None else self.retry_at
        return begins_at + self.last_load.seconds

    def overlapped_with(self, other: "WorkerRecord") -> bool:
        """Return whether the other was healthy at some time during this run, with the tolerance of a heartbeat."""
        interval = other.heartbeat.heartbeat_interval if other.heartbeat else 0
        return self.known_since <= other.last_healthy_at + interval

    def why_not_ready(self, now: float, wedged_after_s: float, trouble: str) -> str:
        """Return to operators in a few words why it gets no requests; `trouble` is its endpoint's."""
        state = self.state(now, wedged_after_s, trouble)
        if self.is_down:
            words = "it can be asked for again" if self.on_demand else "it is started again"
            again = "" if self.retry_at is None else f"; {words} in {max(0, self.retry_at - now):.0f} s"
            return f"worker {self.id} {self.end}{again}"
        if state == "pending":
            return f"worker {self.id} waits for GPUs: {self.lacks.rstrip('.')}"
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
        if self.phase.startswith(state):
            return f"worker {self.id} is {self.phase}"
        return f"worker {self.id} is {state}" + (f" ({self.phase})" if self.phase else "")


def activity_of(worker: WorkerRecord, state: State) -> str:
    """Return the activity of a worker in this state that is waited for, in a few words."""
    if state == "cold":
        return "about to start"
    if state == "pending":
        return "waiting for GPUs"
    if state not in COMING and state != "asleep":
        return "about to start again"
    return worker.phase or state
