"""A takeover from a release to another, and back."""

import shutil
from functools import partial

import pytest
import trio
from support.deployments import free_port, worker
from support.peers import until
from support.programs import ROOT
from support.relay_site import Load, Result, ask, site_of
from support.takeovers import begin, end_load, finish

from ichat.errors import EXIT_UNAVAILABLE
from ichat.takeover.handover import PROTOCOL

CONFIG = '[logs]\naccess_log = ""\n'
STREAMS, REQUESTS_S = 4, 30


@pytest.fixture
def release(tmp_path):
    """Make a release: `release(version, module, before, after)`; return the environment of its processes."""

    def make(version, module="__init__", before="", after=""):
        tree = tmp_path / f"release-{version}"
        shutil.copytree(ROOT / "ichat", tree / "ichat")
        for name, old, new in (("__init__", '"0.1.0"', f'"{version}"'), (module, before, after)):
            path = tree / "ichat" / f"{name}.py"
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new))
        return {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tree}:tests/support/fake_engine"}

    return make


@pytest.mark.parametrize("relays", [0, 2])
async def test_a_takeover_from_a_release_to_another_and_back(gateway, start, release, tmp_path, relays):
    """No request is refused, no stream breaks, and the worker stays; the relays of the other release retire."""
    old, new = release("0.1.1"), release("0.2.0")

    async with (
        site_of(partial(gateway, **old), free_port(), relays, CONFIG + worker("w")) as site,
        trio.open_nursery() as nursery,
    ):
        pid = await site.until_ready("w-0")
        load = Load(site)
        await nursery.start(load.run, STREAMS, REQUESTS_S)
        for version, env in (("0.2.0", new), ("0.1.1", old)):
            before = site.program
            await load.more(5)
            await finish(site, begin(start, tmp_path / "ichat.toml", **env))
            await site.until_started(relays)
            assert await site.until_ready("w-0") == pid
            assert (await site.get("/v1/admin/cluster/status"))["gateway"]["version"] == version
            assert "has this gateway now" in before.text()
        await load.more(5)
        await end_load(site, load)


async def test_a_release_with_another_protocol_is_refused_before_the_freeze(gateway, start, release, tmp_path):
    """It ends with a sentence that names both protocols, and the old process goes on undisturbed."""
    other = release("9.0.0", "takeover/handover", f"PROTOCOL = {PROTOCOL}", "PROTOCOL = 99")
    async with site_of(gateway, free_port(), 0, CONFIG) as site:
        new = begin(start, tmp_path / "ichat.toml", **other)
        await until(lambda: new.process.poll() is not None)
        sentence = f"hands over by protocol {PROTOCOL}, this program by 99: stop the gateway, and start this program"
        assert new.process.returncode == EXIT_UNAVAILABLE
        assert sentence in new.text()
        assert sentence in site.program.text()
        assert "asks for this gateway" not in site.program.text()
        async with await site.connect() as stream:
            await ask(stream, {"model": "m"}, result := Result())
        assert result.status == 200
