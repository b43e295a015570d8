// The lanes of requests as rates: means over the last seconds, which fade when no more requests arrive.

/**
 * A lane: `tokens` and `ended` are rates a second.
 *
 * @typedef {Api.Lanes["lanes"][number]} Lane
 * `weight` is the share of a mean that has been seen: the first second is shown as it is, not as a rise from nothing.
 *
 * @typedef {{ at: number, list: Lane[], leftOut: number, weight: number }} Rates
 */

/** The time constant of a rate, in seconds. */
const FADE_S = 5;
/** The gateway sends lanes about each second while there are any; the rates fade when it has not for this time. */
const SILENT_S = 2.5;
/** Lower rates are no lane. */
const LEAST = 0.02;

/** An event without lanes. @type {Api.Lanes} */
export const NO_LANES = { seconds: 1, lanes: [], left_out: 0 };
/** @type {Rates} */
export const NO_RATES = { at: 0, list: [], leftOut: 0, weight: 0 };

const wayOf = (/** @type {Lane} */ lane) => JSON.stringify([lane.key, lane.name, lane.model, lane.worker]);

/**
 * @param {Lane} lane
 * @param {number} factor
 * @returns {Lane}
 */
const faded = (lane, factor) => ({ ...lane, tokens: lane.tokens * factor, ended: lane.ended * factor });

const isLane = (/** @type {Lane} */ lane) => lane.in_flight > 0 || lane.tokens > LEAST || lane.ended > LEAST;

/**
 * Return the rates after an event `lanes` that has arrived at `now`, in milliseconds since 1970.
 *
 * @param {Rates} before
 * @param {Api.Lanes} event
 * @param {number} now
 * @returns {Rates}
 */
export function withLanes(before, event, now) {
  const { seconds } = event; // 0: nothing was counted before
  const kept = Math.exp(-seconds / FADE_S);
  const share = seconds > 0 ? (1 - kept) / seconds : 0;
  /** @type {Map<string, Lane>} */
  const found = new Map(before.list.map((lane) => [wayOf(lane), { ...faded(lane, kept), in_flight: 0 }]));
  for (const lane of event.lanes) {
    const old = found.get(wayOf(lane));
    const mean = (/** @type {number} */ was, /** @type {number} */ count) => was + count * share;
    const tokens = mean(old?.tokens ?? 0, lane.tokens);
    found.set(wayOf(lane), { ...lane, tokens, ended: mean(old?.ended ?? 0, lane.ended) });
  }
  return {
    at: now,
    list: [...found.values()].filter(isLane),
    leftOut: event.left_out,
    weight: before.weight * kept + 1 - kept,
  };
}

/**
 * Return the lanes at `now`; they are faded if no event has arrived for a while.
 *
 * @param {Rates} rates
 * @param {number} now
 */
export function lanesAt(rates, now) {
  const silent = (now - rates.at) / 1000 - SILENT_S;
  const factor = Math.exp(-Math.max(0, silent) / FADE_S) / (rates.weight || 1);
  return rates.list.map((lane) => faded(lane, factor)).filter(isLane);
}
