"""A worker's output over the death of its reader: each line is in the file once, with the same number."""

import itertools
import os
import random

import pytest

from ichat.config.schema import Logs
from ichat.observability.logs.files import LogFiles, load
from ichat.observability.logs.journal import KEPT_BYTES, Journal, recover, source_of
from ichat.observability.logs.lines import LineSplitter
from ichat.observability.logs.pipes import make_pipe

STEPS = ("before", "read", "written", "noted")


class Died(Exception):
    """The reader was killed."""


class Reader:
    """Does with a pipe and its journal what a gateway's reader does, up to the step where it is killed."""

    def __init__(self, files, pipe, journal, *, is_first, kept_bytes=KEPT_BYTES):
        self.journal = Journal(os.dup(journal), kept_bytes)
        if is_first:
            self.number, missing, lines = 0, [], LineSplitter(files.settings.line_bytes_max)
        else:
            found = recover(files, "w", self.journal)
            self.number, missing, lines = found.last, found.missing, found.splitter
        self.file = files.open("w", goes_on=not is_first)
        self.source = source_of(os.dup(pipe), lines, self.journal, self.file)
        self.put(missing)
        self.file.flush()
        self.source.note(self.number)

    def put(self, lines):
        self.file.append(lines, 1.0)
        self.number += len(lines)

    def turn(self, dies_after=""):
        """Read once, and return the data. Raises Died."""
        self.die_if("before", dies_after)
        data = self.source.read()
        self.die_if("read", dies_after)
        self.put(self.source.lines.feed(data))
        self.file.flush()
        self.die_if("written", dies_after)
        self.source.note(self.number)
        self.die_if("noted", dies_after)
        return data

    def show_partial(self):
        self.put(self.source.lines.flush())
        self.file.flush()

    def die_if(self, step, dies_after):
        if step == dies_after:
            raise Died


@pytest.fixture
def files(tmp_path):
    return LogFiles(str(tmp_path), Logs(echo=False))


@pytest.fixture
def journal():
    return os.memfd_create("test", os.MFD_CLOEXEC)


def written(files):
    return [line.text for line in load(files.path_of("w"), lines_max=10**9, bytes_max=10**9, files_max=50).tail(10**9)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pieces", [(b"a\nb\n", b"c\n"), (b"a\nb", b"\nc\n"), (b"a", b"\nb\nc\n"), (b"a\r", b"b\nc\n")])
def test_a_reader_may_be_killed_after_each_step(files, journal, step, pieces):
    """The next reader has each line once, the halves of a line included, and the number of the last line."""
    pipe, writing = make_pipe()
    reader = Reader(files, pipe, journal, is_first=True)
    os.write(writing, pieces[0])
    with pytest.raises(Died):
        reader.turn(step)
    os.write(writing, pieces[1])
    reader = Reader(files, pipe, journal, is_first=False)
    reader.turn()
    wanted = ["b", "c"] if b"\r" in pieces[0] else ["a", "b", "c"]
    assert (written(files), reader.number) == (wanted, len(wanted))


def test_a_line_that_was_shown_before_its_end_is_not_shown_again(files, journal):
    """A reader that was killed before it noted that leaves the rest of the line to the next reader."""
    pipe, writing = make_pipe()
    reader = Reader(files, pipe, journal, is_first=True)
    os.write(writing, b"a\nprogress")
    reader.turn()
    reader.show_partial()
    os.write(writing, b" done\n")
    reader = Reader(files, pipe, journal, is_first=False)
    reader.turn()
    assert (written(files), reader.number) == (["a", "progress", " done"], 3)


@pytest.mark.parametrize("seed", range(8))
def test_many_deaths_lose_and_repeat_no_line(tmp_path, journal, seed):
    """Also while files are rotated and the journal gives bytes up, with the same lines again and again."""
    files = LogFiles(str(tmp_path), Logs(echo=False, file_bytes_max=2**16, files_max=50))
    chance = random.Random(seed)
    pipe, writing = make_pipe()
    lines = [chance.choice((b"same", b"", b"x" * chance.randrange(400), b"%d" % number)) for number in range(3000)]
    data = b"".join(line + b"\n" for line in lines)
    reader = Reader(files, pipe, journal, is_first=True, kept_bytes=300)
    for step in itertools.chain.from_iterable((*STEPS, "", "") for _ in range(len(data))):
        size = chance.randrange(1, 9000)
        piece, data = data[:size], data[size:]
        if not piece:
            break
        os.write(writing, piece)
        try:
            reader.turn(step)
        except Died:
            reader = Reader(files, pipe, journal, is_first=False, kept_bytes=300)
    os.close(writing)
    while reader.turn():
        pass
    assert written(files) == [line.decode() for line in lines]
    assert reader.number == len(lines)


def test_a_reader_may_be_killed_while_it_gives_bytes_up(files, journal):
    """The next reader begins with the next byte of the pipe, and is not misled by the end of the memory before."""
    pipe, writing = make_pipe()
    reader = Reader(files, pipe, journal, is_first=True)
    os.write(writing, b"a\nb")
    reader.turn()
    os.ftruncate(journal, os.fstat(journal).st_size - len(b"a\nb"))
    for end in (b"", b"\nc"):
        reader = Reader(files, pipe, journal, is_first=False)
        os.write(writing, end + b"!")
        with pytest.raises(Died):
            reader.turn("written")
    Reader(files, pipe, journal, is_first=False).show_partial()
    assert written(files) == ["a", "b!", "c!"]


def test_memory_that_is_no_journal_says_nothing(files, journal):
    """Then the file goes on without numbers from before."""
    os.write(journal, b"something else, longer than a head of the journal is, by far")
    found = recover(files, "w", Journal(journal))
    assert (found.last, found.missing, found.lines) == (None, [], [])


def test_the_memory_of_a_journal_is_bounded(files, journal):
    """It holds no more than the bytes of a read beyond its bound, however much is written."""
    pipe, writing = make_pipe()
    reader = Reader(files, pipe, journal, is_first=True)
    for _ in range(40):
        os.write(writing, b"x" * 32767 + b"\n" + b"y" * 32767 + b"\n")
        reader.turn()
    assert os.fstat(journal).st_blocks * 512 <= KEPT_BYTES + 4 * 65536
