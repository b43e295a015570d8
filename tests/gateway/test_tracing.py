"""The trace that a request belongs to: its headers, and spans where OpenTelemetry's SDK is there."""

import logging
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import types

import pytest
from support.programs import LIMIT_S
from support.span_receiver import receiver_fixture, spans_in  # noqa: F401

from ichat.observability import tracing
from ichat.observability.request_record import UsedTokens
from ichat.observability.tracing import SpanTracing, Tracing, open_tracing

ROOT = pathlib.Path(__file__).parents[2]


def record(status, **facts):
    """The record of a request of which a test says only what it is about."""
    usual = {"status": status, "error": "", "model": "", "worker": "", "queued_s": 0.0, "phase": "", "alias": ""}
    times = {"started_at": 0.0, "answered_at": None, "first_at": None, "ended_at": 0.0}
    return types.SimpleNamespace(**usual | times | {"route": "other", "usage": None, "is_stream": False} | facts)


TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-%b-%b-01" % (TRACE, SPAN)
PATH = b"/v1/chat/completions"
MADE = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-(0[0-3])")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nothing of the machine's own settings."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


def names(header):
    return [(b"traceparent", header)]


def told(trace):
    """The headers for the upstream, each of them there once."""
    assert len(dict(trace.headers)) == len(trace.headers)
    return dict(trace.headers)


def begin(tracer, headers):
    return tracer.begin(headers, PATH, is_known=True)


@pytest.mark.parametrize(
    "header",
    [
        b"", PARENT.upper(), PARENT[:-1], b" " + PARENT, PARENT + b"\n", b"01" + PARENT[2:] + b"x",
        PARENT.replace(TRACE, b"0" * 32),
        PARENT.replace(b"-", b"_"), b"0x" + PARENT[2:], PARENT + b", " + PARENT,
    ],
)  # fmt: skip
def test_an_invalid_parent_begins_a_new_trace(header):
    """A new trace has ids of its own, is not sampled, and takes no state along."""
    trace = begin(Tracing(), [*names(header), (b"tracestate", b"a=1")])
    headers = told(trace)
    made = MADE.fullmatch(headers.pop(b"traceparent"))
    assert headers == {}
    assert made[1].decode() == trace.id
    assert made[1] not in (TRACE, b"0" * 32)
    assert made[2] not in (SPAN, b"0" * 16)
    assert made[3] == b"00"


@pytest.mark.parametrize("header", [PARENT, b"01" + PARENT[2:] + b"-more", PARENT[:-2] + b"ff"])
def test_a_trace_goes_on(header):
    """Without spans of ours the upstream is told exactly what the client said, and the log gets the trace's id."""
    headers = [*names(header), (b"tracestate", b"a=1"), (b"accept", b"*/*"), (b"tracestate", b"b=2")]
    trace = begin(Tracing(), headers)
    assert trace.id.encode() == TRACE
    assert trace.headers == [headers[0], headers[1], headers[3]]


def test_ids_are_never_zero(monkeypatch):
    """Not even where chance would have it."""
    monkeypatch.setattr("random.getrandbits", lambda _bits: 0)
    assert told(begin(Tracing(), []))[b"traceparent"] == b"00-%032x-%016x-00" % (1, 1)


def test_no_two_traces_are_one():
    """Each request without a parent has its own."""
    traces = [begin(Tracing(), []) for _ in range(100)]
    assert len({trace.id for trace in traces}) == 100
    assert len({told(trace)[b"traceparent"] for trace in traces}) == 100


def test_a_state_alone_is_left_out():
    """Whose state it is nobody knows."""
    assert b"tracestate" not in told(begin(Tracing(), [(b"tracestate", b"a=1")]))


