"""Names of models in the configuration: what may be said, and LiteLLM's words for it."""

import attrs
import pytest

from ichat.config import load as configuration
from ichat.config.aliases import aliases_of, retries_of
from ichat.config.litellm import GeneralSettings, LitellmSettings, RouterSettings
from ichat.config.models import REASONS, AliasConfig, TargetConfig
from ichat.errors import Exit


def problems_of(text):
    with pytest.raises(Exit) as caught:
        configuration.parse(text, "x.toml")
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def named(text):
    return {one.name: one for one in aliases_of(configuration.parse(text, "x.toml"))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('targets = [{ model = "a", weight = 0 }]', "models[0].targets: at least a single weight must be more than 0"),
        ('targets = [{ model = "a", weight = -1 }]', "models[0].targets[0].weight: must be from 0 to 1e+06, not -1"),
        ('targets = [{ model = "a" }, { model = "a" }]', "models[0].targets: name each model once"),
        ("targets = [{ weight = 1 }]", "models[0].targets[0].model: is missing"),
        ('targets = ["a"]', 'models[0].targets[0]: must be a table, not "a"'),
        ('fallback_on = ["404"]', f"models[0].fallback_on: '404' is no reason to go on: these are {', '.join(REASONS)}"),
        ('fallbacks = [""]', "models[0].fallbacks: must be 1 to 256 printable characters"),
        ('set = { model = "b" }', "models[0].set: 'model' is the subject of the request, and stays as the client sent it"),
        ("set = { stream = true }", "models[0].set: 'stream' is the subject of the request, and stays as the client sent it"),
        ('set = { seed = 1 }\ndrop = ["seed"]',
         "models[0]: seed is in set and in drop: a member that is set replaces the client's"),
        ('drop = ["messages"]', "models[0].drop: 'messages' is the subject of the request, and stays as the client sent it"),
        ('drop = ["a\\"b"]', "models[0].drop: 'a\"b' is no name of a member: letters, digits and any of . _ $ -"),
        ("set = { a = 2000-01-01 }", "models[0].set: must hold no dates or times: JSON has none, write them as strings"),
        ("set = { a = nan }", "models[0].set: must hold no inf and no nan: JSON has none"),
        ('shadow = { model = "a", share = 2 }', "models[0].shadow.share: must be from 0 to 1, not 2"),
        ("fallback = []", "models[0].fallback: unknown key; did you mean fallbacks?"),
    ],
)  # fmt: skip
def test_one_clear_sentence(text, words):
    """Each mistake has its path and says what is right."""
    assert problems_of(f'[[models]]\nname = "n"\n{text}') == [words]


def test_names_lead_to_models():
    """A name for other models is no target, fallback, longer model or shadow; one that stands for itself is."""
    other = '[[models]]\nname = "other"\ntargets = [{ model = "x" }]\n'
    words = "models[1]: 'other' is a name for other models: name one of those"
    for text in (
        'targets = [{ model = "other" }]',
        'fallbacks = ["other"]',
        'longer = "other"',
        'shadow = { model = "other" }',
    ):
        assert problems_of(f'{other}[[models]]\nname = "n"\n{text}') == [words]
    configuration.parse(
        '[[models]]\nname = "a"\nfallbacks = ["b"]\n[[models]]\nname = "b"\nfallbacks = ["a"]\n', "x.toml"
    )
    hidden = 'name = "a"\ntargets = [{ model = "a", weight = 9 }, { model = "b" }]\n'
    configuration.parse(f"[[models]]\n{hidden}", "x.toml")
    assert problems_of('[[models]]\nname = "n"\n[[models]]\nname = "n"') == ["models[1].name: 'n' is taken"]


