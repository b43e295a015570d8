"""The handlers that show usage: all of it to operators, and its own to each client's key."""

import datetime as dt
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trio
from attrs import field, frozen
from quart import Response, g

from ichat.admin.context import long_response, query_string
from ichat.admin.lists import joined, to_json
from ichat.admin.operations import TEXT, Operations, answer_of, query
from ichat.admin.reload import Reloader
from ichat.admin.schemas import PARTS, Schema, object_of, view
from ichat.errors import ApiError, bad_request, forbidden
from ichat.observability.logs.lines import read_timestamp
from ichat.observability.logs.stream import read_parameters
from ichat.observability.usage.ledger import OK, Ledger
from ichat.observability.usage.queries import COLUMNS, SPANS, UsageQuestion
from ichat.observability.usage.report import COUNTED, UsageReport, csv_lines, report_of, time_of
from ichat.observability.usage.store import GROUPS_MAX, TooManyGroups
from ichat.security.period_limits import PeriodStanding, month_start
from ichat.security.rate_limits import Quotas

FORMATS = ("json", "csv")
_REPORTS = trio.CapacityLimiter(1)
"""Adding up an answer lasts up to a third of a second: it is done in a thread, for a single answer at a time."""
_OWN = ("from", "to", "by", "model", "format")
_ALL = (*_OWN, "key")
_INNER = ("key", "endpoint")
"""Groupings that a client may not use: it has a single key, and may not see the workers."""
_BY = ("key", "model")
_SECONDS = re.compile(r"\d{1,11}(\.\d{1,6})?")
_LATEST = 253402300799
"""The last second that has a date."""


@frozen
class UsedLimit:
    """How much of a limit for a day or a month a key has used."""

    limit: str
    """Its key in the configuration."""
    allowed: float
    used: float
    left: float
    begins_anew: str = field(metadata={"schema": {"format": "date-time"}})
    """When the day or the month ends."""


_NOT_KEPT = "The gateway keeps no usage (`no_usage`): see `[usage]`."
_WHOLE = "Its minute counts as a whole; where only hours are kept, an hour counts by its first minute."
_FAILURES = {"400": "A parameter is wrong, or the answer would be too long.", "409": _NOT_KEPT}
_SPAN = "by a single unit of time: a minute is known for `usage.minute_days`, and then its hour"
_COMMON: Sequence[Schema] = (
    query("from", TEXT, f"ISO 8601 (UTC), or seconds since 1970; left out: the beginning of this month. {_WHOLE}"),
    query("to", TEXT, f"The same; left out: now. {_WHOLE}"),
    query("model", TEXT, "Only of the model of this name."),
    query("format", {"enum": [*FORMATS], "default": FORMATS[0]}, "How the rows are written."),
)

operations = Operations("usage")


def _answer(name: str) -> Schema:
    answer = answer_of(name)
    return {**answer, "content": {**answer["content"], "text/csv": {"schema": TEXT}}}


@operations.add(
    "GET /v1/admin/usage",
    tag="cluster",
    response=_answer("Usage"),
    parameters=[
        query("by", TEXT, f"Names of {', '.join(COLUMNS)}, with commas: at most {_SPAN}. Left out: key,model."),
        query("key", TEXT, "Only of the key of this name."),
        *_COMMON,
    ],
    failures=_FAILURES,
)
async def get_usage(ledger: Ledger, reloader: Reloader) -> Response:
    """Return the usage of clients and models, and its cost."""
    question, form = read_question(query_string(), _ALL, _BY)
    report, storage = await _report(question, ledger, reloader)
    return _response(question, report, form, {"storage": storage})


@operations.add(
    "GET /v1/usage",
    tag="models",
    response=_answer("OwnUsage"),
    parameters=[
        query("by", TEXT, f"As for all usage, without the key: at most {_SPAN}. Left out: model."),
        *_COMMON,
    ],
    failures=_FAILURES,
)
async def get_own_usage(ledger: Ledger, reloader: Reloader, quotas: Quotas) -> Response:
    """Return the usage of the caller's key, and its limits."""
    key = g.caller.key_name
    if not key:
        raise forbidden("This shows the usage of a client's key, and no key was sent: operators use /v1/admin/usage.")
    question, form = read_question(query_string(), _OWN, ("model",), key)
    report, storage = await _report(question, ledger, reloader)
    storage = storage if storage == OK else "not all is counted yet"  # where it is kept concerns operators alone
    limits = [_limit(one) for one in quotas.standings(key)]
    return _response(question, report, form, {"storage": storage, "key": key, "limits": limits})


