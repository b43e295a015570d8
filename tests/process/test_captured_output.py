"""Captured output: numbered lines, nobody waits for a reader, and what is lost is counted exactly."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from support.programs import LIMIT_S, ROOT

from ichat.errors import ApiError
from ichat.observability.logs import stream as logs
from ichat.observability.logs.files import LogFile, load, previous_path, prune
from ichat.observability.logs.lines import (
    Line,
    LineBuffer,
    LineSplitter,
    Wakeup,
)
from ichat.observability.logs.pipes import PipeReader, PipeSource, Tee, make_pipe
from ichat.observability.logs.stream import LogCursor, LogQuery, LogStream, read_query


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def follow(reading, buffer, *sinks, **more):
    return PipeReader([PipeSource(reading, LineSplitter())], buffer, sinks, **more)


def texts(buffer):
    return [line.text for line in buffer.tail(10**6)]


def ring_of(count, **bounds):
    buffer = LineBuffer(**bounds)
    for number in range(1, count + 1):
        buffer.append([b"line %d" % number], 1e9 + number)
    return buffer


def events_of(block):
    """Parse server-sent events: ("gap", N) or (id, data)."""
    found = []
    for text in block.decode().split("\n\n")[:-1]:
        fields = [field.split(": ", 1) for field in text.split("\n")]
        data = json.loads(dict(fields)["data"])
        if ["event", "gap"] in fields:
            assert list(dict(fields)) == ["event", "data"]
            found.append(("gap", data["lost"]))
        else:
            assert [name for name, _ in fields] == ["id", "data"]
            assert int(dict(fields)["id"]) == data["seq"]
            found.append((data["seq"], data["line"]))
    return found


def ids_of(block):
    return [event[0] for event in events_of(block)]


async def send_to_end(cursor, wakeup, send_all):
    async for block in LogStream(cursor, wakeup, SimpleNamespace(is_ending=False)):
        await send_all(block)


def start(program, **options):
    """Start a program that imports what it needs from the sources."""
    prelude = "import os, signal, subprocess, sys, time\nfrom ichat.observability.logs.lines import LineBuffer\nfrom ichat.observability.logs.capture import Capture\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(program)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, **options)


def run(program):
    """Return exit code, standard output and standard error of a program."""
    process = start(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


# Lines.


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_they_are_read(size):
    """However the bytes are split: the same lines, cut at the bound, without what a terminal would have overwritten."""
    data = b"one\n\ntwo\r\n 10%\r 50%\r100%\r\n\r 7%\r 8%\n" + b"x" * 25 + b"\n" + b"y" * 30 + b"\rshort\nend"
    lines = LineSplitter(20)
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])] + lines.flush()
    cut = b"x" * 20 + " … [5 bytes more]".encode()
    assert found == [b"one", b"", b"two", b"100%", b" 8%", cut, b"short", b"end"]
    assert lines.flush() == []


def test_a_line_without_end_takes_no_memory():
    """Only its beginning is kept, the rest is counted."""
    lines = LineSplitter(100)
    for _ in range(1000):
        assert lines.feed(b"z" * 1000) == []
    assert repr(lines) == "<LineSplitter 1000000 bytes of a partial line>"
    assert lines.feed(b"\n") == [b"z" * 100 + " … [999900 bytes more]".encode()]


# The buffer.


@pytest.fixture
def eager_threads():
    """Let threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("bounds", [{"lines_max": 10}, {"bytes_max": 70}])
def test_a_ring_is_bounded_and_counts_exactly(bounds):
    """The newest lines are kept, by their number and by their size; a cursor learns how many it has missed."""
    buffer = ring_of(99, **bounds)
    assert repr(buffer) == "<LineBuffer 90..99, 70 bytes>"
    lines, lost = buffer.after(0, 3)
    assert (lines[0], lines[-1].seq, len(lines), lost) == (Line(90, 1e9 + 90, "line 90"), 92, 3, 89)
    assert buffer.after(88, 10)[1] == 1
    assert buffer.after(89, 10)[1] == 0
    assert [line.seq for line in buffer.after(97, 10)[0]] == [98, 99]
    assert buffer.after(99, 10) == ([], 0)
    assert [line.seq for line in buffer.tail(2)] == [98, 99]
    assert len(buffer.tail(50)) == 10


