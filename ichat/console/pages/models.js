// Models & names: what can be asked for, who answers, and where a request would go now.

import { api } from "../api.js";
import { useStore } from "../store.js";
import { hrefOf } from "../router.js";
import {
  Badge,
  Button,
  Card,
  Dialog,
  Empty,
  Facts,
  Page,
  Table,
  duration,
  html,
  number,
  passed,
  percent,
  useTick,
  useEffect,
  useState,
} from "../ui.js";
import { ModelButtons } from "./changes.js";
import { readiness } from "./overview.js";

/** The page. */
export default function Models({ params }) {
  const models = useStore((all) => all.models);
  useTick();
  const aliases = useStore((all) => all.aliases);
  const [text, setText] = useState(params.query.find ?? "");
  const [asked, setAsked] = useState(null);
  const has = (name) => name.toLowerCase().includes(text.toLowerCase());
  const names = aliases.filter((one) => has(one.name) || one.targets?.some((target) => has(target.model)));
  return html`<${Page} title="Models & names" lead="What clients can ask for, and what answers." actions=${html`
      <input type="search" aria-label="Find models" placeholder="Find ( / )" value=${text}
        onInput=${(event) => setText(event.target.value)} />`}>
    <${ModelList} models=${models.filter((one) => has(one.id))} ask=${setAsked} />
    ${aliases.length > 0 && html`<${NameList} names=${names} ask=${setAsked} />`}
    ${asked && html`<${Explained} model=${asked} onClose=${() => setAsked(null)} />`}<//>`;
}

function ModelList({ models, ask }) {
  const workers = useStore((all) => all.workers);
  const history = useStore((all) => all.history);
  const last = (row, name) => history.models[row.id]?.[name]?.at(-1) ?? null;
  const rate = (row, name) => (last(row, name) === null ? null : last(row, name) / history.sample_s);
  const stateOf = (row) => workers.find((one) => one.on_demand && one.model_names.includes(row.id));
  const columns = [
    { name: "id", title: "Model", value: (row) => row.id, cell: (row) => html`<b class="name">${row.id}</b>` },
    { name: "ready", title: "Ready", value: (row) => row.workers, cell: readiness },
    {
      name: "in_flight",
      title: "In flight",
      align: "right",
      value: (row) => row.in_flight,
      cell: (row) => row.in_flight,
    },
    {
      name: "queued",
      title: "Queued",
      align: "right",
      value: (row) => row.queued,
      cell: (row) =>
        html`${row.queued}${
          row.waiting_s !== null
            ? html`<span class="sub">oldest ${duration(passed(row.waiting_s, row.seen_at))}</span>`
            : ""
        }`,
    },
    {
      name: "rate",
      title: "Requests/s",
      align: "right",
      extra: true,
      value: (row) => rate(row, "requests"),
      cell: (row) => number(rate(row, "requests")),
    },
    {
      name: "tokens",
      title: "Tokens/s",
      align: "right",
      extra: true,
      value: (row) => rate(row, "output_tokens"),
      cell: (row) => number(rate(row, "output_tokens"), { short: true }),
    },
    {
      name: "ttft",
      title: "First token",
      align: "right",
      extra: true,
      value: (row) => last(row, "ttft_p50_ms"),
      cell: (row) => (last(row, "ttft_p50_ms") === null ? "–" : duration(last(row, "ttft_p50_ms") / 1000)),
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
        <a class="button quiet small" href=${hrefOf("playground", [], { model: row.id })}>Try it</a>
        <${Button} small tone="quiet" aria-label=${`Where would a request for ${row.id} go`}
          onClick=${() => ask(row.id)}>Where to?<//></span>`,
    },
  ];
  return html`<${Card} title="Models" flush><${Table} label="Models" columns=${columns} rows=${models} sort="id"
    keyOf=${(row) => row.id} empty=${html`<${Empty} icon="models" title="No model"><p>A worker brings its model.
      <a href=${hrefOf("launch")}> Launch one</a>, or write an external route into the configuration.</p><//>`} /><//>`;
}

