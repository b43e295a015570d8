"""The playground in a browser, with models whose answers the tests write: chat, two side by side, and the other parts."""

import base64
import hashlib
import json
import re

import pytest
from playwright.sync_api import expect
from support.scripted_model import ScriptedModel, said

KEY = "an-operators-key"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}


@pytest.fixture
def model():
    """Models `wise` and `brief`, and one for each other part."""
    scripted = ScriptedModel()
    scripted.scripts = {
        "wise": said("The answer ", "is **42**", "."),
        "brief": said("*Forty-two.*"),
        "embedder": {
            "data": [{"index": 1, "embedding": [0, 2]}, {"index": 0, "embedding": [3, 4]}],
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        },
        "ranker": {"results": [{"index": 0, "relevance_score": 0.1}, {"index": 1, "relevance_score": 0.9}]},
    }
    yield scripted
    scripted.close()


@pytest.fixture
def play(make_site, page, model):
    """The playground of a gateway with these models."""
    site = make_site(model.routes(*model.scripts))
    site.open(page, "playground")
    page.get_by_label("Model 1").select_option("wise")
    page.site = site
    return page


def open_parameters(page):
    page.locator(".settings-card summary").click()


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answers(page, side=1):
    return page.locator(f"[aria-label='Side {side}'] .by-model")


def test_a_chat(play, model):
    """The answer comes in Markdown with its figures and who gave it, and the next question has what was said before."""
    say(play, "What is\nit?")
    expect(answers(play)).to_have_attribute("data-state", "done")
    expect(answers(play).locator("strong")).to_have_text("42")
    expect(answers(play)).to_contain_text("first token")
    expect(answers(play)).to_contain_text("3 tokens")
    expect(answers(play)).to_contain_text("12 in the prompt")
    expect(answers(play)).to_contain_text("external:wise")
    say(play, "Sure?")
    expect(answers(play)).to_have_count(2)
    expect(answers(play).last).to_have_attribute("data-state", "done")
    assert model.asked[1]["messages"] == [
        {"role": "user", "content": "What is\nit?"},
        {"role": "assistant", "content": "The answer is **42**."},
        {"role": "user", "content": "Sure?"},
    ]
    assert model.asked[1]["stream_options"] == {"include_usage": True}
    play.get_by_role("button", name="New chat").click()
    expect(answers(play)).to_have_count(0)


def test_the_answer_comes_piece_by_piece_and_can_be_stopped(play, model):
    """What has come is shown while the rest is under way; Stop ends the request, and what has come stays."""
    events = said("Once ", "upon")
    model.scripts["wise"] = [*events[:2], "wait", *events[2:], *[events[2]] * 20_000]
    say(play, "Tell")
    expect(answers(play)).to_contain_text("Once")
    expect(answers(play)).to_contain_text("Answering")
    expect(play.locator(".composer")).to_contain_text("Escape stops the answer; then Enter sends again.")
    play.get_by_role("button", name="Stop").click()
    expect(answers(play)).to_have_attribute("data-state", "stopped")
    expect(answers(play)).to_contain_text("You have stopped it.")
    model.go_on.set()
    assert model.ended.wait(30), "the request goes on at the model"
    model.scripts["wise"] = said("Another one.")
    play.get_by_role("button", name="Regenerate").click()
    expect(answers(play)).to_have_text(re.compile("Another one."))
    assert model.asked[1]["messages"] == [{"role": "user", "content": "Tell"}]


