"""How far a download is: a line of JSON from its process, and the same in words."""

import json
import math
from typing import Any, Literal, cast, get_args

import attrs

ReportState = Literal["starting", "waiting", "downloading", "done", "failed"]
LINE_BYTES_MAX = 8192
"""The longest line of a download's process."""
_MB = 1e6
_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


@attrs.frozen
class DownloadReport:
    """How far a download is."""

    state: ReportState
    why: str = ""
    """Why the download waits or has failed, or which process it belongs to; empty otherwise."""
    done_bytes: int = 0
    total_bytes: int = 0
    """The size of the model's files; 0: not known yet."""
    rate: float = 0.0
    """Bytes a second, by the last seconds."""
    directory: str = ""
    """The directory of the model; empty until it is whole."""

    @property
    def left_s(self) -> float | None:
        """The probable rest of the download in seconds; None: not known."""
        rest = self.total_bytes - self.done_bytes
        return rest / self.rate if self.rate > 0 and rest >= 0 else None

    def words(self) -> str:
        """Return how far it is: `43 %, 210 MB/s, about 4 min`."""
        if self.state != "downloading" or not self.total_bytes:
            return self.why
        parts = [f"{math.floor(100 * self.done_bytes / self.total_bytes)} %"]
        if self.rate > 0:
            parts.append(f"{self.rate / _MB:.{0 if self.rate >= 10 * _MB else 1}f} MB/s")
        if self.left_s is not None:
            parts.append(f"about {span(self.left_s)}")
        return ", ".join([*parts, self.why] if self.why else parts)

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(attrs.asdict(self), ensure_ascii=False)


def span(seconds: float) -> str:
    """Return a length of time in its largest unit: `4 min`."""
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    return f"{max(1, round(seconds / size))} {unit}"


def read_report(line: str | bytes) -> DownloadReport | None:
    """Return the report in a line of JSON; None for another line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    values = cast("dict[str, Any]", found)
    if values.get("state") not in get_args(ReportState):
        return None
    known = {one.name: values[one.name] for one in attrs.fields(DownloadReport) if one.name in values}
    usual = attrs.asdict(DownloadReport("starting"))
    if any(not _is_like(value, usual[name]) for name, value in known.items()):
        return None
    return DownloadReport(**known)


def _is_like(value: object, usual: object) -> bool:
    """Return whether a value has the type of the usual value of its field."""
    kinds = (int, float) if isinstance(usual, int | float) else (str,)
    return isinstance(value, kinds) and not isinstance(value, bool) and (isinstance(value, str) or math.isfinite(value))


class Rate:
    """The bytes a second of a download, by its last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: list[tuple[float, int]] = []
        self._grew_at = -math.inf

    def __repr__(self) -> str:
        return f"<Rate {self._seen[-1:]}>"

    def add(self, done_bytes: int, now: float) -> float:
        """Note the bytes that are there now, and return the rate."""
        if not self._seen or done_bytes != self._seen[-1][1]:
            self._grew_at = now
        self._seen.append((now, done_bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            del self._seen[0]
        (then, before), span_s = self._seen[0], now - self._seen[0][0]
        return max(0.0, (done_bytes - before) / span_s) if then < now else 0.0

    def still_s(self, now: float) -> float:
        """Return for how many seconds no byte has arrived."""
        return max(0.0, now - self._grew_at)