def test_a_ring_may_go_on_where_another_ended():
    """Numbers of a second run can follow on those of the first."""
    buffer = LineBuffer(start=99)
    buffer.append([b"\xff\xc3\xa4"], 0)
    assert buffer.after(99, 10) == ([Line(100, 0, "\ufffdä")], 0)
    assert events_of(LogCursor(buffer).next()) == [(100, "\ufffdä")]


def test_reading_while_lines_come(eager_threads):
    """Between two threads every number is either read, once and in order, or counted as lost."""
    buffer = LineBuffer(lines_max=50)

    def append():
        for number in range(1, 20_001, 4):
            buffer.append([b"%d" % (number + more) for more in range(4)], 0)
        buffer.end()

    thread = threading.Thread(target=append)
    thread.start()
    seq = missed = 0
    while not (buffer.ended and seq == 20_000):
        lines, lost = buffer.after(seq, 7)
        missed += lost
        assert [line.seq for line in lines] == list(range(seq + lost + 1, seq + lost + 1 + len(lines)))
        assert all(line.text == str(line.seq) for line in lines)
        seq += lost + len(lines)
    thread.join()
    assert missed <= 20_000 - 50


# Readers.


def test_history_then_what_comes():
    """A reader gets all that is kept, then what is new, each once; where it was too slow, the exact number."""
    buffer = ring_of(30, lines_max=10)
    reader = LogCursor(buffer)
    assert ids_of(reader.next()) == ["gap", *range(21, 31)]
    assert reader.next() == b""
    buffer.append([b"more"], 0)
    assert events_of(reader.next()) == [(31, "more")]
    buffer.append([b"x"] * 25, 0)
    block = reader.next()
    assert events_of(block)[0] == ("gap", 15)
    assert ids_of(block)[1:] == list(range(47, 57))
    assert not reader.is_done()
    buffer.append([b"last"], 0)
    buffer.end()
    assert not reader.is_done()
    assert events_of(reader.next()) == [(57, "last")]
    assert reader.is_done()


def test_where_a_reader_begins():
    """With the last lines that were asked for, or after the line that the client knows; a gap only where there is one."""
    buffer = ring_of(30, lines_max=10)
    assert ids_of(LogCursor(buffer, tail=3).next()) == [28, 29, 30]
    assert LogCursor(buffer, tail=0).next() == b""
    assert events_of(LogCursor(buffer, tail=15).next())[0] == ("gap", 5)
    assert events_of(LogCursor(buffer, tail=1000).next())[0] == ("gap", 20)
    assert ids_of(LogCursor(buffer, after=28, tail=9).next()) == [29, 30]
    assert events_of(LogCursor(buffer, after=5).next())[0] == ("gap", 15)
    assert LogCursor(buffer, after=30).next() == b""
    assert events_of(LogCursor(buffer, after=31).next())[0] == ("gap", 20), "a number of an earlier buffer"


def test_without_following():
    """It ends with what was there when it began, even if lines come faster than they are read."""
    buffer = ring_of(600, lines_max=700)
    reader = LogCursor(buffer, follow=False)
    assert ids_of(reader.next()) == list(range(1, 257))
    buffer.append([b"new"] * 600, 0)
    assert events_of(reader.next()) == [("gap", 244), *((seq, f"line {seq}") for seq in range(501, 601))]
    assert reader.is_done()
    assert reader.next() == b""
    reader = LogCursor(buffer, tail=1, follow=False)
    buffer.append([b"new"] * 1000, 0)
    assert events_of(reader.next()) == [("gap", 1)]
    assert reader.is_done()
    assert LogCursor(LineBuffer(), follow=False).is_done()


