"""What each engine sends and takes, as found in its sources and applications, and what a worker's clients see of it."""

import asyncio
import contextvars
import json
import socket
from types import SimpleNamespace

import pytest
import trio

from ichat.engines.adapter import (
    GENERATES,
    HEARS,
    POOLS,
    VLLM_PATHS,
    AdapterSettings,
    ProtocolAdapter,
    model_body,
    models_body,
)
from ichat.engines.asgi import Call
from ichat.engines.engine import ModelCard
from ichat.engines.error_translation import ERROR_BEGINNINGS, anthropic_error, error_event, openai_error
from ichat.engines.reasoning import FIELDS, RENAMES
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.errors import ApiError
from ichat.http.request import Request

CHAT = b"/v1/chat/completions"
FILE = '\n\n  File "/x/http_server.py", line 1870, in openai_v1_chat_completions\n    POST /v1/chat/completions '


def vllm(message, *, kind="BadRequestError", param=None, code=400):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def sglang(message, *, kind="BadRequest", param=None, code=400):
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code}


def vllm_invalid(*details, param):
    """Return what vLLM makes of pydantic's findings: a line each, places joined with dots."""
    lines = "".join(
        f"\n  {{'type': '{kind}', 'loc': '{place}', 'msg': {text!r}, 'input': '<dict of 1 items>'{more}}}"
        for kind, place, text, more in details
    )
    count = f"{len(details)} validation error{'s' if len(details) > 1 else ''}:"
    return vllm(count + lines, kind="Bad Request", param=param)


def sglang_invalid(*details):
    """Return what SGLang makes of them: a line each, the place in its code, and all of it again."""
    found = [
        f"{{'type': '{kind}', 'loc': {place!r}, 'msg': {text!r}, 'input': {{'model': 'm'}}{more}}}"
        for kind, place, text, more in details
    ]
    count = f"{len(details)} validation error{'s' if len(details) > 1 else ''}:"
    return sglang(count + "".join(f"\n  {one}" for one in found) + FILE + f"[{', '.join(found)}]", kind="Bad Request")


MISSING = "Field required"
NUMBER = "Input should be a valid number, unable to parse string as a number"
INTEGER = "Input should be a valid integer, unable to parse string as an integer"
LIST, STRING = "Input should be a valid list", "Input should be a valid string"
TOO_LONG = (
    "This model's maximum context length is 64 tokens. However, your prompt contains 90 input tokens, which exceeds"
)
TOO_MANY = (
    "Requested token count exceeds the model's maximum context length of 64 tokens. You requested a total of 9999"
    " tokens: 9 tokens from the input messages and 9990 tokens for the completion."
)
OF_64 = "This model's maximum context length is 64 tokens. However, "
WRAPPED = "function-after[check_parts(), ChatCompletionMessageGenericParam]"

