"""The gaps between the pieces of streams, which a relay counts and its owner adds up. They are sent each second."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

from ichat.http.body_mover import ChunkGapHistogram, empty_gap_histogram
from ichat.relays.values import Note, TalkError


class GapsHere:
    """The gaps that a relay has counted since its last report, for each model."""

    def __init__(self) -> None:
        self._of_models: defaultdict[str, ChunkGapHistogram] = defaultdict(empty_gap_histogram)

    def __repr__(self) -> str:
        return f"<GapsHere of {len(self._of_models)} models>"

    def of(self, model: str) -> ChunkGapHistogram:
        """Return the histogram of a model: streams may count there for as long as they last."""
        return self._of_models[model]

    def note(self) -> Note | None:
        """Return the frame for the owner; None if nothing was counted."""
        found = self.report()
        return Note("sums", 0, {"gaps": found}) if found else None

    def report(self) -> dict[str, list[list[float]]]:
        """Return the counts that are not 0, each with its index, by models; all are 0 afterwards."""
        found: dict[str, list[list[float]]] = {}
        for model, counts in self._of_models.items():
            rows = [[index, count] for index, count in enumerate(counts) if count]
            if rows:
                found[model] = rows
                counts[:] = empty_gap_histogram()
        return found


def add_gaps(report: Any, of: Callable[[str], ChunkGapHistogram]) -> None:
    """Add a report to the histograms of this process. Raises TalkError for a damaged report."""
    if not isinstance(report, Mapping):
        raise TalkError("The sums of gaps are no object.")
    models = cast("Mapping[str, Any]", report)
    try:
        for model, rows in models.items():
            counts = of(str(model))
            for index, count in rows:
                if type(index) is not int or not 0 <= index < len(counts) or not count >= 0:
                    raise TalkError(f"A sum of gaps is {count!r} at {index!r}.")
                counts[index] += count
    except (TypeError, ValueError) as error:
        raise TalkError(f"The sums of gaps are damaged: {error}.") from error