def test_a_conversation_survives_a_reload_and_not_a_lock(play, model):
    """Messages, figures, parameters and the draft are there again; an answer under way is marked as cut off."""
    open_parameters(play)
    play.get_by_label("Temperature").fill("0.5")
    say(play, "What is it?")
    expect(answers(play)).to_have_attribute("data-state", "done")
    events = said("Once ", "upon")
    model.scripts["wise"] = [*events[:2], "wait", *events[2:]]
    say(play, "Tell")
    expect(answers(play).last).to_contain_text("Once")
    play.get_by_label("Message", exact=True).fill("A draft")
    play.reload()
    expect(answers(play)).to_have_count(2)
    expect(answers(play).first.locator("strong")).to_have_text("42")
    expect(answers(play).first).to_contain_text("12 in the prompt")
    expect(answers(play).last).to_contain_text("Once")
    expect(answers(play).last).to_contain_text("The page was loaded anew before the answer was whole.")
    expect(play.get_by_label("Message", exact=True)).to_have_value("A draft")
    expect(play.locator(".settings-card .tab-count")).to_have_text("1")
    model.go_on.set()
    model.scripts["wise"] = said("More.")
    say(play, "And?")
    expect(answers(play)).to_have_count(3)
    expect(answers(play).last).to_contain_text("More.")
    assert [one["content"] for one in model.asked[-1]["messages"][:3]] == [
        "What is it?",
        "The answer is **42**.",
        "Tell",
    ]
    play.get_by_role("button", name="Lock").click()
    play.wait_for_selector("[data-connection]")
    assert "What is it?" not in play.evaluate("JSON.stringify({...sessionStorage})")


def test_the_end_of_a_long_answer_stays_in_sight(play, model):
    """The page follows an answer down to its buttons, unless the reader has scrolled up; the composer hides nothing."""
    bottom = "document.documentElement.scrollHeight - innerHeight - scrollY"
    events = said(*[f"Line {number} with **marks**.\n\n" for number in range(400)])
    half = len(events) // 2
    model.scripts["wise"] = [*events[:half], "wait", *events[half:]]
    say(play, "Tell")
    expect(answers(play)).to_contain_text("Line 100")
    model.go_on.set()
    expect(answers(play)).to_have_attribute("data-state", "done")
    expect(answers(play)).to_contain_text("Line 399")
    play.wait_for_function(f"() => {bottom} < 2")
    composer = play.locator(".composer").bounding_box()
    buttons = answers(play).get_by_role("button", name="Regenerate").bounding_box()
    assert buttons["y"] + buttons["height"] <= composer["y"]
    model.go_on.clear()
    say(play, "Again")
    expect(answers(play).last).to_contain_text("Line 100")
    play.mouse.move(500, 300)
    play.mouse.wheel(0, -1500)
    play.wait_for_function(f"() => {bottom} > 500")
    model.go_on.set()
    expect(answers(play).last).to_have_attribute("data-state", "done")
    assert play.evaluate(bottom) > 500


@pytest.mark.parametrize("height", [600, 1200])
def test_the_composer_stands_at_the_bottom(play, height):
    """Also where nothing is said yet; the parameters are folded, and opened by the keyboard."""
    play.set_viewport_size({"width": 1280, "height": height})
    composer = play.locator(".composer").bounding_box()
    assert 0 <= height - composer["y"] - composer["height"] <= 20
    expect(play.get_by_label("Temperature")).not_to_be_visible()
    play.locator(".settings-card summary").focus()
    play.keyboard.press("Enter")
    expect(play.get_by_label("Temperature")).to_be_visible()
    play.get_by_role("tab", name="Completion").click()
    expect(play.get_by_label("Temperature")).to_be_visible()


