"""Spans of a gateway's requests, as a collector receives them."""

import json

import pytest
from support.deployments import free_port, start_registering, stream
from support.programs import LIMIT_S
from support.span_receiver import receiver_fixture, spans_in  # noqa: F401


def plain(value):
    """Return an attribute's value as Python's."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@pytest.mark.parametrize("relays", [0, 1])
@pytest.mark.parametrize("in_spans", [True, False])
def test_a_streamed_answer_is_described_by_the_conventions_for_generative_ai(
    gateway, start, receiver, relays, in_spans
):
    """Operation, provider, models, reasons and tokens are there, no text, and the first token as an event.

    With relays, bytes of responses are in other processes: then the id and the reasons are not seen.
    """
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    program = gateway(
        f'[usage]\nin_spans = {str(in_spans).lower()}\n[[models]]\nname = "name"\ntargets = [{{ model = "m" }}]\n',
        port=free_port() if relays else 0, settings=f"relays = {relays}\n", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
    )  # fmt: skip
    start_registering(start, program.port, 0.5, "--first-s", "0.05")
    program.wait_until_ready("w1")
    body = {
        "model": "name",
        "max_tokens": 3,
        "stream": True,
        "messages": [{"role": "user", "content": "a secret text"}],
    }
    with stream(program, body) as sock:
        received = b""
        while b"[DONE]" not in received:
            piece = sock.recv(65536)
            assert piece, received
            received += piece
    assert program.stop() == 0
    spans = [
        span for _, sent in receiver.got for one in spans_in(sent) for scope in one.scope_spans for span in scope.spans
    ]
    (span,) = [one for one in spans if "gen_ai.request.model" in {pair.key for pair in one.attributes}]
    found = {pair.key: plain(pair.value) for pair in span.attributes if pair.key.startswith("gen_ai.")}
    first_s = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0.05 <= first_s < LIMIT_S
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "fake", "gen_ai.request.model": "name",
        "gen_ai.response.model": "m", "gen_ai.request.stream": True,
    }  # fmt: skip
    if not relays:
        expected |= {"gen_ai.response.id": "chatcmpl-fake", "gen_ai.response.finish_reasons": ["length"]}
    usage = {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 3}
    found.pop("gen_ai.usage.cache_read.input_tokens", None)
    assert found == expected | (usage if in_spans else {})
    (event,) = span.events
    assert event.name == "ichat.first_token"
    assert span.start_time_unix_nano < event.time_unix_nano < span.end_time_unix_nano
    assert "secret" not in json.dumps(found)
    assert b"secret" not in b"".join(sent for _, sent in receiver.got)
