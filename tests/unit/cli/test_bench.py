"""The figures of `bench`: loads of known speed in virtual time, and plain functions."""

import itertools
import json

import attrs
import pytest
import trio

from ichat.cli.bench.figures import BenchPlan, Spread, figures_of
from ichat.cli.bench.load import BenchLoad, note_event
from ichat.cli.bench.objective import is_met, objective_in
from ichat.cli.bench.prompts import Prompts, words_for
from ichat.cli.bench.samples import BenchRequest, WorkerSample
from ichat.cli.bench.steadiness import why_not_steady
from ichat.http.sse import Event

PLAN = BenchPlan(
    model="m", concurrency=4, rate=None, requests_max=40, seconds_max=None, input_tokens=100, output_tokens=50,
    shared_prefix=0, objective={}, timeout_s=60.0,
)  # fmt: skip
FIRST_S, GAP_S = 0.5, 0.02
WHOLE_S = FIRST_S + 49 * GAP_S


class Model:
    """A model of known speed: so many requests at a time, the first token after `FIRST_S`, and then `GAP_S` each."""

    def __init__(self, slots=1000):
        self.slots = trio.CapacityLimiter(slots)

    async def ask(self, sent):
        sent.sent_at = trio.current_time()
        async with self.slots:
            await trio.sleep(FIRST_S)
            for number in range(50):
                await trio.sleep(GAP_S if number else 0)
                sent.pieces_at.append(trio.current_time())
        sent.input_tokens, sent.output_tokens = 100, 50
        sent.ended_at = trio.current_time()


async def measured(ask, **changes):
    plan = attrs.evolve(PLAN, **changes)
    load = BenchLoad(plan, ask, seed=7)
    await load.run()
    return figures_of(plan, load.requests)


async def test_a_closed_loop_measures_a_known_speed(autojump_clock):
    """All times and rates are within 2 % of the model's, and the objective that it just meets is met."""
    found = await measured(Model().ask, objective={"ttft": FIRST_S * 1.01, "gap": GAP_S * 1.01})
    expected = {
        "requests": 40, "requests_per_s": 4 / WHOLE_S, "output_tokens_per_s": 200 / WHOLE_S,
        "input_tokens_per_s": 400 / WHOLE_S, "under_way": 4.0, "goodput_per_s": 4 / WHOLE_S, "goodput_share": 1.0,
        "duration_s": 10 * WHOLE_S,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=0.02)
    means = {name: getattr(found, name).mean for name in ("first_token_s", "gap_s", "token_s", "whole_s")}
    speeds = {"first_token_s": FIRST_S, "gap_s": GAP_S, "token_s": GAP_S, "whole_s": WHOLE_S}
    assert means == pytest.approx(speeds, rel=0.02)
    assert found.not_steady == []
    assert (found.errors, found.unfinished, found.is_counted) == ({}, 0, True)


async def test_an_open_loop_sends_at_its_rate_while_the_model_keeps_up(autojump_clock):
    """Requests arrive at random, as many as the rate says; each is as fast as if it were alone."""
    found = await measured(Model().ask, concurrency=None, rate=20.0, requests_max=500)
    assert found.duration_s == pytest.approx(500 / 20.0 + WHOLE_S, rel=0.1)
    assert found.whole_s.max == pytest.approx(WHOLE_S, rel=0.02)
    assert found.under_way == pytest.approx(20.0 * WHOLE_S, rel=0.1)
    assert found.not_steady == []


async def test_arrivals_of_an_open_loop_are_those_of_chance(autojump_clock):
    """The spread of the pauses is as large as their mean, as in a Poisson process."""

    async def ask(sent):
        sent.sent_at = sent.ended_at = trio.current_time()
        await trio.lowlevel.checkpoint()

    load = BenchLoad(attrs.evolve(PLAN, concurrency=None, rate=50.0, requests_max=2000), ask, seed=3)
    await load.run()
    planned = [one.planned_at for one in load.requests]
    pauses = [after - before for before, after in itertools.pairwise(planned)]
    mean = sum(pauses) / len(pauses)
    spread = (sum((pause - mean) ** 2 for pause in pauses) / len(pauses)) ** 0.5
    assert (mean, spread) == pytest.approx((0.02, 0.02), rel=0.1)


async def test_a_rate_above_capacity_is_not_steady(autojump_clock):
    """A queue grows: times count from the planned moments, and the verdict says so."""
    found = await measured(Model(slots=10).ask, concurrency=None, rate=20.0, requests_max=400)
    assert found.requests_per_s == pytest.approx(10 / WHOLE_S, rel=0.05)
    assert found.first_token_s.max > 10.0
    assert any("pile up" in reason for reason in found.not_steady)
    assert any("became slower" in reason for reason in found.not_steady)


