"""The book of logs: lines of every worker, over restarts of the worker and of the gateway, from wherever it runs."""

import contextlib
import functools
import gzip
import itertools
import json
import os
import sys
import time
from types import SimpleNamespace

import attrs
import pytest
import trio
import trio.testing
from support.peers import Upstream, chunk, plain, until
from support.programs import LIMIT_S

from ichat.config.schema import Logs
from ichat.errors import ApiError
from ichat.http import client
from ichat.http.sse import EventDecoder
from ichat.observability.logs import follower as collector
from ichat.observability.logs import stream as logs
from ichat.observability.logs.files import load
from ichat.observability.logs.follower import EVENT_BYTES_MAX, LogSource, LogTimes
from ichat.observability.logs.lines import LineBuffer, Wakeup
from ichat.observability.logs.store import LogStore
from ichat.observability.logs.stream import LogCursor, LogStream, read_query

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
SERVE = functools.partial(trio.serve_tcp, host="127.0.0.1")
QUIET = Logs(echo=False)
TIMES = LogTimes(pause_s=0.02, pause_s_max=0.1, look_s=0.05, look_pause_s=0.01)


@pytest.fixture
def make_book(tmp_path):
    """Make a book: `book = make_book(echo=True)`; each call is another start of the gateway."""
    books = []

    def make(times=TIMES, echo_fd=2, **settings):
        books.append(LogStore(str(tmp_path / "logs"), attrs.evolve(QUIET, **settings), times, echo_fd=echo_fd))
        return books[-1]

    yield make
    for book in books:
        book.close()


@pytest.fixture
async def book(make_book):
    return make_book()


def texts(book, worker_id="w"):
    """Return the lines of the newest start."""
    return book.last_lines(worker_id, 10**6)


def on_disk(book, worker_id="w"):
    return [line.text for line in load(book.path_of(worker_id)).tail(10**6)]


async def run(book, program, worker_id="w"):
    """Run a program as a worker of this id, to its end."""
    output = book.begin(worker_id)
    try:
        await trio.run_process([sys.executable, "-c", program], stdout=output, stderr=output, check=False)
    finally:
        os.close(output)
    await book.end(worker_id)


def shown(block):
    """Return the events of a block: (number, line), ("gap", lost)."""
    found = []
    for text in block.decode().split("\n\n")[:-1]:
        if not text.startswith(":"):
            data = json.loads(text.partition("data: ")[2])
            found.append(("gap", data["lost"]) if "event: gap" in text else (data["seq"], data["line"]))
    return found


async def read(book, query="", last_event_id="", worker_id="w"):
    """Return what a stream has, to its end."""
    found = []
    with trio.fail_after(LIMIT_S):
        async for block in await book.stream(worker_id, read_query(query, last_event_id)):
            found += shown(block)
    return found


async def wait_refused(book, is_enough=lambda: False):
    """Wait until the book knows that the worker has no lines to follow, or until something else is enough."""
    with trio.fail_after(LIMIT_S):
        refusal = ""
        while not ("--log-streaming" in refusal or is_enough()):
            try:
                await book.stream("w", read_query("", ""))
            except ApiError as error:
                refusal = str(error)
            await trio.sleep(0.01)


class Follower:
    """A client that follows a stream, as a task."""

    def __init__(self, book, nursery, query="", worker_id="w"):
        self.got = []
        self.ended = False
        nursery.start_soon(self._read, book, worker_id, read_query(query, ""))

    async def _read(self, book, worker_id, query):
        async for block in await book.stream(worker_id, query):
            self.got += shown(block)
        self.ended = True

    @property
    def lines(self):
        return [line for _, line in self.got]


