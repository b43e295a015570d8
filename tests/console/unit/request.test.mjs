// The requests of the playground, and the same as programs.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { test } from "node:test";
import {
  chatBody,
  completionBody,
  cosine,
  curlOf,
  messagesOf,
  NO_SETTINGS,
  parametersOf,
  pythonOf,
  rankedIn,
} from "console/pages/playground/request.js";

const CHAT = "/v1/chat/completions";
const user = (text) => ({ kind: "user", text, pictures: [] });
const said = (text, calls = []) => ({ kind: "reply", reply: { text, thoughts: "", calls } });

test("what was not answered is left out with its question, and so is a call without a result", () => {
  const call = { id: "a", name: "f", arguments: "{}" };
  const results = { kind: "results", results: [{ id: "a", name: "f", content: "r" }] };
  const entries = [user("1"), said("one"), user("2"), said(""), user("3"), said("", [call]), user("4")];
  const found = messagesOf(" ", [...entries, said("", [call]), results, said("four"), user("5")]);
  assert.deepEqual(
    found.map((one) => [one.role, one.content]),
    [
      ["user", "1"],
      ["assistant", "one"],
      ["user", "4"],
      ["assistant", ""],
      ["tool", "r"],
      ["assistant", "four"],
      ["user", "5"],
    ],
  );
  assert.deepEqual(found[3].tool_calls, [{ id: "a", type: "function", function: { name: "f", arguments: "{}" } }]);
});

test("pictures stand before the text", () => {
  const [message] = messagesOf("", [{ kind: "user", text: "what?", pictures: ["data:,"] }]);
  assert.deepEqual(message.content, [
    { type: "image_url", image_url: { url: "data:," } },
    { type: "text", text: "what?" },
  ]);
});

test("an empty field is not sent, and answers are streamed unless the request says otherwise", () => {
  const settings = { ...NO_SETTINGS, system: "Be kind.", temperature: " 0 ", stop: "a\\nb\n\nc" };
  assert.deepEqual(chatBody("m", settings, [user("hi")]), {
    model: "m",
    messages: [
      { role: "system", content: "Be kind." },
      { role: "user", content: "hi" },
    ],
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0,
    stop: ["a\nb", "c"],
  });
  const plain = completionBody("m", { ...NO_SETTINGS, tools: "[]", more: '{"stream": false}' }, "p");
  assert.deepEqual(plain, { model: "m", prompt: "p", stream: false });
});

for (const [setting, sentence] of [
  [{ max_tokens: "1.5" }, /max_tokens must be a whole number, and is not: 1\.5/],
  [{ top_p: "much" }, /top_p must be a number, and is not: much/],
  [{ tools: "[1]" }, /Tools: each is {"type": "function"/],
  [{ tools: "{" }, /Tools: this is no JSON/],
  [{ more: "[]" }, /More: this is no object\./],
]) {
  test(`a wrong parameter is named: ${JSON.stringify(setting)}`, () => {
    assert.throws(() => parametersOf({ ...NO_SETTINGS, ...setting }), sentence);
  });
}

const TEXT = 'It\'s "x"\n$HOME `id` \\ ü 語 END\nEND';
const BODY = { model: "m", messages: [{ role: "user", content: TEXT }], stream: true, top_k: 1, x: null };

test("a command has the same request, whatever is in its text", () => {
  const curl = curlOf("http://h:1", CHAT, BODY, true);
  assert.match(curl, /-H "authorization: Bearer \$ICHAT_KEY"/);
  const text = curl.split("<<'END'\n")[1].replace(/\nEND$/, "");
  assert.deepEqual(JSON.parse(text), BODY);
  assert.equal(curl.split("\n").filter((line) => line === "END").length, 1);
});

const RUN = `
import json, sys
asked = {}
class OpenAI:
    def __init__(self, **given):
        asked["client"] = given
        self.chat = self.completions = self
    def create(self, **given):
        asked["request"] = {**given, **given.pop("extra_body", {})}
        return []
exec(sys.stdin.read().replace("from openai import OpenAI", ""), {"OpenAI": OpenAI})
print(json.dumps(asked))
`;

test("a program has the same request, whatever is in its text", () => {
  const program = pythonOf("http://h:1", CHAT, BODY, true);
  const env = { ...process.env, ICHAT_KEY: "k" };
  const { stdout, stderr } = spawnSync("python3", ["-c", RUN], { input: program, env, encoding: "utf8" });
  assert.equal(stderr, "");
  const { client, request } = JSON.parse(stdout);
  assert.deepEqual(client, { base_url: "http://h:1/v1", api_key: "k" });
  const { extra_body, ...members } = request;
  assert.deepEqual({ ...members, ...extra_body }, BODY);
  assert.equal(pythonOf("http://h:1", "/v1/rerank", BODY, true), "");
});

test("the cosine of nothing is 0", () => {
  assert.equal(cosine([1, 0], [0, 0]), 0);
  assert.ok(Math.abs(cosine([1, 1], [-1, -1]) + 1) < 1e-9);
});

test("ranks are by score, of whatever shape the answer has", () => {
  const scores = [
    { index: 0, score: 1 },
    { index: 1, relevance_score: 3 },
  ];
  const ranked = [
    { index: 1, score: 3, text: "b" },
    { index: 0, score: 1, text: "a" },
  ];
  for (const answer of [scores, { results: scores }, { data: scores }]) {
    assert.deepEqual(rankedIn(answer, ["a", "b"]), ranked);
  }
});
