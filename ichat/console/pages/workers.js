// Workers: the list, and a single worker in detail (worker.js).

import { go, hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import { Card, Empty, html, Meter, Page, percent, StateBadge, Table, Tabs, useState, useTick } from "../ui.js";
import { stateLine } from "./states.js";
import Worker from "./worker.js";

/** @import { Route } from "../router.js" */
/** @import { Worker as WorkerRow } from "../store.js" */

const FINE = new Set(["ready", "following", "cold", "asleep"]);
/** @type {{ name: string, title: string, has: (worker: WorkerRow) => boolean }[]} */
const GROUPS = [
  { name: "all", title: t("All"), has: () => true },
  { name: "ready", title: t("Ready"), has: (worker) => worker.state === "ready" || worker.state === "following" },
  { name: "resting", title: t("On demand"), has: (worker) => worker.state === "cold" || worker.state === "asleep" },
  { name: "other", title: t("Not ready"), has: (worker) => !FINE.has(worker.state) && worker.state !== "stopped" },
  { name: "stopped", title: t("Stopped"), has: (worker) => worker.state === "stopped" },
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
    title: t("Worker"),
    value: (row) => row.worker_id,
    cell: (row) => html`<span class="clip" title=${row.worker_id}>${row.worker_id}</span>
      <span class="sub clip" title=${namesOf(row)}>${namesOf(row)}</span>`,
  },
  {
    name: "state",
    title: t("State"),
    value: (row) => row.state,
    cell: (row) => html`<${StateBadge} state=${row.state} />
      <span class="sub clip" title=${stateLine(row)}>${stateLine(row)}</span>`,
  },
  {
    name: "in_flight",
    title: t("In flight"),
    align: "right",
    value: (row) => row.in_flight,
    cell: (row) =>
      html`${row.in_flight}${
        row.waiting ? html`<span class="sub">${t("{count} wait inside", { count: row.waiting })}</span>` : ""
      }`,
  },
  {
    name: "kv_use",
    title: t("KV cache"),
    value: (row) => row.kv_use,
    cell: (row) => html`<${Meter} value=${row.kv_use} label=${t("KV cache in use")} />`,
  },
  {
    name: "hits",
    title: t("Prefix hits"),
    align: "right",
    extra: true,
    value: (row) => row.prefix_hit_rate,
    cell: (row) => percent(row.prefix_hit_rate),
  },
  {
    name: "backend",
    title: t("Engine"),
    extra: true,
    value: (row) => row.backend,
    cell: (row) => clipped(row.backend),
  },
  {
    name: "machine",
    title: t("Machine"),
    extra: true,
    value: (row) => row.machine,
    cell: (row) => clipped(row.machine),
  },
  {
    name: "restarts",
    title: t("Restarts"),
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
    ? html`${t("No worker is like that.")}`
    : html`<${Empty} icon="workers" title=${t("No workers")}><p>${t(
        "Launch a worker, or write it into the configuration.",
      )}</p><//>`;
  return html`<${Page} title=${t("Workers")} lead=${t("Each is a process with an engine and a model.")} actions=${html`
      <input type="search" aria-label=${t("Find workers")} placeholder=${t("Find ( / )")} value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <a class="button primary" href=${hrefOf("launch")}>${t("Launch")}</a>`}>
    <${Card} flush>
      <${Tabs} label=${t("Which workers")} tabs=${tabs} current=${group} onSelect=${setGroup} />
      <${Table} label=${t("Workers")} columns=${COLUMNS} rows=${found.filter(has)} keyOf=${(
        /** @type {WorkerRow} */ row,
      ) => row.worker_id} sort="id"
        hrefOf=${(/** @type {WorkerRow} */ row) => hrefOf("workers", [row.worker_id])} onOpen=${(
          /** @type {WorkerRow} */ row,
        ) => go("workers", [row.worker_id])}
        empty=${empty} /><//><//>`;
}