class Remote:
    """A worker that runs elsewhere: it streams its buffer as a worker does."""

    def __init__(self, start_id="one", **bounds):
        self.buffer = LineBuffer(**bounds)
        self.wakeup = Wakeup()
        self.buffer.changed.add(self.wakeup.notify)
        self.start_id = start_id
        self.last_ids = []
        self.scopes = []
        self.is_ending = False
        self.status = 200
        self.port = 0
        self.upstream = Upstream(self._reply)

    async def start(self, nursery):
        listeners = await nursery.start(SERVE, self.upstream.serve, 0)
        self.port = listeners[0].socket.getsockname()[1]
        return self

    @property
    def source(self):
        return LogSource(self.start_id, "127.0.0.1", self.port)

    def say(self, *lines, at=None):
        self.buffer.append([line.encode() for line in lines], time.time() if at is None else at)

    def restart(self, start_id):
        """Be another process at the same place."""
        self.buffer, self.start_id = LineBuffer(), start_id
        self.buffer.changed.add(self.wakeup.notify)
        self.hang_up()

    def hang_up(self):
        scopes, self.scopes = self.scopes, []
        for scope in scopes:
            scope.cancel()

    async def _reply(self, stream_, head, body):
        last_id = dict(head.headers).get(b"last-event-id", b"").decode()
        self.last_ids.append(last_id)
        if self.status != 200:
            await stream_.send_all(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % self.status)
            return None
        query = read_query("", last_id)
        await stream_.send_all(HEAD)
        with trio.CancelScope() as scope:
            self.scopes.append(scope)
            async for block in LogStream(LogCursor(self.buffer, after=query.after), self.wakeup, self):
                await stream_.send_all(chunk(block))
            await stream_.send_all(b"0\r\n\r\n")
        return "close"


@pytest.fixture
async def remote(nursery):
    return await Remote().start(nursery)


async def follow(nursery, book, sources):
    """Have the book follow what `sources` holds, a mapping that the test changes."""
    scope = trio.CancelScope()

    async def run():
        with scope:
            await book.follow_forever(lambda: dict(sources))

    nursery.start_soon(run)
    return scope


def tear(path):
    """Add what a gateway that was killed while it wrote may have left."""
    with open(path, "a") as file:
        file.write("2001-09-09T01:46:42.000Z to")


def said_by(*events, head=HEAD):
    """Make an upstream that sends this to everybody, and ends."""

    async def reply(stream_, _head, _body):
        await stream_.send_all(head + b"".join(map(chunk, events)) + b"0\r\n\r\n")
        return "close"

    return Upstream(reply)


async def listen(nursery, upstream):
    listeners = await nursery.start(SERVE, upstream.serve, 0)
    return LogSource("one", "127.0.0.1", listeners[0].socket.getsockname()[1])


def event(seq, line="x", at="2026-01-01T00:00:00.000Z"):
    return b"id: %d\ndata: %b\n\n" % (seq, json.dumps({"seq": seq, "time": at, "line": line}).encode())


# Workers that are started here.


async def test_everything_a_worker_says_is_kept(book):
    """Both of its outputs and those of its children, in the buffer and in its file, with a last line that does not end."""
    await run(
        book, "import os; print('out', flush=True); os.system('echo child >&2'); os.write(2, b'half'); os._exit(9)"
    )
    assert texts(book) == on_disk(book) == ["out", "child", "half"]
    assert book.last_lines("w", 2) == ["child", "half"]
    assert book.last_lines("nobody", 2) == []
    assert book.path_of("w").endswith("/logs/w.log")
    assert repr(book).endswith("/logs, 1 workers>")


async def test_a_follower_goes_on_with_the_next_start(book, nursery):
    """It sees the end of one start, a line between, and the next, with numbers that go on; it ends when all is over."""
    await run(book, "print('first')")
    follower = Follower(book, nursery)
    await run(book, "print('second')")
    await until(lambda: len(follower.got) == 3)
    assert follower.got == [(1, "first"), (2, "[ichat: started again]"), (3, "second")]
    assert book.last_lines("w", 50) == ["second"], "nothing of an earlier start"
    book.finish("w")
    await until(lambda: follower.ended)
    await run(book, "print('third')")
    again = Follower(book, nursery, "tail=1")
    await until(lambda: again.lines == ["third"])
    assert not again.ended, "a worker that is started after all is followed again"
    book.forget("w")
    await until(lambda: again.ended)


async def test_the_run_before(book):
    """Its files are kept until the next one; before there was one, 404 says so."""
    await run(book, "print('first')")
    with pytest.raises(ApiError, match="no log of a run of w before the newest start"):
        await read(book, "previous=1")
    await run(book, "print('second')")
    assert await read(book, "previous=1") == [(1, "first")]
    assert await read(book, "follow=false&tail=1") == [(3, "second")]
    await run(book, "print('third')")
    assert await read(book, "previous=1") == [(1, "second")]
    assert on_disk(book) == ["third"]


