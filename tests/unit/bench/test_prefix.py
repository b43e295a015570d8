"""What `./build bench prefix` asks and how it judges: a benchmark that counts wrongly shows nothing."""

import itertools

import pytest
from bench import prefix_figures, prompts
from bench.prefix_figures import Count, Row, count_of, gained, ideal_hit, own_counters_of, spread_of, together

VLLM = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 640.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 9.0
"""
SGLANG = """\
sglang:prompt_tokens_total{is_streaming="true"} 1000.0
sglang:cached_tokens_total{cache_source="device"} 600.0
sglang:cached_tokens_total{cache_source="host"} 40.0
sglang:num_requests_total{is_streaming="true"} 10.0
"""
GATEWAY = """\
ichat_prefix_bytes_total{kind="matched"} 100.0
ichat_prefix_bytes_total{kind="all"} 300.0
ichat_prefix_bytes_created{kind="all"} 1.7e+09
ichat_requests_total{model="tiny"} 5.0
"""


def turns_of(conversation):
    """Return all prompts of a conversation."""
    found = [conversation.messages]
    while conversation.has_next():
        conversation.go_on("an answer")
        found.append(conversation.messages)
    return found


def row(subject, **changes):
    same = {"scenario": "hot", "ideal": 0.8, "spread": 1.1, "ttft50_ms": 10, "ttft99_ms": 20, "rate": 5, "requests": 9}
    return Row(subject=subject, **{**same, "hit": 0.5, "failures": 0, "lost": 0, "by_worker": [], **changes})


@pytest.mark.parametrize("exposition", [VLLM, SGLANG])
def test_both_engines_count_alike(exposition):
    """The counters of an engine are summed up over their labels, and nothing else is."""
    assert count_of(exposition) == Count(prompt=1000, cached=640, requests=10)


def test_the_gateways_counters_are_those_of_prefixes():
    assert own_counters_of(GATEWAY) == {"ichat_prefix_bytes_total": 400.0}


def test_a_new_process_counts_from_nothing():
    """A worker that came back has counted less than before: all of that is new."""
    assert Count(100, 50, 4).since(Count(60, 20, 3)) == Count(40, 30, 1)
    assert Count(10, 5, 1).since(Count(60, 20, 3)) == Count(10, 5, 1)


def test_workers_weigh_as_many_tokens_as_they_had():
    whole = together([Count(100, 100, 1), Count(300, 0, 4)])
    assert whole.hit == 0.25
    assert spread_of([Count(requests=1), Count(requests=4), Count(requests=2)]) == 4
    assert spread_of([Count(requests=3), Count()]) == 3


def test_the_ideal_finds_whole_blocks_of_earlier_prompts():
    """A block is found if all before it is; the last token of a prompt is computed in any case."""
    first = list(range(10))
    assert ideal_hit([first], 4) == 0
    assert ideal_hit([first, first], 4) == 8 / 20
    assert ideal_hit([first, first[:8]], 4) == 4 / 18
    assert ideal_hit([first, [99, *first[1:]]], 4) == 0
    assert ideal_hit([first, [*first[:5], 99, *first[6:]]], 4) == 4 / 20
    assert ideal_hit([first, first], 1) == 9 / 20


def test_prompts_before_the_start_fill_the_cache_only():
    first = list(range(10))
    assert ideal_hit([first, first], 4, start=1) == 8 / 10


def test_the_gain_lies_between_round_robin_and_the_ideal():
    assert gained(0.7, 0.6, 0.8) == pytest.approx(0.5)
    assert gained(0.5, 0.6, 0.8) == pytest.approx(-0.5)
    assert gained(0.5, 0.8, 0.8) is None


def test_the_table_has_medians_and_what_is_gained_over_round_robin():
    """A subject's failures add up; what round robin has gained is not said."""
    rows = [row("iChat round_robin"), *(row("iChat prefix_aware", hit=hit, failures=1) for hit in (0.6, 0.7, 0.8))]
    lines = list(prefix_figures.table("hot", [*rows, row("other", scenario="none")]))
    assert lines[2:4] == [
        "| iChat round_robin | 0.500 | 0.800 | – | 1.10 | 10 / 20 | 5.0 | 0 |",
        "| iChat prefix_aware | 0.700 | 0.800 | 67% | 1.10 | 10 / 20 | 5.0 | 3 |",
    ]
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert not any("other" in line for line in lines)


def test_details_name_turns_counters_and_reasons():
    rows = [
        row(
            "a",
            turns=[([Count(10, 5, 2), Count(10, 5, 3)], 0.75)],
            own={"ichat_prefix_spills_total": 2.0, "zero": 0.0},
            reasons=["HTTP/1.1 502"],
        )
    ]
    assert [line for line in prefix_figures.details(rows) if line] == [
        "- a, hit rate by turn: 0.500 of 0.750 (2 + 3)",
        "- a: ichat_prefix_spills_total 2",
        "- a failed: HTTP/1.1 502",
    ]


@pytest.mark.parametrize("name", prompts.SCENARIOS)
def test_subjects_get_prompts_of_their_own(name):
    """Two salts share no prompt's beginning, and the same salt and seed give the same prompts."""
    ask = prompts.SCENARIOS[name]
    one, other, again = ([turns_of(each) for each in ask(salt, 7)] for salt in ("a 0", "b 0", "a 0"))
    assert one == again
    first = [{turns[0][0]["content"].split()[0] for turns in all_of_one} for all_of_one in (one, other)]
    assert first == [{"a"}, {"b"}]


def test_no_scenario_begins_as_another():
    """One scenario leaves nothing in the caches that the next one finds."""
    systems = [{one.messages[0]["content"] for one in ask("a", 7)} for ask in prompts.SCENARIOS.values()]
    assert not any(one & other for one, other in itertools.combinations(systems, 2))


def test_conversations_grow_and_noise_is_a_fifth():
    """Each turn begins with all of the turn before."""
    found = [turns_of(one) for one in prompts.conversations("a", 7)]
    talks = [one for one in found if len(one) > 1]
    assert (len(talks), {len(one) for one in talks}) == (64, {6})
    for earlier, later in itertools.pairwise(talks[0]):
        assert later[: len(earlier)] == earlier
        assert len(later) == len(earlier) + 2
    assert len(found) - len(talks) == round(sum(map(len, found)) / 5, -1)
    assert len({one[0][0]["content"] for one in talks}) == 4


def test_hot_shares_a_prefix_and_none_does_not():
    assert len({one.messages[0]["content"] for one in prompts.hot("a", 7)}) == 1
    assert len({one.messages[0]["content"][:20] for one in prompts.none("a 0", 7)}) == 240


def test_short_prompts_are_shorter_than_a_prefix():
    assert max(len(one.messages[0]["content"]) for one in prompts.short("vllm-router round_robin 0", 7)) < 200
