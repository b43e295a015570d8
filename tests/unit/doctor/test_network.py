"""Findings about ways: the planted outcome of a request in, level, sentence and command out."""

import attrs
import pytest

from ichat.doctor.network import WayFacts, find_in_network, read_ways_to_workers

ROUTE = WayFacts("r", "up:443", "answered", status=200, seconds=0.0123, has_tls=True)
WITH_KEY = attrs.evolve(ROUTE, has_key=True, key_variable="UPSTREAM")
WORKER = WayFacts("w", "[::1]:80", "answered", status=200, is_route=False)


@pytest.mark.parametrize(
    ("way", "level", "words", "command"),
    [
        (ROUTE, "ok", "up:443 answers in 12 ms.", ""),
        (WITH_KEY, "ok", "up:443 answers in 12 ms, and ", ""),
        (attrs.evolve(WITH_KEY, status=404), "ok", "up:443 answers in 12 ms.", ""),
        (attrs.evolve(WITH_KEY, status=401), "error",
         "up:443 refuses the key in UPSTREAM (status 401)", "export UPSTREAM=…"),
        (attrs.evolve(WITH_KEY, status=403), "warning", "with the key in UPSTREAM (status 403)", "export UPSTREAM=…"),
        (attrs.evolve(ROUTE, status=401), "error",
         "up:443 refuses a request without a key (set api_key_env) (status 401)", ""),
        (attrs.evolve(ROUTE, status=401, has_key=True), "error", "up:443 refuses its key (status 401)", ""),
        (attrs.evolve(ROUTE, status=503), "error",
         "up:443 answers with status 503: look at the log of its server.", "curl -v https://up:443"),
        (attrs.evolve(WORKER, status=500), "error", "look at the log of the worker's server", "curl -v http://[::1]:80"),
        (attrs.evolve(WORKER, status=401), "ok", "[::1]:80 answers in 0 ms.", ""),
        (attrs.evolve(ROUTE, way="unknown_host"), "error", "The host up cannot be resolved", "getent hosts up"),
        (attrs.evolve(WORKER, way="not_connected", words="Connection refused"), "error",
         "[::1]:80 cannot be reached (Connection refused): start the worker's server", "curl -v http://[::1]:80"),
        (attrs.evolve(ROUTE, way="not_trusted", words="certificate has expired"), "error",
         "The certificate of up:443 is not trusted (certificate has expired)", "openssl s_client -connect up:443"),
        (attrs.evolve(ROUTE, way="silent"), "error", "up:443 did not answer within 5 s", "curl -v https://up:443"),
        (attrs.evolve(ROUTE, way="not_http", words="SSH-2.0"), "error",
         "up:443 does not answer as HTTP has it (SSH-2.0)", "curl -v https://up:443"),
    ],
)  # fmt: skip
def test_the_outcome_of_a_request_is_one_finding(way, level, words, command):
    """A key is named by its variable; a worker that asks for a key is there all the same."""
    [found] = find_in_network([way])
    assert (found.level, found.name, found.command) == (level, way.name, command)
    assert words in found.sentence


@pytest.mark.parametrize(
    ("skews", "level", "words"),
    [
        ([None], None, ""),
        ([30.0], "ok", "agrees with up:443"),
        ([600.0], "warning", "This machine's clock is 600 s behind that of up:443"),
        ([-31.0], "warning", "This machine's clock is 31 s ahead of that of up:443"),
        ([900.0, None, -2.0], "ok", "agrees"),
    ],
)
def test_the_clock_is_compared_with_the_nearest_other_clock(skews, level, words):
    """The other clocks may be wrong: one that agrees is enough."""
    ways = [attrs.evolve(ROUTE, skew_s=skew_s) for skew_s in skews]
    clock = [(one.level, one.sentence) for one in find_in_network(ways) if one.name == "clock"]
    assert [one for one, _ in clock] == ([level] if level else [])
    assert words in str(clock)


def test_ways_without_time_are_one_finding():
    left = attrs.evolve(ROUTE, name="l", way="not_asked", skew_s=900.0)
    answered, time = find_in_network([left, ROUTE, left])
    assert answered.level == "ok"
    assert (time.level, time.name) == ("warning", "time")
    assert time.sentence.startswith("2 of 3 ways were not known in time")


async def test_only_workers_of_other_gateways_and_machines_are_asked():
    """A managed worker is the gateway's own, and a worker without an address cannot be asked."""
    workers = [
        {"worker_id": "own", "managed": True, "host": "h", "port": 1},
        {"worker_id": "socket", "host": "h", "port": None},
        {"worker_id": "far", "host": "h", "port": 1},
    ]
    [found] = await read_ways_to_workers(workers, float("-inf"))
    assert (found.name, found.way, found.is_route) == ("far", "not_asked", False)
