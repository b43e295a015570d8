"""Adds and ends copies of models by their load: `placement/scale.py` decides, and this carries it out.

It is the only owner of a number of copies between its bounds. A copy that ends gets no more requests first. It is
removed when its last request has ended, or gets requests again if the load has risen.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs
import trio
from prometheus_client import Metric

from ichat.fleet.load_view import ScaleView
from ichat.fleet.worker_record import HEALTHY
from ichat.observability.prometheus_families import family
from ichat.placement.scale import (
    AT_ONCE_MAX,
    SAMPLE_S,
    CopyFacts,
    Phase,
    ScaleDecision,
    ScaleFacts,
    ScaleMemory,
    decide,
)
from ichat.routing.balancer import Balancer
from ichat.supervisor.context import SupervisorContext
from ichat.supervisor.copies import Copies
from ichat.supervisor.life import NoProcess
from ichat.supervisor.loader import Loader
from ichat.supervisor.managed_worker import ManagedWorker

log = logging.getLogger(__name__)

LATE_S = 1.0
"""A sample that is this late does not count: the gateway itself was held up."""
STARTS_MAX = 8
"""The most copies of all models that start at the same time because of their load."""
SILENT_INTERVALS = 2
"""A heartbeat counts for this many of its intervals."""
_BOUNDS = ("max_num_seqs", "max_running_requests")
"""The engines' arguments with the most requests that they work on at the same time."""


@attrs.define
class _Scaled:
    """A model, from its first sample on."""

    memory: ScaleMemory = ScaleMemory()
    decision: ScaleDecision | None = None
    changed: tuple[float, ScaleDecision] | None = None
    """The last decision that changed the number, and its time."""


