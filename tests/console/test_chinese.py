"""The console in Chinese: chosen by the browser's language or by the switch in the header, on every page."""

import json
import re

import pytest
from playwright.sync_api import expect
from support.console_state import PAGES, busy_cluster, busy_requests, finished

NAMES = (
    "Worker", "Token", "Claude Code", "Codex", "Continue", "Open WebUI", "OpenAI SDK", "OpenAI", "SGLang", "vLLM",
    "Python", "UTC", "NVIDIA", "Ray", "ichat.toml", "Shift", "Enter", "Esc", "JSON", "CSV", "CUDA", "NAME",
    "unix", "top_p", "top_k", "max_tokens", "curl", "iChat", "pip install openai", "localhost", "auto", "external", "GPU", "CPU", "API", "KV", "ID",
)  # fmt: skip
"""Names and abbreviations that Chinese texts have, too."""
GIVEN = (
    "id", "worker_id", "model_name", "model", "alias", "name", "key", "client", "worker", "machine", "host", "backend",
    "error", "own_id", "path", "method", "trace_id", "detail", "shadow", "longer",
)  # fmt: skip
"""What an answer has by these names is shown as it is; its other single words are words of the API."""
UNITS = ("min", "ms", "KiB", "MiB", "GiB", "TiB")
LEFT_OUT = "code, pre, textarea, .mono, .settings-list, .argument, .lines, kbd, bdi, [lang]:not(html)"
"""Code, settings and lines of logs have words of their own. A badge of a state has the API's word in its title."""
TEXTS = """([leftOut]) => {
  const found = [document.title];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
    if (!element || element.closest("script, style, noscript") || element.closest(leftOut)) continue;
    if (node.nodeType === Node.TEXT_NODE) found.push(node.data);
    else for (const name of ["title", "aria-label", "placeholder", "alt", "data-title"])
      if (element.hasAttribute(name) && !element.matches(".badge")) found.push(element.getAttribute(name));
  }
  return found.map((text) => text.trim()).filter((text) => /[A-Za-z]{2}/.test(text));
}"""


@pytest.fixture
def locale():
    return "zh-CN"


def words_in(value):
    """Return the texts of a gateway's answer that pages show as they are: names, and its own sentences."""
    if isinstance(value, dict):
        return {
            text
            for name, one in value.items()
            for text in (words_in(one) if name in GIVEN or not isinstance(one, str) or " " in one else ())
        }
    if isinstance(value, list):
        return {text for one in value for text in words_in(one)}
    return {value} if isinstance(value, str) else set()


def english_in(texts, known):
    """Return the texts with English words that are no names and no units, and none of the gateway's."""
    patterns = sorted({*known, *NAMES, *UNITS}, key=len, reverse=True)
    gone = re.compile("|".join(re.escape(one) for one in patterns if len(one) > 1))
    found = []
    for text in texts:
        rest = gone.sub(" ", re.sub(r"\S*[/_~=@.]\S*|https?:\S+", " ", gone.sub(" ", text)))
        if re.search(r"[A-Za-z]{2,}", rest):
            found.append(text)
    return found


def test_no_page_has_english_words(open_page, page, tmp_path):
    """Besides names, units, code, and the gateway's own sentences."""
    answer = {
        "model": "embed", "policy": "prefix_aware", "rule": "spill", "chosen": "embed-0", "waiting": 2, "reason": "",
        "alias": None, "plan": [{"model": "embed", "share": 0.5, "place": None, "worker": None, "reason": None}],
        "candidates": [
            {"worker_id": "embed-0", "in_flight": 1, "in_flight_max": 8, "chosen": True, "overloaded": True, "why_not": None}
        ],
    }  # fmt: skip
    page.route("**/v1/admin/route", lambda route: route.fulfill(json=answer))
    known = words_in([busy_cluster(), busy_requests(), finished(1), finished(2, status=502, error="upstream_failed")])
    found = []

    def look(where):
        texts = page.evaluate(TEXTS, [LEFT_OUT])
        found.extend(f"{where}: {text}" for text in english_in(texts, known))

    for path in (*PAGES, "models?connect=llama-70b", "playground/completion", "playground/embeddings", "orders"):
        open_page(path)
        expect(page.locator("main h1").first).to_be_visible()
        look(path)
    for path, button in (("models", ".row-actions .button:last-child"), ("keys", ".button.primary")):
        open_page(path)
        page.locator(button).first.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        look(f"{path}, dialog")
        page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    look("keyboard")
    assert not found, "\n".join(dict.fromkeys(found))


