"""What the scripts of this folder share: programs that are started, waited for and ended, and percentiles."""

import contextlib
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
FROM_SOURCE = ("-m", "ichat")
LIMIT_S = 120.0
"""By when a gateway listens, and by when a program that was told to end is killed."""
LOOK_EVERY_S = 0.05


def start_gateway(directory, config, program=FROM_SOURCE):
    """Start a gateway with this configuration; both it and the log, `ichat.toml` and `log`, are in the directory."""
    file = directory / "ichat.toml"
    file.write_text(config)
    command = [sys.executable, *program, "gateway", "-c", file]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def port_in(directory):
    """Return the port that a gateway's log names, or None."""
    found = re.search(rb" listens on .*:(\d+)", (directory / "log").read_bytes())
    return int(found[1]) if found else None


@contextlib.contextmanager
def running_gateway(directory, config, program=FROM_SOURCE):
    """Start a gateway; yield its process and its port when it listens. Raises RuntimeError with its log if it does not."""
    with ending(start_gateway(directory, config, program)) as process:
        deadline = time.monotonic() + LIMIT_S
        while not (port := port_in(directory)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not listen:\n{(directory / 'log').read_text()}")
            time.sleep(LOOK_EVERY_S)
        yield process, port


@contextlib.contextmanager
def ending(process):
    """Yield a process, which is ended with the block."""
    try:
        yield process
    finally:
        end(process)


def end(process):
    """Tell a process to end, and kill it if it does not; close its pipes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_S)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def percentile(values, share):
    """Return the value below which this share of them lies; 0 if there are none."""
    values = sorted(values)
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0
