// The present problems, in the words of the pages: a pure function of the state.

import { hrefOf } from "../router.js";
import { sentences, t } from "../texts.js";
import { inWords } from "../ui/api_words.js";
import { count, duration, left, passed, percent, timeOfDay } from "../ui/format.js";
import { comingOf, isLoading, isReturning, isWords, loadWords, reasonOf } from "./states.js";

/** @import { Machine, Model, State, Worker } from "../store.js" */

/** @typedef {{ id: string, tone: "bad" | "warn" | "busy", title: string, text: string, href: string }} Problem */

const WAITS_S = 5;
/** A changed file is no problem within this time: the gateway reads it once it is whole. */
const READS_S = 5;
const FULL = 0.97;
/** @type {Record<string, "bad" | "warn">} */
const DOWN = { failed: "bad", unhealthy: "bad", wedged: "bad", broken: "bad", restarting: "warn", stale: "warn" };

/**
 * Return what needs an operator's eye, worst first: {id, tone, title, text, href}.
 *
 * A refused file is the first. An entry with the tone "busy" is no problem, and stands last.
 *
 * @param {Pick<State, "config" | "workers" | "models" | "machines" | "usageStorage">} state
 * @returns {Problem[]}
 */
export function problemsOf({ config, workers, models, machines, usageStorage }) {
  const down = namesOf(workers.filter((one) => DOWN[one.state]));
  const loaded = namesOf(workers.filter(isLoading));
  const resting = namesOf(workers.filter((one) => one.state === "stopped"));
  for (const name of namesOf(workers.filter((one) => one.state !== "stopped"))) resting.delete(name);
  const isAsked = (/** @type {Model} */ one) =>
    one.workers > 0 || one.queued > 0 || loaded.has(one.id) || !(down.has(one.id) || resting.has(one.id));
  const asked = models.filter(isAsked);
  const found = [
    ...workers.flatMap(ofWorker),
    ...asked.flatMap((one) => ofModel(one, workers)),
    ...machines.flatMap(ofMachine),
  ];
  if (usageStorage && usageStorage !== "ok") {
    found.push({
      id: "usage",
      tone: "bad",
      title: t("Usage is not being stored"),
      text: usageStorage,
      href: hrefOf("usage"),
    });
  }
  const rank = { bad: 0, warn: 1, busy: 2 };
  return [...ofConfig(config), ...found.sort((one, other) => rank[one.tone] - rank[other.tone])];
}

/**
 * Return the name of the file of a configuration.
 *
 * @param {Api.ConfigState} config
 */
export const fileOf = (config) => config.path?.split("/").pop() || t("The file");

/**
 * Return the state of the configuration's file, in a sentence without its end, for the Overview and its own page.
 *
 * @param {Api.ConfigState} config
 */
export function configTitle(config) {
  const holes = { file: fileOf(config), since: timeOfDay(config.since), old: timeOfDay(config.in_force_since) };
  return config.state === "refused"
    ? t("{file} is refused since {since}; the configuration of {old} is in force", holes)
    : t("{file} has changed, or is gone, since {since}; the configuration of {old} is in force", holes);
}

/**
 * @param {Api.ConfigState | null} config
 * @returns {Problem[]}
 */
function ofConfig(config) {
  if (!config || config.state === "ok") return [];
  if (config.state === "changed" && Date.now() / 1000 - config.since < READS_S) return [];
  const [first = "", ...more] = config.errors ?? [];
  const rest = more.length ? ` ${count(more.length, "(and {count} more mistake)", "(and {count} more mistakes)")}` : "";
  const isRefused = config.state === "refused";
  const text = isRefused ? `${first}${rest}` : t("The gateway has not read it since: a reload does.");
  return [{ id: "config", tone: isRefused ? "bad" : "warn", title: configTitle(config), text, href: hrefOf("config") }];
}

/** @param {Worker[]} workers */
const namesOf = (workers) => new Set(workers.flatMap((one) => one.model_names));

/**
 * @param {Worker} worker
 * @returns {Problem[]}
 */
