"""A server that receives spans, as a collector of OpenTelemetry does."""

import http.server
import threading

import pytest


class Receiver(http.server.BaseHTTPRequestHandler):
    """Takes spans by OTLP over HTTP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(name="receiver")
def receiver_fixture():
    """A server that takes spans, and what it got."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="its exporter is not installed")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.got = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def spans_in(body):
    """Return the spans of a request, by the resources that sent them."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return ExportTraceServiceRequest.FromString(body).resource_spans
