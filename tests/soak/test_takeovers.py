"""Ten takeovers in a row, with TLS, under 200 streams and 20 000 short requests.

    ./build test slow -k takeovers

It prints how late answers are over a takeover. The goal is `LATE_S` at most.
"""

from functools import partial

import pytest
from support.deployments import free_port
from support.relay_site import site_of
from support.takeovers import begin, take_over_in_a_row

TIMES, STREAMS, REQUESTS, REQUESTS_S = 10, 200, 20_000, 100
LATE_S = 0.5


@pytest.mark.parametrize("relays", [2, 0])
async def test_takeovers_in_a_row_under_load(gateway, start, tls, tmp_path, relays):
    """No request is refused, no stream breaks, and the ledger has each request and token once."""
    settings, trust = tls
    async with site_of(gateway, free_port(), relays, settings=settings, trust=trust) as site:
        site.upstream.gap_s = 1.0
        begun = partial(begin, start, tmp_path / "ichat.toml")
        found = await take_over_in_a_row(site, begun, TIMES, STREAMS, REQUESTS, REQUESTS_S)
    verdict = "within" if max(found.late_s) <= LATE_S else "ABOVE"
    print(f"\n{relays} relays: {found.summary()}; {verdict} the goal of {LATE_S} s")
