// The chat that stays with its tab, and long answers in blocks.

import assert from "node:assert/strict";
import { test } from "node:test";
import { blocksOf } from "console/markdown.js";
import { lastIdIn, packed, unpacked } from "console/pages/playground/kept_chat.js";
import { newReply, withEvent } from "console/pages/playground/reply.js";

const word = JSON.stringify({ choices: [{ index: 0, delta: { content: "half" } }] });

function chat({ pictures = [], text = "Hi" } = {}) {
  const reply = withEvent(newReply(5), word, 9);
  const entries = [
    { id: 7, kind: "user", text, pictures },
    { id: 8, kind: "reply", model: "m", body: {}, reply },
  ];
  return {
    sides: [{ id: 1, model: "m", entries, control: new AbortController() }],
    settings: {},
    draft: { text: "", pictures: [] },
  };
}

test("an answer under way is cut off in the kept chat, with its text", () => {
  const kept = unpacked(packed(chat()));
  const { reply } = kept.sides[0].entries[1];
  assert.deepEqual([reply.state, reply.text, reply.endedAt], ["failed", "half", 9]);
  assert.match(reply.error.message, /loaded anew/);
  assert.equal(kept.sides[0].control, null);
  assert.equal(lastIdIn(kept), 8);
});

test("a chat that is too long loses its pictures, and then all of it", () => {
  const pictures = ["data:image/png;base64,".padEnd(3_000_000, "A")];
  assert.deepEqual(unpacked(packed(chat({ pictures }))).sides[0].entries[0].pictures, []);
  assert.equal(packed(chat({ text: "x".repeat(3_000_000) })), "");
});

for (const text of [
  null,
  "",
  "{",
  "{}",
  '{"format":1,"sides":[]}',
  '{"format":2,"sides":[1],"settings":{},"draft":{"text":""}}',
]) {
  test(`what is no kept chat is none: ${text}`, () => assert.equal(unpacked(text), null));
}

const paragraph = (at) => `Paragraph ${at} with **bold** words. `.repeat(20);

test("a long text is formatted in pieces, and is whole", () => {
  const text = Array.from({ length: 300 }, (_, at) => paragraph(at)).join("\n\n");
  assert.ok(text.length > 100_000);
  const blocks = blocksOf(text);
  assert.equal(blocks.length, 300);
  assert.ok(blocks.every((block) => block.startsWith("<p>") && block.includes("<strong>bold</strong>")));
});

test("code in a long text is a block of its own, with its language", () => {
  const code = "a_b__c*d\n".repeat(20_000);
  const blocks = blocksOf(`before\n\n~~~js\n${code}~~~\nafter\n\`\`\`\nopen`);
  assert.equal(blocks.length, 4);
  assert.ok(blocks[1].startsWith('<pre data-language="js"><code>a_b__c*d'));
  assert.equal(blocks[2].trim(), "<p>after</p>");
  assert.equal(blocks[3], '<pre data-language=""><code>open</code></pre>');
});

test("only the paragraph that is hard to parse is text", () => {
  const blocks = blocksOf(`**one**\n\n${"_a__b".repeat(10_000)}\n\n**two**`);
  assert.deepEqual(
    blocks.map((block) => block.trim().slice(0, 12)),
    ["<p><strong>o", "<p><em>The n", "<pre data-la", "<p><strong>t"],
  );
});

test("a text that is shown as it is stays a text", () => {
  const blocks = blocksOf(`<script>x</script>${"y".repeat(200_000)}`);
  assert.ok(blocks.at(-1).includes("&#60;script&#62;"));
});
