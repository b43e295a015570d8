"""Which trace a request belongs to (W3C Trace Context), and its span where OpenTelemetry's SDK is there.

Without the SDK a request costs one header: the client's trace goes on to the upstream, or a new one begins here. With
it, and with an endpoint to send to, each request is a span, whose id is the one that the upstream is told.
"""

# OpenTelemetry is not bundled: its types are not known where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import os
import random
import re
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any

import attrs

from ichat import __version__
from ichat.observability.request_record import RequestRecord

log = logging.getLogger(__name__)

NAMES = frozenset((b"traceparent", b"tracestate"))
"""Headers of a request that are made anew for the upstream."""
CLOSE_S = 5.0
"""How long the last spans may take to be sent, when the gateway ends."""
SHOWN_CHARACTERS_MAX = 256
"""Of what a client chose, in a span."""
PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_SERVICE = "ichat-gateway"
_METHOD = "POST"
"""Of every request to a model."""

_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)
"""Version, trace, parent, flags, and what a later version may have added."""
_FLAGS = 0x03
"""Sampled, and random (level 2 of the specification); all others are to be sent as 0."""
_MEMBER = re.compile(rb"[a-z0-9][-_*/@a-z0-9]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_MEMBERS_MAX = 32
_STATE_BYTES_MAX = 512
_LONG_MEMBER_BYTES = 128
"""Members longer than this are the first to go, where the state is too long."""

Pairs = Sequence[tuple[bytes, bytes]]


@attrs.define  # not frozen, as `Trace`: what each request makes is to be made fast
class Parent:
    """What a client says of the trace that its request belongs to."""

    trace_id: bytes
    """32 hexadecimal digits, as in the header."""
    span_id: bytes
    """16 of them."""
    flags: int
    state: bytes
    """The `tracestate` that goes with it; empty for none."""


@attrs.define
class Trace:
    """The trace of one request, as seen from here."""

    id: str
    """32 hexadecimal digits."""
    headers: list[tuple[bytes, bytes]]
    """For the upstream, in place of the client's own."""
    span: Any = None
    """OpenTelemetry's, where there is one."""


def read_parent(headers: Pairs) -> Parent | None:
    """Read what the headers of a request, their names in lower case, say of its trace; None where that is not valid.

    A version later than 00 is read as 00, as far as it goes.
    """
    found = None
    states: list[bytes] = []
    for name, value in headers:
        if name in NAMES:
            if name == b"tracestate":
                states.append(value)
            elif found is None:
                found = value
            else:
                return None
    match = _PARENT.fullmatch(found) if found is not None else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if more is not None and version == b"00":
        return None
    return Parent(trace_id, span_id, int(flags, 16) & _FLAGS, _combined(states) if states else b"")


def _combined(states: Sequence[bytes]) -> bytes:
    """Make one `tracestate` of all: empty where one is not valid, without its last members where it is too long."""
    members = [member for state in states for part in state.split(b",") if (member := part.strip(b" \t"))]
    if len(members) > _MEMBERS_MAX or not all(map(_MEMBER.fullmatch, members)):
        return b""
    size = sum(map(len, members)) + len(members) - 1
    for least in (_LONG_MEMBER_BYTES, 0):
        for at in range(len(members) - 1, -1, -1):
            if size > _STATE_BYTES_MAX and len(members[at]) > least:
                size -= len(members.pop(at)) + 1
    return b",".join(members)


def _new_id(bits: int) -> int:
    """Give a random number that is not 0."""
    return random.getrandbits(bits) or 1


class Tracing:
    """Gives each request its trace, and notes nothing."""

    def __repr__(self) -> str:
        return "<Tracing: no spans>"

    def begin(self, headers: Pairs, path: bytes, *, is_known: bool) -> Trace:
        """Give the trace of a request that begins now: the client's, if its headers name one, else a new one.

        `is_known` says that the path is one of few, so that spans may be named by it.
        """
        parent = read_parent(headers)
        if parent is None:
            trace_id = b"%032x" % _new_id(128)
            return Trace(trace_id.decode(), [(b"traceparent", b"00-%b-%016x-00" % (trace_id, _new_id(64)))])
        value = b"00-%b-%b-%02x" % (parent.trace_id, parent.span_id, parent.flags)  # nobody would know a span of ours
        told = [(b"traceparent", value)]
        if parent.state:
            told.append((b"tracestate", parent.state))
        return Trace(parent.trace_id.decode(), told)

    def end(self, trace: Trace, record: RequestRecord) -> None:
        """Note that a request has ended."""

    def close(self) -> None:
        """Send what has not been sent yet; it blocks for `CLOSE_S` at most."""


class SpanTracing(Tracing):
    """Gives each request its trace, and makes it a span there."""

    def __init__(self, provider: Any) -> None:
        """`provider` is an `opentelemetry.sdk.trace.TracerProvider`."""
        from opentelemetry import context, trace

        self._api: Any = trace
        self._nothing = context.Context()
        self._provider = provider
        self._tracer = provider.get_tracer("ichat", __version__)

    def __repr__(self) -> str:
        return f"<SpanTracing: {self._provider.resource.attributes.get('service.name')}>"

    def begin(self, headers: Pairs, path: bytes, *, is_known: bool) -> Trace:
        shown = path.decode("latin-1")[:SHOWN_CHARACTERS_MAX]
        attributes = {"http.request.method": _METHOD, "url.path": shown}
        if is_known:
            attributes["http.route"] = shown
        span = self._tracer.start_span(
            f"{_METHOD} {shown}" if is_known else _METHOD,
            self._around(read_parent(headers)),
            self._api.SpanKind.SERVER,
            attributes,
        )
        ours = span.get_span_context()
        value = f"00-{ours.trace_id:032x}-{ours.span_id:016x}-{ours.trace_flags & _FLAGS:02x}"
        told = [(b"traceparent", value.encode())]
        if ours.trace_state:
            told.append((b"tracestate", ours.trace_state.to_header().encode()))
        return Trace(f"{ours.trace_id:032x}", told, span)

    def _around(self, parent: Parent | None) -> Any:
        """Give the context that a span begins in."""
        if parent is None:
            return self._nothing
        api = self._api
        theirs = api.SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=api.TraceFlags(parent.flags),
            trace_state=api.TraceState.from_header([parent.state.decode()]) if parent.state else None,
        )
        return api.set_span_in_context(api.NonRecordingSpan(theirs), self._nothing)

    def end(self, trace: Trace, record: RequestRecord) -> None:
        span = trace.span
        if span.is_recording():
            status, error = record.status, record.error
            failed = status >= 500 or (bool(error) and status < 400)
            facts = {
                "http.response.status_code": status,
                "error.type": error or (str(status) if failed else ""),
                "gen_ai.request.model": record.model[:SHOWN_CHARACTERS_MAX].encode(errors="replace").decode(),
                "ichat.worker": record.worker,
                "ichat.queue_ms": round(record.queued_s * 1000, 2),
                "ichat.phase": record.phase,
            }
            span.set_attributes({name: value for name, value in facts.items() if value != ""})
            if failed:
                span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if thread.is_alive():
            log.warning("the last spans could not be sent within %g s", CLOSE_S)