function NameList({ names, ask }) {
  const columns = [
    { name: "name", title: "Name", value: (row) => row.name, cell: (row) => html`<b class="name">${row.name}</b>` },
    { name: "targets", title: "Answered by", cell: (row) => html`<${Targets} alias=${row} />` },
    { name: "fallbacks", title: "Else", cell: (row) => (row.fallbacks ?? []).join(", then ") || "–" },
    { name: "longer", title: "Long prompts", extra: true, cell: (row) => row.longer ?? "–" },
    {
      name: "shadow",
      title: "Copies to",
      extra: true,
      cell: ({ shadow }) =>
        shadow ? `${shadow.model ?? shadow}${shadow.share < 1 ? ` (${percent(shadow.share)})` : ""}` : "–",
    },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) => html`<span class="row-actions">
        <a class="button quiet small" href=${hrefOf("playground", [], { model: row.name })}>Try it</a>
        <${Button} small tone="quiet" aria-label=${`Where would a request for ${row.name} go`}
          onClick=${() => ask(row.name)}>Where to?<//></span>`,
    },
  ];
  return html`<${Card} title="Names" lead="Names of requests that the configuration maps to models." flush>
    <${Table} label="Names" columns=${columns} rows=${names} keyOf=${(row) => row.name} sort="name" /><//>`;
}

function Targets({ alias }) {
  const targets = alias.targets?.length ? alias.targets : [{ model: alias.name, weight: 1 }];
  const total = targets.reduce((sum, target) => sum + target.weight, 0) || 1;
  return html`<span class="targets">${targets.map(
    (target) => html`<span key=${target.model}>${target.model}
    ${targets.length > 1 && html` <span class="muted">${percent(target.weight / total)}</span>`}</span>`,
  )}</span>`;
}

/** Where a request for a model (with this `body`) would go now, and why: what `./ichat.pyz explain` says. */
export function Explained({ model, body, onClose }) {
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const asked = body ?? { model, messages: [{ role: "user", content: "Hello!" }] };
    api.post("/v1/admin/route", asked).then(setAnswer, setError);
  }, [model]);
  const columns = [
    {
      name: "id",
      title: "Worker or route",
      cell: (row) => html`${row.worker_id} ${row.chosen && html`<${Badge} tone="ok">chosen<//>`}`,
    },
    { name: "load", title: "Load", align: "right", cell: (row) => `${row.in_flight} / ${row.in_flight_max}` },
    { name: "why", title: "", cell: (row) => row.why_not ?? (row.overloaded ? "more loaded than others" : "") },
  ];
  return html`<${Dialog} wide title=${`Where would a request for ${model} go now?`} onClose=${onClose}
      actions=${html`<button type="button" class="button" onClick=${onClose}>Close</button>`}>
    ${error && html`<p class="field-error" role="alert">${error.message}</p>`}
    ${!answer && !error && html`<p class="muted">Asking…</p>`}
    ${
      answer &&
      html`<${Facts} facts=${[
        ["To", answer.chosen ?? answer.reason ?? "nowhere"],
        ["By the rule", answer.rule],
        ["Policy", answer.policy],
        ["Model", answer.model],
        ["Waiting before it", answer.waiting || null],
      ]} />
    ${
      answer.plan?.length > 0 &&
      html`<ol class="plan">${answer.plan.map(
        (one, at) => html`<li key=${at}>${one.model}
      ${one.share !== null && html` <span class="muted">${percent(one.share)}</span>`} <span class="muted">
      ${one.worker ?? one.reason ?? ""}</span></li>`,
      )}</ol>`
    }
    <${Table} label="Candidates" columns=${columns} rows=${answer.candidates} keyOf=${(row) => row.worker_id} />`
    }<//>`;
}
