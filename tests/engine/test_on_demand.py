"""More models than may be loaded at once, with both real engines: one goes, the other comes, and no request is lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.on_demand_site import Site, Watch, take_turns

CLIENTS, REQUESTS = 4, 2
TOGETHER_S = 1.0
"""Within so long after the first of them all requests are answered that waited for a load that failed."""


@pytest.fixture(scope="module", name="site")
def site_fixture(room, tmp_path_factory):
    room.make(2)
    site = Site(tmp_path_factory.mktemp("on-demand"))
    yield site
    site.program.end()


def test_nothing_is_loaded_before_it_is_wanted(site):
    listed = {model["id"]: model.get("loaded") for model in site.program.get("/v1/models")[1]["data"]}
    assert listed == {"vllm": False, "sglang": False, "broken": False}
    assert site.workers() == set()
    assert {site.program.state(f"{name}-0") for name in listed} == {"cold"}


def test_twenty_first_requests_load_one_engine(site):
    with Watch(site) as watch, ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(site.ask, ["vllm"] * 20))
    assert [status for status, _, _ in answers] == [200] * 20
    assert len({answer["choices"][0]["text"] for _, answer, _ in answers}) == 1
    assert watch.seen <= {frozenset(), frozenset({"vllm-0"})}
    assert site.loads() == 1


def test_models_take_turns(site):
    """Clients that want one model after the other are all answered, and never are two engines there at once."""
    answers, seen = take_turns(site, CLIENTS, REQUESTS)
    assert [status for status, _, _ in answers] == [200] * CLIENTS * REQUESTS, answers
    assert max(map(len, seen)) == 1, seen
    assert {"vllm-0", "sglang-0"} <= set().union(*seen)


def test_a_failed_load_answers_all_waiting_requests(site):
    with ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(site.ask, ["broken"] * 20))
    assert {status for status, _, _ in answers} == {503}
    messages = {answer["error"]["message"] for _, answer, _ in answers}
    assert all("it has failed" in message and "NoSuchModel" not in message for message in messages), messages
    assert "NoSuchModel" in site.program.get("/v1/admin/workers/broken-0")[1]["cause"]
    times = [at for _, _, at in answers]
    assert max(times) - min(times) < TOGETHER_S


def test_an_idle_model_is_unloaded(site):
    site.reload(idle_s=2)
    assert site.ask("sglang")[0] == 200
    site.program.until(lambda: site.program.state("sglang-0") == "cold")
    assert site.workers() == set()
    assert site.ask("sglang")[0] == 200