def descriptors():
    """Return what is open; threads of earlier tests may still be about to close theirs."""
    return set(os.listdir("/proc/self/fd"))


async def test_a_start_that_failed(book):
    """Nobody ever wrote: nothing is left open, and the next start finds nothing in its way."""
    before = descriptors()
    os.close(book.begin("w"))
    await book.end("w")
    await book.end("w")
    await book.end("nobody")
    assert descriptors() <= before
    os.close(book.begin("w"))
    output = book.begin("w")  # the end before was forgotten
    os.write(output, b"line\n")
    os.close(output)
    await book.end("w")
    assert texts(book) == on_disk(book) == ["line"]


async def test_output_that_somebody_holds_open(book):
    """A start ends although somebody could still write, with all that was written."""
    output = book.begin("w")
    os.write(output, b"line\npart")
    with trio.fail_after(LIMIT_S):
        await book.end("w")
    assert texts(book) == ["line", "part"]
    os.close(output)


async def test_no_more_descriptors(book, monkeypatch):
    """A start that cannot be is an OSError, and costs no descriptor."""
    before = descriptors()

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", refuse)
        with pytest.raises(OSError, match="Too many"):
            book.begin("w")
    assert descriptors() <= before
    await run(book, "print('line')")
    assert texts(book) == ["line"]


async def test_lines_on_standard_error(make_book, capfd):
    """Workers' lines stand there with the worker's name, whole; not where nobody wants them."""
    book, quiet = make_book(echo=True), make_book()
    await run(book, "print('one', flush=True); print('two')")
    await run(book, "print('three')", "other")
    await run(quiet, "print('quiet')", "third")
    book.close()
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[w] one", "[w] two", "[other] three"]


async def test_an_unread_standard_error_holds_up_no_worker(make_book):
    """It holds up no worker: what finds no room there is lost there, and nowhere else."""
    reading, writing = os.pipe()
    book = make_book(echo_fd=writing, echo=True, echo_bytes_max=100_000, ring_lines_max=10)
    with trio.fail_after(LIMIT_S):
        await run(book, "print(('x' * 999 + chr(10)) * 5000 + 'last')")
    assert texts(book)[-1] == "last"
    assert len(on_disk(book)) > 2000
    assert book._tee.lost_bytes > 4_000_000
    os.close(reading)
    book.close()
    os.close(writing)


async def test_a_full_disk_costs_lines_and_no_worker(book, nursery):
    """It costs lines of the file, and nothing else: the worker goes on, followers and the buffer have every line."""
    output = book.begin("w")
    os.write(output, b"before\n")
    await until(lambda: on_disk(book) == ["before"])
    follower = Follower(book, nursery)
    os.unlink(book.path_of("w"))
    os.symlink("/dev/full", book.path_of("w"))
    await trio.to_thread.run_sync(os.write, output, b"during\n" * 10_000)
    os.close(output)
    with trio.fail_after(LIMIT_S):
        await book.end("w")
    assert texts(book) == ["during"] * 10_000
    await until(lambda: follower.lines[-1:] == ["during"])
    os.unlink(book.path_of("w"))
    await run(book, "print('after')")
    assert on_disk(book) == ["after"]


# Ids and paths.


@pytest.mark.parametrize("worker_id", ["", "../x", "a/b", "a\0b", "x" * 129, "ä", "a\n"])
async def test_an_invalid_worker_id_is_no_path(book, worker_id):
    """404 for whoever asks, a ValueError for whoever should know better; nothing is looked for, or made."""
    with pytest.raises(ApiError) as caught:
        await book.stream(worker_id, read_query("", ""))
    assert caught.value.status == 404
    for method in (book.begin, book.resume, book.path_of):
        with pytest.raises(ValueError, match="not a worker's id"):
            method(worker_id)
    assert book.last_lines(worker_id, 1) == []


@pytest.mark.parametrize("worker_id", [".", "..", "a:1", "-", "x" * 128, "w.previous", "w.log", "w.log.1"])
async def test_strange_ids(book, tmp_path, worker_id):
    """Each has files of its own, in the directory."""
    await run(book, "print('first')")
    await run(book, "print('second')")
    await run(book, "print('other')", worker_id)
    assert on_disk(book, worker_id) == ["other"]
    assert await read(book, "previous=1") == [(1, "first")]
    assert on_disk(book) == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert len(list((tmp_path / "logs").iterdir())) == 3


