"""Limits of a minute: a window over restarts counts what it would have counted without them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ichat.config.schema import Key, Limits
from ichat.security.rate_limits import WINDOW_S, EarlierUse, QuotaRefusal, Quotas, Window

EVENTS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), max_size=30).map(sorted)


@given(EVENTS, st.integers(0, 30))
def test_a_window_counts_the_same_over_a_restart(events, at):
    """Whatever part of the minute an earlier process has counted, by second."""
    whole, restored, earlier = Window(), Window(), {}
    for index, (now, count) in enumerate(events):
        whole.add(count, now)
        if index < at:
            earlier[int(now)] = earlier.get(int(now), 0) + count
    restored.restore(Counter(earlier))
    for now, count in events[at:]:
        restored.add(count, now)
    newest = events[-1][0] if events else 0
    for later in (0.0, 0.5, 30.0, WINDOW_S, WINDOW_S + 1.0):
        assert restored.sum(newest + later) == whole.sum(newest + later)


def test_a_window_may_be_restored_after_it_has_begun():
    """Older seconds are put before those that are there."""
    window = Window()
    window.add(1, 50.0)
    window.restore(Counter({10: 2, 50: 3}))
    window.add(1, 50.5)
    assert window.sum(50.5) == 7
    assert window.wait_s(6, 50.5) == 20
    assert window.sum(70.0) == 5
    assert window.sum(110.0) == 0


def test_the_use_of_an_earlier_process_counts_for_the_key_and_for_all():
    """A key that is gone counts for all only."""
    quotas = Quotas(Limits(requests_per_minute=4), [Key("k", tokens_per_minute=10)])
    quotas.restore_windows([EarlierUse(5, "k", 1, 6), EarlierUse(5, "gone", 2, 99), EarlierUse(6, "k", 0, 4)])
    assert quotas.refusal("k", 7.0).limit == "tokens_per_minute"
    quotas.acquire("", 7.0)
    assert quotas.refusal("", 7.0).limit == "requests_per_minute"
    assert quotas.refusal("k", 65.0) is None


def test_a_restored_request_holds_its_place_and_counts_its_tokens_at_the_end():
    """No limit refuses it, since it was let in before; its beginning counts in no window."""
    quotas = Quotas(Limits(requests_per_minute=1), [Key("k", max_in_flight=1, tokens_per_minute=5)])
    first, second = quotas.restore("k"), quotas.restore("k")
    assert quotas.refusal("k", 0.0).limit == "max_in_flight"
    first.release(5, 1.0)
    assert isinstance(quotas.acquire("k", 1.0), QuotaRefusal)
    second.release(0, 1.0)
    assert quotas.refusal("k", 1.0).limit == "tokens_per_minute"
    assert not isinstance(quotas.acquire("", 1.0), QuotaRefusal)
