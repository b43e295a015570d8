// The phases of a finished request.

import assert from "node:assert/strict";
import { test } from "node:test";
import { cachedOf, firstTokenOf, partsOf, speedOf, toneOf } from "console/pages/requests/phases.js";

const NOTHING = { overhead_s: null, head_s: null, first_s: null, body_s: null };
const whole = {
  status: 200,
  error: "",
  duration_s: 10,
  phases: { queued_s: 5, overhead_s: 0.5, head_s: 0.5, first_s: 1.5, body_s: 2.5 },
  tokens: { input: 8, output: 26, cached: 2, is_estimate: false },
};

test("the phases follow each other and are the whole time", () => {
  const parts = partsOf(whole);
  assert.deepEqual(
    parts.map((part) => part.begun),
    [0, 5, 5.5, 6, 7.5],
  );
  assert.equal(parts.at(-1).begun + parts.at(-1).seconds, whole.duration_s);
  assert.equal(firstTokenOf(whole), 7.5);
});

test("time that belongs to no phase is shown", () => {
  const refused = { ...whole, phases: { queued_s: 2, ...NOTHING } };
  assert.deepEqual(partsOf(refused).at(-1), { name: "rest", title: "In the gateway", begun: 2, seconds: 8 });
  const cut = { ...whole, phases: { queued_s: 2, ...NOTHING, overhead_s: 1 } };
  assert.equal(partsOf(cut).at(-1).title, "Without an answer");
  assert.equal(firstTokenOf(cut), null);
  assert.deepEqual(partsOf({ ...whole, duration_s: 0, phases: { queued_s: 0, ...NOTHING } }).length, 1);
});

test("figures that say nothing are left out", () => {
  assert.equal(cachedOf(whole), 0.25);
  assert.equal(cachedOf({ ...whole, tokens: null }), null);
  assert.equal(speedOf(whole), 10);
  assert.equal(speedOf({ ...whole, tokens: { ...whole.tokens, output: 5 } }), null);
});

for (const [end, tone] of [
  [{ status: 200, error: "" }, "ok"],
  [{ status: 200, error: "upstream_broke" }, "bad"],
  [{ status: 404, error: "model_not_found" }, "warn"],
  [{ status: 499, error: "client_left" }, "idle"],
  [{ status: 503, error: "overloaded" }, "bad"],
]) {
  test(`a request that ended with ${end.status} ${end.error} is ${tone}`, () => assert.equal(toneOf(end), tone));
}
