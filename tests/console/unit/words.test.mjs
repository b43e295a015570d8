// Addresses, numbers and times in words.

import assert from "node:assert/strict";
import { test } from "node:test";
import { hrefOf, readRoute } from "console/router.js";
import { age, bytes, count, duration, left, number, passed, percent, timeOfDay } from "console/ui/format.js";

test("an address is read as it was written", () => {
  const href = hrefOf("workers", ["a/b c", "ü"], { tab: "log", find: "x&y" });
  assert.deepEqual(readRoute(href), { name: "workers", rest: ["a/b c", "ü"], query: { tab: "log", find: "x&y" } });
  assert.deepEqual(readRoute(""), { name: "", rest: [], query: {} });
  assert.deepEqual(readRoute("#/keys/%E0%A4%A").rest, ["%E0%A4%A"]);
});

for (const [found, text] of [
  [number(1234.56), "1,235"],
  [number(12.345), "12.3"],
  [number(null), "–"],
  [number(1_250_000, { short: true }), "1.3 M"],
  [percent(0.421), "42 %"],
  [bytes(1536), "1.5 KiB"],
  [bytes(1023), "1,023 B"],
  [bytes(undefined), "–"],
  [duration(0.0015), "1.5 ms"],
  [duration(0.34), "340 ms"],
  [duration(12.2), "12 s"],
  [duration(5401), "1 h 30 min"],
  [duration(30 * 3600), "1 d 6 h"],
  [count(1, "{count} worker", "{count} workers"), "1 worker"],
  [count(0, "{count} worker", "{count} workers"), "0 workers"],
]) {
  test(`numbers are as people read them: ${text}`, () => assert.equal(found, text));
}

test("seconds that were told a while ago have gone on since", (context) => {
  context.mock.timers.enable({ apis: ["Date"], now: 100_000 });
  assert.equal(left(10, 96_000), 6);
  assert.equal(left(1, 96_000), 0);
  assert.equal(passed(10, 96_000), 14);
  assert.equal(age(90), "10 s ago");
});

test("a time of another day has its date", (context) => {
  context.mock.timers.enable({ apis: ["Date"], now: new Date(2026, 4, 3, 12, 30).getTime() });
  assert.match(timeOfDay(new Date(2026, 4, 3, 9, 5).getTime() / 1000), /^09:05$/);
  assert.match(timeOfDay(new Date(2026, 4, 2, 9, 5).getTime() / 1000), /^2026-05-02 09:05$/);
});