# The mistake, who answers, with what, and then what the client reads: status, message, code, param.
ERRORS = [
    (
        "no messages",
        400,
        vllm_invalid(("missing", "body.messages", MISSING, ""), param="body.messages"),
        sglang_invalid(("missing", ("body", "messages"), MISSING, "")),
        (400, "messages: Field required", "bad_request", "messages"),
    ),
    (
        "two fields of a wrong type",
        400,
        vllm_invalid(
            ("int_parsing", "body.max_tokens", INTEGER, ""),
            ("float_parsing", "body.temperature", NUMBER, ""),
            param="body.max_tokens",
        ),
        sglang_invalid(
            ("int_parsing", ("body", "max_tokens"), INTEGER, ""),
            ("float_parsing", ("body", "temperature"), NUMBER, ""),
        ),
        (400, f"max_tokens: {INTEGER}; temperature: {NUMBER}", "bad_request", "max_tokens"),
    ),
    (
        "a prompt that is none of several kinds",
        400,
        vllm_invalid(
            ("list_type", "body.prompt", LIST, ""),
            ("list_type", "body.prompt", LIST, ""),
            ("string_type", "body.prompt", STRING, ""),
            param="body.prompt",
        ),
        sglang_invalid(
            ("list_type", ("body", "prompt", "list[int]"), LIST, ""),
            ("list_type", ("body", "prompt", "list[list[int]]"), LIST, ""),
            ("string_type", ("body", "prompt", "str"), STRING, ""),
        ),
        (400, f"prompt: {LIST}; prompt: {STRING}", "bad_request", "prompt"),
    ),
    (
        "a message without a role",
        400,
        vllm_invalid(
            ("missing", "body.messages.1.ChatCompletionUserMessageParam.role", MISSING, ""),
            param="body.messages.1.ChatCompletionUserMessageParam.role",
        ),
        sglang_invalid(("missing", ("body", "messages", 1, WRAPPED, "role"), MISSING, "")),
        (400, "messages.1.role: Field required", "bad_request", "messages.1.role"),
    ),
    (
        "not JSON",
        400,
        vllm_invalid(
            ("json_invalid", "body.27", "JSON decode error", ", 'ctx': {'error': \"Expecting ',' delimiter\"}"),
            param="body.27",
        ),
        sglang_invalid(
            ("json_invalid", ("body", 27), "JSON decode error", ", 'ctx': {'error': \"Expecting ',' delimiter\"}")
        ),
        (400, "The request body is not JSON: Expecting ',' delimiter", "bad_request", None),
    ),
    (
        "a wrong content type",
        400,
        vllm("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"),
        sglang(
            "1 validation error:\n  {'loc': ['header', 'content-type'], 'msg': \"Unsupported Media Type: Only "
            "'application/json' is allowed\", 'type': 'value_error'} [{'loc': ['header', 'content-type']}]"
        ),
        (400, "Unsupported Media Type: Only 'application/json' is allowed", "bad_request", None),
    ),
    (
        "a value that a validator refuses",
        400,
        vllm_invalid(("value_error", "body.top_n", "Value error, too small", ""), param="body.top_n"),
        sglang_invalid(
            (
                "value_error",
                ("body", "top_n"),
                "Value error, Value error, too small",
                ", 'ctx': {'error': ValueError('Value error, too small')}",
            )
        ),
        (400, "top_n: too small", "bad_request", "top_n"),
    ),
    (
        "temperature -1",
        400,
        vllm(
            "temperature must be in [0, 2], got -1.0. (parameter=temperature, value=-1.0)",
            param="temperature",
        ),
        sglang("temperature must be in [0, 2], got -1.0."),
        (400, "temperature must be in [0, 2], got -1.0.", "bad_request", "temperature"),
    ),
    (
        "a parameter that neither engine names apart",
        400,
        vllm("frequency_penalty must be in [-2, 2], got 3.0."),
        sglang("frequency_penalty must be in [-2, 2], got 3.0."),
        (400, "frequency_penalty must be in [-2, 2], got 3.0.", "bad_request", "frequency_penalty"),
    ),
    (
        "too many tokens wanted",
        400,
        vllm(TOO_MANY + " (parameter=max_tokens, value=9999)", param="max_tokens"),
        sglang(TOO_MANY),
        (
            400,
            f"{OF_64}you requested 9999 tokens (9 in the prompt, 9990 for the completion).",
            "context_length_exceeded",
            "max_tokens",
        ),
    ),
    (
        "a prompt that is too long",
        400,
        vllm(TOO_LONG + " (parameter=input_tokens, value=90)", param="input_tokens"),
        sglang(TOO_LONG),
        (400, f"{OF_64}your prompt has 90 tokens.", "context_length_exceeded", None),
    ),
    (
        "an unknown route",
        404,
        {"detail": "Not Found"},
        {"detail": "Not Found"},
        (404, "Not Found", "not_found", None),
    ),
    (
        "a wrong method",
        405,
        {"detail": "Method Not Allowed"},
        {"detail": "Method Not Allowed"},
        (405, "Method Not Allowed", "method_not_allowed", None),
    ),
    (
        "no key, or a wrong one",
        401,
        {"error": "Unauthorized"},
        {"error": "Unauthorized"},
        (401, "Unauthorized", "invalid_api_key", None),
    ),
    (
        "an unknown model",
        404,
        vllm("The model `x` does not exist. Valid aliases: m.", kind="NotFoundError", param="model", code=404),
        {
            "error": {
                "message": "The model `x` does not exist. Valid aliases: m.",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        },
        (404, "The model `x` does not exist. Valid aliases: m.", "model_not_found", "model"),
    ),
    (
        "a body that cannot be processed",
        422,
        vllm("The image cannot be fetched.", kind="UnprocessableEntityError", code=422),
        {"detail": [{"type": "value_error", "loc": [], "msg": "The image cannot be fetched."}]},
        (400, "The image cannot be fetched.", "bad_request", None),
    ),
    (
        "a list of details",
        422,
        {"detail": [{"type": "missing", "loc": ["body", "input"], "msg": MISSING}]},
        {"detail": [{"type": "missing", "loc": ["body", "input"], "msg": MISSING}]},
        (400, "input: Field required", "bad_request", "input"),
    ),
    (
        "a bug",
        500,
        vllm("something broke", kind="InternalServerError", code=500),
        sglang("something broke", kind="InternalServerError", code=500),
        (500, "something broke", "internal_error", None),
    ),
    (
        "not for this model",
        501,
        vllm("The model does not support Score API", kind="NotImplementedError", code=501),
        sglang("The model does not support Score API", kind="NotImplementedError", code=501),
        (501, "The model does not support Score API", "not_implemented", None),
    ),
    (
        "no room",
        503,
        {"error": "The model is currently scaling."},
        {"message": "The model is currently scaling."},
        (503, "The model is currently scaling.", "overloaded", None),
    ),
]


def kind_of(status):
    return "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "theirs", "ours", "seen"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS]
)
def test_the_same_mistake_reads_alike_from_both_engines(status, theirs, ours, seen):
    """Status, type, code, parameter and shape are the same, and so are the words where the engines have the same."""
    for answer in (theirs, ours):
        new, body = openai_error(status, json.dumps(answer).encode())
        error = {"message": seen[1], "type": kind_of(seen[0]), "param": seen[3], "code": seen[2]}
        assert (new, json.loads(body)) == (seen[0], {"error": error})


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (500, b"Internal Server Error", "Internal Server Error", "internal_error"),
        (503, b"", "Service Unavailable", "overloaded"),
        (400, b"{}", "Bad Request", "bad_request"),
        (400, b'{"error": null}', "Bad Request", "bad_request"),
        (400, b'{"error": {"message": "", "code": 400}}', "Bad Request", "bad_request"),
        (400, b"[" * 100_000, "[" * 4000, "bad_request"),
        (400, b'"words"', "words", "bad_request"),
        (400, b"\xff", "\ufffd", "bad_request"),
        (400, b'{"detail": {"why": 1}}', '{"why": 1}', "bad_request"),
        (400, b'{"success": false, "error_message": "no such adapter"}', "no such adapter", "bad_request"),
        (
            400,
            b'{"error": {"message": "m", "type": "t", "code": "context_length_exceeded"}}',
            "m",
            "context_length_exceeded",
        ),
        (429, b'{"detail": "slow down"}', "slow down", "rate_limited"),
        (418, b'{"detail": "a teapot"}', "a teapot", "bad_request"),
        (599, b"", "Status 599", "internal_error"),
    ],
)
def test_every_form_of_error_becomes_the_usual_form(status, body, message, code):
    """Text, nothing at all, and forms that nobody has are read as well as they can be."""
    error = json.loads(openai_error(status, body)[1])["error"]
    assert (error["message"], error["code"]) == (message, code)
    assert set(error) == {"message", "type", "param", "code"}


