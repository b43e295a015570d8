"""How often a gateway wakes that has nothing to do.

    PYTHONPATH=. .build/dev/bin/python tests/soak/idle_wakeups.py [SECONDS]

The gateway has one worker with a fake engine and no clients. What counts is how often the thread of its event loop was
switched off because it waits, by the kernel's count: it wakes as often.
"""

import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from support.programs import Program, ichat

CONFIG = """
[server_settings]
port = 0
state_directory = "{directory}/state"
[[managed_workers]]
model_name = "m"
model_path = "/m"
backend = "fake"
"""


def switches(pid):
    """Return how often the first thread of a process has waited."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def measure_idle(seconds):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "ichat.toml"
        path.write_text(CONFIG.format(directory=directory))
        program = Program(ichat("gateway", "-c", str(path)), pathlib.Path(directory) / "log").wait_for_port()
        try:
            program.wait_until_ready("m-0")
            time.sleep(5)
            before, began = switches(program.process.pid), time.monotonic()
            time.sleep(seconds)
            return (switches(program.process.pid) - before) / (time.monotonic() - began)
        finally:
            program.end()


if __name__ == "__main__":
    print(f"idle: {measure_idle(float((sys.argv[1:] or ['20'])[0])):.2f} wake-ups a second")
