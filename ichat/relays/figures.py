"""The figures of relays, for operators and for Prometheus: their states, their starts, and their CPU time."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

import attrs
import trio
from prometheus_client import Metric

from ichat.observability.prometheus_families import Histogram, family, histogram_family
from ichat.protocol.messages import Count
from ichat.relays.relay_at_owner import RelayAtOwner, RelayEnd, RelayState

_DECISION_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


@attrs.frozen
class RelayView:
    """A process that moves bytes for this gateway."""

    number: Count
    pid: Count
    state: RelayState
    connections: Count
    requests: Count
    """In flight."""
    age_s: float
    """Of its process."""
    restarts: Count
    """How often a relay of this number has ended, and was started again."""
    cpu_s: float
    """CPU time of its process, as it has said last."""
    rss_bytes: Count
    """Memory of its process, as it has said last."""


@attrs.frozen
class RelayCrash:
    """An end of a relay without an order: its connections have ended, too."""

    number: Count
    pid: Count
    at: float
    """In seconds since 1970."""
    how: str
    """For example `has ended by signal SIGKILL`, or `was killed: it was silent for 10 s`."""


class RelayFigures:
    """Counts the starts and the CPU time of relays, and the time that decisions need."""

    def __init__(self, relays: Mapping[int, RelayAtOwner]) -> None:
        """`relays` are those that run, by their processes."""
        self._relays = relays
        self._restarts: Counter[int] = Counter()
        self._reasons: Counter[str] = Counter(dict.fromkeys(get_args(RelayEnd), 0))
        """How often relays were started again, by how the relays before had left their places."""
        self._ended_cpu_ms: Counter[int] = Counter()
        """The CPU time of relays that have ended, by their numbers."""
        self.last_crash: RelayCrash | None = None
        """Of those since this process began."""
        self.decisions = Histogram(_DECISION_S)
        """How long this process needed for its first answers to requests."""

    def __repr__(self) -> str:
        return f"<RelayFigures of {len(self._relays)} relays, {self._restarts.total()} restarts>"

    def note_restart(self, number: int, why: RelayEnd) -> None:
        """Count that a relay of this number is started again, after another had left its place in this way."""
        self._restarts[number] += 1
        self._reasons[why] += 1

    def note_end(self, relay: RelayAtOwner) -> None:
        """Keep the CPU time of a relay that has ended."""
        self._ended_cpu_ms[relay.number] += relay.cpu_ms

    def note_crash(self, relay: RelayAtOwner) -> None:
        """Note that a relay has ended without an order."""
        how = relay.end_in_words
        self.last_crash = RelayCrash(relay.number, relay.process.pid, round(time.time(), 3), how)

    def views(self) -> list[RelayView]:
        """Return the facts that operators see of each relay."""
        now = trio.current_time()
        shown = sorted(self._relays.values(), key=lambda relay: (relay.number, relay.since))
        return [
            RelayView(
                one.number, one.process.pid, one.state, one.connections, one.requests, round(now - one.since, 3),
                self._restarts[one.number], one.cpu_ms / 1000, one.rss_bytes,
            )
            for one in shown
        ]  # fmt: skip

    def families(self) -> Iterator[Metric]:
        """Return the families for Prometheus."""
        states = Counter(dict.fromkeys(get_args(RelayState), 0))
        states.update(relay.state for relay in self._relays.values())
        used_ms = self._ended_cpu_ms.copy()
        for relay in self._relays.values():
            used_ms[relay.number] += relay.cpu_ms
        requests: Counter[str] = Counter({"accepting": 0, "retiring": 0})
        for relay in self._relays.values():
            requests[relay.state] += relay.requests
        yield family("ichat_relays", states)
        yield family("ichat_relay_requests", requests)
        yield family("ichat_relay_restarts", self._reasons)
        yield family("ichat_relay_cpu_seconds", {str(number): ms / 1000 for number, ms in used_ms.items()})
        yield histogram_family("ichat_decision_seconds", self.decisions)


def families_of_all(figures: Iterable[RelayFigures]) -> Iterator[Metric]:
    """Return the families of these figures for Prometheus."""
    for one in figures:
        yield from one.families()