# Gateways that end.


async def test_workers_of_an_earlier_gateway(make_book):
    """Their lines are read from their files; whoever never was is 404."""
    book = make_book()
    await run(book, "print('first')")
    await run(book, "print('second'); print('third')")
    book.close()
    book = make_book()
    assert await read(book) == [(1, "second"), (2, "third")]
    assert await read(book, "follow=false&tail=1") == [(2, "third")]
    assert await read(book, "previous=1") == [(1, "first")]
    with pytest.raises(ApiError, match="There is no worker x"):
        await read(book, worker_id="x")


async def test_numbers_over_a_restart_of_the_gateway(make_book):
    """A number that a client knows from the gateway before is less than all of this one's: everything is new to it."""
    book = make_book()
    await run(book, "print('a' + chr(10) + 'b' + chr(10) + 'c')")
    book.close()
    book = make_book()
    await run(book, "print('d' + chr(10) + 'e')")
    got = await read(book, "follow=false", "2")
    assert [line for _, line in got] == ["d", "e"]
    assert got[0][0] > 1e15
    assert await read(book, "follow=false", str(got[0][0])) == got[1:]


async def test_the_gateway_stops(book, nursery):
    """Streams end after what is there, those of workers that still write too, and those that begin later."""
    output = book.begin("w")
    os.write(output, b"one\n")
    follower = Follower(book, nursery)
    await until(lambda: follower.lines == ["one"])
    os.write(output, b"two\n")
    await until(lambda: texts(book) == ["one", "two"])
    book.close_streams()
    await until(lambda: follower.ended)
    assert follower.lines == ["one", "two"]
    assert [line for _, line in await read(book)] == ["one", "two"]
    os.close(output)


async def test_a_stream_that_never_catches_up(book):
    """When the gateway stops it ends all the same."""
    output = book.begin("w")
    os.write(output, b"x\n")
    blocks = await book.stream("w", read_query("", ""))
    book.close_streams()
    with trio.fail_after(LIMIT_S):
        async for _ in blocks:
            os.write(output, b"x\n" * 1000)
            await trio.sleep(0.02)
    os.close(output)


async def test_a_quiet_stream_is_kept_alive(autojump_clock):
    """A comment now and then; a stream without a line begins with a comment at once, another stream does not."""
    buffer, comment = LineBuffer(), b": \n\n"
    stream = LogStream(LogCursor(buffer), Wakeup(), SimpleNamespace(is_ending=False))
    began = trio.current_time()
    assert await anext(stream) == comment
    assert trio.current_time() == began
    assert await anext(stream) == comment
    assert trio.current_time() - began == pytest.approx(logs.KEEP_ALIVE_S)
    buffer.append([b"a line"], now=0)
    stream, began = LogStream(LogCursor(buffer), Wakeup(), SimpleNamespace(is_ending=False)), trio.current_time()
    assert b"a line" in await anext(stream)
    assert await anext(stream) == comment
    assert trio.current_time() - began == pytest.approx(logs.KEEP_ALIVE_S)


# Workers that are followed.


async def test_a_worker_elsewhere(book, remote, nursery):
    """History and what comes, with the worker's own times, in the buffer, in its file, and to followers."""
    remote.say("old", at=1e9 + 0.25)
    await follow(nursery, book, {"w": remote.source})
    await until(lambda: texts(book) == ["old"])
    follower = Follower(book, nursery)
    await until(lambda: follower.lines == ["old"])
    remote.say("new", "newer")
    await until(lambda: follower.lines == on_disk(book) == ["old", "new", "newer"])
    assert book.tail("w", 3)[0].time == load(book.path_of("w")).tail(3)[0].time == 1e9 + 0.25
    assert book.last_lines("w", 1) == ["newer"]


async def test_over_a_unix_socket(book, remote, nursery, tmp_path):
    """A path goes before host and port."""
    path = str(tmp_path / "socket")
    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(path)
        listener.listen()
        nursery.start_soon(trio.serve_listeners, remote.upstream.serve, [trio.SocketListener(listener)])
        remote.say("line")
        await follow(nursery, book, {"w": LogSource("one", "192.0.2.1", 9, path)})
        await until(lambda: on_disk(book) == ["line"])
        nursery.cancel_scope.cancel()


