// The picture on the Overview: rates that rise and fade, its graph, and its places.

import assert from "node:assert/strict";
import { test } from "node:test";
import { graphOf, KINDS, kindsFor, nameOf, ROWS_MAX, wordsOf } from "console/pages/picture/graph.js";
import { lanesAt, NO_RATES, withLanes } from "console/pages/picture/lanes.js";
import { layoutOf, neighbourOf, pointAt, roundedUp, wayOf } from "console/pages/picture/layout.js";
import { streamsOf } from "console/pages/picture/paint.js";

const HOSTILE = "\u202e<img src=x onerror=alert(1)>".padEnd(10_000, "x");

const lane = (model, worker, more = {}) => ({
  key: "",
  name: model,
  model,
  worker,
  in_flight: 1,
  ended: 1,
  tokens: 100,
  ...more,
});
const event = (...lanes) => ({ seconds: 1, lanes, left_out: 0 });

const worker = (id, more = {}) => {
  const model = id.replace(/-\d+$/, "");
  return {
    worker_id: id,
    model_name: model,
    model_names: [model],
    state: "ready",
    in_flight: 0,
    load: null,
    coming: false,
    retry_in_s: null,
    ready_in_s: null,
    phase: null,
    circuit: null,
    lost: [],
    ...more,
  };
};
const model = (id, more = {}) => ({ id, workers: 1, in_flight: 0, queued: 0, loaded: null, ...more });
const machine = (name, ...held) => ({
  id: name,
  name,
  gpus: held.map((id, index) => ({
    index,
    use: 0.5,
    memory_used_bytes: 2 ** 30,
    failure: null,
    held_by: id ? [{ worker_id: id, memory_bytes: 1 }] : [],
  })),
});
const NOTHING = { workers: [], models: [], machines: [], aliases: [] };

function large(workers, models) {
  const all = Array.from({ length: workers }, (_, at) => worker(`m${at % models}-${Math.floor(at / models)}`));
  const machines = [];
  for (let at = 0; at < workers; at += 8) {
    machines.push(machine(`gpu-${at / 8}`, ...all.slice(at, at + 8).map((one) => one.worker_id)));
  }
  const ids = Array.from({ length: models }, (_, at) => `m${at}`);
  return { ...NOTHING, workers: all, models: ids.map((id) => model(id)), machines };
}

const titlesOf = (graph, kind) =>
  graph.columns.find((column) => column.kind === kind)?.nodes.map((node) => node.title) ?? [];
const nodeOf = (graph, title) => graph.columns.flatMap((column) => column.nodes).find((node) => node.title === title);

test("a rate is there with the first second, stays, and falls to nothing", () => {
  let rates = withLanes(NO_RATES, { ...event(lane("m", "m-0")), seconds: 0 }, 0);
  assert.deepEqual(
    lanesAt(rates, 0).map((one) => [one.tokens, one.in_flight]),
    [[0, 1]],
  );
  for (let second = 0; second < 60; second += 1) {
    rates = withLanes(rates, event(lane("m", "m-0")), second * 1000);
    assert.ok(Math.abs(lanesAt(rates, second * 1000)[0].tokens - 100) < 1e-6);
  }
  assert.equal(lanesAt(rates, 60_000).length, 1);
  rates = withLanes(rates, event(), 60_000);
  assert.equal(rates.list[0].in_flight, 0);
  const later = lanesAt(rates, 70_000);
  assert.ok(later[0].tokens < 30 && later[0].tokens > 0);
  assert.deepEqual(lanesAt(rates, 200_000), []);
});

test("a clock that jumps back changes no rate", () => {
  const rates = withLanes(NO_RATES, event(lane("m", "m-0")), 1e12);
  assert.deepEqual(lanesAt(rates, 0), lanesAt(rates, 1e12));
});

