// Pages of a worker's kept lines.

import { api } from "../../api.js";
import { useEffect, useRef, useState } from "../../ui.js";
import { toneOf } from "./live.js";
/** @import { Line } from "./live.js" */

/** Lines of pages that a view keeps. */
export const KEPT_MAX = 5000;
const PAGE_LINES = 500;

/**
 * Return a page of a worker's lines; `query` has parameters of `/v1/logs/pages/{id}`.
 *
 * @param {string} id
 * @param {Record<string, string>} query
 * @param {AbortSignal} signal
 */
export async function readPage(id, query, signal) {
  const text = new URLSearchParams({ limit: String(PAGE_LINES), ...query });
  const page = await api.get(`/v1/logs/pages/${encodeURIComponent(id)}?${text}`, { signal });
  const lines = page.lines.map((one) => ({ ...one, key: one.position, time: one.time ?? "", tone: toneOf(one.line) }));
  return { ...page, lines };
}

/**
 * Return where the lines before these lines end: their first time, and how many of these lines have it.
 *
 * @param {Line[]} lines
 * @returns {Record<string, string>}
 */
export function beginOf(lines) {
  const first = lines.find((one) => one.time);
  if (!first) return {};
  const from = lines.indexOf(first);
  const next = lines.findIndex((one, index) => index > from && one.time !== first.time);
  return { before: first.time, known: String((next < 0 ? lines.length : next) - from) };
}

/** @typedef {{ lines: Line[], before: string | null, joins: string, isBusy: boolean, error: string }} Older */

/** @type {Older} */
const NONE = { lines: [], before: "", joins: "", isBusy: false, error: "" };

/**
 * Older lines than a log's live lines: [the lines read, a function that reads more].
 *
 * `joins` is the key of the live line before which they belong; `before` is null where no older line is kept.
 *
 * @param {string} id "" for a log without pages
 * @param {Line[]} live
 * @param {Record<string, string>} query with `text`, only lines that contain it
 * @returns {[Older, () => Promise<void>]}
 */
export function useOlder(id, live, query) {
  const [older, set] = useState(NONE);
  const control = useRef(new AbortController());
  const key = JSON.stringify([id, query]);
  useEffect(() => {
    control.current = new AbortController();
    set(NONE);
    return () => control.current.abort();
  }, [key]);
  const read = async () => {
    const { signal } = control.current;
    const from = older.before ? { before: older.before } : beginOf(live);
    set((now) => ({ ...now, isBusy: true, error: "" }));
    try {
      const page = await readPage(id, { ...query, ...from }, signal);
      set((now) => ({
        lines: [...page.lines, ...now.lines],
        before: page.before,
        joins: now.joins || (live[0]?.key ?? ""),
        isBusy: false,
        error: "",
      }));
    } catch (error) {
      if (!signal.aborted) set((now) => ({ ...now, isBusy: false, error: error.message }));
    }
  };
  return [older, read];
}

/** @typedef {{ lines: Line[], before: string | null, after: string | null, isBusy: boolean, error: string }} Part */

/**
 * The lines around a position: [the lines read, a function that reads older or newer lines].
 *
 * @param {string} id
 * @param {string} at
 * @returns {[Part, (way: "before" | "after") => Promise<void>]}
 */
export function usePart(id, at) {
  /** @type {Part} */
  const fresh = { lines: [], before: at, after: at, isBusy: true, error: "" };
  const [part, set] = useState(fresh);
  const control = useRef(new AbortController());
  const read = async (/** @type {"before" | "after"} */ way, /** @type {Part} */ now) => {
    const { signal } = control.current;
    const from = now[way];
    if (from === null) return now;
    const page = await readPage(id, { [way]: from }, signal);
    return way === "before"
      ? { ...now, lines: [...page.lines, ...now.lines], before: page.before }
      : { ...now, lines: [...now.lines, ...page.lines], after: page.after };
  };
  const settle = async (/** @type {Promise<Part>} */ found) => {
    const { signal } = control.current;
    try {
      const now = await found;
      if (!signal.aborted) set({ ...now, isBusy: false });
    } catch (error) {
      if (!signal.aborted) set((now) => ({ ...now, isBusy: false, error: error.message }));
    }
  };
  useEffect(() => {
    control.current = new AbortController();
    set(fresh);
    settle(read("after", fresh).then((now) => read("before", now)));
    return () => control.current.abort();
  }, [id, at]);
  const more = async (/** @type {"before" | "after"} */ way) => {
    set((now) => ({ ...now, isBusy: true, error: "" }));
    await settle(read(way, part));
  };
  return [part, more];
}
