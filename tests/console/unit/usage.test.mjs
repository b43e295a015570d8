// The bars of usage over time.

import assert from "node:assert/strict";
import { test } from "node:test";
import { barsOf } from "console/pages/usage/bars.js";

const row = (at, key, tokens) => ({ at, key, input_tokens: tokens - 1, output_tokens: 1 });

test("each time has a bar, with a part for each key", () => {
  const [bars, keys] = barsOf([row(1, "b", 5), row(1, "a", 7), row(3, "", 2)], [1, 2, 3], (at) => `t${at}`);
  assert.deepEqual(keys, ["a", "b", "no key"]);
  assert.deepEqual(
    bars.map((bar) => [bar.title, bar.tokens, bar.parts.map((part) => part.key).join()]),
    [
      ["t1", 12, "a,b"],
      ["t2", 0, ""],
      ["t3", 2, "no key"],
    ],
  );
});

test("of many keys, those of few tokens are one part", () => {
  const rows = Array.from({ length: 9 }, (_, index) => row(1, `k${index}`, 10 - index));
  const [[bar], keys] = barsOf(rows, [1], String);
  assert.deepEqual(keys, ["k0", "k1", "k2", "k3", "others"]);
  assert.deepEqual(bar.parts.at(-1), { key: "others", tokens: 6 + 5 + 4 + 3 + 2 });
  assert.equal(bar.tokens, 54);
});