async def test_a_connection_that_breaks(book, remote, nursery):
    """The next one goes on where it stood: every line once, or an exact count of those that are gone."""
    remote.buffer = LineBuffer(lines_max=100)
    remote.buffer.changed.add(remote.wakeup.notify)
    remote.say("a", "b")
    await follow(nursery, book, {"w": remote.source})
    await until(lambda: texts(book) == ["a", "b"])
    for number in range(5):
        remote.hang_up()
        remote.say(str(number))
        await until(lambda last=str(number): texts(book)[-1] == last)
    remote.status = 503
    remote.hang_up()
    await until(lambda: remote.last_ids.count("7") >= 2)
    remote.say(*["x"] * 1000)
    remote.status = 200
    await until(lambda: len(texts(book)) == 108)
    assert texts(book)[:8] == ["a", "b", *map(str, range(5)), "[ichat: 900 lines are missing here]"]
    assert set(texts(book)[8:]) == {"x"}
    await until(lambda: on_disk(book) == texts(book))


async def test_pauses_grow(nursery, remote, autojump_clock, monkeypatch):
    """A worker that is away is asked twice a second at first, and every ten seconds in the end."""
    asked = []

    async def fail(upstream):
        asked.append(trio.current_time())
        raise OSError("away")

    monkeypatch.setattr(client, "connect", fail)
    with trio.move_on_after(60):
        await collector.LogFollower(remote.source, 1000, None, None).follow()
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(asked)]
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


async def test_another_start_of_a_worker(book, remote, nursery):
    """It is another run: the lines before are those of `previous`, and followers go on with a line between."""
    sources = {"w": remote.source}
    remote.say("first")
    await follow(nursery, book, sources)
    await until(lambda: on_disk(book) == ["first"])
    follower = Follower(book, nursery)
    remote.restart("two")
    remote.say("second")
    sources["w"] = remote.source
    book.changed()
    await until(lambda: follower.lines == ["first", "[ichat: started again]", "second"])
    await until(lambda: on_disk(book) == ["second"])
    assert await read(book, "previous=1") == [(1, "first")]
    assert book.last_lines("w", 9) == ["second"]


async def test_lines_before_the_first_beat_begin_the_new_run(book, remote, nursery):
    """Lines of the next process that come before its first beat begin the new run, and only one."""
    sources = {"w": remote.source}
    remote.say("a", "b", "c")
    looks = []

    def looked_at():
        looks.append(sources["w"].start_id)
        return dict(sources)

    nursery.start_soon(book.follow_forever, looked_at)
    await until(lambda: on_disk(book) == ["a", "b", "c"])
    remote.restart("two")
    remote.say("d")
    await until(lambda: on_disk(book) == ["d"])
    sources["w"] = remote.source
    book.changed()
    remote.say("e")
    await until(lambda: on_disk(book) == ["d", "e"] and looks[-1] == "two")
    every = ["a", "b", "c", "[ichat: started again]", "d", "e"]
    assert [line for _, line in await read(book, "follow=false")] == every
    assert [line for _, line in await read(book, "previous=1")] == ["a", "b", "c"]
    assert remote.last_ids == ["", "3"], "told of it, the connection went on"


async def test_a_worker_that_goes_and_comes_again(book, remote, nursery):
    """Followers' streams end with it; what it says after it came again is not told twice."""
    sources = {"w": remote.source}
    remote.say("a")
    await follow(nursery, book, sources)
    await until(lambda: texts(book) == ["a"])
    follower = Follower(book, nursery)
    source = sources.pop("w")
    await until(lambda: follower.ended)
    remote.say("b")
    sources["w"] = source
    await until(lambda: texts(book) == on_disk(book) == ["a", "b"])
    again = Follower(book, nursery)
    await until(lambda: again.lines == ["a", "b"])
    assert not again.ended


