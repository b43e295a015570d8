"""Parameters for external upstreams: what LiteLLM's `drop_params` means, and nothing else touched."""

import copy
import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ichat.config.openai_params import KNOWN, check_paths
from ichat.errors import ApiError
from ichat.http.request_body import read_json_body
from ichat.proxy.drop_params import SUPPORTED, ParamRules


async def result(rules, body, *, gated=True):
    """Return the body that the upstream gets, and what was dropped."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read, _ = await read_json_body(raw, ())
    changes = rules.plan(dict(await read.values(rules.names)), gated=gated)
    out = (await read.edited(changes.replace, changes.drop)).data
    assert bool(changes.replace or changes.drop) == (out != raw)
    assert await concerns(rules, raw) or out == raw
    return json.loads(out), list(changes.dropped)


async def concerns(rules, raw):
    read, _ = await read_json_body(raw, ())
    return not rules.names.isdisjoint(read.names)


async def refusal(rules, body):
    with pytest.raises(ApiError) as caught:
        await result(rules, body)
    assert await concerns(rules, json.dumps(body).encode() if isinstance(body, dict) else body)
    return caught.value


def test_an_unknown_upstream_gets_all_but_five_parameters():
    """All but five of OpenAI's parameters go to an upstream of which nothing is known."""
    assert len(KNOWN) == 35
    assert KNOWN - SUPPORTED == {
        "reasoning_effort", "verbosity", "thinking", "context_management", "include_server_side_tool_invocations",
    }  # fmt: skip
    assert SUPPORTED < KNOWN


async def test_unsupported_parameters_are_refused_by_all_their_names():
    """Who sends what the upstream does not have learns all of it at once, and what the operator can do."""
    error = await refusal(ParamRules(), {"model": "m", "verbosity": "low", "top_p": 1, "reasoning_effort": "low"})
    assert (error.status, error.code, error.kind, error.param) == (
        400, "unsupported_parameter", "invalid_request_error", "verbosity",
    )  # fmt: skip
    for words in ("`verbosity`, `reasoning_effort`", "drop_params = true", "allowed_openai_params"):
        assert words in error.message
    assert "top_p" not in error.message


async def test_unsupported_parameters_are_dropped_where_the_operator_says_so():
    """With drop_params, what is not supported goes away and everything else stays."""
    body = {"model": "m", "verbosity": "low", "custom": {"a": [1]}, "thinking": {}, "top_p": 0.5}
    assert await result(ParamRules(drop_params=True), body) == (
        {"model": "m", "custom": {"a": [1]}, "top_p": 0.5},
        ["verbosity", "thinking"],
    )


async def test_unknown_parameters_pass():
    """What is none of OpenAI's parameters goes to the upstream as it is, whatever the rules are."""
    body = {"model": "m", "messages": [], "top_k": 3, "min_p": 0.1, "chat_template_kwargs": {"x": None}, "input": ["a"]}
    for rules in (ParamRules(), ParamRules(drop_params=True), ParamRules(supported_openai_params=[])):
        assert await result(rules, body) == (body, [])


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"verbosity":null}', {}),
        (b'{"verbosity": null , "a":null}', {"a": None}),
        (b'{"top_p":null}', {"top_p": None}),
        (b'{"verbosity":"low","verbosity":null}', {}),
    ],
)
@pytest.mark.parametrize("drop_params", [True, False])
async def test_null_is_not_passed(body, left, drop_params):
    """A parameter that is null is never a reason to refuse: it goes where it is not supported, and stays where it is."""
    assert (await result(ParamRules(drop_params=drop_params), body))[0] == left


async def test_the_last_of_several_counts():
    """Where a parameter is there twice, its last value decides, and both are dropped."""
    body = b'{"verbosity":null,"verbosity":"low"}'
    assert (await refusal(ParamRules(), body)).param == "verbosity"
    assert await result(ParamRules(drop_params=True), body) == ({}, ["verbosity"])