def test_an_answer_that_is_too_long_to_format_is_readable(play, model):
    """Code stays code, paragraphs stay paragraphs, and only the part that is too long is plain text, with a word why."""
    code = "\n".join(f"print({number})" for number in range(20_000))
    model.scripts["wise"] = said(f"# Title\n\n```python\n{code}\n```\n\n**after**\n\n" + "word " * 10_000)
    say(play, "Tell")
    expect(answers(play)).to_have_attribute("data-state", "done")
    expect(answers(play).locator("h3")).to_have_text("Title")
    expect(answers(play).locator(".md-code").first).to_contain_text("pythonCopy")
    expect(answers(play).locator(".md-code pre").first).to_contain_text("print(19999)")
    expect(answers(play).locator("strong")).to_have_text("after")
    expect(answers(play)).to_contain_text("too long to format, and is shown as text")
    expect(answers(play).locator("pre.plain")).to_contain_text("word word")
    assert play.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_answer_goes_on_while_another_page_is_shown(play, model):
    """Who looks at the requests meanwhile finds the answer when coming back."""
    events = said("one ", "two")
    model.scripts["wise"] = [*events[:2], "wait", *events[2:]]
    say(play, "Count")
    expect(answers(play)).to_contain_text("one")
    play.get_by_role("link", name="Models & names").click()
    expect(play.locator("main h1")).to_have_text("Models & names")
    model.go_on.set()
    play.get_by_role("link", name="Playground").click()
    expect(answers(play)).to_contain_text("one two")
    expect(answers(play)).to_have_attribute("data-state", "done")


def test_parameters_are_sent_as_they_are_typed(play, model):
    """An empty field is not sent, a wrong one is said before anything is, and any other member can be added."""
    open_parameters(play)
    play.get_by_label("System prompt").fill("Be brief.")
    play.get_by_label("Temperature").fill("warm")
    play.get_by_label("Message", exact=True).fill("Hi")
    expect(play.locator(".composer")).to_contain_text("temperature must be a number, and is not: warm")
    expect(play.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    play.get_by_label("Temperature").fill("0.5")
    play.get_by_label("Max tokens").fill("20")
    play.get_by_label("Stop at").fill("END\n\\n\\n")
    play.get_by_role("textbox", name=re.compile("^More")).fill('{"chat_template_kwargs": {"enable_thinking": false}}')
    say(play, "Hi")
    expect(answers(play)).to_have_attribute("data-state", "done")
    assert model.asked == [{
        "model": "wise", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "max_tokens": 20,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stop": ["END", "\n\n"], "chat_template_kwargs": {"enable_thinking": False},
    }]  # fmt: skip


def test_an_earlier_message_is_edited(play, model):
    """The conversation goes on from there; what came after it is gone."""
    say(play, "One")
    expect(answers(play)).to_have_attribute("data-state", "done")
    say(play, "Two")
    expect(answers(play).nth(1)).to_have_attribute("data-state", "done")
    play.get_by_role("button", name="Edit").first.click()
    play.get_by_label("Your message").fill("Another")
    play.get_by_role("button", name="Send anew").click()
    expect(answers(play)).to_have_count(1)
    expect(answers(play)).to_have_attribute("data-state", "done")
    assert model.asked[-1]["messages"] == [{"role": "user", "content": "Another"}]


def test_thoughts_are_folded(play, model):
    """Thoughts stand apart, whether the engine tells them apart or not; the next request has none of them."""
    events = said("Yes.", reasoning_content="Let me think")
    model.scripts["wise"] = [*events[:2], "wait", *events[2:]]
    say(play, "A")
    expect(answers(play).get_by_role("status")).to_contain_text("Thinking · ")
    model.go_on.set()
    expect(answers(play).locator("details")).to_contain_text("Let me think")
    expect(answers(play).locator(".md")).to_have_text("Yes.")
    model.scripts["wise"] = said("<think>", "Hmm, ", "</think>\n\n", "No.")
    say(play, "B")
    expect(answers(play).last.locator("details")).to_contain_text("Hmm,")
    expect(answers(play).last.locator(".md")).to_have_text("No.")
    say(play, "C")
    expect(answers(play)).to_have_count(3)
    expect(answers(play).last.locator(".md")).to_have_text("No.")
    assert [one["content"] for one in model.asked[-1]["messages"]] == ["A", "Yes.", "B", "No.", "C"]


def test_tools(play, model):
    """The model's call is shown, its result is typed, and goes back with the call."""
    pieces = [{**CALL}, *({"index": 0, "function": {"arguments": part}} for part in ('{"city"', ': "Bern"}'))]
    events = said(finish="tool_calls")
    calls = [{"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]} for piece in pieces]
    model.scripts["wise"] = lambda body: (
        said("Sunny.") if len(body["messages"]) > 2 else [*events[:1], *calls, *events[1:]]
    )
    open_parameters(play)
    play.get_by_role("button", name="Put in an example").click()
    say(play, "Weather in Bern?")
    expect(play.locator("[data-call=get_weather]")).to_contain_text('"city": "Bern"')
    play.get_by_label("What get_weather returns").fill('{"sky": "clear"}')
    play.get_by_role("button", name="Send the result").click()
    expect(answers(play).last).to_contain_text("Sunny.")
    assert model.asked[0]["tools"][0]["function"]["name"] == "get_weather"
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    assert model.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'},
    ]
    play.get_by_role("textbox", name=re.compile("^Tools")).fill('{"name": ')
    expect(play.locator(".settings-card")).to_contain_text("Tools: this is no JSON")


def test_pictures_are_sent_with_a_message(play, model):
    """A chosen and a pasted picture are sent before the text; what is none is said."""
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}
    chooser = play.get_by_label("Pictures", exact=True)
    chooser.set_input_files(picture)
    expect(play.locator(".composer .picture")).to_have_count(1)
    chooser.set_input_files({"name": "x.pdf", "mimeType": "application/pdf", "buffer": b"x"})
    expect(play.locator(".toast")).to_contain_text("x.pdf is no picture")
    play.get_by_label("Message", exact=True).evaluate(
        """(field, data) => {
      const transfer = new DataTransfer();
      const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
      transfer.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
      field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }));
    }""",
        base64.b64encode(PIXEL).decode(),
    )
    expect(play.locator(".composer .picture")).to_have_count(2)
    play.get_by_label("Take picture 2 away").click()
    say(play, "What is this?")
    expect(answers(play)).to_have_attribute("data-state", "done")
    url = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert model.asked[0]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"},
    ]  # fmt: skip
    expect(play.locator(".conversation .picture img")).to_be_visible()


