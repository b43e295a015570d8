"""The grants of earlier owners, as a new owner learns them from the reports of relays. No I/O.

No ask is answered before each relay has reported or ended. So the counts are exact when the first decision is made.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import attrs

from ichat.relays.link import whole
from ichat.relays.values import ENDED, UNDER_WAY, Frame, MonotonicNs, Note, SentAsk, SentOutcome, TalkError

_Row = TypeVar("_Row")
REPORT_NS = 5_000_000_000
"""A relay that has not reported by then is killed."""


class Trying(NamedTuple):
    """A request that has a place at an endpoint."""

    number: int
    attempt: int
    endpoint: str
    key: str
    model: str


class Recent(NamedTuple):
    """The requests and tokens of a key in a second."""

    second: int
    key: str
    requests: int
    tokens: int


class AddedUp(NamedTuple):
    """The sums of many outcomes of a key, a model and an endpoint."""

    key: str
    model: str
    endpoint: str
    requests: int
    errors: int
    input: int
    output: int
    cached: int


RECENT_S = 61
_S = 1_000_000_000
SUMS = 5
"""The number of sums in `AddedUp`."""
_TYPES = {
    Trying: (int, int, str, str, str),
    Recent: (int, str, int, int),
    AddedUp: (str, str, str, *[int] * SUMS),
}


def trying_in(report: Note) -> list[Trying]:
    """Return the requests with places of a relay's report. Raises TalkError."""
    return [Trying(*row) for row in _rows(report, "trying", _TYPES[Trying])]


def sums_in(added: Note) -> list[AddedUp]:
    """Return the sums of outcomes in a frame `added`. Raises TalkError."""
    return [AddedUp(*row) for row in _rows(added, "rows", _TYPES[AddedUp])]


def _rows(report: Note, name: str, types: tuple[type, ...]) -> list[list[Any]]:
    rows: Any = report.content.get(name, [])
    is_table = isinstance(rows, list) and all(isinstance(row, list) for row in cast("list[Any]", rows))
    if not is_table or any(tuple(map(type, row)) != types for row in cast("list[list[Any]]", rows)):
        raise TalkError(f"The rows of `{name}` in a frame have another form.")
    return cast("list[list[Any]]", rows)


@attrs.define
class _Reported:
    is_ready: bool = False
    trying: list[Trying] = attrs.field(factory=list[Trying])
    recent: list[Recent] = attrs.field(factory=list[Recent])
    outcomes: list[SentOutcome | Note] = attrs.field(factory=list[SentOutcome | Note])
    asks: list[SentAsk] = attrs.field(factory=list[SentAsk])
    skipped: int = 0
    """The newest outcome that the ledger has."""
    lost: list[Trying] = attrs.field(factory=list[Trying])
    """Those of `trying`, after its end."""

    def add(self, outcome: SentOutcome | Note, mark: int) -> None:
        """Note an outcome, unless the ledger has it."""
        seq = outcome.seq if isinstance(outcome, SentOutcome) else whole(outcome, "seq")
        if seq > mark:
            self.outcomes.append(outcome)
        else:
            self.skipped = seq

    def after_its_end(self) -> "_Reported":
        """Return what counts after the relay has ended: its clients have gone."""
        known = [asked for asked in self.asks if asked.bits & (UNDER_WAY | ENDED)]
        return _Reported(recent=self.recent, outcomes=self.outcomes, asks=known, lost=self.trying)


class Adopted(NamedTuple):
    """All that an owner must know before its first decision. Relays are named as they were for `Adoption`."""

    trying: list[tuple[str, Trying]]
    """The places in use."""
    windows: dict[tuple[int, str], tuple[int, int]]
    """The requests and tokens of the last minute, by second and key."""
    outcomes: list[tuple[str, SentOutcome | Note]]
    """Those that no ledger has; a Note is a sum of outcomes."""
    waiting: list[tuple[str, SentAsk]]
    """The open asks in the order of their times."""
    under_way: Mapping[tuple[str, int], SentAsk]
    """The requests with places, by relay and number; copies are not among them."""
    ended: Mapping[tuple[str, int], SentAsk]
    """The requests that have ended by an outcome, by relay and number; see `outcomes`."""
    lost: list[tuple[str, Trying]]
    """The requests with places of relays that have ended: their places are free."""
    skipped: Mapping[str, int]
    """The newest outcome of each relay that the ledger has, and the relay has not forgotten."""


