// The scoreboard: who is better in which figure, and when nobody can know yet.

import assert from "node:assert/strict";
import { test } from "node:test";
import { ended, newReply, withEvent } from "console/pages/playground/reply.js";
import { roundsOf, scoreOf, winnerOf } from "console/pages/playground/score.js";

const word = JSON.stringify({ choices: [{ index: 0, delta: { content: "a " } }] });

/** An answer that was asked for at 0, with its first token at `first`, and a token each `each` milliseconds. */
function answer({ first = 100, each = 10, tokens = 50, isOver = true, error = null } = {}) {
  let reply = newReply(0);
  for (let at = 0; at < tokens; at += 1) reply = withEvent(reply, word, first + at * each);
  if (!isOver) return reply;
  return ended(withEvent(reply, "[DONE]", 0), first + tokens * each, { error });
}

const winners = (lines) => Object.fromEntries(lines.map((line) => [line.title, line.winner]));

test("each figure has the better answer as its winner", () => {
  const pair = [answer({ first: 300, each: 5 }), answer({ first: 100, each: 10 })];
  assert.deepEqual(winners(scoreOf(pair, 1000)), { "First token": 1, "Tokens/s": -1, "Whole answer": -1, Tokens: 0 });
  assert.equal(winnerOf(pair, 1000), -1);
});

test("figures that are about the same have no winner", () => {
  const pair = [answer({ first: 100 }), answer({ first: 101 })];
  assert.deepEqual(Object.values(winners(scoreOf(pair, 1000))), [0, 0, 0, 0]);
  assert.equal(winnerOf(pair, 1000), 0);
});

test("while an answer is under way nothing about the whole is decided", () => {
  const pair = [answer({ first: 300 }), answer({ first: 100, isOver: false })];
  assert.equal(winners(scoreOf(pair, 9000))["First token"], 1);
  assert.equal(winners(scoreOf(pair, 9000))["Whole answer"], 0);
  assert.equal(winnerOf(pair, 9000), 0);
});

test("an answer that failed wins nothing, and loses", () => {
  const failed = answer({ tokens: 0, error: { message: "no" } });
  const pair = [failed, answer()];
  assert.deepEqual(Object.values(winners(scoreOf(pair, 1000))), [0, 0, 0, 0]);
  assert.equal(winnerOf(pair, 1000), 1);
  assert.equal(winnerOf([failed, failed], 1000), 0);
});

test("bars are shares of the longer", () => {
  const [first] = scoreOf([answer({ first: 400 }), answer({ first: 100 })], 1000);
  assert.deepEqual(first.shares, [1, 0.25]);
  assert.deepEqual(scoreOf([newReply(0), newReply(0)], 0)[0].shares, [0, 0]);
});

test("rounds are answers to the same messages, by the newest of each", () => {
  const user = (id) => ({ id, kind: "user" });
  const reply = (model) => ({ id: 0, kind: "reply", model, reply: newReply(0) });
  const left = { entries: [user(1), reply("old"), user(2), reply("a"), reply("b"), user(3)] };
  const right = { entries: [user(2), reply("c"), user(3), reply("d")] };
  assert.deepEqual(
    roundsOf([left, right]).map((round) => round.models),
    [["b", "c"]],
  );
  assert.deepEqual(roundsOf([left]), []);
});
