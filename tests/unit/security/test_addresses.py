"""Addresses of connections and of workers."""

import pytest

from ichat.errors import ApiError
from ichat.security.addresses import Networks, address_in, is_loopback, normalized, worker_address


@pytest.mark.parametrize(
    ("peer", "address", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", True),
        ("127.9.9.9:80", "127.9.9.9", True),
        ("[::1]:80", "::1", True),
        ("[::ffff:127.0.0.1]:80", "127.0.0.1", True),
        ("[fe80::1%eth0]:80", "fe80::1", False),
        ("10.0.0.1:80", "10.0.0.1", False),
        ("", "", True),  # a unix socket
    ],
)
def test_a_peers_address_has_no_zone_and_mapped_ipv4_is_ipv4(peer, address, loopback):
    assert (address_in(peer), is_loopback(address)) == (address, loopback)


def test_text_that_is_no_address_is_unchanged_and_not_local():
    assert (normalized("far.example"), is_loopback("localhost")) == ("far.example", False)
    assert normalized("2001:DB8:0::1") == "2001:db8::1"


def test_networks_have_their_addresses_only():
    """Link-local addresses, where clouds keep secrets, need a link-local network; no network has a multicast address."""
    networks = Networks(["10.0.0.7/24", "::/0", "0.0.0.0/0"])
    assert "10.0.0.200" in networks
    for address in ("169.254.169.254", "fe80::1", "0.0.0.0", "224.0.0.1", "far.example", ""):
        assert address not in networks
    assert "169.254.169.254" in Networks(["169.254.0.0/16"])
    assert "10.0.0.1" not in Networks([])


FOUND = "10.0.0.1"


@pytest.mark.parametrize(
    ("host", "sender", "networks"),
    [
        (FOUND, FOUND, []),
        (FOUND, "10.9.9.9", ["10.0.0.0/8"]),
        ("127.0.0.1", "127.0.0.2", []),
    ],
)
def test_a_worker_is_at_its_senders_address_or_in_worker_networks(host, sender, networks):
    assert worker_address(host, [host], Networks(networks), sender, is_relayed=False) == host


@pytest.mark.parametrize(
    ("sender", "is_relayed", "advice"),
    [("10.0.0.2", False, "--advertise-host"), (FOUND, True, "security.trusted_proxies")],
)
def test_a_worker_elsewhere_is_refused_with_advice(sender, is_relayed, advice):
    """Otherwise a client that may join could direct requests to addresses that only the gateway reaches."""
    with pytest.raises(ApiError, match=advice) as refused:
        worker_address("far", [FOUND], Networks([]), sender, is_relayed=is_relayed)
    assert refused.value.status == 403
    assert f"far ({FOUND})" in str(refused.value)
    with pytest.raises(ApiError, match="no address"):
        worker_address("far", [], Networks([]), sender, is_relayed=is_relayed)
