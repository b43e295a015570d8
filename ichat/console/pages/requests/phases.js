// The phases of a finished request, in their order and in proportion.

import { t } from "../../texts.js";

/**
 * A part of a request's time: `begun` and `seconds` are seconds since the request's beginning.
 *
 * @typedef {{ name: string, title: string, begun: number, seconds: number }} Part
 */

/** @type {[keyof Api.FinishedRequest["phases"], string][]} */
const PHASES = [
  ["queued_s", t("Queue")],
  ["overhead_s", t("Gateway")],
  ["head_s", t("Until the head")],
  ["first_s", t("Until the first token")],
  ["body_s", t("Until the end")],
];
/** Shorter rests are differences between clocks. */
const REST_S = 1e-4;
/** With less output or time, tokens per second say nothing. */
const TOKENS_MIN = 20;
const BODY_S_MIN = 0.1;

/**
 * Return the parts of a request's time; time that belongs to no phase is the last.
 *
 * @param {Api.FinishedRequest} request
 * @returns {Part[]}
 */
export function partsOf(request) {
  const { phases } = request;
  const parts = [];
  let begun = 0;
  for (const [name, title] of PHASES) {
    const seconds = phases[name];
    if (seconds === null) continue;
    parts.push({ name, title, begun, seconds });
    begun += seconds;
  }
  const rest = request.duration_s - begun;
  if (phases.body_s === null && rest > REST_S) {
    const title = phases.overhead_s === null ? t("In the gateway") : t("Without an answer");
    parts.push({ name: "rest", title, begun, seconds: rest });
  }
  return parts;
}

/**
 * Return the seconds until the first token, or null if there was none.
 *
 * @param {Api.FinishedRequest} request
 */
export function firstTokenOf({ phases }) {
  const { queued_s, overhead_s, head_s, first_s } = phases;
  if (overhead_s === null || head_s === null || first_s === null) return null;
  return queued_s + overhead_s + head_s + first_s;
}

/**
 * Return the share of the prompt's tokens that the engine had in its cache, or null if that is not known.
 *
 * @param {Api.FinishedRequest} request
 */
export function cachedOf({ tokens }) {
  return tokens?.input ? Math.min(1, tokens.cached / tokens.input) : null;
}

/**
 * Return the tokens a second after the first token, or null if the answer is too short to say.
 *
 * @param {Api.FinishedRequest} request
 */
export function speedOf({ tokens, phases }) {
  if (!tokens || phases.body_s === null) return null;
  return tokens.output < TOKENS_MIN || phases.body_s < BODY_S_MIN ? null : (tokens.output - 1) / phases.body_s;
}

/**
 * Return the tone of a request's end.
 *
 * @param {Api.FinishedRequest} request
 */
export function toneOf({ status, error }) {
  if (status === 499) return "idle";
  if (status >= 500 || (error && status < 400)) return "bad";
  return status >= 400 ? "warn" : "ok";
}
