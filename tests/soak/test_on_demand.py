"""A long run of two models, one on each real engine, of which one may be loaded at once."""

import statistics

from support.on_demand_site import Site, take_turns

CLIENTS, REQUESTS = 4, 40


def test_models_take_turns_for_long(tmp_path):
    """All requests are answered, never by two engines at once, and no load serves fewer than two of them on average."""
    site = Site(tmp_path)
    try:
        answers, seen = take_turns(site, CLIENTS, REQUESTS)
        loads = site.loads()
    finally:
        site.program.end()
    waits = sorted(wait_s for _, _, wait_s in answers)
    print(
        f"{len(answers)} requests, {loads:.0f} loads, seconds until the answer: median {statistics.median(waits):.1f},"
        f" longest {waits[-1]:.1f}"
    )
    assert [status for status, _, _ in answers] == [200] * CLIENTS * REQUESTS
    assert max(map(len, seen)) == 1, seen
    assert loads <= CLIENTS * REQUESTS / 2
