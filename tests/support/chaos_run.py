"""The chaos program as a test runs it."""

import json
import os
import subprocess
import sys

from support.programs import ROOT


def run(tmp_path, minutes, limit_s, relays=0):
    """Run the program and return its report; fail with its output where it finds a violation."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        ROOT / "tests/soak/chaos.py",
        "--minutes",
        str(minutes),
        "--report",
        report,
        "--relays",
        str(relays),
    ]
    seed = os.environ.get("ICHAT_CHAOS_SEED")
    command += ["--seed", seed] if seed else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return json.loads(report.read_text())
