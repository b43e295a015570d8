// Usage by key, model, endpoint and time; as a table, a chart and a file.

import { api, send } from "../api.js";
import { readRoute, replace } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import {
  Button,
  Card,
  count,
  duration,
  Empty,
  Field,
  html,
  Notice,
  number,
  Page,
  percent,
  Table,
  useEffect,
  useState,
} from "../ui.js";

import { Bars, barsOf } from "./usage/bars.js";

/** @import { Route } from "../router.js" */
/** @import { Column } from "../ui/table.js" */

/**
 * @typedef {{ span: string, by: string[], time: string, key: string, model: string }} Question
 * @typedef {Api.Usage["rows"][number] & Record<string, string | number | null | undefined>} Row
 * @typedef {keyof Api.Usage["totals"]} Amount
 * @typedef {"hour" | "day" | "month"} Unit
 */

const DAY_S = 86400;
const TIMES_MAX = 400;
/** @type {[string, string][]} */
const BY = [
  ["key", t("Key")],
  ["model", t("Model")],
  ["endpoint", t("Worker or route")],
];
const TIMES = [
  ["", t("The whole time")],
  ["hour", t("Hours")],
  ["day", t("Days")],
  ["month", t("Months")],
];

const midnight = (/** @type {number} */ now) => Math.floor(now / DAY_S) * DAY_S;
const monthStart = (/** @type {number} */ now, back = 0) => {
  const date = new Date(now * 1000);
  return Date.UTC(date.getUTCFullYear(), date.getUTCMonth() - back, 1) / 1000;
};
/** @type {Record<string, [string, (now: number) => [number, number]]>} */
const SPANS = {
  today: [t("Today"), (now) => [midnight(now), now]],
  week: [t("7 days"), (now) => [midnight(now) - 6 * DAY_S, now]],
  month: [t("This month"), (now) => [monthStart(now), now]],
  last_month: [t("Last month"), (now) => [monthStart(now, 1), monthStart(now)]],
  year: [t("12 months"), (now) => [monthStart(now, 11), now]],
};

/**
 * Return the query of a question; `by` and `time` are the columns that make a row.
 *
 * @param {Pick<Question, "span" | "key" | "model">} question
 * @param {string[]} by
 */
function queryOf({ span, key, model }, by) {
  const [from, to] = SPANS[span][1](Math.ceil(Date.now() / 1000));
  const query = new URLSearchParams(/** @type {Record<string, any>} */ ({ from, to, by: by.join(",") }));
  if (key) query.set("key", key);
  if (model) query.set("model", model);
  return query;
}

/** @param {Question} question */
const rowKeys = ({ by, time }) => {
  const names = BY.map(([name]) => name).filter((name) => by.includes(name));
  return time ? [...names, time] : names;
};

/** @type {Record<string, string>} */
const UNNAMED = { key: t("no key"), model: t("no such model"), endpoint: t("none") };

/**
 * @param {string[]} names
 * @param {boolean} hasCosts
 * @returns {Column<Row>[]}
 */
function columnsOf(names, hasCosts) {
  /**
   * @param {Amount} name
   * @param {string} title
   * @param {Partial<Column<Row>>} more
   * @returns {Column<Row>}
   */
  const amount = (name, title, more = {}) => ({
    name,
    title,
    align: "right",
    value: (row) => row[name],
    cell: (row) => number(row[name]),
    ...more,
  });
  /** @type {Record<string, string>} */
  const titles = { ...Object.fromEntries(BY), hour: t("Hour (UTC)"), day: t("Day (UTC)"), month: t("Month (UTC)") };
  return [
    ...names.map((name) => ({
      name,
      title: titles[name],
      value: (/** @type {Row} */ row) => row[name],
      cell: (/** @type {Row} */ row) => html`<span class="long">${row[name] || UNNAMED[name]}</span>`,
    })),
    amount("requests", t("Requests")),
    amount("errors", t("Errors"), { extra: true }),
    amount("input_tokens", t("Tokens in")),
    amount("cached_tokens", t("Cached"), { extra: true }),
    amount("output_tokens", t("Tokens out")),
    amount("busy_s", t("Time"), { extra: true, cell: (row) => duration(row.busy_s) }),
    ...(hasCosts ? [amount("cost", t("Cost"), { cell: (row) => (row.cost === null ? "–" : money(row.cost)) })] : []),
  ];
}

/** @param {number} value */
const money = (value) => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 4 });

