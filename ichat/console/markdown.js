// Markdown as nodes that can do nothing: a model's text is hostile.

import DOMPurify from "dompurify";
import { Marked } from "marked";
import { useLayoutEffect, useRef } from "preact/hooks";
import { colour } from "./syntax.js";
import { t } from "./texts.js";
import { copyText } from "./ui/basics.js";
import { html } from "./ui/html.js";

const REST_MS = 50;
/** A text is not drawn again for this many times the duration of its last drawing. */
const REST_SHARE = 4;
/** Longer texts are cut into pieces: at fences of code, and between paragraphs. */
const TEXT_MAX = 100_000;
/** The length of such a piece; a longer paragraph is shown as it is. */
const PIECE_MAX = 20_000;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)/;
const TOO_LONG = `<p><em>${t("The next part is too long to format, and is shown as text.")}</em></p>`;
/** A paragraph with more characters keeps the parser busy for seconds. */
const MARKS_MAX = 2000;
const INDENT_MAX = 40;
/** This many lines may be indented by more than that: deep lists keep the parser busy for seconds. */
const INDENTED_MAX = 150;
const PICTURE = /^data:image\/(?:png|jpeg|gif|webp|avif);base64,[A-Za-z0-9+/]+={0,2}$/;
const HARMLESS_TAG = /^<\/?(?:br|sub|sup|kbd|b|i|em|strong|u|s|mark)\s*\/?>$/i;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const RULES = {
  ALLOWED_TAGS: [
    "p",
    "br",
    "hr",
    "h3",
    "h4",
    "h5",
    "h6",
    "strong",
    "em",
    "b",
    "i",
    "u",
    "s",
    "del",
    "mark",
    "sub",
    "sup",
    "kbd",
    "code",
    "pre",
    "blockquote",
    "ul",
    "ol",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "a",
    "img",
  ],
  ALLOWED_ATTR: ["href", "src", "alt", "align", "start", "data-language"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/)/i,
  ADD_URI_SAFE_ATTR: ["align", "start", "data-language"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** @param {string} text */
const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

// Markup in the text is shown as the text that it is, but for tags that only change how words look.
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (HARMLESS_TAG.test(text.trim()) ? text : escaped(text).replaceAll("\n", "<br>")),
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2); // the page has its own headings above
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    code: ({ text, lang }) =>
      `<pre data-language="${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}</code></pre>`,
    image: ({ href, text }) =>
      PICTURE.test(href)
        ? `<img src="${escaped(href)}" alt="${escaped(text)}">`
        : `<a href="${escaped(href)}">${escaped(text ? t("Picture: {text}", { text }) : t("Picture"))}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/**
 * Return the markup of each block of a text. It is not safe: `sanitize` makes it so.
 *
 * @param {string} text
 */
export function blocksOf(text) {
  const blocks = text.length <= TEXT_MAX && isEasy(text) ? parsed(text) : null;
  if (blocks) return blocks;
  return segmentsOf(text).flatMap(({ language, text: part }) => {
    if (language !== null) return [preOf(part, language)];
    return piecesOf(part).flatMap((piece) => {
      const isShort = piece.length <= PIECE_MAX && isEasy(piece);
      return (isShort && parsed(piece)) || [TOO_LONG, preOf(piece, "text")];
    });
  });
}

/**
 * Return the markup of each block of a text that is easy to parse; null if it is nested too deeply.
 *
 * @param {string} text
 */
function parsed(text) {
  try {
    return marked
      .lexer(text)
      .map((token) => marked.parser([token]))
      .filter(Boolean);
  } catch (error) {
    if (error instanceof RangeError) return null;
    throw error;
  }
}

/**
 * Return the markup of a text that is shown as it is.
 *
 * @param {string} text
 * @param {string} language
 */
const preOf = (text, language) => `<pre data-language="${escaped(language)}"><code>${escaped(text)}</code></pre>`;

/**
 * Return the blocks of code of a text and the texts between them (their language is null); without a parser.
 *
 * @param {string} text
 */
function segmentsOf(text) {
  /** @type {{ language: string | null, text: string }[]} */
  const found = [];
  /** @type {string[]} */
  let lines = [];
  /** @type {{ mark: string, language: string } | null} */
  let fence = null;
  const close = () => {
    if (lines.length) found.push({ language: fence ? fence.language : null, text: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const [, mark = "", language = ""] = FENCE.exec(line) ?? [];
    const isEnd = fence && mark.startsWith(fence.mark) && !language;
    if (fence ? !isEnd : !mark) {
      lines.push(line);
      continue;
    }
    close();
    fence = fence ? null : { mark, language };
  }
  close();
  return found;
}

/**
 * Return a text in pieces of whole paragraphs: those that are easy to parse together, every other by itself.
 *
 * @param {string} text
 */
function piecesOf(text) {
  /** @type {string[]} */
  const found = [];
  let isOpen = false;
  for (const paragraph of text.split(/\n\s*\n/)) {
    const isShort = paragraph.length <= PIECE_MAX && isEasy(paragraph);
    const last = found.at(-1) ?? "";
    if (isShort && isOpen && last.length + paragraph.length < PIECE_MAX)
      found[found.length - 1] = `${last}\n\n${paragraph}`;
    else if (paragraph.trim()) found.push(paragraph);
    isOpen = isShort;
  }
  return found;
}

/**
 * Return whether a text can be parsed without a delay that a reader notices.
 *
 * @param {string} text
 */
function isEasy(text) {
  let marks = 0;
  let indented = 0;
  for (const line of text.split("\n")) {
    if (!line.trim()) marks = 0; // also in code: only the parser knows where its code is
    if (line.search(/\S/) > INDENT_MAX) indented += 1;
    marks += line.match(/[_*~]/g)?.length ?? 0;
    if (marks > MARKS_MAX || indented > INDENTED_MAX) return false;
  }
  return true;
}

/**
 * Return a fragment of what markup may have: no script, no style, no form, no name, nothing that asks elsewhere.
 *
 * @param {string} markup
 */
export function sanitize(markup) {
  const fragment = /** @type {DocumentFragment} */ (/** @type {unknown} */ (DOMPurify.sanitize(markup, RULES)));
  for (const link of fragment.querySelectorAll("a")) keepLink(link);
  for (const picture of fragment.querySelectorAll("img")) {
    if (!PICTURE.test(picture.getAttribute("src") ?? "")) picture.replaceWith(`[${picture.alt || t("picture")}]`);
  }
  for (const pre of fragment.querySelectorAll("pre")) frame(pre);
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", "md-table");
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

/**
 * Return a fragment that shows a text in Markdown.
 *
 * @param {string} text
 */
export function render(text) {
  const fragment = document.createDocumentFragment();
  for (const block of blocksOf(text)) fragment.append(sanitize(block));
  return fragment;
}

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {string} name
 */
function element(tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

/**
 * Have a link lead to a web page or a mailbox, in a page of its own, and say where; else leave its text alone.
 *
 * @param {HTMLAnchorElement} link
 */
function keepLink(link) {
  const address = URL.parse(link.getAttribute("href") ?? "");
  if (!address || !SCHEMES.has(address.protocol)) {
    link.replaceWith(...link.childNodes);
    return;
  }
  link.href = address.href;
  link.title = address.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  const host = address.protocol === "mailto:" ? address.pathname : address.host;
  const text = link.textContent.trim();
  const isSaid = [host, address.href, address.href.replace(/\/$/, ""), `${host}${address.pathname}`].includes(text);
  if (!isSaid || address.username) link.append(" ", element("bdi", "md-host", host));
}

/**
 * Put a bar with the language, and a button that copies, above a block of code.
 *
 * @param {HTMLPreElement} pre
 */
function frame(pre) {
  const language = pre.dataset.language ?? "";
  delete pre.dataset.language;
  pre.tabIndex = 0;
  if (language === "text") pre.className = "plain";
  const box = element("div", "md-code");
  const bar = element("div", "md-bar");
  const button = element("button", "button quiet small", t("Copy"));
  button.type = "button";
  button.addEventListener("click", async () => {
    await copyText(pre.textContent);
    button.textContent = t("Copied");
    setTimeout(() => (button.textContent = t("Copy")), 1500);
  });
  bar.append(element("span", "", /^[\w+#.-]{1,24}$/.test(language) ? language : ""), button);
  pre.replaceWith(box);
  box.append(bar, pre);
  if (pre.firstElementChild) colour(pre.firstElementChild, language);
}

/**
 * Draw a text into a place where the blocks `before` are shown; those that are still the same stay.
 *
 * @param {HTMLElement} place
 * @param {string} text
 * @param {string[]} before
 */
function draw(place, text, before) {
  const blocks = blocksOf(text);
  let same = 0;
  while (same < before.length && before[same] === blocks[same]) same += 1;
  while (place.children.length > same) /** @type {Element} */ (place.lastElementChild).remove();
  for (const block of blocks.slice(same)) {
    const box = document.createElement("div");
    box.append(sanitize(block));
    place.append(box);
  }
  return blocks;
}

/**
 * A text in Markdown, which may still grow: it is drawn again at most every 50 ms, and more rarely if drawing is slow.
 *
 * @param {{ text: string }} props
 */
export function Markdown({ text }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const now = useRef({
    blocks: /** @type {string[]} */ ([]),
    text: "",
    timer: 0,
    freeAt: 0,
  }).current;
  now.text = text;
  useLayoutEffect(() => {
    const update = () => {
      const began = performance.now();
      now.timer = 0;
      now.blocks = draw(/** @type {HTMLElement} */ (place.current), now.text, now.blocks);
      const end = performance.now();
      now.freeAt = end + Math.max(REST_MS, (end - began) * REST_SHARE);
    };
    const wait = now.freeAt - performance.now();
    if (wait <= 0) update();
    else now.timer ||= setTimeout(update, wait);
  }, [text]);
  useLayoutEffect(() => () => clearTimeout(now.timer), []);
  return html`<div class="md" dir="auto" ref=${place}></div>`;
}
