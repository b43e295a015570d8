"""A form is read by gateway and engine in the same way, or by neither: what a key is for, and what steers an engine."""

import json
import re

import pytest
from support.forms import (
    CLIENTS,
    Verdicts,
    by_email,
    by_python_multipart,
    by_starlette,
    judge_many,
    reading,
    steering,
)
from support.peers import plain

from ichat.security.keys import hash_of

TYPE = b"multipart/form-data; boundary=bound"
FILE = b'--bound\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
MODEL = b'--bound\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-a\r\n'
END = b"--bound--\r\n"


def secret(head, value=b"whisper-secret", file=FILE):
    """Return a form for the model whisper-a, with one more part of this head."""
    return MODEL + file + b"--bound\r\n" + head + b"\r\n\r\n" + value + b"\r\n" + END


DISPOSITION = b"Content-Disposition: form-data; "
PADDED = MODEL.replace(b"whisper-a", b"whisper-secret").replace(b"bound\r", b"bound \r")
OTHER = b'--other\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-secret\r\n--other--\r\n'
TRICKS = {  # a content type, a body, and a parser that reads another model, or more that steers an engine, than is asked for
    "an escape within an escape": (TYPE, secret(DISPOSITION + rb'name="x"; a="\\"; c="; name=model; d="'), by_starlette),
    "the same for the queue": (TYPE, secret(DISPOSITION + rb'name="x"; a="\\"; c="; name=priority; d="', b"-1"), by_starlette),
    "and below it": (TYPE, secret(DISPOSITION + rb'name="x"; a="\\"; c="; name=model; d="'), by_python_multipart),
    "a continued parameter": (TYPE, secret(DISPOSITION + b'name="x"; name*0="model"'), by_email),
    "an extended parameter": (TYPE, secret(DISPOSITION + b"name*=utf-8''model"), by_email),
    "two dispositions": (TYPE, secret(DISPOSITION + b'name="x"\r\n' + DISPOSITION + b'name="model"'), by_starlette),
    "two names": (TYPE, secret(DISPOSITION + b'name="x"; name="model"'), by_starlette),
    "a folded head": (TYPE, secret(DISPOSITION + b'\r\n name="model"'), by_email),
    "a line break of one byte": (TYPE, secret(b"X: y\n" + DISPOSITION + b'name="model"'), by_email),
    "a delimiter after a line feed": (
        TYPE, MODEL + FILE.replace(b"RIFF\r\n", b"RIFF\n" + MODEL.replace(b"-a", b"-secret")) + END, by_email,
    ),
    "a delimiter with blanks": (TYPE, MODEL + PADDED + END, by_email),
    "a part with parts": (
        TYPE, secret(DISPOSITION + b'name="x"\r\nContent-Type: multipart/mixed; boundary=other', OTHER[:-2]), by_email,
    ),
    "a part in another coding": (
        TYPE, MODEL.replace(b'"model"', b'"model"\r\nContent-Transfer-Encoding: quoted-printable').replace(b"-a", b"=2Dsecret")
        + FILE + END, by_email,
    ),
    "a second boundary": (TYPE + b"; boundary=other", OTHER + MODEL + FILE + END, by_starlette),
    "another charset": (TYPE + b"; charset=utf-7", MODEL.replace(b"-a", b"+AC0-secret") + FILE + END, by_starlette),
    "fields of a URL": (b"Application/X-WWW-Form-Urlencoded", b'{"model":"whisper-a","x":"&model=whisper-secret&y="}', by_starlette),
}  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS)
def test_each_trick_is_one(trick):
    """There is a parser that reads of it what its sender may not have: the tests below are about something."""
    content_type, body, reader = TRICKS[trick]
    values = [value for _, _, value in steering(reading(reader, content_type, body))]
    assert {b"whisper-secret", b"-1"} & {*values}, values


