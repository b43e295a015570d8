"""The requests that have ended: the operators' answer to the question what happened to a request some minutes ago.

Each is kept as the bytes of its record, so that its end touches a few hundred bytes that no cache has, and not the
memory of twenty objects. All else is derived when an operator asks.
"""

import marshal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, cast

import attrs
import trio

from ichat.config.schema import Config
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.observability.access_log import shown_path
from ichat.observability.request_record import CLIENT_LEFT, LABELS, OTHER, RequestRecord
from ichat.protocol.messages import Count
from ichat.protocol.usage import UsedTokens
from ichat.proxy.planes import is_control

REFUSED_SHARE = 10
"""A tenth as many requests are kept that were refused before they were for a model: a scanner replaces no others."""
TEXTS_MAX = 100
"""Longer texts of a request, counted together, are cut."""
NAME_MAX = 96
NAME_MAX_BEYOND_ASCII = 24
"""The most characters of a name that is cut: other characters than ASCII may need four times the memory."""
PATH_MAX = 64
METHOD_MAX = 16
_FORMAT = 2
"""Of `marshal`: the newest without references, which cost more than they save. The bytes never leave this process."""
_NAMES = tuple(
    one.name
    for one in attrs.fields(RequestRecord)
    if one.name not in ("usage", "span", "prefix", "is_counted", "passed")
)
_FIELDS = attrgetter(*_NAMES)
PASSED_MAX = 8
"""The most models that are kept of those that a request has passed over."""


@attrs.frozen
class PassedModel:
    """A model that could not answer a request."""

    model: str
    reason: str


@attrs.frozen
class RequestPhases:
    """The phases of a request that has ended, which follow each other. Null: it has not got that far."""

    queued_s: float
    """Seconds for which it waited for a worker."""
    overhead_s: float | None
    """Seconds of the gateway before it asked the worker, earlier attempts included, and the queue not."""
    head_s: float | None
    """Seconds from then to the head of the response."""
    first_s: float | None
    """Seconds from there to the first piece of the body: the first token of a stream."""
    body_s: float | None
    """Seconds from there to the end."""


@attrs.frozen
class RequestTokens:
    """The tokens that a request has used."""

    input: Count
    """Of its prompt, cached tokens included."""
    output: Count
    cached: Count
    """How many of the prompt's the engine had in its cache."""
    is_estimate: bool
    """Whether the engine has not counted them all."""


@attrs.frozen
class FinishedRequest:
    """A request that has ended."""

    id: str
    """The client's own, if it sent an id; several requests may have it."""
    own_id: str
    """The gateway's; `id` if that is the gateway's, or if the head of the request was refused."""
    key: str
    """The name of the client's key; empty if it has none."""
    client: str
    """The client's address."""
    method: str
    path: str
    route: str
    """The route's label in metrics, for example `/v1/chat/completions`."""
    model: str
    """The model that answered, or was asked last; empty if no model was read."""
    alias: str
    """The name that it asked for, if that stands for models."""
    passed: Sequence[PassedModel]
    """The models that could not answer it before."""
    worker: str
    """The worker or external route that was asked last; empty: none was."""
    status: Count
    """Of the response; 499: the client disconnected."""
    error: str
    """The code of the error; empty if the request went well."""
    phase: str
    """The phase in which it was cut off, as requests in flight have it; empty: it was not."""
    started_at: float
    """In seconds since 1970."""
    ended_at: float
    duration_s: float
    phases: RequestPhases
    tokens: RequestTokens | None
    """Null: not known."""
    bytes_in: Count
    bytes_out: Count
    chunks: Count
    """Pieces of the response's body, as the gateway has read them."""
    trace_id: str


@attrs.frozen
class FinishedRequestsView:
    """The requests that have ended, newest first."""

    requests: Sequence[FinishedRequest]
    since: float
    """When this process began to keep them, in seconds since 1970: no earlier request is known."""
    kept_max: Count
    """How many are kept (`logs.finished_requests_max`)."""


@attrs.frozen
class FinishedQuery:
    """Which of the finished requests are wanted; None: any."""

    limit: int
    id: str | None = None
    """Of the client or of the gateway."""
    model: str | None = None
    """The model, or the name that stands for it."""
    key: str | None = None
    worker: str | None = None
    failed: bool = False
    """Only requests that ended with an error, or were cut off."""

    def selects(self, record: RequestRecord) -> bool:
        """Return whether a request is wanted."""
        is_failed = bool(record.error) or record.status >= 400
        names = (record.model, record.alias)
        wanted = [
            (self.id, (record.id, record.own_id)),
            (self.model and _short(self.model), tuple(map(_short, names))),
            (self.key, (record.key_name,)),
            (self.worker, (record.worker,)),
        ]
        return (is_failed or not self.failed) and all(value is None or value in known for value, known in wanted)


