"""Reloading without processes and in virtual time: when the file is read, and that a refusal changes nothing."""

import time

import pytest
import trio

from ichat.admin.config_state import ERRORS_MAX, ConfigInForce, ConfigState, mistakes_in
from ichat.admin.reload import ConfigFile, Reloader, fingerprint
from ichat.config import load as configuration
from ichat.errors import ApiError, Exit

TEXT = "[server_settings]\nport = 0\n[timeouts]\nqueue_s = {}\n"


class Site:
    """A gateway without workers: what is put in force, and how often the file was refused before."""

    def __init__(self, path, settings=""):
        self.path = path
        self.write(1, settings)
        self.in_force, self.attempts, self.refusals, self.is_stopping = [], 0, 0, False
        self.applied = trio.Event()
        file = ConfigFile(path, fingerprint(path))
        self.reloader = Reloader(
            ConfigInForce(configuration.load(path)), file, self, self.check, watch_s=1.0, retry_s=5.0
        )

    def write(self, queue_s, settings=""):
        self.path.write_text(TEXT.replace("[timeouts]", f"{settings}[timeouts]").format(queue_s))

    def changes(self, _config, *, restart_failed):
        return []

    def apply(self, _config, _changes):
        if self.is_stopping:
            raise ApiError(503, "draining", "The gateway is about to end.")

    def check(self, config):
        self.attempts += 1
        if self.attempts <= self.refusals:
            raise Exit(64, "There is no certificate.")
        return lambda _old: self._put_in_force(config)

    def _put_in_force(self, config):
        self.in_force.append(config.timeouts.queue_s)
        self.applied.set()


@pytest.fixture
def site(tmp_path, autojump_clock):
    autojump_clock.autojump_threshold = 0.01  # the file is read in threads, which virtual time does not wait for
    return Site(tmp_path / "ichat.toml")


async def test_a_changed_file_is_read_once_it_is_whole(site, nursery, autojump_clock):
    """The file is read when it has not changed for a round, and only once."""
    nursery.start_soon(site.reloader.watch_forever)
    began = trio.current_time()
    site.write(22)
    await site.applied.wait()
    assert 2 <= trio.current_time() - began < 3
    await trio.sleep(20)
    assert (site.in_force, site.attempts) == ([22], 1)
    assert site.reloader.config.timeouts.queue_s == 22


async def test_an_emptied_file_is_no_configuration(site, nursery, caplog, autojump_clock):
    """What an editor or a full disk leaves of a file for a moment is not even read."""
    nursery.start_soon(site.reloader.watch_forever)
    site.path.write_text("")
    await trio.sleep(20)
    assert (site.in_force, site.attempts, caplog.text) == ([], 0, "")
    site.write(33)
    await site.applied.wait()
    assert site.in_force == [33]


async def test_a_refused_file_is_retried_when_it_changes(site, nursery, caplog, autojump_clock):
    """What it names may come later than the file itself; the reason is logged once."""
    site.refusals = 3
    nursery.start_soon(site.reloader.watch_forever)
    began = trio.current_time()
    site.write(44)
    await site.applied.wait()
    assert (site.attempts, site.in_force) == (4, [44])
    assert 20 <= trio.current_time() - began < 21  # two rounds, and three times a wait and a round
    assert caplog.text.count("the configuration stays as it is: There is no certificate.") == 1


async def test_a_file_that_is_not_watched(tmp_path, autojump_clock, nursery):
    """With `watch_config = false` the file is read when asked for, and not before."""
    autojump_clock.autojump_threshold = 0.01
    site = Site(tmp_path / "ichat.toml", "watch_config = false\n")
    nursery.start_soon(site.reloader.watch_forever)
    site.write(55, "watch_config = false\n")
    await trio.sleep(20)
    assert site.attempts == 0
    await site.reloader.reload(dry_run=False, why="test")
    assert site.in_force == [55]


async def test_a_dry_run_changes_nothing(site, autojump_clock):
    """It says what would be done, after the same checks."""
    site.write(66)
    plan = await site.reloader.reload(dry_run=True, why="test")
    assert (plan.applied, [step.what for step in plan.plan]) == (False, ["timeouts.queue_s"])
    assert (site.attempts, site.in_force, site.reloader.config.timeouts.queue_s) == (1, [], 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[timeouts]\nqueue_z = 1\n", "timeouts.queue_z"),
        ('[[managed_workers]]\nmodel_name = "a"\nmodel_path = "/m"\noverrides = { since = 2024-01-01 }\n',
         "must hold no dates or times"),
    ],
)  # fmt: skip
async def test_a_wrong_file_changes_nothing(site, text, words, autojump_clock):
    """It is a 400 that names the mistake, and nothing was even checked."""
    site.path.write_text(text)
    with pytest.raises(ApiError, match=r"Nothing was changed\.") as refusal:
        await site.reloader.reload(dry_run=False, why="test")
    assert (refusal.value.status, refusal.value.code) == (400, "bad_configuration")
    assert words in refusal.value.message
    assert (site.attempts, site.in_force) == (0, [])


