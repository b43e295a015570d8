"""The output of a process over the deaths of the processes that read it."""

import os
import signal
import subprocess
import sys
import time

from support.programs import LIMIT_S

from ichat.config.schema import Logs
from ichat.observability.logs.files import LogFiles, load
from ichat.observability.logs.journal import Journal, recover, source_of
from ichat.observability.logs.lines import LineBuffer
from ichat.observability.logs.pipes import PipeReader, make_pipe

LINES, DEATHS = 100_000, 8
WRITER = f"import sys; sys.stdout.write(''.join(f'line {{n}}\\n' for n in range({LINES})))"


def begin_reader(files, reading, journal):
    """Start a process that reads on to the end of the pipe; return its pid."""
    pid = os.fork()
    if pid == 0:
        kept = Journal(journal)
        found = recover(files, "w", kept)
        file, buffer = files.open("w", goes_on=True), LineBuffer(start=found.last or 0)
        source, more = source_of(reading, found.splitter, kept, file), found.missing
        reader = PipeReader([source], buffer, [file], first=more, partial_s=2 * LIMIT_S)
        reader.join(LIMIT_S)
        os._exit(0 if buffer.last == LINES else 1)
    return pid


def test_a_reader_that_is_killed_at_any_moment_loses_and_repeats_no_line(tmp_path):
    """While a process writes as fast as it can: all its lines are in the file once, and the last has its number."""
    files = LogFiles(str(tmp_path), Logs(echo=False))
    reading, writing = make_pipe()
    journal = os.memfd_create("test", os.MFD_CLOEXEC)
    path = files.path_of("w")
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=writing)
    os.close(writing)
    for _ in range(DEATHS):
        size = os.path.getsize(path) if os.path.exists(path) else 0
        pid = begin_reader(files, reading, journal)
        deadline = time.monotonic() + LIMIT_S
        while not os.path.exists(path) or (os.path.getsize(path) <= size and writer.poll() is None):
            assert time.monotonic() < deadline
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    pid = begin_reader(files, reading, journal)
    assert os.waitpid(pid, 0)[1] == 0
    assert writer.wait(LIMIT_S) == 0
    lines = load(path, lines_max=2 * LINES, bytes_max=2**30).tail(2 * LINES)
    assert [line.text for line in lines] == [f"line {number}" for number in range(LINES)]
