// A worker: state, load, how it last ended, its arguments and its log.

import { api } from "../api.js";
import { go, hrefOf } from "../router.js";
import { loadHistory, useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import {
  Badge,
  Card,
  Chart,
  Empty,
  Facts,
  html,
  inWords,
  Meter,
  Notice,
  number,
  Page,
  percent,
  StateBadge,
  Table,
  Tabs,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
  useTick,
  when,
} from "../ui.js";
import { ModelButtons, WorkerButtons } from "./changes.js";
import { LoadStory } from "./load_story.js";
import { Log } from "./log.js";
import { isLoading, reasonOf, stateWords } from "./states.js";

/** @import { Worker as Summary } from "../store.js" */
/** @import { Column } from "../ui/table.js" */

/**
 * A worker's row in the list, with the members of its own answer once that is there.
 *
 * @typedef {Summary & Partial<Omit<Api.Worker, keyof Api.WorkerSummary>>} Details
 */

/** @typedef {{ name: string, value: unknown, isSet: boolean }} Argument */

const TABS = [
  { name: "now", title: t("Now") },
  { name: "log", title: t("Log") },
  { name: "arguments", title: t("Arguments") },
];

/**
 * The page of a worker.
 *
 * @param {{ id: string, query: Record<string, string> }} props
 */
export default function Worker({ id, query }) {
  const tab = query.tab ?? "now";
  const summary = useStore((all) => all.workers.find((one) => one.worker_id === id));
  const begun = useStore((all) => all.begun);
  const [details, setDetails] = useState(/** @type {Api.Worker | null} */ (null));
  const changed = summary && [summary.state, summary.restarts, summary.pid, summary.cause].join(" ");
  useEffect(() => {
    const control = new AbortController();
    const options = { signal: control.signal };
    api.get(`/v1/admin/workers/${encodeURIComponent(id)}`, options).then(setDetails, () => {});
    return () => control.abort();
  }, [id, changed]);
  useEffect(() => {
    const control = new AbortController();
    loadHistory(id, control.signal).catch(() => {});
    return () => control.abort();
  }, [id, begun]);
  useTick();
  const back = { href: hrefOf("workers"), title: t("Workers") };
  if (!summary) {
    return html`<${Page} title=${id} back=${back}><${Empty} title=${t("There is no such worker")}>
      <p>${t("It was stopped, or never was. Its log may still be there.")}</p><//>
      <${Card} title=${t("Log")}><${Log} id=${id} place=${["workers", id]} query=${query} /><//><//>`;
  }
  /** @type {Details} */
  const worker = { ...details, ...summary };
  return html`<${Page} title=${id} back=${back} lead=${worker.model_names.join(", ")}
      actions=${html`<${Actions} worker=${worker} />`}>
    <${State} worker=${worker} />
    <${Tabs} label=${t("What of it")} tabs=${TABS} current=${tab}
      onSelect=${(/** @type {string} */ name) => go("workers", [id], { tab: name })} />
    ${tab === "now" && html`<${Now} worker=${worker} query=${query} />`}
    ${tab === "log" && html`<${Card}><${Log} id=${id} place=${["workers", id]} query=${query} /><//>`}
    ${tab === "arguments" && html`<${Arguments} worker=${worker} />`}
  <//>`;
}

/** @param {{ worker: Details }} props */
function Actions({ worker }) {
  return html`${
    worker.on_demand &&
    html`<${ModelButtons} model=${worker.model_name} state=${worker.state}
      canSleep=${worker.can_sleep} />`
  }
    ${worker.managed && html`<${WorkerButtons} worker=${worker} onGone=${() => go("workers")} />`}`;
}

/** @param {{ worker: Details }} props */
function State({ worker }) {
  const words = stateWords(worker);
  const line = html`<div class="state-line"><${StateBadge} state=${worker.state} />
    ${words && html`<span>${words}</span>`}
    <span class="muted">${worker.managed ? t("started by this gateway") : t("started elsewhere")}</span>
    ${worker.on_demand && html`<${Badge}>${t("on demand")}<//>`}
    ${
      worker.circuit &&
      worker.circuit.state !== "closed" &&
      html`<${Badge} tone="bad">${t("circuit {state}", { state: inWords(worker.circuit.state) })}<//>`
    }
  </div>`;
  const isDown = ["failed", "restarting", "unhealthy", "wedged", "broken", "pending"].includes(worker.state);
  const reason = reasonOf(worker);
  return html`${line}${
    isDown &&
    html`<${Notice} tone=${["restarting", "pending"].includes(worker.state) ? "warn" : "bad"} title=${reason}>
    ${worker.failure && worker.failure !== reason ? t("It {failure}. ", { failure: worker.failure }) : ""}
    ${worker.state === "failed" && whatNext(worker)}<//>`
  }`;
}

/**
 * Return the event after which a worker that has failed is started again.
 *
 * @param {Details} worker
 */
function whatNext({ managed, origin }) {
  if (!managed) return t("Start it again where it was started.");
  if (origin === "api") return t("It stays down until it is started here, or launched anew.");
  return tParts(
    "It stays down until something of it changes in the configuration, or it is started " +
      "here. {command} starts all that have failed.",
    { command: html`<code>./ichat.pyz reload --restart-failed</code>` },
  );
}

const WITHOUT_PROCESS = new Set(["stopped", "cold", "failed"]);

/** @param {{ values: (number | null)[] }[]} series */
const hasValues = (series) => series.some(({ values }) => values.some((value) => (value ?? null) !== null));

/** @param {{ worker: Details, query: Record<string, string> }} props */
function Now({ worker, query }) {
  const history = useStore((all) => all.history);
  const progress = worker.progress ?? {};
  const series = useMemo(() => {
    const own = history.workers[worker.worker_id] ?? {};
    return {
      load: [{ title: t("in flight"), values: own.in_flight ?? [], fill: true }],
      cache: [{ title: t("KV cache"), values: own.kv_use ?? [], color: "chart-4", fill: true }],
    };
  }, [history, worker.worker_id]);
  const shared = { times: history.columns.at, sync: "worker" };
  const load = [
    [t("Requests in flight"), number(worker.in_flight)],
    [t("The engine works on"), number(worker.running ?? progress.running)],
    [t("Wait in the engine"), number(worker.waiting ?? progress.waiting)],
    [t("KV cache in use"), html`<${Meter} value=${worker.kv_use ?? progress.kv_use} label=${t("KV cache in use")} />`],
    [t("Prefix cache hits"), percent(worker.prefix_hit_rate)],
    [t("Tokens since its start"), number(progress.tokens_out, { short: true })],
  ];
  const facts = [
    [t("Engine"), worker.backend && `${worker.backend} ${worker.versions?.[worker.backend] ?? ""}`],
    [t("Machine"), worker.machine],
    [t("GPUs"), worker.gpu_ids?.join(", ")],
    [t("Address"), worker.port ? `${worker.host}:${worker.port}` : worker.unix_socket && t("a unix socket")],
    [t("Process"), worker.pid || null],
    [t("Model"), worker.model_path && html`<code>${worker.model_path}</code>`],
    [
      t("Context"),
      worker.models?.[0]?.max_model_len && t("{count} tokens", { count: number(worker.models[0].max_model_len) }),
    ],
    [t("Restarts"), worker.restarts],
    [t("Group"), worker.group && t("{id} ({rank} of {size})", { ...worker.group })],
    [t("Log file"), worker.log_file && html`<code>${worker.log_file}</code>`],
  ];
  if (isLoading(worker)) {
    return html`<${LoadStory} worker=${worker} />
      <${Card} title=${t("Log")}><${Log} id=${worker.worker_id} place=${["workers", worker.worker_id]} query=${
        query
      } /><//>
      <${Card} title=${t("What it is")}><${Facts} facts=${facts} /><//>
      <${LastEnd} worker=${worker} />`;
  }
  const hasProcess = !WITHOUT_PROCESS.has(worker.state);
  return html`<div class="grid two">
      ${
        hasValues(series.load) && html`<${Chart} ...${shared} title=${t("Requests in flight")} series=${series.load} />`
      }
      ${
        hasValues(series.cache) &&
        html`<${Chart} ...${shared} title=${t("KV cache in use")} max=${1} series=${series.cache}
        format=${(/** @type {number} */ value) => `${Math.round(value * 100)} %`} />`
      }
    </div>
    <div class="grid two">${hasProcess && html`<${Card} title=${t("Current load")}><${Facts} facts=${load} /><//>`}
      <${Card} title=${t("What it is")}><${Facts} facts=${facts} /><//></div>
    ${worker.last_load && html`<${LoadStory} worker=${worker} />`}
    <${LastEnd} worker=${worker} />`;
}

/** @param {{ worker: Details }} props */
function LastEnd({ worker }) {
  const lines = useRef(/** @type {HTMLElement | null} */ (null));
  const text = worker.last_lines?.join("\n") ?? "";
  useLayoutEffect(() => {
    if (lines.current) lines.current.scrollTop = lines.current.scrollHeight; // the end says why
  }, [text]);
  if (!worker.ended_at) return null;
  const facts = [
    [t("When"), when(worker.ended_at)],
    [t("Exit code"), worker.exit_code],
    [t("Signal"), worker.signal],
    [t("Out of memory"), worker.oom_killed ? t("the kernel ended it") : null],
  ];
  return html`<${Card} title=${t("How it last ended")} tone="ended">
    ${worker.cause && html`<p class="cause">${worker.cause}</p>`}
    <${Facts} facts=${facts} />
    ${
      text &&
      html`<h3>${t("Its last lines")}</h3>
      <pre class="lines" ref=${lines} tabindex="0">${text}</pre>`
    }<//>`;
}

/** @param {{ worker: Details }} props */
function Arguments({ worker }) {
  const [text, setText] = useState("");
  const [all, setAll] = useState(false);
  if (!worker.args)
    return html`<${Empty} title=${t("Not known yet")}><p>${t("Its first heartbeat brings them.")}</p><//>`;
  const changed = new Set(worker.changed_args);
  const rows = Object.entries(worker.args).map(([name, value]) => ({ name, value, isSet: changed.has(name) }));
  const found = rows.filter((row) => (all || row.isSet) && row.name.includes(text.trim().replaceAll("-", "_")));
  /** @type {Column<Argument>[]} */
  const columns = [
    {
      name: "name",
      title: t("Argument"),
      value: (row) => row.name,
      cell: (row) =>
        html`<code>${row.name}</code> ${row.isSet && all ? html`<${Badge} tone="busy">${t("set")}<//>` : ""}`,
    },
    {
      name: "value",
      title: t("Value"),
      cell: (row) => html`<span class="mono wrap">${JSON.stringify(row.value)}</span>`,
    },
  ];
  return html`<${Card} flush title=${t("Arguments of the engine")} actions=${html`
    <input type="search" aria-label=${t("Find arguments")} placeholder=${t("Find ( / )")} value=${text}
      onInput=${(event) => setText(event.target.value)} />
    <label class="check"><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} />
      ${t("defaults as well")}</label>`}>
    <${Table} label=${t("Arguments")} columns=${columns} rows=${found} keyOf=${(/** @type {Argument} */ row) =>
      row.name} sort="name" /><//>`;
}
