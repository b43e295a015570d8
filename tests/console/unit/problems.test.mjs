// What is wrong, in the words of the Overview, and what workers are doing.

import assert from "node:assert/strict";
import { test } from "node:test";
import { problemsOf } from "console/pages/problems.js";
import { comingOf, isLoading, loadWords, restOf, stateLine } from "console/pages/states.js";

const QUIET = { config: { state: "ok" }, workers: [], models: [], machines: [], usageStorage: "ok" };

const worker = (name, more = {}) => ({
  worker_id: `${name}-0`,
  model_names: [name],
  state: "ready",
  failure: null,
  cause: null,
  retry_in_s: null,
  ready_in_s: null,
  heartbeat_age_s: 1,
  circuit: { state: "closed", failures: 0 },
  lost: [],
  load: null,
  phase: null,
  seen_at: Date.now(),
  ...more,
});

const model = (id, more = {}) => ({ id, workers: 1, queued: 0, waiting_s: null, loaded: null, ...more });

const told = (state) => problemsOf({ ...QUIET, ...state }).map(({ tone, title, text }) => [tone, title, text]);

test("nothing is wrong where all is well", () => {
  assert.deepEqual(told({ workers: [worker("a")], models: [model("a")], machines: [{ name: "x", gpus: null }] }), []);
});

test("the worst is first, a refused file before all else, and a load last: it is no problem", () => {
  const load = { elapsed_s: 0, expected_s: 40, phases: [{ name: "loading weights", detail: "", seconds: 0 }] };
  const found = told({
    config: { state: "refused", path: "/etc/ichat.toml", errors: ["a", "b"], since: 1, in_force_since: 1 },
    workers: [
      worker("slow", { state: "loading", load }),
      worker("late", { state: "stale", failure: "not heard of" }),
      worker("dead", { state: "failed", cause: "Out of memory." }),
    ],
    models: [model("slow", { workers: 0, queued: 1 }), model("lost", { workers: 0 })],
    usageStorage: "the disk is full",
  });
  assert.deepEqual(
    found.map(([tone]) => tone),
    ["bad", "bad", "bad", "bad", "warn", "busy"],
  );
  assert.match(found[0][1], /^ichat\.toml is refused since/);
  assert.equal(found[0][2], "a (and 1 more mistake)");
  assert.deepEqual(found[1], ["bad", "dead-0 is failed", "Out of memory."]);
  assert.deepEqual(found[2], ["bad", "lost has no replicas", "No worker and no route serves it now."]);
  assert.deepEqual(found[5].slice(0, 2), ["busy", "slow is loading"]);
  assert.match(found[5][2], /^Loading weights, ready in about 40 s\. 1 request waits for it\.$/);
});

test("a model whose worker is down is named once, by its worker", () => {
  const workers = [worker("a", { state: "failed", failure: "ended with exit code 1" })];
  assert.deepEqual(told({ workers, models: [model("a", { workers: 0 })] }), [
    ["bad", "a-0 is failed", "ended with exit code 1"],
  ]);
  const found = told({ workers, models: [model("a", { workers: 0, queued: 2 })] });
  assert.deepEqual(found[1], ["bad", "a has no replicas", "2 requests wait for it."]);
});

test("a request that waits long, an open circuit, a lost GPU and short memory are problems", () => {
  const gpus = [
    { index: 3, failure: "GPU is lost" },
    { index: 4, failure: null },
  ];
  const found = told({
    workers: [worker("a", { circuit: { state: "open", failures: 5 } })],
    models: [model("a", { queued: 3, waiting_s: 6, seen_at: Date.now() })],
    machines: [{ name: "gpu-1", gpus, memory_available_bytes: 1, memory_total_bytes: 100 }],
  });
  assert.deepEqual(
    found.map(([, title]) => title),
    ["GPU 3 of gpu-1 does not answer", "The circuit of a-0 is open", "Requests for a wait", "gpu-1 is short of memory"],
  );
});

test("a worker that loads comes before a worker that starts again", () => {
  const down = worker("m", { state: "restarting" });
  const loads = { ...worker("m"), worker_id: "m-1", state: "starting" };
  assert.equal(comingOf([down, loads], "m"), loads);
  assert.equal(comingOf([down], "m"), down);
  assert.equal(comingOf([down, loads], "other"), undefined);
});

test("what a worker said before it went down is not what it does", () => {
  const says = worker("m", { state: "unhealthy", phase: "loading weights", heartbeat_age_s: 31 });
  assert.equal(isLoading(says), false);
  assert.equal(stateLine(says), "Its last heartbeat arrived 31 s ago.");
});

test("a load that takes longer than usual says so", () => {
  const load = { elapsed_s: 50, expected_s: 40, phases: [{ name: "warming up", detail: "3 of 9", seconds: 1 }] };
  assert.equal(restOf(worker("m", { state: "loading", load })), 0);
  assert.equal(loadWords(worker("m", { state: "loading", load })), "warming up 3 of 9, which takes longer than usual");
  assert.equal(restOf(worker("m", { state: "loading" })), null);
});