test("the graph leads from the key over the name, the model and the worker to its GPUs", () => {
  const cluster = {
    ...NOTHING,
    workers: [worker("llama-0")],
    models: [model("llama")],
    machines: [machine("gpu-1", "llama-0", "llama-0", "")],
    aliases: [{ name: "gpt", targets: [{ model: "llama", weight: 1 }] }],
  };
  const graph = graphOf(cluster, [lane("llama", "llama-0", { key: "team", name: "gpt" })]);
  assert.deepEqual(
    graph.columns.map((column) => column.kind),
    KINDS,
  );
  const busy = graph.lines.filter((line) => line.tokens > 0).map(({ from, to, tokens }) => [from, to, tokens]);
  assert.deepEqual(busy, [
    ["name gpt", "model llama", 100],
    ["model llama", "worker llama-0", 100],
    ["worker llama-0", "gpu gpu-1 0", 50],
    ["worker llama-0", "gpu gpu-1 1", 50],
    ["key team", "name gpt", 100],
  ]);
  assert.equal(nodeOf(graph, "team").note, "100 tokens/s");
});

test("columns without anything are left out, and so are keys where there are none", () => {
  const graph = graphOf({ ...NOTHING, workers: [worker("m-0")], models: [model("m")] }, [lane("m", "m-0")]);
  assert.deepEqual(
    graph.columns.map((column) => column.kind),
    ["model", "worker"],
  );
});

test("narrow screens keep models and workers", () => {
  assert.deepEqual(kindsFor(330), ["model", "worker"]);
  assert.deepEqual(kindsFor(500), ["name", "model", "worker"]);
  assert.deepEqual(kindsFor(980), KINDS);
});

test("a name that a pattern matches belongs to the pattern", () => {
  const aliases = [{ name: "claude-*" }, { name: "gpt" }];
  assert.equal(nameOf(lane("m", "w", { name: "claude-opus" }), aliases), "claude-*");
  assert.equal(nameOf(lane("m", "w", { name: "gpt" }), aliases), "gpt");
  assert.equal(nameOf(lane("m", "w", { name: "gone" }), aliases), "gone");
  assert.equal(nameOf(lane("m", "w"), aliases), "");
});

test("a cold model is idle, lights up while it loads, and has its queue", () => {
  const load = { elapsed_s: 30, expected_s: 60, phases: [{ name: "loading weights", detail: "", seconds: 3 }] };
  const cold = {
    ...NOTHING,
    workers: [worker("m-0", { state: "cold" })],
    models: [model("m", { workers: 0, loaded: false })],
  };
  const face = (cluster) => nodeOf(graphOf(cluster, []), "m");
  assert.deepEqual([face(cold).tone, face(cold).note, face(cold).load], ["idle", "on demand", null]);
  const loading = {
    ...cold,
    workers: [worker("m-0", { state: "loading", load, seen_at: Date.now() })],
    models: [model("m", { workers: 0, loaded: false, queued: 3 })],
  };
  const { tone, note, load: share, queued } = face(loading);
  assert.deepEqual([tone, queued, Math.round(share * 10)], ["busy", 3, 5]);
  assert.match(note, /^3 wait · loading weights, ready in about/);
});

for (const [workers, models] of [
  [1, 1],
  [30, 6],
  [300, 60],
]) {
  test(`${workers} workers have a bounded number of nodes, and none is lost`, () => {
    const cluster = large(workers, models);
    const lanes = cluster.workers.map((one, at) => lane(one.model_name, one.worker_id, { key: `key-${at % 40}` }));
    const graph = graphOf(cluster, lanes);
    for (const { nodes } of graph.columns) assert.ok(nodes.length <= ROWS_MAX);
    const { nodes } = graph.columns.find((column) => column.kind === "worker");
    assert.equal(
      nodes.reduce((sum, node) => sum + (node.cells.length || 1), 0),
      workers,
    );
    for (const kind of ["key", "model", "worker"]) {
      const column = graph.columns.find((one) => one.kind === kind);
      const sum = column.nodes.reduce((total, node) => total + node.tokens, 0);
      assert.ok(Math.abs(sum - 100 * workers) < 1e-6);
    }
    const { nodes: placed, lines, width, height } = layoutOf(graph, 980);
    for (const one of placed) {
      assert.ok(one.x >= 0 && one.x + one.width <= width && one.y >= 0 && one.y + one.height <= height + 1);
      for (const other of placed) {
        const isApart =
          one === other || one.x !== other.x || one.y + one.height <= other.y || other.y + other.height <= one.y;
        assert.ok(isApart, `${one.title} lies over ${other.title}`);
      }
    }
    assert.ok(lines.every((line) => Number.isFinite(line.y0 + line.y1) && line.px > 0));
    assert.ok(streamsOf(lines).reduce((sum, one) => sum + one.count, 0) <= 400);
  });
}

