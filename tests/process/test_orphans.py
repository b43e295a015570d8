"""Processes that have lost their parent, with real ones."""

import os
import subprocess
import sys
import time

import trio
from support.programs import LIMIT_S, ROOT

from ichat.config.process_marks import WORKER_VARIABLE
from ichat.supervisor.orphans import AdoptedProcess, marked, process_identity

REAPING = """
import os, subprocess, sys, types, psutil, trio
from ichat.service_manager import become_subreaper
from ichat.supervisor.orphans import reap_forever

reading, writing = os.pipe()
LEAVES = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import os; os.read({reading}, 1)'], pass_fds=[{reading}])"


async def main():
    become_subreaper()
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    await trio.run_process([sys.executable, "-c", LEAVES], pass_fds=[reading])
    left = [child for child in psutil.Process().children() if child.pid != own.pid]
    print("ours:", len(left))
    os.close(writing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reap_forever, types.SimpleNamespace(pids={own.pid: "w"}))
        with trio.fail_after(60):
            while any(child.is_running() for child in left):
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    print("code:", own.wait())


trio.run(main)
"""


def test_orphaned_grandchildren_are_reaped():
    """A grandchild whose parent has gone becomes ours, and no zombie; a child that others wait for keeps its code."""
    done = subprocess.run(
        [sys.executable, "-c", REAPING], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == "ours: 1\ncode: 7\n", done


def test_the_mark_and_the_stamp():
    """A process is found by its mark, told from others by its stamp, and held on to without being its parent."""
    mark = f"/state:{time.time()}"
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, WORKER_VARIABLE: mark}
    )
    deadline = time.monotonic() + LIMIT_S
    while not [one.pid for one in marked(mark)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [one.pid for one in marked(mark)] == [process.pid]
    assert marked(mark[:-1]) == []
    stamp = process_identity(process.pid)
    assert stamp == process_identity(process.pid) != process_identity(os.getpid())
    adopted = AdoptedProcess(process.pid)
    assert not adopted.has_ended()
    process.communicate(b"\n")
    assert adopted.has_ended()
    adopted.close()
    assert process_identity(process.pid) == ""


async def test_an_adopted_process_is_waited_for():
    """Its end is noticed by who is not its parent."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    adopted = AdoptedProcess(process.pid)
    with trio.move_on_after(0.2) as waiting:
        await adopted.wait()
    assert waiting.cancelled_caught
    adopted.kill()
    with trio.fail_after(LIMIT_S):
        await adopted.wait()
    assert process.wait() == -9
    process.stdin.close()
    adopted.close()