async def test_a_worker_that_outlived_a_gateway(make_book, remote, nursery, tmp_path):
    """Its file goes on, without what it had already, after whatever the gateway had written last; the buffer has all."""
    book = make_book()
    scope = await follow(nursery, book, {"w": remote.source})
    remote.say("a", at=1e9)
    remote.say("b", at=1e9 + 1)
    await until(lambda: on_disk(book) == ["a", "b"])
    scope.cancel()
    book.close()
    tear(book.path_of("w"))
    remote.say("torn", at=1e9 + 2)
    remote.say("c", at=1e9 + 3)
    book = make_book()
    book.resume("w")
    assert [line for _, line in await read(book, "follow=false")] == ["a", "b", "to"], "not followed yet"
    await follow(nursery, book, {"w": remote.source})
    await until(lambda: on_disk(book) == ["a", "b", "to", "c"])
    assert texts(book) == ["a", "b", "torn", "c"]
    remote.say("d", at=1.0)
    await until(lambda: on_disk(book)[-1] == "d")
    assert os.listdir(tmp_path / "logs") == ["w.log"]


async def test_a_worker_that_did_not_outlive_a_gateway(make_book, remote, nursery):
    """Told which start its file is of, the book knows another one."""
    book = make_book()
    await run(book, "print('a')")
    book.close()
    book = make_book()
    book.resume("w", "zero", is_managed=False)
    remote.say("b")
    await follow(nursery, book, {"w": remote.source})
    await until(lambda: on_disk(book) == ["b"])
    assert await read(book, "previous=1") == [(1, "a")]


async def test_the_end_of_a_worker_that_was_resumed(book, remote, nursery):
    """Its last words are read before its end is told; then it may be started here."""
    book.resume("w")
    sources = {"w": remote.source}
    await follow(nursery, book, sources)
    remote.say("a")
    follower = Follower(book, nursery)
    await until(lambda: texts(book) == ["a"])
    remote.say(*["last"] * 500)
    remote.buffer.end()
    del sources["w"]
    await book.end("w")
    assert texts(book) == on_disk(book) == ["a"] + ["last"] * 500
    await trio.sleep(0.05)  # several rounds of the book
    assert not follower.ended
    await run(book, "print('again')")
    await until(lambda: follower.lines[-2:] == ["[ichat: started again]", "again"])
    assert [line for _, line in await read(book, "follow=false")] == follower.lines
    assert on_disk(book) == ["again"]


async def test_a_worker_that_is_read_through_a_pipe(book, remote, nursery):
    """It is not followed too."""
    output = book.begin("w")
    await follow(nursery, book, {"w": remote.source, "other": remote.source})
    remote.say("line")
    await until(lambda: texts(book, "other") == ["line"])
    assert texts(book) == []
    os.close(output)


async def test_a_stream_waits_for_the_first_start(book):
    """A worker that is about to start has a log; if it never starts, there is none."""
    with pytest.raises(ApiError):
        await book.stream("w", read_query("", ""))
    book.expect("w")
    stream = await book.stream("w", read_query("", ""))
    await run(book, "print('one')")
    assert b'"line": "one"' in await anext(stream)
    book.expect("never")
    waiting = await book.stream("never", read_query("", ""))
    book.finish("never")
    with pytest.raises(StopAsyncIteration):
        await anext(waiting)
    with pytest.raises(ApiError) as caught:
        await book.stream("never", read_query("", ""))
    assert caught.value.status == 404


@pytest.mark.parametrize("kind", ["404", "html", "gzip"])
async def test_a_worker_without_such_lines(book, remote, nursery, kind, tmp_path):
    """It is asked once, until it is started again; whoever asks for its lines learns that there are none."""
    body = gzip.compress(b"x" * 10_000_000)
    answers = {
        "404": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        "html": plain(b"<html>"),
        "gzip": HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + chunk(body),
    }

    async def refuse(stream_, head, body):
        await stream_.send_all(answers[kind])
        return "close"

    reply, remote.upstream.reply = remote.upstream.reply, refuse
    sources = {"w": remote.source}
    await follow(nursery, book, sources)
    await wait_refused(book)
    await trio.sleep(0.05)  # several rounds of the book
    assert len(remote.upstream.requests) == 1
    with pytest.raises(ApiError, match="--log-streaming"):
        await read(book)
    assert os.listdir(tmp_path) == []
    remote.upstream.reply = reply
    remote.restart("two")
    remote.say("line")
    sources["w"] = remote.source
    await until(lambda: texts(book) == ["line"])


