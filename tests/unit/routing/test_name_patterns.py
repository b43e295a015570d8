"""Names with a `*`: which of them matches, and what that costs."""

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config import load as configuration
from ichat.config.models import AliasConfig, TargetConfig
from ichat.config.schema import Config
from ichat.errors import Exit
from ichat.fleet.fleet import Fleet
from ichat.fleet.model_list import listed_model, listed_models
from ichat.fleet.views import result_of
from ichat.protocol.messages import Heartbeat
from ichat.routing.aliases import Aliases, NamePatterns
from ichat.routing.availability import Prospect

PARTS = st.text("ab-", max_size=4)


def aliases_to(model, *names, **more):
    return Aliases.from_config(Config(models=[AliasConfig(name, [TargetConfig(model)], **more) for name in names]))


@given(st.lists(st.tuples(PARTS, PARTS), max_size=8), st.text("ab-", max_size=9))
def test_the_most_specific_pattern_matches(parts, name):
    """As a search through all of them finds it: the most characters beside the star, then the longer beginning."""
    patterns = {f"{start}*{end}" for start, end in parts}
    matching = [one for one in patterns if re.fullmatch(fnmatch.translate(one), name)]
    best = max(matching, key=lambda one: (len(one), one.index("*")), default=None)
    assert NamePatterns(patterns).find(name) == best


def test_ten_thousand_patterns_cost_a_few_lookups():
    """No pattern is looked at that does not match: a lookup counts how often it asks."""
    asked = 0

    class Counted(dict):
        def get(self, key, default=None):
            nonlocal asked
            asked += 1
            return super().get(key, default)

    found = NamePatterns([f"vendor-{number:05d}-*" for number in range(10_000)])
    found._by_start = Counted(found._by_start)
    assert found.find("vendor-04711-large") == "vendor-04711-*"
    assert found.find("somebody-else") is None
    assert asked <= 4


def test_names_and_models_come_before_patterns():
    """What is written without a star, and what is there."""
    aliases = aliases_to("tiny", "claude-*", "claude-opus", "*")
    assert aliases.name_for("claude-opus", {"tiny"}.__contains__) == "claude-opus"
    assert aliases.name_for("claude-haiku", {"claude-haiku"}.__contains__) == "claude-haiku"
    assert aliases.name_for("claude-haiku", {"tiny"}.__contains__) == "claude-*"
    assert aliases.name_for("gpt", {"tiny"}.__contains__) == "*"
    assert aliases_to("tiny", "claude-*").name_for("gpt", {"tiny"}.__contains__) == "gpt"
    assert aliases.plan("claude-*", b"", lambda _: Prospect.NOW).targets == ("tiny",)


def test_lists_have_no_patterns():
    """But one model is found by a name that a pattern matches, unless that is hidden."""
    fleet = Fleet({}, lambda: 0.0, 5)
    fleet.registry.record_heartbeat(Heartbeat("w", "tiny", "h", 1))
    aliases = aliases_to("tiny", "claude-*", "plain")
    assert set(result_of(listed_models(fleet.directory, aliases))) == {"tiny", "plain"}
    assert listed_model("claude-opus", fleet.directory, aliases)[0].id == "tiny"
    assert listed_model("claude-*", fleet.directory, aliases) is None
    assert listed_model("gpt", fleet.directory, aliases) is None
    assert listed_model("claude-opus", fleet.directory, aliases_to("tiny", "claude-*", hidden=True)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[models]]\nname = "a*b*"\ntargets = [{ model = "x" }]',
         "models[0].name: 'a*b*' has several *: a single * stands for any characters"),
        ('[[models]]\nname = "a*"\nfallbacks = ["x"]', "models[0]: 'a*' stands for many names, so that it needs targets"),
        ('[[models]]\nname = "a"\ntargets = [{ model = "x*" }]',
         "models[0]: 'x*' has a *, and a request goes to one model: only names of [[models]] have it"),
        ('[[external_routes]]\nmodel_name = "gpt-*"\napi_base = "http://h/v1"',
         ("external_routes[0].model_name: 'gpt-*' has a *: give the route a plain name, and that name as target to a name"
          " with * in [[models]]")),
        ('[[security.keys]]\nname = "k"\nkey_env = "K"\nmodels = ["a*"]',
         "security.keys[0].models: 'a*' has a *, and no name of [[models]] is written so"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused(text, words):
    """Each mistake with its path."""
    with pytest.raises(Exit) as caught:
        configuration.parse(text, "x.toml")
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [words]
