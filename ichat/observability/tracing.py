"""The trace that a request belongs to (W3C Trace Context), and its span if OpenTelemetry's SDK is installed.

Without the SDK the client's headers are passed on untouched, or new headers begin a trace. With the SDK and an
endpoint for spans, each request is a span; the SDK reads the client's headers and writes those for the upstream.
"""

# OpenTelemetry is not bundled: its types are not known where it is not installed.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import os
import random
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ichat import __version__
from ichat.http.body_mover import ByteObserver
from ichat.observability.request_record import CLIENT_LEFT, RequestRecord
from ichat.observability.request_span import RequestSpan

log = logging.getLogger(__name__)

NAMES = frozenset((b"traceparent", b"tracestate"))
"""Headers of a request that `Trace.headers` replaces."""
CLOSE_S = 5.0
"""The limit on sending the last spans, when the gateway ends."""
SHOWN_CHARACTERS_MAX = 256
"""The longest text in a span that a client chose, in characters."""
PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_SERVICE = "ichat-gateway"
_METHOD = "POST"
"""Of every request to a model."""

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The names of the routes' requests in OpenTelemetry's conventions for generative AI."""
_GENERATES = frozenset(("chat", "text_completion"))
"""The operations with a reason for the end of a response."""
_OURS = "ichat"
"""The provider of an answer that is the gateway's own."""
FIRST_TOKEN = "ichat.first_token"  # noqa: S105
"""The event at the first piece of a stream: the conventions have an attribute for it, and no event."""

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.DOTALL)
"""The text that is passed on: the access log uses the trace's id, and the upstream validates the rest."""

Pairs = Sequence[tuple[bytes, bytes]]


@attrs.define
class Trace:
    """The trace of a request, as seen from here."""

    id: str
    """32 hexadecimal digits."""
    headers: Pairs
    """For the upstream, in place of the client's own; empty once there is a response, since that can last an hour."""
    span: RequestSpan | None = None
    watch: Callable[[ByteObserver | None], ByteObserver] | None = None
    """Returns an observer of a response's body for the span; None: no span is sent."""


