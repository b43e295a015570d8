// The states of workers and the progress of their loads, in words: pure functions of their rows.

import { t } from "../texts.js";
import { inWords } from "../ui/api_words.js";
import { duration, left, passed } from "../ui/format.js";

/** @import { Worker } from "../store.js" */

const LOADING = new Set(["starting", "loading", "waking"]);
const DOWN = new Set(["failed", "restarting", "unhealthy", "wedged", "broken", "stale", "pending"]);

/**
 * Return whether a worker is about to be ready.
 *
 * @param {Pick<Worker, "state" | "load">} worker
 */
export const isLoading = ({ state, load }) => LOADING.has(state) || (Boolean(load) && !DOWN.has(state));

/**
 * Return whether a worker ends only to be started again, though nothing was wrong with it.
 *
 * @param {Pick<Worker, "state" | "coming">} worker
 */
export const isReturning = ({ state, coming }) => Boolean(coming) && !LOADING.has(state) && !DOWN.has(state);

/**
 * Return whether a worker is down since its process has ended: else its cause is of an earlier end.
 *
 * @param {Pick<Worker, "state">} worker
 */
export const hasEnded = ({ state }) => state === "failed" || state === "restarting";

/**
 * Return the worker that will serve a model soon: a loading worker, else a starting worker; undefined: none.
 *
 * @param {Worker[]} workers
 * @param {string} model
 */
export function comingOf(workers, model) {
  const own = workers.filter((one) => one.model_names.includes(model));
  return own.find(isLoading) ?? own.find(isReturning) ?? own.find((one) => one.state === "restarting");
}

/**
 * Return a load's phases, {name, detail, seconds, expected_s}; the last phase is under way: its seconds go on.
 *
 * @param {Worker} worker
 */
export function phasesOf(worker) {
  const phases = worker.load?.phases ?? [];
  const at = phases.length - 1;
  return phases.map((one, index) => (index < at ? one : { ...one, seconds: passed(one.seconds, worker.seen_at) }));
}

/**
 * Return a phase of a load in words: `loading weights 2/4 shards`.
 *
 * @param {{ name: string, detail?: string | null }} phase
 */
export const stepWords = ({ name, detail }) => [inWords(name), detail].filter(Boolean).join(" ");

/**
 * Return a phase as an engine without a list of phases reports it, in words: `loading weights 64 %`.
 *
 * @param {string} text
 */
function phaseWords(text) {
  const [, name, detail] = /^(.*?)( \d.*)?$/s.exec(text) ?? [];
  return `${inWords(name ?? text)}${detail ?? ""}`;
}

/**
 * Return which state a worker has, in a sentence without its end.
 *
 * @param {Pick<Worker, "worker_id" | "state">} worker
 */
export const isWords = (worker) => t("{id} is {state}", { id: worker.worker_id, state: inWords(worker.state) });

/**
 * Return the present phase of a worker's load, as its engine reports it.
 *
 * @param {Worker} worker
 */
export function stepOf(worker) {
  const phase = worker.load?.phases.at(-1);
  return phase ? stepWords(phase) : phaseWords(worker.phase ?? worker.state);
}

/**
 * Return the duration of a load until now, in seconds; null: not known.
 *
 * @param {Worker} worker
 */
export const elapsedOf = (worker) => (worker.load ? passed(worker.load.elapsed_s, worker.seen_at) : null);

/**
 * Return the expected duration of a load, by earlier loads, in seconds; null: not known.
 *
 * @param {Worker} worker
 */
export const expectedOf = (worker) => worker.load?.expected_s ?? null;

/**
 * Return the seconds until a worker is probably ready; null: not known; 0: it should be by now.
 *
 * @param {Worker} worker
 */
export function restOf(worker) {
  const expected = expectedOf(worker);
  if (expected !== null) return Math.max(0, expected - (elapsedOf(worker) ?? 0));
  return worker.ready_in_s === null ? null : left(worker.ready_in_s, worker.seen_at);
}

/**
 * Return the progress of a load: `loading weights, ready in about 40 s`.
 *
 * @param {Worker} worker
 */
export function loadWords(worker) {
  const rest = restOf(worker);
  if (rest === null) return stepOf(worker);
  const holes = { step: stepOf(worker), time: duration(rest) };
  return rest > 0 ? t("{step}, ready in about {time}", holes) : t("{step}, which takes longer than usual", holes);
}

/**
 * Return a worker's activity in its state, in a few words.
 *
 * @param {Worker} worker
 */
export function stateWords(worker) {
  if (worker.retry_in_s) return t("again in {time}", { time: duration(left(worker.retry_in_s, worker.seen_at)) });
  if (isLoading(worker)) return loadWords(worker);
  if (worker.state === "ready") return worker.circuit && worker.circuit.state !== "closed" ? t("circuit open") : "";
  if (isReturning(worker)) return t("is started again");
  const says = DOWN.has(worker.state) || worker.state === "cold" ? "" : worker.phase; // its last report is old then
  return says && says !== worker.state && says !== "ready" ? phaseWords(says) : ""; // a drained worker reports `ready`
}

/**
 * Return why a worker is down, in a sentence; "" if it is not down.
 *
 * @param {Worker} worker
 */
export function reasonOf(worker) {
  if (!DOWN.has(worker.state)) return worker.failure ?? "";
  return (hasEnded(worker) && worker.cause) || worker.failure || lostWords(worker) || silenceWords(worker);
}

/** @param {Worker} worker */
const lostWords = ({ lost }) =>
  lost?.length ? t("Its group has lost {ids}.", { ids: lost.map((one) => one.worker_id).join(", ") }) : "";
/** @param {Worker} worker */
const silenceWords = (worker) =>
  worker.heartbeat_age_s === null
    ? t("It has sent no heartbeat.")
    : t("Its last heartbeat arrived {time} ago.", {
        time: duration(passed(worker.heartbeat_age_s, worker.seen_at)),
      });

/**
 * Return a worker's activity, and the reason of a problem: a line of a list.
 *
 * @param {Worker} worker
 */
export const stateLine = (worker) => [stateWords(worker), reasonOf(worker)].filter(Boolean).join(t(": "));
