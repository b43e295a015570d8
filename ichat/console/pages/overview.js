// Overview: workers, problems, and the last hour.

import { go, hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import {
  Badge,
  Card,
  Chart,
  count,
  duration,
  html,
  Icon,
  inWords,
  number,
  Page,
  StateBadge,
  Table,
  useMemo,
  useTick,
} from "../ui.js";
import { Picture } from "./picture/picture.js";
import { problemsOf } from "./problems.js";
import { comingOf, isLoading, isReturning, loadWords, stateWords } from "./states.js";
import { Welcome } from "./welcome.js";

/** @import { Route } from "../router.js" */
/** @import { Problem } from "./problems.js" */
/** @import { Model, State, Worker } from "../store.js" */

/** @typedef {keyof Api.History["columns"]} Column */

const SYNC = "overview";
const LINES_MAX = 8;
const ROWS_MAX = 12;

/**
 * The page that the console opens with: `#/overview?view=table`.
 *
 * @param {{ params: Route }} props
 */
export default function Overview({ params }) {
  const state = useStore((all) => all);
  useTick();
  const { workers, models } = state;
  if (!workers.length && !models.length) return html`<${Welcome} />`;
  return html`<${Page} title=${t("Overview")} lead=${t("What runs, problems, and the last hour.")}>
    <${Problems} found=${problemsOf(state)} isLive=${state.connection === "live"} />
    <${Figures} state=${state} />
    <${Picture} state=${state} isTable=${params.query.view === "table"} />
    <${Charts} history=${state.history} />
    <div class="grid two">
      <${Models} models=${models} workers=${workers} />
      <${Workers} workers=${workers} />
    </div><//>`;
}

/**
 * Problems, and changes under way; `isLive`: whether the gateway still reports them.
 *
 * @param {{ found: Problem[], isLive: boolean }} props
 */
function Problems({ found, isLive }) {
  const wrong = found.filter((one) => one.tone !== "busy");
  const coming = found.filter((one) => one.tone === "busy");
  const badge = wrong.length > 0 && html`<${Badge} tone=${wrong[0].tone}>${wrong.length}<//>`;
  const title = isLive ? t("Problems") : t("Last known problems");
  return html`${!wrong.length && isLive && html`<div class="fine"><${Icon} name="check" /> ${t("No problems.")}</div>`}
    ${
      wrong.length > 0 &&
      html`<${Card} title=${title} actions=${badge} flush><${Lines} lines=${wrong} kind="problems" /><//>`
    }
    ${
      coming.length > 0 &&
      html`<${Card} title=${t("On its way")} flush><${Lines} lines=${coming}
      kind="coming" /><//>`
    }`;
}

/** @param {{ lines: Problem[], kind: string }} props */
function Lines({ lines, kind }) {
  return html`<ul class=${kind}>${lines.slice(0, LINES_MAX).map(
    (one) => html`<li key=${one.id} class=${one.tone}>
      <i class=${`dot ${one.tone}`}></i>
      <div><a href=${one.href}>${one.title}</a><span class="sub">${one.text}</span></div>
    </li>`,
  )}</ul>
    ${
      lines.length > LINES_MAX &&
      html`<p class="table-empty">${t("and {count} more", { count: number(lines.length - LINES_MAX) })}</p>`
    }`;
}

/** @param {{ state: State }} props */
function Figures({ state: { workers, models, history } }) {
  const ready = workers.filter((worker) => worker.state === "ready" || worker.state === "following").length;
  const last = (/** @type {Column} */ name) => history.columns[name]?.at(-1) ?? null;
  const perSecond = (/** @type {Column} */ name) =>
    last(name) === null ? null : /** @type {number} */ (last(name)) / history.sample_s;
  const sum = (/** @type {"in_flight" | "queued"} */ name) =>
    models.reduce((total, model) => total + (model[name] ?? 0), 0);
  const figures = [
    [t("Workers ready"), workers.length ? `${ready} / ${workers.length}` : t("none"), "workers"],
    [t("Models"), number(models.length), "models"],
    [t("In flight"), number(sum("in_flight")), "requests"],
    [t("Queued"), number(sum("queued")), "requests"],
    [t("Requests/s"), number(perSecond("requests")), "requests"],
    [t("Tokens/s"), number(perSecond("output_tokens"), { short: true }), "models"],
  ];
  return html`<div class="figures">${figures.map(
    ([name, value, page]) => html`<a key=${name} class="figure"
    href=${hrefOf(page)}><span>${name}</span><b>${value}</b></a>`,
  )}</div>`;
}

/** @param {{ history: Api.History }} props */
function Charts({ history }) {
  const { columns, sample_s: every } = history;
  const rate = (/** @type {Column} */ name) =>
    (columns[name] ?? []).map((value) => (value === null ? null : value / every));
  const series = useMemo(
    () => ({
      requests: [
        { title: t("requests"), values: rate("requests"), fill: true },
        { title: t("errors"), color: "bad", values: rate("errors") },
      ],
      tokens: [
        { title: t("out"), values: rate("output_tokens"), color: "chart-2", fill: true },
        { title: t("in"), values: rate("input_tokens"), color: "chart-5" },
      ],
      first: [
        { title: t("median"), values: columns.ttft_p50_ms ?? [], color: "chart-1" },
        { title: "95 %", values: columns.ttft_p95_ms ?? [], color: "chart-3" },
      ],
      load: [
        { title: t("in flight"), values: columns.in_flight ?? [], fill: true },
        { title: t("queued"), values: columns.queued ?? [], color: "chart-3" },
      ],
      cache: [{ title: t("KV cache"), values: columns.kv_use ?? [], color: "chart-4", fill: true }],
    }),
    [history],
  );
  const shared = { times: columns.at, sync: SYNC };
  const percent = (/** @type {number} */ value) => `${Math.round(value * 100)} %`;
  return html`<div class="grid charts">
    <${Chart} ...${shared} title=${t("Requests")} unit="/s" series=${series.requests} />
    <${Chart} ...${shared} title=${t("Tokens")} unit="/s" series=${series.tokens} />
    <${Chart} ...${shared} title=${t("Time to first token")} format=${milliseconds} series=${series.first} />
    <${Chart} ...${shared} title=${t("Requests at once")} series=${series.load} />
    <${Chart} ...${shared} title=${t("KV cache in use")} max=${1} format=${percent} series=${series.cache} />
  </div>`;
}

/** @param {number} value */
const milliseconds = (value) => duration(value / 1000);

/** @param {string} text */
const clipped = (text) => html`<span class="clip" title=${text}>${text}</span>`;

/** @param {{ models: Model[], workers: Worker[] }} props */
function Models({ models, workers }) {
  /** @type {import("../ui/table.js").Column<Model>[]} */
  const columns = [
    { name: "id", title: t("Model"), value: (row) => row.id, cell: (row) => clipped(row.id) },
    { name: "workers", title: t("Ready"), value: (row) => row.workers, cell: (row) => readiness(row, workers) },
    {
      name: "in_flight",
      title: t("In flight"),
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
    { name: "queued", title: t("Queued"), align: "right", value: (row) => row.queued, cell: (row) => row.queued },
  ];
  return html`<${Card} title=${t("Models")} flush actions=${html`<a href=${hrefOf("models")}>${t("All")}</a>`}>
    <${Table} label=${t("Models")} columns=${columns} rows=${models.slice(0, ROWS_MAX)} keyOf=${(
      /** @type {Model} */ row,
    ) => row.id} sort="id"
      hrefOf=${(/** @type {Model} */ row) => hrefOf("models", [], { find: row.id })} /><//>`;
}

