// Overview: what runs, what is wrong, and the last hour.

import { useStore } from "../store.js";
import {
  Badge,
  Card,
  Chart,
  Code,
  Empty,
  Icon,
  Notice,
  Page,
  StateBadge,
  Table,
  count,
  duration,
  html,
  number,
  useMemo,
  useTick,
} from "../ui.js";
import { go, hrefOf } from "../router.js";
import { problemsOf } from "./problems.js";

const SYNC = "overview";
const PROBLEMS_MAX = 8;

/** The page that the console opens with. */
export default function Overview() {
  const state = useStore();
  useTick();
  const { workers, models } = state;
  if (!workers.length && !models.length) return html`<${QuickStart} />`;
  return html`<${Page} title="Overview" lead="What runs, what is wrong, and the last hour.">
    <${Problems} problems=${problemsOf(state)} />
    <${Figures} state=${state} />
    <${Charts} history=${state.history} />
    <div class="grid two">
      <${Models} models=${models} />
      <${Workers} workers=${workers} />
    </div><//>`;
}

function Problems({ problems }) {
  if (!problems.length) {
    return html`<div class="fine"><${Icon} name="check" /> Nothing is wrong that the gateway knows of.</div>`;
  }
  return html`<${Card} title="What is wrong now" actions=${html`<${Badge} tone="bad">${problems.length}<//>`} flush>
    <ul class="problems">${problems.slice(0, PROBLEMS_MAX).map(
      (one) => html`<li key=${one.id} class=${one.tone}>
      <i class=${`dot ${one.tone}`}></i>
      <div><a href=${one.href}>${one.title}</a><span class="sub">${one.text}</span></div>
    </li>`,
    )}</ul>
    ${
      problems.length > PROBLEMS_MAX && html`<p class="table-empty">and ${problems.length - PROBLEMS_MAX} more</p>`
    }<//>`;
}

function Figures({ state: { workers, models, history } }) {
  const ready = workers.filter((worker) => worker.state === "ready" || worker.state === "following").length;
  const last = (name) => history.columns[name]?.at(-1) ?? null;
  const perSecond = (name) => (last(name) === null ? null : last(name) / history.sample_s);
  const sum = (name) => models.reduce((total, model) => total + (model[name] ?? 0), 0);
  const figures = [
    ["Workers ready", `${ready} / ${workers.length}`, "workers"],
    ["Models", number(models.length), "models"],
    ["In flight", number(sum("in_flight")), "requests"],
    ["Queued", number(sum("queued")), "requests"],
    ["Requests/s", number(perSecond("requests")), "requests"],
    ["Tokens/s", number(perSecond("output_tokens"), { short: true }), "models"],
  ];
  return html`<div class="figures">${figures.map(
    ([name, value, page]) => html`<a key=${name} class="figure"
    href=${hrefOf(page)}><span>${name}</span><b>${value}</b></a>`,
  )}</div>`;
}

function Charts({ history }) {
  const { columns, sample_s: every } = history;
  const rate = (name) => (columns[name] ?? []).map((value) => (value === null ? null : value / every));
  const series = useMemo(
    () => ({
      requests: [
        { title: "requests", values: rate("requests"), fill: true },
        { title: "errors", color: "bad", values: rate("errors") },
      ],
      tokens: [
        { title: "out", values: rate("output_tokens"), color: "chart-2", fill: true },
        { title: "in", values: rate("input_tokens"), color: "chart-5" },
      ],
      first: [
        { title: "median", values: columns.ttft_p50_ms ?? [], color: "chart-1" },
        { title: "95 %", values: columns.ttft_p95_ms ?? [], color: "chart-3" },
      ],
      load: [
        { title: "in flight", values: columns.in_flight ?? [], fill: true },
        { title: "queued", values: columns.queued ?? [], color: "chart-3" },
      ],
      cache: [{ title: "KV cache", values: columns.kv_use ?? [], color: "chart-4", fill: true }],
    }),
    [history],
  );
  const shared = { times: columns.at, sync: SYNC };
  const percent = (value) => `${Math.round(value * 100)} %`;
  return html`<div class="grid charts">
    <${Chart} ...${shared} title="Requests" unit="/s" series=${series.requests} />
    <${Chart} ...${shared} title="Tokens" unit="/s" series=${series.tokens} />
    <${Chart} ...${shared} title="Time to first token" format=${milliseconds} series=${series.first} />
    <${Chart} ...${shared} title="Requests at once" series=${series.load} />
    <${Chart} ...${shared} title="KV cache in use" max=${1} format=${percent} series=${series.cache} />
  </div>`;
}

