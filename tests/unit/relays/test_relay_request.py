"""The facts of a request that its relay sends the owner."""

from types import SimpleNamespace

import pytest
import trio

from ichat.config.schema import Limits, Timeouts
from ichat.http.heads import RequestHead
from ichat.http.hub import Hub
from ichat.http.pool import Pool
from ichat.http.request import Request
from ichat.relays.frame_desk import FrameDesk
from ichat.relays.relay_request import NAMES_MAX, RelayParts, RelayRequest
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.settings import RelaySettings
from ichat.relays.values import IGNORES_PREFIX, TELLS_HEAD, MonotonicNs, TrioClock

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"Hello. " * 500 + b'"}]}'


@pytest.fixture
async def parts():
    """Return the parts of a relay without an owner."""
    talk = RelayTalk()
    desk = FrameDesk(talk, lambda frame: None, lambda: MonotonicNs(1))
    pool = Pool(Hub(), connect_s=1, idle_s=1)
    clock = TrioClock.read(trio.current_time(), 10**15)
    return RelayParts(pool, desk, None, clock, RelaySettings(Limits(), Timeouts()), None)


async def asked_by(parts):
    """Return the ask of a request for the model `m`."""
    headers = [(b"host", b"x"), (b"content-type", b"application/json")]
    head = RequestHead(b"POST", b"/v1/chat/completions", b"1.1", headers, len(BODY))
    request = Request(
        head.method, head.target, head.path, head.version, headers, BODY, b"id", True, b"id", head.by_name
    )  # fmt: skip
    return await RelayRequest(parts, request, SimpleNamespace(peer="127.0.0.1:5")).read()


async def test_sums_of_a_prefix_are_left_out_only_while_the_newest_step_of_a_name_says_so(parts):
    """A step with `IGNORES_PREFIX` is about its own name, and the next step without it ends that."""
    assert (await asked_by(parts)).checksums
    parts.note_prefixes("other", IGNORES_PREFIX)
    assert (await asked_by(parts)).checksums
    parts.note_prefixes("m", IGNORES_PREFIX | TELLS_HEAD)
    assert (await asked_by(parts)).checksums == ()
    parts.note_prefixes("m", TELLS_HEAD)
    assert (await asked_by(parts)).checksums


async def test_names_without_sums_are_bounded(parts):
    """Clients choose names; a name beyond the bound only costs its sums."""
    for number in range(NAMES_MAX + 5):
        parts.note_prefixes(f"m{number}", IGNORES_PREFIX)
    assert len(parts.without_prefixes) == NAMES_MAX
