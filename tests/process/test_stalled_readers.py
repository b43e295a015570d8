"""Clients that stop reading: what they cost the gateway is bounded, and those beside them lose nothing."""

from stalled_readers import KEPT_BYTES_MAX, run

STREAMS, STALLED = 30, 10
STALL_S = 20.0
SLACK_BYTES = 8 * 1024 * 1024
"""What a process of Python may grow by in some seconds, whatever it does."""


def test_clients_that_stop_reading_cost_other_clients_nothing(tmp_path):
    """Their upstreams are held back, memory stays bounded, they end by `client_stall_s`, and all others end whole."""
    facts = run(tmp_path, STREAMS, STALLED, 0.5, STALL_S)
    assert facts.held == STALLED
    assert facts.taken_while_held <= STALLED * KEPT_BYTES_MAX
    assert facts.resident["held"] - facts.resident["reading"] <= STALLED * KEPT_BYTES_MAX + SLACK_BYTES
    assert facts.closed == {"stalled": STALLED}
    assert facts.broken == STALLED
    assert (facts.whole, facts.lost) == (STREAMS - STALLED, 0)
    assert "a bug" not in (tmp_path / "log").read_text()
