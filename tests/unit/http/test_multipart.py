"""Multipart forms: read as their senders meant them, or refused."""

import re

import httpx
import openai
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.peers import outcome, turns_during

from ichat.errors import ApiError
from ichat.http import json_body as bodies
from ichat.http.multipart import fields_of, model_in_form, rewrite_form

SIZE = 2_000_000


@pytest.fixture(autouse=True, scope="module", params=["tiny windows", "real windows"])
def windows(request):
    """Every invariant holds wherever a window ends."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiny windows":
            patch.setattr(bodies, "WINDOW_BYTES_MAX", 5)
        yield


TYPE = b"multipart/form-data; boundary=bound"


def form(dispositions, contents, boundary=b"bound"):
    parts = [
        b"--%b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % (boundary, disposition, content)
        for disposition, content in zip(dispositions, contents, strict=True)
    ]
    return b"".join([*parts, b"--%b--\r\n" % boundary])


CONTENTS = st.lists(
    st.sampled_from(
        [b"\r\n", b"--", b"\r", b"\n", b"-", b"bound", b"\r\n--boundary", b"\r\n-bound", b"--bound", b"model"]
    )
    | st.binary(max_size=5),
    max_size=8,
).map(b"".join)


@given(
    st.lists(st.tuples(st.sampled_from(["x", "model", 'q"', "ü", "a;b", "\\"]), st.booleans(), CONTENTS), max_size=6)
)
async def test_fields_are_those_that_were_put_in(parts):
    """Names, files and contents come out as they went in, whatever bytes stand in them."""
    assume(parts)
    contents = [content for *_, content in parts]
    assume(not any(re.search(rb"\A--bound|\r\n--bound[\r\n\t -]", content + b"\r\n") for content in contents))
    escaped = [name.replace("\\", "\\\\").replace('"', '\\"').encode() for name, *_ in parts]
    dispositions = [
        b'form-data; name="%b"%b' % (name, b'; filename="a;\\"b.wav"' if is_file else b"")
        for name, (_, is_file, _) in zip(escaped, parts, strict=True)
    ]
    body = form(dispositions, contents)
    fields = await fields_of(body, TYPE)
    found = [(field.name.decode(), field.is_file, body[field.value_start : field.end]) for field in fields]
    assert found == parts
    assert rewrite_form(body, fields, {b"x": b"new"}) == form(
        dispositions, [b"new" if name == "x" else content for name, _, content in parts]
    )


@given(st.data())
async def test_a_mutilated_form_is_refused_or_read(data):
    """No change to a form makes anything happen but an answer or a 400."""
    body = bytearray(form([b'form-data; name="model"', b'form-data; name="f"; filename="a"'], [b"m", b"content"]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        junk = st.sampled_from([b"", b"\r", b"\n", b"-", b'"', b";", b"=", b"\\", b"\xff", b"--bound"])
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(junk)
    assert await outcome(model_in_form(body, TYPE))


async def test_reads_what_httpx_writes():
    """A form of httpx names its model, and another one put there is what httpx would have written."""
    files = {"file": ('odd "name"; ü.wav', bytes(range(256)) * 20 + b"\r\n--", "audio/wav")}
    content_type = b"multipart/form-data; boundary=----fixed"
    before, after = (
        httpx.Request(
            "POST",
            "http://x/",
            headers={"content-type": content_type.decode()},
            data={"prompt": "a\r\nb", "model": model, "t[]": ["1", "2"]},
            files=files,
        ).read()
        for model in ("whisper/ü 1", "another")
    )
    assert await model_in_form(before, content_type) == "whisper/ü 1"
    fields = await fields_of(before, content_type)
    assert [(field.name, field.is_file) for field in fields] == [
        (b"prompt", False), (b"model", False), (b"t[]", False), (b"t[]", False), (b"file", True),
    ]  # fmt: skip
    assert rewrite_form(before, fields, {b"model": b"another"}) == after
    request = httpx.Request("POST", "http://x/", data={"model": "m"}, files=files)
    assert await model_in_form(request.read(), request.headers["content-type"].encode()) == "m"


async def test_reads_what_openai_writes():
    """A transcription asked for with the client that most users have names its model."""
    seen = []

    def reply(request):
        seen.append(request)
        return httpx.Response(200, json={"text": ""})

    with openai.OpenAI(
        api_key="x", base_url="http://x/v1", http_client=httpx.Client(transport=httpx.MockTransport(reply))
    ) as client:
        client.audio.transcriptions.create(
            model="whisper-1", file=("a.wav", b"RIFF\r\n--"), timestamp_granularities=["word", "segment"]
        )
    assert await model_in_form(seen[0].read(), seen[0].headers["content-type"].encode()) == "whisper-1"


ONE = b'Content-Disposition: form-data; name="model"\r\n\r\nm'


@pytest.mark.parametrize(
    "body",
    [
        b"--bound\r\n" + ONE + b"\r\n--bound--",
        b"--bound\r\n" + ONE + b"\r\n--bound--\n",
        b"\r\n--bound\r\n" + ONE + b"\r\n--bound-- \r\nepilogue\r\n--bound\r\n",
        b"--bound\r\ncontent-disposition:Form-Data;NAME=model;\r\nX-Other: a;b\r\n\r\nm\r\n--bound--",
        b"--bound\r\n" + ONE + b"\r\n--bound\r\n" + ONE + b"\r\n--bound--",
        b'--bound\r\nContent-Disposition: form-data; name=model ; x="\\";name=\\"y\\""\r\n\r\nm\r\n--bound--',
        b"--bound\r\n" + ONE + b'\r\n--bound\r\nContent-Disposition: form-data; name="y"\r\n\r\n\r\n--bound--',
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [bytes, bytearray])
async def test_forms_that_name_a_model(body, kind):
    """What RFC 7578 lets a client write is read."""
    assert await model_in_form(kind(body), b'Multipart/Form-Data ; charset=UTF-8; boundary="bound"') == "m"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "does not begin with the boundary"),
        (b"preamble\r\n--bound\r\n" + ONE + b"\r\n--bound--", "does not begin with the boundary"),
        (b"--bound", "line break"),
        (b"--bound\r\n" + ONE, "closing boundary"),
        (b"--bound\r\n" + ONE + b"\r\n--bound", "closing boundary"),
        (b"--bound\r\n" + ONE + b"\r\n--bound-", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound\n", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound \r\n", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound--x", "line break"),
        (b"--bound\n" + ONE + b"\r\n--bound--", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--boundless--", "closing boundary"),
        (b"--bound\r\n" + ONE + b"--bound--", "closing boundary"),
        (b"--bound\r\n" + ONE[:-1] + b"--bound--", "no line break before"),
        (b"--bound\r\nContent-Disposition: form-data; name=model", "head does not end"),
        (b"--bound\r\nX: %b\r\n\r\n" % (b"x" * 9000), "head does not end within 8192"),
        (b"--bound\r\n\r\nm\r\n--bound--", "a part"),
        (b"--bound\r\nContent-Type: text/plain\r\n\r\nm\r\n--bound--", "one Content-Disposition"),
        (b"--bound\r\nContent-Disposition: form-data; name=x\r\n" + ONE + b"\r\n--bound--", "one Content-Disposition"),
        (b"--bound\r\nContent-Disposition: form-data;\r\n name=model\r\n\r\nm\r\n--bound--", "header line"),
        (b"--bound\r\nContent-Disposition : form-data; name=model\r\n\r\nm\r\n--bound--", "header line"),
        (b"--bound\r\nContent-Disposition: form-data\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: attachment; name=model\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: form-data; name=x; name*=u''model\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: form-data; name=x; NAME=model\r\n\r\nm\r\n--bound--", "twice"),
        (b'--bound\r\nContent-Disposition: form-data; name="model\r\n\r\nm\r\n--bound--', "parameter"),
        (b"--bound\r\n" + ONE + b"\r\n--bound\r\n" + ONE + b"2\r\n--bound--", "they differ"),
        (b"--bound\r\n" + ONE + b"\xff\r\n--bound--", "UTF-8"),
        (b"--bound\r\n" + ONE[:-1] + b"\r\n--bound--", "must name its model"),
        (b"--bound\r\n" + ONE.replace(b"model", b"mode1") + b"\r\n--bound--", "must name its model"),
        (b"--bound--", "must name its model"),
        (b"--bound\r\n" + ONE.replace(b'l"', b'l"; filename=x') + b"\r\n--bound--", "not a file"),
        (b"--bound\r\n" + ONE * bodies.NAME_BYTES_MAX + b"\r\n--bound--", "not a file"),
        ((b"\r\n--bound\r\n" + ONE) * 1001 + b"\r\n--bound--", "more than 1000 parts"),
    ],
)  # fmt: skip
async def test_forms_that_are_refused(body, sentence):
    """A form that is wrong, cut short or could be read in two ways is refused with what is wrong about it."""
    with pytest.raises(ApiError, match=sentence) as caught:
        await model_in_form(body, TYPE)
    assert (caught.value.status, caught.value.code) == (400, "bad_request")


@pytest.mark.parametrize(
    "content_type",
    [
        b"", b"multipart/form-data", b"multipart/form-data; boundary=", b'multipart/form-data; boundary=""',
        b"multipart/mixed; boundary=bound", b"application/json", b"multipart/form-data; boundary=b; boundary=bound",
        b"multipart/form-data; boundary=" + b"b" * 71, b'multipart/form-data; boundary="bound ', b"multipart/form-data; =;",
        b'multipart/form-data; boundary="bo\xfcnd"', b'multipart/form-data; boundary="bound "',
        b"multipart/form-data; boundary=bound; charset=utf-16", b"multipart/form-data boundary=bound",
    ],
)  # fmt: skip
async def test_content_types_that_are_refused(content_type):
    """Without exactly one valid boundary nothing is guessed."""
    body = b"--bound\r\n" + ONE + b"\r\n--bound--"
    assert await model_in_form(body, TYPE) == "m"
    with pytest.raises(ApiError, match=r"content type|UTF-8") as caught:
        await model_in_form(body, content_type)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content",
    [b"x" * SIZE, b"\r\n--bound" * (SIZE // 9), b"\r\n--bbx" * (SIZE // 7), b"\r" * SIZE],
    ids=["plain", "nearly boundaries", "longer boundaries", "line breaks"],
)
async def test_others_have_their_turn_while_a_form_is_scanned(content):
    """Whatever stands in a large file, other tasks are not held up by it."""
    body = form([b'form-data; name="file"; filename="a"'], [content], b"bb")
    assert await turns_during(model_in_form(body, b"multipart/form-data; boundary=bb")) >= SIZE // (
        2 * bodies.TURN_BYTES_MAX
    )


async def test_others_have_their_turn_between_parts():
    """Many small parts do not hold up others either."""
    body = form([b'form-data; name="x"'] * 900, [b"1"] * 900, b"bb")
    assert await turns_during(model_in_form(body, b"multipart/form-data; boundary=bb")) >= 10
