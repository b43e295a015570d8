"""Descriptors that several processes hold open for workers: who has them, and for how long."""

import os

import pytest

from ichat.supervisor import kept as kept_module
from ichat.supervisor.kept import KeptDescriptors

START = ("m-0", "boot:7")


class Pipes:
    """Makes pipes, and knows whether anybody still has their ends."""

    def __init__(self):
        self.pairs = []

    def make(self):
        self.pairs.append(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        return self.pairs[-1]


@pytest.fixture
def pipes():
    return Pipes()


def has_writer(reading):
    """Whether somebody has the writing end of a pipe without data."""
    try:
        return os.read(reading, 1) != b""
    except BlockingIOError:
        return True


def passed(message, descriptors):
    """Return a message as another process receives it: with descriptors of its own."""
    return message, [os.dup(one) for one in descriptors]


def descriptors_open():
    return len(os.listdir("/proc/self/fd"))


def test_a_pipe_stays_open_until_its_start_has_ended_everywhere(pipes):
    """The gateway's own end and that of the owner may close: the last process that drops it closes the pipe."""
    owner, relay = KeptDescriptors(), KeptDescriptors()
    owner.changed.add(lambda message, descriptors: relay.receive(*passed(message, descriptors)))
    reading, writing = pipes.make()
    owner.keep(START, {"launcher": writing})
    os.close(writing)
    assert [*relay.of(START)] == ["launcher"]
    owner.close()
    assert has_writer(reading)
    owner.keep(START, {})
    owner.drop(START)
    assert not has_writer(reading)
    assert relay.starts == owner.starts == []


def test_a_new_process_gets_everything_that_is_kept(pipes):
    """And it answers with the same messages when it hands them over to the next owner."""
    owner, relay, heir = KeptDescriptors(), KeptDescriptors(), KeptDescriptors()
    reading, writing = pipes.make()
    owner.keep(START, {"output": reading, "launcher": writing})
    owner.keep(("n-0", "boot:8"), {"output": reading})
    for message, descriptors in owner.messages():
        relay.receive(*passed(message, descriptors))
    for message, descriptors in relay.messages():
        heir.receive(*passed(message, descriptors))
    assert heir.starts == [START, ("n-0", "boot:8")]
    assert [*heir.of(START)] == ["launcher", "output"]
    assert os.path.sameopenfile(heir.of(START)["output"], reading)
    assert os.path.sameopenfile(heir.of(START)["launcher"], writing)


def test_the_same_start_of_several_relays_is_kept_once(pipes):
    """The descriptors of the later messages are closed."""
    heir = KeptDescriptors()
    message = {"kind": "keep", "worker": "m-0", "start": "boot:7", "which": ["output"]}
    reading, _ = pipes.make()
    heir.receive(message, [os.dup(reading)])
    before = descriptors_open()
    heir.receive(message, [os.dup(reading)])
    assert descriptors_open() == before
    heir.receive({**message, "kind": "drop"}, [])
    heir.receive({**message, "kind": "drop", "which": []}, [])
    assert descriptors_open() == before - 1


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "open"},
        {"kind": "drop"},
        {"which": ["output", "launcher"]},
        {"which": ["output", "output"]},
        {"which": "output"},
        {"which": ["socket"]},
        {"which": None},
        {"worker": 7},
        {"start": "x" * 600},
    ],
)
def test_a_damaged_message_is_refused_and_its_descriptors_are_closed(pipes, changed):
    """Nothing of it is kept."""
    relay = KeptDescriptors()
    message = {"kind": "keep", "worker": "m-0", "start": "boot:7", "which": ["output"], **changed}
    reading, _ = pipes.make()
    before = descriptors_open()
    with pytest.raises(ValueError, match="descriptors"):
        relay.receive(message, [os.dup(reading)])
    assert (relay.starts, descriptors_open()) == ([], before)


def test_the_number_of_starts_is_bounded(pipes, caplog):
    """Beyond it nothing is kept, which is logged once; a start that ends makes room."""
    owner = KeptDescriptors()
    reading, _ = pipes.make()
    for number in range(kept_module.STARTS_MAX + 2):
        owner.keep((f"w-{number}", "boot:1"), {"output": reading})
    assert len(owner.starts) == kept_module.STARTS_MAX
    assert len(caplog.records) == 1
    assert f"w-{kept_module.STARTS_MAX}" in caplog.text
    owner.drop(("w-0", "boot:1"))
    owner.keep(START, {"output": reading})
    assert START in owner.starts
    owner.close()


def test_without_relays_nothing_is_kept(pipes):
    """A gateway of a single process needs no further descriptor."""
    owner = KeptDescriptors(is_shared=False)
    before = descriptors_open() + 2
    owner.keep(START, {"output": pipes.make()[0]})
    assert (owner.starts, descriptors_open()) == ([], before)