/**
 * Return how many endpoints serve a model, `own` of which are workers.
 *
 * @param {number} all
 * @param {number} own
 */
function serving(all, own) {
  if (!own) return count(all, "{count} external route", "{count} external routes");
  return own < all
    ? count(all, "{count} endpoint", "{count} endpoints")
    : count(all, "{count} worker", "{count} workers");
}

/**
 * How ready a model is, as a badge; red only where no worker will serve it soon.
 *
 * @param {Model} model
 * @param {Worker[]} workers
 */
export function readiness(model, workers) {
  const own = workers.filter((one) => one.model_names.includes(model.id));
  if (model.workers) {
    return html`<${Badge} tone="ok">${serving(model.workers, own.length)}<//>`;
  }
  const coming = comingOf(workers, model.id);
  if (coming && isLoading(coming)) {
    return html`<${Badge} tone="busy">${t("loading")}<//><span class="sub">${loadWords(coming)}</span>`;
  }
  const tone = coming && isReturning(coming) ? "busy" : "warn";
  if (coming)
    return html`<${Badge} tone=${tone}>${inWords(coming.state)}<//><span class="sub">${stateWords(coming)}</span>`;
  if (model.loaded === false) return html`<${Badge}>${t("on demand")}<//>`;
  return html`<${Badge} tone="bad">${t("no replicas")}<//>`;
}

/** @param {{ workers: Worker[] }} props */
function Workers({ workers }) {
  /** @type {import("../ui/table.js").Column<Worker>[]} */
  const columns = [
    { name: "id", title: t("Worker"), value: (row) => row.worker_id, cell: (row) => clipped(row.worker_id) },
    { name: "state", title: t("State"), value: (row) => row.state, cell: (row) => html`<${StateBadge} ...${row} />` },
    {
      name: "in_flight",
      title: t("In flight"),
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
  ];
  return html`<${Card} title=${t("Workers")} flush actions=${html`<a href=${hrefOf("workers")}>${t("All")}</a>`}>
    <${Table} label=${t("Workers")} columns=${columns} rows=${workers.slice(0, ROWS_MAX)} keyOf=${(
      /** @type {Worker} */ row,
    ) => row.worker_id}
      sort="id" hrefOf=${(/** @type {Worker} */ row) => hrefOf("workers", [row.worker_id])}
      onOpen=${(/** @type {Worker} */ row) => go("workers", [row.worker_id])} /><//>`;
}
