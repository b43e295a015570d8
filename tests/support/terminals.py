"""Programs on terminals of their own."""

import codecs
import os
import pty
import re
import select
import subprocess
import time

from support.programs import LIMIT_S, ROOT, ichat


class Pty:
    """A program on a terminal, and what it has written there."""

    def __init__(self, words, port=0, columns=120, cwd=ROOT, **more):
        self.master, slave = pty.openpty()
        env = {
            **os.environ,
            "ICHAT_GATEWAY": f"http://127.0.0.1:{port}",
            "COLUMNS": str(columns),
            "TERM": "xterm-256color",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support/fake_engine:{os.environ.get('PYTHONPATH', '')}",
            **more,
        }
        self.text = ""
        self.at = 0
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.process = subprocess.Popen(ichat(*words), cwd=cwd, env=env, preexec_fn=lambda: os.login_tty(slave))
        os.close(slave)

    def type(self, text):
        os.write(self.master, text.encode())

    def until(self, expected):
        """Read until the screen shows this, after what was waited for before."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.compile(expected).search(self.text, self.at)):
            assert time.monotonic() < deadline, self.text
            assert self.read(), self.text
        self.at = found.end()

    def press_until(self, key, expected):
        """Press a key, as often as it takes: Python's input may sleep over a signal that comes just before it waits."""
        self.type(key)
        pressed_at = time.monotonic()
        while not re.compile(expected).search(self.text, self.at):
            if time.monotonic() > pressed_at + 1:
                self.type(key)
                pressed_at = time.monotonic()
            assert self.read(), self.text
        self.until(expected)

    def end(self):
        """Read to the end; give the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.read():
            assert time.monotonic() < deadline, self.text
        return self.process.wait(LIMIT_S)

    def read(self):
        """Read what is there, or comes soon; say whether more may come."""
        if not select.select([self.master], [], [], 0.1)[0]:
            return True
        try:
            more = os.read(self.master, 65536)
        except OSError:
            return False
        self.text += self.decode(more)
        return more != b""

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