@pytest.mark.parametrize("drop_params", [True, False])
async def test_parameters_that_every_upstream_gets_pass(drop_params):
    """user, stream, stream_options, and n where it is 1, pass even where they are not supported."""
    rules = ParamRules(drop_params=drop_params, supported_openai_params=["top_p"])
    body = {"user": "u", "stream": True, "stream_options": {"include_usage": True}, "n": 1, "top_p": 1}
    assert await result(rules, body) == (body, [])


@pytest.mark.parametrize("n", [2, 0, 10, 11, True, "1", [1]])
async def test_another_n_is_unsupported(n):
    """n passes only as 1 where it is not supported."""
    rules = ParamRules(supported_openai_params=["top_p"])
    assert (await refusal(rules, {"n": n})).param == "n"
    assert await result(attrs.evolve(rules, drop_params=True), {"n": n}) == ({}, ["n"])


async def test_the_operators_list_takes_the_place_of_ours():
    """supported_openai_params is all that is supported, allowed_openai_params adds to either list."""
    body = {"temperature": 1, "thinking": 1, "seed": 1}
    assert (await refusal(ParamRules(supported_openai_params=["temperature", "thinking"]), body)).param == "seed"
    assert (await refusal(ParamRules(supported_openai_params=[]), body)).param == "temperature"
    assert (await refusal(ParamRules(), body)).param == "thinking"
    for rules in (
        ParamRules(supported_openai_params=["temperature", "thinking"], allowed_openai_params=["seed"]),
        ParamRules(allowed_openai_params=["thinking"]),
    ):
        assert await result(rules, body) == (body, [])


async def test_additional_drop_params_are_dropped_and_never_refused():
    """additional_drop_params comes first: it beats the gate and what is allowed, and takes any name, known or not."""
    rules = ParamRules(
        additional_drop_params=["thinking", "top_k", "user", "absent"], allowed_openai_params=["thinking", "user"]
    )
    body = {"thinking": 1, "top_k": None, "user": "u", "top_p": 1}
    assert await result(rules, body) == ({"top_p": 1}, ["thinking", "top_k", "user"])
    assert (await refusal(rules, {**body, "verbosity": 1})).param == "verbosity"
    rules = ParamRules(additional_drop_params=["thinking", "verbosity"])
    assert await result(rules, {"thinking": 1, "verbosity": None}) == ({}, ["thinking", "verbosity"])


