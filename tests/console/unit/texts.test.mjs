// Every text of the console has its Chinese text, with the same holes; and nothing else is in the file of texts.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

globalThis.localStorage = { getItem: (name) => (name === "ichat.language" ? "zh" : null) };
const { languageOf, t, tParts, tPlural } = await import("console/texts.js");
const { default: texts } = await import("console/texts.zh.js");

const CONSOLE = new URL("../../../ichat/console/", import.meta.url);
/** The functions that look a text up, with the position of the text among their arguments. */
const LOOKS_UP = { t: 0, tParts: 0, tPlural: 2, count: 2 };
/** It defines the first three. */
const OWN = "texts.js";
/** Its function `count` passes the texts of its callers on. */
const PASSES_ON = "ui/format.js";
const CLOSES = { "(": ")", "[": "]", "{": "}" };

/** Return the end of the string or template that begins at `from`. */
function endOfString(source, from) {
  let at = from + 1;
  while (source[at] !== source[from]) {
    if (source[at] === "\\") at += 1;
    else if (source[from] === "`" && source.startsWith("${", at)) at = argumentsAt(source, at + 2, "}").end;
    at += 1;
  }
  return at;
}

/** Return the arguments of a call whose first begins at `from`, as source, and where they end. */
function argumentsAt(source, from, closing = ")") {
  const found = [];
  let begin = from;
  let at = from;
  const open = [];
  for (; open.length || source[at] !== closing; at += 1) {
    const character = source[at];
    if ("\"'`".includes(character)) at = endOfString(source, at);
    else if (character in CLOSES) open.push(CLOSES[character]);
    else if (character === open.at(-1)) open.pop();
    else if (character === "," && !open.length) {
      found.push(source.slice(begin, at).trim());
      begin = at + 1;
    }
  }
  return { found: [...found, source.slice(begin, at).trim()], end: at };
}

/** Return the text of a literal, or of several with + between them; null: the source is none. */
function textOf(source = "") {
  const parts = [];
  for (let at = 0; at < source.length; at = /^\s*\+\s*|^/.exec(source.slice(at))[0].length + at) {
    if (!"\"'".includes(source[at])) return null;
    const end = endOfString(source, at) + 1;
    const inner = source.slice(at + 1, end - 1);
    parts.push(JSON.parse(`"${source[at] === "'" ? inner.replaceAll("\\'", "'").replaceAll('"', '\\"') : inner}"`));
    at = end;
  }
  return parts.length ? parts.join("") : null;
}

/** Return the texts that the console looks up, with their files. */
function keysOf() {
  const keys = new Map();
  const names = readdirSync(CONSOLE, { recursive: true }).map((name) => name.replaceAll("\\", "/"));
  for (const name of names.filter((one) => one.endsWith(".js") && !one.startsWith("vendor/") && one !== OWN)) {
    const source = readFileSync(new URL(name, CONSOLE), "utf8");
    for (const call of source.matchAll(/(?<![\w.$])(t|tParts|tPlural|count)\(/g)) {
      const { found } = argumentsAt(source, call.index + call[0].length);
      const key = textOf(found[LOOKS_UP[call[1]]]);
      if (key === null && name === PASSES_ON && call[1] === "tPlural") continue;
      assert.notEqual(key, null, `${name}: ${call[1]}(${found.join(", ")}) needs its text as a literal`);
      keys.set(key, name);
    }
  }
  return keys;
}

const holesOf = (text) => [...text.matchAll(/\{(\w+)\}/g)].map(([, name]) => name).sort();

test("every text has a Chinese text", () => {
  const missing = [...keysOf()].filter(([key]) => !Object.hasOwn(texts, key));
  assert.deepEqual(missing, []);
});

test("every Chinese text is looked up somewhere", () => {
  const keys = keysOf();
  assert.deepEqual(
    Object.keys(texts).filter((key) => !keys.has(key)),
    [],
  );
});

test("a Chinese text has the holes of its English text", () => {
  const differ = Object.entries(texts).filter(([key, text]) => `${holesOf(key)}` !== `${holesOf(text)}` || !text);
  assert.deepEqual(differ, []);
});

test("the language is the chosen language, else the first of the browser's that the console has", () => {
  assert.equal(languageOf(null, ["de-DE", "zh-CN", "en"]), "zh");
  assert.equal(languageOf(null, ["en-GB", "zh-CN"]), "en");
  assert.equal(languageOf(null, ["fr"]), "en");
  assert.equal(languageOf(null, []), "en");
  assert.equal(languageOf("en", ["zh-CN"]), "en");
  assert.equal(languageOf("zh", ["en"]), "zh");
  assert.equal(languageOf("constructor", ["zh-TW"]), "zh");
});

test("texts are Chinese, with their values; a text without a translation stays English", () => {
  assert.equal(t("Workers"), "Worker");
  assert.equal(t("{id} is {state}", { id: "{state}", state: "就绪" }), "{state}：就绪");
  assert.equal(t("No such text as {this}", { this: 1 }), "No such text as 1");
  const node = { type: "code" };
  assert.deepEqual(tParts("{name} returned", { name: node }), ["", node, " 返回"]);
  assert.equal(tPlural(1, "{count} worker", "{count} workers", { count: 1 }), "1 个 Worker");
});
