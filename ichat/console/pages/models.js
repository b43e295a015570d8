// Models & names: the models that clients can use, their workers, and where a request would go now.

import { api } from "../api.js";
import { go, hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import {
  Badge,
  Button,
  Card,
  Dialog,
  duration,
  Empty,
  Facts,
  html,
  number,
  Page,
  passed,
  percent,
  Table,
  useEffect,
  useState,
  useTick,
} from "../ui.js";
import { CopiesDialog, ModelButtons } from "./changes.js";
import { Connect } from "./connect.js";
import { readiness } from "./overview.js";
/** @import { Route } from "../router.js" */
/** @import { Alias, Model } from "../store.js" */

/** @typedef {Api.Route["candidates"][number]} Candidate */

/**
 * The page: `#/models?find=TEXT&connect=NAME`.
 *
 * @param {{ params: Route }} props
 */
export default function Models({ params }) {
  const models = useStore((all) => all.models);
  useTick();
  const aliases = useStore((all) => all.aliases);
  const [text, setText] = useState(params.query.find ?? "");
  const [asked, setAsked] = useState(/** @type {string | null} */ (null));
  const has = (/** @type {string} */ name) => name.toLowerCase().includes(text.toLowerCase());
  const names = aliases.filter((one) => has(one.name) || one.targets?.some((target) => has(target.model)));
  const actions = html`<input type="search" aria-label=${t("Find models")} placeholder=${t("Find ( / )")} value=${text}
    onInput=${(event) => setText(event.target.value)} />`;
  const lead = t("What clients can ask for, and what answers.");
  return html`<${Page} title=${t("Models & names")} lead=${lead} actions=${actions}>
    <${ModelList} models=${models.filter((one) => has(one.id))} ask=${setAsked} />
    ${aliases.length > 0 && html`<${NameList} names=${names} ask=${setAsked} />`}
    ${asked && html`<${Explained} model=${asked} onClose=${() => setAsked(null)} />`}
    ${params.query.connect && html`<${Connect} model=${params.query.connect} onClose=${() => go("models")} />`}<//>`;
}

/** @param {{ models: Model[], ask: (name: string) => void }} props */
function ModelList({ models, ask }) {
  const workers = useStore((all) => all.workers);
  const history = useStore((all) => all.history);
  /**
   * @param {Model} row
   * @param {keyof Api.History["models"][string]} name
   */
  const last = (row, name) => history.models[row.id]?.[name]?.at(-1) ?? null;
  /** @type {typeof last} */
  const rate = (row, name) =>
    last(row, name) === null ? null : /** @type {number} */ (last(row, name)) / history.sample_s;
  const [scaled, setScaled] = useState(/** @type {Model | null} */ (null));
  const canScale = (/** @type {Model} */ row) =>
    row.copies !== null || workers.some((one) => one.managed && !one.on_demand && one.model_name === row.id);
  const stateOf = (/** @type {Model} */ row) =>
    workers.find((one) => one.on_demand && one.model_names.includes(row.id));
  /** @type {import("../ui/table.js").Column<Model>[]} */
  const columns = [
    { name: "id", title: t("Model"), value: (row) => row.id, cell: (row) => html`<b class="name">${row.id}</b>` },
    { name: "ready", title: t("Ready"), value: (row) => row.workers, cell: (row) => readiness(row, workers) },
    ...(models.some((row) => row.copies) ? [replicas] : []),
    {
      name: "in_flight",
      title: t("In flight"),
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
    {
      name: "queued",
      title: t("Queued"),
      align: "right",
      value: (row) => row.queued,
      cell: (row) =>
        html`${row.queued}${
          row.waiting_s !== null
            ? html`<span class="sub">${t("oldest {age}", { age: duration(passed(row.waiting_s, row.seen_at)) })}</span>`
            : ""
        }`,
    },
    {
      name: "rate",
      title: t("Requests/s"),
      align: "right",
      extra: true,
      value: (row) => rate(row, "requests"),
      cell: (row) => number(rate(row, "requests")),
    },
    {
      name: "tokens",
      title: t("Tokens/s"),
      align: "right",
      extra: true,
      value: (row) => rate(row, "output_tokens"),
      cell: (row) => number(rate(row, "output_tokens"), { short: true }),
    },
    {
      name: "ttft",
      title: t("First token"),
      align: "right",
      extra: true,
      value: (row) => last(row, "ttft_p50_ms"),
      cell: (row) =>
        last(row, "ttft_p50_ms") === null ? "–" : duration(/** @type {number} */ (last(row, "ttft_p50_ms")) / 1000),
    },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) => html`<span class="row-actions">${
        row.loaded !== null &&
        html`<${ModelButtons} small model=${row.id}
        state=${stateOf(row)?.state ?? (row.loaded ? "ready" : "cold")} />`
      }
        ${
          canScale(row) &&
          html`<${Button} small aria-label=${t("Scale {id}", { id: row.id })} onClick=${() => setScaled(row)}>${t(
            "Scale",
          )}<//>`
        }
        <a class="button quiet small" href=${hrefOf("playground", [], { model: row.id })}>${t("Try it")}</a>
        <a class="button quiet small" href=${hrefOf("models", [], { connect: row.id })}
          aria-label=${t("Connect a client to {id}", { id: row.id })}>${t("Connect")}</a>
        <${Button} small tone="quiet" aria-label=${t("Route of a request for {id}", { id: row.id })}
          onClick=${() => ask(row.id)}>${t("Route")}<//></span>`,
    },
  ];
  return html`<${Card} title=${t("Models")} flush><${Table} label=${t("Models")} columns=${columns} rows=${models}
    sort="id"
    keyOf=${(/** @type {Model} */ row) =>
      row.id} empty=${html`<${Empty} icon="models" title=${t("No model")}><p>${tParts(
      "A worker brings its model. {launch}, or write an external route into the configuration.",
      { launch: html`<a href=${hrefOf("launch")}>${t("Launch one")}</a>` },
    )}</p><//>`} />
    ${
      scaled &&
      html`<${CopiesDialog} model=${scaled.id} wanted=${scaled.copies?.wanted ?? 1} onClose=${() => setScaled(null)} />`
    }<//>`;
}