function ofWorker(worker) {
  /** @type {Problem[]} */
  const found = [];
  const href = hrefOf("workers", [worker.worker_id]);
  const tone = DOWN[worker.state];
  if (tone) {
    const again =
      worker.retry_in_s !== null
        ? ` ${t("It starts again in {time}.", { time: duration(left(worker.retry_in_s, worker.seen_at)) })}`
        : "";
    found.push({
      id: worker.worker_id,
      tone,
      title: isWords(worker),
      text: reasonOf(worker) + again,
      href,
    });
  } else if (worker.failure && worker.state !== "stopped") {
    found.push({ id: worker.worker_id, tone: "warn", title: worker.worker_id, text: worker.failure, href });
  }
  if (worker.circuit && worker.circuit.state !== "closed") {
    const text = count(
      worker.circuit.failures,
      "{count} request in a row failed; it gets none for a while.",
      "{count} requests in a row failed; it gets none for a while.",
    );
    const title = t("The circuit of {id} is {state}", {
      id: worker.worker_id,
      state: inWords(worker.circuit.state),
    });
    found.push({ id: `${worker.worker_id} circuit`, tone: "warn", title, text, href });
  }
  return found;
}

/**
 * @param {Model} model
 * @param {Worker[]} workers
 * @returns {Problem[]}
 */
function ofModel(model, workers) {
  const href = hrefOf("models", [], { find: model.id });
  const id = `model ${model.id}`;
  const coming = model.workers === 0 ? comingOf(workers, model.id) : undefined;
  const waits = model.queued ? count(model.queued, "{count} request waits", "{count} requests wait") : "";
  const forIt = waits && t("{waits} for it.", { waits });
  if (coming && isLoading(coming)) {
    const page = hrefOf("workers", [coming.worker_id]);
    const words = loadWords(coming);
    const text = sentences(`${words[0].toUpperCase()}${words.slice(1)}${t(".")}`, forIt);
    return [{ id, tone: "busy", title: t("{id} is loading", { id: model.id }), text, href: page }];
  }
  if (coming && isReturning(coming)) {
    const page = hrefOf("workers", [coming.worker_id]);
    const holes = { id: coming.worker_id, state: inWords(coming.state) };
    const text = sentences(t("{id} is {state}, and is started again.", holes), forIt);
    return [{ id, tone: "busy", title: t("{id} is being restarted", { id: model.id }), text, href: page }];
  }
  if (model.workers === 0 && model.loaded === null && !coming) {
    const text = waits ? forIt : t("No worker and no route serves it now.");
    return [{ id, tone: "bad", title: t("{id} has no replicas", { id: model.id }), text, href }];
  }
  if (model.waiting_s !== null && model.waiting_s >= WAITS_S) {
    const oldest = duration(passed(model.waiting_s, model.seen_at));
    const text = t("{waits}, the oldest one for {oldest}.", { waits, oldest });
    return [{ id, tone: "warn", title: t("Requests for {id} wait", { id: model.id }), text, href }];
  }
  return [];
}

/**
 * @param {Machine} machine
 * @returns {Problem[]}
 */
function ofMachine(machine) {
  const href = hrefOf("machines");
  const { memory_available_bytes: free, memory_total_bytes: total } = machine;
  const used = total && free !== null ? 1 - free / total : 0;
  /** @type {Problem[]} */
  const found = (machine.gpus ?? [])
    .filter((gpu) => gpu.failure)
    .map((gpu) => ({
      id: `${machine.name} ${gpu.index}`,
      tone: "bad",
      title: t("GPU {index} of {name} does not answer", { index: gpu.index, name: machine.name }),
      text: gpu.failure ?? "",
      href,
    }));
  if (used >= FULL) {
    const text = t("{used} of its memory is in use: the kernel may end a process.", { used: percent(used) });
    found.push({
      id: machine.name,
      tone: "warn",
      title: t("{name} is short of memory", { name: machine.name }),
      text,
      href,
    });
  }
  return found;
}