/** @param {{ totals: Api.Usage["totals"] }} props */
function Totals({ totals }) {
  const cached = totals.input_tokens ? totals.cached_tokens / totals.input_tokens : 0;
  const tiles = [
    [t("Requests"), number(totals.requests), count(totals.errors, "{count} error", "{count} errors")],
    [
      t("Tokens in"),
      number(totals.input_tokens, { short: true }),
      t("{share} from the cache", { share: percent(cached) }),
    ],
    [
      t("Tokens out"),
      number(totals.output_tokens, { short: true }),
      totals.estimated_tokens
        ? t("{count} of all are estimates", {
            count: number(totals.estimated_tokens, { short: true }),
          })
        : "",
    ],
    [t("Cost"), totals.cost === null ? "–" : money(totals.cost), totals.cost === null ? t("no prices are set") : ""],
  ];
  return html`<div class="grid tiles">${tiles.map(
    ([title, value, more]) => html`<div key=${title} class="card tile"
    data-total=${title}><span class="hint">${title}</span><b>${value}</b>
    <span class="hint">${more}</span></div>`,
  )}</div>`;
}

/**
 * Return the middle of a span of time that the API names, in seconds since 1970.
 *
 * @param {string} label
 */
const timeOf = (label) =>
  Date.parse(/^\d{4}-\d\d$/.test(label) ? `${label}-01T00:00Z` : label.length === 10 ? `${label}T00:00Z` : label) /
  1000;

const slice = (/** @type {number} */ from, /** @type {number} */ to) => (/** @type {number} */ at) =>
  new Date(at * 1000).toISOString().slice(from, to);
/** @type {Record<Unit, string>} */
const BARS = {
  hour: t("Tokens by hour and key"),
  day: t("Tokens by day and key"),
  month: t("Tokens by month and key"),
};
const IN_WORDS = { hour: slice(11, 16), day: slice(5, 10), month: slice(0, 7) };

/**
 * Return the beginnings of the hours, days or months of a time, in seconds since 1970.
 *
 * @param {number} from
 * @param {number} to
 * @param {Unit} unit
 */
function timesOf(from, to, unit) {
  const found = [];
  const next = (/** @type {number} */ at) => {
    if (unit === "month") return monthStart(at, -1);
    return at + (unit === "hour" ? 3600 : DAY_S);
  };
  for (let at = from; at < to && found.length < TIMES_MAX; at = next(at)) found.push(at);
  return found;
}

/** @param {{ answer: Api.Usage, span: [number, number], unit: Unit }} props */
function OverTime({ answer, span, unit }) {
  const rows = answer.rows.map((row) => ({ ...row, at: timeOf(String(/** @type {Row} */ (row)[unit])) }));
  if (!rows.some((row) => row.input_tokens + row.output_tokens)) return null;
  const [bars, keys] = barsOf(rows, timesOf(...span, unit), IN_WORDS[unit]);
  return html`<${Bars} title=${BARS[unit]} bars=${bars} keys=${keys} />`;
}

/**
 * @param {Question} question
 * @param {string[]} names
 */
