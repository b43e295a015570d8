// The picture as a table: the same lanes and workers, in rows.

import { hrefOf } from "../../router.js";
import { t } from "../../texts.js";
import { html, number, StateBadge, Table } from "../../ui.js";

/** @import { Machine, State, Worker } from "../../store.js" */
/** @import { Lane } from "./lanes.js" */

/**
 * @typedef {{ id: string, key: string, name: string, model: string, worker: string, state: string, gpus: string,
 *   inFlight: number, queued: number, tokens: number }} Row
 */

/**
 * Return the GPUs of each worker in words: `gpu-1: 0, 1`.
 *
 * @param {Machine[]} machines
 */
function gpusByWorker(machines) {
  /** @type {Map<string, Map<string, number[]>>} */
  const found = new Map();
  for (const machine of machines) {
    for (const gpu of machine.gpus ?? []) {
      for (const { worker_id: id } of gpu.held_by) {
        const own = found.get(id) ?? new Map();
        found.set(id, own.set(machine.name, [...(own.get(machine.name) ?? []), gpu.index]));
      }
    }
  }
  return new Map(
    [...found].map(([id, own]) => [id, [...own].map(([name, at]) => `${name}: ${at.join(", ")}`).join("; ")]),
  );
}

/**
 * Return the rows: a row for each lane, for each worker without a lane, and for each model without a worker.
 *
 * @param {Pick<State, "workers" | "models" | "machines">} cluster
 * @param {Lane[]} lanes
 * @returns {Row[]}
 */
export function rowsOf({ workers, models, machines }, lanes) {
  const gpus = gpusByWorker(machines);
  const byId = new Map(workers.map((worker) => [worker.worker_id, worker]));
  const queued = new Map(models.map((model) => [model.id, model.queued]));
  const rowOf = (/** @type {Partial<Row>} */ more, /** @type {Worker | undefined} */ worker) => ({
    id: JSON.stringify([more.key, more.name, more.model, more.worker]),
    key: "",
    name: "",
    model: "",
    worker: "",
    state: worker?.state ?? "",
    gpus: gpus.get(more.worker ?? "") ?? "",
    inFlight: 0,
    queued: queued.get(more.model ?? "") ?? 0,
    tokens: 0,
    ...more,
  });
  const rows = lanes.map(({ key, name, model, worker, in_flight: inFlight, tokens }) =>
    rowOf({ key, name: name === model ? "" : name, model, worker, inFlight, tokens }, byId.get(worker)),
  );
  const busy = new Set(lanes.map((lane) => lane.worker));
  const idle = workers
    .filter((worker) => !busy.has(worker.worker_id))
    .map((worker) => rowOf({ model: worker.model_names[0] ?? worker.model_name, worker: worker.worker_id }, worker));
  const served = new Set([...workers.flatMap((worker) => worker.model_names), ...lanes.map((lane) => lane.model)]);
  const rest = models.filter((model) => !served.has(model.id)).map((model) => rowOf({ model: model.id }, undefined));
  return [...rows, ...idle, ...rest];
}

const long = (/** @type {string} */ text) => (text ? html`<span class="clip" title=${text}>${text}</span>` : "–");

/** @type {import("../../ui/table.js").Column<Row>[]} */
const COLUMNS = [
  { name: "model", title: t("Model"), value: (row) => row.model, cell: (row) => long(row.model) },
  { name: "key", title: t("Key"), value: (row) => row.key || null, cell: (row) => long(row.key) },
  { name: "name", title: t("Name"), value: (row) => row.name || null, cell: (row) => long(row.name) },
  {
    name: "worker",
    title: t("Worker"),
    value: (row) => row.worker || null,
    cell: (row) => long(row.worker.replace(/^external:/, "")),
  },
  { name: "gpus", title: t("GPUs"), value: (row) => row.gpus || null, extra: true, cell: (row) => long(row.gpus) },
  {
    name: "state",
    title: t("State"),
    value: (row) => row.state || null,
    cell: (row) => (row.state ? html`<${StateBadge} state=${row.state} />` : "–"),
  },
  {
    name: "in_flight",
    title: t("In flight"),
    align: "right",
    value: (row) => row.inFlight,
    cell: (row) => number(row.inFlight),
  },
  {
    name: "queued",
    title: t("Queued for the model"),
    align: "right",
    extra: true,
    value: (row) => row.queued,
    cell: (row) => number(row.queued),
  },
  {
    name: "tokens",
    title: t("Tokens/s"),
    align: "right",
    value: (row) => row.tokens,
    cell: (row) => number(row.tokens, { short: true }),
  },
];

/** @param {Row} row */
const hrefOfRow = ({ model }) => hrefOf("models", [], { find: model });

/**
 * The picture as a table.
 *
 * @param {{ rows: Row[] }} props
 */
export function PictureTable({ rows }) {
  return html`<${Table} label=${t("Requests on their way")} columns=${COLUMNS} rows=${rows} sort="-tokens"
    hasFilter=${false} keyOf=${(/** @type {Row} */ row) => row.id} hrefOf=${hrefOfRow} />`;
}
