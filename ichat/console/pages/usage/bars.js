// Tokens over time as bars, a part for each key.

import { t } from "../../texts.js";
import { html, number } from "../../ui.js";

/** @typedef {{ at: number, title: string, parts: { key: string, tokens: number }[], tokens: number }} Bar */

/** The colours of the keys with most tokens; all other keys share the last colour. */
const COLORS = ["chart-1", "chart-2", "chart-3", "chart-4", "chart-5"];
const OTHERS = t("others");
const NO_KEY = t("no key");

/**
 * Return the bars of rows in the order of time, with the keys of most tokens first: [bars, keys].
 *
 * @param {{ key?: string | null, input_tokens: number, output_tokens: number, at: number }[]} rows
 * @param {number[]} times every bar's time, those without rows as well
 * @param {(at: number) => string} titleOf
 * @returns {[Bar[], string[]]}
 */
export function barsOf(rows, times, titleOf) {
  const tokensOf = (/** @type {(typeof rows)[number]} */ row) => row.input_tokens + row.output_tokens;
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const row of rows) sums.set(row.key || NO_KEY, (sums.get(row.key || NO_KEY) ?? 0) + tokensOf(row));
  const ranked = [...sums.keys()].sort((a, b) => (sums.get(b) ?? 0) - (sums.get(a) ?? 0));
  const shown = ranked.length > COLORS.length ? ranked.slice(0, COLORS.length - 1) : ranked;
  const keys = shown.length < ranked.length ? [...shown, OTHERS] : shown;
  const bars = times.map((at) => {
    /** @type {Map<string, number>} */
    const parts = new Map();
    for (const row of rows.filter((one) => one.at === at)) {
      const key = shown.includes(row.key || NO_KEY) ? row.key || NO_KEY : OTHERS;
      parts.set(key, (parts.get(key) ?? 0) + tokensOf(row));
    }
    const found = keys.filter((key) => parts.get(key)).map((key) => ({ key, tokens: parts.get(key) ?? 0 }));
    return { at, title: titleOf(at), parts: found, tokens: found.reduce((sum, part) => sum + part.tokens, 0) };
  });
  return [bars, keys];
}

const short = (/** @type {number} */ value) => number(value, { short: true });

/**
 * @param {{ title: string, bars: Bar[], keys: string[] }} props
 */
export function Bars({ title, bars, keys }) {
  const most = Math.max(1, ...bars.map((bar) => bar.tokens));
  const colorOf = (/** @type {string} */ key) => COLORS[keys.indexOf(key) % COLORS.length];
  const wordsOf = (/** @type {Bar} */ bar) =>
    `${bar.title}: ${
      bar.tokens ? bar.parts.map((part) => `${part.key} ${short(part.tokens)}`).join(", ") : t("nothing")
    }`;
  const step = Math.ceil(bars.length / 12);
  return html`<figure class="card bars" aria-label=${title}>
    <figcaption><span class="chart-title">${title}</span><span class="chart-values">${keys.map(
      (key) => html`<span key=${key} class="chart-value"><i class=${`dot ${colorOf(key)}`}></i>
        <span class="clip short" title=${key}><bdi>${key}</bdi></span></span>`,
    )}</span></figcaption>
    <div class="bars-most muted num">${short(most)}</div>
    <ol>${bars.map(
      (bar, index) => html`<li key=${bar.at} title=${wordsOf(bar)}>
      <span class="unseen">${wordsOf(bar)}</span>
      <span class="bar-parts" aria-hidden="true">${bar.parts.map(
        (part) => html`<i key=${part.key} class=${colorOf(part.key)}
        style=${{ height: `${(part.tokens / most) * 100}%` }}></i>`,
      )}</span>
      <span class="bar-title num muted" aria-hidden="true">${index % step ? "" : bar.title}</span></li>`,
    )}</ol></figure>`;
}