async def test_a_pause_of_the_server_is_in_the_time_of_every_request_planned_meanwhile(autojump_clock):
    """No omission: a pause of 10 s delays a hundred requests of an open loop at 10 a second, by 5 s on average."""
    began = trio.current_time()
    gate = trio.Lock()

    async def ask(sent):
        async with gate:
            if 20.0 <= trio.current_time() - began < 30.0:
                await trio.sleep_until(began + 30.0)
        sent.sent_at = sent.ended_at = trio.current_time()
        sent.pieces_at.append(sent.ended_at)

    found = await measured(ask, concurrency=None, rate=10.0, requests_max=None, seconds_max=100.0)
    assert found.first_token_s.max == pytest.approx(10.0, rel=0.05)
    assert found.whole_s.mean == pytest.approx(100 * 5.0 / found.requests, rel=0.2)
    assert found.requests == pytest.approx(1000, rel=0.1)


async def test_a_closed_loop_ends_after_its_seconds_and_waits_for_the_last_answers(autojump_clock):
    """Nothing is sent after that time; each answer that was begun is whole."""
    began = trio.current_time()
    load = BenchLoad(attrs.evolve(PLAN, requests_max=None, seconds_max=10.0), Model().ask)
    await load.run()
    assert max(one.planned_at for one in load.requests) < began + 10.0 < trio.current_time() < began + 10.0 + WHOLE_S
    assert all(one.is_well for one in load.requests)


async def test_a_server_that_refuses_all_gets_no_flood(autojump_clock):
    """A place of a closed loop pauses after an error; the errors are counted by their codes."""

    async def ask(sent):
        sent.sent_at = sent.ended_at = trio.current_time()
        sent.error = "503 overloaded"
        await trio.lowlevel.checkpoint()

    found = await measured(ask, requests_max=None, seconds_max=10.0)
    assert 100 < found.errors["503 overloaded"] <= 404
    assert (found.requests, found.first_token_s, found.goodput_share) == (0, None, None)


def request(planned_at=0.0, first_s=0.5, gap_s=0.02, tokens=50, error="", **more):
    pieces = [planned_at + first_s + number * gap_s for number in range(tokens)]
    return BenchRequest(
        planned_at, planned_at, pieces, pieces[-1], output_tokens=tokens, input_tokens=100, error=error, **more
    )


STEADY = [request(float(number)) for number in range(100)]


def waiting(*counts):
    return [WorkerSample(float(number), "w", 0.5, 1.0, float(count)) for number, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("requests", "workers", "client_cpu", "reason"),
    [
        (STEADY, waiting(*[3, 4] * 20), 0.5, None),
        ([], [], 0.0, "only 0 whole answers"),
        (STEADY[:19], [], 0.0, "only 19 whole answers"),
        ([*STEADY, request(50.0, error="timeout"), request(51.0, error="500")], [], 0.0, "2 of 102 requests failed"),
        ([request(float(n), first_s=0.5 + n / 50) for n in range(100)], [], 0.0, "the answers became slower"),
        ([request(float(n), first_s=4.0 * (n % 2)) for n in range(100)], [], 0.0, None),
        ([request(float(n), first_s=2.5 - n / 50) for n in range(100)], [], 0.0, "the answers became faster"),
        ([request(float(n), first_s=20.0 * (n % 8 == 0)) for n in range(64)], [], 0.0, "the answers are uneven"),
        ([request(float(n), first_s=0.3 * n) for n in range(100)], [], 0.0, "requests pile up"),
        ([request(n / 100, gap_s=0.2) for n in range(100)], [], 0.0, "the last requests only ended"),
        (STEADY, waiting(*range(40)), 0.0, "the queue of worker w grew"),
        (STEADY, [], 0.95, "this client used 95% of a core"),
    ],
)
def test_each_reason_not_to_be_steady_is_named(requests, workers, client_cpu, reason):
    """A load that goes on as it is has none; answers that differ by chance are no reason."""
    found = why_not_steady(requests, workers, client_cpu=client_cpu)
    assert [one for one in found if reason and reason in one] or (reason is None and found == [])


def test_a_run_that_was_cut_short_is_not_blamed_for_its_end():
    """Its last requests are unfinished: their times are unknown, and they are no errors."""
    requests = [request(n / 100, gap_s=0.2) for n in range(100)]
    cut = [*requests, BenchRequest(1.0, 1.0)]
    found = figures_of(PLAN, cut, is_cut_short=True)
    assert not any("only ended" in reason for reason in found.not_steady)
    assert (found.requests, found.unfinished, found.errors) == (100, 1, {})