async def _report(question: UsageQuestion, ledger: Ledger, reloader: Reloader) -> tuple[UsageReport, str]:
    """Return the answer to a question, and the state of the disk. Raises ApiError."""
    if not ledger.enabled:
        raise ApiError(409, "no_usage", "This gateway keeps no usage: set [usage] enabled = true and start it again.")
    try:
        groups, storage = await ledger.read(question)
    except TooManyGroups:
        raise bad_request(
            f"This answer would have more than {GROUPS_MAX} rows, or is too slow: ask for a shorter time, or for"
            " hours, days or months."
        ) from None
    report = await trio.to_thread.run_sync(report_of, question, groups, reloader.config.prices, limiter=_REPORTS)
    return report, storage


def read_question(
    query: str, known: Sequence[str], by: Sequence[str], key: str | None = None
) -> tuple[UsageQuestion, str]:
    """Return the question in the query of a target, and the format of the answer. Raises ApiError 400.

    `by` is the default grouping; `key`, if it is given, is the only key that counts.
    """
    values, now = read_parameters(query, known), time.time()
    by = _grouping(values, by, [name for name in COLUMNS if key is None or name not in _INNER])
    since = _time_in(values, "from", month_start(now))
    until = _time_in(values, "to", now)
    if until < since:
        raise bad_request("from must be before to.", param="from")
    form = values.get("format", "json")
    if form not in FORMATS:
        raise bad_request(f"format must be one of {', '.join(FORMATS)}, not {form!r}.", param="format")
    return UsageQuestion(since, until, by, key if key is not None else values.get("key"), values.get("model")), form


def _grouping(values: Mapping[str, str], default: Sequence[str], columns: Sequence[str]) -> Sequence[str]:
    """Return the columns by which a query groups. Raises ApiError 400."""
    by = tuple(filter(None, values["by"].split(","))) if "by" in values else default
    if set(by) - set(columns) or len(set(by)) < len(by) or len(set(by) & SPANS.keys()) > 1:
        names = ", ".join(columns)
        raise bad_request(f"by must be names of {names}, each once and with a single unit of time at most.", param="by")
    return by


def _time_in(values: Mapping[str, str], name: str, default: float) -> float:
    """Return a time of a query in seconds since 1970. Raises ApiError 400."""
    text = values.get(name)
    if text is None:
        return default
    try:
        if _SECONDS.fullmatch(text):
            at = float(text)
        else:
            parsed = read_timestamp(text)
            at = (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=dt.timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        at = -1.0
    if not (math.isfinite(at) and 0 <= at <= _LATEST):
        raise bad_request(
            f"{name} must be a time such as 2026-11-23 or 2026-11-23T04:00Z (UTC), not {text!r}.", param=name
        )
    return at


def _limit(one: PeriodStanding) -> UsedLimit:
    return UsedLimit(one.limit, one.allowed, one.used, max(0.0, one.allowed - one.used), time_of(one.ends_at))


def _response(question: UsageQuestion, report: UsageReport, form: str, more: Mapping[str, Any]) -> Response:
    is_csv = form == "csv"
    content_type = "text/csv; charset=utf-8" if is_csv else "application/json"
    parts = csv_lines(report) if is_csv else _json_parts(question, report, more)
    response = long_response(parts, content_type)
    if is_csv:
        response.headers["content-disposition"] = 'attachment; filename="usage.csv"'
    return response


def _json_parts(question: UsageQuestion, report: UsageReport, more: Mapping[str, Any]) -> Iterator[str]:
    head = {"from": time_of(question.since), "to": time_of(question.until), "by": list(report.by)}
    yield f'{to_json(head)[:-1]}, "rows": ['
    yield from joined(map(to_json, report.rows))
    yield f"], {to_json({'totals': report.totals, **more})[1:]}"


def schemas() -> dict[str, Schema]:
    """Return the schemas of answers about usage."""
    names, parts = dict.fromkeys(COLUMNS, TEXT), PARTS["properties"]
    counts, edges = {name: parts["counts"][name] for name in COUNTED}, parts["usage"]
    row = object_of({**names, **counts}, "Of the names and times, those of `by`.", required=list(counts))
    usage: dict[str, Schema] = {
        "from": edges["from"],
        "to": edges["to"],
        "by": {"type": "array", "items": {"enum": list(COLUMNS)}},
        "rows": {"type": "array", "items": row},
        "totals": object_of(counts),
        "storage": edges["storage"],
    }
    own: dict[str, Schema] = {
        "key": {"type": "string", "description": "The name of the key."},
        "limits": {"type": "array", "items": view(UsedLimit), "description": "The key's, for a day and a month."},
    }
    return {"Usage": object_of(usage), "OwnUsage": object_of({**usage, **own})}