def test_two_models_side_by_side(play, model):
    """Both get the same prompt, each has its own answer, and one can be asked again or taken away alone."""
    play.get_by_role("button", name="Compare with another").click()
    play.get_by_label("Model 2").select_option("brief")
    say(play, "The answer?")
    expect(answers(play, 1)).to_contain_text("42")
    expect(answers(play, 2).locator("em")).to_have_text("Forty-two.")
    assert sorted(one["model"] for one in model.asked) == ["brief", "wise"]
    assert model.asked[0]["messages"] == model.asked[1]["messages"]
    answers(play, 2).get_by_role("button", name="Regenerate").click()
    expect(answers(play, 2)).to_have_attribute("data-state", "done")
    assert [one["model"] for one in model.asked[2:]] == ["brief"]
    play.get_by_label("Take side 1 away").click()
    expect(play.get_by_label("Model 1")).to_have_value("brief")
    expect(answers(play, 1)).to_contain_text("Forty-two.")


def test_a_scoreboard_compares_two_answers_and_is_a_picture(play, model):
    """Both answers' figures stand side by side with a winner; a failed answer loses, and messages won are counted."""
    play.context.watched.allowed.append("status of 500")
    play.add_init_script("delete Navigator.prototype.clipboard")
    play.reload()
    play.get_by_label("Model 1").select_option("wise")
    play.get_by_role("button", name="Compare with another").click()
    play.get_by_label("Model 2").select_option("brief")
    board = play.get_by_role("table", name="Scoreboard")
    expect(board).to_have_count(0)
    model.scripts["brief"] = {"status": 500}
    say(play, "The answer?")
    expect(answers(play, 2)).to_have_attribute("data-state", "failed")
    expect(answers(play, 1)).to_have_attribute("data-state", "done")
    expect(board.get_by_role("row")).to_have_count(5)
    expect(board.get_by_role("columnheader")).to_have_text(["wise", "Figure", "brief"])
    expect(play.locator(".card", has=board)).to_contain_text("wise wins.")
    expect(board.get_by_role("row", name=re.compile("Whole answer"))).not_to_contain_text("better")
    say(play, "Again?")
    expect(play.locator(".card", has=board)).to_contain_text("Messages won: 2 to 0.")
    copy = play.get_by_role("button", name="Copy as a picture")
    copy.focus()
    with play.expect_download() as saved:
        play.keyboard.press("Enter")
    picture = saved.value.path().read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20]) == 1920