class Tracing:
    """Gives each request its trace, and notes nothing."""

    sends_spans = False
    """Whether `ended` does anything."""

    def __repr__(self) -> str:
        return "<Tracing: no spans>"

    def begin(self, headers: Pairs, path: bytes, *, is_known: bool) -> Trace:
        """Return the trace of a request that begins now: the client's if its headers name a trace, else a new trace.

        `is_known` says that the path is among a few, so that spans may be named by it.
        """
        for name, value in headers:
            if name == b"traceparent" and (found := _TRACEPARENT.fullmatch(value)):
                return Trace(found[1].decode(), [header for header in headers if header[0] in NAMES])
        trace_id = f"{random.getrandbits(128) | 1:032x}"
        return Trace(trace_id, ((b"traceparent", b"00-%b-%016x-00" % (trace_id.encode(), random.getrandbits(64) | 1)),))

    def find_providers(self, provider_of: Callable[[str], str]) -> None:
        """Have this function return the provider of an endpoint's answers, by the endpoint's id."""

    def ended(self, record: RequestRecord) -> None:
        """End the span of a request; see `RecordSink`."""

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send the remaining spans; it blocks for `within_s` at most."""


class SpanTracing(Tracing):
    """Gives each request its trace, and makes it a span there."""

    sends_spans = True

    def __init__(self, provider: Any, *, has_usage: bool = True) -> None:
        """`provider` is an `opentelemetry.sdk.trace.TracerProvider`; `has_usage`: spans have the tokens."""
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api: Any = trace
        self._nothing = context.Context()
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # it warns of headers that clients choose
        self._propagator: Any = TraceContextTextMapPropagator()
        self._provider = provider
        self._has_usage = has_usage
        self._provider_of: Callable[[str], str] = str
        self._tracer = provider.get_tracer("ichat", __version__)

    def __repr__(self) -> str:
        return f"<SpanTracing: {self._provider.resource.attributes.get('service.name')}>"

    def begin(self, headers: Pairs, path: bytes, *, is_known: bool) -> Trace:
        carrier: dict[str, list[str]] = {}
        for name, value in headers:
            if name in NAMES:
                carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
        shown = path.decode("latin-1")[:SHOWN_CHARACTERS_MAX]
        attributes = {"http.request.method": _METHOD, "url.path": shown}
        if is_known:
            attributes["http.route"] = shown
        span = self._tracer.start_span(
            f"{_METHOD} {shown}" if is_known else _METHOD,
            self._propagator.extract(carrier, self._nothing),
            self._api.SpanKind.SERVER,
            attributes,
        )
        told: dict[str, str] = {}
        self._propagator.inject(told, self._api.set_span_in_context(span, self._nothing))
        trace_id = f"{span.get_span_context().trace_id:032x}"
        headers, seen = [(name.encode(), value.encode("latin-1")) for name, value in told.items()], RequestSpan(span)
        return Trace(trace_id, headers, seen, seen.watch)

    def find_providers(self, provider_of: Callable[[str], str]) -> None:
        self._provider_of = provider_of

    def ended(self, record: RequestRecord) -> None:
        if record.span is None:
            return
        span = record.span.span
        if span.is_recording():
            status, error = record.status, record.error
            failed = status >= 500 or (bool(error) and status < 400)
            facts = {
                "http.response.status_code": status,
                "error.type": error or (str(status) if failed else ""),
                "ichat.worker": record.worker,
                "ichat.queue_ms": round(record.queued_s * 1000, 2),
                "ichat.phase": record.phase,
                **self._model_facts(record),
                **_response_facts(record, record.span),
                **(_usage_of(record) if self._has_usage else {}),
            }
            span.set_attributes({name: value for name, value in facts.items() if value not in ("", [], None)})
            if record.is_stream and record.first_at is not None:
                ago_s = record.ended_at - record.first_at
                span.add_event(FIRST_TOKEN, timestamp=time.time_ns() - round(ago_s * 1e9))
            if failed:
                span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def _model_facts(self, record: RequestRecord) -> dict[str, Any]:
        """Return the attributes about the operation, the provider and the models."""
        operation = _OPERATIONS.get(record.route, "")
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": (self._provider_of(record.worker) if record.worker else _OURS) if operation else "",
            "gen_ai.request.model": _shown_name(record.alias or record.model),
            "gen_ai.response.model": _shown_name(record.model) if record.answered_at is not None else "",
        }

    def close(self, within_s: float = CLOSE_S) -> None:
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(within_s)
        if thread.is_alive():
            log.warning("the last spans could not be sent within %g s", within_s)


def open_tracing(*, has_usage: bool = True) -> Tracing:
    """Return the tracing that the environment asks for (`OTEL_…`), and say where spans go.

    `has_usage`: spans have the tokens of requests.

    Spans are sent where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set and OpenTelemetry's
    SDK is installed; everything else is as the SDK reads it. Errors there are logged, and the gateway starts.
    """
    env = os.environ
    name = next((name for name in _ENDPOINTS if env.get(name)), None)
    is_off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if name is None or is_off or env.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        log.debug("no spans are sent: %s", "switched off" if name else f"{_ENDPOINTS[1]} is not set")
        return Tracing()
    try:
        tracing = SpanTracing(_provider(), has_usage=has_usage)
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


def _response_facts(record: RequestRecord, seen: RequestSpan) -> dict[str, Any]:
    """Return the attributes of a response that has begun."""
    if record.answered_at is None:
        return {}
    reasons = seen.finish_reasons(record.route)
    is_broken = bool(record.error or record.phase) or record.status == CLIENT_LEFT
    if is_broken and not reasons and _OPERATIONS.get(record.route) in _GENERATES:
        reasons = ["error"]
    first_at = record.first_at if record.is_stream else None
    return {
        "gen_ai.request.stream": record.is_stream or None,
        "gen_ai.response.id": seen.response_id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.response.time_to_first_chunk": None if first_at is None else round(first_at - record.started_at, 6),
    }


def _usage_of(record: RequestRecord) -> dict[str, int]:
    """Return the tokens that were counted, and none that were only estimated."""
    usage = record.usage
    if usage is None or usage.is_estimate:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.input,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
    }


def _shown_name(model: str) -> str:
    return model[:SHOWN_CHARACTERS_MAX].encode(errors="replace").decode()


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def _provider() -> Any:
    """Make the provider of spans: queue and thread are the SDK's. Raises ImportError, ValueError, OSError."""
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
    """Return an address without its secret parts."""
    parts = urllib.parse.urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