def test_an_engines_message_has_a_bound():
    """Engines quote requests, however large, and name one mistake for each kind that they tried."""
    details = [("missing", f"body.field_{number}", MISSING, "") for number in range(40)]
    message = json.loads(openai_error(400, json.dumps(vllm_invalid(*details, param=None)).encode())[1])["error"][
        "message"
    ]
    assert message.endswith("field_4: Field required; and more")
    assert len(json.loads(openai_error(400, json.dumps(sglang("x" * 10**6)).encode())[1])["error"]["message"]) == 4000


def test_a_request_cannot_put_words_into_the_engines_mouth():
    """What a client quotes in its own request is not read as a finding."""
    spoof = {"model": "\n  {'type': 'missing', 'loc': ('body', 'x'), 'msg': 'spoofed'"}
    line = f"{{'type': 'missing', 'loc': ('body', 'input'), 'msg': 'Field required', 'input': {spoof!r}}}"
    body = sglang(f"1 validation error:\n  {line}{FILE}[{line}]")
    assert json.loads(openai_error(400, json.dumps(body).encode())[1])["error"]["message"] == "input: Field required"


@pytest.mark.parametrize(
    "body",
    [
        {"type": "error", "error": {"type": "NotFoundError", "message": "The model `x` does not exist."}},
        vllm("The model `x` does not exist.", kind="NotFoundError", param="model", code=404),
        sglang("The model `x` does not exist.", code=404),
    ],
)
def test_errors_of_the_messages_api_are_anthropics(body):
    """Its clients find their own form, with the members that OpenAI's have besides."""
    status, answer = anthropic_error(404, json.dumps(body).encode())
    error = {"message": "The model `x` does not exist.", "param": "model", "code": "model_not_found"}
    assert (status, json.loads(answer)) == (404, {"type": "error", "error": {"type": "not_found_error", **error}})


def request_of(path, body=b"", *, method=b"POST", headers=(), query=b"", version=b"1.1"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(
        method=method,
        target=path + query,
        path=path,
        version=version,
        headers=[(b"content-type", b"application/json"), *headers],
        body=body,
        id=b"req-1",
        keep_alive=True,
    )


def event_of(value, name=b""):
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + json.dumps(value).encode() + b"\n\n"


MESSAGES_ERROR = {"type": "error", "error": {"type": "internal_error", "message": "It failed."}}


@pytest.mark.parametrize(
    ("path", "event", "kind", "code"),
    [
        (CHAT, event_of(vllm("It failed.", kind="InternalServerError", code=500)), "server_error", "internal_error"),
        (CHAT, event_of(vllm("It failed.")), "invalid_request_error", "bad_request"),
        (CHAT, event_of({"error": sglang("It failed.", kind="SERVICE_UNAVAILABLE", code=503)}), "server_error", "overloaded"),
        (CHAT, event_of({"error": {"message": "It failed.", "code": 422}}), "invalid_request_error", "bad_request"),
        (CHAT, event_of({"error": {"message": "It failed.", "code": 7}}), "server_error", "internal_error"),
        (CHAT, event_of({"error": {"message": "It failed.", "code": "timeout", "type": "x"}}), "x", "timeout"),
        (b"/v1/messages", event_of(MESSAGES_ERROR, b"error"), "api_error", "internal_error"),
        (b"/v1/messages", event_of({"error": {**MESSAGES_ERROR["error"], "type": "invalid_request_error"}}, b"error"),
         "invalid_request_error", "bad_request"),
    ],
)  # fmt: skip
def test_an_error_in_a_stream_gets_type_and_code(path, event, kind, code):
    """The engine's words, and type and code of the table, in the form of the route; what follows is left out."""
    assert event[:14] in ERROR_BEGINNINGS
    told = error_event(path, event + b"data: [DONE]\n\n")
    assert told.startswith(b"event: error\n") == (path == b"/v1/messages")
    assert told.endswith(b"}\n\n")
    assert told.count(b"data: ") == 1
    answer = json.loads(told.partition(b"data: ")[2].partition(b"\n\n")[0])
    assert answer["error"] == {"message": "It failed.", "type": kind, "param": None, "code": code}
    assert answer.get("type") == ("error" if path == b"/v1/messages" else None)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": null, "choices": []}\n\n',
        b'data: {"error": "half',
        b'data: {"error": [1]}\n\n',
        b'event: error\ndata: [{"error": 1}]\n\n',
        b"event: error\ndone",
        b'data: {"error"' * 10_000,
    ],
)
def test_an_event_that_only_begins_like_an_error_is_unchanged(event):
    """It is the engine's, and nobody can say what it means; what follows it stays, too."""
    assert event[:14] in ERROR_BEGINNINGS
    assert error_event(CHAT, event) is None
    seen = answered(app_of(200, event, b"data: 1\n\n", headers=[(b"content-type", b"text/event-stream")]))
    assert seen.body == b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (event, b"data: 1\n\n")) + b"0\r\n\r\n"


def test_errors_are_rewritten_and_streams_are_not():
    """Errors always, answers where the request asked for it, and streams never."""
    wire, asked = ProtocolAdapter(), object()
    request = request_of(CHAT)
    assert wire.response(request, 200, [], None) is None
    assert wire.response(request, 200, [], asked) is asked
    assert wire.response(request, 204, [], asked) is None
    assert wire.response(request, 400, [], asked) is openai_error
    assert wire.response(request_of(b"/v1/messages"), 400, [], None) is anthropic_error


async def test_the_request_id_reaches_the_engine():
    """One header has it, whatever the client sent, and the length is that of the body as it is."""
    request = request_of(CHAT, b"{}", headers=[(b"x-request-id", b"\xff"), (b"content-length", b"7")])
    assert await ProtocolAdapter().request(request) is None
    assert request.headers == [
        (b"content-type", b"application/json"), (b"x-request-id", b"00000001-req-1"), (b"content-length", b"2"),
    ]  # fmt: skip
    assert request.body == b"{}"


