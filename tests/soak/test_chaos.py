"""A long run of chaos."""

import os

import pytest
from support.chaos_run import run


@pytest.mark.parametrize("relays", [0, 2])
def test_a_long_run(tmp_path, relays):
    """For as many minutes as ICHAT_CHAOS_MINUTES says (10), with and without relays."""
    minutes = float(os.environ.get("ICHAT_CHAOS_MINUTES", "10"))
    assert run(tmp_path, minutes, minutes * 60 + 900, relays)["violations"] == []
