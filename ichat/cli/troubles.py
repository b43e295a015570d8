"""Problems of a running gateway, in sentences: its configuration file, its workers, models without workers."""

import time
from collections.abc import Iterable, Iterator, Sequence

from ichat.cli.json_values import Json, list_of, object_of, objects_of
from ichat.cli.screen import one_line
from ichat.cli.views import names_of, reasons_of

BAD: frozenset[str] = frozenset(("failed", "broken", "unhealthy", "wedged", "restarting", "stale", "pending"))
"""The states of workers that an operator looks at."""
_EXPECTED = frozenset(("starting", "loading", "waking", "restarting", "draining", "stopped"))
"""The states of workers that are on their way, or do not serve by an operator's wish."""
_SHOWN_MAX = 20
"""The most problems of each kind that are named."""
_DAY_S = 24 * 3600


def troubles_of(status: Json, workers: Iterable[Json]) -> list[str]:
    """Return everything that is wrong, the configuration file first; nothing if all is well."""
    known = list(workers)
    told = config_sentence(object_of(status.get("config")))
    return [
        *([told] if told else []),
        *_some([f"worker {one.get('worker_id')} {why_of(one)}" for one in known if one.get("state") in BAD]),
        *_some(list(_not_served(objects_of(status.get("models")), known))),
    ]


def config_sentence(config: Json) -> str:
    """Return the problem of the configuration file; nothing if the file is in force, or nothing is known of it.

    It has all mistakes, since the file has no effect before the last mistake is corrected.
    """
    state, path = config.get("state"), config.get("path")
    since, in_force = time_of(config.get("since")), time_of(config.get("in_force_since"))
    before = f"the configuration of {in_force} is in force"
    if state == "changed":
        return one_line(f"{path} has changed at {since} and is not read yet; {before}")
    if state == "refused":
        errors = "; ".join(map(str, list_of(config.get("errors"))))
        return one_line(f"{path} is refused since {since}; {before}{f': {errors}' if errors else ''}")
    return ""


def why_of(worker: Json) -> str:
    """Return the state of a worker with the reason, as far as it is known."""
    return one_line(": ".join([f"is {worker.get('state')}", *reasons_of(worker)]))


def time_of(at: object) -> str:
    """Return a time as an operator reads it: without the day if that is today."""
    if not isinstance(at, int | float) or not 0 <= at < 2**36:
        return "?"
    form = "%H:%M" if abs(time.time() - at) < _DAY_S else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(at))


def _not_served(models: Iterable[Json], workers: Sequence[Json]) -> Iterator[str]:
    """Yield the models that nothing serves, and no worker is about to, unless on demand or stopped by an operator."""
    expected = {name for one in workers if one.get("state") in _EXPECTED for name in names_of(one)}
    for model in models:
        if model.get("workers") == 0 and model.get("loaded") is None and model.get("id") not in expected:
            yield one_line(f"model {model.get('id')} has no replicas: no worker and no route can take a request for it")


def _some(sentences: Sequence[str]) -> Sequence[str]:
    left = len(sentences) - _SHOWN_MAX
    return sentences if left <= 0 else [*sentences[:_SHOWN_MAX], f"and {left} more like these"]