async def test_only_so_many_are_followed(make_book, remote, nursery, caplog):
    """Others have to wait until one is gone; of those that are gone only so many rings are kept, and all files."""
    book = make_book(followed_max=2)
    sources = {f"w{number}": remote.source for number in range(4)}
    await follow(nursery, book, sources)
    remote.say("line")
    await until(lambda: on_disk(book, "w1") == on_disk(book, "w0") == ["line"])
    assert [record.message for record in caplog.records] == [
        "reading the logs of 2 workers, the most that logs.followed_max allows; the others are not read"
    ]
    assert repr(book).endswith(" 2 workers>")
    for gone in ("w0", "w1"):
        follower = Follower(book, nursery, worker_id=gone)
        await until(lambda follower=follower: follower.lines == ["line"])
        del sources[gone]
        await until(lambda follower=follower: follower.ended)
    await until(lambda: on_disk(book, "w3") == ["line"])
    del sources["w2"], sources["w3"]
    await until(lambda: repr(book).endswith(" 2 workers>"))
    assert await read(book, worker_id="w0") == [(1, "line")], "from its file"


async def test_a_bug_costs_one_worker(book, remote, nursery, monkeypatch, caplog):
    """The others go on."""
    connect = client.connect

    async def fail(upstream):
        if upstream.host == "bug":
            raise KeyError("bug")
        return await connect(upstream)

    monkeypatch.setattr(client, "connect", fail)
    await follow(nursery, book, {"bad": LogSource("one", "bug", 1), "w": remote.source})
    remote.say("line")
    await until(lambda: texts(book) == ["line"])
    assert [record.message for record in caplog.records] == ["a bug following the lines of worker bad"]


# Workers that are broken, or worse.


async def taken_from(nursery, book, *events, head=HEAD):
    """Return the lines that the book has of a worker that sends this."""
    upstream = said_by(*events, head=head)
    await follow(nursery, book, {"w": await listen(nursery, upstream)})
    await until(lambda: upstream.closed >= 2)
    return [line for _, line in await read(book, "follow=false")]


async def test_events_that_are_none(book, nursery):
    """What cannot be read counts as missing, once; what is repeated is not taken again; comments are nothing."""
    bad = [
        b"id: 2\ndata: {\n\n",
        b"id: 2\ndata: []\n\n",
        b'id: 2\ndata: "line"\n\n',
        b'id: 2\ndata: {"line": 7, "time": ""}\n\n',
        b'id: -2\ndata: {"line": "x", "time": ""}\n\n',
        b'data: {"line": "x", "time": ""}\n\n',
        b"id: 2\ndata: " + b"[" * 100_000 + b"\n\n",
        b'id: 2\ndata: {"line": "x", "time": ' + b"9" * 100_000 + b"}\n\n",
        b"event: gap\ndata: {}\n\n",
        b'event: gap\ndata: {"lost": -5}\n\n',
    ]
    rest = [
        b": \n\n",
        b"event: gap\n\n",
        b"\n\n",
        b"event: other\n\n",
        event(9, "b"),
        event(9, "c"),
        event(3, "d"),
        event(10, "e"),
    ]
    lines = await taken_from(nursery, book, event(1, "a"), *bad, *rest)
    assert lines[:4] == ["a", "[ichat: 10 lines are missing here]", "b", "e"]


async def test_a_line_cannot_pretend(make_book, nursery):
    """No line becomes two, none is longer than it may be, and what is no character or no time becomes one."""
    forged = "x\n2026-01-01T00:00:00.000Z forged\r"
    events = [event(1, forged), event(2, "y" * 5000), event(3, "\ud800"), event(4, "\x1b[2J\0")]
    at_odds = [event(5, at="9999-12-31T23:59:59-23:59"), event(6, at="2026-01-01"), event(7, at=7), event(8, at="1e9")]
    book = make_book(line_bytes_max=1000)
    began_at = time.time() - 0.001  # files have milliseconds
    lines = await taken_from(nursery, book, *events, *at_odds)
    assert lines[0] == "x 2026-01-01T00:00:00.000Z forged "
    assert lines[1] == "y" * 1000 + " … [4000 bytes more]"
    assert lines[2:4] == ["?", "\x1b[2J\0"]
    kept = []

    def are_kept():  # a worker that begins anew begins its file anew, so the file is read once
        kept[:] = load(book.path_of("w")).tail(10**6)[:8]
        return [line.text for line in kept] == lines[:8]

    await until(are_kept)
    assert [line.time >= began_at for line in kept[4:]] == [True] * 4