async def test_no_two_requests_have_one_id_in_an_engine():
    """Clients may choose the same id, also one that another request has got; the response has the client's own."""
    adapter, ids = ProtocolAdapter(), set()
    for name in (b"same", b"same", b"00000001-same", b"-same"):
        request = request_of(CHAT, b"{}")
        request.id = name
        await adapter.request(request)
        ids |= {value for header, value in request.headers if header == b"x-request-id"}
        assert request.id == name
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("path", "would"),
    [
        (b"/v1/embeddings", "a worker that was started with `--runner pooling` would, if the model can do it"),
        (b"/v2/rerank", "a worker that was started with `--runner pooling` would, if the model can do it"),
        (b"/rerank", "a worker that was started with `--runner pooling` would, if the model can do it"),
        (b"/v1/audio/translations", "models that transcribe speech do"),
    ],
)
@pytest.mark.parametrize(
    "wire", [ProtocolAdapter(VLLM_PATHS), SGLangAdapter(lambda: (["m"], []))], ids=["vllm", "sglang"]
)
async def test_an_unsupported_route_is_refused_before_the_engine(wire, path, would):
    """It is refused before the engine hears of it, and what there is no such thing as is left to the engine."""
    wire.serve_only("m", GENERATES, (*POOLS, *HEARS))
    with pytest.raises(ApiError) as caught:
        await wire.request(request_of(path, {"model": "m"}))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_by_model")
    assert caught.value.message.startswith("The model `m` serves /v1/chat/completions, /v1/completions, /v1/responses,")
    assert caught.value.message.endswith(f": {would}.")
    await wire.request(request_of(path, method=b"GET"))
    await wire.request(request_of(CHAT, {"model": "m", "messages": []}))
    await wire.request(request_of(b"/v1/nothing", {}))


def test_sglang_decides_whether_a_model_reranks():
    """Whether a model that generates text can rerank: where it cannot, the refusal is the same; its other errors stay."""
    wire = SGLangAdapter(lambda: (["m"], []))
    wire.set_routes(generates=True)
    request = request_of(b"/v1/rerank", {})
    wire.check_served(request)
    told = wire.response(request, 400, [], None)
    status, body = told(
        400, json.dumps(sglang("This model does not appear to be an embedding model by default.")).encode()
    )
    assert (status, json.loads(body)["error"]["code"]) == (400, "unsupported_by_model")
    assert b"it does not serve /v1/rerank" in body
    assert json.loads(told(400, json.dumps(sglang("No documents.")).encode())[1])["error"]["code"] == "bad_request"


def test_a_pooling_model_refuses_text_and_other_scores():
    """Text takes a model that generates it; other scores take another model, however it is started."""
    wire = ProtocolAdapter()
    wire.serve_only("m", ("embeddings",), (*GENERATES, "rerank"))
    for path, would in (
        (CHAT, "a model that generates text would, in a worker that was started without `--runner pooling`"),
        (b"/v1/rerank", "it takes a model of another kind"),
    ):
        with pytest.raises(ApiError, match="The model `m` serves /v1/embeddings; it does not serve ") as caught:
            wire.check_served(request_of(path))
        assert caught.value.message.endswith(f": {would}.")


async def test_routes_that_vllm_has_elsewhere():
    """The path is the engine's own, the query stays."""
    request = request_of(b"/v1/tokenize", {"prompt": "x"}, query=b"?a=1")
    await ProtocolAdapter(VLLM_PATHS).request(request)
    assert (request.target, request.path) == (b"/tokenize?a=1", b"/tokenize")


@pytest.mark.parametrize("path", [b"/rerank", b"/v1/rerank", b"/v2/rerank"])
async def test_vllm_reranks_documents_that_are_objects(path):
    """Cohere's and Jina's form of a document becomes a text, `null` for all of them is left out, the rest stays."""
    request = request_of(
        path, b'{"query": {"text": "q"}, "documents": [{"text": "a"}, "b", {"content": []}], "top_n": null, "x": 1.0}'
    )
    assert await ProtocolAdapter(VLLM_PATHS).request(request) is None
    assert request.body == b'{"query": "q", "documents": ["a", "b", {"content": []}], "x": 1.0}'
    assert request.path == path


async def test_documents_are_returned_or_not():
    """`return_documents` is heeded, which vLLM does not know."""
    request = request_of(b"/rerank", {"query": "q", "documents": ["a"], "return_documents": False})
    rewrite = await ProtocolAdapter().request(request)
    body = {"id": "1", "results": [{"index": 0, "document": {"text": "a"}, "relevance_score": 0.5}]}
    status, new = rewrite(200, json.dumps(body).encode())
    assert (status, json.loads(new)) == (200, {"id": "1", "results": [{"index": 0, "relevance_score": 0.5}]})


def sglang_wire():
    return SGLangAdapter(lambda: (["own:7b", "alias", "alias:2"], ["lora", "lo:ra"]))


async def sent(path, body, *, wire=None):
    request = request_of(path, body)
    rewrite = await (wire or sglang_wire()).request(request)
    return request, rewrite


RID = '"rid": "chatcmpl-00000001-req-1"'