test("the busiest models have nodes of their own, and keep them until others are a good deal busier", () => {
  const cluster = large(60, 60);
  const busy = (id, tokens) => lane(id, `${id}-0`, { tokens });
  const before = Array.from({ length: 11 }, (_, at) => busy(`m${at}`, 1000));
  const first = graphOf(cluster, before);
  assert.ok(titlesOf(first, "model").includes("m10"));
  assert.ok(titlesOf(first, "model").includes("49 other models"));
  const shown = new Set(first.columns.flatMap((column) => column.nodes.map((node) => node.id)));
  assert.ok(titlesOf(graphOf(cluster, [...before, busy("m50", 1100)], KINDS, shown), "model").includes("m10"));
  assert.ok(titlesOf(graphOf(cluster, [...before, busy("m50", 9000)], KINDS, shown), "model").includes("m50"));
});

test("no place depends on traffic", () => {
  const cluster = large(30, 6);
  const places = (lanes) =>
    layoutOf(graphOf(cluster, lanes, ["model", "worker", "gpu"]), 980).nodes.map(({ id, x, y }) => [id, x, y]);
  assert.deepEqual(places([lane("m1", "m1-0")]), places([lane("m5", "m5-2", { tokens: 1e6 })]));
});

test("lines are as thick as their tokens, and begin and end at their nodes", () => {
  const cluster = { ...NOTHING, workers: [worker("m-0"), worker("m-1")], models: [model("m")] };
  const lanes = [lane("m", "m-0", { tokens: 300 }), lane("m", "m-1", { tokens: 900 })];
  const { lines, nodes, top } = layoutOf(graphOf(cluster, lanes), 600);
  assert.equal(top, 2000);
  assert.equal(lines[1].px / lines[0].px, 3);
  for (const line of lines) {
    const [from, to] = [line.from, line.to].map((id) => nodes.find((node) => node.id === id));
    assert.ok(line.y0 - line.px / 2 >= from.y && line.y0 + line.px / 2 <= from.y + from.height);
    assert.deepEqual(pointAt(line, 0), [from.x + from.width, line.y0]);
    assert.deepEqual(pointAt(line, 1), [to.x, line.y1]);
  }
});

test("the unit of thickness is a round number", () => {
  assert.deepEqual([0.3, 1, 21, 50, 51, 999].map(roundedUp), [0.5, 1, 50, 50, 100, 1000]);
});

test("arrow keys lead along the lines and never out of the picture", () => {
  const layout = layoutOf(graphOf(large(6, 3), []), 980);
  const at = (id, ...keys) => keys.reduce((now, key) => neighbourOf(layout, now, key)?.id ?? now, id);
  assert.equal(at("model m0", "ArrowDown"), "model m1");
  assert.equal(at("model m0", "ArrowUp"), "model m0");
  assert.match(at("model m2", "ArrowRight"), /^worker m2-/);
  assert.equal(at("model m2", "ArrowRight", "ArrowLeft"), "model m2");
  assert.equal(at("model m0", "ArrowLeft"), "model m0");
  assert.deepEqual(wayOf(layout.lines, "worker m1-0"), new Set(["worker m1-0", "model m1", "gpu gpu-0 1"]));
});

test("hostile names are texts of a bounded length to a screen reader", () => {
  const cluster = { ...NOTHING, workers: [worker(HOSTILE)], models: [model(HOSTILE)] };
  const graph = graphOf(cluster, [lane(HOSTILE, HOSTILE, { key: HOSTILE, name: HOSTILE })]);
  for (const node of graph.columns.flatMap((column) => column.nodes)) assert.ok(wordsOf(node).length < 200);
});