def test_an_event_is_one_line_of_json():
    """No content of a line can end its event."""
    block = logs.event(Line(7, 1767225600.25, 'a\r\x0b\x1b[0m\u2028"\\'))
    assert block.count(b"\n") == 3
    assert b"\r" not in block
    data = json.loads(block.partition(b"data: ")[2])
    assert data == {"seq": 7, "time": "2026-01-01T00:00:00.250Z", "line": 'a\r\x0b\x1b[0m\u2028"\\'}


@pytest.mark.parametrize(
    ("query", "last_event_id", "expected"),
    [
        ("", "", LogQuery(None, True, False, None)),
        ("tail=100&follow=false", "", LogQuery(100, False, False, None)),
        ("follow=1&tail=0", " 42 ", LogQuery(0, True, False, 42)),
        ("previous=true", "", LogQuery(None, False, True, None)),
        ("previous=1&follow=no", "", LogQuery(None, False, True, None)),
        ("previous=False", "", LogQuery(None, True, False, None)),
    ],
)
def test_queries(query, last_event_id, expected):
    """What a request asks, with its defaults; a run that has ended is not followed."""
    assert read_query(query, last_event_id) == expected


@pytest.mark.parametrize(
    ("query", "last_event_id", "message"),
    [
        ("tail=-1", "", "tail must be a number of lines, not '-1'."),
        ("tail=", "", "tail must be a number of lines, not ''."),
        ("tail=٣", "", "tail must be a number of lines, not '٣'."),
        ("tail=1" + "0" * 30, "", "tail must be a number"),
        ("follow=maybe", "", "follow must be true or false, not 'maybe'."),
        ("folow=true", "", "There is no parameter 'folow' here; there are tail, follow, previous."),
        ("tail=1&tail=2", "", "tail is given twice."),
        ("previous=1&follow=1", "", "previous is a run that has ended: it cannot be followed."),
        ("", "7f", "Last-Event-ID must be the id of an event, a number, not '7f'."),
    ],
)
def test_queries_that_mean_nothing(query, last_event_id, message):
    """400 with what is wrong, rather than a stream that is not the one that was meant."""
    with pytest.raises(ApiError) as caught:
        read_query(query, last_event_id)
    assert caught.value.status == 400
    assert caught.value.message.startswith(message)


# Waking Trio.