@pytest.mark.parametrize(
    ("path", "body", "seen"),
    [
        (CHAT, '{"model": "alias",  "n": 1e0}', "{" + RID + ',"model": "alias",  "n": 1e0}'),
        (CHAT, ' {"n": 1}', " {" + RID + ', "model": "own:7b","n": 1}'),
        (CHAT, "{ }", "{" + RID + ', "model": "own:7b" }'),
        (CHAT, '{"model": null, "rid": "x"}', '{"model": "own:7b", ' + RID + "}"),
        (CHAT, '{"model": "", "rid": "x"}', '{"model": "own:7b", ' + RID + "}"),
        (CHAT, '{"model": "alias:2", "rid": null}', '{"model": "own:7b", ' + RID + "}"),
        (CHAT, '{"model": 5}', '{"model": 5}'),
        (CHAT, '{"model": "lora"}', '{"lora_path": "lora", ' + RID + ',"model": "lora"}'),
        (CHAT, '{"model": "lora", "lora_path": "lora", "rid": "x"}', '{"model": "lora", "lora_path": "lora", ' + RID + "}"),
        (CHAT, '{"model": "lora", "lora_path": null, "rid": "x"}', '{"model": "own:7b:lora", "lora_path": null, ' + RID + "}"),
        (CHAT, '{"model": "lo:ra", "rid": "x"}', '{"model": "own:7b:lo:ra", ' + RID + "}"),
        (CHAT, '{"model": "own:7b:lora", "rid": "x"}', '{"model": "own:7b:lora", ' + RID + "}"),
        (b"/v1/messages", '{"model": "lora"}', '{"model": "own:7b:lora"}'),
        (b"/v1/messages", '{"max_tokens": 5}', '{"max_tokens": 5}'),
        (b"/v1/responses", '{"model": "alias"}', '{"model": "own:7b"}'),
        (b"/v1/tokenize", '{"model": "lora"}', '{"model": "lora"}'),
        (b"/v1/embeddings", '{"model": "alias", "input": ["a"]}', '{"model": "alias", "input": ["a"]}'),
        (b"/v1/embeddings", '{"input": "a", "model": "alias"}', '{"rid": "embd-00000001-req-1","input": "a", "model": "alias"}'),
        (b"/generate", '{"text": "x"}', '{"text": "x"}'),
    ],
)  # fmt: skip
async def test_ids_and_adapters_are_put_where_sglang_reads_them(path, body, seen):
    """The id and the adapter are put in where SGLang reads them, and the model's name is one that it reads rightly."""
    request, rewrite = await sent(path, body.encode())
    assert request.body.decode() == seen
    assert (rewrite is not None) == (path == b"/v1/embeddings")
    assert (b"content-length", b"%d" % len(seen)) in request.headers


@pytest.mark.parametrize(
    "body", [b'{"model": "lora", "lora_path": "z"}', b'{"lora_path": "lora"}', b'{"lora_path": ["lora"]}']
)
async def test_an_adapter_is_asked_for_by_its_name(body):
    """In no other way: who may ask for one model could have the adapters of others."""
    with pytest.raises(ApiError, match="by its name") as refusal:
        await sent(CHAT, body)
    assert (refusal.value.status, refusal.value.param) == (400, "lora_path")


async def test_a_large_body_is_spliced_as_well():
    """Its long values stay where they are; only the beginning of the body is new."""
    text = "x" * 300_000
    request, _ = await sent(CHAT, b'{"messages": "%b", "model": "alias"}' % text.encode())
    assert request.body == b'{%b,"messages": "%b", "model": "alias"}' % (RID.encode(), text.encode())
    request, _ = await sent(b"/v1/embeddings", b'{"input": "%b"}' % text.encode())
    assert request.body.startswith(b'{"rid": "embd-00000001-req-1", "model": "own:7b","input": "xxx')
    request, _ = await sent(b"/v1/embeddings", b'{"model": "alias", "input": [%b1]}' % (b"1," * 50_000))
    assert b"rid" not in request.body


async def test_no_request_id_is_the_beginning_of_another():
    """SGLang aborts whatever begins with the id that it aborts, and refuses one that is in use."""
    wire = sglang_wire()
    ids = []
    for given in (b"a", b"a", b"a-00000001", b"a1", b'"\\'):
        request = request_of(CHAT, b"{}")
        request.id = given
        await wire.request(request)
        ids.append(json.loads(request.body)["rid"])
    assert ids[4].endswith('-"\\')
    assert not [1 for one in ids for other in ids if one is not other and other.startswith(one)]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        (CHAT, b'{"model": "x"}', 404, "model_not_found", "The model `x` does not exist. Valid aliases: own:7b, alias, alias:2."),
        (CHAT, b'{"model": "own:7b:x"}', 404, "model_not_found", "The model `own:7b:x` does not exist."),
        (b"/v1/embeddings", b'{"model": "%b"}' % (b"x" * 100_000), 404, "model_not_found", "The model `xxx"),
        (b"/v1/responses", b'{"model": "lora"}', 400, "bad_request", "The adapter `lora` cannot be used on /v1/responses."),
        (b"/rerank", b'{"model": "lora"}', 400, "bad_request", "The adapter `lora` cannot be used on /v1/rerank."),
        (CHAT, b"[]", 400, "bad_request", "The request body must be a JSON object."),
        (CHAT, b'{"model": ', 400, "bad_request", "The request body is not JSON: "),
        (CHAT, b'{"\xff": 1}', 400, "bad_request", "The request body is not JSON: "),
        (CHAT, b"", 400, "bad_request", "The request body is not JSON: "),
    ],
)  # fmt: skip
async def test_a_request_for_an_unknown_model_never_reaches_sglang(path, body, status, code, message):
    """It takes any name of a model, and leaves adapters out without a word; a body that is no object is a 500 there."""
    with pytest.raises(ApiError) as caught:
        await sent(path, body)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.message.startswith(message)


async def test_an_unknown_model_reads_as_with_vllm():
    """The refusal is the very body that vLLM's becomes."""
    with pytest.raises(ApiError) as caught:
        await sent(CHAT, {"model": "x"}, wire=SGLangAdapter(lambda: (["m"], [])))
    theirs = vllm("The model `x` does not exist. Valid aliases: m.", kind="NotFoundError", param="model", code=404)
    assert openai_error(404, json.dumps(theirs).encode()) == (404, caught.value.body())