/** @type {import("../ui/table.js").Column<Model>} */
const replicas = {
  name: "copies",
  title: t("Replicas"),
  align: "right",
  value: (row) => row.copies?.wanted ?? null,
  cell: copiesOf,
};

/** How many of a model's replicas are ready, of how many. */
function copiesOf(/** @type {Model} */ { copies }) {
  if (!copies) return html`<span class="muted">–</span>`;
  const starting = copies.starting
    ? html`<span class="sub">${t("{count} starting", { count: copies.starting })}</span>`
    : "";
  return html`${copies.ready} / ${copies.wanted}${starting}`;
}

/**
 * A text that may be long, or a dash: the other columns keep their room.
 *
 * @param {string | null | undefined | false} text
 */
const long = (text) => (text ? html`<span class="long">${text}</span>` : "–");

/** @param {{ names: Alias[], ask: (name: string) => void }} props */
function NameList({ names, ask }) {
  /** @type {import("../ui/table.js").Column<Alias>[]} */
  const columns = [
    { name: "name", title: t("Name"), value: (row) => row.name, cell: (row) => html`<b class="name">${row.name}</b>` },
    { name: "targets", title: t("Targets"), cell: (row) => html`<${Targets} alias=${row} />` },
    { name: "fallbacks", title: t("Fallbacks"), cell: (row) => long((row.fallbacks ?? []).join(t(", then "))) },
    { name: "longer", title: t("Long-context model"), extra: true, cell: (row) => long(row.longer) },
    {
      name: "shadow",
      title: t("Shadow"),
      extra: true,
      cell: ({ shadow }) =>
        long(shadow && `${shadow.model ?? shadow}${shadow.share < 1 ? ` (${percent(shadow.share)})` : ""}`),
    },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) => html`<span class="row-actions">
        <a class="button quiet small" href=${hrefOf("playground", [], { model: row.name })}>${t("Try it")}</a>
        <a class="button quiet small" href=${hrefOf("models", [], { connect: row.name })}
          aria-label=${t("Connect a client to {name}", { name: row.name })}>${t("Connect")}</a>
        <${Button} small tone="quiet" aria-label=${t("Route of a request for {name}", { name: row.name })}
          onClick=${() => ask(row.name)}>${t("Route")}<//></span>`,
    },
  ];
  return html`<${Card} title=${t("Names")} lead=${t("Names of requests that the configuration maps to models.")} flush>
    <${Table} label=${t("Names")} columns=${columns} rows=${names} keyOf=${(/** @type {Alias} */ row) =>
      row.name} sort="name" /><//>`;
}

