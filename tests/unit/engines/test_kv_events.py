"""Whether a worker listens to its engine's events, and which of the engine's requests it tags."""

import logging
import stat
from types import SimpleNamespace

import pytest

from ichat.engines import asgi
from ichat.engines.adapter import AdapterSettings
from ichat.engines.kv_events import KvEvents, wanted_events
from ichat.errors import Exit
from ichat.protocol.prefixes import PREFIX_HEADER, SentChain, chain_header
from ichat.roles.worker_options import read_command_line

WHY = "several caches serve the model"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "events"


class BlockStored(SimpleNamespace):
    """As vLLM and SGLang encode it."""


class BlockRemoved(SimpleNamespace):
    pass


class AllBlocksCleared(SimpleNamespace):
    pass


def stored(tag=None, *, hashes=(1, 2, 3, 4), medium="GPU", group=0):
    return BlockStored(
        block_hashes=hashes, parent_block_hash=None, block_size=16, session_id=tag, medium=medium, group_idx=group
    )


def removed(hash_, *, medium="GPU", group=0):
    return BlockRemoved(block_hashes=[hash_], medium=medium, group_idx=group)


CHAIN = SentChain(512, [b"a" * 8, b"b" * 8])


@pytest.fixture
def events(directory):
    """Events that need not be decoded, but for those that cannot be."""

    def decode(payload):
        if payload == "broken":
            raise ValueError(payload)
        return SimpleNamespace(events=payload)

    events = KvEvents(str(directory))
    events._decode = decode
    return events


def test_events_of_the_cache_on_the_gpu_count(events):
    """Those of other groups of blocks, and of copies elsewhere, do not; the first batch may have any number."""
    tag = events.held.expect(CHAIN, 64, 512)
    events.note(7, [stored(tag, group=1), stored(tag, medium="CPU")])
    assert len(events.held) == 0
    events.note(8, [stored(tag), removed(4, group=1), removed(4, medium="CPU")])
    assert events.held.digests == set(CHAIN.digests)
    events.note(9, [removed(4)])
    assert events.held.digests == set(CHAIN.digests[:1])
    events.note(10, [AllBlocksCleared()])
    assert len(events.held) == 0


@pytest.mark.parametrize("lost", [(9, []), (8, "broken")])
def test_nothing_is_known_after_events_that_are_missing(events, caplog, lost):
    """Missing numbers, or a batch of a form that is not known: what was held may be gone. It goes on from there."""
    events.note(7, [stored(events.held.expect(CHAIN, 64, 512))])
    assert len(events.held) == 2
    events.note(*lost)
    assert len(events.held) == 0
    assert events.held.next_changes().cleared
    assert "missing" in caplog.text
    events.note(lost[0] + 1, [stored(events.held.expect(CHAIN, 64, 512))])
    assert len(events.held) == 2


@pytest.mark.parametrize(
    ("wanted", "obstacle", "too_dear", "listens"),
    [
        ("auto", None, None, True),
        ("auto", WHY, None, False),
        ("auto", None, WHY, False),
        ("true", None, WHY, True),
        ("false", None, None, False),
    ],
)
def test_engines_that_can_report_cache_events_do_by_default(directory, caplog, wanted, obstacle, too_dear, listens):
    """By default whoever can and needs little for it; nobody else makes the directory. The log says why not."""
    caplog.set_level(logging.INFO)
    settings = AdapterSettings(prefix_reports=wanted, events_directory=str(directory))
    events = wanted_events(settings, obstacle, too_dear)
    assert (events is not None, directory.exists()) == (listens, listens)
    assert [one.getMessage() for one in caplog.records] == (
        [] if listens or wanted == "false" else [f"the worker reports no prefixes: {WHY}"]
    )


def test_only_this_user_may_enter_the_directory(directory):
    """The events have the tokens of prompts."""
    events = KvEvents(str(directory))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(directory / "kv") in events.flag()[1]


def test_reports_that_cannot_be_had_are_refused(directory):
    """Whoever asks for them gets them, or the reason in one sentence."""
    settings = AdapterSettings(prefix_reports="true", events_directory=str(directory))
    with pytest.raises(Exit) as refused:
        wanted_events(settings, WHY)
    assert (refused.value.code, str(refused.value)) == (64, f"--prefix-reports true is not possible here: {WHY}.")
    with pytest.raises(Exit) as refused:
        read_command_line(["--prefix-reports", "true"])
    assert (refused.value.code, "needs --gateway-address" in str(refused.value)) == (64, True)


def test_the_first_request_of_a_call_with_a_chain_is_tagged(directory, monkeypatch):
    """A later one may have another prompt; one whose call has no chain, or a broken one, stays as it is."""
    events = KvEvents(str(directory))

    def tag(call, times=1):
        monkeypatch.setattr(asgi, "_UNDER_WAY", SimpleNamespace(get=lambda: call))
        requests = [SimpleNamespace(session_id="the client's") for _ in range(times)]
        for request in requests:
            events.tag(request, 100)
        return [request.session_id for request in requests]

    def call_with(headers):
        return SimpleNamespace(request=SimpleNamespace(by_name=headers), bytes_in=900, is_tagged=False)

    chain = chain_header(512, [b"a" * 8, b"b" * 8])
    assert tag(call_with({PREFIX_HEADER: chain}), 3) == ["1", "the client's", "the client's"]
    assert tag(call_with({PREFIX_HEADER: chain})) == ["2"]
    assert tag(call_with({PREFIX_HEADER: b"512;xyz"})) == ["the client's"]
    assert tag(call_with({})) == ["the client's"]
    assert tag(None) == ["the client's"]
    assert repr(events.held) == "<HeldPrefixes: 0 digests, 0 blocks, 2 awaited>"
