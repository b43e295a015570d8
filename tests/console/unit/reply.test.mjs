// What the events of a stream make of an answer.

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  ended,
  figuresOf,
  isOpen,
  newReply,
  partsOf,
  toldBy,
  withEvent,
  withHead,
} from "console/pages/playground/reply.js";

const DONE = "[DONE]";
const textOf = (event) => (typeof event === "string" ? event : JSON.stringify(event));

/** Return what events make of an answer; one comes each second unless `times` says when. */
function replyOf(events, times = []) {
  const whole = events.reduce((reply, one, at) => withEvent(reply, textOf(one), times[at] ?? at * 1000), newReply(0));
  return ended(whole, 10_000);
}

const delta = (members, finish = null) => ({ choices: [{ index: 0, delta: members, finish_reason: finish }] });

test("the first token is the first content, the rate is of those after it, and the engine's count goes first", () => {
  const counts = { prompt_tokens: 9, completion_tokens: 21, prompt_tokens_details: { cached_tokens: 4 } };
  const events = [delta({ role: "assistant", content: "" }), delta({ content: "a" }), delta({ content: "b" })];
  events.push(delta({}, "stop"), { choices: [], usage: counts }, DONE);
  const reply = replyOf(events, [500, 2000, 4000, 4100, 4200, 4300]);
  assert.deepEqual([reply.state, reply.text, reply.finish, reply.error], ["done", "ab", "stop", null]);
  const figures = { first_s: 2, tokens_s: 10, total_s: 10, in: 9, out: 21, cached: 4, isEstimate: false };
  assert.deepEqual(figuresOf(reply, 0), figures);
  const guessed = figuresOf(replyOf([...events.slice(0, 4), DONE], [500, 2000, 4000]), 0);
  assert.deepEqual([guessed.out, guessed.isEstimate, guessed.in], [2, true, null]);
});

test("a few tokens, or a moment, tell no rate", () => {
  const said = [delta({ content: "a" }), delta({ content: "b" }, "stop")];
  const rate = (tokens, times) => {
    const usage = { choices: [], usage: { prompt_tokens: 9, completion_tokens: tokens } };
    return figuresOf(replyOf([...said, usage, DONE], times), 0).tokens_s;
  };
  assert.equal(rate(19, [1000, 3000]), null);
  assert.equal(rate(500, [1000, 1099]), null);
  assert.equal(rate(500, [1000, 3000]), 249.5);
});

test("plain answers, texts, contents in parts, refusals and both names of thoughts are read", () => {
  const message = { content: [{ type: "text", text: "x" }, { type: "other" }], reasoning: "why" };
  const reply = replyOf([{ choices: [{ index: 0, message, finish_reason: "stop" }] }]);
  assert.deepEqual([reply.text, reply.thoughts, reply.state], ["x", "why", "done"]);
  assert.equal(replyOf([{ choices: [{ index: 0, text: "y" }] }, DONE]).text, "y");
  assert.deepEqual(partsOf(replyOf([delta({ refusal: "no" }), delta({ reasoning_content: "t" }), DONE])), ["t", "no"]);
  const choices = [
    { index: 1, delta: { content: "second" } },
    { index: 0, delta: { content: "first" } },
  ];
  assert.equal(replyOf([{ choices }, DONE]).text, "first");
});

for (const [text, parts] of [
  ["<think>a</think>\n\nb", ["a", "b"]],
  ["\n<think>\na", ["a", ""]],
  ["x <think>a</think>", ["", "x <think>a</think>"]],
  ["<think></think>b", ["", "b"]],
]) {
  test(`only what the text begins with are thoughts: ${JSON.stringify(text)}`, () => {
    assert.deepEqual(partsOf(replyOf([delta({ content: text }), DONE])), parts);
  });
}

test("calls come in pieces, several at once, with or without an id and a place", () => {
  const reply = replyOf([
    delta({ tool_calls: [{ index: 0, id: "a", function: { name: "f", arguments: '{"x"' } }] }),
    delta({ tool_calls: [{ index: 1, function: { name: "g", arguments: { y: 1 } } }] }),
    delta({ tool_calls: [{ index: 0, function: { arguments: ":2}" } }] }, "tool_calls"),
  ]);
  assert.deepEqual(reply.calls, [
    { id: "a", name: "f", arguments: '{"x":2}' },
    { id: "call_1", name: "g", arguments: '{"y":1}' },
  ]);
});

test("calls at strange places cost neither the answer nor the tab", () => {
  const odd = [50_000_000, 128, -1, 1.5, "__proto__", "length", {}];
  const calls = [null, 5, ...odd.map((index) => ({ index, function: { name: "f" } }))];
  const events = [delta({ content: "here" }), ...calls.map((call) => delta({ tool_calls: [call] })), delta({}, "stop")];
  const reply = replyOf(events);
  assert.deepEqual([reply.state, reply.text, reply.calls], ["done", "here", []]);
});

for (const [event, sentence] of [
  [{ error: { message: "The engine died.", code: 500 } }, "The engine died."],
  [{ error: "no" }, "no"],
  [{ object: "error", message: "old" }, "old"],
  [{ error: {} }, "The engine failed."],
  ["{half", "The stream had an event that is no JSON: {half"],
]) {
  test(`an error is said in its words, and what came before it stays: ${sentence}`, () => {
    const reply = replyOf([delta({ content: "before" }), event, DONE]);
    assert.deepEqual([reply.state, reply.text, reply.error.message], ["failed", "before", sentence]);
  });
}

test("numbers, lists, nulls and missing members are no answer, and no exception", () => {
  const odd = ["1", "null", [], { choices: null }, { choices: [null] }, { choices: [{ delta: null }] }];
  const reply = replyOf([...odd, { choices: [{ delta: { content: 5 } }] }]);
  assert.deepEqual([reply.text, reply.state], ["", "failed"]);
  assert.equal(reply.error.message, "The stream ended before the answer was whole.");
});

test("an answer that the reader stops is no failure, and what came stays", () => {
  const reply = ended(withEvent(newReply(0), textOf(delta({ content: "a" })), 1), 2, { isStopped: true });
  assert.deepEqual([reply.state, reply.text, reply.error, isOpen(reply)], ["stopped", "a", null, false]);
});

test("the headers tell who answers", () => {
  const headers = new Headers({ "x-ichat-worker": "m-0", "x-request-id": "r", "content-type": "text/event-stream" });
  assert.deepEqual(toldBy(headers), { worker: "m-0", request: "r" });
  assert.equal(withHead(newReply(0), headers).state, "answering");
});
