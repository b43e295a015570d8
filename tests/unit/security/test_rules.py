"""Which key a route asks for."""

import pytest

from ichat.security.rules import ROUTES, find_rule, methods_of


@pytest.mark.parametrize(
    ("method", "path", "rule"),
    [
        (b"GET", b"/health", "open"),
        (b"HEAD", b"/health", "open"),
        (b"GET", b"/v1/models/org/m", "models"),
        (b"GET", b"/v1/models/org%2Fm", "models"),
        (b"GET", b"/v1/admin/%77orkers", "read"),
        (b"DELETE", b"/v1/admin/workers/w1", "write"),
        (b"DELETE", b"/v1/admin/workers/w1/x", None),
        (b"POST", b"/v1/admin/workers/launch", "write"),
        (b"GET", b"/v1/admin/workers/launch", "read"),
        (b"DELETE", b"/v1/admin/requests/a/b\n", "write"),
        (b"GET", b"/v1/admin/workers/", None),
        (b"GET", b"/healthy", None),
        (b"get", b"/health", None),
        (b"POST", b"/health", None),
    ],
)
def test_a_route_is_found_by_its_decoded_path_and_method(method, path, rule):
    assert find_rule(method, path) == rule


def test_the_methods_of_a_path_are_those_with_a_rule():
    """HEAD comes with GET, OPTIONS with every path that exists."""
    assert methods_of(b"/v1/admin/keys/k") == ["DELETE", "OPTIONS", "PATCH"]
    assert methods_of(b"/v1/admin/workers/w") == ["DELETE", "GET", "HEAD", "OPTIONS"]
    assert methods_of(b"/none") == []


def test_every_route_that_changes_something_needs_more_than_reading():
    """Except the question where a request would go, which has a body. The key of an order is the code in the body."""
    changing = {rule for (method, path), rule in ROUTES.items() if method != "GET" and path != "/v1/admin/route"}
    assert changing == {"write", "join", "order"}
    assert [path for (_, path), rule in ROUTES.items() if rule == "order"] == ["/v1/workers/order"]
