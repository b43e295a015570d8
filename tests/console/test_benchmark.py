"""The benchmark of the console, in its smallest form."""

import subprocess
import sys

from support.browser import chromium
from support.programs import LIMIT_S, ROOT

SMALL = ("--workers=6", "--models=3", "--rate=5", "--rounds=1", "--seconds=1", "--hours=0.01")


def test_every_figure_is_there():
    """Whatever they are: no request failed, and there is a row for each."""
    with chromium():
        pass  # skips the test where there is none
    command = [sys.executable, ROOT / "tests/bench", "console", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("usable, first visit", "usable, again", "frames, overview", "frames, workers", "no console",
                "Overview open: more", "requests open: more", "heap after 0.01 h of events"):  # fmt: skip
        assert row in done.stdout