def test_an_answer_and_its_dialogs_are_chinese(open_page, page):
    """Figures, details, code, and the scoreboard of two answers."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": "你好"}}]}] * 2
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"prompt_tokens": 80, "completion_tokens": 41, "prompt_tokens_details": {"cached_tokens": 40}}
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in (*chunks, end, {"choices": [], "usage": usage}))
    told_by = {
        "x-ichat-worker": "llama-70b-0", "x-ichat-model": "llama-70b", "x-ichat-attempts": "2",
        "x-ichat-prefix": "40/80", "x-ichat-overhead-ms": "1.2", "x-ichat-dropped": "top_k", "x-request-id": "req-0001",
        "content-type": "text/event-stream",
    }  # fmt: skip
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"{body}data: [DONE]\n\n", headers=told_by))
    known = words_in([busy_cluster(), usage]) | {"req-0001", "length", "curl"}
    open_page("playground?model=llama-70b")
    page.get_by_role("heading", name="参数").click()
    page.get_by_role("button", name="与另一个模型对比").click()
    page.get_by_label("消息", exact=True).fill("1")
    page.keyboard.press("Enter")
    expect(page.locator(".said[data-state=done]")).to_have_count(2)
    expect(page.locator(".play-figures").first).to_contain_text("提示词 80，其中缓存 40")
    expect(page.locator(".said[data-state=done]").first).to_contain_text("回答被截断")
    found = english_in(page.evaluate(TEXTS, [LEFT_OUT]), known)
    for name in ("详情", "代码"):
        page.get_by_role("button", name=name).first.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        found += english_in(page.evaluate(TEXTS, [LEFT_OUT]), known)
        page.keyboard.press("Escape")
    assert not found, "\n".join(dict.fromkeys(found))


def test_the_welcome_page_is_chinese(make_site, page):
    """A gateway without models says in Chinese how to start the first."""
    make_site().open(page)
    expect(page.locator("main h1")).to_have_text("欢迎")
    expect(page.locator("main h2").last).to_contain_text("其他机器")
    assert not english_in(page.evaluate(TEXTS, [LEFT_OUT]), {"vllm", "sglang"})


def test_the_switch_is_kept(make_site, page):
    """It shows the other language by its own name; a choice outlives the tab, and wins over the browser's language."""
    site = make_site()
    site.open(page)
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    page.get_by_role("button", name="English").click()
    expect(page.locator("main h1")).to_have_text("Welcome")
    expect(page.locator("html")).to_have_attribute("lang", "en")
    other = site.open(page.context.new_page())
    expect(other.locator("main h1")).to_have_text("Welcome")
    other.get_by_role("button", name="中文").click()
    expect(other.locator("main h1")).to_have_text("欢迎")


@pytest.mark.parametrize("locale", ["de-DE"])
def test_english_loads_no_other_texts(make_site, page):
    """A browser in a language that the console does not have gets English, at no further cost."""
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    make_site().open(page)
    expect(page.locator("main h1")).to_have_text("Welcome")
    assert any("texts.js" in url for url in asked)
    assert not [url for url in asked if "texts.zh" in url]


def test_a_console_without_the_file_of_texts_is_english(make_site, page):
    """A file that does not arrive keeps nobody from the console."""
    page.context.watched.allowed.append("texts.zh.js")
    page.route("**/texts.zh.js", lambda route: route.abort())
    make_site().open(page)
    expect(page.locator("main h1")).to_have_text("Welcome")


def test_a_missing_file_is_said_in_chinese(make_site, page):
    """The message is there although the texts are not."""
    page.context.watched.allowed += ["app.js", "ERR_"]
    page.route("**/app.js", lambda route: route.abort())
    page.goto(make_site().url)
    expect(page.locator("#app")).to_contain_text("控制台的一个文件无法加载")
