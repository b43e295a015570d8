"""The playground's pure functions: what events make of an answer, and what a conversation is as a request."""

import json

import pytest

from ichat.console.files import read_file

PLACE = "http://console.invalid/console/"
REPLY = """async ({ events, times }) => {
  const { newReply, withEvent, ended, figuresOf, partsOf } = await import("/console/pages/playground/reply.js");
  let reply = newReply(0);
  events.forEach((event, at) => {
    reply = withEvent(reply, typeof event === "string" ? event : JSON.stringify(event), times[at] ?? at * 1000);
  });
  reply = ended(reply, 10_000);
  return { ...reply, figures: figuresOf(reply, 0), parts: partsOf(reply) };
}"""
REQUEST = """async ({ name, given }) => (await import("/console/pages/playground/request.js"))[name](...given)"""
SETTINGS = dict.fromkeys(
    "system temperature top_p top_k max_tokens seed presence_penalty frequency_penalty stop tools tool_choice more".split(),
    "",
)
DONE = "[DONE]"


@pytest.fixture
def loaded(page):
    """A page that can import the console's files; there is no gateway."""

    def answer(route):
        found = read_file(route.request.url.removeprefix(PLACE))
        route.fulfill(body=found.content, content_type=found.content_type)

    page.route(f"{PLACE}**", answer)
    page.goto(f"{PLACE}vendor/LICENSES.txt")
    return page


@pytest.fixture
def reply_of(loaded):
    """Return what these events make of an answer, one a second."""
    return lambda *events, times=(): loaded.evaluate(REPLY, {"events": list(events), "times": list(times)})


@pytest.fixture
def call(loaded):
    """Call a function of request.js."""
    return lambda name, *given: loaded.evaluate(REQUEST, {"name": name, "given": list(given)})


def delta(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def test_what_is_measured(reply_of):
    """The first token is the first content, the rate is of those after it, and the engine's count goes before ours."""
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7,
                                      "prompt_tokens_details": {"cached_tokens": 4}}}  # fmt: skip
    events = [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), usage, DONE]
    reply = reply_of(*events, times=[500, 2000, 4000, 4100, 4200, 4300])
    assert (reply["state"], reply["text"], reply["finish"], reply["error"]) == ("done", "ab", "stop", None)
    assert reply["figures"] == {
        "first_s": 2, "tokens_s": 3, "total_s": 10, "in": 9, "out": 7, "cached": 4, "isEstimate": False,
    }  # fmt: skip
    figures = reply_of(*events[:4], DONE, times=[500, 2000, 4000])["figures"]
    assert (figures["out"], figures["isEstimate"], figures["in"]) == (2, True, None)


def test_other_shapes_of_answers(reply_of):
    """Plain answers, texts to go on with, contents in parts, refusals, and both names of thoughts."""
    message = {"content": [{"type": "text", "text": "x"}, {"type": "other"}], "reasoning": "why"}
    reply = reply_of({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    assert (reply["text"], reply["thoughts"], reply["state"]) == ("x", "why", "done")
    assert reply_of({"choices": [{"index": 0, "text": "y"}]}, DONE)["text"] == "y"
    assert reply_of(delta(refusal="no"), delta(reasoning_content="t"), DONE)["parts"] == ["t", "no"]
    other = {"choices": [{"index": 1, "delta": {"content": "second"}}, {"index": 0, "delta": {"content": "first"}}]}
    assert reply_of(other, DONE)["text"] == "first"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>a</think>\n\nb", ["a", "b"]),
        ("\n<think>\na", ["a", ""]),
        ("x <think>a</think>", ["", "x <think>a</think>"]),
        ("<think></think>b", ["", "b"]),
    ],
)
def test_thoughts_within_the_text(reply_of, text, parts):
    """Only what the text begins with are thoughts; while they are not closed, all of it is."""
    assert reply_of(delta(content=text), DONE)["parts"] == parts


def test_calls_are_put_together(reply_of):
    """Calls come in pieces, several at once, with or without an id and a place."""
    reply = reply_of(
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "g", "arguments": {"y": 1}}}]),
        delta("tool_calls", tool_calls=[{"index": 0, "function": {"arguments": ":2}"}}]),
    )
    assert reply["calls"] == [
        {"id": "a", "name": "f", "arguments": '{"x":2}'}, {"id": "call_1", "name": "g", "arguments": '{"y":1}'},
    ]  # fmt: skip


