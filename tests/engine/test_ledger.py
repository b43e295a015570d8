"""The ledger has what each real engine has counted itself, also after the gateway was killed."""

import signal
import urllib.request

import pytest
from support.real_engines import LOAD_S
from support.usage_load import compare, counted_by_engine, leave, totals_of

REQUESTS = 108
LEAVING = 5


def test_the_sums_are_the_engines(site):
    """Plain responses and streams, on every route, eight at once: not a token more or less, and none estimated."""
    engine, ledger = compare(site, REQUESTS)
    assert ledger[:2] == engine
    assert ledger[2:] == [REQUESTS, 0, 0]


def test_a_client_that_leaves_is_counted_within_bounds(site):
    """A request whose client leaves is one, no error, and its tokens are an estimate of the kind that limits use."""
    before, engine = totals_of(site), counted_by_engine(site)
    for _ in range(LEAVING):
        leave(site)
    site.program.until(lambda: totals_of(site)["requests"] == before["requests"] + LEAVING)
    after = totals_of(site)
    assert after["errors"] == before["errors"]
    assert 0 < after["estimated_tokens"] <= LEAVING * 600
    site.program.until(lambda: site.running() == 0)
    assert counted_by_engine(site)[1] - engine[1] <= LEAVING * 300


@pytest.mark.breaks
def test_a_killed_gateway_keeps_what_it_has_written(site):
    """The next gateway's ledger goes on with the sums of the one before, with the same worker."""

    def is_written():
        return site.program.get("/v1/admin/usage")[1]["storage"] == "ok" and not pending(site)

    before = totals_of(site)
    site.program.until(is_written)
    site.program.stop(signal.SIGKILL)
    site.start()
    site.program.wait_for_port().wait_until_ready("tiny-0", LOAD_S)
    assert totals_of(site) == before
    engine, ledger = compare(site, 18)
    assert ledger[:2] == engine


def pending(site):
    with urllib.request.urlopen(f"{site.url}/metrics?workers=0") as answer:
        return b"\nichat_usage_rows_pending 0.0" not in answer.read()
