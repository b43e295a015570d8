// Charts over time, drawn by uPlot in the colours of the theme.

import { useEffect, useRef, useState } from "preact/hooks";
import { t } from "../texts.js";
import { number, when } from "./format.js";
import { html } from "./html.js";

/**
 * The values of a line, null where there is none; `color` is a variable of the style sheet.
 *
 * @typedef {{ title: string, values: (number | null)[], color?: string, fill?: boolean }} Series
 */

const HEIGHT = 132;
/** uPlot, which the page has loaded before. @type {typeof import("uplot")} */
const uPlot = Reflect.get(globalThis, "uPlot");

/**
 * Return the colour that a variable of the style sheet has in the theme that is on.
 *
 * @param {string} name
 */
export function colorOf(name) {
  const probe = document.createElement("span");
  probe.className = "probe";
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

/**
 * Return a tick's time of day: with seconds where ticks are less than a minute apart.
 *
 * @param {number} at
 * @param {number} step
 */
const clock = (at, step) =>
  new Date(at * 1000).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    second: step < 60 ? "2-digit" : undefined,
    hour12: false,
  });

/** @param {number} value */
const short = (value) => number(value, { short: true });

/**
 * @param {{ series: Series[], show: (index: number | null) => void, max?: number, format: (value: number) => string,
 *   sync?: string, width: number }} how
 * @returns {import("uplot").Options}
 */
function optionsOf({ series, show, max, format, sync, width }) {
  const muted = colorOf("muted");
  const grid = { stroke: colorOf("line"), width: 1 };
  const axis = { stroke: muted, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    padding: [10, 10, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, sync: sync ? { key: sync } : undefined },
    scales: { x: { time: true }, y: { range: (_plot, _low, high) => [0, max ?? Math.max(1, high * 1.15)] } },
    axes: [
      {
        ...axis,
        grid: { show: false },
        values: (_plot, ticks, _axis, _space, step) => ticks.map((at) => clock(at, step)),
        space: 70,
        size: 26,
      },
      { ...axis, size: 46, space: 34, values: (_plot, ticks) => ticks.map((tick) => format(tick)) },
    ],
    series: [
      {},
      ...series.map(({ title, color = "chart-1", fill }) => {
        const stroke = colorOf(color);
        const area = stroke.replace("rgb(", "rgba(").replace(")", ", 0.14)");
        const points = { show: false };
        return { label: title, stroke, width: 1.75, fill: fill ? area : undefined, points, spanGaps: true };
      }),
    ],
    hooks: { setCursor: [(plot) => show(plot.cursor.idx ?? null)] },
  };
}

/**
 * A chart over time with its newest values, or those under the pointer, in words.
 *
 * `times`: seconds since 1970. `series`: {title, values, color?, fill?}. `unit` stands behind values. `max`: the upper
 * end of the axis. `sync`: charts of the same name share the pointer.
 *
 * @param {{ title: string, times: number[], series: Series[], unit?: string, max?: number, sync?: string,
 *   format?: (value: number) => string }} props
 */
export function Chart({ title, times, series, unit = "", max, sync, format = short }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {import("uplot") | null} */ (null));
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const change = () => setTheme((value) => value + 1);
    addEventListener("ichat-theme", change);
    return () => removeEventListener("ichat-theme", change);
  }, []);
  useEffect(() => {
    if (!place.current) return undefined;
    const width = place.current.clientWidth || 300;
    const options = optionsOf({ series, show: setAt, max, format, sync, width });
    plot.current = new uPlot(options, [times, ...series.map((one) => one.values)], place.current);
    const observer = new ResizeObserver(([entry]) => {
      plot.current?.setSize({ width: Math.max(120, Math.floor(entry.contentRect.width)), height: HEIGHT });
    });
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [theme, max, sync, series.map((one) => one.title).join("\n")]);
  useEffect(() => {
    plot.current?.setData([times, ...series.map((one) => one.values)]);
  }, [times, series]);
  const index = Math.min(at ?? times.length, times.length - 1); // there may be fewer than when the pointer arrived
  const text = (/** @type {number | null | undefined} */ value) =>
    value === null || value === undefined ? "–" : `${format(value)}${unit && ` ${unit}`}`;
  return html`<figure class="chart" aria-label=${title}>
    <figcaption><span class="chart-title">${title}</span><span class="chart-values">
      ${series.map(
        (one) => html`<span key=${one.title} class="chart-value">
        <i class=${`dot ${one.color ?? "chart-1"}`}></i>
        ${series.length > 1 && html`<span class="muted">${one.title}</span>`} <b>${text(one.values[index])}</b></span>`,
      )}
      ${at !== null && index >= 0 && html`<time class="muted">${when(times[index])}</time>`}
    </span></figcaption>
    <div ref=${place} class="chart-plot"></div>
    ${times.length < 2 && html`<p class="chart-empty">${t("Gathering samples…")}</p>`}
  </figure>`;
}