def test_a_second_model_has_a_conversation_of_its_own(play, model):
    """What the first has answered never stands under the other's name, and the other is not told of it."""
    say(play, "The answer?")
    expect(answers(play, 1)).to_have_attribute("data-state", "done")
    play.get_by_role("button", name="Compare with another").click()
    play.get_by_label("Model 2").select_option("brief")
    expect(answers(play, 2)).to_have_count(0)
    expect(play.get_by_role("region", name="Side 2")).to_contain_text("is in this tab alone")
    say(play, "And yours?")
    expect(answers(play, 2)).to_have_attribute("data-state", "done")
    expect(answers(play, 1).last).to_have_attribute("data-state", "done")
    sizes = {one["model"]: len(one["messages"]) for one in model.asked}
    assert sizes == {"wise": 3, "brief": 1}


def test_a_plain_answer(play, model):
    """Without a stream the answer comes at once, with its figures and who gave it."""
    open_parameters(play)
    play.get_by_role("textbox", name=re.compile("^More")).fill('{"stream": false}')
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {"index": 0, "message": {"role": "assistant", "content": "At once."}, "finish_reason": "stop"}
    model.scripts["wise"] = {"choices": [choice], "usage": usage}
    say(play, "Hi")
    expect(answers(play)).to_contain_text("At once.")
    expect(answers(play)).to_contain_text("2 tokens")
    expect(answers(play)).to_contain_text("external:wise")
    assert model.asked == [{"model": "wise", "messages": [{"role": "user", "content": "Hi"}], "stream": False}]


def test_a_model_is_tried_from_the_list(play, model):
    """The list of models leads here with the model chosen."""
    play.get_by_role("link", name="Models & names").click()
    play.locator("tr[data-key=brief]").get_by_role("link", name="Try it").click()
    expect(play.get_by_label("Model 1")).to_have_value("brief")


def test_an_error_is_said_in_its_words(play, model):
    """A refusal, and a stream that breaks off: the sentence is shown, and one can try again."""
    play.context.watched.allowed.append("400")
    message = "This model's maximum context length is 4096 tokens."
    model.scripts["wise"] = lambda _: {"status": 400, "error": {"message": message, "code": "context_length_exceeded"}}
    say(play, "Long")
    expect(answers(play).get_by_role("alert")).to_contain_text(message)
    expect(answers(play)).to_have_attribute("data-state", "failed")
    model.scripts["wise"] = said("Half")[:2]
    play.get_by_role("button", name="Try again").click()
    expect(answers(play)).to_contain_text("Half")
    expect(answers(play).get_by_role("alert")).to_be_visible()
    model.scripts["wise"] = said("Whole", finish="length")
    play.get_by_role("button", name="Try again").click()
    expect(answers(play)).to_contain_text("It was cut off")
    assert len(model.asked[-1]["messages"]) == 1


