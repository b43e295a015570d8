"""Answers that are not read: how many wait for a party and in all, and how long."""

import pytest
import trio
import trio.testing

from ichat.http.unread import TAKEN_BYTES_MIN, UnreadAnswers


class Reader:
    """A client that reads this many bytes, and then nothing more."""

    def __init__(self, bytes_read=0):
        self.bytes_read = bytes_read
        self.is_cut = False
        self.scope = trio.CancelScope()

    def send_some(self, data):
        return 0

    async def send_all(self, data):
        self.bytes_read -= len(data)
        if self.bytes_read < 0:
            await trio.sleep_forever()

    def cut(self):
        self.is_cut = True
        self.scope.cancel()


@pytest.fixture
def answer(nursery):
    """Send an answer to each of these readers, one after the other, by their parties."""

    async def start(answers, readers, parties, size=TAKEN_BYTES_MIN):
        async def send(reader, party):
            with reader.scope:
                await answers.send(reader, party, bytes(size), 10)

        for reader, party in zip(readers, parties, strict=True):
            nursery.start_soon(send, reader, party)
            await trio.testing.wait_all_tasks_blocked()

    return start


@pytest.mark.parametrize(
    ("parties", "cut"),
    [
        ("aaa", []),
        ("aaaa", [0]),
        ("aaaaa", [0, 1]),
        ("aabbaabb", [0, 1, 2]),
        ("abcdef", [0]),
        ("abcdefa", [0, 1]),
        ("aaabbaa", [0, 1]),
    ],
)
async def test_the_oldest_unread_answer_is_cut_beyond_the_bounds(answer, parties, cut):
    """Three wait for a party and five in all; a party that has its three loses its own oldest."""
    answers, readers = UnreadAnswers(of_one_max=3, all_max=5), [Reader() for _ in parties]
    await answer(answers, readers, parties)
    assert [number for number, reader in enumerate(readers) if reader.is_cut] == cut
    waiting = {party for number, party in enumerate(parties) if number not in cut}
    assert repr(answers) == f"<UnreadAnswers {len(parties) - len(cut)} of {len(waiting)} parties>"


async def test_a_client_is_cut_that_reads_too_little_in_time(answer, autojump_clock):
    """Each part of the answer has a time of its own; a client that reads all is not counted any more."""
    answers, readers = UnreadAnswers(), [Reader(3 * TAKEN_BYTES_MIN), Reader(TAKEN_BYTES_MIN)]
    await answer(answers, readers, "ab", size=3 * TAKEN_BYTES_MIN)
    assert repr(answers) == "<UnreadAnswers 1 of 1 parties>"
    await trio.sleep(11)
    assert [reader.is_cut for reader in readers] == [False, True]
    assert repr(answers) == "<UnreadAnswers 0 of 0 parties>"
