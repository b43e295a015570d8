"""How long a reload holds the loop of a gateway that knows thousands of workers.

    PYTHONPATH=. .build/dev/bin/python tests/soak/reload_hold.py [WORKERS]

A whole gateway runs in this process, without clients and without the workers' logs; its 3 000 workers are registered
ones. The file is written anew and reloaded, each time with one thing changed. What counts is the longest step of any
task from the reload's begin to a second after it: the milliseconds of CPU in which nothing else can run. The first line
is the longest step of a second without a reload.
"""

import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import trio

from ichat.admin.reload import ConfigFile, fingerprint
from ichat.config import load as configuration
from ichat.protocol.messages import Heartbeat
from ichat.roles import gateway

WORKERS = 3000
MODELS = 100
AFTER_S = 1.0
"""What a reload sets in motion is measured for this time."""
BASE = """
[server_settings]
port = 0
state_directory = "{directory}/state"
watch_config = false
[logs]
access_log = "{directory}/access"
followed_max = 1
"""
CHANGES = {
    "nothing": "",
    "routing.max_in_flight": "[routing]\nmax_in_flight = 7\n",
    "routing.policy": '[routing]\npolicy = "round_robin"\n',
    "circuit_breaker": "[circuit_breaker]\nfailures_max = 9\n",
    "timeouts.wedged_after_s": "[timeouts]\nwedged_after_s = 60\n",
    "limits.workers_max": "[limits]\nworkers_max = 20000\n",
    "health": "[health]\ninterval_s = 0\n",
    "a model's name": '[[models]]\nname = "new-*"\ntargets = [{ model = "m-1" }]\n',
    "an external route": '[[external_routes]]\nmodel_name = "far"\napi_base = "http://127.0.0.1:9/v1"\n',
    "a key": '[[security.keys]]\nname = "a"\nkey_env = "RELOAD_KEY"\n',
    "the workers' token": '[security]\njoin_token_env = "RELOAD_TOKEN"\n',
}


class Longest(trio.abc.Instrument):
    """The longest step of any task, in seconds of CPU."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.took_s, self.task_name, self._began = 0.0, "", None

    def before_task_step(self, task):
        self._began = time.thread_time()

    def after_task_step(self, task):
        if self._began is not None and (took_s := time.thread_time() - self._began) > self.took_s:
            self.took_s, self.task_name = took_s, task.name.rpartition(".")[2]


async def measure(directory, workers):
    path = pathlib.Path(directory) / "ichat.toml"
    base = BASE.format(directory=directory)
    path.write_text(base)
    built, build = [], gateway.build
    gateway.build = lambda *args: built.append(build(*args)) or built[-1]
    longest = Longest()
    async with trio.open_nursery() as nursery:
        file = ConfigFile(path, fingerprint(path))
        await nursery.start(gateway.run, configuration.load(path), file)
        fleet, reloader = built[0].control.fleet, built[0].reloader
        for number in range(workers):
            name = f"m-{number % MODELS}"
            fleet.registry.record_heartbeat(
                Heartbeat(f"w-{number}", name, "127.0.0.1", 9, state="ready", heartbeat_interval=1e3, start_id="s")
            )
            await trio.lowlevel.checkpoint()
        await trio.sleep(3 * AFTER_S)
        trio.lowlevel.add_instrument(longest)
        longest.begin()
        await trio.sleep(AFTER_S)
        print(f"{workers} workers, no reload: {longest.took_s * 1000:.2f} ms ({longest.task_name})")
        for what, text in CHANGES.items():
            path.write_text(base + text)
            longest.begin()
            await reloader.reload(dry_run=False, why="it is measured")
            await trio.sleep(AFTER_S)
            print(f"{workers} workers, changed: {what}: {longest.took_s * 1000:.2f} ms ({longest.task_name})")
            path.write_text(base)
            await reloader.reload(dry_run=False, why="it is measured")
            await trio.sleep(AFTER_S)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    os.environ |= {"RELOAD_KEY": "sk-a-key-for-the-measurement", "RELOAD_TOKEN": "a-token-for-the-measurement"}
    with tempfile.TemporaryDirectory() as directory:
        trio.run(measure, directory, int((sys.argv[1:] or [WORKERS])[0]))