def ask(target, content_type, body, *more):
    lines = [b"POST %b HTTP/1.1" % target, b"Host: x", b"Authorization: Bearer sk-a-0123456789", *more]
    lines += [b"Content-Type: " + content_type, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


@pytest.fixture
async def site(serve, gateway_to, connect, monkeypatch):
    """Start a gateway with a worker of two models, an external route, and a key for whisper-a, `named` and cheap.

    `status, error, forms = await site(content_type, body)`: what the client got, and all that an upstream did.
    """
    monkeypatch.setenv("T_TOKEN", "sk-token-0123456789")
    upstream, port = await serve(lambda stream, head, body: stream.send_all(plain(b"{}")))
    config = f"""
[security]
join_token_env = "T_TOKEN"
[[security.keys]]
name = "a"
key_hash = "{hash_of("sk-a-0123456789")}"
models = ["whisper-a", "named", "cheap"]
[[models]]
name = "named"
targets = [{{ model = "whisper-a" }}]
set = {{ priority = [1], vllm_xargs = {{ a = 1 }}, rid = "a\\nb", language = "de", user = "to --be" }}
"""
    client = await connect(await gateway_to({"cheap": port}, config))
    heartbeat = {
        "worker_id": "w", "model_name": "whisper-a", "host": "127.0.0.1", "port": port,
        "model_names": ["whisper-a", "whisper-secret"],
    }  # fmt: skip
    joins = ask(b"/v1/workers/heartbeat", b"application/json", json.dumps(heartbeat).encode())
    await client.send(joins.replace(b"sk-a-", b"sk-token-"))
    assert (await client.response())[0] == 200

    async def send(content_type, body, *more):
        await client.send(ask(b"/v1/audio/transcriptions", content_type, body, *more))
        status, _, answer = await client.response()
        asked = [(head, body) for head, body in upstream.requests if b"audio" in head.target]
        error = "" if status == 200 else json.loads(answer)["error"]["message"]
        return status, error, [(dict(head.headers)[b"content-type"], body) for head, body in asked]

    return send


@pytest.mark.parametrize("trick", TRICKS)
async def test_an_ambiguous_form_is_refused(site, trick):
    """With a sentence; no byte of it reaches a worker, or an external route."""
    content_type, body, _ = TRICKS[trick]
    for sent in (body, body.replace(b"whisper-a", b"cheap")):
        status, error, arrived = await site(content_type, sent)
        assert (status, arrived) == (400, [])
        assert re.search(r"form\b|content type", error)


async def test_two_content_types_are_refused(site):
    """One parser takes the first, another one the last."""
    json_body = b'{"model":"whisper-a"}'
    for first, second, body in ((TYPE, b"application/json", MODEL + END), (b"application/json", TYPE, json_body)):
        assert await site(first, body, b"Content-Type: " + second) == (400, "A request must have one content type.", [])


async def test_a_rewritten_form_reads_the_same_in_each_parser(site):
    """Also where a client has written it in its own way: each parser reads the same, and nothing steers the engine."""
    body = (
        b"--bound\r\nContent-Type: text/plain; charset=utf-16\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper-a\r\n"
        b"--bound\r\nContent-Disposition: form-data; name=priority\r\n\r\n-1\r\n"
        b"--bound\r\nContent-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a%22%3B%20name%3Dmodel%3B.wav\r\n"
        b"X-More: 1\r\n\r\n\0\xff\r\n--bound--"
    )  # fmt: skip
    status, _, [(content_type, arrived)] = await site(b'multipart/form-data; charset=UTF-8; boundary="bound"', body)
    assert (status, content_type) == (200, TYPE)
    assert arrived == (
        MODEL.replace(b'"model"', b'"model"\r\nContent-Type: text/plain')
        + FILE.replace(b"a.wav", b"a__ name=model_.wav").replace(b"RIFF", b"\0\xff") + END
    )  # fmt: skip
    for reader in (by_starlette, by_python_multipart, by_email):
        assert reader(content_type, arrived) == [(b"model", False, b"whisper-a"), (b"file", True, b"\0\xff")]


async def test_fields_that_a_name_sets_are_not_the_clients(site):
    """Where a form cannot have the operator's value, such as a table or text of two lines, it has none."""
    mine = [b"priority", b"vllm_xargs", b"rid", b"language"]
    parts = b"".join(b'--bound\r\nContent-Disposition: form-data; name="%b"\r\n\r\n-1\r\n' % name for name in mine)
    status, _, [(content_type, arrived)] = await site(TYPE, parts + MODEL.replace(b"whisper-a", b"named") + FILE + END)
    assert status == 200
    assert by_starlette(content_type, arrived) == [
        (b"user", False, b"to --be"), (b"language", False, b"de"), (b"model", False, b"whisper-a"), (b"file", True, b"RIFF"),
    ]  # fmt: skip


async def test_a_boundary_that_would_end_the_operator_s_value_is_refused(site):
    """The client chooses the boundary, and may know what the gateway will write into the form."""
    body = (MODEL.replace(b"whisper-a", b"named") + FILE + END).replace(b"--bound", b"--be")
    status, error, arrived = await site(b"multipart/form-data; boundary=be", body)
    assert (status, arrived) == (400, [])
    assert "choose another boundary" in error


def test_thousands_of_forms_have_one_reading():
    """Of honest clients, and of others; `tests/soak/test_fuzz_forms.py` has more of them."""
    verdicts = Verdicts()
    judge_many("fast", range(3000), verdicts)
    assert verdicts.read > 1200
    assert verdicts.refused > 600
    assert min(verdicts.rewritten, verdicts.steering, verdicts.two_readings) > 0
    assert len(CLIENTS) > 10