def test_the_same_from_a_program(play, model):
    """The command and the program say what was sent; who answered is told, and where the request would go now."""
    open_parameters(play)
    play.get_by_label("top_k").fill("5")
    say(play, "It's")
    expect(answers(play)).to_have_attribute("data-state", "done")
    play.get_by_role("button", name="Code").click()
    curl = play.locator("dialog pre").inner_text()
    assert curl.startswith(f"curl -N 'http://127.0.0.1:{play.site.program.port}/v1/chat/completions'")
    sent = json.loads(curl.split("<<'END'\n")[1].removesuffix("\nEND"))
    assert sent == model.asked[0]
    play.get_by_role("tab", name="Python").click()
    program = play.locator("dialog pre").inner_text()
    compile(program, "program", "exec")
    assert 'extra_body={\n        "top_k": 5,\n    }' in program
    assert "stream=True" in program
    play.keyboard.press("Escape")
    play.get_by_role("button", name="Details").click()
    expect(play.locator("dialog")).to_contain_text("external:wise")
    play.get_by_role("button", name="Route of this request").click()
    expect(play.locator("dialog")).to_contain_text("Route of a request for wise")
    expect(play.locator("dialog tbody")).to_contain_text("chosen")
    play.keyboard.press("Escape")
    play.get_by_role("button", name="Details").click()
    play.locator("dialog").get_by_role("link").click()
    expect(play.locator("main h1")).to_have_text("A request")
    expect(play.locator("main")).to_contain_text("external:wise")


