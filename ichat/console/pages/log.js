// A worker's output as it comes, with a pause and a filter.

import { stream } from "../api.js";
import { useStore } from "../store.js";
import { Button, html, number, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../ui.js";

const TAIL = 1000;
const LINES_MAX = 5000;
const DRAWN_MAX = 1500;
const GATHER_MS = 120;
const AGAIN_MS = 2000;
const NEAR_PX = 40;

function toneOf(line) {
  if (/\b(ERROR|CRITICAL|FATAL|Traceback|Exception)\b|Error:/.test(line)) return "bad";
  if (/\bWARN(ING)?\b/.test(line)) return "warn";
  return "";
}

/** Read a worker's lines until the component goes; returns [lines, status]. */
function useLines(id, previous, isPaused) {
  const [shown, show] = useState({ lines: [], status: "connecting" });
  const begun = useStore((all) => all.begun);
  const [round, setRound] = useState(0);
  const held = useRef({ lines: [], status: "connecting", last: "", count: 0, timer: 0, isPaused });
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
    if (now.status === "ended" && !previous) setRound((value) => value + 1); // with the gateway that was there before
  }, [begun]);
  useEffect(() => {
    const control = new AbortController();
    Object.assign(now, { lines: [], status: "connecting", last: "" });
    show({ lines: [], status: "connecting" });
    const add = (event) => {
      const data = JSON.parse(event.data);
      if (event.id) now.last = event.id;
      const one =
        event.name === "gap"
          ? { line: `… ${Object.values(data)[0]} lines are missing here …`, tone: "gap" }
          : { time: data.time, line: data.line, tone: toneOf(data.line) };
      now.count += 1; // lines of two gateways may have the same numbers
      now.lines.push({ ...one, key: now.count });
      if (now.lines.length > LINES_MAX) now.lines.splice(0, now.lines.length - LINES_MAX);
      draw();
    };
    follow(id, previous, control.signal, now, add, draw);
    return () => {
      control.abort();
      clearTimeout(now.timer);
      now.timer = 0;
    };
  }, [id, previous, round]);
  return [shown.lines, shown.status];
}

async function follow(id, previous, signal, now, add, draw) {
  const query = previous ? "previous=1" : `tail=${TAIL}`;
  while (!signal.aborted) {
    try {
      const headers = now.last ? { "last-event-id": now.last } : {};
      const onOpen = () => {
        now.status = previous ? "ended" : "live";
        draw();
      };
      await stream(`/v1/logs/stream/${encodeURIComponent(id)}?${query}`, { signal, headers, onOpen }, add);
      now.status = "ended";
      draw();
      return;
    } catch (error) {
      if (signal.aborted) return;
      now.status = error.message;
      draw();
      if (error.status >= 400 && error.status < 500) return;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** The log of a worker. */
export function Log({ id }) {
  const [previous, setPrevious] = useState(false);
  const [isPaused, setPaused] = useState(false);
  const [text, setText] = useState("");
  const [lines, status] = useLines(id, previous, isPaused);
  const place = useRef(null);
  const sticks = useRef(true);
  const found = useMemo(() => {
    const wanted = text.toLowerCase();
    return wanted ? lines.filter((one) => one.line.toLowerCase().includes(wanted)) : lines;
  }, [lines, text]);
  useLayoutEffect(() => {
    if (sticks.current && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [found]);
  const scrolled = ({ currentTarget: box }) => {
    sticks.current = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
  };
  const drawn = found.slice(-DRAWN_MAX);
  const said = text ? `${number(found.length)} of ${number(lines.length)} lines` : `${number(lines.length)} lines`;
  return html`<div class="log">
    <div class="log-bar">
      <input type="search" aria-label="Find lines" placeholder="Find ( / )" value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <${Button} small icon=${isPaused ? "play" : "pause"} onClick=${() => setPaused(!isPaused)}
        aria-pressed=${isPaused}>${isPaused ? "Go on" : "Pause"}<//>
      <label class="check"><input type="checkbox" checked=${previous}
        onChange=${(event) => setPrevious(event.target.checked)} /> the run before</label>
      <span class="spring"></span>
      <span class="muted num" role="status">${isPaused ? "paused" : status} · ${said}</span>
    </div>
    <div class="lines live" ref=${place} onScroll=${scrolled} tabindex="0" role="log" aria-label="Log" aria-live="off">
      ${drawn.length < found.length && html`<div class="gap">older lines are not shown</div>`}
      ${drawn.map((one) => html`<div key=${one.key} class=${one.tone} title=${one.time}>${one.line || " "}</div>`)}
      ${!drawn.length && html`<div class="gap">${text ? "No line has that." : "Nothing was written yet."}</div>`}
    </div></div>`;
}
