// The decoder of event streams, and what their events make of the state.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { decoder } from "console/api.js";
import { newReply, withComment } from "console/pages/playground/reply.js";
import { getState, take, withSample } from "console/store.js";

const STATE = { gateway: { id: "g" }, workers: [], models: [], machines: [], aliases: [] };

function decoded(...texts) {
  const events = [];
  const comments = [];
  const feed = decoder(
    (event) => events.push(event),
    (text) => comments.push(text),
  );
  for (const text of texts) feed(text);
  return { events, comments };
}

test("events are the same however the stream is cut", () => {
  const whole = 'id: 7\nevent: workers\r\ndata: {"a":\ndata: 1}\n\n: hello\ndata:x\n\nevent: empty\n\n';
  const expected = {
    events: [
      { name: "workers", data: '{"a":\n1}', id: "7" },
      { name: "message", data: "x", id: null },
    ],
    comments: ["hello"],
  };
  assert.deepEqual(decoded(whole), expected);
  assert.deepEqual(decoded(...whole), expected);
});

test("comments that tell of a load are kept with an answer, and others are not", () => {
  const { comments } = decoded(": keep-al", "ive\n\n", ": loading tiny: imp", "orting vLLM, 4 s\n\ndata: x\n\n");
  const said = "loading tiny: importing vLLM, 4 s";
  assert.deepEqual(comments, ["keep-alive", said]);
  assert.deepEqual(
    comments.map((text) => withComment(newReply(0), text).note),
    ["", said],
  );
});

test("the last hour of a worker that is gone is forgotten", () => {
  let history = { sample_s: 900, columns: { at: [] }, models: {}, workers: {} };
  const seen = [];
  for (let at = 0; at < 7; at += 1) {
    history = withSample(history, { at, models: {}, workers: at < 2 ? { w: { in_flight: at } } : {} });
    seen.push(history.workers.w?.in_flight ?? null);
  }
  assert.deepEqual(seen, [
    [0],
    [0, 1],
    [0, 1, null],
    [0, 1, null, null],
    [1, null, null, null],
    [null, null, null, null],
    null,
  ]);
});

test("a column that begins late is filled up, so that all are of one length", () => {
  const history = { sample_s: 5, columns: { at: [1, 2] }, models: {}, workers: {} };
  const { columns } = withSample(history, { at: 3, requests: 4 });
  assert.deepEqual(columns, { at: [1, 2, 3], requests: [null, null, 4] });
});

beforeEach(() => take("state", STATE));

test("changes are merged by their ids, with the time at which they came", () => {
  const before = Date.now();
  take("workers", { changed: [{ worker_id: "a", state: "loading" }, { worker_id: "b" }], gone: [] });
  take("workers", { changed: [{ worker_id: "a", state: "ready" }], gone: ["b"] });
  const [worker, ...more] = getState().workers;
  assert.deepEqual([worker.worker_id, worker.state, more], ["a", "ready", []]);
  assert.ok(worker.seen_at >= before);
});

test("a state replaces all that was known, and what is not told in it is as it is by default", () => {
  take("workers", { changed: [{ worker_id: "a" }], gone: [] });
  take("sample", { at: 1, usage_storage: "the disk is full" });
  assert.equal(getState().usageStorage, "the disk is full");
  const begun = getState().begun;
  take("state", STATE);
  const { connection, config, workers, usageStorage, begun: now } = getState();
  assert.deepEqual([connection, config, workers, usageStorage, now], ["live", null, [], "ok", begun + 1]);
});

test("an event that is not known changes nothing", () => {
  const before = getState();
  take("nonsense", { workers: [1] });
  assert.equal(getState(), before);
});
