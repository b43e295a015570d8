// Workers: the list, and a single worker in detail (worker.js).

import { go, hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { Card, Empty, html, Meter, Page, percent, StateBadge, Table, Tabs, useState, useTick } from "../ui.js";
import { stateLine } from "./states.js";
import Worker from "./worker.js";

/** @import { Route } from "../router.js" */
/** @import { Worker as WorkerRow } from "../store.js" */

const FINE = new Set(["ready", "following", "cold", "asleep"]);
/** @type {{ name: string, title: string, has: (worker: WorkerRow) => boolean }[]} */
const GROUPS = [
  { name: "all", title: "All", has: () => true },
  { name: "ready", title: "Ready", has: (worker) => worker.state === "ready" || worker.state === "following" },
  { name: "resting", title: "On demand", has: (worker) => worker.state === "cold" || worker.state === "asleep" },
  { name: "other", title: "Not ready", has: (worker) => !FINE.has(worker.state) && worker.state !== "stopped" },
  { name: "stopped", title: "Stopped", has: (worker) => worker.state === "stopped" },
];

/**
 * The list, or a single worker if the address names it.
 *
 * @param {{ params: Route }} props
 */
export default function Workers({ params }) {
  return params.rest.length
    ? html`<${Worker} id=${params.rest[0]} query=${params.query} />`
    : html`<${List} find=${params.query.find ?? ""} />`;
}

/** @param {string | null | undefined} text */
const clipped = (text) => (text ? html`<span class="clip short" title=${text}>${text}</span>` : "–");
/** @param {WorkerRow} row */
const namesOf = (row) => row.model_names.join(", ") || row.model_name;

/** @type {import("../ui/table.js").Column<WorkerRow>[]} */
const COLUMNS = [
  {
    name: "id",
    title: "Worker",
    value: (row) => row.worker_id,
    cell: (row) => html`<span class="clip" title=${row.worker_id}>${row.worker_id}</span>
      <span class="sub clip" title=${namesOf(row)}>${namesOf(row)}</span>`,
  },
  {
    name: "state",
    title: "State",
    value: (row) => row.state,
    cell: (row) => html`<${StateBadge} state=${row.state} />
      <span class="sub clip" title=${stateLine(row)}>${stateLine(row)}</span>`,
  },
  {
    name: "in_flight",
    title: "In flight",
    align: "right",
    value: (row) => row.in_flight,
    cell: (row) =>
      html`${row.in_flight}${row.waiting ? html`<span class="sub">${row.waiting} wait inside</span>` : ""}`,
  },
  {
    name: "kv_use",
    title: "KV cache",
    value: (row) => row.kv_use,
    cell: (row) => html`<${Meter} value=${row.kv_use} label="KV cache in use" />`,
  },
  {
    name: "hits",
    title: "Prefix hits",
    align: "right",
    extra: true,
    value: (row) => row.prefix_hit_rate,
    cell: (row) => percent(row.prefix_hit_rate),
  },
  {
    name: "backend",
    title: "Engine",
    extra: true,
    value: (row) => row.backend,
    cell: (row) => clipped(row.backend),
  },
  {
    name: "machine",
    title: "Machine",
    extra: true,
    value: (row) => row.machine,
    cell: (row) => clipped(row.machine),
  },
  {
    name: "restarts",
    title: "Restarts",
    align: "right",
    extra: true,
    value: (row) => row.restarts,
    cell: (row) => row.restarts || html`<span class="muted">0</span>`,
  },
];

/** @param {{ find: string }} props */
function List({ find }) {
  const workers = useStore((all) => all.workers);
  useTick();
  const [text, setText] = useState(find);
  const [group, setGroup] = useState("all");
  /** @param {WorkerRow} worker */
  const words = (worker) => [worker.worker_id, ...worker.model_names, worker.machine, worker.backend, worker.state];
  const found = workers.filter((one) => words(one).some((word) => word?.toLowerCase().includes(text.toLowerCase())));
  const { has } = GROUPS.find((one) => one.name === group) ?? GROUPS[0];
  const tabs = GROUPS.map((one) => ({ name: one.name, title: one.title, count: found.filter(one.has).length }));
  const empty = workers.length
    ? html`No worker is like that.`
    : html`<${Empty} icon="workers" title="No workers"><p>Launch a worker, or write it into the configuration.</p><//>`;
  return html`<${Page} title="Workers" lead="Each is a process with an engine and a model." actions=${html`
      <input type="search" aria-label="Find workers" placeholder="Find ( / )" value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <a class="button primary" href=${hrefOf("launch")}>Launch</a>`}>
    <${Card} flush>
      <${Tabs} label="Which workers" tabs=${tabs} current=${group} onSelect=${setGroup} />
      <${Table} label="Workers" columns=${COLUMNS} rows=${found.filter(has)} keyOf=${(/** @type {WorkerRow} */ row) =>
        row.worker_id} sort="id"
        hrefOf=${(/** @type {WorkerRow} */ row) => hrefOf("workers", [row.worker_id])} onOpen=${(
          /** @type {WorkerRow} */ row,
        ) => go("workers", [row.worker_id])}
        empty=${empty} /><//><//>`;
}
