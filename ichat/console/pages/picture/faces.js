// The contents of the picture's nodes of models, workers and GPUs. Pure functions.

import { hrefOf } from "../../router.js";
import { t } from "../../texts.js";
import { inWords } from "../../ui/api_words.js";
import { toneOfState } from "../../ui/basics.js";
import { bytes, count, number, percent } from "../../ui/format.js";
import { comingOf, elapsedOf, expectedOf, isLoading, isReturning, loadWords, stateWords } from "../states.js";

/** @import { Machine, Model, Worker } from "../../store.js" */
/** @import { Tone } from "../../ui/basics.js" */
/** @import { Node } from "./graph.js" */

/** The end of the id of the node that all others share. */
export const OTHERS = "\u0000others";
const WORDS_MAX = 80;
/** The worst first: a group has the tone of its worst member. @type {Tone[]} */
const WORST = ["bad", "warn", "busy", "ok", "idle"];

export const natural = new Intl.Collator("en", { numeric: true }).compare;

/**
 * Return a text cut to a length that can be read out.
 *
 * @param {string} text
 */
export const cut = (text) => (text.length > WORDS_MAX ? `${text.slice(0, WORDS_MAX)}…` : text);

/** @param {Worker} worker */
const toneOf = (worker) => (isLoading(worker) || isReturning(worker) ? "busy" : toneOfState(worker.state));

/** @param {Tone[]} tones */
export const worstOf = (tones) => WORST.find((tone) => tones.includes(tone)) ?? "idle";

/** @param {Worker} worker */
function loadOf(worker) {
  if (!isLoading(worker)) return null;
  const expected = expectedOf(worker);
  return expected ? Math.min(0.97, (elapsedOf(worker) ?? 0) / expected) : 0.1;
}

/**
 * Return how many requests wait; "" for none.
 *
 * @param {number} queued
 */
export const waitsText = (queued) => (queued ? count(queued, "{count} waits", "{count} wait") : "");

/**
 * Return the contents of a model's node.
 *
 * @param {Model} model
 * @param {Worker[]} workers
 * @returns {Partial<Node>}
 */
export function faceOf(model, workers) {
  const coming = model.workers ? undefined : comingOf(workers, model.id);
  const waits = waitsText(model.queued);
  const works = model.in_flight ? t("{count} in flight", { count: number(model.in_flight) }) : "";
  const face = { title: model.id, queued: model.queued, href: hrefOf("models", [], { find: model.id }) };
  const said = (/** @type {string} */ first) => [waits, first].filter(Boolean).join(" · ");
  if (model.workers) return { ...face, tone: "ok", note: said(works) || t("ready") };
  if (coming && isLoading(coming))
    return { ...face, tone: "busy", note: said(loadWords(coming)), load: loadOf(coming) };
  if (coming) return { ...face, tone: "warn", note: said(stateWords(coming) || inWords(coming.state)) };
  if (model.loaded === false) return { ...face, tone: "idle", note: said(t("on demand")) };
  return { ...face, tone: "bad", note: said(t("no replicas")) };
}

/**
 * Return the contents of the node of a worker, or of several.
 *
 * @param {Worker[]} members
 * @param {string} model
 * @returns {Partial<Node>}
 */
export function faceOfWorkers(members, model) {
  const inFlight = members.reduce((sum, one) => sum + one.in_flight, 0);
  const works = inFlight ? t("{count} in flight", { count: number(inFlight) }) : "";
  if (members.length === 1) {
    const [worker] = members;
    const note = worker.state === "ready" ? works || t("ready") : stateWords(worker) || inWords(worker.state);
    const href = hrefOf("workers", [worker.worker_id]);
    return { title: worker.worker_id, tone: toneOf(worker), note, load: loadOf(worker), href };
  }
  const sorted = [...members].sort((one, other) => natural(one.worker_id, other.worker_id));
  const cells = sorted.map(toneOf);
  const sum = (/** @type {string} */ word, /** @type {Tone[]} */ ...tones) => {
    const found = cells.filter((tone) => tones.includes(tone)).length;
    return found ? `${number(found)} ${word}` : "";
  };
  const parts = [works, sum(t("down"), "bad", "warn"), sum(t("loading"), "busy")].filter(Boolean);
  const note = parts.join(" · ") || sum(t("ready"), "ok") || sum(t("on demand"), "idle");
  const href = hrefOf("workers", [], model ? { find: model } : {});
  const title = count(members.length, "{count} worker", "{count} workers");
  return {
    title,
    words: model && t("{workers} of {model}", { workers: title, model: cut(model) }),
    tone: worstOf(cells),
    note,
    cells,
    href,
  };
}

/** @param {number | null | undefined} use */
const useClass = (use) =>
  use === null || use === undefined ? "use-0" : `use-${Math.min(4, Math.ceil(Math.max(0, use) * 4))}`;

/**
 * @param {{ machine: Machine, gpu: NonNullable<Machine["gpus"]>[number] }} of
 * @param {boolean} isByMachine
 * @param {(id: string) => string} seat
 * @param {Machine[]} machines
 * @returns {Partial<Node>}
 */
export function faceOfGpu({ machine, gpu }, isByMachine, seat, machines) {
  const href = hrefOf("machines");
  if (!isByMachine) {
    const note = gpu.failure
      ? t("does not answer")
      : [gpu.use !== null && percent(gpu.use), bytes(gpu.memory_used_bytes)].filter(Boolean).join(" · ");
    const tone = gpu.failure ? "bad" : gpu.held_by.length ? "ok" : "idle";
    return { title: `${machine.name} · ${gpu.index}`, note, tone, href };
  }
  const own = machines.filter((one) => one.gpus?.length && seat(one.id) === seat(machine.id));
  const cells = own.flatMap((one) => (one.gpus ?? []).map((each) => (each.failure ? "bad" : useClass(each.use))));
  const title = seat(machine.id).endsWith(OTHERS)
    ? count(own.length, "{count} other machine", "{count} other machines")
    : machine.name;
  const note = count(cells.length, "{count} GPU", "{count} GPUs");
  return { title, note, tone: cells.includes("bad") ? "bad" : "ok", cells, href };
}
