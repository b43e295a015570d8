"""How a gateway has begun: what each start reads of the starts before, and which process writes."""

import contextlib
import os
import time

import pytest

from ichat.errors import Exit
from ichat.supervisor.starts import STARTS_FILE, GatewayCrash, SavedStarts, Starts
from ichat.supervisor.state import handed_state

S = 1_000_000_000


@pytest.fixture
def begin(tmp_path):
    """Begin with the directory, and answer requests: `starts = begin(lost_ns)`."""

    def begun(lost_ns=None):
        starts = Starts(str(tmp_path))
        starts.begin()
        starts.note_open(lost_ns)
        return starts

    return begun


def test_a_stop_is_no_crash(begin):
    """The next start knows nothing of a crash, and only counts."""
    for number in (1, 2):
        starts = begin()
        assert starts.saved.counts == {"start": number}
        starts.end()
    assert (starts.saved.last_crash, starts.saved.waited_s) == (None, 0.0)


def test_a_process_that_has_not_written_its_end_has_crashed(begin):
    """It is known by its process and version; relays say when that was, and so how long requests have waited."""
    begin()
    crash = begin().saved.last_crash
    assert (crash.pid, crash.at, crash.waited_s) == (os.getpid(), None, None)
    saved = begin(time.monotonic_ns() - 3 * S).saved
    assert (saved.last_crash.waited_s, saved.counts) == (pytest.approx(3, abs=1), {"start": 1, "crash": 2})
    assert time.time() - saved.last_crash.at == pytest.approx(3, abs=1)
    assert saved.waited_s == saved.last_crash.waited_s


def test_a_start_that_fails_does_not_hide_a_crash(begin, tmp_path):
    """The start after it still says of the relays how long requests have waited."""
    begin()
    failed = Starts(str(tmp_path))
    failed.begin()
    failed.end()
    crash = begin(time.monotonic_ns() - S).saved.last_crash
    assert (crash.pid, crash.waited_s) == (os.getpid(), pytest.approx(1, abs=1))


def test_a_takeover_is_written_by_the_new_process_alone(begin, tmp_path):
    """The old process writes no end: the next crash is that of the new process."""
    old = begin()
    new = Starts(str(tmp_path), term=2)
    old.hand_over()
    new.begin_by_takeover(7, "0.0.9", time.monotonic_ns() - S)
    new.note_open(time.monotonic_ns())
    last = new.saved.last_takeover
    assert (last.pid, last.version, last.waited_s) == (7, "0.0.9", pytest.approx(1, abs=0.9))
    assert new.retiring_pid == 7
    new.note_old_end()
    assert new.retiring_pid is None
    old.end()
    assert Starts(str(tmp_path)).saved == new.saved
    assert new.saved.is_running
    found = {one.name: [sample.value for sample in one.samples] for one in new.families()}
    assert found["ichat_gateway_starts"] == [1.0, 0.0, 1.0]
    assert found["ichat_ownerless_seconds"] == [last.waited_s]


@pytest.mark.parametrize(("error", "is_crash"), [(None, False), (Exit(1, "why"), False), (OSError(), True)])
def test_a_new_process_that_ends_with_a_sentence_has_not_crashed(tmp_path, error, is_crash):
    """So it is after a takeover, too: only a process without an ordered end has."""
    lock = os.open(tmp_path, os.O_RDONLY)
    with contextlib.suppress(Exit, OSError), handed_state(str(tmp_path), None, lock) as state:
        state.starts.begin_by_takeover(7, "0.0.9", time.monotonic_ns())
        if error is not None:
            raise error
    assert Starts(str(tmp_path)).saved.is_running == is_crash


def test_an_old_process_that_ends_during_its_takeover_is_named(tmp_path):
    """The new process answers requests once its relays have reported, which may be later."""
    new = Starts(str(tmp_path), term=2)
    new.begin_by_takeover(7, "0.0.9", time.monotonic_ns())
    new.note_old_end()
    new.note_open(None)
    assert (new.saved.last_takeover.pid, new.retiring_pid) == (7, None)


@pytest.mark.parametrize("text", ["", "[]", '{"counts": 1}', '{"last_crash": {"at": "x"}}', "[" * 100_000])
def test_a_damaged_file_is_nothing_known(tmp_path, text):
    (tmp_path / STARTS_FILE).write_text(text)
    assert Starts(str(tmp_path)).saved == SavedStarts()


def test_unknown_fields_of_a_later_version_are_ignored(tmp_path):
    (tmp_path / STARTS_FILE).write_text('{"pid": 5, "later": 1, "last_crash": {"pid": 4, "later": 2}}')
    assert Starts(str(tmp_path)).saved == SavedStarts(pid=5, last_crash=GatewayCrash(4))


def test_a_directory_that_cannot_be_written_ends_no_start(tmp_path):
    starts = Starts(str(tmp_path / "gone"))
    starts.begin()
    starts.note_open(None)
    assert starts.saved.counts == {"start": 1}
