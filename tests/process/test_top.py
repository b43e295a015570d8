"""`ichat.pyz top` on a terminal, with a real gateway: live, resized, over a restart, and once."""

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from support.deployments import free_port, worker
from support.programs import LIMIT_S, ROOT, ichat

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program on a terminal of a certain size; `lines` is what it shows now."""

    def __init__(self, port, columns=80, rows=24, term="vt100"):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        env = {**os.environ, "ICHAT_GATEWAY": f"http://127.0.0.1:{port}", "TERM": term}
        env.pop("COLUMNS", None)
        self.process = subprocess.Popen(ichat("top"), cwd=ROOT, env=env, preexec_fn=lambda: os.login_tty(slave))
        os.close(slave)
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.text = ""

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self):
        if select.select([self.master], [], [], 0.1)[0]:
            try:
                self.text += self.decode(os.read(self.master, 65536))
            except OSError:
                return False
        return True

    @property
    def lines(self):
        """Return the newest whole frame: it begins at the top and ends with the clearing of what is below."""
        frames = re.findall(r"\x1b\[H(.*?)\x1b\[J", self.text, re.DOTALL)
        return [SEQUENCE.sub("", line) for line in frames[-1].split("\r\n")] if frames else []

    def until(self, condition):
        """Read until the lines are as they should be."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.lines and condition(self.lines)):
            assert time.monotonic() < deadline, self.lines
            assert self.read(), self.text
        return self.lines

    def end(self):
        deadline = time.monotonic() + LIMIT_S
        while self.read():
            assert time.monotonic() < deadline
        return self.process.wait(LIMIT_S)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def open_(port, **size):
        opened.append(Terminal(port, **size))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def has(word):
    return lambda lines: any(word in line for line in lines)


def test_top_follows_keys_events_and_sizes(gateway, terminal):
    """Panes by key press, a worker's end as it happens, other sizes; `q` leaves the terminal as it was."""
    program = gateway(worker())
    program.wait_until_ready("m-0")
    top = terminal(program.port)
    lines = top.until(has("m-0"))
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert "1 ready" in lines[0]
    top.type("m")
    top.until(lambda lines: lines[4].startswith("model▾"))
    top.type("g")
    top.until(has("CPUs"))
    top.resize(140, 40)
    assert len(top.until(lambda lines: len(lines) == 40)) == 40
    top.type("w")
    top.until(has("m-0"))
    program.ask_by("DELETE", "/v1/admin/workers/m-0?drain_s=0")
    top.until(lambda lines: "1 stopped" in lines[0])
    top.type("q")
    assert top.end() == 0
    assert top.text.endswith("\x1b[?25h\x1b[?1049l")


def test_top_goes_on_after_a_restart_of_the_gateway(gateway, terminal):
    """It says that it tries again, and shows the next gateway."""
    port = free_port()
    program = gateway("", port=port)
    top = terminal(port)
    top.until(has("workers: none"))
    program.stop()
    top.until(has("Trying again: "))
    gateway("", port=port)
    top.until(lambda lines: not has("Trying again: ")(lines))
    os.kill(top.process.pid, signal.SIGINT)
    assert top.end() in (0, 130)


def is_echoing(top):
    return bool(termios.tcgetattr(top.master)[3] & termios.ECHO)


def test_a_signal_leaves_the_terminal_as_it_was(gateway, terminal):
    """SIGTERM ends it, and Ctrl-Z stops it: each time keys are seen again, on the screen of before."""
    port = gateway("").port
    top = terminal(port)
    top.until(has("workers: none"))
    assert not is_echoing(top)
    os.kill(top.process.pid, signal.SIGTSTP)
    process = psutil.Process(top.process.pid)
    deadline = time.monotonic() + LIMIT_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        assert top.read()
    while not top.text.endswith("\x1b[?25h\x1b[?1049l"):
        assert time.monotonic() < deadline
        assert top.read()
    assert is_echoing(top)
    top.text = ""
    os.kill(top.process.pid, signal.SIGCONT)
    top.until(has("workers: none"))
    assert not is_echoing(top)
    os.kill(top.process.pid, signal.SIGTERM)
    assert top.end() == 128 + signal.SIGTERM
    assert top.text.endswith("\x1b[?25h\x1b[?1049l")
    assert is_echoing(top)


def test_a_terminal_without_a_cursor(terminal):
    """It says what to do instead, and sends no sequence."""
    top = terminal(9, term="dumb")
    assert top.end() == 64
    assert "--once" in top.text
    assert "\x1b" not in top.text


def test_a_stream_that_ends_at_once():
    """What was asked for once was not told: it is no success."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()

        def log_message(self, *_):
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = subprocess.run(
                ichat("top", "--once", "-g", f"http://127.0.0.1:{server.server_port}"),
                cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        finally:
            server.shutdown()
            thread.join()
    assert (done.returncode, done.stdout, done.stderr) == (69, "", "The gateway has ended the stream.\n")


def test_once(gateway):
    """Plain columns for people and awk, or the state as JSON."""
    program = gateway(worker())
    program.wait_until_ready("m-0")
    env = {**os.environ, "ICHAT_GATEWAY": f"http://127.0.0.1:{program.port}"}

    def run(*words):
        return subprocess.run(ichat("top", *words), cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    found = run("--once")
    assert found.returncode == 0, found.stderr
    assert re.search(r"^m-0 +m +ready", found.stdout, re.MULTILINE)
    state = json.loads(run("--once", "--json").stdout)
    assert [one["worker_id"] for one in state["workers"]] == ["m-0"]
    refused = run()
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "--once" in refused.stderr
