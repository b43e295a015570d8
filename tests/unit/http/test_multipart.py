"""Multipart forms: read as their senders meant them, or refused."""

import httpx
import openai
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.peers import outcome, turns_during

from ichat.errors import ApiError
from ichat.http import json_body as bodies
from ichat.http.multipart import fields_of, model_in_form, read_form, rewrite_form

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
    st.sampled_from([b"\r\n", b"--", b"\r", b"\n", b"-", b"bound", b"\r\n-bound", b"--boun", b"model"])
    | st.binary(max_size=5),
    max_size=8,
).map(b"".join)


@given(
    st.lists(
        st.tuples(st.sampled_from(["x", "model", "q'", "ü", "a,b[]", "*"]), st.booleans(), CONTENTS),
        min_size=1,
        max_size=6,
    )
)
async def test_fields_are_those_that_were_put_in(parts):
    """Names, files and contents come out as they went in, whatever bytes stand in them; the form stays as it was."""
    contents = [content for *_, content in parts]
    assume(not any(b"--bound" in content for content in contents))
    dispositions = [
        b'form-data; name="%b"%b' % (name.encode(), b'; filename="a b.wav"' if is_file else b"")
        for name, is_file, _ in parts
    ]
    body = form(dispositions, contents)
    read = await read_form(body, TYPE)
    assert (read.body is body, read.content_type) == (True, TYPE)
    found = [(field.name, field.is_file, body[field.value_start : field.end]) for field in read.fields]
    assert found == parts
    assert rewrite_form(body, read.fields, {"x": b"new"}) == form(
        dispositions, [b"new" if name == "x" else content for name, _, content in parts]
    )


HEADS = [  # a part's head, and what is passed on of it
    (b'Content-Disposition: form-data; name="x"', b'Content-Disposition: form-data; name="x"'),
    (b"content-disposition:Form-Data;NAME=x", b'Content-Disposition: form-data; name="x"'),
    (b'X-More: 1\r\nContent-Disposition: form-data; name="x"', b'Content-Disposition: form-data; name="x"'),
    (
        b'Content-Type: text/plain; charset=utf-16\r\nContent-Disposition: form-data; name="x"',
        b'Content-Disposition: form-data; name="x"\r\nContent-Type: text/plain',
    ),
    (
        b'Content-Disposition: form-data; filename="a;b%22=\xc3\xbc\xff.wav" ; name="x"\r\nContent-Type: audio/ogg;codecs=opus',
        'Content-Disposition: form-data; name="x"; filename="a_b%22=ü_.wav"\r\nContent-Type: audio/ogg'.encode(),
    ),
    (
        b"Content-Disposition: form-data; name=x; filename=a.wav; filename*=utf-8''%C3%BC%22%0D%0Ab.wav",
        'Content-Disposition: form-data; name="x"; filename="ü___b.wav"'.encode(),
    ),
    (
        b'Content-Disposition: form-data; name="x"; filename=""\r\nContent-Transfer-Encoding: Binary\r\nContent-Length: 1',
        b'Content-Disposition: form-data; name="x"; filename=""',
    ),
    (
        b'Content-Disposition: form-data; name="x"; filename="%b.wav"' % (b"a" * 300),
        b'Content-Disposition: form-data; name="x"; filename="%b.wav"' % (b"a" * 196),
    ),
]


@pytest.mark.parametrize(("head", "passed"), HEADS)
@pytest.mark.parametrize("kind", [bytes, bytearray])
async def test_of_a_part_s_head_little_is_passed_on_and_in_one_way(head, passed, kind):
    """The names and the media type; a form that is so already is not even copied, and values are never changed."""
    value = b"--\r\n\0\xff\r\n"
    body = kind(b"\r\n--bound\r\n%b\r\n\r\n%b\r\n--bound--\r\n\r\n" % (head, value))
    form = await read_form(body, b'Multipart/Form-Data ; charset="UTF-8";Boundary="bound"')
    assert form.content_type == TYPE
    assert form.body == b"--bound\r\n%b\r\n\r\n%b\r\n--bound--\r\n" % (passed, value)
    again = await read_form(form.body, form.content_type)
    assert again.body is form.body
    assert again.fields == form.fields == await fields_of(form.body, form.content_type)


@pytest.mark.parametrize(
    ("boundary", "written"), [(b"a.b_-+c", b"a.b_-+c"), (b"a'b", b'"a\'b"'), (b'"=_(x)/1:2?"', b'"=_(x)/1:2?"')]
)
async def test_a_boundary_is_quoted_where_it_must_be(boundary, written):
    """In the same way by whoever has sent it."""
    body = form([b'form-data; name="x"'], [b"1"], boundary.strip(b'"'))
    assert (await read_form(body, b"multipart/form-data; boundary=" + boundary)).content_type == (
        b"multipart/form-data; boundary=" + written
    )


async def test_inserted_values_hold_no_boundary():
    """The client chooses the boundary, so it could end a value there that is not its own."""
    body = form([b'form-data; name="model"'], [b"m"], b"tiny")
    read = await read_form(body, b"multipart/form-data; boundary=tiny")
    assert rewrite_form(body, read.fields, {"model": b"a-tiny"}) == body.replace(b"\nm\r", b"\na-tiny\r")
    for replace, new in (({"model": b"a--tiny"}, {}), ({}, {"x": b"--tiny--"})):
        with pytest.raises(ApiError, match="choose another boundary"):
            rewrite_form(body, read.fields, replace, (), new)


