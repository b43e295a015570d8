// Numbers, sizes and times as people read them.

import { t, tPlural } from "../texts.js";

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** What stands for a value that is not known. */
export const NONE = "–";

/**
 * Return a number: 1,234 or 12.5; with `short`, 1.2 M.
 *
 * @param {number | null | undefined} value
 * @param {{ short?: boolean }} how
 */
export function number(value, { short = false } = {}) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (short && size >= 1e9) return `${plain.format(value / 1e9)} G`;
  if (short && size >= 1e6) return `${plain.format(value / 1e6)} M`;
  if (short && size >= 1e4) return `${plain.format(value / 1e3)} k`;
  return size >= 100 ? whole.format(value) : plain.format(value);
}

/**
 * Return a share of 0 to 1 as 42 %.
 *
 * @param {number | null | undefined} value
 */
export const percent = (value) => (value === null || value === undefined ? NONE : `${whole.format(value * 100)} %`);

/**
 * Return a size: 1.5 GiB.
 *
 * @param {number | null | undefined} value
 */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? whole.format(size) : plain.format(size)} ${units[unit]}`;
}

/**
 * Return a duration in seconds: 1.5 ms, 340 ms, 12 s, 4 min, 3 h 20 min, 2 d.
 *
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.01) return `${plain.format(seconds * 1000)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${plain.format(seconds)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  const minutes = Math.round(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return hours < 72 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

/**
 * Return the seconds that are left of a time that was received at `seenAt` (in milliseconds since 1970).
 *
 * @param {number} seconds
 * @param {number} seenAt
 */
export const left = (seconds, seenAt = Date.now()) => Math.max(0, seconds - (Date.now() - seenAt) / 1000);

/**
 * Return the seconds that have passed, where there were `seconds` at `seenAt`.
 *
 * @param {number} seconds
 * @param {number} seenAt
 */
export const passed = (seconds, seenAt = Date.now()) => seconds + (Date.now() - seenAt) / 1000;

/**
 * Return how long ago a time is, given in seconds since 1970.
 *
 * @param {number | null | undefined} at
 */
export const age = (at) => (at ? t("{time} ago", { time: duration(Math.max(0, Date.now() / 1000 - at)) }) : NONE);

/** @type {Intl.DateTimeFormatOptions} */
const MINUTES = { hour: "2-digit", minute: "2-digit", hour12: false };

/**
 * Return a time of day, given in seconds since 1970: 12:31; with the date unless it is today's.
 *
 * @param {number | null | undefined} at
 */
export function timeOfDay(at, parts = MINUTES) {
  if (!at) return NONE;
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString([], parts);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/**
 * Return a time of day to the second.
 *
 * @param {number | null | undefined} at
 */
export const when = (at) => timeOfDay(at, { ...MINUTES, second: "2-digit" });

/**
 * Return `1 worker`, `2 workers`: the text for a single thing, else the text for many, with the number in {count}.
 *
 * @param {number} value
 * @param {string} single
 * @param {string} many
 * @param {Record<string, unknown>} [holes]
 */
export const count = (value, single, many, holes) => tPlural(value, single, many, { ...holes, count: number(value) });