class Adoption:
    """Collects the reports of relays, until each has reported or ended."""

    def __init__(self, relays: Iterable[str], marks: Mapping[str, int], now: MonotonicNs) -> None:
        """`marks` are the last outcomes of relays that the ledger has."""
        self._relays = {relay: _Reported() for relay in relays}
        self._ended: list[tuple[str, _Reported]] = []
        self._marks = marks
        self._until = now + REPORT_NS

    def __repr__(self) -> str:
        return f"<Adoption of {len(self._relays)} relays>"

    @property
    def is_complete(self) -> bool:
        """Whether asks may be answered."""
        return all(one.is_ready for one in self._relays.values())

    def expects(self, relay: str) -> bool:
        """Return whether a relay has more to report."""
        return relay in self._relays and not self._relays[relay].is_ready

    def begin_anew(self, now: MonotonicNs) -> None:
        """Begin the time of all relays anew: this process itself was late."""
        self._until = now + REPORT_NS

    def overdue(self, now: MonotonicNs) -> list[str]:
        """Return the relays that must be killed, since they have not reported in time."""
        return [relay for relay, one in self._relays.items() if now >= self._until and not one.is_ready]

    def receive(self, relay: str, frame: Frame) -> None:
        """Note a frame of a relay, from its report to `ready`. Raises TalkError; later frames wait."""
        one = self._relays.get(relay)
        if one is None or one.is_ready:
            raise TalkError(f"The relay {relay} has nothing to report.")
        match frame:
            case Note("report"):
                one.trying += trying_in(frame)
                one.recent += _recent_in(frame)
            case SentOutcome() | Note("added"):
                one.add(frame, self._marks.get(relay, 0))
            case SentAsk():
                one.asks.append(frame)
            case Note("ready"):
                one.is_ready = True
            case _:
                raise TalkError(f"A frame `{frame.kind}` is no part of a report.")

    def end(self, relay: str) -> None:
        """Note that a relay has ended: its places are free, and its clients have gone. Its outcomes count."""
        one = self._relays.pop(relay, None)
        if one is not None:
            self._ended.append((relay, one.after_its_end()))

    def result(self) -> Adopted:
        """Return the picture. Raises TalkError if a relay is still expected."""
        if not self.is_complete:
            raise TalkError("A relay has neither reported nor ended.")
        all_of = [*self._ended, *self._relays.items()]
        asks = _all_of(all_of, lambda one: one.asks)
        return Adopted(
            _all_of(all_of, lambda one: one.trying),
            _windows_of(row for _, row in _all_of(all_of, lambda one: one.recent)),
            _all_of(all_of, lambda one: one.outcomes),
            sorted((pair for pair in asks if not pair[1].bits & (UNDER_WAY | ENDED)), key=lambda pair: pair[1].at),
            _with_bit(UNDER_WAY, asks),
            _with_bit(ENDED, asks),
            _all_of(all_of, lambda one: one.lost),
            {relay: one.skipped for relay, one in all_of if one.skipped},
        )


def _all_of(
    reported: Iterable[tuple[str, _Reported]], rows: Callable[[_Reported], list[_Row]]
) -> list[tuple[str, _Row]]:
    """Return the rows of all reports, with their relays."""
    return [(relay, row) for relay, one in reported for row in rows(one)]


def _with_bit(bit: int, asks: Iterable[tuple[str, SentAsk]]) -> dict[tuple[str, int], SentAsk]:
    """Return the asks with a bit, by their relays and numbers."""
    return {(relay, asked.number): asked for relay, asked in asks if asked.bits & bit}


def _recent_in(report: Note) -> list[Recent]:
    return [Recent(*row) for row in _rows(report, "recent", _TYPES[Recent])]


def _windows_of(rows: Iterable[Recent]) -> dict[tuple[int, str], tuple[int, int]]:
    windows: dict[tuple[int, str], tuple[int, int]] = {}
    for second, key, requests, tokens in rows:
        before = windows.get((second, key), (0, 0))
        windows[second, key] = before[0] + requests, before[1] + tokens
    return windows


class RecentUse:
    """The requests and tokens of the last minute at a relay, by second and key: the rows of its report."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], list[int]] = {}

    def __repr__(self) -> str:
        return f"<RecentUse {len(self._sums)} sums>"

    def __len__(self) -> int:
        return len(self._sums)

    def count(self, key: str, now: MonotonicNs, *, requests: int = 0, tokens: int = 0) -> None:
        """Count requests and tokens of a key."""
        sums = self._sums.get((now // _S, key))
        if sums is None:
            self._drop_old(now)
            sums = self._sums[now // _S, key] = [0, 0]
        sums[0] += requests
        sums[1] += tokens

    def rows(self, now: MonotonicNs) -> list[list[Any]]:
        """Return the rows of a report; see `Recent`."""
        self._drop_old(now)
        return [[*at, *sums] for at, sums in self._sums.items()]

    def _drop_old(self, now: MonotonicNs) -> None:
        """Drop the sums of the seconds before the last minute: the oldest are first."""
        while self._sums and next(iter(self._sums))[0] <= now // _S - RECENT_S:
            del self._sums[next(iter(self._sums))]
