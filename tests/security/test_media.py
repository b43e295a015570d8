"""A client has no engine fetch a picture, a sound or a video from an address of its choice."""

import json

import pytest

from ichat.config import load as configuration
from ichat.engines.adapter import AdapterSettings, ProtocolAdapter
from ichat.engines.media import without_data
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.errors import ApiError, Exit
from ichat.http.request import Request
from ichat.roles.worker_options import read_command_line
from ichat.supervisor.launch import command_of

LOCAL = "http://127.0.0.1:9/a.png"
PNG = "data:image/png;base64,iVBORw0KGgo="
CHAT, RESPONSES, MESSAGES = b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"


def part(kind, value):
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: value}, {"type": "text", "text": "?"}]}]}


def block(source):
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


FORMS = {
    "chat": lambda url: (CHAT, part("image_url", {"url": url})),
    "chat, short": lambda url: (CHAT, part("image_url", url)),
    "video": lambda url: (CHAT, part("video_url", {"url": url})),
    "audio": lambda url: (CHAT, part("audio_url", {"url": url})),
    "no type": lambda url: (CHAT, {"messages": [{"role": "user", "content": [{"image_url": url}]}]}),
    "a tool's answer": lambda url: (CHAT, {"messages": [{"role": "tool", "content": [{"image_url": {"url": url}}]}]}),
    "responses": lambda url: (RESPONSES, {"input": [{"content": [{"type": "input_image", "image_url": url}]}]}),
    "a call's output": lambda url: (RESPONSES, {"input": [
        {"type": "function_call_output", "output": [{"type": "input_image", "image_url": url}]}]}),
    "messages": lambda url: (MESSAGES, block({"type": "url", "url": url})),
    "messages, a tool's result": lambda url: (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]}]}),
    "embeddings": lambda url: (b"/v1/embeddings", {"input": [{"text": "x", "image": url}]}),
    "embeddings of chats": lambda url: (b"/v1/embeddings", part("image_url", {"url": url})),
    "Cohere's": lambda url: (b"/v2/embed", {"images": [url]}),
    "rerank": lambda url: (b"/v1/rerank", {"query": "x", "documents": [{"content": part("image_url", {"url": url})["messages"][0]["content"]}]}),
    "score": lambda url: (b"/v1/score", {"data_1": "x", "data_2": {"content": [{"image_url": {"url": url}}]}}),
    "tokenize": lambda url: (b"/v1/tokenize", part("image_url", {"url": url})),
    "SGLang's own": lambda url: (b"/generate", {"text": "x", "image_data": [[{"url": url}]]}),
    "SGLang's own sounds": lambda url: (b"/generate", {"text": "x", "audio_data": url}),
}  # fmt: skip


def sglang():
    return SGLangAdapter(lambda: (["m"], []))


def asking(path, body):
    data = body if isinstance(body, bytes | bytearray) else json.dumps({"model": "m", **body}).encode()
    return Request(b"POST", path, path, b"1.1", [(b"content-type", b"application/json")], data, b"req-1", True)


async def outcome(adapter, path, body):
    """Return the message of the refusal; "" for a request that the engine gets."""
    try:
        await adapter.request(asking(path, body))
    except ApiError as error:
        return error.message if (error.status, error.code) == (400, "bad_request") else repr(error)
    return ""


@pytest.mark.parametrize("make", [ProtocolAdapter, sglang])
@pytest.mark.parametrize("form", FORMS)
async def test_no_url_reaches_an_engine(form, make):
    """In no form of any route; what the request contains itself passes, and so does an allowed domain."""
    adapter = make()
    message = await outcome(adapter, *FORMS[form](LOCAL))
    assert "would be fetched from 127.0.0.1" in message
    assert "media_domains" in message
    assert "--media-domains" in message
    path, body = FORMS[form](PNG)
    assert "media_domains" not in await outcome(adapter, path, body)
    adapter.settings = AdapterSettings(media_domains=frozenset(["example.com"]))
    assert "media_domains" in await outcome(adapter, *FORMS[form](LOCAL))
    assert "media_domains" not in await outcome(adapter, *FORMS[form]("https://Example.com/a.png?b=c"))


