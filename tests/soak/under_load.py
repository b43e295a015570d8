"""Run a command while other processes keep every core busy: what waits for the clock instead of a condition fails.

    python tests/soak/under_load.py [--times N] COMMAND...
    python tests/soak/under_load.py --times 3 ./build test fast

There is one busy process a core, each in a session of its own, so that Linux counts it as another program (autogroup),
and as nice as this script. They end with it, however it ends. Ends with the exit code of the first run that fails.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

LOOK_EVERY = 1_000_000
"""Turns of a busy loop between two looks whether its parent is still there: less than a second."""
ENDED_S = 60.0
"""How long a command that was told to end may take before it is killed."""
BUSY = f"""
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range({LOOK_EVERY}):
        pass
"""


@contextlib.contextmanager
def busy_cores():
    """Keep every core that this process may use busy."""
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, str(os.getpid())], stdin=subprocess.DEVNULL, start_new_session=True
        )
        for _ in os.sched_getaffinity(0)
    ]
    say(f"busy processes: {', '.join(str(loop.pid) for loop in loops)}")
    try:
        yield
    finally:
        used = [cpu_s(loop) for loop in loops]
        for loop in loops:
            loop.kill()
            loop.wait()
        if None in used:
            sys.exit("under_load: a busy process has ended before its time: this was no load")
        say(f"the busy processes had {sum(used):.0f} s of CPU time")


def cpu_s(process):
    """Return the CPU time that a process that runs has had; None of one that does not."""
    if process.poll() is not None:
        return None
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(command):
    """Run a command and return its exit code; when this is interrupted, the command and what it runs are as well."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # which pytest takes as a word to end what its tests have started
        try:
            process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def say(text):
    print(f"under_load: {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="how often the command is run (1)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("which command?")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background of a shell
    code = 0
    with contextlib.suppress(KeyboardInterrupt), busy_cores():
        code = 130
        for number in range(args.times):
            started = time.monotonic()
            code = run(args.command)
            took_s = time.monotonic() - started
            say(f"run {number + 1} of {args.times}: {f'failed with {code}' if code else 'passed'} after {took_s:.0f} s")
            if code:
                break
            code = 130 if number + 1 < args.times else 0
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
