"""The playground with real engines: a stream of each, side by side, a picture, and the other kinds of models."""

import re
import struct
import zlib

import pytest
from playwright.sync_api import expect
from support.programs import ROOT
from support.real_engines import LOAD_S, Deployment, worker_table

pytestmark = pytest.mark.engine
KNOWN = {"max_model_len": 512, "enforce_eager": True}
SIDE_PX = 84


def picture():
    """Return a square PNG of one colour."""

    def piece(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", SIDE_PX, SIDE_PX, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((200, 30, 90)) * SIDE_PX) * SIDE_PX
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(rows)) + piece(b"IEND", b"")


def opened(directory, model, *others, **arguments):
    """Start a gateway with vLLM's worker `tiny-0` and others, which are [engine, kind, name]."""
    more = [line for engine, kind, name in others for line in worker_table(engine, kind, name, **KNOWN)]
    deployment = Deployment("vllm", model, directory, more=more, **{**KNOWN, **arguments})
    try:
        deployment.wait()
        for _, _, name in others:
            deployment.program.wait_until_ready(f"{name}-0", LOAD_S)
        yield deployment
    finally:
        deployment.end()


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A chat model of each engine."""
    yield from opened(tmp_path_factory.mktemp("chats"), "chat", ("sglang", "chat", "other"))


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A chat model that takes pictures."""
    env = {"PYTHONPATH": str(ROOT / ".build/torchvision")}
    yield from opened(tmp_path_factory.mktemp("vision"), "vision", env=env, max_model_len=2048)


@pytest.fixture(scope="module")
def comparers(tmp_path_factory):
    """A model for embeddings, and one that reranks."""
    yield from opened(tmp_path_factory.mktemp("comparers"), "embedding", ("vllm", "reranker", "ranker"))


def visit(page, site, path):
    page.goto(f"{site.url}/console/#/{path}")
    page.wait_for_selector("[data-connection=live]")


def answer(page, side=1):
    return page.locator(f"[aria-label='Side {side}'] .by-model").last


def test_both_engines_side_by_side(chats, page):
    """Each answers in its own stream, with the tokens that it counted and its worker's name; the seed gives it again."""
    visit(page, chats, "playground?model=tiny")
    page.get_by_role("button", name="Compare with another").click()
    page.get_by_label("Model 2").select_option("other")
    page.locator(".settings-card summary").click()
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("Tell me a story.")
    page.get_by_role("button", name="Send", exact=True).click()
    for side, worker in ((1, "tiny-0"), (2, "other-0")):
        expect(answer(page, side)).to_have_attribute("data-state", "done")
        expect(answer(page, side)).to_contain_text("20 tokens")
        expect(answer(page, side)).not_to_contain_text("≈")
        expect(answer(page, side).get_by_role("link", name=worker)).to_be_visible()
        expect(answer(page, side)).to_contain_text("It was cut off")


def test_stop_reaches_the_engine(chats, page):
    """The engine ends the answer that nobody waits for."""
    visit(page, chats, "playground?model=tiny")
    page.locator(".settings-card summary").click()
    page.get_by_role("textbox", name=re.compile("^More")).fill('{"ignore_eos": true}')
    page.get_by_label("Message", exact=True).fill("Tell me a long story.")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page).locator(".md")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(answer(page)).to_have_attribute("data-state", "stopped")
    chats.program.until(lambda: chats.running() == 0)


def test_a_picture(vision, page):
    """The model takes it and answers."""
    visit(page, vision, "playground?model=tiny")
    page.locator(".settings-card summary").click()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Pictures", exact=True).set_input_files(
        {"name": "red.png", "mimeType": "image/png", "buffer": picture()}
    )
    expect(page.locator(".composer .picture")).to_have_count(1)
    page.get_by_label("Message", exact=True).fill("What is this?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(answer(page)).to_have_attribute("data-state", "done")
    expect(answer(page)).to_contain_text("8 tokens")


def test_embeddings_and_rerank(comparers, page):
    """A text is nearest to itself, and ranked texts are all there."""
    visit(page, comparers, "playground/embeddings?model=tiny")
    page.get_by_label("Texts").fill("one text\nanother text\none text")
    page.get_by_role("button", name="Compare 3 texts").click()
    cells = page.get_by_role("table", name="Cosines").locator("td")
    expect(cells).to_have_count(9)
    values = [float(text) for text in cells.all_inner_texts()]
    assert values[0] == values[2] == pytest.approx(1, abs=0.002)
    assert values[1] < values[2]
    visit(page, comparers, "playground/rerank?model=ranker")
    page.get_by_role("button", name="Rank 3 texts").click()
    expect(page.get_by_role("table", name="Ranked texts").locator("tbody tr")).to_have_count(3)