async def test_events_without_end(book, nursery):
    """An event that is too large takes no memory, and is one that is missing."""
    huge = [b"id: 2\ndata: ", *[b"x" * 60_000] * 20, b"\n\n"]
    lines = await taken_from(nursery, book, event(1, "a"), *huge, event(3, "b"))
    assert lines[:3] == ["a", "[ichat: 1 line is missing here]", "b"]


def test_however_an_event_is_split():
    """The same events, those that are too large as such, and never much of them in memory."""
    data = event(1) + b"y" * (EVENT_BYTES_MAX * 2) + b"\n\n" + b": \n\n" + event(2)
    for size in (1000, 65536, EVENT_BYTES_MAX - 1, len(data) - 1, len(data)):
        events = EventDecoder(EVENT_BYTES_MAX)
        found = []
        for at in range(0, len(data), size):
            found += events.feed(data[at : at + size])
            assert int(repr(events).split()[1]) <= EVENT_BYTES_MAX
        assert [found_ and found_.id for found_ in found] == ["1", None, "2"]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x00\xff\xfe",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        HEAD + b"zzz\r\n",
        HEAD + chunk(b"id: 1\n")[:-3],
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_answers_that_are_none(book, remote, nursery, head):
    """They cost nothing but the worker's own lines; others are followed meanwhile."""

    async def reply(stream_, *_):
        with contextlib.suppress(trio.BrokenResourceError):
            await stream_.send_all(head)
        return "close"

    upstream = Upstream(reply)
    await follow(nursery, book, {"w": await listen(nursery, upstream), "good": remote.source})
    await wait_refused(book, lambda: upstream.closed >= 3)
    remote.say("line")
    await until(lambda: texts(book, "good") == ["line"])
    assert texts(book) == []


async def test_a_worker_that_says_nothing(make_book, nursery, remote):
    """A connection that is silent, before the head or after, is given up, and tried again."""
    book = make_book(attrs.evolve(TIMES, silence_s=0.1))

    async def reply(stream_, *_):
        if len(silent.requests) > 2:
            await stream_.send_all(HEAD)
        await trio.sleep(LIMIT_S)

    silent = Upstream(reply)
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as inner:
            await follow(inner, book, {"w": await listen(inner, silent)})
            await until(lambda: len(silent.requests) > 4)
            inner.cancel_scope.cancel()


async def test_a_flood_leaves_room_for_others(autojump_clock, monkeypatch):
    """However much a worker sends, it has a fifth of the thread's time; and no more is read than is worked on."""
    busy_s = [0.0]

    class Flood(trio.abc.Stream):
        reads = 0

        async def send_all(self, data):
            await trio.lowlevel.checkpoint()

        async def wait_send_all_might_not_block(self):
            await trio.lowlevel.checkpoint()

        async def receive_some(self, max_bytes=None):
            await trio.lowlevel.checkpoint()
            self.reads += 1
            busy_s[0] += 0.005
            return HEAD if self.reads == 1 else chunk(event(self.reads, "x" * max_bytes))[:max_bytes]

        async def aclose(self):
            await trio.lowlevel.checkpoint()

    async def connect(upstream):
        return flood

    def work():
        busy_s[0] += 0.005
        return busy_s[0]

    async def take(lines):
        await trio.lowlevel.checkpoint()

    flood = Flood()
    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(collector.time, "thread_time", work)
    with trio.move_on_after(10):
        await collector.LogFollower(LogSource("one"), 1000, take, None, TIMES).follow()
    assert 100 < flood.reads < 10 / (0.005 * collector.NAP_RATIO) + 5


async def test_the_same_sources_are_looked_through_once(make_book, autojump_clock):
    """While nothing has changed, thousands of workers cost nothing; a change has them looked through again."""

    class Sources(dict):
        looks = 0

        def items(self):
            type(self).looks += 1
            return super().items()

    book, sources = make_book(), Sources()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.follow_forever, lambda: sources)
        await trio.sleep(60)
        assert Sources.looks == 1
        book.changed()
        await trio.sleep(60)
        assert Sources.looks == 2
        sources = Sources()
        await trio.sleep(60)
        assert Sources.looks == 3
        nursery.cancel_scope.cancel()
