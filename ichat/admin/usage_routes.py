"""The handlers that show who used what: everything to operators, and its own to each client's key."""

import datetime as dt
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trio
from quart import Blueprint, Response, g, request

from ichat.admin.lists import Pieces, to_json
from ichat.admin.routes import context
from ichat.errors import ApiError, bad_request, forbidden
from ichat.observability.logs.stream import read_parameters
from ichat.observability.usage.ledger import OK
from ichat.observability.usage.queries import COLUMNS, SPANS, UsageQuestion
from ichat.observability.usage.report import UsageReport, csv_lines, report_of, time_of
from ichat.observability.usage.store import GROUPS_MAX, TooManyGroups
from ichat.security.period_limits import PeriodStanding, month_start

routes = Blueprint("usage", __name__)

FORMATS = ("json", "csv")
_REPORTS = trio.CapacityLimiter(1)
"""Adding up an answer takes up to a third of a second: it is done aside, one answer at a time."""
_OWN = ("from", "to", "by", "model", "format")
_ALL = (*_OWN, "key")
_INNER = ("key", "endpoint")
"""By what a client cannot have its own usage shown: it has one key, and which workers there are is not for it."""
_BY = ("key", "model")
_SECONDS = re.compile(r"\d{1,11}(\.\d{1,6})?")
_LATEST = 253402300799
"""The last second that has a date."""


@routes.get("/v1/admin/usage")
async def _usage() -> Response:
    question, form = read_question(request.query_string.decode("latin-1"), _ALL, _BY)
    report, storage = await _report(question)
    return _response(question, report, form, {"storage": storage})


@routes.get("/v1/usage")
async def _own_usage() -> Response:
    key = g.caller.key_name
    if not key:
        raise forbidden("This shows the usage of a client's key, and no key was sent: operators use /v1/admin/usage.")
    query = request.query_string.decode("latin-1")
    question, form = read_question(query, _OWN, ("model",), key)
    report, storage = await _report(question)
    storage = storage if storage == OK else "not all is counted yet"  # where it is kept concerns operators alone
    standings = [_standing(one) for one in context().quotas.standings(key)]
    return _response(question, report, form, {"storage": storage, "key": key, "limits": standings})


async def _report(question: UsageQuestion) -> tuple[UsageReport, str]:
    """Return the answer to a question, and what is to be said of the disk. Raises ApiError."""
    here = context()
    if not here.ledger.enabled:
        raise ApiError(409, "no_usage", "This gateway keeps no usage: set [usage] enabled = true and start it again.")
    try:
        groups, storage = await here.ledger.read(question)
    except TooManyGroups:
        raise bad_request(
            f"This answer would have more than {GROUPS_MAX} rows, or take too long: ask for a shorter time, or for"
            " hours, days or months."
        ) from None
    report = await trio.to_thread.run_sync(report_of, question, groups, here.reloader.config.prices, limiter=_REPORTS)
    return report, storage


def read_question(
    query: str, known: Sequence[str], by: Sequence[str], key: str | None = None
) -> tuple[UsageQuestion, str]:
    """Return what the query of a target asks, and the format of the answer. Raises ApiError 400.

    `by` is what it is shown by where the query does not say it, and `key` the only one that counts, if it is given.
    """
    values, now = read_parameters(query, known), time.time()
    if "by" in values:
        by = tuple(filter(None, values["by"].split(",")))
    columns = COLUMNS if key is None else [name for name in COLUMNS if name not in _INNER]
    wrong = [one for one in by if one not in columns]
    if wrong or len(set(by)) < len(by) or len(set(by) & SPANS.keys()) > 1:
        names = ", ".join(columns)
        raise bad_request(f"by must be names of {names}, each once and with one unit of time at most.", param="by")
    since = _time_in(values, "from", month_start(now))
    until = _time_in(values, "to", now)
    if until < since:
        raise bad_request("from must be before to.", param="from")
    form = values.get("format", "json")
    if form not in FORMATS:
        raise bad_request(f"format must be one of {', '.join(FORMATS)}, not {form!r}.", param="format")
    return UsageQuestion(since, until, by, key if key is not None else values.get("key"), values.get("model")), form


def _time_in(values: Mapping[str, str], name: str, default: float) -> float:
    """Return a time of a query in seconds since 1970. Raises ApiError 400."""
    text = values.get(name)
    if text is None:
        return default
    try:
        if _SECONDS.fullmatch(text):
            at = float(text)
        else:
            parsed = dt.datetime.fromisoformat(text)
            at = (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        at = -1.0
    if not (math.isfinite(at) and 0 <= at <= _LATEST):
        raise bad_request(
            f"{name} must be a time such as 2026-11-23 or 2026-11-23T04:00Z (UTC), not {text!r}.", param=name
        )
    return at


def _standing(one: PeriodStanding) -> Mapping[str, Any]:
    left = max(0.0, one.allowed - one.used)
    return {
        "limit": one.limit, "allowed": one.allowed, "used": one.used, "left": left, "begins_anew": time_of(one.ends_at),
    }  # fmt: skip


def _response(question: UsageQuestion, report: UsageReport, form: str, more: Mapping[str, Any]) -> Response:
    is_csv = form == "csv"
    content_type = "text/csv; charset=utf-8" if is_csv else "application/json"
    parts = csv_lines(report) if is_csv else _json_parts(question, report, more)
    response = Response(b"" if request.method == "HEAD" else Pieces(parts), content_type=content_type)
    if is_csv:
        response.headers["content-disposition"] = 'attachment; filename="usage.csv"'
    return response


def _json_parts(question: UsageQuestion, report: UsageReport, more: Mapping[str, Any]) -> Iterator[str]:
    head = {"from": time_of(question.since), "to": time_of(question.until), "by": list(report.by)}
    yield f'{to_json(head)[:-1]}, "rows": ['
    for number, row in enumerate(report.rows):
        yield (", " if number else "") + to_json(row)
    yield f"], {to_json({'totals': report.totals, **more})[1:]}"