async def test_a_gateway_that_ends_takes_no_configuration(site, autojump_clock):
    """Where the workers cannot be changed any more, nothing else is."""
    site.is_stopping = True
    site.write(77)
    with pytest.raises(ApiError, match="about to end"):
        await site.reloader.reload(dry_run=False, why="test")
    assert (site.in_force, site.reloader.config.timeouts.queue_s) == ([], 1)


async def test_no_file_no_reload():
    """A gateway that was started without a file has nothing to read."""
    config = configuration.parse(TEXT.format(1), "test.toml")
    with pytest.raises(ApiError) as refusal:
        await Reloader(ConfigInForce(config), None, None, None).reload(dry_run=False, why="test")
    assert (refusal.value.status, refusal.value.code) == (409, "no_file")


async def test_the_state_of_the_file(site, nursery, autojump_clock):
    """It is `changed` until it was judged, then `refused` with all of its mistakes, and `ok` once it was taken."""
    told = []
    site.reloader.state_changed.add(told.append)
    began, before = site.reloader.state, time.time()
    assert (began.state, began.path, began.errors) == ("ok", str(site.path), ())
    nursery.start_soon(site.reloader.watch_forever)
    site.path.write_text("[server_settings]\nportt = 3\nwotch = 1\n")
    await trio.sleep(10)
    assert [one.state for one in told] == ["changed", "refused"], "and not once more at each try"
    refused = told[-1]
    assert [error.partition(":")[0] for error in refused.errors] == ["server_settings.portt", "server_settings.wotch"]
    assert before <= refused.since <= time.time()
    assert (refused.in_force_since, await site.reloader.read_state()) == (began.since, refused)
    site.write(22)
    await site.applied.wait()
    await trio.sleep(3)
    assert [one.state for one in told] == ["changed", "refused", "changed", "ok"]
    assert told[-1].in_force_since >= refused.since
    assert told[-1].errors == ()


async def test_a_file_that_is_not_watched_stays_changed(site, nursery, autojump_clock):
    """Until somebody asks for a reload, or a dry run finds a mistake."""
    site.write(1, "watch_config = false\n")
    await site.reloader.reload(dry_run=False, why="test")
    nursery.start_soon(site.reloader.watch_forever)
    site.path.write_text("x = ")
    await trio.sleep(5)
    assert site.reloader.state.state == "changed"
    with pytest.raises(ApiError):
        await site.reloader.reload(dry_run=True, why="test")
    assert (await site.reloader.read_state()).state == "refused"
    assert "is not valid TOML" in site.reloader.state.errors[0]
    site.path.unlink()
    assert (await site.reloader.read_state()).state == "changed", "it is gone"
    site.write(1, "watch_config = false\n")
    await site.reloader.reload(dry_run=True, why="test")
    assert (await site.reloader.read_state()).state == "changed"
    await site.reloader.reload(dry_run=False, why="test")
    assert (await site.reloader.read_state()).state == "ok"


def test_the_mistakes_of_a_message():
    """Each line after the first is one; a message of one line is one itself, and of many a few are told."""
    assert mistakes_in("f.toml was not accepted:\n  a: wrong\n  b: wrong") == ["a: wrong", "b: wrong"]
    assert mistakes_in("There is no certificate.") == ["There is no certificate."]
    many = mistakes_in("\n".join(["f was not accepted:", *(f"  key{number}" for number in range(ERRORS_MAX + 2))]))
    assert (len(many), many[-1]) == (ERRORS_MAX + 1, "and 2 more")


def test_the_metrics_of_a_refused_file():
    """They say that it is refused and since when, and from when the configuration in force is."""
    for state, values in (("ok", [0, 0, 5]), ("changed", [0, 0, 5]), ("refused", [1, 7, 5])):
        found = ConfigState(state, since=7.0, in_force_since=5.0, path="f").families()
        assert [sample.value for family in found for sample in family.samples] == values
