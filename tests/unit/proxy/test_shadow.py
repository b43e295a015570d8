"""Copies for a shadow, without a gateway: which requests have one, and how copies end."""

import pytest
import trio

from ichat.config.models import ShadowConfig, TargetConfig
from ichat.config.schema import Config, Routing, Timeouts
from ichat.http.hub import Hub
from ichat.http.pool import Pool, Upstream
from ichat.http.request import Request
from ichat.http.request_body import FormBody, RequestBody
from ichat.observability.counts import SERIES_MAX, ShadowCounts
from ichat.proxy.copies import copy_of
from ichat.proxy.shadow import Shadows, is_copied
from ichat.routing.aliases import Alias
from ichat.routing.availability import Ready
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.security.grant import Grant

SHADOW = ShadowConfig("s", 0.25)
TIMEOUTS = Timeouts()
GRANT = Grant("", "k", may_steer=True, hides_keys=False)


def request_of(path=b"/v1/chat/completions", headers=(), body=b'{"model": "a"}'):
    headers = [(b"content-type", b"application/json"), *headers]
    return Request(b"POST", path, path, b"1.1", headers, body, b"id", keep_alive=True)


def copied(request, names=("model",), make=RequestBody):
    return copy_of(request, make(request.body, names), grant=GRANT, is_suspect=False)


class Site:
    """Shadows whose model has one endpoint."""

    def __init__(self, port, hub):
        self.endpoint = Endpoint(Upstream("worker s", "127.0.0.1", port), b"s", 8)
        self.counts = ShadowCounts()
        balancer = Balancer(lambda _: Ready([self.endpoint]), trio.current_time, Routing())
        self.shadows = Shadows(balancer, Pool(hub, connect_s=5, idle_s=5), self.counts, 16)

    def start(self, timeouts=TIMEOUTS, **given):
        alias = Alias("n", (TargetConfig("a"),), shadow=SHADOW)
        self.shadows.start(copied(request_of(**given)), alias, proof=b"", timeouts=timeouts)

    @property
    def results(self):
        for family in self.counts.families():
            if family.name == "ichat_shadow_requests":
                return {one.labels["result"]: one.value for one in family.samples}
        return {}

    async def until(self, results):
        with trio.fail_after(30):
            while self.results != results:
                await trio.sleep(0.005)


@pytest.fixture
async def silent_site(serve, nursery):
    """Start a server that never answers, for copies to go to."""

    async def silent(stream, head, body):
        await trio.sleep_forever()

    upstream, port = await serve(silent)
    hub = Hub()
    nursery.start_soon(hub.run_forever)
    site = Site(port, hub)
    site.upstream = upstream
    await nursery.start(site.shadows.run_forever)
    return site


def test_a_session_is_on_one_side_and_the_sides_are_as_large_as_asked():
    """Without a session the draw decides."""
    sides = [is_copied("n", SHADOW, b"session %d" % number) for number in range(2000)]
    assert sides == [is_copied("n", SHADOW, b"session %d" % number) for number in range(2000)]
    assert 400 < sum(sides) < 600
    assert is_copied("n", SHADOW, b"", lambda: 0.24)
    assert not is_copied("n", SHADOW, b"", lambda: 0.25)
    assert not is_copied("n", ShadowConfig("s", 0.0), b"session")
    assert is_copied("n", ShadowConfig("s", 1.0), b"session")


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (request_of(path=b"/v1/files"), ["model"]),
        (request_of(path=b"/v1/responses"), ["model", "previous_response_id"]),
    ],
)
def test_a_request_for_one_worker_has_no_copy(request_, names):
    """Nor has a route that no model has."""
    assert copied(request_, names) is None


def test_a_form_has_no_copy():
    """Its model is a field, and its body is large as a rule."""
    request = request_of(path=b"/v1/audio/transcriptions")
    assert copied(request) is not None
    assert copied(request, make=FormBody) is None


def test_a_copy_has_no_key_and_an_id_of_its_own():
    """It outlives the original's body and headers, which are freed."""
    request = request_of(headers=[(b"authorization", b"Bearer k"), (b"x-api-key", b"k"), (b"x-mine", b"1")])
    copy = copied(request)
    request.release_body()
    assert (copy.request.id, copy.body.data) == (b"id-shadow", b'{"model": "a"}')
    assert copy.request.headers == [(b"content-type", b"application/json"), (b"x-mine", b"1")]


async def test_a_shutdown_ends_copies_at_once(silent_site):
    """Their places are free, their connections closed, and no more are begun."""
    site = silent_site
    for _ in range(3):
        site.start()
    with trio.fail_after(30):
        while len(site.upstream.requests) < 3:
            await trio.sleep(0.005)
    assert site.endpoint.in_flight == 3
    site.shadows.stop()
    await site.until({"cancelled": 3})
    assert site.endpoint.in_flight == 0
    site.start()
    assert site.results == {"cancelled": 3, "draining": 1}
    assert repr(site.shadows) == "<Shadows 0 under way>"


async def test_a_silent_shadow_is_given_up(silent_site):
    """After the time that any upstream has for its first byte."""
    silent_site.start(Timeouts(first_byte_s=0.05))
    await silent_site.until({"timeout": 1})
    assert silent_site.endpoint.in_flight == 0


async def test_a_reload_changes_how_many_there_may_be(silent_site):
    """From the next one on."""
    silent_site.shadows.reconfigure(Config(routing=Routing(shadows_max=1)))
    for _ in range(3):
        silent_site.start()
    assert silent_site.results == {"busy": 2}


async def test_an_unreadable_body_has_no_copy_and_no_error(silent_site):
    """The original's endpoint may have accepted it all the same."""
    silent_site.start(body=b"no object")
    await silent_site.until({"bad_request": 1})
    assert silent_site.endpoint.in_flight == 0


def test_series_are_bounded():
    """However often the configuration brings new names."""
    counts = ShadowCounts()
    for number in range(SERIES_MAX + 5):
        counts.add(f"n{number}", "s", "200")
        counts.add_response(f"s{number}", 1.0, 2)
    [copies, seconds, tokens] = list(counts.families())
    assert len(copies.samples) == SERIES_MAX + 1
    assert sum(one.value for one in copies.samples) == SERIES_MAX + 5
    assert sum(one.value for one in seconds.samples if one.name.endswith("_count")) == SERIES_MAX + 5
    assert sum(one.value for one in tokens.samples) == 2 * (SERIES_MAX + 5)