def test_a_spread_is_interpolated():
    """As common tools compute percentiles."""
    found = Spread.of([4.0, None, 1.0, 3.0, 2.0])
    assert attrs.astuple(found) == pytest.approx((2.5, 2.5, 3.7, 3.97, 4.0))
    assert Spread.of([None]) is None


def test_an_objective_has_limits_with_units():
    """Each limit may be in milliseconds, seconds or minutes."""
    assert objective_in("ttft=1s, gap=60ms,e2e=1.5m") == pytest.approx({"ttft": 1.0, "gap": 0.06, "e2e": 90.0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=1", "'ttft=1' is no objective"),
        ("speed=1s", "'speed=1s' is no objective"),
        ("ttft=1s,", "'' is no objective"),
        ("ttft=1s,ttft=2s", "ttft is there twice"),
        ("ttft=-1s", "is no objective"),
    ],
)
def test_an_objective_that_cannot_be_read_is_named(text, said):
    """With an example of the form."""
    with pytest.raises(ValueError, match=said):
        objective_in(text)


@pytest.mark.parametrize(
    ("change", "objective", "is_good"),
    [
        ({}, {"ttft": 0.5, "gap": 0.021, "e2e": 1.5}, True),
        ({"first_s": 0.6}, {"ttft": 0.5}, False),
        ({"gap_s": 0.03}, {"gap": 0.021}, False),
        ({"tokens": 1}, {"gap": 0.001}, True),
        ({"error": "timeout"}, {"ttft": 100.0}, False),
    ],
)
def test_an_objective_limits_every_figure_that_it_names(change, objective, is_good):
    """An answer of one token has no gap, and a failed request meets nothing."""
    assert is_met(request(**change), objective) == is_good


@pytest.mark.parametrize(("around", "per_word"), [(0, 1.0), (23, 1.0), (7, 2.75), (30, 1.3)])
@pytest.mark.parametrize("tokens", [64, 512, 4000])
def test_prompts_have_the_wanted_number_of_tokens(around, per_word, tokens):
    """By the server's own count, whatever surrounds a prompt, and however many tokens a word has."""

    def count(words):
        return around + round(words * per_word)

    words, found_per_word = words_for(tokens, count)
    assert count(words) == pytest.approx(tokens, abs=per_word)
    assert found_per_word == pytest.approx(per_word, rel=0.02)


def test_a_server_without_counts_is_no_error_and_a_template_that_is_too_long_is():
    """Then a word stands for a token; and a prompt cannot be shorter than all that surrounds it."""
    assert words_for(100, lambda _words: None) is None
    with pytest.raises(ValueError, match="41 tokens with the model's chat template"):
        words_for(20, lambda words: words + 40)


def test_no_two_prompts_begin_alike_and_all_have_the_same_words():
    """So no prefix cache helps, and all have the same number of tokens; a shared prefix is shared."""
    prompts = Prompts(200)
    found = [prompts.next().split() for _ in range(500)]
    assert len({tuple(words[1:9]) for words in found}) == 500
    assert len({tuple(sorted(words)) for words in found}) == 1
    shared = Prompts(200, shared_words=50)
    found = [shared.next().split() for _ in range(20)]
    assert len({tuple(words[:51]) for words in found}) == 1
    assert len({tuple(words[:60]) for words in found}) == 20
    assert Prompts(200).next().split()[:9] != Prompts(200).next().split()[:9], "runs differ, too"


def test_events_are_noted_by_their_content():
    """A piece has text, thoughts or a call of a tool; the head of an answer is none. Errors have their code."""
    sent = BenchRequest(0.0)
    counts = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    usage = json.dumps({"choices": [], "usage": counts})
    head = '{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}'
    events = [
        head, '{"choices": [{"delta": {"reasoning": "hm"}}]}', '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"tool_calls": [{}]}}]}', '{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        usage, "no JSON",
    ]  # fmt: skip
    for number, data in enumerate(events):
        assert not note_event(sent, Event("message", data, None), float(number))
    assert note_event(sent, Event("message", "[DONE]", None), 9.0)
    assert (sent.pieces_at, sent.input_tokens, sent.output_tokens, sent.cached_tokens) == ([1.0, 2.0, 3.0], 9, 3, 4)
    note_event(sent, Event("message", '{"error": {"code": "engine_aborted", "message": "m"}}', None), 10.0)
    assert sent.error == "engine_aborted"