async def test_many_lines_wake_once():
    """However often a bell is struck before Trio's turn, it wakes once, and everyone who waits."""
    wakes = []
    turns = []

    wakeup = Wakeup()
    wakeup._struck.add(lambda: wakes.append(1))

    async def wait():
        while True:
            await wakeup.wait_notified()
            turns.append(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        thread = threading.Thread(target=lambda: [wakeup.notify() for _ in range(1000)])
        thread.start()
        thread.join()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (len(wakes), len(turns)) == (1, 2)
        nursery.cancel_scope.cancel()


def test_a_bell_after_the_end():
    """A thread may outlive Trio's run."""

    async def make():
        return Wakeup()

    trio.run(make).notify()


async def test_a_stream_follows_a_ring(autojump_clock):
    """History, comments while nothing comes, new lines at once, and the end with the buffer's."""
    buffer = ring_of(2)
    wakeup = Wakeup()
    buffer.changed.add(wakeup.notify)
    sent = []

    async def send_all(data):
        sent.append((trio.current_time() - began, data))

    async def append():
        await trio.sleep(40)
        buffer.append([b"new"], 0)
        await trio.sleep(1)
        buffer.end()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await send_to_end(LogCursor(buffer), wakeup, send_all)
    (t1, history), (t2, comment), (t3, comment_too), (t4, new) = sent
    assert [round(at) for at in (t1, t2, t3, t4)] == [0, 15, 30, 40]
    assert ids_of(history) == [1, 2]
    assert comment == comment_too == b": \n\n"
    assert events_of(new) == [(3, "new")]
    assert trio.current_time() - began == pytest.approx(41)


async def test_a_stream_is_finished(autojump_clock):
    """It ends with what there was at that time, without waiting; a second time changes nothing."""
    buffer = ring_of(300)
    wakeup = Wakeup()
    buffer.changed.add(wakeup.notify)
    sent = []

    async def send_all(data):
        sent.append(data)

    began = trio.current_time()
    reader = LogCursor(buffer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_to_end, reader, wakeup, send_all)
        await trio.sleep(1)
        buffer.append([b"last"], 0)
        reader.finish()
        buffer.append([b"too late"], 0)
        reader.finish()
        wakeup.notify()
    assert trio.current_time() - began == pytest.approx(1)
    assert ids_of(b"".join(sent)) == list(range(1, 302))


async def test_a_client_that_takes_nothing_misses_lines(autojump_clock):
    """While it stands still nothing is queued for it, and afterwards it hears how many lines were dropped."""
    buffer = ring_of(10, lines_max=100)
    wakeup = Wakeup()
    buffer.changed.add(wakeup.notify)
    sent = []

    async def send_all(data):
        await trio.sleep(60)
        sent.append(data)

    async def append():
        await trio.sleep(30)
        buffer.append([b"x"] * 1000, 0)
        buffer.end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append)
        await send_to_end(LogCursor(buffer), wakeup, send_all)
    assert ids_of(sent[0]) == list(range(1, 11))
    assert events_of(sent[1])[0] == ("gap", 900)
    assert ids_of(sent[1])[1:] == list(range(911, 1011))


# Following a pipe.


def test_following_a_killed_writer(tmp_path):
    """Everything that was written arrives, with a partial last line, in the buffer and in the file; then both end."""
    reading, writing = make_pipe()
    buffer = LineBuffer()
    program = "os.write(1, b'one\\n' * 5000); os.write(2, b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    process = start(program, stdout=writing, stderr=writing)
    os.close(writing)
    drain = follow(reading, buffer, LogFile(str(tmp_path), "w"))
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert drain.join(LIMIT_S)
    assert texts(buffer) == ["one"] * 5000 + ["half"]
    assert buffer.ended
    assert texts(load(str(tmp_path / "w.log"))) == texts(buffer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_a_line_that_does_not_end_is_shown(tmp_path):
    """A progress bar is seen while it progresses, in its newest state, and the file has it too."""
    reading, writing = make_pipe()
    buffer = LineBuffer()
    drain = follow(reading, buffer, LogFile(str(tmp_path), "w"), partial_s=0.05)
    os.write(writing, b"\r 1%\r 2%")
    until(lambda: texts(buffer) == texts(load(str(tmp_path / "w.log"))) == [" 2%"])
    os.write(writing, b"\r 3%\n")
    until(lambda: texts(buffer) == [" 2%", " 3%"])
    os.close(writing)
    assert drain.join(LIMIT_S)


def test_a_pipe_that_somebody_keeps_open():
    """A reader that is told to stop takes what is there, and does not wait for an end that does not come."""
    reading, writing = make_pipe()
    buffer = LineBuffer()
    drain = follow(reading, buffer)
    os.write(writing, b"a\nb")
    began = time.monotonic()
    drain.stop(LIMIT_S)
    assert time.monotonic() - began < LIMIT_S / 2
    assert texts(buffer) == ["a", "b"]
    assert buffer.ended
    assert repr(drain) == "<PipeReader 0 pipes into <LineBuffer 1..2, 2 bytes, ended>>"
    drain.stop(LIMIT_S)
    os.close(writing)


def test_a_reader_that_has_ended_writes_to_no_other_file():
    """The number of its descriptor may belong to another file by then."""
    reading, writing = make_pipe()
    drain = follow(reading, LineBuffer(), ends_buffer=False)
    wake = drain.fds()[-1]
    os.close(writing)
    assert drain.join(LIMIT_S)
    made = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    other = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, wake)
    assert other == wake
    try:
        assert drain.settle(0)
        drain.stop(LIMIT_S)
        assert drain.fds() == []
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
        os.close(made)


