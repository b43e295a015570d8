"""Which `Host` and which page a request without a key may have."""

import pytest

from ichat.security.origins import Site, is_from_here, means_this_machine, name_of

SITE = Site(["gpu.example", "*.lab.example"], ["https://app.example"], host="10.0.0.1")


def head(host=b"localhost:8000", version=b"1.1", **headers):
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return version, [*([(b"host", host)] if host else []), *named]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (b"GPU.Example:8000", "gpu.example"),
        (b"gpu.example.", "gpu.example"),
        (b"[::1]:80", "::1"),
        (b"10.0.0.1", "10.0.0.1"),
        (b"a b", ""),
        (b"x@y", ""),
        (b"x/y", ""),
        (b"[::1", ""),
        (b"", ""),
    ],
)
def test_a_host_is_a_name_or_an_address_in_lower_case(host, name):
    assert name_of(host) == name


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        (b"gpu.example", True),
        (b"a.lab.example:1", True),
        (b"lab.example", False),
        (b"any.localhost", True),
        (b"192.0.2.1", True),
        (b"evil.example", False),
    ],
)
def test_a_known_host_is_an_address_or_a_configured_name(host, is_known):
    assert SITE.has_name(host) == is_known
    assert SITE.url_of(host) == (f"http://{host.decode()}" if is_known else "")
    assert bool(SITE.page(*head(host)).objection) != is_known


def test_a_missing_host_is_only_for_http_1_0():
    assert SITE.page(*head(b"", b"1.0")).objection == ""
    assert "without a `Host`" in SITE.page(*head(b"")).objection
    assert Site(["*"]).page(*head(b"evil.example")).objection == ""


@pytest.mark.parametrize(
    ("headers", "is_allowed", "is_listed"),
    [
        ({}, True, False),
        ({"origin": b"http://localhost:8000", "sec_fetch_site": b"same-origin"}, True, False),
        ({"origin": b"http://localhost:9000"}, False, False),
        ({"origin": b"https://localhost:8000"}, False, False),
        ({"origin": b"https://localhost:8000", "x_forwarded_proto": b"https"}, True, False),
        ({"origin": b"https://app.example", "sec_fetch_site": b"cross-site"}, True, True),
        ({"origin": b"null"}, False, False),
        ({"sec_fetch_site": b"cross-site"}, False, False),
    ],
)
def test_a_page_without_a_key_is_of_this_origin_or_listed(headers, is_allowed, is_listed):
    page = SITE.page(*head(**headers))
    assert (not page.objection, page.is_listed) == (is_allowed, is_listed)


def test_every_origin_of_a_request_must_be_listed():
    version, headers = head()
    both = [*headers, (b"origin", b"https://app.example"), (b"origin", b"https://evil.example")]
    assert SITE.page(version, both).objection


def test_a_local_request_has_no_proxy_and_a_local_host():
    """A page of a listed origin is not local either: it may use models, and nothing else."""

    def is_local(request, address="127.0.0.1"):
        version, headers = request
        return is_from_here(headers, address, SITE.page(version, headers))

    assert is_local(head())
    assert not is_local(head(), "10.0.0.2")
    assert not is_local(head(b"gpu.example"))
    assert not is_local(head(via=b"1.1 nginx"))
    assert not is_local(head(origin=b"https://app.example"))
    assert (means_this_machine(b"[::1]:1"), means_this_machine(b"192.0.2.1")) == (True, False)


def test_unknown_hosts_are_logged_within_a_bound(caplog):
    site = Site()
    for number in range(100):
        site.page(*head(b"n%d.example" % number))
    assert len(caplog.messages) == 20
    assert "n0.example" in caplog.text
