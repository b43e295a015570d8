"""The script that keeps the cores busy leaves nothing busy behind."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from support.programs import LIMIT_S, ROOT, alive

SCRIPT = str(ROOT / "tests/soak/under_load.py")
SHOW = "import os; print('here', os.getpid(), flush=True)"


def begin(*arguments):
    """Start the script and give it with its busy processes, when its command has begun."""
    program = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    line = program.stdout.readline()
    busy = [psutil.Process(int(pid)) for pid in re.findall(r"\d+", line.partition("busy processes")[2])]
    assert len(busy) == len(os.sched_getaffinity(0))
    return program, busy


def test_runs_until_one_fails():
    """Each run is told, the first that fails is the last, and its exit code is the script's."""
    program, busy = begin("--times", "3", sys.executable, "-c", f"{SHOW}; raise SystemExit(3)")
    out, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 3
    assert out.count("here") == 1
    assert "run 1 of 3: failed with 3" in out
    assert not alive(busy)


def test_the_command_runs_the_given_number_of_times():
    """All runs pass: so does the script."""
    program, busy = begin("--times", "2", sys.executable, "-c", SHOW)
    out, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0
    assert out.count("here") == 2
    assert "run 2 of 2: passed" in out
    assert not alive(busy)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_busy(number):
    """Interrupted, ended or killed: no core is kept busy after it, and what it ran has been told to end."""
    program, busy = begin(sys.executable, "-c", f"{SHOW}; import time; time.sleep(600)")
    assert program.stdout is not None
    command = psutil.Process(int(program.stdout.readline().split()[1]))
    try:
        assert len(alive(busy)) == len(busy)
        program.send_signal(number)
        assert program.wait(LIMIT_S) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        psutil.wait_procs(busy, LIMIT_S)
        assert not alive(busy)
        if number != signal.SIGKILL:
            psutil.wait_procs([command], LIMIT_S)
            assert not alive([command])
    finally:
        for process in alive([command]):
            process.kill()
        program.stdout.close()
