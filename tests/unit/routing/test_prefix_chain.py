"""The chains of requests: what is shared, and what is not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ichat.http.request_body import RequestBody
from ichat.protocol.prefixes import BOUNDARIES
from ichat.routing.prefix_chain import chain_of, sums_of

DIGESTS = ["3fe4bd7b6c206e71", "f9c6e45344222c46", "3d70ca435ecbeabf"]
CHAT = b"/v1/chat/completions"


def chain(members, path=CHAT, model="m", **options):
    return chain_of(sums_of(path, json.dumps(members, **options).encode(), tuple(members)), model)


def shared(one, other):
    """How many bytes two chains have in common."""
    count = sum(a == b for a, b in zip(one.digests, other.digests, strict=False))
    assert one.digests[:count] == other.digests[:count]
    return BOUNDARIES[count - 1] if count else 0


def messages(*texts):
    return [{"role": "user", "content": text} for text in texts]


def test_a_conversation_goes_on():
    """All of a turn that has digests is the beginning of the next one, whatever stands behind the messages."""
    first = chain({"messages": messages("a" * 3000), "model": "m", "max_tokens": 5, "user": "u"})
    next_ = chain({"messages": messages("a" * 3000, "b" * 3000), "model": "m", "max_tokens": 9, "user": "v"})
    assert len(next_.digests) > len(first.digests) == 9
    assert shared(first, next_) == 2560
    assert 3030 <= first.length <= 3050


def test_prompts_that_begin_alike_part_where_they_differ():
    """A byte is seen at the boundary that follows it."""
    one = chain({"prompt": "s" * 2000 + "a" * 2000}, b"/v1/completions")
    other = chain({"prompt": "s" * 2000 + "b" * 2000}, b"/v1/completions")
    assert shared(one, other) == 1792
    assert len(one.digests) == len(other.digests) == 11


@pytest.mark.parametrize(
    "more",
    [{"tools": [{"name": "t"}]}, {"cache_salt": "x"}, {"system": "You are."}, {"instructions": "Do."}],
    ids=lambda more: next(iter(more)),
)
def test_tools_change_all_digests_wherever_they_are_written(more):
    """Tools and the like decide all digests, behind the messages as before them; without them there are others."""
    said = {"messages": messages("a" * 1000), "model": "m"}
    behind, bare = chain({**said, **more}), chain(said)
    assert shared(behind, bare) == 0
    assert shared(behind, chain({**said, **more, "n": 1})) == 1024
    changed = {name: str(value) + "!" for name, value in more.items()}
    assert shared(behind, chain({**said, **changed})) == 0


def test_digests_are_the_same_everywhere():
    """In every gateway, and after a restart: workers report them to all, and a new start learns from them."""
    found = chain({"prompt": "a" * 1000}, b"/v1/completions").digests
    assert [one.hex() for one in found] == DIGESTS


def test_the_order_of_pieces_counts():
    """Two prompts that are made of the same pieces in another order share nothing from there on."""
    one, other, third = ((letter * 256) for letter in "abc")
    bodies = (b'{"prompt":' + "".join(texts).encode() for texts in ((one, other, third), (one, third, other)))
    first, second = (chain_of(sums_of(b"/v1/completions", body, ("prompt",)), "m") for body in bodies)
    assert shared(first, second) == 256
    assert not set(first.digests[1:]) & set(second.digests[1:])


def test_each_model_has_its_own():
    """A prompt of another model shares nothing."""
    said = {"messages": messages("a" * 1000)}
    assert shared(chain(said), chain(said, model="n")) == 0


@pytest.mark.parametrize("path", [CHAT, b"/chat/completions", b"/v1/messages"])
def test_routes_with_messages(path):
    """With or without the prefix of the API's version."""
    assert chain({"messages": messages("a" * 1000)}, path) is not None


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"messages": messages("short")}),
        (CHAT, {"prompt": "a" * 1000}),
        (b"/v1/embeddings", {"input": "a" * 1000}),
        (b"/v1/completions", {"model": "m" * 300, "prompt": "a"}),
    ],
)
def test_short_prompts_and_other_routes_have_no_chain(path, members):
    """Short prompts, routes without one, and bodies that do not have the member."""
    assert sums_of(path, json.dumps(members).encode(), tuple(members)) is None


def test_a_long_prompt_costs_no_more_than_the_last_boundary():
    """The chain ends there, and its length tells of all of it."""
    found = chain({"prompt": "a" * 2_000_000}, b"/v1/completions")
    assert len(found.digests) == len(BOUNDARIES)
    assert found.length > 2_000_000


def test_a_body_is_not_held():
    """A bytearray can be freed and changed as soon as its sums are made."""
    body = bytearray(json.dumps({"messages": messages("a" * 1000), "tools": [1]}).encode())
    assert sums_of(CHAT, body, ("messages", "tools")) is not None
    body.clear()


@pytest.mark.parametrize("ensure_ascii", [True, False], ids=["escaped", "as it is"])
def test_a_name_may_be_any_that_json_has(ensure_ascii):
    """Even if it is no text, as half of a pair: the prompt ends there if it is found, else with the body."""
    written = json.dumps({"messages": messages("a" * 1000), "\ud800": 1}, ensure_ascii=ensure_ascii)
    found = sums_of(CHAT, written.encode("utf-8", "surrogatepass"), ("messages", "\ud800"))
    assert len(found.checksums) == 4


MEMBERS = st.dictionaries(
    st.sampled_from(["tools", "system", "cache_salt", "chat_template_kwargs", "temperature", "user"]),
    st.one_of(st.integers(), st.booleans(), st.text("ab,}] ", max_size=9), st.lists(st.integers(), max_size=3)),
)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=40),
    times=st.integers(7, 2000),
    members=MEMBERS,
    changed=MEMBERS,
    dropped=st.sets(st.sampled_from(["system", "cache_salt", "top_p", "user"])),
)
async def test_the_sums_of_a_body_are_enough_for_each_model_and_edit(text, times, members, changed, dropped):
    """A chain made from the sums of the unchanged body equals the chain of the body that the model gets."""
    said = {"model": "name", **members, "messages": messages(text * times + "." * 256), "stream": True}
    body = RequestBody(json.dumps(said, separators=(",", ":")).encode(), tuple(said))
    values = {name: json.dumps(value).encode() for name, value in changed.items() if name not in dropped}
    sums = sums_of(CHAT, body.data, body.names)
    for model in ("one", "another"):
        sent = await body.edited({**values, "model": json.dumps(model).encode()}, dropped)
        directly = chain_of(sums_of(CHAT, sent.data, sent.names), model)
        from_sums = chain_of(sums, model, tuple(values.items()), tuple(dropped))
        assert (from_sums.length, from_sums.digests) == (directly.length, directly.digests)
