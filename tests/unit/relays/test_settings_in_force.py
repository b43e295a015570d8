"""The settings of all relays: what each is told, and what the answer of one means for the others."""

import socket

import pytest
import trio
import trio.testing

from ichat.config.schema import Config, ServerSettings
from ichat.errors import Exit
from ichat.relays.link import hello
from ichat.relays.relay_at_owner import RelayAtOwner
from ichat.relays.settings_in_force import SettingsInForce
from ichat.relays.values import Note


class Process:
    """A process that can be killed."""

    pid = 9
    returncode = None

    def kill(self):
        self.returncode = -9


class Wire:
    """A connection that keeps what is sent."""

    is_open = True

    def __init__(self):
        self.sent = []

    def send(self, frame):
        self.sent.append((frame.kind, frame.content.get("version")))


def with_relays(number):
    return Config(server_settings=ServerSettings(relays=number))


@pytest.fixture
def adopted():
    """Return the settings of a new owner, and two relays that an earlier owner has left with version 3."""
    relays = {}
    for number in (1, 2):
        relay = relays[number] = RelayAtOwner(number, Process(), socket.socket(), 0.0)
        relay.wire, relay.state, relay.prepared = Wire(), "accepting", 3
        relay.talk.sends(hello(2))
        for frame in (hello(1, settings=3), Note("report"), Note("ready")):
            relay.talk.receives(frame)
        relay.talk.open()
    settings = SettingsInForce(with_relays(2), relays)
    settings.follow(3)
    for relay in relays.values():
        settings.offer(relay)
        assert relay.wire.sent == [("settings", 4)]
    yield settings, relays
    for relay in relays.values():
        relay._descriptors.close()


def answer(settings, relay, kind, version):
    frame = Note(kind, 0, {"version": version, "why": "no file"})
    relay.talk.receives(frame)
    settings.receive(relay, frame)


async def reload(settings, relays, nursery):
    """Have other settings prepared, and return when they are offered."""
    nursery.start_soon(settings.prepare, Config())
    await trio.testing.wait_all_tasks_blocked()
    assert {relay.wire.sent[-1] for relay in relays} == {("settings", 5)}


async def test_an_adopted_relay_that_cannot_use_the_settings_is_offered_the_next(adopted):
    """It goes on with its own, and a reload reaches it."""
    settings, relays = adopted
    answer(settings, relays[1], "cannot", 4)
    answer(settings, relays[2], "prepared", 4)
    assert relays[1].wire.sent[-1] == ("forget", 4)
    async with trio.open_nursery() as nursery:
        await reload(settings, relays.values(), nursery)
        for relay in relays.values():
            answer(settings, relay, "prepared", 5)
    settings.put_in_force(Config())
    assert {relay.wire.sent[-1] for relay in relays.values()} == {("commit", 5)}
    assert {relay.process.returncode for relay in relays.values()} == {None}


async def test_a_relay_that_has_not_answered_the_last_settings_does_not_fail_a_reload(adopted, autojump_clock):
    """It is killed, and the others get the settings."""
    settings, relays = adopted
    answer(settings, relays[2], "prepared", 4)
    async with trio.open_nursery() as nursery:
        await reload(settings, [relays[2]], nursery)
        answer(settings, relays[2], "prepared", 5)
    assert [relay.process.returncode for relay in relays.values()] == [-9, None]
    settings.put_in_force(Config())
    assert relays[2].wire.sent[-1] == ("commit", 5)


async def test_a_refusal_during_a_reload_is_forgotten_once(adopted):
    """All relays go on with the settings in force."""
    settings, relays = adopted
    for relay in relays.values():
        answer(settings, relay, "prepared", 4)
    with pytest.RaisesGroup(Exit):
        async with trio.open_nursery() as nursery:
            await reload(settings, relays.values(), nursery)
            answer(settings, relays[1], "cannot", 5)
            answer(settings, relays[2], "prepared", 5)
    assert {tuple(relay.wire.sent[-2:]) for relay in relays.values()} == {(("settings", 5), ("forget", 5))}


async def test_the_number_of_relays_changes_with_the_settings(adopted, autojump_clock):
    """Each gets its share of the bounds that all have in common; a change to 0 is for the next start."""
    settings, _ = adopted
    share = settings.now.limits.connections_max
    for number, count in ((1, 1), (0, 1)):
        await settings.prepare(with_relays(number))
        assert settings.count == (2 if number else 1)
        settings.put_in_force(with_relays(number))
        assert (settings.count, settings.now.limits.connections_max) == (count, 2 * share)