async function saveCsv(question, names) {
  const query = queryOf(question, names);
  query.set("format", "csv");
  const response = await send(`/v1/admin/usage?${query}`);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = `usage-${new Date().toISOString().slice(0, 10)}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** @param {{ question: Question, set: (change: Partial<Question>) => void, answer: Api.Usage | null }} props */
function Filters({ question, set, answer }) {
  const models = useStore((all) => all.models);
  const [keys, setKeys] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    api.get("/v1/admin/keys").then(
      (found) => setKeys(found.keys.map((one) => one.name)),
      () => {},
    );
  }, []);
  const choose = (
    /** @type {keyof Question} */ name,
    /** @type {string[][]} */ options,
  ) => html`<select value=${question[name]}
    onChange=${(event) => set({ [name]: event.target.value })}>
    ${options.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select>`;
  const turn = (/** @type {string} */ name) =>
    set({
      by: question.by.includes(name) ? question.by.filter((one) => one !== name) : [...question.by, name],
    });
  return html`<${Card}><div class="form tight">
    <${Field} label=${t("When")}>${choose(
      "span",
      Object.entries(SPANS).map(([name, [title]]) => [name, title]),
    )}<//>
    <${Field} label=${t("By")}>${choose("time", TIMES)}<//>
    <${Field} label=${t("Key")}>${choose("key", [["", t("All")], ...keys.map((name) => [name, name])])}<//>
    <${Field} label=${t("Model")}>${choose("model", [["", t("All")], ...models.map(({ id }) => [id, id])])}<//>
    <div class="wide actions">${BY.map(
      ([name, title]) => html`<label key=${name} class="check"><input type="checkbox"
      checked=${question.by.includes(name)} onChange=${() => turn(name)} /> ${title}</label>`,
    )}
      ${
        answer &&
        html`<span class="hint">${t("{from}Z to {to}Z", {
          from: new Date(answer.from).toISOString().slice(0, 16),
          to: new Date(answer.to).toISOString().slice(0, 16),
        })}</span>`
      }</div></div><//>`;
}

/** @type {Question} */
const DEFAULT = { span: "month", by: ["key", "model"], time: "", key: "", model: "" };

/**
 * Return the question of an address; parts that make no sense are left out.
 *
 * @param {Record<string, string>} query
 * @returns {Question}
 */
function questionOf({ span = "", by = String(DEFAULT.by), time = "", key = "", model = "" }) {
  return {
    span: span in SPANS ? span : DEFAULT.span,
    by: by.split(",").filter((name) => BY.some(([one]) => one === name)),
    time: TIMES.some(([one]) => one === time) ? time : DEFAULT.time,
    key,
    model,
  };
}

/** @param {Question} question */
function addressOf(question) {
  const texts = Object.entries(question).map(([name, value]) => [name, String(value)]);
  const usual = /** @type {Record<string, unknown>} */ (DEFAULT);
  return Object.fromEntries(texts.filter(([name, value]) => value !== String(usual[name])));
}

/**
 * Usage from the ledger. The address has the question.
 *
 * @param {{ params: Route }} props
 */
export default function Usage({ params }) {
  const question = questionOf(params.query);
  const [answer, setAnswer] = useState(
    /** @type {(Api.Usage & { names: string[], over: Api.Usage, span: [number, number], unit: Unit }) | null} */ (null),
  );
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const [round, setRound] = useState(0);
  const names = rowKeys(question);
  const unit = /** @type {Record<string, Unit>} */ ({ today: "hour", year: "month" })[question.span] ?? "day";
  useEffect(() => {
    const control = new AbortController();
    const ask = (/** @type {string[]} */ by) =>
      api.get(`/v1/admin/usage?${queryOf(question, by)}`, { signal: control.signal });
    const span = SPANS[question.span][1](Math.ceil(Date.now() / 1000));
    Promise.all([ask(names.length ? names : ["model"]), ask([unit, "key"])]).then(
      ([table, over]) => {
        setAnswer({ ...table, names: names.length ? names : ["model"], over, span, unit });
        setFailure(null);
      },
      (error) => error.name !== "AbortError" && setFailure(error),
    );
    return () => control.abort();
  }, [JSON.stringify(question), round]);
  const set = (/** @type {Partial<Question>} */ change) =>
    replace("usage", [], addressOf({ ...questionOf(readRoute().query), ...change }));
  const actions = html`<${Button} onClick=${() => setRound(round + 1)}>${t("Refresh")}<//>
    <${Button} onClick=${() => saveCsv(question, names.length ? names : ["model"])}>${t("Save as CSV")}<//>`;
  return html`<${Page} title=${t("Usage")} actions=${actions}
    lead=${t("Requests and tokens of each key, model and worker. Days and months are those of UTC.")}>
    ${failure && html`<${Notice} tone="bad">${failure.message}<//>`}
    ${
      answer &&
      answer.storage !== "ok" &&
      html`<${Notice} title=${t("The disk does not have everything.")}>
      ${answer.storage}<//>`
    }
    <${Filters} question=${question} set=${set} answer=${answer} />
    ${
      answer &&
      html`<${Totals} totals=${answer.totals} />
      <${OverTime} answer=${answer.over} span=${answer.span} unit=${answer.unit} />
      <${Card} flush><${Table} key=${answer.names.join()} label=${t("Usage")} rows=${answer.rows}
        columns=${columnsOf(answer.names, answer.totals.cost !== null)}
        sort=${question.time ? `-${question.time}` : "-output_tokens"}
        keyOf=${(/** @type {Row} */ row) => answer.names.map((name) => row[name]).join("\n")}
        empty=${html`<${Empty} icon="usage" title=${t("No requests in this time")} />`} /><//>`
    }<//>`;
}