const milliseconds = (value) => duration(value / 1000);

function Models({ models }) {
  const columns = [
    { name: "id", title: "Model", value: (row) => row.id, cell: (row) => row.id },
    { name: "workers", title: "Ready", value: (row) => row.workers, cell: readiness },
    {
      name: "in_flight",
      title: "In flight",
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
    { name: "queued", title: "Queued", align: "right", value: (row) => row.queued, cell: (row) => row.queued },
  ];
  return html`<${Card} title="Models" flush actions=${html`<a href=${hrefOf("models")}>All</a>`}>
    <${Table} label="Models" columns=${columns} rows=${models.slice(0, 12)} keyOf=${(row) => row.id} sort="id"
      hrefOf=${(row) => hrefOf("models", [], { find: row.id })} /><//>`;
}

/** How ready a model is, as a badge. */
export function readiness(model) {
  if (model.workers) return html`<${Badge} tone="ok">${count(model.workers, "endpoint")}<//>`;
  if (model.loaded === false) return html`<${Badge}>on demand<//>`;
  return html`<${Badge} tone="bad">not served<//>`;
}

function Workers({ workers }) {
  const columns = [
    { name: "id", title: "Worker", value: (row) => row.worker_id, cell: (row) => row.worker_id },
    { name: "state", title: "State", value: (row) => row.state, cell: (row) => html`<${StateBadge} ...${row} />` },
    {
      name: "in_flight",
      title: "In flight",
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
  ];
  return html`<${Card} title="Workers" flush actions=${html`<a href=${hrefOf("workers")}>All</a>`}>
    <${Table} label="Workers" columns=${columns} rows=${workers.slice(0, 12)} keyOf=${(row) => row.worker_id} sort="id"
      hrefOf=${(row) => hrefOf("workers", [row.worker_id])} onOpen=${(row) => go("workers", [row.worker_id])} /><//>`;
}

const WORKER = `[[managed_workers]]
model_name = "qwen"
model_path = "Qwen/Qwen3-8B"
backend = "vllm"
gpu_ids = [0]`;

const JOIN = `./ichat.pyz worker -be vllm --model Qwen/Qwen3-8B \\\n  --gateway-address ${location.origin}`;

/** What a newcomer sees: nothing runs yet, and three ways to change that. */
function QuickStart() {
  return html`<${Page} title="Welcome" lead="The gateway runs, and no model does yet.">
    <div class="grid two">
      <${Card} title="Start a worker from here">
        <p class="hint">Choose an engine, a model and its GPUs. The gateway starts it and keeps it running.</p>
        <p><a class="button primary" href=${hrefOf("launch")}>Launch a worker</a></p><//>
      <${Card} title="Or write it into ichat.toml">
        <p class="hint">The gateway reads the file again as soon as it changes.</p><${Code} text=${WORKER} /><//>
      <${Card} title="Or let a worker of another machine join">
        <p class="hint">Start it there with this gateway's address. It needs the token in
          <code> ICHAT_JOIN_TOKEN</code>.</p>
        <${Code} text=${JOIN} /><//>
      <${Card} title="Then ask it">
        <${Code} text=${`curl ${location.origin}/v1/chat/completions \\\n  -H 'content-type: application/json' \\
  -d '{"model": "qwen", "messages": [{"role": "user", "content": "Hello!"}]}'`} /><//>
    </div>
    <${Notice} tone="busy">Something does not start? <code>./ichat.pyz doctor</code> examines this machine, its engines
      and its configuration, and says what to type.<//><//>`;
}