def test_one_change_for_many_lines():
    """A batch of lines is one event to those who wait."""
    changes = []
    buffer = LineBuffer()
    buffer.changed.add(lambda: changes.append(buffer.last))
    reading, writing = make_pipe()
    os.write(writing, b"x\n" * 30_000)
    os.close(writing)
    assert follow(reading, buffer).join(LIMIT_S)
    assert changes == [30_000, 30_000]


# Passing output on.


def test_output_without_a_reader_never_blocks():
    """Giving never waits; what finds no room is lost, and told in bytes to whoever reads again."""
    reading, writing = os.pipe()
    tee = Tee(writing, 100_000)
    for _ in range(1000):
        tee.add(b"x" * 1000)
    assert tee.lost_bytes >= 1_000_000 - 100_000 - 65536 - 1000
    assert not tee.close(0.01)
    taken = bytearray()
    os.set_blocking(reading, False)  # the last of it may have been read before the tee knows that it was written

    def take():
        with contextlib.suppress(BlockingIOError):
            taken.extend(os.read(reading, 10**6))

    until(lambda: take() or tee._waiting == 0)
    take()
    assert len(taken) + tee.lost_bytes == 1_000_000
    os.close(reading)
    os.close(writing)


def test_the_output_is_taken_again():
    """The gap stands in the output itself; a descriptor that does not block, as some are handed over, is no trouble."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    tee = Tee(writing, 100_000)
    tee.add(b"x" * 99_999 + b"\n")
    tee.add(b"lost\n")
    got = b""
    while len(got) < 100_000:
        got += os.read(reading, 65536)
    until(lambda: tee._waiting == 0)
    tee.add(b"next\n")
    assert tee.close(LIMIT_S)
    missing = b"\n[ichat: 5 bytes are missing here: they were not read in time]\nnext\n"
    assert os.read(reading, 65536) == missing
    os.close(reading)
    os.close(writing)


def test_the_output_breaks():
    """Once nobody can read, bytes are counted and no more is tried."""
    reading, writing = os.pipe()
    tee = Tee(writing)
    os.close(reading)
    tee.add(b"x" * 10)
    until(lambda: tee.is_broken)
    tee.add(b"y" * 10)
    assert repr(tee) == f"<Tee {writing} broken, 0 wait, 20 lost>"
    assert tee.close(LIMIT_S)
    os.close(writing)


# Capturing.


def test_capture_takes_everything():
    """Lines of the process, of its children, of a killed child and of what is not Python: to the buffer, and on, in order."""
    code, out, err = run("""
        buffer = LineBuffer()
        capture = Capture(buffer)
        print("print")
        print("error", file=sys.stderr)
        subprocess.run("echo shell; echo shell-error >&2", shell=True)
        child = "import os, signal; print('child'); print('half', end=''); os.kill(os.getpid(), signal.SIGKILL)"
        subprocess.run([sys.executable, "-c", child])
        os.write(1, b"\\nraw\\n")
        print("last", end="")
        capture.close()
        print("after")
        sys.stderr.write(repr([line.text for line in buffer.tail(100)]))
        sys.stderr.flush()
        os._exit(0 if buffer.ended else 1)
    """)
    lines = ["print", "error", "shell", "shell-error", "child", "half", "raw", "last"]
    # The two were apart before, so each keeps its own, and the order between them in the buffer is that of reading.
    assert code == 0
    assert out == "print\nshell\nchild\nhalf\nraw\nlastafter\n"
    assert err.startswith("error\nshell-error\n[")
    assert sorted(eval(err.splitlines()[-1])) == sorted(lines)


def test_capture_keeps_the_order():
    """Where both went to one place there is one pipe: what is written to the two in turn comes out in turn."""
    program = """
        buffer = LineBuffer()
        capture = Capture(buffer)
        for number in range(1000):
            os.write(1 + number % 2, b"%d\\n" % number)
        capture.close()
        assert [line.text for line in buffer.tail(1000)] == [str(number) for number in range(1000)]
        os._exit(0)
    """
    process = start(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert out.split() == [str(number) for number in range(1000)]
    assert process.returncode == 0


def test_flushed_output_has_every_line():
    """Waiting for it misses no line, of this process or of its children, however often it is done; nor after the end."""
    code, _, err = run("""
        buffer = LineBuffer(lines_max=100_000)
        capture = Capture(buffer)
        for number in range(1, 201):
            print(number)
            os.write(2, b"%d\\n" % number)
            subprocess.run(["echo", str(number)]) if number % 20 == 0 else None
            assert capture.settle(20)
            assert buffer.last == 2 * number + number // 20, (buffer.last, number)
        assert "<PipeReader 2 pipes" in repr(capture)
        capture.close()
        assert capture.settle(20)
        os._exit(0)
    """)
    assert (code, err.splitlines()[-1]) == (0, "200")


@pytest.mark.parametrize("broken", [False, True], ids=["nobody reads", "nobody can read"])
def test_capture_never_waits_for_the_output(broken):
    """With an original output that takes nothing, children write what they like, and the buffer has the last of it."""
    reading, writing = os.pipe()
    report, report_to = os.pipe()
    program = f"""
        capture = Capture(LineBuffer(lines_max=100))
        child = "import os\\nfor _ in range(200): os.write(1, b'x' * 99_999 + bytes([10]))"
        subprocess.run([sys.executable, "-c", child], check=True)
        print("after the flood")
        while capture._drain._buffer.tail(1)[0].text != "after the flood":
            time.sleep(0.01)
        capture.close(0.1)
        os.write({report_to}, repr([capture._drain._buffer, capture.tees[0].lost_bytes > 10_000_000]).encode())
        os._exit(7)
    """
    process = start(program, stdout=writing, stderr=writing, pass_fds=(report_to,))
    os.close(writing)
    os.close(report_to)
    if broken:
        os.close(reading)
    assert process.wait(LIMIT_S) == 7
    with os.fdopen(report) as file:
        told = file.read()
    assert told.startswith("[<LineBuffer 102..201, ")
    assert told.endswith(", True]")
    if not broken:
        os.close(reading)


def test_capture_in_a_terminal():
    """A terminal shows what it would have shown: the same bytes, a prompt without its newline included, at once."""
    ours, theirs = pty.openpty()
    program = """
        capture = Capture(LineBuffer())
        sys.stdout.write("50%\\r")
        sys.stdout.flush()
        sys.stderr.write("prompt: ")
        sys.stderr.flush()
        signal.pause()
    """
    process = start(program, stdout=theirs, stderr=theirs)
    os.close(theirs)
    got = b""
    while got != b"50%\rprompt: ":
        assert select.select([ours], [], [], LIMIT_S)[0], got
        got += os.read(ours, 1000)
    process.kill()
    process.wait()
    os.close(ours)


def test_a_library_that_writes_its_own_lines_is_not_repeated():
    """The hub's library has a handler of its own: each of its retries is one line."""
    code = (
        "import logging, sys; from ichat.__main__ import _prepare; _prepare('info', sys.stderr, 'text')\n"
        "hub = logging.getLogger('huggingface_hub'); hub.addHandler(logging.StreamHandler())\n"
        "logging.getLogger('huggingface_hub.file_download').warning('Retrying in 1s')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "Retrying in 1s\n"


def test_capture_without_descriptors():
    """A process that was started with its output closed is captured as well."""
    reading, writing = os.pipe()
    program = f"""
        os.closerange(0, 3)
        buffer = LineBuffer()
        capture = Capture(buffer)
        subprocess.run("echo out; echo err >&2", shell=True, stdin=subprocess.DEVNULL)
        capture.close()
        os.write({writing}, repr(sorted(line.text for line in buffer.tail(9))).encode())
        os._exit(0)
    """
    process = start(program, pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "['err', 'out']"
    process.wait(LIMIT_S)


def test_a_crashs_traceback_goes_to_the_original_output():
    """The traceback of a crash goes to the original output: nobody would read it from the pipe of a dead process."""
    code, _, err = run("""
        capture = Capture(LineBuffer())
        os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
    """)
    assert code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in err


def test_a_forked_child_keeps_nothing_open():
    """After the end of the process its forked children get an error for what they write, and its output ends."""
    code, out, err = run("""
        told, tell = os.pipe()
        capture = Capture(LineBuffer())
        if os.fork() == 0:
            os.close(tell)
            os.read(told, 1)  # until the parent's end
            try:
                while True:
                    os.write(1, b"x" * 65536)
            except BrokenPipeError:
                os._exit(0)
        print("forked")
        capture.close()
        os._exit(0)
    """)
    assert (code, out, err) == (0, "forked\n", "")


# Files.


def fill(file, first, last, now=1e9):
    for number in range(first, last + 1):
        file.append([b"line %d" % number], now + number)
        file.flush()


def test_a_file_is_rotated(tmp_path):
    """At most so many bytes in each of so many files, the newest lines without a gap, each with its time."""
    file = LogFile(str(tmp_path), "w", bytes_max=330, files_max=2)
    fill(file, 100, 199)
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.log", "w.log.1", "w.log.2"]
    assert all(path.stat().st_size <= 330 for path in tmp_path.iterdir())
    assert (tmp_path / "w.log").read_text().splitlines()[-1] == "2001-09-09T01:49:59.000Z line 199"
    buffer = load(str(tmp_path / "w.log"), files_max=2)
    assert buffer.tail(1) == [Line(buffer.last, 1e9 + 199, "line 199")]
    assert texts(buffer) == [f"line {number}" for number in range(200 - buffer.last, 200)]
    assert 18 < buffer.last <= 27
    assert buffer.ended


@pytest.mark.parametrize("files_max", [0, 1])
def test_few_files(tmp_path, files_max):
    """No older file is kept where none is wanted."""
    fill(LogFile(str(tmp_path), "w", bytes_max=100, files_max=files_max), 1, 50)
    assert len(list(tmp_path.iterdir())) == 1 + files_max
    assert texts(load(str(tmp_path / "w.log"), files_max=files_max))[-1] == "line 50"


def test_the_run_before_is_kept(tmp_path):
    """A new run begins new files; those of the run before can be read until the next, whole, and no older ones."""

    def begin_run(number, lines):
        file = LogFile(str(tmp_path), "w", bytes_max=110)
        assert not (tmp_path / "w.log.1").exists()
        fill(file, number * 100, number * 100 + lines - 1)
        file.close()

    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    begin_run(1, lines=2)
    begin_run(2, lines=7)
    begin_run(3, lines=1)
    assert texts(load(previous_path(str(tmp_path), "w"))) == [f"line {number}" for number in range(200, 207)]
    assert texts(load(str(tmp_path / "w.log"))) == ["line 300"]
    assert names() == ["w.log", "w.previous.log", "w.previous.log.1", "w.previous.log.2"]
    begin_run(4, lines=1)
    assert texts(load(previous_path(str(tmp_path), "w"))) == ["line 300"]
    assert names() == ["w.log", "w.previous.log"]


def test_reading_back_is_bounded(tmp_path):
    """Only the end of large files is read, from the first whole line on; of none, nothing; others' lines as they are."""
    fill(LogFile(str(tmp_path), "w", bytes_max=1000), 100, 199)
    assert texts(load(str(tmp_path / "w.log"), bytes_max=100)) == ["line 198", "line 199"]
    assert texts(load(str(tmp_path / "w.log"), lines_max=3)) == ["line 197", "line 198", "line 199"]
    assert texts(load(str(tmp_path / "none.log"))) == []
    (tmp_path / "x.log").write_bytes(b"plain\n9999-99-99T99:99:99.000Z not a time\ntorn")
    assert texts(load(str(tmp_path / "x.log"))) == ["plain", "not a time", "torn"]


def test_a_directory_that_is_not_there(tmp_path, caplog):
    """Lines are counted and the outage is told once; when it is over, the file says how many are missing."""
    (tmp_path / "logs").write_text("in the way")
    file = LogFile(str(tmp_path / "logs"), "w", retry_s=0.0)
    fill(file, 1, 10)
    assert repr(file) == f"<LogFile {tmp_path}/logs/w.log failing, 10 lines lost>"
    (tmp_path / "logs").unlink()
    fill(file, 11, 12)
    assert file.lost_lines == 10
    assert not file.is_failing
    missing = "[ichat: 10 lines are missing here: they could not be written]"
    assert texts(load(file.path)) == [missing, "line 11", "line 12"]
    assert [record.message.partition("w.log ")[2] for record in caplog.records] == [
        "cannot be written: File exists; its lines are lost until it can",
        "can be written again; 10 lines of it are lost",
    ]


def test_lines_survive_a_full_disk_in_memory(tmp_path, monkeypatch, caplog):
    """It costs lines, which are counted, and neither time nor memory; it is tried again only after a while."""
    file = LogFile(str(tmp_path), "w")
    fill(file, 1, 2)
    os.rename(file.path, tmp_path / "kept")
    os.symlink("/dev/full", file.path)
    file._close()
    for _ in range(1000):
        file.append([b"x" * 1000] * 10, 0)
    file.flush()
    assert file.lost_lines == 10_000
    assert len(file._data) == 0
    assert [record.message.partition("w.log ")[2] for record in caplog.records] == [
        "cannot be written: No space left on device; its lines are lost until it can"
    ]
    os.unlink(file.path)
    fill(file, 3, 3)
    assert file.lost_lines == 10_001
    monkeypatch.setattr(file, "_retry_at", 0.0)
    fill(file, 4, 4)
    assert texts(load(file.path))[-1] == "line 4"


def test_a_line_that_was_written_in_part(tmp_path, monkeypatch):
    """A disk that fills in the middle of a line tears that line only."""
    file = LogFile(str(tmp_path), "w")
    write = os.write
    room = [40]

    def write_until_full(fd, data):
        if fd != file._fd:
            return write(fd, data)
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_until_full)
    file.append([b"first", b"second", b"third"], 1e9)
    file.flush()
    assert file.lost_lines == 2
    room[0] = 10**6
    monkeypatch.setattr(file, "_retry_at", 0.0)
    fill(file, 4, 4)
    lines = texts(load(file.path))
    assert lines[0] == "first"
    assert lines[-2:] == ["[ichat: 2 lines are missing here: they could not be written]", "line 4"]
    assert len(lines) == 4


def test_a_file_that_was_removed(tmp_path):
    """It is made again, with its directory, so that lines do not go where nobody can read them."""
    file = LogFile(str(tmp_path / "logs"), "w")
    fill(file, 1, 1)
    os.unlink(file.path)
    os.rmdir(tmp_path / "logs")
    fill(file, 2, 2)
    assert texts(load(file.path)) == ["line 2"]
    assert file.lost_lines == 0


def test_old_files_are_removed(tmp_path):
    """Only logs, and only those that nobody writes to any more."""
    for name in ("old.log", "old.log.2", "old.previous.log", "new.log", "notes.txt", "x.log.bak", "dpkg.log"):
        (tmp_path / name).write_text("x" if name == "dpkg.log" else "2026-11-21T21:36:15.658Z x\n")
        if name != "new.log":
            os.utime(tmp_path / name, (0, 0))
    prune(str(tmp_path), 3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dpkg.log", "new.log", "notes.txt", "x.log.bak"]
    prune(str(tmp_path / "none"), 3600)