def form(model):
    lines = ["--b", 'content-disposition: form-data; name="model"', "", model, "--b--", ""]
    request = request_of(b"/v1/audio/transcriptions", "\r\n".join(lines).encode())
    request.replace_headers([(b"content-type", b"multipart/form-data; boundary=b")])
    return request


async def test_a_form_names_its_model_too():
    """Audio is only looked at for the model's name, and SGLang sees for itself what is wrong with a form."""
    await sglang_wire().request(form("alias"))
    with pytest.raises(ApiError, match="does not exist"):
        await sglang_wire().request(form("x"))
    broken = form("alias")
    broken.body = b"nothing"
    await sglang_wire().request(broken)
    assert broken.body == b"nothing"


@pytest.mark.parametrize(("method", "path"), [(b"GET", b"/v1/models"), (b"GET", CHAT), (b"POST", b"/v1/nothing")])
async def test_other_routes_are_not_read(method, path):
    """What has no model is the engine's affair."""
    request = request_of(path, b"not JSON", method=method)
    assert await sglang_wire().request(request) is None
    assert request.body == b"not JSON"


SCORES = [
    {"score": 0.2, "index": 1, "meta_info": {"id": "1", "prompt_tokens": 7}},
    {"score": 0.9, "index": 2, "meta_info": {"id": "2", "prompt_tokens": 5}},
    {"score": -1.5, "index": 0, "meta_info": None},
]


@pytest.mark.parametrize("path", [b"/rerank", b"/v1/rerank", b"/v2/rerank"])
async def test_sglang_reranks_as_vllm_does(path):
    """Sorted by score, with the documents as they were given, an id, the model and the tokens."""
    documents = ["a", {"text": "b"}, {"content": [{"type": "text", "text": "c"}]}]
    body = {"model": "alias", "query": {"text": "q"}, "documents": documents, "instruction": "find"}
    request, rewrite = await sent(path, body)
    assert request.target == b"/v1/rerank"
    assert json.loads(request.body) == {
        "query": "q",
        "documents": ["a", "b", [{"type": "text", "text": "c"}]],
        "return_documents": False,
        "instruct": "find",
    }
    status, answer = rewrite(200, json.dumps(SCORES).encode())
    assert status == 200
    assert json.loads(answer) == {
        "id": "score-req-1",
        "model": "alias",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "results": [
            {
                "index": 2,
                "document": {"text": None, "multi_modal": [{"type": "text", "text": "c"}]},
                "relevance_score": 0.9,
            },
            {"index": 1, "document": {"text": "b", "multi_modal": None}, "relevance_score": 0.2},
            {"index": 0, "document": {"text": "a", "multi_modal": None}, "relevance_score": -1.5},
        ],
    }


@pytest.mark.parametrize(("top_n", "indices"), [(None, [2, 1, 0]), (0, [2, 1, 0]), (1, [2]), (9, [2, 1, 0])])
async def test_the_best_are_chosen_here(top_n, indices):
    """SGLang scores all of them, so that the tokens of all are counted; documents come back only where they are wanted."""
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": top_n, "return_documents": False}
    request, rewrite = await sent(b"/rerank", body)
    assert "top_n" not in json.loads(request.body)
    answer = json.loads(rewrite(200, json.dumps(SCORES).encode())[1])
    assert [result["index"] for result in answer["results"]] == indices
    assert answer["usage"]["total_tokens"] == 12
    assert set(answer["results"][0]) == {"index", "relevance_score"}


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ({"query": "q", "documents": "a"}, {"documents": ["a"]}),
        ({"query": "q", "documents": ["a"], "top_n": -1}, {"top_n": -1}),
        ({"query": "q", "documents": ["a"], "top_n": "x"}, {"top_n": "x"}),
        ({"query": "q", "documents": ["a"], "return_documents": "x"}, {"return_documents": "x"}),
        ({"query": "q"}, {"query": "q"}),
    ],
)
async def test_invalid_values_are_left_to_sglang(body, seen):
    """A value that it would refuse gets to it."""
    request, _ = await sent(b"/v1/rerank", body)
    assert seen.items() <= json.loads(request.body).items()


@pytest.mark.parametrize(
    "body",
    [
        {"text_1": "q", "text_2": ["a", "b", "c"]},
        {"text_1": ["q"], "text_2": ["a", "b", "c"]},
        {"queries": "q", "documents": ["a", {"text": "b"}, "c"]},
        {"queries": "q", "items": ["a", "b", "c"]},
        {"data_1": "q", "data_2": ["a", "b", "c"]},
    ],
)
@pytest.mark.parametrize("path", [b"/score", b"/v1/score"])
async def test_sglang_scores_as_vllm_does(path, body):
    """vLLM's score request is one for reranking there, answered in the order of the texts."""
    request, rewrite = await sent(path, body)
    assert (request.path, request.target) == (b"/v1/rerank", b"/v1/rerank")
    assert json.loads(request.body) == {"query": "q", "documents": ["a", "b", "c"], "return_documents": False}
    answer = json.loads(rewrite(200, json.dumps(SCORES).encode())[1])
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "score-req-1",
        "object": "list",
        "model": "own:7b",
        "data": [
            {"index": 0, "object": "score", "score": -1.5},
            {"index": 1, "object": "score", "score": 0.2},
            {"index": 2, "object": "score", "score": 0.9},
        ],
        "usage": {
            "prompt_tokens": 12, "total_tokens": 12, "completion_tokens": 0,
            "prompt_tokens_details": None, "completion_tokens_details": None,
        },
    }  # fmt: skip


async def test_sglangs_own_score_request_stays():
    """Its labels are another thing; only the route's other name is known to vLLM's clients."""
    body = b'{"query": "q", "items": ["a"], "label_token_ids": [1, 2], "model": "alias"}'
    request, rewrite = await sent(b"/score", body)
    assert (request.path, request.body, rewrite) == (b"/v1/score", body, None)


