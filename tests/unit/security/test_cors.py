"""Which pages may use the routes of models."""

import pytest

from ichat.errors import ApiError
from ichat.security.cors import ASKED_BYTES_MAX, cors_of

PAGE = b"https://app.example"
CORS = cors_of([PAGE.decode()], lambda path: path.startswith((b"/v1/admin", b"/v1/models")))
CHAT = b"/v1/chat/completions"


def ask(origin=PAGE, names=b"", method=b"POST"):
    return [(b"origin", origin), (b"access-control-request-method", method), (b"access-control-request-headers", names)]


def test_a_listed_origin_may_read_answers_of_models():
    """A cache is told that the answer depends on the origin, also by the answers to programs."""
    named = dict(CORS.headers_for(CHAT, [(b"origin", PAGE)]))
    assert (named[b"access-control-allow-origin"], named[b"vary"]) == (PAGE, b"origin")
    assert b"x-request-id" in named[b"access-control-expose-headers"]
    assert CORS.headers_for(CHAT, []) == CORS.headers_for(CHAT, [(b"origin", b"https://x")]) == [(b"vary", b"origin")]
    assert CORS.headers_for(CHAT, [(b"origin", PAGE)] * 2) == [(b"vary", b"origin")]
    everyone = dict(cors_of(["*"], lambda path: False).headers_for(CHAT, []))
    assert everyone[b"access-control-allow-origin"] == b"*"
    assert cors_of([], lambda path: False) is None


@pytest.mark.parametrize(
    ("path", "is_open"),
    [(CHAT, True), (b"/v1/models", True), (b"/v1/models/m", True), (b"/v1/admin/workers", False),
     (b"/v1/load_lora_adapter", False), (b"/v1/load_lora_adapter/", False)],
)  # fmt: skip
def test_the_control_plane_is_closed_to_all_pages(path, is_open):
    assert bool(CORS.headers_for(path, [(b"origin", PAGE)])) == is_open
    assert CORS.is_preflight(b"OPTIONS", path, ask()) == is_open


def test_a_preflight_has_an_origin_and_a_method():
    assert not CORS.is_preflight(b"POST", CHAT, ask())
    assert not CORS.is_preflight(b"OPTIONS", CHAT, ask()[:1])
    assert not CORS.is_preflight(b"OPTIONS", CHAT, ask()[1:])


@pytest.mark.parametrize(
    ("names", "allowed"),
    [(b"x-mine, authorization", b"x-mine, authorization"), (b"a\r\nb", None), (b"", None),
     (b"x" * (ASKED_BYTES_MAX + 1), None)],
)  # fmt: skip
def test_a_preflights_answer_repeats_valid_names_only(names, allowed):
    named = dict(CORS.answer(CHAT, ask(names=names)))
    usual = dict(CORS.answer(CHAT, ask()))[b"access-control-allow-headers"]
    assert named[b"access-control-allow-headers"] == (allowed or usual)
    assert named[b"access-control-allow-methods"] == b"GET, POST, DELETE"
    assert dict(CORS.answer(b"/v1/models", ask()))[b"access-control-allow-methods"] == b"GET"


def test_a_preflight_of_another_origin_is_forbidden():
    with pytest.raises(ApiError, match="cors_origins does not name") as refused:
        CORS.answer(CHAT, ask(b"https://evil.example"))
    assert refused.value.status == 403
