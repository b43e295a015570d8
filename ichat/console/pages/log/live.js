// A log as it arrives.

import { stream } from "../../api.js";
import { useStore } from "../../store.js";
import { t } from "../../texts.js";
import { useEffect, useRef, useState } from "../../ui.js";

const TAIL = 1000;
const LINES_MAX = 5000;
const CHARACTERS_MAX = 4 * 1024 * 1024;
const GATHER_MS = 120;
const AGAIN_MS = 1000;
const AGAIN_MS_MAX = 10_000;
const SETTLED_MS = 500;
/** What will be refused the next time, too. */
const FINAL = new Set([400, 401, 403, 404]);

/**
 * A line; `position` and `previous` are those of a page.
 *
 * @typedef {{ key: string, line: string, tone: string, time: string, position?: string, previous?: boolean }} Line
 */

/** @param {string} line */
export function toneOf(line) {
  if (/\b(ERROR|CRITICAL|FATAL|Traceback|Exception)\b|Error:/.test(line)) return "bad";
  if (/\bWARN(ING)?\b/.test(line)) return "warn";
  return "";
}

/**
 * @typedef {{ lines: Line[], status: string, last: string, count: number, characters: number, timer: number,
 *   isPaused: boolean }} Held
 */

/**
 * Read lines until the component goes; returns [lines, status].
 *
 * @param {string} path the stream's address
 * @param {boolean} previous
 * @param {boolean} isPaused
 * @returns {[Line[], string]}
 */
export function useLines(path, previous, isPaused) {
  const [shown, show] = useState({ lines: /** @type {Line[]} */ ([]), status: "connecting" });
  const gateway = useStore((all) => all.gateway?.id); // lines of two gateways may have the same numbers
  /** @type {Held} */
  const fresh = { lines: [], status: "connecting", last: "", count: 0, characters: 0, timer: 0, isPaused };
  const held = useRef(fresh);
  const now = held.current;
  now.isPaused = isPaused;
  const draw = () => {
    if (now.timer || now.isPaused) return;
    now.timer = setTimeout(() => {
      now.timer = 0;
      show({ lines: [...now.lines], status: now.status });
    }, GATHER_MS);
  };
  useEffect(() => draw(), [isPaused]);
  useEffect(() => {
    const control = new AbortController();
    Object.assign(now, { lines: [], status: "connecting", last: "", characters: 0 });
    show({ lines: [], status: "connecting" });
    const add = (/** @type {import("../../api.js").StreamEvent} */ event) => {
      const data = JSON.parse(event.data);
      if (event.id) now.last = event.id;
      const one =
        event.name === "gap"
          ? {
              line: t("… {count} lines are missing here …", { count: Object.values(data)[0] }),
              tone: "gap",
              time: "",
            }
          : { time: data.time, line: data.line, tone: toneOf(data.line) };
      if (one.tone === "gap" && now.lines.at(-1)?.line === one.line) return; // it has no number: it is sent again
      now.count += 1;
      now.characters += one.line.length;
      now.lines.push({ ...one, key: `${now.count}` });
      while (now.lines.length > LINES_MAX || (now.characters > CHARACTERS_MAX && now.lines.length > 1)) {
        now.characters -= now.lines.shift()?.line.length ?? 0;
      }
      draw();
    };
    follow(path, previous, control.signal, now, add, draw);
    return () => {
      control.abort();
      clearTimeout(now.timer);
      now.timer = 0;
    };
  }, [path, previous, gateway]);
  return [shown.lines, shown.status];
}

/**
 * Follow lines. A stream that ended is opened again where it stood, ever less often while nothing arrives:
 * with the worker's next start, or after a break, its lines go on.
 *
 * @param {string} path
 * @param {boolean} previous
 * @param {AbortSignal} signal
 * @param {Held} now
 * @param {(event: import("../../api.js").StreamEvent) => void} add
 * @param {() => void} draw
 */
async function follow(path, previous, signal, now, add, draw) {
  const query = previous ? "previous=1" : `tail=${TAIL}`;
  const say = (/** @type {string} */ status) => {
    now.status = status;
    draw();
  };
  let wait = AGAIN_MS;
  while (!signal.aborted) {
    let settled = 0;
    const before = now.count;
    try {
      /** @type {Record<string, string>} */
      const headers = now.last ? { "last-event-id": now.last } : {};
      const isAgain = now.status === "ended"; // a stream that ends again at once was not live
      const onOpen = () => {
        if (!previous) settled = setTimeout(() => say("live"), isAgain ? SETTLED_MS : 0);
      };
      await stream(`${path}?${query}`, { signal, headers, onOpen }, add);
      say("ended");
      if (previous) return;
    } catch (error) {
      if (signal.aborted) return;
      say(error.message);
      if (FINAL.has(error.status)) return;
    } finally {
      clearTimeout(settled);
    }
    if (now.count > before) wait = AGAIN_MS;
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(AGAIN_MS_MAX, wait * 2);
  }
}