def test_litellms_settings_mean_the_same():
    """Fallbacks, longer models, aliases and retries, in either table; the router's win."""
    found = named("""
        [litellm_settings]
        fallbacks = [{ "a" = ["b", "c"], "x" = ["b"] }, { "gpt" = ["c"] }]
        context_window_fallbacks = [{ "a" = ["long"] }]
        num_retries = 3
        [router_settings]
        model_group_alias = { "gpt" = "a", "old" = { model = "b", hidden = true } }
        context_window_fallbacks = [{ "x" = ["long"] }]
        [[external_routes]]
        model_name = "cloud"
        api_base = "https://there/v1"
        [[models]]
        name = "mine"
    """)
    asked = {"unreachable", "not_ready", "queue_full", "circuit", "5xx", "429", "timeout"}
    assert {name for name, one in found.items() if set(one.fallback_on) == asked} == {"a", "x", "gpt", "old", "cloud"}
    plain = {name: attrs.evolve(one, fallback_on=[]) for name, one in found.items()}
    assert plain == {
        "mine": AliasConfig("mine", fallback_on=[]),
        "a": AliasConfig("a", fallbacks=["b", "c"], fallback_on=[]),
        "x": AliasConfig("x", fallbacks=["b"], longer="long", fallback_on=[]),
        "gpt": AliasConfig("gpt", [TargetConfig("a")], ["c"], fallback_on=[]),
        "old": AliasConfig("old", [TargetConfig("b")], hidden=True, fallback_on=[]),
        "cloud": AliasConfig("cloud", fallback_on=[]),
    }
    assert (
        retries_of(configuration.parse("[litellm_settings]\nnum_retries = 3\n[router_settings]\nnum_retries = 0", "x"))
        == 0
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[litellm_settings]\nfallbacks = ["a"]', 'must be like [{ "a" = ["b", "c"] }], a model and those that follow it'),
        ('[litellm_settings]\nfallbacks = [{ "a" = "b" }]', 'must be like [{ "a" = ["b", "c"] }], a model and those that follow it'),
        ('[litellm_settings]\nfallbacks = [{ "a" = [1] }]', "must have names of models as strings"),
        ('[litellm_settings]\nfallbacks = [{ "*" = ["a"] }]', '"*" is not read: name each model that has fallbacks'),
        ('[router_settings]\nfallbacks = [{ "a" = ["b"] }, { "a" = ["c"] }]', "'a' is named twice"),
        ('[router_settings]\ncontext_window_fallbacks = [{ "a" = ["b", "c"] }]',
         "give 'a' a single model, with the longest context"),
        ('[router_settings]\nmodel_group_alias = { "a" = 3 }', "'a' must be a model's name, or like { model = \"b\", hidden = true }"),
        ("[router_settings]\nnum_retries = -1", "must be from 0 to 100, not -1"),
    ],
)  # fmt: skip
def test_unknown_members_of_litellms_tables_are_refused(text, words):
    """The shapes are LiteLLM's own; what is not read is told."""
    (problem,) = problems_of(text)
    assert problem.partition(": ")[2] == words


def test_a_name_is_in_one_place():
    """LiteLLM's words and a table for the same name could contradict each other; so could a name for other models."""
    taken = problems_of('[[models]]\nname = "n"\n[litellm_settings]\nfallbacks = [{ "n" = ["a"] }]')
    assert taken == ["models[0].name: litellm_settings or router_settings have 'n' too: name it once"]
    other = problems_of(
        '[litellm_settings]\nfallbacks = [{ "n" = ["a"] }]\n[router_settings]\nmodel_group_alias = { "a" = "b" }'
    )
    assert other == ["router_settings or litellm_settings, n: 'a' is a name for other models: name one of those"]


@pytest.mark.parametrize(
    ("table", "section"),
    [("litellm_settings", LitellmSettings), ("router_settings", RouterSettings), ("general_settings", GeneralSettings)],
)
def test_litellms_other_keys_are_answered(table, section):
    """Each known one says what to use instead, and is none that is read."""
    assert not section.ELSEWHERE.keys() & {field.name for field in attrs.fields(section)}
    found = problems_of(f"[{table}]\n" + "\n".join(f"{key} = 1" for key in section.ELSEWHERE))
    assert found == [f"{table}.{key}: is not read here: {section.ELSEWHERE[key]}" for key in sorted(section.ELSEWHERE)]
    (plain,) = problems_of(f"[{table}]\nno_such_key = 1")
    assert plain.startswith(f"{table}.no_such_key: unknown key")


def test_litellms_whole_tables_are_answered_too():
    """Someone who brings a whole file is told where each part belongs."""
    found = problems_of("model_list = []\n[environment_variables]\n")
    assert [line.partition(": ")[0] for line in found] == ["environment_variables", "model_list"]
    assert "use [[external_routes]] and [[managed_workers]]" in found[1]
