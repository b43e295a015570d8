"""A request for a model that there is not costs the same however many there are, and is told a few names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat import errors
from ichat.config.models import AliasConfig, TargetConfig
from ichat.config.schema import Config
from ichat.fleet.fleet import Fleet
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.model_list import listed_model, listed_models, near_models
from ichat.fleet.views import result_of
from ichat.protocol.messages import Heartbeat, ModelCard
from ichat.routing.aliases import Aliases
from ichat.routing.near_names import NearNames, nearest
from ichat.texts import NAMED_MAX

BODY_BYTES_MAX = 2000
MANY = [f"org-{worker}/llama-{worker}-adapter-{number}" for worker in range(500) for number in range(20)]


def fleet_of(names, state="ready"):
    fleet = Fleet({}, lambda: 0.0, 5)
    for start in range(0, len(names), 20):
        cards = [ModelCard(name) for name in names[start : start + 20]]
        fleet.registry.record_heartbeat(Heartbeat(f"w{start}", cards[0].id, "h", 1, models=cards, state=state))
    return fleet


def directory_of(names):
    return fleet_of(names).directory


@pytest.fixture(scope="module", name="large")
def large_fixture():
    return directory_of(MANY)


NO_ALIASES = Aliases({})


def name_for(name, *models, **more):
    return AliasConfig(name, [TargetConfig(model) for model in models], **more)


def told(model, directory, aliases=NO_ALIASES, allowed=None):
    """Return the names that an error for this model has, and its body."""
    error = errors.model_not_found(model, near_models(model, directory, aliases, allowed))
    text = error.message.partition("Models here: ")[2].removesuffix(".")
    return text.partition(" and others (")[0].split(", "), error.body()


@pytest.mark.parametrize("model", ["nope", "llama-17-adapter-3", "m" * 200_000, "\U0001f4a9" * 300, ""])
def test_an_error_names_a_few_of_many(large, model):
    """At most twenty, in less than 2 kB, whatever is asked for."""
    names, body = told(model, large)
    assert len(names) == NAMED_MAX
    assert set(names) <= set(MANY)
    assert len(body) < BODY_BYTES_MAX
    assert b"others (GET /v1/models lists all)" in body


def test_long_names_are_as_few_as_fit():
    """An error has less than 2 kB also then."""
    for character in ("x", "é", "\U0001f4a9"):
        directory = directory_of([character * 250 + str(number) for number in range(30)])
        names, body = told("nope", directory)
        assert len(names) < 5
        assert len(body) < BODY_BYTES_MAX
        json.loads(body)


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("org-17/llama-17-adapter-33", "org-17/llama-17-adapter-3"),
        ("LLAMA-321-adapter-7", "org-321/llama-321-adapter-7"),
        ("elsewhere/llama-44-adapter-11", "org-44/llama-44-adapter-11"),
        ("org-499/lama-499-adapter-19", "org-499/llama-499-adapter-19"),
        ("rg-3/llama-3-adapter-2", "org-3/llama-3-adapter-2"),
    ],
)
def test_near_matches_come_first(large, model, near):
    """A name that is nearly right, or right but for its organisation or its capitals, is among the first."""
    assert near in told(model, large)[0][:3]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("Tiny", "tiny"),
        ("tiny:latest", "tiny"),
        ("openai/tiny", "tiny"),
        ("vendor/TINY:8b-q4", "tiny"),
        ("tinny", "tiny"),
        ("qwen3-8b-instruct", "Qwen/Qwen3-8B-Instruct"),
        ("claude-opus", None),
        (":latest", None),
        ("t" * 200, None),
    ],
)
@pytest.mark.parametrize("others", [0, 300])
def test_a_name_that_is_nearly_right_is_asked_after(asked, meant, others):
    """Whatever other names there are beside it: its capitals, an owner, a tag and a slip of the finger are no matter."""
    directory = directory_of(
        ["tiny", "Qwen/Qwen3-8B-Instruct", *(f"tiny-{number:03d}-adapter" for number in range(others))]
    )
    message = errors.model_not_found(asked, near_models(asked, directory, NO_ALIASES, None)).message
    assert message.startswith(f"The model `{asked[:40]}")
    said = message.partition("Did you mean `")[2].partition("`")[0] or None
    assert said == meant


def test_up_to_twenty_names_are_listed_in_order():
    """As long as they are no more than twenty."""
    names = [f"m{number:02d}" for number in range(NAMED_MAX)]
    assert told("nope", directory_of(names[::-1]))[0] == names
    assert told("nope", directory_of([]))[0] == ["none yet"]


def test_nothing_looks_at_all_models(large, monkeypatch):
    """So many names are asked whether they are listed, and no list is made."""
    asked = []
    lists = ModelDirectory.lists
    monkeypatch.setattr(ModelDirectory, "lists", lambda self, name: asked.append(name) or lists(self, name))
    monkeypatch.setattr(ModelDirectory, "model_steps", None)
    told("llama-17-adapter-3", large)
    assert NAMED_MAX < len(asked) < 300
    assert listed_model("nope", large, NO_ALIASES) is None
    assert listed_model(MANY[-1], large, NO_ALIASES)[0].id == MANY[-1]


def test_an_unknown_models_error_lists_visible_names_only():
    """A key's error has names of that key alone, and nobody's has a hidden name or one that is not there."""
    fleet = fleet_of(["secret-a", "secret-b", "open"])
    fleet.registry.record_heartbeat(Heartbeat("gone", "secret-gone", "h", 1, state="loading"))
    aliases = Aliases.from_config(
        Config(models=[name_for("secret", "open"), name_for("secret-c", "open", hidden=True)])
    )
    assert told("secret", fleet.directory, aliases)[0] == ["open", "secret", "secret-a", "secret-b"]
    key = frozenset(("open", "secret-a", "secret-c", "secret-gone", "elsewhere"))
    assert told("secret-b", fleet.directory, aliases, key)[0] == ["open", "secret-a"]
    many = frozenset(f"k{number}" for number in range(10_000))
    assert told("secret", fleet.directory, aliases, many)[0] == ["none yet"]


def test_one_model_is_found_as_in_the_list():
    """By its own name, and by names that lead to it."""
    fleet = fleet_of(["a", "b"])
    fleet.registry.record_heartbeat(Heartbeat("v", "a", "h", 1, models=[ModelCard("a", max_model_len=7)]))
    fleet.registry.record_heartbeat(Heartbeat("u", "c", "h", 1, state="loading"))
    aliases = Aliases.from_config(
        Config(models=[name_for("x", "c", "a"), name_for("b", "c"), name_for("y", "a", hidden=True)])
    )
    found = result_of(listed_models(fleet.directory, aliases))
    assert set(found) == {"a", "x"}
    for name in ("a", "b", "c", "x", "y", "z"):
        assert listed_model(name, fleet.directory, aliases) == found.get(name)


NAMES = st.lists(st.sampled_from([f"{a}{b}/{c}" for a in "ab" for b in "xyé" for c in ("m", "n-1", "N-2", "ß")]))


@given(st.lists(st.tuples(st.booleans(), NAMES), max_size=6), st.text(max_size=5))
def test_an_index_that_has_changed_is_like_a_new_one(changes, name):
    """However names came and went; small changes are made one by one, large ones at once."""
    index, names = NearNames(), set()
    for adds, some in changes:
        for one in some:
            index.add(one) if adds else index.discard(one)
            names.add(one) if adds else names.discard(one)
        index.around(name)
    assert index.around(name) == NearNames(names).around(name) <= names
    assert len(index) == len(names)
    assert nearest(name, names, 3) == nearest(name, sorted(names), 100)[:3]
