// Configuration: the settings in force, the changes in the file, and its reload.

import { api } from "../api.js";
import { useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import {
  Badge,
  Button,
  Card,
  confirm,
  Empty,
  html,
  inWords,
  Notice,
  Page,
  Table,
  toast,
  useCallback,
  useEffect,
  useState,
} from "../ui.js";
import { configTitle } from "./problems.js";

/** @type {Record<string, string>} */
const TONES = { start: "ok", restart: "warn", stop: "bad", update: "busy", set: "busy", keep: "idle", later: "warn" };
const MISTAKES_MAX = 50;

/** @typedef {{ key: string, title: string, value: unknown }} Row */

/**
 * Return a value as people read it: lists and tables as JSON over several lines.
 *
 * @param {unknown} value
 */
function shown(value) {
  if (value === null) return html`<span class="muted">${t("not set")}</span>`;
  if (Array.isArray(value) && !value.length) return html`<span class="muted">${t("none")}</span>`;
  if (typeof value === "object") return html`<pre class="mono">${JSON.stringify(value, null, 2)}</pre>`;
  return html`<span class="mono">${value === "" ? '""' : String(value)}</span>`;
}

/** @param {unknown} value */
const withoutNulls = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.fromEntries(
        Object.entries(value)
          .filter(([, one]) => one !== null)
          .map(([name, one]) => [name, one]),
      )
    : value;

/**
 * Return the rows of a section: of a table its keys, of a list its entries.
 *
 * @param {string} name
 * @param {unknown} section
 * @returns {Row[]}
 */
function rowsOf(name, section) {
  if (Array.isArray(section)) {
    const titleOf = (/** @type {{ name?: string, model_name?: string } | null} */ one, /** @type {number} */ index) =>
      one?.name ?? one?.model_name ?? `${index + 1}`;
    return section.map((one, index) => {
      return { key: `${name}[${index}]`, title: titleOf(one, index), value: withoutNulls(one) };
    });
  }
  return Object.entries(/** @type {object} */ (section)).map(([key, value]) => ({
    key: `${name}.${key}`,
    title: key,
    value,
  }));
}

/** @param {{ name: string, rows: Row[], changed: Set<string> }} props */
function Section({ name, rows, changed }) {
  return html`<${Card} title=${name} flush><dl class="settings" aria-label=${name}>
    ${rows.map(
      (row) => html`<div key=${row.key} data-key=${row.key}>
      <dt><span class="mono">${row.title}</span>
      ${changed.has(row.key) && html` <${Badge} tone="busy" title=${t("Not the default")}>${t("set")}<//>`}</dt>
      <dd>${shown(row.value)}</dd></div>`,
    )}</dl><//>`;
}

/** @param {{ plan: Api.Reload, apply: () => void, close: () => void }} props */
function Plan({ plan, apply, close }) {
  /** @type {import("../ui/table.js").Column<Api.Step>[]} */
  const columns = [
    {
      name: "action",
      title: t("Action"),
      value: (row) => row.action,
      cell: ({ action }) => html`<${Badge} tone=${TONES[action] ?? "busy"}>${inWords(action)}<//>`,
    },
    {
      name: "what",
      title: t("What"),
      value: (row) => row.what,
      cell: ({ what }) => html`<span class="mono">${what}</span>`,
    },
    { name: "why", title: t("Why"), cell: (row) => row.why },
  ];
  const isEmpty = plan.plan.every((step) => step.action === "keep");
  return html`<${Card} flush title=${t("What a reload would do")} lead=${plan.summary} actions=${html`
    <${Button} tone="quiet" onClick=${close}>${t("Close")}<//>
    <${Button} tone="primary" disabled=${isEmpty} onClick=${apply}>${t("Apply")}<//>`}>
    <${Table} label=${t("Plan")} hasFilter=${false} columns=${columns} rows=${plan.plan}
      keyOf=${(/** @type {Api.Step} */ row) => `${row.action} ${row.what}`}
      empty=${t("The file says what is in force.")} /><//>`;
}

/**
 * The file's mistakes, or that the file differs from the configuration in force.
 *
 * @param {{ file: Api.ConfigState | null, config: Api.Config }} props
 */
function FileState({ file, config }) {
  if (file?.state === "refused") {
    const next = config.watched
      ? t("The gateway reloads it automatically once it is right.")
      : t("Review the changes once it is right.");
    return html`<${Notice} tone="bad" title=${`${configTitle(file)}.`}>
      <ul class="mistakes">${file.errors.slice(0, MISTAKES_MAX).map((text) => html`<li key=${text}>${text}</li>`)}</ul>
      ${
        file.errors.length > MISTAKES_MAX &&
        html`<p>${t("and {count} more", { count: file.errors.length - MISTAKES_MAX })}</p>`
      }
      <p>${next}</p><//>`;
  }
  if (!config.file_changed) return null;
  return html`<${Notice} title=${file?.state === "changed" ? `${configTitle(file)}.` : t("The file has changed.")}>
    ${
      config.watched ? t("The gateway reads it in a moment.") : t("Review the changes to see what a reload would do.")
    }<//>`;
}

/** The configuration in force. */
export default function Configuration() {
  const reloaded = useStore((all) => all.reloaded);
  const begun = useStore((all) => all.begun);
  const file = useStore((all) => all.config);
  const [config, setConfig] = useState(/** @type {Api.Config | null} */ (null));
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const [plan, setPlan] = useState(/** @type {Api.Reload | null} */ (null));
  const [search, setSearch] = useState("");
  const [onlySet, setOnlySet] = useState(true);
  const read = useCallback(() => api.get("/v1/admin/config").then(setConfig, setFailure), []);
  useEffect(() => void read(), [reloaded, begun, file]);
  const reload = async (/** @type {boolean} */ dryRun) => {
    setFailure(null);
    try {
      return await api.post(`/v1/admin/config/reload?dry_run=${dryRun}`);
    } catch (error) {
      setPlan(null);
      setFailure(error);
      return null;
    } finally {
      await read();
    }
  };
  const apply = async () => {
    const text = t("{summary}. Requests under way to workers that restart or stop may end first.", {
      summary: plan?.summary,
    });
    if (!(await confirm({ title: t("Apply the file?"), text, action: t("Apply") }))) return;
    const done = await reload(false);
    if (done) {
      setPlan(null);
      toast(t("The configuration is in force: {summary}.", { summary: done.summary }));
    }
  };
  if (!config) {
    const text = failure && html`<${Notice} tone="bad">${failure.message}<//>`;
    return html`<${Page} title=${t("Configuration")}>${text}<//>`;
  }
  return html`<${Page} title=${t("Configuration")} lead=${
    config.path
      ? tParts("In force, from {path}. Secrets are masked.", { path: html`<code>${config.path}</code>` })
      : t("In force. This gateway was started without a file.")
  }
    actions=${
      config.path && html`<${Button} onClick=${async () => setPlan(await reload(true))}>${t("Review changes")}<//>`
    }>
    ${
      failure &&
      html`<${Notice} tone="bad" title=${t("The file was not accepted.")}>
      <pre class="wrap">${failure.message}</pre><//>`
    }
    ${!failure && html`<${FileState} file=${file} config=${config} />`}
    ${plan && html`<${Plan} plan=${plan} apply=${apply} close=${() => setPlan(null)} />`}
    <div class="actions"><input type="search" aria-label=${t("Find a setting")} placeholder=${t("Find a setting")}
      value=${search}
      onInput=${(event) => setSearch(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${onlySet}
        onChange=${(event) => setOnlySet(event.target.checked)} /> ${t("Only what is not the default")}</label></div>
    <${Sections} config=${config} search=${search} onlySet=${onlySet}
      showAll=${() => setOnlySet(false)} /><//>`;
}

/** @param {{ config: Api.Config, search: string, onlySet: boolean, showAll: () => void }} props */
function Sections({ config, search, onlySet, showAll }) {
  const changed = new Set(config.changed);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = Object.entries(config.settings)
    .map(([name, section]) => {
      const rows = rowsOf(name, section).filter((row) => {
        const text = `${row.key} ${row.title} ${JSON.stringify(row.value)}`.toLowerCase();
        return words.every((word) => text.includes(word)) && (!onlySet || changed.has(row.key) || changed.has(name));
      });
      return { name, rows };
    })
    .filter(({ rows }) => rows.length);
  if (!found.length) {
    const all = onlySet && html`<${Button} onClick=${showAll}>${t("Show the defaults as well")}<//>`;
    const title = words.length ? t("No such setting") : t("All settings have their defaults");
    return html`<${Empty} title=${title}>${all}<//>`;
  }
  return html`<div class="settings-list">${found.map(
    ({ name, rows }) => html`<${Section} key=${name} name=${name}
    rows=${rows} changed=${changed} />`,
  )}</div>`;
}