def test_without_an_endpoint_nothing_is_looked_for():
    """Who sends no spans does not wait for OpenTelemetry to be imported."""
    code = (
        "import sys; from ichat.observability.tracing import open_tracing; tracing = open_tracing(); print(tracing);"
        "tracing.begin([], b'/', is_known=True); tracing.close();"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "<Tracing: no spans>\n[]\n"


@pytest.mark.parametrize("switch", [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_spans_can_be_switched_off(environment, switch, caplog):
    """An endpoint that is set for all programs of a machine is not a must; nobody is told of it."""
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    environment.setenv(*switch)
    with caplog.at_level(logging.INFO):
        assert type(open_tracing()) is Tracing
    assert caplog.records == []


def test_without_the_sdk_an_endpoint_is_answered_by_a_sentence(environment, caplog):
    """It says what to install, and for which interpreter; requests have their header all the same."""
    environment.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    tracer = open_tracing()
    assert MADE.fullmatch(told(begin(tracer, []))[b"traceparent"])
    (record,) = caplog.records
    assert tracing.PACKAGES in record.getMessage()
    assert sys.executable in record.getMessage()


def test_an_unknown_protocol_is_warned_of_and_stops_nothing(environment, caplog):
    """It is said which ones there are."""
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert type(open_tracing()) is Tracing
    (record,) = caplog.records
    assert re.search("grpc.*http/json", record.getMessage())


# With OpenTelemetry's SDK.


@pytest.fixture
def spans():
    """A tracing whose spans stay here, and where they are."""
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = SpanTracing(provider)
    tracer.find_providers({"w-0": "vllm", "cloud": "openai"}.__getitem__)
    return tracer, exporter.get_finished_spans


def test_a_request_is_a_span(spans):
    """It goes on with the client's trace, has all that is known of the request, and the upstream is told its id."""
    tracer, finished = spans
    trace = begin(tracer, [*names(PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    tracer.ended(record(200, span=trace.span, model="m", worker="w-0", queued_s=0.25))
    (span,) = finished()
    assert trace.id.encode() == TRACE == b"%032x" % span.context.trace_id
    assert b"%016x" % span.parent.span_id == SPAN
    assert span.parent.is_remote
    assert told(trace) == {
        b"traceparent": b"00-%b-%016x-01" % (TRACE, span.context.span_id),
        b"tracestate": b"a=1,b=2",
    }
    assert (span.name, span.kind.name) == ("POST /v1/chat/completions", "SERVER")
    assert span.status.status_code.name == "UNSET"
    assert 0 < span.start_time <= span.end_time
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "ichat.worker": "w-0",
        "ichat.queue_ms": 250.0,
    }


def test_a_request_without_a_parent_is_the_first_span(spans):
    """Whether it is sampled is the SDK's decision."""
    tracer, finished = spans
    trace = begin(tracer, [])
    tracer.ended(record(200, span=trace.span))
    (span,) = finished()
    assert span.parent is None
    made = MADE.fullmatch(told(trace)[b"traceparent"])
    assert (made[1], made[2]) == (b"%032x" % span.context.trace_id, b"%016x" % span.context.span_id)
    assert trace.id.encode() == made[1]
    assert int(made[3], 16) & 1


@pytest.mark.parametrize("header", [b"", b"ff" + PARENT[2:], PARENT + b"-x", PARENT.replace(SPAN, b"0" * 16)])
def test_an_invalid_parent_is_no_parent_of_a_span(spans, header):
    """The SDK begins a new trace then, and the state that came along is not passed on."""
    tracer, finished = spans
    trace = begin(tracer, [*names(header), (b"tracestate", b"a=1")])
    tracer.ended(record(200, span=trace.span))
    (span,) = finished()
    assert span.parent is None
    assert trace.id.encode() != TRACE
    assert b"tracestate" not in told(trace)


@pytest.mark.parametrize("state", [b"", b"a", b"a=1,a=2", b"\xe4=1", b"a=" + b"b" * 5000, b"a=1," * 100])
def test_a_state_that_is_not_valid_breaks_nothing(spans, state, caplog):
    """The trace goes on, and clients cannot fill the log."""
    tracer, _ = spans
    trace = begin(tracer, [*names(PARENT), (b"tracestate", state)])
    assert trace.id.encode() == TRACE
    assert caplog.records == []


def test_an_unsampled_trace_makes_no_span(spans):
    """The trace goes on, unsampled."""
    tracer, finished = spans
    trace = begin(tracer, names(PARENT[:-1] + b"0"))
    tracer.ended(record(500, span=trace.span, error="internal_error"))
    assert finished() == ()
    made = MADE.fullmatch(told(trace)[b"traceparent"])
    assert (made[1], made[3]) == (TRACE, b"00")
    assert made[2] != SPAN


@pytest.mark.parametrize(
    ("status", "error", "is_error", "kind"),
    [
        (404, "model_not_found", False, "model_not_found"),
        (499, "client_left", False, "client_left"),
        (503, "model_not_ready", True, "model_not_ready"),
        (500, "", True, "500"),
        (200, "upstream_failed", True, "upstream_failed"),
        (400, "", False, None),
    ],
)
def test_server_errors_and_broken_responses_are_marked(spans, status, error, is_error, kind):
    """A client's mistake is no error of the server; a response that broke off is."""
    tracer, finished = spans
    tracer.ended(record(status, span=begin(tracer, []).span, error=error, phase="waiting"))
    (span,) = finished()
    assert (span.status.status_code.name == "ERROR") == is_error
    assert span.attributes.get("error.type") == kind
    assert span.attributes["ichat.phase"] == "waiting"


@pytest.mark.parametrize(
    ("route", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", None),
    ],
)
def test_spans_have_the_attributes_of_generative_ai(spans, route, operation):
    """By the names of OpenTelemetry's conventions for generative AI, where they have one for the route."""
    tracer, finished = spans
    for usage in (UsedTokens(70, 8, 9), UsedTokens(70, 8, is_estimate=True), None):
        tracer.ended(record(200, span=begin(tracer, []).span, model="m", route=route, usage=usage))
    counted, *others = [
        {key: value for key, value in span.attributes.items() if "gen_ai" in key} for span in finished()
    ]
    kind = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "ichat"} if operation else {}
    known = {"gen_ai.request.model": "m"} | kind
    assert others == [known, known], "an estimate is no count"
    assert counted == known | {
        "gen_ai.usage.input_tokens": 70,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 9,
    }


def test_a_name_and_the_model_that_answered(spans):
    """The request has the name that was asked for, the response its model; without a response there is none."""
    tracer, finished = spans
    for alias, answered_at in (("gpt", 1.0), ("", 1.0), ("gpt", None)):
        trace = tracer.begin([], b"/v1/completions", is_known=True)
        tracer.ended(record(200, span=trace.span, model="m", alias=alias, answered_at=answered_at))
    found = [
        (span.attributes["gen_ai.request.model"], span.attributes.get("gen_ai.response.model")) for span in finished()
    ]
    assert found == [("gpt", "m"), ("m", "m"), ("gpt", None)]


@pytest.mark.parametrize(("worker", "provider"), [("w-0", "vllm"), ("cloud", "openai"), ("", "ichat")])
def test_the_provider_is_the_engine_or_the_api_of_the_upstream(spans, worker, provider):
    """A refusal of the gateway is its own answer."""
    tracer, finished = spans
    tracer.ended(record(200, span=begin(tracer, []).span, route="/v1/chat/completions", worker=worker))
    assert finished()[0].attributes["gen_ai.provider.name"] == provider


def seen(span, *pieces, size=None):
    """Have a span see a response's body, in these pieces or in pieces of this size."""
    counted = []
    observer = span.watch(types.SimpleNamespace(see=lambda buffer, end: counted.append(bytes(buffer[:end]))))
    whole = b"".join(pieces)
    parts = pieces if size is None else [whole[at : at + size] for at in range(0, len(whole), size)]
    for piece in parts:
        observer.see(bytearray(piece + b"of an earlier piece"), len(piece))
    assert b"".join(counted) == whole, "the reader of tokens sees every byte"


STREAM = (
    b'data: {"id":"chatcmpl-1a","choices":[{"index":0,"delta":{"content":"\\"id\\":\\"secret\\""}}]}\n\n'
    b'data: {"id":"chatcmpl-1a","choices":[{"delta":{"content":"\\"finish_reason\\":\\"secret\\""},"finish_reason":null}]}\n\n'
    b'data: {"id":"chatcmpl-1a","choices":[{"delta":{},"finish_reason":"length","stop_reason":"secret"}]}\n\n'
    b'data: {"id":"chatcmpl-1a","choices":[],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n'
)
MESSAGE = b'{"id": "msg_1", "content": [{"text": "secret"}], "stop_reason": "tool_use", "usage": {}}'
TWO = b'{"id":"cmpl-2","choices":[{"text":"secret","finish_reason":"stop"},{"text":"b","finish_reason":"length"}]}'


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize(
    ("route", "body", "response_id", "reasons"),
    [
        ("/v1/chat/completions", STREAM, "chatcmpl-1a", ("length",)),
        ("/v1/messages", MESSAGE, "msg_1", ("tool_use",)),
        ("/v1/completions", TWO, "cmpl-2", ("stop", "length")),
        ("/v1/embeddings", b'{"id":"embd-3","data":[{"embedding":[' + b"0.1," * 5000 + b"1]}]}", "embd-3", None),
        ("/v1/chat/completions", b'{"id": "my secret text", "choices": []}', None, None),
        ("/v1/messages", b'{"stop_reason": "secret"}', None, None),
    ],
)
def test_a_span_has_the_id_of_the_response_and_the_reasons_for_its_end(spans, size, route, body, response_id, reasons):
    """However the response is cut; no text of the model or of its user is there."""
    tracer, finished = spans
    span = begin(tracer, []).span
    seen(span, body, size=size)
    tracer.ended(record(200, span=span, model="m", route=route, worker="w-0", answered_at=1.0, first_at=1.0))
    attributes = finished()[0].attributes
    assert attributes.get("gen_ai.response.id") == response_id
    assert attributes.get("gen_ai.response.finish_reasons") == reasons
    assert "secret" not in str(attributes)


def test_a_later_attempt_replaces_the_parts_of_an_earlier_response(spans):
    """Only the response that the client gets is in the span."""
    tracer, finished = spans
    span = begin(tracer, []).span
    seen(span, STREAM)
    seen(span, b"data: {}\n\n")
    tracer.ended(record(200, span=span, route="/v1/chat/completions", answered_at=1.0))
    assert "gen_ai.response.id" not in finished()[0].attributes


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ({"error": "upstream_failed"}, ("error",)),
        ({"phase": "streaming", "status": 499}, ("error",)),
        ({"error": "upstream_failed", "answered_at": None}, None),
        ({"error": "upstream_failed", "route": "/v1/embeddings"}, None),
        ({}, None),
    ],
)
def test_an_answer_that_breaks_off_ends_for_an_error(spans, facts, reasons):
    """If it had begun, and if such answers have a reason at all."""
    tracer, finished = spans
    usual = {"status": 200, "route": "/v1/chat/completions", "answered_at": 1.0}
    tracer.ended(record(**usual | facts, span=begin(tracer, []).span))
    assert finished()[0].attributes.get("gen_ai.response.finish_reasons") == reasons


def test_the_first_token_of_a_stream_is_an_event(spans):
    """Its time is that of the first piece; a response that is no stream has none."""
    tracer, finished = spans
    for is_stream in (True, False):
        trace = begin(tracer, [])
        times = {"started_at": 10.0, "answered_at": 10.4, "first_at": 10.5, "ended_at": 12.0}
        tracer.ended(record(200, span=trace.span, is_stream=is_stream, **times))
    stream, plain = finished()
    (event,) = stream.events
    assert event.name == tracing.FIRST_TOKEN
    assert 0 <= stream.end_time - event.timestamp - 1.5e9 < LIMIT_S * 1e9
    assert stream.attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert stream.attributes["gen_ai.request.stream"] is True
    assert plain.events == ()
    assert not {"gen_ai.response.time_to_first_chunk", "gen_ai.request.stream"} & set(plain.attributes)


def test_tokens_can_be_left_out_of_spans(spans):
    """So that a client's own span and the gateway's are not both counted (`usage.in_spans`)."""
    tracer, finished = spans
    quiet = SpanTracing(tracer._provider, has_usage=False)
    quiet.ended(record(200, span=begin(quiet, []).span, usage=UsedTokens(70, 8, 9)))
    assert not [name for name in finished()[0].attributes if "usage" in name]


def test_names_and_paths_of_clients_are_cut(spans):
    """Neither a name nor a path fills anybody's memory, and a path that is one of many names no span."""
    tracer, finished = spans
    trace = tracer.begin([], b"/v1/" + b"x" * 5000, is_known=False)
    tracer.ended(record(404, span=trace.span, model="\ud800" + "m" * 5000))
    (span,) = finished()
    assert span.attributes["gen_ai.request.model"].startswith("?m"), "nothing that cannot be written"
    assert span.name == "POST"
    assert "http.route" not in span.attributes
    assert max(len(str(value)) for value in span.attributes.values()) == 256


@pytest.mark.parametrize(("settings", "service"), [({}, "ichat-gateway"), ({"OTEL_SERVICE_NAME": "front"}, "front")])
def test_spans_arrive(environment, receiver, caplog, settings, service):
    """What has not been sent at the end is sent then; where it goes is said, without the password."""
    for name, value in settings.items():
        environment.setenv(name, value)
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://me:hush@127.0.0.1:{receiver.server_port}")
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with caplog.at_level(logging.INFO):
        tracer = open_tracing()
    assert f"127.0.0.1:{receiver.server_port}" in caplog.text
    assert "hush" not in caplog.text
    trace = begin(tracer, names(PARENT))
    tracer.ended(record(200, span=trace.span, model="m"))
    assert receiver.got == []
    tracer.close(within_s=60.0)
    ((path, body),) = receiver.got
    assert path == "/v1/traces"
    (resource,) = spans_in(body)
    named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert named["service.name"] == service
    (span,) = resource.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE.decode(), SPAN.decode())
    assert told(trace)[b"traceparent"] == b"00-%b-%b-01" % (TRACE, span.span_id.hex().encode())


def test_a_silent_collector_does_not_delay_the_end(environment, caplog):
    """A collector that takes a connection and says nothing holds up no gateway's end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        tracer = open_tracing()
        tracer.ended(record(200, span=begin(tracer, []).span))
        tracer.close(within_s=0.2)
        assert "could not be sent" in caplog.text
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "spans")
        thread.join(LIMIT_S)
