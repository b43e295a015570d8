"""The grants of earlier owners, as a new owner learns them from the reports of relays. No I/O.

No ask is answered before each relay has reported or ended. So the counts are exact when the first decision is made.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import attrs

from ichat.relays.link import whole
from ichat.relays.values import UNDER_WAY, Frame, MonotonicNs, Note, SentAsk, SentOutcome, TalkError

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


_TYPES = {Trying: (int, int, str, str, str), Recent: (int, str, int, int)}


def trying_in(report: Note) -> list[Trying]:
    """Return the requests with places of a relay's report. Raises TalkError."""
    return [Trying(*row) for row in _rows(report, "trying", _TYPES[Trying])]


def numbers_in(added: Note) -> list[int]:
    """Return the numbers of the requests that a sum of outcomes has. Raises TalkError."""
    rows = _rows(added, "rows", (str, str, str, int, int, list))
    numbers = [number for row in rows for number in row[-1]]
    if any(type(number) is not int for number in numbers):
        raise TalkError("The requests of a sum of outcomes are no numbers.")
    return numbers


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
                one.recent += [Recent(*row) for row in _rows(frame, "recent", _TYPES[Recent])]
            case SentOutcome() | Note("added"):
                seq = frame.seq if isinstance(frame, SentOutcome) else whole(frame, "seq")
                if seq > self._marks.get(relay, 0):
                    one.outcomes.append(frame)
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
            self._ended.append((relay, _Reported(recent=one.recent, outcomes=one.outcomes)))

    def result(self) -> Adopted:
        """Return the picture. Raises TalkError if a relay is still expected."""
        if not self.is_complete:
            raise TalkError("A relay has neither reported nor ended.")
        all_of = [*self._ended, *self._relays.items()]
        waiting, under_way = _asks_in((relay, asked) for relay, one in all_of for asked in one.asks)
        return Adopted(
            [(relay, row) for relay, one in all_of for row in one.trying],
            _windows_of(row for _, one in all_of for row in one.recent),
            [(relay, item) for relay, one in all_of for item in one.outcomes],
            waiting,
            under_way,
        )


def _asks_in(
    asks: Iterable[tuple[str, SentAsk]],
) -> tuple[list[tuple[str, SentAsk]], dict[tuple[str, int], SentAsk]]:
    """Return the open asks in the order of their times, and the others by their relays and numbers."""
    waiting: list[tuple[str, SentAsk]] = []
    under_way: dict[tuple[str, int], SentAsk] = {}
    for relay, asked in asks:
        if asked.bits & UNDER_WAY:
            under_way[relay, asked.number] = asked
        else:
            waiting.append((relay, asked))
    return sorted(waiting, key=lambda pair: pair[1].at), under_way


def _windows_of(rows: Iterable[Recent]) -> dict[tuple[int, str], tuple[int, int]]:
    windows: dict[tuple[int, str], tuple[int, int]] = {}
    for second, key, requests, tokens in rows:
        before = windows.get((second, key), (0, 0))
        windows[second, key] = before[0] + requests, before[1] + tokens
    return windows
