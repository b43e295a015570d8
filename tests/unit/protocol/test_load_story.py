"""A load in words."""

import attrs
import pytest

from ichat.protocol.load_story import LoadStory, StoryPhase, read_story, story_of, summary_of

IMPORT, WEIGHTS = StoryPhase("importing vLLM", 9.2, 8.4), StoryPhase("loading weights", 12.9, 14.2, "3 of 8 shards")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (LoadStory(4.9, None, [StoryPhase("importing vLLM", 4.9)]), "importing vLLM, 4 s"),
        (LoadStory(0.2, 60.0, [StoryPhase("checking", 0.2)]), "checking, 0 s; about 60 s left"),
        (
            LoadStory(22.1, 61.5, [IMPORT, WEIGHTS]),
            "loading weights 3 of 8 shards, 12 s (last time 14 s); about 40 s left",
        ),
        (
            LoadStory(70.0, 60.0, [StoryPhase("warming up", 40.0, 0.4)]),
            "warming up, 40 s (last time under 1 s); it is slower than usual",
        ),
        (LoadStory(0.0, 3.0, []), "about 3 s left"),
    ],
)
def test_a_load_under_way_in_words(load, words):
    """It says what the load does now, how far it is, what it took last time, and what is left."""
    assert story_of(load) == words


def test_a_load_that_has_ended_in_words():
    """Each phase that took a while is named with its seconds."""
    load = LoadStory(22.4, 20.0, [StoryPhase("checking", 0.3), IMPORT, WEIGHTS])
    assert summary_of(load) == "22 s: importing vLLM 9 s, loading weights 13 s"
    assert summary_of(LoadStory(0.3, None, [StoryPhase("waking up", 0.3)])) == "under 1 s"


def test_a_sent_load_is_read_back():
    """A command reads the load that the gateway's views have."""
    load = LoadStory(22.1, 61.5, [IMPORT, WEIGHTS])
    assert read_story(attrs.asdict(load)) == load


@pytest.mark.parametrize(
    "told",
    [
        None, [], {}, {"elapsed_s": 1, "phases": []}, {"elapsed_s": "1", "phases": [{"name": "x", "seconds": 1}]},
        {"elapsed_s": 1, "phases": [{"name": 1, "seconds": 1}, {"name": "x", "seconds": -1}, 7]},
    ],
)  # fmt: skip
def test_another_form_is_no_load(told):
    """A gateway of another version is no reason for a command to fail."""
    assert read_story(told) is None
