"""Counts of copies for shadows: their results, their durations, and their tokens."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from ichat.observability.prometheus_families import Histogram, counter_family, histogram_family_by_model
from ichat.observability.request_record import OTHER

SERIES_MAX = 1000
"""Series of each family; if reloads bring more names, the others are counted together."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class ShadowCounts:
    """The counts. Names and models are the configuration's."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._tokens: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ShadowCounts {len(self._copies)} series>"

    def add(self, alias: str, model: str, result: str) -> None:
        """Count a copy by its result: the status of its response, or why there was none."""
        key = (alias, model, result)
        if key not in self._copies and len(self._copies) >= SERIES_MAX:
            key = (OTHER, OTHER, result)
        self._copies[key] = self._copies.get(key, 0) + 1

    def add_response(self, model: str, seconds: float, tokens: int) -> None:
        """Count the duration of a whole response, and the tokens that it says were used."""
        if model not in self._seconds and len(self._seconds) >= SERIES_MAX:
            model = OTHER
        self._seconds.setdefault(model, Histogram(_SECONDS)).add(seconds)
        self._tokens[model] = self._tokens.get(model, 0) + tokens

    def families(self) -> Iterator[Metric]:
        """Return the families with the current counts; none if there were no copies."""
        if not self._copies:
            return
        copies = CounterMetricFamily(
            "ichat_shadow_requests",
            "Copies of requests for a shadow, by the status of the response, or why there is none.",
            labels=("alias", "model", "result"),
        )
        for key, count in list(self._copies.items()):
            copies.add_metric(key, count)
        yield copies
        yield histogram_family_by_model(
            "ichat_shadow_seconds", "From the start of a copy to the end of its response.", list(self._seconds.items())
        )
        yield counter_family("ichat_shadow_tokens", "Tokens of copies, where responses say it.", "model", self._tokens)