def test_completion(play, model):
    """A text is gone on with; what came can be taken over and gone on with again."""
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in (" upon", " a")]
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    model.scripts["wise"] = [*chunks, end, "[DONE]"]
    play.get_by_role("tab", name="Completion").click()
    play.get_by_role("combobox", name="Model", exact=True).select_option("wise")
    play.get_by_label("Text to go on with").fill("Once")
    play.get_by_role("button", name="Go on").click()
    expect(play.locator(".by-model .said-text")).to_have_text("Once upon a")
    expect(play.locator(".by-model")).to_contain_text("≈ 2 tokens")
    play.get_by_role("button", name="Take it over").click()
    expect(play.get_by_label("Text to go on with")).to_have_value("Once upon a")
    assert model.asked[0] == {
        "model": "wise", "prompt": "Once", "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_embeddings_are_compared(play, model):
    """The cosines of all pairs, in the order of the texts."""
    play.get_by_role("tab", name="Embeddings").click()
    play.get_by_role("combobox", name="Model", exact=True).select_option("embedder")
    play.get_by_label("Texts").fill("one\n\ntwo")
    play.get_by_role("button", name="Compare 2 texts").click()
    table = play.get_by_role("table", name="Cosines")
    expect(table.locator("tbody tr").first).to_contain_text("one")
    assert table.locator("td").all_inner_texts() == ["1.000", "0.800", "0.800", "1.000"]
    assert model.asked == [{"model": "embedder", "input": ["one", "two"], "encoding_format": "float"}]
    expect(play.locator("main")).to_contain_text("external:embedder")


def test_an_answer_that_cannot_be_drawn_leaves_the_console(play):
    """The page says that it cannot be shown; all others go on."""
    play.route("**/v1/embeddings", lambda route: route.fulfill(json={"data": [{"index": 0, "embedding": None}]}))
    play.get_by_role("tab", name="Embeddings").click()
    play.get_by_role("combobox", name="Model", exact=True).select_option("embedder")
    play.get_by_role("button", name="Compare 3 texts").click()
    expect(play.get_by_role("alert")).to_contain_text("This page cannot be shown")
    play.get_by_role("link", name="Workers").click()
    expect(play.locator("main h1")).to_have_text("Workers")


def test_rerank(play, model):
    """The texts, best first; a model that cannot says so."""
    play.context.watched.allowed.append("400")
    play.get_by_role("tab", name="Rerank").click()
    play.get_by_role("combobox", name="Model", exact=True).select_option("ranker")
    play.get_by_label("Question").fill("Cats?")
    play.get_by_label("Texts").fill("Dogs bark.\nCats purr.")
    play.get_by_role("button", name="Rank 2 texts").click()
    rows = play.get_by_role("table", name="Ranked texts").locator("tbody tr")
    expect(rows.nth(0)).to_contain_text("Cats purr.")
    expect(rows.nth(1)).to_contain_text("Dogs bark.")
    model.scripts["ranker"] = {"status": 400, "error": {"message": "This model does not rank.", "code": "x"}}
    play.get_by_role("button", name="Rank 2 texts").click()
    expect(play.get_by_role("alert")).to_contain_text("This model does not rank.")


def test_a_clients_key_is_asked_for_or_made(make_site, page, model):
    """Where clients have keys, the page takes one, or makes one for an hour; it stays in this tab."""
    page.context.watched.allowed.append("401")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    client = hashlib.sha256(b"a-clients-key").hexdigest()
    site = make_site(
        f'[security]\nadmin_key_hash = "sha256:{digest}"\n[[security.keys]]\nname = "team"\n'
        f'key_hash = "sha256:{client}"\n' + model.routes("wise")
    )
    page.goto(f"{site.url}#/playground")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Open").click()
    field = page.get_by_label("Client's key")
    expect(field).to_be_visible()
    say(page, "Hi")
    expect(answers(page).get_by_role("alert")).to_contain_text("A client's key is given at the top of this page.")
    page.get_by_role("button", name="Make one for an hour").click()
    expect(field).not_to_have_value("")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_contain_text("42")
    key = field.input_value()
    asked = (
        "(key) => fetch('../v1/admin/keys', { headers: { authorization: `Bearer ${key}` } }).then((one) => one.json())"
    )
    answer = page.evaluate(asked, KEY)
    [made] = [one for one in answer["keys"] if one["source"] == "api"]
    assert made["name"].startswith("console-")
    assert 3500 < made["expires_at"] - made["made_at"] <= 3600
    page.reload()
    expect(field).to_have_value(key)
    assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
    page.get_by_role("button", name="Forget it").click()
    expect(field).to_have_value("")


def test_a_hostile_answer_does_nothing(play, model):
    """A script, a picture of elsewhere and a link that runs something, through the real chat and piece by piece."""
    hostile = (
        "<img src=x onerror='window.ran=1'><script>window.ran=1</script>\n\n[click](javascript:window.ran=1) "
        "![x](http://192.0.2.1/x.png)\n\n```html\n<script>window.ran=1</script>\n```\n<svg onload=window.ran=1>"
    )
    call = {
        **CALL,
        "function": {"name": "<img src=x onerror=window.ran=1>", "arguments": "<script>window.ran=1</script>"},
    }
    model.scripts["wise"] = said(*hostile, reasoning_content=hostile, tool_calls=[call])
    say(play, "<script>window.ran=1</script>")
    expect(answers(play)).to_have_attribute("data-state", "done")
    expect(answers(play)).to_contain_text("<script>window.ran=1</script>")
    expect(answers(play).locator("img, script, svg.x, iframe")).to_have_count(0)
    for link in answers(play).locator(".md a").all():
        assert link.get_attribute("href").startswith("http")
    play.wait_for_timeout(300)
    assert play.evaluate("window.ran ?? null") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_fits_every_screen(play, model, scheme):
    """From a telephone to a large screen nothing sticks out, with long words, wide code and two sides."""
    play.emulate_media(color_scheme=scheme)
    wide = "word" * 80
    model.scripts["wise"] = said(f"{wide}\n\n```\n{wide}\n```\n\n| a | b |\n|---|---|\n| {wide} | x |")
    play.get_by_role("button", name="Compare with another").click()
    say(play, wide)
    expect(answers(play, 1)).to_have_attribute("data-state", "done")
    for width in (360, 768, 1280, 1920):
        play.set_viewport_size({"width": width, "height": 800})
        play.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    for control in play.locator("main").locator("button:visible, a:visible, input:visible, select:visible").all():
        name = control.evaluate(
            "one => one.ariaLabel || one.innerText || one.title || [...(one.labels ?? [])].map(l => l.innerText).join()"
        )
        assert name.strip(), control.evaluate("one => one.outerHTML")


def test_without_a_model_it_says_what_to_do(make_site, page):
    """A gateway that has no model yet leads to the launch form."""
    make_site().open(page, "playground")
    expect(page.locator("main")).to_contain_text("There is no model yet")
    page.get_by_role("link", name="Launch a worker").click()
    expect(page.locator("main h1")).to_have_text("Launch a worker")
