"""Counts of requests for names that stand for models: which model answered, and why others did not."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from ichat.observability.request_record import OTHER, RequestRecord

SERIES_MAX = 1000
"""Series of each family; if reloads bring more names, the others are counted together."""


class AliasCounts:
    """The counts. Names, models and reasons are the configuration's."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], int] = {}
        self._passed: dict[tuple[str, str, str], int] = {}

    def __repr__(self) -> str:
        return f"<AliasCounts {len(self._requests)} series>"

    def add(self, record: RequestRecord) -> None:
        """Count a request for such a name."""
        key = (record.alias, record.model)
        if key not in self._requests and len(self._requests) >= SERIES_MAX:
            key = (OTHER, OTHER)
        self._requests[key] = self._requests.get(key, 0) + 1
        for model, reason in record.passed:
            place = (record.alias, model, reason)
            if place not in self._passed and len(self._passed) >= SERIES_MAX:
                place = (OTHER, OTHER, reason)
            self._passed[place] = self._passed.get(place, 0) + 1

    def families(self) -> Iterator[Metric]:
        """Return the families with the current counts."""
        requests = CounterMetricFamily(
            "ichat_alias_requests",
            "Requests for names that stand for models, by the model that answered or was asked last.",
            labels=("alias", "model"),
        )
        for key, count in list(self._requests.items()):
            requests.add_metric(key, count)
        yield requests
        passed = CounterMetricFamily(
            "ichat_alias_fallbacks",
            "How often a request went on from a model to the next one of its name, by the reason.",
            labels=("alias", "model", "reason"),
        )
        for place, count in list(self._passed.items()):
            passed.add_metric(place, count)
        yield passed
