"""What gateway and workers say of prefixes."""

import itertools

import pytest

from ichat.errors import ApiError
from ichat.protocol.prefixes import BOUNDARIES, REPORTED_MAX, SentChain, chain_header, parse_chain, parse_report


def test_boundaries_grow():
    """They are strictly increasing, and no step is more than a quarter of what lies before it, but the first ones."""
    steps = [later - earlier for earlier, later in itertools.pairwise(BOUNDARIES)]
    assert len(BOUNDARIES) == 96
    assert all(step > 0 for step in steps)
    assert all(step * 4 <= start for step, start in zip(steps, BOUNDARIES, strict=False) if start >= 1024)


def test_a_chain_comes_back():
    """A worker reads what the gateway wrote."""
    digests = [b"01234567", b"\x00\xffabcdef"]
    assert parse_chain(chain_header(700, digests)) == SentChain(700, digests)


@pytest.mark.parametrize("value", [b"", b"700", b"700;", b"700;0123", b"x;" + b"0" * 16, b"1;" + b"0" * 16 * 97])
def test_an_invalid_chain_is_none(value):
    """None for a value of another form, or of more digests than there are boundaries."""
    assert parse_chain(value) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"have": ["0" * 15]}, "have"),
        ({"gone": ["G" * 16]}, "gone"),
        ({"gone": ["0" * 16] * (REPORTED_MAX + 1)}, "gone"),
        ({"cleared": 1}, "cleared"),
        ({"worker_id": None}, "worker_id"),
    ],
)
def test_a_wrong_prefix_report_is_not_parsed(wrong, named):
    """With one sentence that names the key."""
    with pytest.raises(ApiError) as caught:
        parse_report({"worker_id": "w", "start_id": "s", **wrong})
    assert caught.value.status == 400
    assert named in caught.value.message


def test_a_report():
    """Everything but the worker may be left out."""
    report = parse_report({"worker_id": "w", "start_id": "s", "gone": ["0" * 16], "later": 1})
    assert (report.cleared, report.have, report.gone) == (False, [], ["0" * 16])
