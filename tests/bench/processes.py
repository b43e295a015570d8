"""The processes of one run: started, waited for, weighed, and ended by their ids, whatever happens."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
END_S = 30.0
"""How long processes may take to end by themselves."""
REST_S = 5.0
"""How long what they have started may take after that, and what is killed."""
LOAD_GRACE_S = 15.0
"""How much longer than its own limit the load client may take."""
ASK_S = 10.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
HAS_SCHEDSTAT = pathlib.Path("/proc/self/schedstat").exists()


class Failed(Exception):
    """The benchmark cannot go on."""


class Process:
    """One process that listens on a port: its log is a file, and its cost is that of what `counts` says of it.

    `tree`: it and all its descendants; `alone`: without them; `nothing`: it is a part of the measuring.
    """

    def __init__(self, name, command, port, directory, *, counts="tree", env=None):
        self.name = name
        self.port = port
        self.counts = counts
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": "", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = psutil.Process(self._popen.pid)

    def wait_until_ready(self, body, limit_s):
        """Wait until a request with this body is answered. Raises Failed."""
        address = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
        deadline = time.monotonic() + limit_s
        why = ""
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                raise Failed(f"{self.name} ended with {self._popen.returncode}:\n{self.last_lines()}")
            try:
                with OPENER.open(request, timeout=ASK_S) as answer:
                    answer.read()
                    return
            except (OSError, http.client.HTTPException) as error:
                why = str(error)
            time.sleep(0.1)
        raise Failed(f"{self.name} does not answer within {limit_s:g} s ({why}):\n{self.last_lines()}")

    def last_lines(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def family(self):
        """Return the process and its descendants, as far as they live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._popen.poll() is None:
                return [self._process, *self._process.children(recursive=True)]
        return []

    def counted(self):
        family = self.family()
        return {"tree": family, "alone": family[:1], "nothing": []}[self.counts]

    def cpu_ns(self):
        """Return the nanoseconds of CPU that each thread has used: of what counts, and of it and all descendants.

        `spent` makes a sum of two such pictures.
        """
        counted = {process.pid for process in self.counted()}
        tree = {thread: used for process in self.family() for thread, used in threads_ns(process)}
        return {thread: used for thread, used in tree.items() if thread[0] in counted}, tree

    def memory_mb(self):
        total = 0
        for process in self.counted():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def ask_to_end(self):
        if self._popen.poll() is None:
            self._popen.terminate()

    def kill(self):
        """End it and all that it has started, without a word."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait(REST_S)

    def wait(self, limit_s):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(limit_s)


def threads_ns(process):
    """Return what each thread has used; where the kernel does not say, the whole process, in ticks of the clock."""
    try:
        if not HAS_SCHEDSTAT:
            times = process.cpu_times()
            return [((process.pid, ""), int((times.user + times.system) * 1e9))]
        found = []
        for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(((process.pid, task.name), int((task / "schedstat").read_text().split()[0])))
        return found
    except (FileNotFoundError, psutil.NoSuchProcess):
        return []


def spent(before, after):
    """Return the nanoseconds between two pictures; a thread that has ended since counts for nothing."""
    return sum(used - before.get(thread, 0) for thread, used in after.items())


@contextlib.contextmanager
def processes():
    """Yield a list for processes: at the end of the block all of them are ended, with all that they have started."""
    started = []
    try:
        yield started
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they come through afterwards; every wait here is bounded
        try:
            end(started)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end(started):
    families = [process for one in started for process in one.family()]
    for one in reversed(started):
        one.ask_to_end()
    deadline = time.monotonic() + END_S
    for one in started:
        one.wait(max(0.1, deadline - time.monotonic()))
    _, left = psutil.wait_procs(families, timeout=REST_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for one in started:
        one.wait(REST_S)


def listen_to_signals():
    """See to it that a signal ends the blocks that are open, and then the benchmark."""
    for number in SIGNALS - {signal.SIGINT}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def run_load(port, *, connections, requests, body, events, limit_s):
    """Run the load client and give its figures. Raises Failed where it has none."""
    command = [sys.executable, HERE / "load.py", str(port), "--body", json.dumps(body)]
    command += [f"--connections={connections}", f"--requests={requests}", f"--events={events}", f"--limit-s={limit_s}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s + LOAD_GRACE_S, start_new_session=True
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise Failed("the load client did not end") from None
    except ValueError:
        raise Failed(f"the load client failed:\n{done.stderr[-2000:]}") from None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
