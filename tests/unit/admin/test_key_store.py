"""Keys that expire, in virtual time and with a clock of the test's."""

import pytest
import trio

from ichat.admin.config_state import ConfigInForce
from ichat.admin.key_store import LOOK_S, KeyStore
from ichat.config.schema import Config
from ichat.errors import ApiError
from ichat.security import made_keys
from ichat.security.key_file import load_keys, save_keys
from ichat.security.made_keys import EXPIRED_KEPT_S, NO_KEYS, SHORT_EXPIRED_KEPT_S

DAY_S = 24 * 3600.0


BEGAN_AT = 1_700_000_000.0


class Site:
    """A key store whose wall clock goes with virtual time, and can be set."""

    def __init__(self, path, nursery):
        self.path, self.offset_s, self.in_force = path, BEGAN_AT - trio.current_time(), []
        in_force = ConfigInForce(Config())
        self.store = KeyStore(NO_KEYS, str(path), in_force, self._put_in_force, self.time)
        nursery.start_soon(self.store.expire_forever)

    def time(self):
        return trio.current_time() + self.offset_s

    def _put_in_force(self, made, now):
        names = sorted(one.name for one in made.active(now).values())
        self.in_force.append((round(now - BEGAN_AT), names))

    async def make(self, name, **more):
        return await self.store.make({"name": name, **more})


@pytest.fixture
def site_in(tmp_path, monkeypatch):
    """Return what makes the site within the test; files are written at once, as virtual time waits for no thread."""

    async def run_sync(call, *args):
        await trio.lowlevel.checkpoint()
        return call(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    return lambda nursery: Site(tmp_path / "keys.json", nursery)


async def test_no_key_is_made_that_the_next_gateway_would_not_know(tmp_path):
    """It would let everybody in: clients need keys only because there are some."""
    store = KeyStore(NO_KEYS, str(tmp_path / "keys.json"), ConfigInForce(Config()), print, is_kept=False)
    with pytest.raises(ApiError, match="state_directory") as refusal:
        await store.make({"name": "a"})
    assert (refusal.value.status, refusal.value.code) == (409, "not_kept")


async def test_each_key_is_refused_when_its_time_is_over(site_in, nursery, autojump_clock):
    """At its second, and not before; a change of another key in between does not hold that up."""
    site = site_in(nursery)
    heard = []
    await site.make("a", expires_in_s=100)
    await site.make("b", expires_in_s=1000)
    await site.make("c")
    site.in_force.clear()
    site.store.listeners.add(lambda: heard.append(round(site.time() - BEGAN_AT)))
    await trio.sleep(99)
    assert site.in_force == []
    await trio.sleep(10_000)
    assert site.in_force == [(100, ["b", "c"]), (1000, ["c"])]
    assert heard == [100, 1000]


async def test_a_clock_that_is_set_is_noticed(site_in, nursery, autojump_clock):
    """A key whose time is over by a clock that was set forward is refused within `LOOK_S`."""
    site = site_in(nursery)
    await site.make("a", expires_in_s=DAY_S)
    site.in_force.clear()
    await trio.sleep(1)
    site.offset_s += DAY_S
    await trio.sleep(LOOK_S + 1)
    assert [names for _, names in site.in_force] == [[]]


async def test_a_key_with_more_time_lives_on(site_in, nursery, autojump_clock):
    """Its old end is forgotten."""
    site = site_in(nursery)
    await site.make("a", expires_in_s=100)
    await site.store.alter("a", {"expires_in_s": 500})
    site.in_force.clear()
    await trio.sleep(400)
    assert site.in_force == []
    await trio.sleep(200)
    assert site.in_force == [(500, [])]


async def test_long_expired_keys_are_forgotten_with_the_next_change(site_in, nursery, autojump_clock):
    """So keys for an hour do not fill the table; until then the name is taken, and the list has it."""
    site = site_in(nursery)
    await site.make("a", expires_in_s=DAY_S)
    await trio.sleep(EXPIRED_KEPT_S)
    await site.make("b")
    assert list(site.store.made.by_name) == ["a", "b"]
    await trio.sleep(DAY_S + 1)
    await site.make("c")
    assert list(site.store.made.by_name) == ["b", "c"]
    assert load_keys(str(site.path)) == site.store.made


async def test_a_key_for_an_hour_is_forgotten_after_a_day(site_in, nursery, autojump_clock):
    """A console makes many of them; one that was given a day in the meantime is kept as others are."""
    site = site_in(nursery)
    await site.make("hour", expires_in_s=3600)
    await site.make("more", expires_in_s=3600)
    await site.store.alter("more", {"expires_in_s": DAY_S})
    await trio.sleep(3600 + SHORT_EXPIRED_KEPT_S - 1)
    await site.make("b")
    assert list(site.store.made.by_name) == ["hour", "more", "b"]
    await trio.sleep(2)
    await site.make("c")
    assert list(site.store.made.by_name) == ["more", "b", "c"]


async def test_a_change_makes_only_its_own_line_anew(site_in, nursery, autojump_clock, monkeypatch):
    """The file is written as a whole, but what it says of the other keys is known."""
    site, described = site_in(nursery), []
    dumps = made_keys.json.dumps
    monkeypatch.setattr(made_keys.json, "dumps", lambda table: described.append(table["name"]) or dumps(table))
    for name in ("a", "b", "c"):
        await site.make(name)
    await site.store.alter("b", {"models": ["m"]})
    assert described == ["a", "b", "c", "b"]
    assert load_keys(str(site.path)) == site.store.made


def test_a_written_key_store_is_read_back(tmp_path):
    """Also where no key is left: that there was one is remembered."""
    path = str(tmp_path / "keys.json")
    assert load_keys(path) == NO_KEYS
    save_keys(path, NO_KEYS)
    assert load_keys(path).is_used
