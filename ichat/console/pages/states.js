// The states of workers and the progress of their loads, in words: pure functions of their rows.

import { stateName } from "../ui/basics.js";
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
 * Return the present phase of a worker's load, as its engine reports it.
 *
 * @param {Worker} worker
 */
export function stepOf(worker) {
  const phase = worker.load?.phases.at(-1);
  return phase ? [phase.name, phase.detail].filter(Boolean).join(" ") : (worker.phase ?? stateName(worker.state));
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
  return `${stepOf(worker)}, ${rest > 0 ? `ready in about ${duration(rest)}` : "which takes longer than usual"}`;
}

/**
 * Return a worker's activity in its state, in a few words.
 *
 * @param {Worker} worker
 */
export function stateWords(worker) {
  if (worker.retry_in_s) return `again in ${duration(left(worker.retry_in_s, worker.seen_at))}`;
  if (isLoading(worker)) return loadWords(worker);
  if (worker.state === "ready") return worker.circuit && worker.circuit.state !== "closed" ? "circuit open" : "";
  if (isReturning(worker)) return "is started again";
  const says = DOWN.has(worker.state) || worker.state === "cold" ? "" : worker.phase; // its last report is old then
  return says && says !== worker.state && says !== "ready" ? says : ""; // a drained worker reports `ready`
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
  lost?.length ? `Its group has lost ${lost.map((one) => one.worker_id).join(", ")}.` : "";
/** @param {Worker} worker */
const silenceWords = (worker) =>
  worker.heartbeat_age_s === null
    ? "It has sent no heartbeat."
    : `Its last heartbeat arrived ${duration(passed(worker.heartbeat_age_s, worker.seen_at))} ago.`;

/**
 * Return a worker's activity, and the reason of a problem: a line of a list.
 *
 * @param {Worker} worker
 */
export const stateLine = (worker) => [stateWords(worker), reasonOf(worker)].filter(Boolean).join(": ");
