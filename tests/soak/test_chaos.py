"""A long run of chaos."""

import os

from support.chaos_run import run


def test_a_long_run(tmp_path):
    """For as many minutes as ICHAT_CHAOS_MINUTES says (10)."""
    minutes = float(os.environ.get("ICHAT_CHAOS_MINUTES", "10"))
    assert run(tmp_path, minutes, minutes * 60 + 900)["violations"] == []