def test_calls_at_strange_places_are_left_out(reply_of):
    """An upstream may say any index: it costs neither the answer nor the tab."""
    odd = [50_000_000, 128, -1, 1.5, "__proto__", "length", {}]
    calls = [None, 5, *({"index": index, "function": {"name": "f"}} for index in odd)]
    reply = reply_of(delta(content="here"), *(delta(tool_calls=[call]) for call in calls), delta("stop"))
    assert (reply["state"], reply["text"], reply["calls"]) == ("done", "here", [])


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"error": {"message": "The engine died.", "code": 500}}, "The engine died."),
        ({"error": "no"}, "no"),
        ({"object": "error", "message": "old"}, "old"),
        ({"error": {}}, "The engine failed."),
        ("{half", "The stream had an event that is no JSON: {half"),
    ],
)
def test_errors_within_the_stream(reply_of, event, sentence):
    """An error is said in its words, and what came before it stays."""
    reply = reply_of(delta(content="before"), event, DONE)
    assert (reply["state"], reply["text"], reply["error"]["message"]) == ("failed", "before", sentence)


def test_strange_events_break_nothing(reply_of):
    """Numbers, lists, nulls and missing members are no answer, and no exception."""
    odd = [
        1,
        None,
        [],
        "null",
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 5}}]},
    ]
    reply = reply_of(*odd)
    assert (reply["text"], reply["state"]) == ("", "failed")
    assert reply["error"]["message"] == "The stream ended before the answer was whole."


def test_the_roles_take_turns(call):
    """What was not answered is left out with its question, and so is a call without a result."""

    def user(text):
        return {"kind": "user", "text": text, "pictures": []}

    def said(text, calls=()):
        return {"kind": "reply", "reply": {"text": text, "thoughts": "", "calls": list(calls)}}

    one = {"id": "a", "name": "f", "arguments": "{}"}
    found = call("messagesOf", " ", [
        user("1"), said("one"), user("2"), said(""), user("3"), said("", [one]), user("4"), said("", [one]),
        {"kind": "results", "results": [{"id": "a", "name": "f", "content": "r"}]}, said("four"), user("5"),
    ])  # fmt: skip
    assert [(one["role"], one["content"]) for one in found] == [
        ("user", "1"), ("assistant", "one"), ("user", "4"), ("assistant", ""), ("tool", "r"), ("assistant", "four"),
        ("user", "5"),
    ]  # fmt: skip
    assert found[3]["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"max_tokens": "1.5"}, "max_tokens must be a whole number, and is not: 1.5"),
        ({"top_p": "much"}, "top_p must be a number, and is not: much"),
        ({"tools": "[1]"}, 'Tools: each is {"type": "function"'),
        ({"tools": "{"}, "Tools: this is no JSON"),
        ({"more": "[]"}, "More: this is no object."),
    ],
)
def test_a_wrong_parameter_is_named(call, setting, sentence):
    """The sentence names the field and what is wrong with it."""
    with pytest.raises(Exception) as failure:
        call("parametersOf", {**SETTINGS, **setting})
    assert sentence in str(failure.value)


def test_a_program_has_the_same_request(call):
    """Quotes, new lines and other scripts survive, in a shell's words and in Python's."""
    text = 'It\'s "x"\n$HOME `id` \\ ü 語 END\nEND'
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True, "top_k": 1, "x": None}
    curl = call("curlOf", "http://h:1", "/v1/chat/completions", body, True)
    assert '-H "authorization: Bearer $ICHAT_KEY"' in curl
    assert json.loads(curl.split("<<'END'\n", 1)[1].removesuffix("\nEND")) == body
    assert [line for line in curl.splitlines() if line == "END"] == ["END"]
    program = call("pythonOf", "http://h:1", "/v1/chat/completions", body, True)
    asked = {}

    class Client:
        def __init__(self, **given):
            asked["client"] = given
            self.chat = self.completions = self

        def create(self, **given):
            asked["request"] = given
            return []

    source = program.replace("from openai import OpenAI", "").replace('os.environ["ICHAT_KEY"]', '"k"')
    exec(source, {"OpenAI": Client})
    assert asked["client"] == {"base_url": "http://h:1/v1", "api_key": "k"}
    extra = asked["request"].pop("extra_body")
    assert {**asked["request"], **extra} == body


def test_vectors_and_ranks(call):
    """The cosine of nothing is 0; ranks are by score, of whatever shape the answer has."""
    assert call("cosine", [1, 0], [0, 0]) == 0
    assert call("cosine", [1, 1], [-1, -1]) == pytest.approx(-1)
    ranked = call("rankedIn", [{"index": 0, "score": 1}, {"index": 1, "score": 3}], ["a", "b"])
    assert ranked == [{"index": 1, "score": 3, "text": "b"}, {"index": 0, "score": 1, "text": "a"}]