async def test_a_form_in_another_charset_is_refused():
    """Also where a field says so."""
    for charset, is_read in ((b"UTF-8", True), (b"utf-7", False), (b"", False), (b"utf-8" + b" " * 20, False)):
        body = form([b'form-data; name="_charset_"', b'form-data; name="x"'], [charset, b"1"])
        assert isinstance(await outcome(read_form(body, TYPE)), ApiError) != is_read


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
    files = {"file": ('odd "name" ü.wav', bytes(range(256)) * 20 + b"\r\n--", "audio/wav")}
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
        ("prompt", False), ("model", False), ("t[]", False), ("t[]", False), ("file", True),
    ]  # fmt: skip
    assert rewrite_form(before, fields, {"model": b"another"}) == after
    assert (await read_form(before, content_type)).body is before
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
        b"\r\n--bound\r\n" + ONE + b"\r\n--bound--\r\n\r\n",
        b"--bound\r\ncontent-disposition:Form-Data;NAME=model\r\nX-Other: a;b\r\n\r\nm\r\n--bound--",
        b"--bound\r\n" + ONE + b"\r\n--bound\r\n" + ONE + b"\r\n--bound--",
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
        (b"--bound\r\n" + ONE + b"\r\n--bound", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound-", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound\n", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound \r\n", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--bound--x", "follows its closing"),
        (b"--bound\r\n" + ONE + b"\r\n--bound-- \r\n", "follows its closing"),
        (b"--bound\r\n" + ONE + b"\r\n--bound--\r\n--bound\r\n" + ONE + b"\r\n--bound--", "follows its closing"),
        (b"--bound\n" + ONE + b"\r\n--bound--", "line break"),
        (b"--bound\r\n" + ONE + b"\r\n--boundless--", "line break"),
        (b"--bound\r\n" + ONE + b"--bound--", "inside of a part"),
        (b"--bound\r\n" + ONE + b"\n--bound--", "inside of a part"),
        (b"--bound\r\n" + ONE[:-1] + b"--bound--", "inside of a part"),
        (b"--bound\r\n" + ONE.replace(b'l"', b'l--bound"') + b"\r\n--bound--", "inside of a part"),
        (b"--bound\r\nContent-Disposition: form-data; name=model", "head does not end"),
        (b"--bound\r\nX: %b\r\n\r\n" % (b"x" * 9000), "head does not end within 8192"),
        (b"--bound\r\n\r\nm\r\n--bound--", "a part"),
        (b"--bound\r\nContent-Type: text/plain\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: form-data; name=x\r\n" + ONE + b"\r\n--bound--", "two headers content-disposition"),
        (b"--bound\r\nContent-Disposition: form-data;\r\n name=model\r\n\r\nm\r\n--bound--", "header line"),
        (b"--bound\r\nContent-Disposition : form-data; name=model\r\n\r\nm\r\n--bound--", "header line"),
        (b"--bound\r\nContent-Disposition: form-data\r\n\r\nm\r\n--bound--", "the name of each part"),
        (b"--bound\r\nContent-Disposition: form-data; name=model;\r\n\r\nm\r\n--bound--", "parameter is not valid"),
        (b'--bound\r\nContent-Disposition: form-data; name="mo\\del"\r\n\r\nm\r\n--bound--', "no backslashes"),
        (b'--bound\r\nContent-Disposition: form-data; name="x"; a="\\\\"; c="; name=model; d="\r\n\r\nm\r\n--bound--', "no backslashes"),
        (b'--bound\r\nContent-Disposition: form-data; name="a b"\r\n\r\nm\r\n--bound--', "the name of each part"),
        (b'--bound\r\nContent-Disposition: form-data; name="a%22b"\r\n\r\nm\r\n--bound--', "the name of each part"),
        (b'--bound\r\nContent-Disposition: form-data; name="x"; size=1\r\n\r\nm\r\n--bound--', "form-data; name="),
        (b"--bound\r\n" + ONE.replace(b"\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n", 1) + b"\r\n--bound--", "encoded"),
        (b"--bound\r\n" + ONE.replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1) + b"\r\n--bound--", "encoded"),
        (b"--bound\r\n" + ONE.replace(b"\r\n", b"\r\nContent-Type: Multipart/mixed; boundary=a\r\n", 1) + b"\r\n--bound--", "content type"),
        (b"--bound\r\n" + ONE.replace(b"\r\n", b"\r\nContent-Type: text\r\n", 1) + b"\r\n--bound--", "content type"),
        (b"--bound\r\nContent-Disposition: attachment; name=model\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: form-data; name=x; name*=u''model\r\n\r\nm\r\n--bound--", "form-data; name="),
        (b"--bound\r\nContent-Disposition: form-data; name=x; NAME=model\r\n\r\nm\r\n--bound--", "twice"),
        (b'--bound\r\nContent-Disposition: form-data; name="model\r\n\r\nm\r\n--bound--', "parameter"),
        (b"--bound\r\n" + ONE + b"\r\n--bound\r\n" + ONE + b"2\r\n--bound--", "they differ"),
        (b"--bound\r\n" + ONE + b"\xff\r\n--bound--", "UTF-8"),
        (b"--bound\r\n" + ONE[:-1] + b"\r\n--bound--", "must name its model"),
        (b"--bound\r\n" + ONE.replace(b"model", b"mode1") + b"\r\n--bound--", "must name its model"),
        (b"--bound--", "no fields"),
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
        b"multipart/form-data; boundary=bound; a=b", b"multipart/form-data; boundary*=utf-8''bound", b"multipart/form-data; boundary=bound;",
        b'multipart/form-data; boundary="bo\\und"', b"multipart/form-data; boundary*0=bound", b"multipart/form-data; boundary=bound{",
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
    [b"x" * SIZE, b"\r\n--bound" * (SIZE // 9), b"\r\n-bb" * (SIZE // 5), b"-" * SIZE],
    ids=["plain", "nearly boundaries", "half boundaries", "dashes"],
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