class Scaler:
    """Decides again and again how many copies a model has, if its `replicas` are bounds."""

    def __init__(
        self,
        context: SupervisorContext,
        balancer: Balancer,
        workers: Mapping[str, ManagedWorker],
        copies: Copies,
        loader: Loader,
    ) -> None:
        """`workers` are all managed workers. No copy is added while requests wait for a load of the `loader`."""
        self._context = context
        self._loader = loader
        self._balancer = balancer
        self._workers = workers
        self._copies = copies
        self._scaled: dict[str, _Scaled] = {}
        self._look_at = -math.inf
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        """By model, direction and reason."""

    def __repr__(self) -> str:
        return f"<Scaler of {[*self._scaled]}>"

    async def run_forever(self) -> None:
        """Decide, and carry that out."""
        while True:
            await self._context.gate.wait_open()
            now = trio.current_time()
            is_whole = now - self._look_at < LATE_S or self._look_at == -math.inf
            self._look_at = now + SAMPLE_S
            try:
                self._decide_all(now, is_whole=is_whole)
            except Exception:
                log.exception("a bug in deciding how many copies there are")
            await trio.sleep_until(self._look_at)

    def _decide_all(self, now: float, *, is_whole: bool) -> None:
        groups = self._copies.scaled()
        for model in self._scaled.keys() - groups.keys():
            del self._scaled[model]
        if not groups:
            return
        most = 0 if self._loader.is_pressed else STARTS_MAX
        starting = sum(_phase_of(one, is_ready=self._is_ready(one)) == "starting" for one in self._workers.values())
        for model, ours in groups.items():
            scaled = self._scaled.setdefault(model, _Scaled())
            if not self._copies.is_changing(ours):
                facts = self._facts(now, ours, may_start=max(0, most - starting), is_whole=is_whole)
                scaled.decision, scaled.memory = decide(now, facts, ours[0].spec.scale, scaled.memory)
                starting += scaled.decision.start
                self._look_at = min(self._look_at, scaled.decision.look_at)
                self._carry_out(now, scaled, scaled.decision, ours)

    def _carry_out(self, now: float, scaled: _Scaled, decision: ScaleDecision, ours: Sequence[ManagedWorker]) -> None:
        model = ours[0].spec.model_name
        if decision.direction != "stay":
            scaled.changed = now, decision
            self._decisions[model, decision.direction, decision.reason] += 1
            what = f"{decision.start} start" if decision.start else "another number of copies"
            log.info("model %s: %s (%s, load %s)", model, what, decision.reason, _shown(decision.load))
        for one in ours:
            if one.id in decision.resume:
                one.life.want(takes_requests=True)
            elif one.id == decision.drain:
                one.life.want(takes_requests=False)
            is_drained = not one.life.wanted.takes_requests
            if is_drained and (self._requests_of(one, now) == 0 or not self._is_up(one)):
                self._copies.end(one)
        self._copies.add(ours[0], decision.start)

    # Facts.

    def _facts(self, now: float, ours: Sequence[ManagedWorker], *, may_start: int, is_whole: bool) -> ScaleFacts:
        slots = min((self._slots_of(one) for one in ours), default=1.0)
        demand = self._balancer.demand(*ours[0].record.names)
        return ScaleFacts(
            [self._copy_facts(one, now, slots) for one in ours], ours[0].spec.replicas, slots,
            waiting=demand.waiting,
            waited_s=max(0.0, now - demand.since) if demand.waiting else 0.0,
            load_s=self._context.managed.times.expected(ours[0].spec.model_name, "start") or 0.0,
            may_start=min(AT_ONCE_MAX, may_start),
            is_whole=is_whole,
        )  # fmt: skip

    def _copy_facts(self, one: ManagedWorker, now: float, slots: float) -> CopyFacts:
        endpoint, actual = self._context.table.endpoint_of(one.record), one.life.actual
        phase = _phase_of(one, is_ready=self._is_ready(one))
        failures = 0 if phase == "ready" else actual.failures
        work = 0.0 if endpoint is None else round(endpoint.holder.lately(endpoint.load(now), now)[0], 1)
        busy = self._busy_of(one, now, slots) if phase == "ready" else None
        return CopyFacts(one.id, phase, busy, self._requests_of(one, now), work, failures)

    def _busy_of(self, one: ManagedWorker, now: float, slots: float) -> float | None:
        """Return the share of a copy's engine in use; None where its heartbeat is too old."""
        heartbeat, endpoint = one.record.heartbeat, self._context.table.endpoint_of(one.record)
        if heartbeat is None or now - one.record.heartbeat_at > SILENT_INTERVALS * heartbeat.heartbeat_interval:
            return None
        progress = heartbeat.progress
        if (progress.get("waiting") or 0) > 0:
            return 1.0
        shares = [(progress.get("running") or 0) / slots, progress.get("kv_use") or 0.0]
        if one.spec.max_in_flight is not None and endpoint is not None:
            shares.append(endpoint.in_flight / one.spec.max_in_flight)
        return min(1.0, max(shares))

    def _slots_of(self, one: ManagedWorker) -> float:
        """Return how many requests a copy works on at the same time: by its engine, or as the gateway allows."""
        args = one.record.args.unpack() if one.record.args is not None else {}
        named = [float(args[name]) for name in _BOUNDS if isinstance(args.get(name), int) and args[name] > 0]
        endpoint = self._context.table.endpoint_of(one.record)
        allowed = [float(endpoint.in_flight_max)] if endpoint is not None else []
        return max(1.0, min([*named, *allowed], default=1.0))

    def _requests_of(self, one: ManagedWorker, now: float) -> int:
        endpoint = self._context.table.endpoint_of(one.record)
        return 0 if endpoint is None else endpoint.load(now)

    def _is_ready(self, one: ManagedWorker) -> bool:
        return self._context.table.state(one.record, sees_drain=False) in HEALTHY

    def _is_up(self, one: ManagedWorker) -> bool:
        return not isinstance(one.life.actual, NoProcess) and self._is_ready(one)

    # Views.

    def view(self, model: str) -> ScaleView | None:
        """Return the last decision about a model; None: its number of copies is no matter of its load."""
        scaled = self._scaled.get(model)
        ours = [one for one in self._workers.values() if one.spec.model_name == model and not one.is_leaving]
        if scaled is None or scaled.decision is None or not ours:
            return None
        now, bounds, memory = trio.current_time(), ours[0].spec.replicas, scaled.memory
        changed_at, changed = scaled.changed or (None, None)
        phases = Counter(_phase_of(one, is_ready=self._is_ready(one)) for one in ours)
        return ScaleView(
            bounds.min, bounds.max, phases["ready"], phases["starting"], phases["draining"], scaled.decision.load,
            scaled.decision.reason, None if memory.busy_since is None else round(now - memory.busy_since, 3),
            changed.direction if changed else None, changed.reason if changed else None,
            None if changed_at is None else round(now - changed_at, 3),
        )  # fmt: skip

    def families(self) -> Iterator[Metric]:
        """Return the families of copies, of models that have any."""
        counts, wanted = Counter[tuple[str, str]](), Counter[str]()
        for one in self._workers.values():
            if one.record.copies_wanted:
                model = one.spec.model_name
                counts[model, self._context.table.state(one.record)] += 1
                wanted[model] = one.record.copies_wanted
        if wanted:
            yield family("ichat_replicas", {**counts})
            yield family("ichat_replicas_wanted", {**wanted})
            yield family("ichat_scale_decisions", {**self._decisions})


def _phase_of(one: ManagedWorker, *, is_ready: bool) -> Phase:
    """Return whether a copy serves, drains, or is on its way."""
    if not one.life.wanted.takes_requests:
        return "draining"
    return "ready" if is_ready and one.phase == "ready" else "starting"


def _shown(load: float | None) -> str:
    return "not known" if load is None else f"{load:.2f}"
