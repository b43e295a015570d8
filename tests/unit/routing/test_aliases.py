"""Names that stand for models: who gets a share of the requests, and who stays where it was."""

import collections
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config import load as configuration
from ichat.config.models import TargetConfig
from ichat.routing.aliases import Alias, Aliases
from ichat.routing.availability import Prospect

COUNT = 2000
SESSIONS = [b"session-%d" % number for number in range(COUNT)]


def alias(*weights, name="n"):
    return Alias(name, tuple(TargetConfig(f"m{number}", weight) for number, weight in enumerate(weights)))


def choose(one, session, draw):
    """Return the target while all of them can answer."""
    return one.choose(session, draw, one.targets)


def ready(model):
    return Prospect.NOW


def no_draw():
    raise AssertionError("a session is not drawn")


def shares(chosen):
    return {model: count / len(chosen) for model, count in collections.Counter(chosen).items()}


def bound(share, count=COUNT):
    """Return how far a share may be off: five standard deviations, beyond which chance leads once in a million times."""
    return 5 * (share * (1 - share) / count) ** 0.5


@pytest.mark.parametrize("weights", [(95, 5), (1, 1), (50, 30, 20), (0.5, 0.25, 0.125, 0.125)])
def test_shares_are_those_of_the_weights(weights):
    """With and without sessions, 2 000 requests are spread within binomial bounds."""
    one, draw = alias(*weights), random.Random(1).random
    for chosen in ([choose(one, session, no_draw) for session in SESSIONS], [choose(one, b"", draw) for _ in SESSIONS]):
        found = shares(chosen)
        for number, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(found[f"m{number}"] - share) < bound(share), (weights, found)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.binary(min_size=1, max_size=40))
def test_a_session_never_flips(weights, session):
    """The same session gets the same target, also of another object for the same configuration; only ratios count."""
    chosen = choose(alias(*weights), session, no_draw)
    assert chosen == choose(alias(*weights), session, no_draw)
    assert chosen == choose(alias(*(8 * weight for weight in weights)), session, no_draw)


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(0, 4), st.floats(0.1, 10),
)  # fmt: skip
def test_only_those_sessions_move_that_have_to(weights, place, weight):
    """Where one weight changes, sessions move only to that target, or only from it: no others change sides."""
    place %= len(weights)
    after = [*weights[:place], weight, *weights[place + 1 :]]
    old, new = alias(*weights), alias(*after)
    changed = f"m{place}"
    for session in SESSIONS[:200]:
        before, now = choose(old, session, no_draw), choose(new, session, no_draw)
        if before != now:
            assert (now if weight > weights[place] else before) == changed


def test_a_change_of_weights_moves_the_share_that_it_must():
    """From 95 : 5 to 80 : 20, 15 % of the sessions move; a new target takes its share from all alike."""
    old, new = alias(95, 5), alias(80, 20)
    moved = sum(choose(old, one, no_draw) != choose(new, one, no_draw) for one in SESSIONS) / COUNT
    assert abs(moved - 0.15) < bound(0.15)
    three = alias(95, 5, 25)
    moved = [choose(old, one, no_draw) for one in SESSIONS if choose(old, one, no_draw) != choose(three, one, no_draw)]
    assert abs(len(moved) / COUNT - 0.2) < bound(0.2)
    assert abs(shares(moved)["m1"] - 0.05) < bound(0.05, len(moved))


def test_two_names_split_the_same_sessions_differently():
    """A session that is among the 10 % of one name is not more likely among those of another."""
    first, second = alias(90, 10), alias(90, 10, name="other")
    rare = [one for one in SESSIONS if choose(first, one, no_draw) == "m1"]
    both = sum(choose(second, one, no_draw) == "m1" for one in rare) / len(rare)
    assert abs(both - 0.1) < bound(0.1, len(rare))


def test_the_draw_may_be_at_its_ends():
    """No draw leads nowhere, however it is rounded."""
    one = alias(0.1, 0.2, 0.7)
    assert choose(one, b"", lambda: 0.0) == "m0"
    assert choose(one, b"", lambda: 1 - 2**-53) == "m2"


NOW, LATER, NEVER = Prospect.NOW, Prospect.LATER, Prospect.NEVER


@pytest.mark.parametrize(("prospects", "expected"), [
    ((NOW, NOW, NOW), "m0 m1 m2"),
    ((NOW, NEVER, NOW), "m0 m2"),
    ((LATER, NOW, NEVER), "m1"),
    ((LATER, NEVER, LATER), "m0 m2"),
    ((NEVER, NEVER, NEVER), "m0 m1 m2"),
])  # fmt: skip
def test_shares_count_among_the_targets_that_answer_soonest(prospects, expected):
    """Those that wait for a load count where none answers now, and all do where none can; strict shares stay."""
    found = {f"m{number}": prospect for number, prospect in enumerate(prospects)}
    one, strict = alias(1, 2, 5), attrs.evolve(alias(1, 2, 5), strict_shares=True)
    counted = one.counted(found.__getitem__)
    assert [target.model for target in counted] == expected.split()
    assert sum(one.share_of(model, counted) for model in found) == pytest.approx(1)
    assert one.share_of("another", counted) is None
    assert strict.counted(found.__getitem__) == strict.targets


def test_only_the_sessions_of_a_target_that_is_away_move():
    """They are spread over the others by the weights, and come back with it."""
    one = alias(50, 30, 20)
    counted = one.counted(lambda model: NEVER if model == "m0" else NOW)
    before = [choose(one, session, no_draw) for session in SESSIONS]
    now = [one.choose(session, no_draw, counted) for session in SESSIONS]
    assert all(was in ("m0", gets) for was, gets in zip(before, now, strict=True))
    moved = shares([gets for was, gets in zip(before, now, strict=True) if was == "m0"])
    assert abs(moved["m1"] - 0.6) < bound(0.6, COUNT // 2)


def aliases(text):
    return Aliases.from_config(configuration.parse(text, "test.toml"))


def test_a_plan_has_no_model_twice():
    """First the chosen target, then the fallbacks in their order."""
    found = aliases("""
        [[models]]
        name = "n"
        targets = [{ model = "a" }, { model = "never", weight = 0 }]
        fallbacks = ["b", "a", "c", "b"]
        [[models]]
        name = "itself"
        fallbacks = ["a"]
    """)
    assert found.plan("n", b"s", ready).targets == ("a", "b", "c")
    assert found.plan("itself", b"", ready).targets == ("itself", "a")
    assert found.plan("a", b"", ready) is None


def test_lists_show_names_and_not_what_these_hide():
    """A name has the entry of the first of its models that is there; a name without any is left out, as is a hidden one."""
    found = aliases("""
        [[models]]
        name = "gpt"
        targets = [{ model = "gone" }]
        fallbacks = ["spare"]
        [[models]]
        name = "b"
        targets = [{ model = "c" }]
        [[models]]
        name = "nothing"
        targets = [{ model = "gone" }]
        [[models]]
        name = "secret"
        targets = [{ model = "a" }]
        hidden = true
        [[models]]
        name = "a"
        fallbacks = ["spare"]
    """)
    assert found.listed({"a": 1, "b": 2, "spare": 4}) == {"a": 1, "gpt": 4, "spare": 4}
    assert found.models_of({"gpt", "a", "c"}) == {"gone", "spare", "a"}
