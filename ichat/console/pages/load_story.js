// A worker's load, phase by phase, beside earlier loads.

import { Badge, Card, duration, html, Table } from "../ui.js";
import { elapsedOf, expectedOf, isLoading, phasesOf } from "./states.js";
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
    aria-label=${`Load of ${worker.model_name}`} aria-valuemin="0" aria-valuemax="100"
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
      title: "Phase",
      cell: (row) => html`${row.name}${row.detail ? ` ${row.detail}` : ""}${" "}
        ${isUnderWay && row === last && html`<${Badge} tone="busy">now<//>`}`,
    },
    { name: "seconds", title: "Takes", align: "right", cell: (row) => duration(row.seconds) },
    { name: "expected", title: "Last time", align: "right", cell: (row) => duration(row.expected_s) },
  ];
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
  const usual = load?.expected_s ? `, last time ${duration(load.expected_s)}` : "";
  const lead = load && `${duration(took)}${isUnderWay ? " so far" : " in all"}${usual}.`;
  return html`<${Card} title=${isUnderWay ? "Its load" : "Its last load"} lead=${lead} flush=${rows.length > 0}>
    ${isUnderWay && html`<div class="load-now"><${LoadBar} worker=${worker} /></div>`}
    ${
      rows.length > 0 &&
      html`<${Table} label="Phases" columns=${columnsOf(rows, isUnderWay)} rows=${rows}
      keyOf=${(/** @type {Phase} */ row) => `${rows.indexOf(row)} ${row.name}`} />`
    }<//>`;
}
