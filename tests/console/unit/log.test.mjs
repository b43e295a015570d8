// The lines of a log: their colours, and where the lines before them end.

import assert from "node:assert/strict";
import { test } from "node:test";
import { partsOf, SHOWN_MAX } from "console/ansi.js";
import { beginOf } from "console/pages/log/pages.js";

test("colours become classes, until they are reset", () => {
  assert.deepEqual(partsOf("a \x1b[1;31mred\x1b[39m bold\x1b[0m \x1b[92mgreen"), [
    { text: "a ", look: "" },
    { text: "red", look: "ansi-red ansi-bold" },
    { text: " bold", look: "ansi-bold" },
    { text: " ", look: "" },
    { text: "green", look: "ansi-green" },
  ]);
  assert.deepEqual(partsOf("\x1b[38;5;1mone\x1b[38;2;1;2;3mtwo\x1b[2mthree\x1b[48;5;31mfour"), [
    { text: "one", look: "ansi-red" },
    { text: "two", look: "ansi-red" },
    { text: "three", look: "ansi-red ansi-dim" },
    { text: "four", look: "ansi-red ansi-dim" },
  ]);
});

test("nothing else of a terminal is obeyed", () => {
  const hostile = "\x1b[2Ja\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x1b[?25l\x00\x07\u202egnp\u2066.exe\x1b";
  const text = partsOf(hostile)
    .map((part) => part.text)
    .join("");
  assert.equal(text, "abc\\x00\\x07\\u202egnp\\u2066.exe\\x1b");
  assert.deepEqual(partsOf("<b>\ttab</b>"), [{ text: "<b>\ttab</b>", look: "" }]);
});

test("a long line is cut", () => {
  const [{ text }] = partsOf("x".repeat(10_000));
  assert.equal(text, `${"x".repeat(SHOWN_MAX)} … ${10_000 - SHOWN_MAX} characters more`);
});

test("the lines before begin at the first time, less the lines that have it", () => {
  const lines = [{ time: "" }, { time: "1" }, { time: "1" }, { time: "2" }, { time: "1" }];
  assert.deepEqual(beginOf(lines), { before: "1", known: "2" });
  assert.deepEqual(beginOf(lines.slice(4)), { before: "1", known: "1" });
  assert.deepEqual(beginOf([]), {});
});