async def test_other_routes_have_no_gate():
    """Where the gate does not apply, only additional_drop_params does, names and paths."""
    rules = ParamRules(additional_drop_params=["top_k", "a.b"])
    body = {"thinking": 1, "verbosity": None, "top_k": 1, "a": {"b": 1, "c": 2}}
    assert await result(rules, body, gated=False) == (
        {"thinking": 1, "verbosity": None, "a": {"c": 2}},
        ["top_k", "a.b"],
    )


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("a.b", {"a": {"b": 1, "c": 2}}, {"a": {"c": 2}}),
        ("a.b", {"a": {"b": 1}}, {"a": {}}),
        ("a.b.c", {"a": {"b": {"c": {"c": 1}}, "c": 1}}, {"a": {"b": {}, "c": 1}}),
        ("a[*].x", {"a": [{"x": 1}, {"y": 1}, 3, [{"x": 1}], {"x": 2, "y": 2}]}, {"a": [{}, {"y": 1}, 3, [{"x": 1}], {"y": 2}]}),
        ("a[0].x", {"a": [{"x": 1}, {"x": 2}]}, {"a": [{}, {"x": 2}]}),
        ("a[1].x", {"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}, {}]}),
        ("a[*][*].x", {"a": [[{"x": 1}], [], [{"x": 1}, {"x": 2}]]}, {"a": [[{}], [], [{}, {}]]}),
        ("a[*].b[0].c", {"a": [{"b": [{"c": 1}, {"c": 2}]}]}, {"a": [{"b": [{}, {"c": 2}]}]}),
        ("a.0.x", {"a": {"0": {"x": 1}}}, {"a": {"0": {}}}),
        ("tools[*].function.strict", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
         {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)  # fmt: skip
async def test_paths_reach_into_members(path, before, after):
    """A path takes away the names at its end, and leaves what they stood in, even if that is empty then."""
    check_paths([path])
    rules = ParamRules(additional_drop_params=[path])
    assert await result(rules, {**before, "z": 1}) == ({**after, "z": 1}, [path])


@pytest.mark.parametrize(
    "path", ["a.b", "a[0].b", "a[*].b", "a.b.c", "a[0][1].b", "a[999999999].b", "a[*][*].b", "a.0.b"]
)
@pytest.mark.parametrize(
    "text",
    ["1", '"b"', "null", "[]", "{}", '["b"]', "[[]]", '{"c": {"b": 1}, "0": 1}', '[{"c": 1.50}]', "[1, [2]]", '{"\\u0062c": 1e2}'],
)  # fmt: skip
async def test_a_path_that_leads_nowhere_changes_nothing(path, text):
    """Where a path is missing or of another type, the value stays byte for byte as it was."""
    body = b'{ "a": %b , "z":1}' % text.encode()
    assert await result(ParamRules(additional_drop_params=[path]), body) == (json.loads(body), [])


async def test_only_the_member_with_a_path_is_written_again():
    """A path costs its own member its spelling, and no other."""
    body = b'{ "a" : {"b":1,"c":1.50} , "k":1.50,"u":"\\u00e9" }'
    read, _ = await read_json_body(body, ())
    changes = ParamRules(additional_drop_params=["a.b"]).plan(dict(await read.values(("a",))), gated=True)
    assert (await read.edited(changes.replace)).data == b'{ "a" : {"c": 1.5} , "k":1.50,"u":"\\u00e9" }'


async def test_several_paths_into_one_member_all_apply():
    """Paths come last, one after the other, and not into what is dropped as a whole."""
    rules = ParamRules(
        drop_params=True, additional_drop_params=["a.b", "t", "a.c.d", "t.x", "a.no", "thinking.x", "tools[*].x"]
    )
    body = {"a": {"b": 1, "c": {"d": 1}, "e": 1}, "t": {"x": 1}, "thinking": {"x": 1}, "tools": [{"x": 1, "y": 1}]}
    assert await result(rules, body) == (
        {"a": {"c": {}, "e": 1}, "tools": [{"y": 1}]},
        ["t", "thinking", "a.b", "a.c.d", "tools[*].x"],
    )


@pytest.mark.parametrize("value", [b"[1,]", b'{"b":tru}', b'"\xff"', b"[" * 10_000 + b"]" * 10_000])
async def test_a_member_with_a_path_must_be_json(value):
    """Only where a path goes into a member is it parsed: then what is not JSON is a 400, else the upstream's business."""
    changes = ParamRules(additional_drop_params=["z.b"]).plan({"a": value}, gated=True)
    assert (changes.replace, changes.drop) == ({}, frozenset())
    with pytest.raises(ApiError, match="`a`") as caught:
        ParamRules(additional_drop_params=["a.b"]).plan({"a": value}, gated=True)
    assert (caught.value.status, caught.value.param) == (400, "a")


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "a.", ".a", "a..b", "a[]", "a[", "a]", "[0].a", "[*]", "a[*]", "a[0]", "a.b[*]", "a[-1].b", "a[x].b",
        "a[*]b", "a[0]b.c", "a[**].b", "a[1_0].b", "a[1.5].b", "a b", " a", "a ", "a\n", "a. b", "a[ 0].b", "a[0].", "a[*].[0].b",
        "a[1234567890].b", "a.[0].b", "a[\u0661].b",
    ],
)  # fmt: skip
def test_malformed_paths_are_found_beforehand(path):
    """A path that could not be followed, or ends in an element, is named in the message; its neighbours are not."""
    with pytest.raises(ValueError, match="must be names, or paths") as caught:
        check_paths(["good", path, "a.b[0][*].c-d_e"])
    assert str(caught.value).endswith(f"not {path!r}")
    assert "good" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b'{"thin\\u006bing":1}', b'{"\\u00fc":1}', '{"ü":1}'.encode(), b'{"a\\/b":1}', b'{"q":{"x":1}}', b'{"v":"%b","thinking":1}' % (b"x" * 2**20)]
)  # fmt: skip
async def test_no_spelling_hides_a_parameter(body):
    """A body that rules have something to do with is never taken for one that they do not concern."""
    rules = ParamRules(additional_drop_params=["ü", "a/b", "thinking", "q.x"], supported_openai_params=KNOWN)
    assert await concerns(rules, body)
    if len(body) < 100:
        assert (await result(rules, body))[1]


