// A worker's load, phase by phase, beside earlier loads.

import { t } from "../texts.js";
import { Badge, Card, duration, html, Table } from "../ui.js";
import { elapsedOf, expectedOf, isLoading, phasesOf, stepWords } from "./states.js";
/** @import { Worker } from "../store.js" */
/** @import { Column } from "../ui/table.js" */

/** @typedef {NonNullable<Worker["load"]>["phases"][number]} Phase */

/**
 * How much of a load's usual time has passed, as a thin bar; it moves where that is not known.
 *
 * @param {{ worker: Worker }} props
 */
export function LoadBar({ worker }) {
  const elapsed = elapsedOf(worker);
  const expected = expectedOf(worker);
  const share = expected ? Math.min(1, (elapsed ?? 0) / expected) : null;
  return html`<span class=${`load-bar ${share === null ? "unknown" : ""}`} role="progressbar"
    aria-label=${t("Load of {model}", { model: worker.model_name })} aria-valuemin="0" aria-valuemax="100"
    aria-valuenow=${share === null ? undefined : Math.round(share * 100)}>
    <i style=${share === null ? {} : { width: `${share * 100}%` }}></i></span>`;
}

/**
 * @param {Phase[]} rows
 * @param {boolean} isUnderWay
 * @returns {Column<Phase>[]}
 */
function columnsOf(rows, isUnderWay) {
  const last = rows.at(-1);
  return [
    {
      name: "name",
      title: t("Phase"),
      cell: (row) => html`${stepWords(row)}${" "}
        ${isUnderWay && row === last && html`<${Badge} tone="busy">${t("now")}<//>`}`,
    },
    { name: "seconds", title: t("Takes"), align: "right", cell: (row) => duration(row.seconds) },
    { name: "expected", title: t("Last time"), align: "right", cell: (row) => duration(row.expected_s) },
  ];
}

/**
 * The phases of a load beside those of the load before; the last phase is now if the load is under way.
 *
 * @param {{ rows: Phase[], isUnderWay: boolean }} props
 */
function Phases({ rows, isUnderWay }) {
  return html`<${Table} label=${t("Phases")} columns=${columnsOf(rows, isUnderWay)} rows=${rows}
    keyOf=${(/** @type {Phase} */ row) => `${rows.indexOf(row)} ${row.name}`} />`;
}

/**
 * The phases of the load that is under way, folded; nothing before the first phase.
 *
 * @param {{ worker: Worker }} props
 */
export function FoldedPhases({ worker }) {
  const rows = phasesOf(worker);
  if (!rows.length) return null;
  return html`<details><summary class="hint">${t("Phases")}</summary>
    <${Phases} rows=${rows} isUnderWay=${true} /></details>`;
}

/**
 * Return how long a load has taken, and how long the load before took.
 *
 * @param {string} took
 * @param {boolean} isUnderWay
 * @param {number | null | undefined} expected
 */
function leadOf(took, isUnderWay, expected) {
  const holes = { took, before: duration(expected) };
  if (expected)
    return isUnderWay ? t("{took} so far, last time {before}.", holes) : t("{took} in all, last time {before}.", holes);
  return isUnderWay ? t("{took} so far.", holes) : t("{took} in all.", holes);
}

/**
 * The load that is under way, or the last load.
 *
 * @param {{ worker: Worker }} props
 */
export function LoadStory({ worker }) {
  const isUnderWay = isLoading(worker);
  const load = isUnderWay ? worker.load : worker.last_load;
  const rows = isUnderWay ? phasesOf(worker) : (load?.phases ?? []);
  const took = isUnderWay ? elapsedOf(worker) : (load?.elapsed_s ?? null);
  const lead = load && leadOf(duration(took), isUnderWay, load.expected_s);
  return html`<${Card} title=${isUnderWay ? t("Its load") : t("Its last load")} lead=${lead} flush=${rows.length > 0}>
    ${isUnderWay && html`<div class="load-now"><${LoadBar} worker=${worker} /></div>`}
    ${rows.length > 0 && html`<${Phases} rows=${rows} isUnderWay=${isUnderWay} />`}<//>`;
}