async def test_sglang_scores_one_text_against_others_only():
    """Pairs would be a request each."""
    with pytest.raises(ApiError, match="`text_1` must be one text here") as caught:
        await sent(b"/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]})
    assert (caught.value.status, caught.value.param) == (400, "text_1")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"[{}]", b"x"])
async def test_scores_of_an_unknown_form_are_a_failure(body):
    """They are never passed on as if they were an answer."""
    _, rewrite = await sent(b"/rerank", {"query": "q", "documents": ["a"]})
    with pytest.raises(ValueError):
        rewrite(200, body)


def test_the_list_of_models():
    """Names, adapters with what they adapt, and a root for each, in vLLM's form."""
    models = [ModelCard("m", "/models/m", None, 64), ModelCard("lora", "", "m")]
    entry = {"id": "m", "object": "model", "created": 5, "owned_by": "vllm", "root": "/models/m"}
    assert json.loads(model_body(models[0], 5, "vllm")) == {**entry, "parent": None, "max_model_len": 64}
    listed = json.loads(models_body(models, 5, "vllm"))
    assert listed["object"] == "list"
    assert listed["data"][1] == {**entry, "id": "lora", "root": "lora", "parent": "m", "max_model_len": None}


def answered(app, *, rewrite=None, keep_alive=True, rewritten_bytes_max=10**6, **of_request):
    """Run one call, and give what came out of the socket, and the call."""
    theirs, ours = socket.socketpair()
    request = request_of(CHAT, **of_request)

    async def run():
        done = asyncio.Event()
        call = Call(
            request,
            ours,
            "",
            keep_alive=keep_alive,
            stall_s=5,
            ended=done.set,
            adapter=ProtocolAdapter(),
            rewrite=rewrite,
            rewritten_bytes_max=rewritten_bytes_max,
        )
        call.start(app, set(), contextvars.copy_context())
        await done.wait()
        return call

    with theirs, ours:
        ours.setblocking(False)
        call = asyncio.run(run())
        ours.shutdown(socket.SHUT_WR)
        raw = b""
        while piece := theirs.recv(65536):
            raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    return SimpleNamespace(
        status=lines[0], headers=dict(line.split(b": ", 1) for line in lines[1:]), body=body, raw=raw, call=call
    )


def app_of(status, *pieces, headers=()):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": pieces[-1]})
        await send({"type": "http.response.body", "body": b"too much"})

    return app


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_an_error_is_gathered_and_goes_out_with_its_new_length(version):
    """Its head waits for its body, and says what that has become; all other headers stay."""
    headers = [(b"Content-Type", b"text/plain"), (b"content-length", b"5"), (b"Allow", b"POST")]
    seen = answered(app_of(405, b"wr", b"", b"ong", headers=headers), version=version)
    assert seen.status == b"HTTP/1.1 405 Method Not Allowed"
    assert json.loads(seen.body)["error"]["message"] == "wrong"
    assert seen.headers[b"content-length"] == b"%d" % len(seen.body)
    assert (seen.headers[b"content-type"], seen.headers[b"allow"]) == (b"application/json", b"POST")
    assert b"transfer-encoding" not in seen.headers
    assert b"x-ichat-error" not in seen.headers
    assert seen.call.complete
    assert seen.call.keep_alive
    assert seen.call.status == 405


def test_a_too_long_request_is_marked_by_a_header():
    """The gateway goes on to another model without reading the body; no other error has such a header."""
    seen = answered(app_of(400, json.dumps(vllm(TOO_LONG)).encode()))
    assert json.loads(seen.body)["error"]["code"] == "context_length_exceeded"
    assert seen.headers[b"x-ichat-code"] == b"context_length_exceeded"
    assert b"x-ichat-code" not in answered(app_of(400, json.dumps(vllm("Wrong.")).encode())).headers


def test_an_error_without_a_length_needs_none():
    """It would have gone out in chunks, and goes out whole."""
    seen = answered(app_of(422, b'{"detail": "x"}'))
    assert seen.status == b"HTTP/1.1 400 Bad Request"
    assert seen.headers[b"content-length"] == b"%d" % len(seen.body)
    assert seen.call.status == 400


def test_the_error_to_a_head_request_has_no_body():
    """Nor does it have a length, which would be that of another body."""
    seen = answered(app_of(404, b"", headers=[(b"content-length", b"22")]), method=b"HEAD")
    assert (seen.status, seen.body) == (b"HTTP/1.1 404 Not Found", b"")
    assert b"content-length" not in seen.headers
    assert seen.call.complete
    assert seen.call.keep_alive


def test_an_answer_is_rewritten_where_the_request_asked_for_it():
    """An answer that is not, goes out as it comes."""
    app = app_of(200, b"a", b"b", headers=[(b"content-length", b"2")])
    seen = answered(app, rewrite=lambda status, body: (status, b"<%b>" % body), keep_alive=False)
    assert (seen.body, seen.headers[b"content-length"], seen.headers[b"connection"]) == (b"<ab>", b"4", b"close")
    assert answered(app).body == b"ab"


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_is_not_touched(status):
    """There is nothing to rewrite."""
    seen = answered(app_of(status, b""), rewrite=lambda status, body: pytest.fail("rewritten"))
    assert (seen.body, seen.call.complete) == (b"", True)


def test_a_stream_goes_out_piece_by_piece():
    """Nothing of it is held back."""
    app = app_of(200, b"data: 1\n\n", b"data: [DONE]\n\n", headers=[(b"content-type", b"text/event-stream")])
    seen = answered(app)
    assert seen.body == b"9\r\ndata: 1\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


PIECES = (b"data: 1\n\n", event_of(vllm("It failed.", code=500)), b"data: {}\n\n", b"data: [DONE]\n\n")