async def test_rules_without_names_concern_nothing():
    """Where all is supported and nothing dropped, and where no name is there, a body need not be scanned."""
    assert not ParamRules(supported_openai_params=KNOWN).names
    assert ParamRules(supported_openai_params=KNOWN, additional_drop_params=["top_k"]).names == {"top_k"}


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.integers(0, 3) | st.none() | st.just("a"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=15,
)
STEPS = st.lists(NAMES.map(".".__add__) | st.sampled_from(["[*]", "[0]", "[1]"]), max_size=4).map("".join)


def without(value, steps):
    """Take a path out of a value, by the book."""
    step, *rest = steps
    if isinstance(step, str):
        if isinstance(value, dict) and step in value:
            if rest:
                without(value[step], rest)
            else:
                del value[step]
    elif isinstance(value, list):
        for index, element in enumerate(value):
            if step in (None, index):
                without(element, rest)


@given(st.dictionaries(NAMES, VALUES), st.lists(st.tuples(NAMES, STEPS, NAMES), max_size=3))
async def test_paths_mean_what_the_book_says(body, parts):
    """Whatever the paths and the body are, what is left is what taking out the paths one by one leaves."""
    paths = [f"{first}{middle}.{last}" for first, middle, last in parts]
    check_paths(paths)
    expected = copy.deepcopy(body)
    for path in paths:
        words = path.replace("[", ".[").replace("]", "").split(".")
        without(expected, [w if w[0] != "[" else None if w == "[*" else int(w[1:]) for w in words])
    assert (await result(ParamRules(additional_drop_params=paths), body))[0] == expected


PARAMS = st.sampled_from([*sorted(KNOWN), "model", "top_k"])
SOME = st.lists(PARAMS, max_size=8)


@given(
    st.dictionaries(PARAMS, st.sampled_from([None, 0, 1, 2, "x"])), st.booleans(), SOME, SOME, st.none() | SOME, st.booleans()
)  # fmt: skip
async def test_the_gate_means_what_litellm_means(body, drop_params, additional, allowed, supported, gated):
    """Whatever the rules are, each parameter is passed, dropped or refused as LiteLLM would."""
    rules = ParamRules(drop_params, additional, allowed, supported)
    has = {*(SUPPORTED if supported is None else supported), *allowed}
    left = {name: value for name, value in body.items() if name not in additional}
    unsupported = {name: value for name, value in left.items() if gated and name in KNOWN and name not in has}
    exempt = {"user", "stream", "stream_options"} | ({"n"} if left.get("n") == 1 else set())
    passed = [name for name, value in unsupported.items() if value is not None and name not in exempt]
    if passed and not drop_params:
        error = await refusal(rules, body)
        assert error.param == passed[0]
        assert error.message.count("`") == 2 * len(passed)
        return
    gone = {*passed, *(name for name, value in unsupported.items() if value is None)}
    expected = {name: value for name, value in left.items() if name not in gone}
    assert (await result(rules, body, gated=gated))[0] == expected
