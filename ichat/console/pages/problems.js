// What is wrong now, in the words of the pages: a pure function of the state.

import { hrefOf } from "../router.js";
import { count, duration, left, passed, percent } from "../ui/format.js";

const WAITS_S = 5;
const FULL = 0.97;
const DOWN = { failed: "bad", unhealthy: "bad", wedged: "bad", broken: "bad", restarting: "warn", stale: "warn" };

/** Return what needs an operator's eye, worst first: {id, tone, title, text, href}. */
export function problemsOf({ workers, models, machines, usageStorage }) {
  const down = new Set(workers.filter((one) => DOWN[one.state]).flatMap((one) => one.model_names));
  const asked = models.filter((one) => one.workers > 0 || one.queued > 0 || !down.has(one.id));
  const found = [...workers.flatMap(ofWorker), ...asked.flatMap(ofModel), ...machines.flatMap(ofMachine)];
  if (usageStorage && usageStorage !== "ok") {
    found.push({
      id: "usage",
      tone: "bad",
      title: "Usage is not being stored",
      text: usageStorage,
      href: hrefOf("usage"),
    });
  }
  const rank = { bad: 0, warn: 1 };
  return found.sort((one, other) => rank[one.tone] - rank[other.tone]);
}

function ofWorker(worker) {
  const found = [];
  const href = hrefOf("workers", [worker.worker_id]);
  const tone = DOWN[worker.state];
  if (tone) {
    const again =
      worker.retry_in_s !== null ? ` It starts again in ${duration(left(worker.retry_in_s, worker.seen_at))}.` : "";
    const why = worker.cause ?? worker.failure ?? lostOf(worker) ?? silence(worker);
    found.push({
      id: worker.worker_id,
      tone,
      title: `${worker.worker_id} is ${worker.state}`,
      text: why + again,
      href,
    });
  } else if (worker.failure) {
    found.push({ id: worker.worker_id, tone: "warn", title: worker.worker_id, text: worker.failure, href });
  }
  if (worker.circuit && worker.circuit.state !== "closed") {
    const text = `${count(worker.circuit.failures, "request")} in a row failed; it gets none for a while.`;
    const title = `The circuit of ${worker.worker_id} is ${worker.circuit.state}`;
    found.push({ id: `${worker.worker_id} circuit`, tone: "warn", title, text, href });
  }
  return found;
}

const lostOf = ({ lost }) =>
  lost?.length ? `Its group has lost ${lost.map((one) => one.worker_id).join(", ")}.` : null;
const silence = (worker) =>
  worker.beat_age_s === null
    ? "It has sent no heartbeat."
    : `Its last heartbeat came ${duration(passed(worker.beat_age_s, worker.seen_at))} ago.`;

function ofModel(model) {
  const href = hrefOf("models", [], { find: model.id });
  if (model.workers === 0 && model.loaded === null) {
    const text = model.queued
      ? `${count(model.queued, "request")} wait for it.`
      : "No worker and no route serves it now.";
    return [{ id: `model ${model.id}`, tone: "bad", title: `${model.id} is not served`, text, href }];
  }
  if ((model.waiting_s ?? 0) >= WAITS_S) {
    const waits = duration(passed(model.waiting_s, model.seen_at));
    const text = `${count(model.queued, "request")} wait, the oldest one for ${waits}.`;
    return [{ id: `model ${model.id}`, tone: "warn", title: `Requests for ${model.id} wait`, text, href }];
  }
  return [];
}

function ofMachine(machine) {
  const href = hrefOf("machines");
  const used = 1 - machine.memory_available_bytes / machine.memory_total_bytes;
  const found = (machine.gpus ?? [])
    .filter((gpu) => gpu.failure)
    .map((gpu) => ({
      id: `${machine.name} ${gpu.index}`,
      tone: "bad",
      title: `GPU ${gpu.index} of ${machine.name} does not answer`,
      text: gpu.failure,
      href,
    }));
  if (used >= FULL) {
    const text = `${percent(used)} of its memory is in use: the kernel may end a process.`;
    found.push({ id: machine.name, tone: "warn", title: `${machine.name} is short of memory`, text, href });
  }
  return found;
}