def open_tracing() -> Tracing:
    """Give the tracing that the environment asks for (`OTEL_…`), and say where spans go.

    Spans are sent where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set and OpenTelemetry's
    SDK is installed; everything else is as the SDK reads it. What is wrong there is said, and stops nobody.
    """
    env = os.environ
    name = next((name for name in _ENDPOINTS if env.get(name)), None)
    is_off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if name is None or is_off or env.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        log.debug("no spans are sent: %s", "switched off" if name else f"{_ENDPOINTS[1]} is not set")
        return Tracing()
    try:
        tracing = SpanTracing(_provider())
    except ImportError as error:
        log.warning(
            "%s is set, but no spans are sent, for want of a package (%s): install %s for %s",
            name, error.name, PACKAGES, sys.executable,
        )  # fmt: skip
        return Tracing()
    except (ValueError, OSError) as error:
        log.warning("no spans are sent: %s", error)
        return Tracing()
    log.info("spans are sent to %s: %r", _shown(env[name]), tracing)
    return tracing


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def _provider() -> Any:
    """Make what spans go through: queue and thread are the SDK's. Raises ImportError, ValueError, OSError."""
    import importlib

    env = os.environ
    protocol = (
        env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    )
    if protocol not in _EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be one of {', '.join(_EXPORTERS)}, not {protocol!r}")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: Any = importlib.import_module(_EXPORTERS[protocol])
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": _SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # its own end has no bound
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter()))
    return provider


def _shown(address: str) -> str:
    """Give an address without what may be secret in it."""
    parts = urllib.parse.urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
