// What clients are given to connect: their texts are safe for any name.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { literal, recipesFor, shellWord } from "console/pages/connect/clients.js";

const HOSTILE = [
  "it's",
  '"; rm -rf "',
  "$(id) `id` $HOME \\",
  "a\nb\tc",
  "\u202eabc\u2066",
  "\ud800x",
  "😀 é",
  "\\'\n'",
];

for (const name of HOSTILE) {
  test(`a literal of ${JSON.stringify(name)} is one text, and shows what it is`, () => {
    assert.equal(JSON.parse(literal(name)), name);
    assert.doesNotMatch(literal(name), /[\p{Cc}\p{Cf}\p{Cs}]/u);
  });
}

for (const name of HOSTILE.filter((one) => one.isWellFormed())) {
  test(`a shell reads the word of ${JSON.stringify(name)} as one text and runs nothing`, () => {
    const env = { ...process.env, LC_ALL: "C.UTF-8" };
    const read = execFileSync("bash", ["-c", `printf %s ${shellWord(name)}`], { env }).toString();
    assert.equal(read, name);
    assert.doesNotMatch(shellWord(name), /[\p{Cc}\p{Cf}]/u);
  });
}

test("every client gets the address, the name and the key", () => {
  const recipes = recipesFor({ base: "http://gw:4000", model: "llama", key: "sk-secret" });
  assert.deepEqual(
    recipes.map((one) => one.title),
    ["OpenAI SDK", "Claude Code", "Codex", "Open WebUI", "Continue"],
  );
  for (const { name, text } of recipes) {
    assert.match(text, /http:\/\/gw:4000/);
    assert.match(text, /sk-secret/);
    if (name !== "webui") assert.match(text, /llama/);
  }
  assert.doesNotMatch(recipes[1].text, /4000\/v1/); // it adds that itself
});

test("a pattern needs no name of Claude Code, and a name of all others", () => {
  const [openai, claude] = recipesFor({ base: "http://gw:4000", model: "claude-*", key: "k" });
  assert.match(openai.text, /"claude-NAME"/);
  assert.match(claude.text, /\nclaude$/);
});

test("a container is told that localhost is not the host", () => {
  const noteOf = (base) => recipesFor({ base, model: "m", key: "k" }).find((one) => one.name === "webui").notes.length;
  assert.deepEqual([noteOf("http://localhost:4000"), noteOf("http://gw:4000")], [1, 0]);
});