def test_an_error_in_an_event_stream_is_rewritten_and_is_its_last_event():
    """What stands before it stays; what engines send behind it would make the stream look whole."""
    seen = answered(app_of(200, *PIECES, headers=[(b"content-type", b"text/event-stream")]))
    [_, first, _, error, *rest] = seen.body.split(b"\r\n")
    assert (first, rest) == (PIECES[0], [b"0", b"", b""])
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert seen.call.complete
    assert seen.call.keep_alive


def test_an_error_event_in_a_text_is_unchanged():
    """Bodies that are no streams of events are what they were."""
    seen = answered(app_of(200, *PIECES, headers=[(b"content-type", b"text/plain")]))
    assert seen.body.split(b"\r\n")[1::2] == [*PIECES, b""]


def test_an_answer_that_is_too_large_to_be_rewritten():
    """It fails before anything has been sent, and what follows it is not taken."""
    seen = answered(app_of(500, b"12345", b"678901", b"2"), rewritten_bytes_max=10)
    assert (seen.raw, seen.call.head_sent, seen.call.complete) == (b"", False, False)
    assert seen.call.failure.message == "The engine failed: its answer has more than 10 bytes."


def test_an_answer_that_cannot_be_rewritten(caplog):
    """The client gets an error of the worker's, and the reason is in the log."""

    def rewrite(status, body):
        raise ValueError("in an unknown form")

    seen = answered(app_of(200, b"[]"), rewrite=rewrite)
    assert (seen.raw, seen.call.failure.code) == (b"", "engine_failed")
    assert "in an unknown form" in caplog.text


def test_an_error_that_breaks_off():
    """A body that never ended is no answer."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    seen = answered(app)
    assert (seen.raw, seen.call.failure.code, seen.call.head_sent) == (b"", "engine_failed", False)


SHORT, LONG = b'{"reasoning":"a"}', b'{"reasoning_content":"a"}'
BOTH = b'{"reasoning":"a","reasoning_content":"a"}'
LOOKS_ALIKE = json.dumps({"content": 'say "reasoning": "x" and "reasoning_content": "y"'}).encode()


def post_to(path):
    return Request(
        method=b"POST", target=path, path=path, version=b"1.1", headers=[], body=b"", id=b"r", keep_alive=True
    )


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("engine", SHORT, SHORT),
        ("engine", LONG, LONG),
        ("reasoning", SHORT, SHORT),
        ("reasoning", LONG, SHORT),
        ("reasoning_content", SHORT, LONG),
        ("reasoning_content", LONG, LONG),
        ("both", SHORT, BOTH),
        ("both", LONG, BOTH),
        *((field, LOOKS_ALIKE, LOOKS_ALIKE) for field in FIELDS),
    ],
)
def test_thoughts_get_the_name_that_is_asked_for(field, given, expected):
    """Of a chat that went well, whole and in a stream; text that looks like a name stays, and so do other routes."""
    wire = ProtocolAdapter()
    wire.settings = AdapterSettings(reasoning_field=field)
    edit, rewrite = wire.edit(post_to(CHAT)), wire.response(post_to(CHAT), 200, [], None)
    assert (edit(given) if edit else given) == expected
    assert (rewrite(200, given) if rewrite else (200, given)) == (200, expected)
    assert wire.response(post_to(CHAT), 200, [(b"content-type", b"text/event-stream; charset=utf-8")], None) is None
    assert wire.edit(post_to(b"/v1/completions")) is None
    assert wire.response(post_to(b"/v1/completions"), 200, [], None) is None


@pytest.mark.parametrize("thoughts", ['a "quote", a \\, a \n', "ü", "", None])
def test_thoughts_under_both_names_are_the_same(thoughts):
    """Whatever stands in them."""
    found = json.loads(RENAMES["both"](json.dumps({"reasoning_content": thoughts, "content": "x"}).encode()))
    assert found == {"reasoning": thoughts, "reasoning_content": thoughts, "content": "x"}


def test_the_reason_of_a_refusal_is_fit_for_a_header():
    """Whatever stands in the message: the gateway shows it, and nothing of it ends the line."""
    error = ApiError(503, "model_not_ready", "The model `m` is not ready: a\r\nb: ü" + "x" * 999 + ".")
    assert error.why() == b"a??b: ?" + b"x" * 493
    assert ApiError(503, "draining", "This server is shutting down.").why() == b""


class ReplacesOne(ProtocolAdapter):
    """An adapter of another package, whose requests may wait."""

    async def request(self, request):
        """See `ProtocolAdapter.request`."""
        return await super().request(request)


class ReplacesBoth(ReplacesOne):
    """An adapter that also says how small requests are prepared."""

    def prepare(self, request):
        """See `ProtocolAdapter.prepare`."""
        return openai_error


def test_only_an_adapter_that_says_how_is_called_on_the_engines_loop():
    """A class that replaces `request` alone is not: its requests may wait, and `prepare` would leave it out."""
    assert ProtocolAdapter().can_prepare
    assert sglang_wire().can_prepare
    assert not ReplacesOne().can_prepare
    assert ReplacesBoth().can_prepare


async def test_a_small_request_is_prepared_as_in_trio():
    """Both hooks make the same of it; a request that waits is not prepared."""
    for wire in (ProtocolAdapter(VLLM_PATHS), sglang_wire()):
        body = {"query": "q", "documents": [{"text": "d"}], "return_documents": False, "top_n": None}
        prepared, changed = request_of(b"/v1/rerank", body), request_of(b"/v1/rerank", body)
        assert wire.prepare(prepared) is not None
        await wire.request(changed)
        assert (prepared.target, prepared.body) == (changed.target, changed.body)
        large = request_of(b"/v1/rerank", b'{"documents": [' + b'"d", ' * 500_000 + b'"d"], "query": "q"}')
        with pytest.raises(RuntimeError):
            await trio.to_thread.run_sync(wire.prepare, large)
