// Workers: all of them, and one in detail (worker.js).

import { useStore } from "../store.js";
import { go, hrefOf } from "../router.js";
import {
  Card,
  Empty,
  Meter,
  Page,
  StateBadge,
  Table,
  Tabs,
  duration,
  html,
  left,
  percent,
  useState,
  useTick,
} from "../ui.js";
import Worker from "./worker.js";

const FINE = new Set(["ready", "following", "cold", "asleep"]);
const GROUPS = [
  { name: "all", title: "All", has: () => true },
  { name: "ready", title: "Ready", has: (worker) => worker.state === "ready" || worker.state === "following" },
  { name: "resting", title: "On demand", has: (worker) => worker.state === "cold" || worker.state === "asleep" },
  { name: "other", title: "Not ready", has: (worker) => !FINE.has(worker.state) },
];

/** The list, or one worker where the address names one. */
export default function Workers({ params }) {
  return params.rest.length
    ? html`<${Worker} id=${params.rest[0]} />`
    : html`<${List} find=${params.query.find ?? ""} />`;
}

/** What a worker is doing about its state, in a few words. */
export function stateWords(worker) {
  const seen = worker.seen_at;
  if (worker.retry_in_s) return `again in ${duration(left(worker.retry_in_s, seen))}`;
  if (worker.ready_in_s !== null) return `ready in about ${duration(left(worker.ready_in_s, seen))}`;
  if (worker.state === "ready") return worker.circuit && worker.circuit.state !== "closed" ? "circuit open" : "";
  return worker.phase && worker.phase !== worker.state ? worker.phase : "";
}

const COLUMNS = [
  {
    name: "id",
    title: "Worker",
    value: (row) => row.worker_id,
    cell: (row) => html`${row.worker_id}<span class="sub">${row.model_names.join(", ") || row.model_name}</span>`,
  },
  {
    name: "state",
    title: "State",
    value: (row) => row.state,
    cell: (row) => html`<${StateBadge} state=${row.state} /><span class="sub">${stateWords(row)}</span>`,
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
    cell: (row) => row.backend ?? "–",
  },
  {
    name: "machine",
    title: "Machine",
    extra: true,
    value: (row) => row.machine,
    cell: (row) => row.machine ?? "–",
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

function List({ find }) {
  const workers = useStore((all) => all.workers);
  useTick();
  const [text, setText] = useState(find);
  const [group, setGroup] = useState("all");
  const words = (worker) => [worker.worker_id, ...worker.model_names, worker.machine, worker.backend, worker.state];
  const found = workers.filter((one) => words(one).some((word) => word?.toLowerCase().includes(text.toLowerCase())));
  const { has } = GROUPS.find((one) => one.name === group);
  const tabs = GROUPS.map((one) => ({ name: one.name, title: one.title, count: found.filter(one.has).length }));
  const empty = workers.length
    ? html`No worker is like that.`
    : html`<${Empty} icon="workers" title="No workers"><p>Launch one, or write one into the configuration.</p><//>`;
  return html`<${Page} title="Workers" lead="Each is one process with one engine and one model." actions=${html`
      <input type="search" aria-label="Find workers" placeholder="Find ( / )" value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <a class="button primary" href=${hrefOf("launch")}>Launch</a>`}>
    <${Card} flush>
      <${Tabs} label="Which workers" tabs=${tabs} current=${group} onSelect=${setGroup} />
      <${Table} label="Workers" columns=${COLUMNS} rows=${found.filter(has)} keyOf=${(row) => row.worker_id} sort="id"
        hrefOf=${(row) => hrefOf("workers", [row.worker_id])} onOpen=${(row) => go("workers", [row.worker_id])}
        empty=${empty} /><//><//>`;
}
