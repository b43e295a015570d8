"""Of which kind a request is, by its method and path alone."""

import pytest

from ichat.errors import ApiError
from ichat.http.request import Request
from ichat.proxy.planes import is_control, is_for_model, kind_of
from ichat.security.cors import cors_of

CORS = cors_of(["https://page.example"], is_control)
PREFLIGHT = [(b"origin", b"https://page.example"), (b"access-control-request-method", b"POST")]


def request_of(method, path, headers=()):
    return Request(method, path, path, b"1.1", list(headers), b"", b"id", keep_alive=True)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        (b"POST", b"/v1/chat/completions", "model"),
        (b"POST", b"/completions", "model"),
        (b"GET", b"/v1/chat/completions", "wrong_method"),
        (b"POST", b"/v1/files", "engine"),
        (b"POST", b"/v1/v1/chat/completions", "nowhere"),
        (b"POST", b"/v1/responses", "model"),
        (b"GET", b"/v1/responses/resp_1", "response"),
        (b"DELETE", b"/v1/responses/resp_1", "response"),
        (b"POST", b"/v1/responses/resp_1/cancel", "response"),
        (b"POST", b"/v1/responses/compact", "engine"),
        (b"POST", b"/v1/workers/heartbeat", "worker"),
        (b"GET", b"/v1/workers/heartbeat", "control"),
        (b"GET", b"/v1/models", "control"),
        (b"GET", b"/metrics", "control"),
        (b"GET", b"/elsewhere", "nowhere"),
    ],
)
def test_a_method_and_a_path_have_one_kind(method, path, kind):
    """The kind does not depend on allowed pages, except for preflights."""
    assert kind_of(request_of(method, path), None) == kind
    assert kind_of(request_of(method, path), CORS) == kind
    is_for_owner = kind not in ("model", "engine", "response") or path == b"/v1/responses/compact"
    assert is_for_model(request_of(method, path), CORS) != is_for_owner


def test_a_preflight_is_one_only_where_pages_are_allowed():
    """Without origins it is a wrong method, and before the control plane it never is one."""
    asked = request_of(b"OPTIONS", b"/v1/chat/completions", PREFLIGHT)
    assert kind_of(asked, CORS) == "preflight"
    assert not is_for_model(asked, CORS)
    assert kind_of(asked, None) == "wrong_method"


def test_a_kept_response_has_no_other_methods():
    """It is refused before anything is counted, and by the process that decides if there are relays."""
    asked = request_of(b"PUT", b"/v1/responses/resp_1")
    assert not is_for_model(asked, None)
    with pytest.raises(ApiError) as refused:
        kind_of(asked, None)
    assert refused.value.status == 405


@pytest.mark.parametrize(
    ("method", "path", "moves"),
    [
        (b"POST", b"/v1/chat/completions", True),
        (b"POST", b"/v1/files", True),
        (b"GET", b"/v1/responses/resp_1", True),
        (b"POST", b"/v1/responses/compact", False),
        (b"PUT", b"/v1/responses/resp_1", False),
        (b"GET", b"/v1/chat/completions", False),
        (b"POST", b"/v1/workers/heartbeat", False),
        (b"GET", b"/v1/models", False),
    ],
)
def test_a_relay_moves_the_bytes_of_requests_to_models(method, path, moves):
    """All others are the owner's: so are those that it refuses."""
    assert is_for_model(request_of(method, path), None) == moves