class FinishedRequests:
    """The newest requests that have ended. It is a `RecordSink`."""

    def __init__(self, kept_max: int) -> None:
        """Keep `kept_max` requests to models; 0: none."""
        self._since = time.time()
        self._to_models: deque[bytes] = deque(maxlen=kept_max)
        self._refused: deque[bytes] = deque(maxlen=_refused_max(kept_max))
        """Requests that were for no model: their head was refused, or their path is no route."""

    def __repr__(self) -> str:
        return f"<FinishedRequests {len(self._to_models)} of {self.kept_max}>"

    @property
    def kept_max(self) -> int:
        """The most requests to models that are kept."""
        return self._to_models.maxlen or 0

    def reconfigure(self, config: Config) -> None:
        """Keep as many as another configuration says."""
        kept_max = config.logs.finished_requests_max
        if kept_max != self.kept_max:
            self._to_models = deque(self._to_models, kept_max)
            self._refused = deque(self._refused, _refused_max(kept_max))

    def ended(self, record: RequestRecord) -> None:
        """Keep a request, unless it went to the control plane. See `RecordSink`."""
        kept = self._to_models
        if not record.is_counted:
            if record.status < 400 or is_control(record.path.encode("latin-1", "replace")):
                return
            kept = self._refused
        if not kept.maxlen:
            return
        if record.passed or (len(record.model) + len(record.alias) + len(record.path) + len(record.method) > TEXTS_MAX):
            record = _cut(record)
        usage = record.usage
        passed = tuple(map(tuple, record.passed)) if record.passed else ()
        kept.append(marshal.dumps((_FIELDS(record), passed, None if usage is None else tuple(usage)), _FORMAT))

    def refused(self, error: ApiError, request_id: str, client: str, key_name: str, head: RequestHead | None) -> None:
        """Keep a refusal of bytes that were not yet a request, unless the client disconnected before."""
        if error.status == CLIENT_LEFT:
            return
        now, method, path = trio.current_time(), b"", b""
        if head is not None:
            method, path = head.method, head.path
        self.ended(RequestRecord(
            id=request_id, client=client, method=method.decode("latin-1"), path=shown_path(path),
            route=LABELS.get(path, OTHER), key_name=key_name, model="", status=error.status, error=error.code, phase="",
            started_at=now, ended_at=now, queued_s=0.0, bytes_in=0, bytes_out=0, usage=None, trace_id="",
            is_counted=False,
        ))  # fmt: skip

    def view(self) -> FinishedRequestsView:
        """Return how they are kept, without any of them; `select` has them."""
        return FinishedRequestsView((), self._since, self.kept_max)

    def select(self, query: FinishedQuery) -> Iterator[FinishedRequest]:
        """Yield the wanted requests, newest first."""
        now, wall_now, count = trio.current_time(), time.time(), 0
        records = map(_record_in, (*self._to_models, *self._refused))
        for record in sorted(records, key=attrgetter("ended_at"), reverse=True):
            if count == query.limit:
                return
            if query.selects(record):
                count += 1
                yield view_of(record, wall_now - now)


def _record_in(data: bytes) -> RequestRecord:
    """Return a record that was kept, without its span and its prefix."""
    values, passed, usage = cast(
        "tuple[tuple[Any, ...], Sequence[tuple[str, str]], Sequence[Any] | None]",
        marshal.loads(data),  # noqa: S302 they are made here
    )
    return RequestRecord(
        **dict(zip(_NAMES, values, strict=True)), passed=passed, usage=None if usage is None else UsedTokens(*usage)
    )


def _refused_max(kept_max: int) -> int:
    return -(-kept_max // REFUSED_SHARE)


def _cut(record: RequestRecord) -> RequestRecord:
    """Return a request with texts of a bounded length; the sizes of ids and addresses are bounded already."""
    return attrs.evolve(
        record,
        model=_short(record.model), alias=_short(record.alias),
        path=record.path[:PATH_MAX], method=record.method[:METHOD_MAX], passed=tuple(record.passed[:PASSED_MAX]),
    )  # fmt: skip


def _short(name: str) -> str:
    length_max = NAME_MAX if name.isascii() else NAME_MAX_BEYOND_ASCII
    return name if len(name) <= length_max else f"{name[:length_max]}…"


def view_of(record: RequestRecord, offset_s: float) -> FinishedRequest:
    """Return a finished request for operators; `offset_s` is the time of day at which the record's clock is 0."""
    return FinishedRequest(
        id=record.id,
        own_id=record.own_id or record.id,
        key=record.key_name,
        client=record.client,
        method=record.method,
        path=record.path,
        route=record.route,
        model=record.model,
        alias=record.alias,
        passed=[PassedModel(*one) for one in record.passed],
        worker=record.worker,
        status=record.status,
        error=record.error,
        phase=record.phase,
        started_at=round(record.started_at + offset_s, 3),
        ended_at=round(record.ended_at + offset_s, 3),
        duration_s=round(record.ended_at - record.started_at, 6),
        phases=_phases_of(record),
        tokens=None if record.usage is None else RequestTokens(*record.usage),
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
        chunks=record.chunks,
        trace_id=record.trace_id,
    )


def _phases_of(record: RequestRecord) -> RequestPhases:
    asked_at = None
    if record.overhead_s is not None:
        asked_at = record.started_at + record.queued_s + record.overhead_s
    return RequestPhases(
        round(record.queued_s, 6),
        None if record.overhead_s is None else round(max(0.0, record.overhead_s), 6),
        _between(asked_at, record.answered_at),
        _between(record.answered_at, record.first_at),
        _between(record.first_at, record.ended_at),
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(max(0.0, end - begin), 6)