@pytest.mark.parametrize(
    "url",
    [
        "HTTP://127.0.0.1/", " http://127.0.0.1/", "\thttps://127.0.0.1", "http:/127.0.0.1", "ftp://127.0.0.1/", "//127.0.0.1/",
        "http:/\\127.0.0.1\\", "rtsp://127.0.0.1/", "http://example.com@127.0.0.1/", "http://127.0.0.1\\@example.com/",
        "http://example.com:80@127.0.0.1/", "http://127.0.0.1#@example.com/", "http://127.0.0.1?@example.com/",
        "http://example.com.evil.example/", "http://evil-example.com/", "http://example.com \r\nHost: x", "http://example。com/",
        "http://[::1]/", "http://2130706433/", "https://example.com:443\\.evil.example/", "http://",
    ],
)  # fmt: skip
async def test_a_url_has_one_host(url):
    """Whatever another parser would take for the host: only a plain URL of an allowed domain passes."""
    adapter = ProtocolAdapter()
    adapter.settings = AdapterSettings(media_domains=frozenset(["example.com"]))
    assert "media_domains" in await outcome(adapter, *FORMS["chat"](url))
    assert await outcome(adapter, *FORMS["chat"]("http://example.com:8080/a/b?c=d#e")) == ""
    assert await outcome(adapter, *FORMS["chat"]("https://example.com")) == ""


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"content": [{"\\u0069mage_\\u0075rl": {"url": "http://127.0.0.1/"}}]}]}',
        b'{"messages": [{"content": [{"image_url": "\\u0068ttp:\\/\\/127.0.0.1/"}]}]}',
        b'{"messages": [{"content": [{"image_url": "http://127.0.0.1/", "image_url": "data:x"}]}]}',
        b'{"messages": [{"content": [{"image_url": "data:x", "image_url": "http://127.0.0.1/"}]}]}',
        b'{"n": ' + b"9" * 5000 + b', "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        b'{"n": NaN, "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        b'{"a": "\\"data:", "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        b'{"a": "data:\\"", "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        b'{"a": "\\\\", "b": "data:", "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        '{"messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}'.encode("utf-16"),
        '{"messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}'.encode("utf-32-le"),
        bytearray(b'{"messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}'),
        b'{"pad": "' + b"x" * 100_000 + b'", "messages": [{"content": [{"image_url": "http://127.0.0.1/"}]}]}',
        b'{"messages": [{"content": [{"image_url": ' + b"[" * 5000 + b'"http://127.0.0.1/"' + b"]" * 5000 + b"}]}]}",
    ],
)
async def test_no_way_of_writing_hides_a_url(body):
    """Escapes, repeated names, long numbers, other encodings, size and depth."""
    message = await outcome(ProtocolAdapter(), CHAT, body)
    assert "media_domains" in message or "nested too deep" in message


async def test_urls_that_are_only_data_pass():
    """Texts, the parameters and calls of tools, and schemas are not fetched, whatever they name."""
    adapter = ProtocolAdapter()
    for body in (
        {"messages": [{"role": "user", "content": f"what is image_url {LOCAL}?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LOCAL}, {"type": "image_url", "image_url": PNG}]}]},
        {"messages": [], "tools": [{"function": {"parameters": {"image_url": {"default": LOCAL}}}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps({"image_url": LOCAL})}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"image_url": LOCAL}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": LOCAL}}]}]},
        {"messages": [], "metadata": {"image": LOCAL}, "documents": [{"url": LOCAL, "text": "source"}]},
        {"messages": [], "audio": {"voice": "alloy", "format": "wav"}},
    ):  # fmt: skip
        assert await outcome(adapter, CHAT, body) == ""
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="audio"\r\n\r\nhttp://x/\r\n--b--\r\n'
    assert await outcome(adapter, b"/v1/audio/transcriptions", form) == ""


async def test_sglang_opens_no_file(tmp_path):
    """It reads any file whose path it gets; vLLM has a setting for that, which is left to it."""
    path = tmp_path / "a.png"
    path.write_bytes(b"x")
    adapter = sglang()
    for url in (f"file://{path}", "FILE:///no", str(path), f"x://h{path}", f"{tmp_path}/%61.png"):
        assert "media_domains" in await outcome(adapter, *FORMS["chat"](url)), url
    assert await outcome(adapter, *FORMS["chat"]("iVBORw0KGgo=")) == ""
    assert await outcome(ProtocolAdapter(), *FORMS["chat"](f"file://{path}")) == ""
    adapter.settings = AdapterSettings(media_domains=frozenset(["file:"]))
    assert await outcome(adapter, *FORMS["chat"](f"file://{path}")) == ""
    assert "media_domains" in await outcome(adapter, *FORMS["chat"](LOCAL))


def test_a_body_without_its_data_urls():
    """It is the same JSON otherwise, and small."""
    body = json.dumps({"a": PNG, "b": [PNG * 1000], "c": 'x"data:y', "d": "data:\\", "e": "data:"}).encode()
    found = json.loads(without_data(body))
    assert found == {"a": "data:", "b": ["data:"], "c": 'x"data:y', "d": "data:\\", "e": "data:"}
    for broken in (b'"data:', b'{"a": "data:x', b'"data:"', b""):
        assert len(without_data(broken)) <= len(broken)


def test_a_small_request_waits_for_nothing():
    """It is read on the engine's loop, which has no Trio."""
    with pytest.raises(StopIteration):
        ProtocolAdapter().request(asking(CHAT, FORMS["chat"](PNG)[1])).send(None)
    with pytest.raises(ApiError):
        ProtocolAdapter().request(asking(CHAT, FORMS["chat"](LOCAL)[1])).send(None)


def test_the_setting_reaches_the_worker():
    """From the worker's table to its command line, and from there to the adapter."""
    text = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\nmedia_domains = %s\n'
    config = configuration.parse(text % '["example.com", "file:"]', "t")
    command = command_of(config, config.managed_workers[0], "m-0", "/s", "/c")
    options, engines = read_command_line(command[command.index("worker") + 1 :])
    assert options.media_domains == ["example.com", "file:"]
    assert "example.com" not in engines
    for wrong in ('["http://example.com"]', '["Example.com"]', '["*"]', '[""]'):
        with pytest.raises(Exit, match="media_domains"):
            configuration.parse(text % wrong, "t")
    with pytest.raises(Exit, match="--media-domains must be domains"):
        read_command_line(["--media-domains", "http://x"])