/** @param {{ alias: Alias }} props */
function Targets({ alias }) {
  const targets = alias.targets?.length ? alias.targets : [{ model: alias.name, weight: 1 }];
  const total = targets.reduce((sum, target) => sum + target.weight, 0) || 1;
  return html`<span class="targets long">${targets.map(
    (target) => html`<span key=${target.model}>${target.model}
    ${targets.length > 1 && html` <span class="muted">${percent(target.weight / total)}</span>`}</span>`,
  )}</span>`;
}

/** Why an endpoint gets a request, and what becomes of a request that none gets, by the rule that the API names. */
/** @type {Record<string, string>} */
const REASONS = {
  only: t("It keeps the response that the request continues."),
  session: t("The session belongs there."),
  single: t("No other is available now."),
  prefix: t("Its cache should have most of the prompt's beginning."),
  spill: t("It has less to do than the worker that should have most of the prompt's beginning in its cache."),
  least_loaded: t("It has the fewest requests."),
  power_of_two: t("Of two at random it has fewer requests."),
  round_robin: t("It is its turn."),
  random: t("It was drawn at random."),
};
/** @type {Record<string, string>} */
const ENDS = {
  queued: t("nowhere now: it waits in the queue"),
  queue_full: t("nowhere: it is refused (429)"),
  loading: t("nowhere yet: it waits while the model is loaded"),
};

/**
 * Return when the models of a name are asked: those without a place are not asked for this request.
 *
 * @param {{ place?: number | null }} target
 */
const turnOf = ({ place }) => (place ? (place === 1 ? t("asked first") : t("asked next")) : t("not asked this time"));

/**
 * Where a request for a model (with this `body`) would go now, and why: what `./ichat.pyz explain` says.
 *
 * @param {{ model: string, body?: unknown, onClose: () => void }} props
 */
export function Explained({ model, body, onClose }) {
  const [answer, setAnswer] = useState(/** @type {Api.Route | null} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  useEffect(() => {
    const asked = body ?? { model, messages: [{ role: "user", content: "Hello!" }] };
    api.post("/v1/admin/route", asked).then(setAnswer, setError);
  }, [model]);
  /** @type {import("../ui/table.js").Column<Candidate>[]} */
  const columns = [
    {
      name: "id",
      title: t("Worker or route"),
      cell: (row) => html`${row.worker_id} ${row.chosen && html`<${Badge} tone="ok">${t("chosen")}<//>`}`,
    },
    { name: "load", title: t("In flight"), align: "right", cell: (row) => `${row.in_flight} / ${row.in_flight_max}` },
    {
      name: "why",
      title: t("Remark"),
      cell: (row) => row.why_not ?? (row.overloaded ? t("more loaded than others") : ""),
    },
  ];
  return html`<${Dialog} wide title=${t("Route of a request for {model}", { model })} onClose=${onClose}
      actions=${html`<button type="button" class="button" onClick=${onClose}>${t("Close")}</button>`}>
    ${error && html`<p class="field-error" role="alert">${error.message}</p>`}
    ${!answer && !error && html`<p class="muted">${t("Asking…")}</p>`}
    ${
      answer &&
      html`<${Facts} facts=${[
        [t("To"), answer.chosen ?? ENDS[answer.rule] ?? t("nowhere: it is refused (503)")],
        [t("Why"), answer.chosen ? (REASONS[answer.rule] ?? answer.rule) : answer.reason],
        [t("Policy"), answer.policy],
        [t("Model"), answer.model],
        [t("Waiting before it"), answer.waiting || null],
      ]} />
    ${
      answer.plan?.length > 0 &&
      html`<ul class="plan">${answer.plan.map(
        (one, at) => html`<li key=${at}>${one.model}
      ${one.share !== null && html` <span class="muted">${percent(one.share)}</span>`} <span class="muted">
      ${turnOf(one)}: ${one.worker ?? one.reason ?? ""}</span></li>`,
      )}</ul>`
    }
    <${Table} label=${t("Candidates")} hasFilter=${false} columns=${columns} rows=${answer.candidates}
      keyOf=${(/** @type {Candidate} */ row) => row.worker_id} />`
    }<//>`;
}
