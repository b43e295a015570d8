// Requests in flight: their phase, the reason for a delay, and a way to end them; finished requests below.

import { api } from "../api.js";
import { hrefOf } from "../router.js";
import { useRequests, useStore } from "../store.js";
import {
  Badge,
  Button,
  bytes,
  Card,
  confirm,
  count,
  duration,
  Empty,
  html,
  Page,
  stateName,
  Table,
  toast,
  useState,
} from "../ui.js";
import { Finished, shortId } from "./requests/finished.js";
import { RequestPage } from "./requests/timeline.js";
import { comingOf, isLoading, loadWords, stateLine } from "./states.js";

/** @import { Route } from "../router.js" */
/** @import { Model, Worker } from "../store.js" */

/** @type {Record<string, [string, string]>} */
const PHASES = {
  begun: ["read", "idle"],
  queued: ["queued", "warn"],
  connecting: ["connecting", "busy"],
  waiting: ["waiting for the head", "busy"],
  first_token: ["waiting for the first token", "busy"],
  streaming: ["streaming", "ok"],
  plain: ["answering", "ok"],
};

/**
 * Return why a request is where it is, in a sentence.
 *
 * @param {Api.RequestInFlight} request
 * @param {Model[]} models
 * @param {Worker[]} workers
 */
export function whyOf(request, models, workers) {
  const model = models.find((one) => one.id === request.model);
  const worker = workers.find((one) => one.worker_id === request.worker);
  if (request.phase === "queued") {
    const isNone = model?.workers === 0;
    const queue = model && `${count(model.queued, "request")} ${model.queued === 1 ? "waits" : "wait"}`;
    const line = queue ? `${queue} for ${request.model}` : "It waits";
    const coming = isNone ? comingOf(workers, request.model) : undefined;
    if (coming && isLoading(coming)) return `${line}: the model is being loaded: ${loadWords(coming)}.`;
    if (coming)
      return `${[line, `${coming.worker_id} is ${stateName(coming.state)}`, stateLine(coming)].filter(Boolean).join(": ")}`;
    if (isNone) return `${line}: nothing serves it now.`;
    return `${line}: every worker has as many requests as it may have (${model?.in_flight ?? "?"} in flight).`;
  }
  if (request.phase === "waiting" || request.phase === "first_token") {
    const inside = worker?.waiting ? `: ${count(worker.waiting, "request")} wait inside its engine` : "";
    const full = (worker?.kv_use ?? 0) >= 0.95 ? "; its KV cache is full" : "";
    return `${request.worker} has it and has said nothing yet${inside || ": it works on the prompt"}${full}.`;
  }
  if (request.phase === "connecting") return `The gateway connects to ${request.worker || "its worker"}.`;
  if (request.phase === "begun") return "The gateway reads it.";
  const before = request.queued_s >= 1 ? `; it was queued for ${duration(request.queued_s)} before` : "";
  return `${request.worker} answers${before}.`;
}

/** @param {Api.RequestInFlight} request */
async function cancel(request) {
  const text = `The client of ${request.id} gets an error, and the engine stops working on it.`;
  if (!(await confirm({ title: "Cancel this request?", text, action: "Cancel it", danger: true }))) return;
  await api.del(`/v1/admin/requests/${encodeURIComponent(request.own_id)}`);
  toast("The request was cancelled.");
}

/**
 * The page.
 *
 * @param {{ params: Route }} props
 */
export default function Requests({ params }) {
  const id = params.rest[0];
  return id ? html`<${RequestPage} key=${id} id=${id} />` : html`<${Lists} params=${params} />`;
}

/** @param {{ params: Route }} props */
function Lists({ params }) {
  const inFlight = useRequests();
  const models = useStore((all) => all.models);
  const workers = useStore((all) => all.workers);
  const [text, setText] = useState(params.query.find ?? "");
  const all = inFlight?.requests ?? [];
  /** @param {Api.RequestInFlight} one */
  const words = (one) => [one.id, one.own_id, one.key, one.client, one.model, one.alias, one.worker, one.phase];
  const found = all.filter((one) => words(one).some((word) => word?.toLowerCase().includes(text.toLowerCase())));
  /** @type {import("../ui/table.js").Column<Api.RequestInFlight>[]} */
  const columns = [
    {
      name: "age",
      title: "Age",
      align: "right",
      value: (row) => row.age_s,
      cell: (row) => html`<span class="num">${duration(row.age_s)}</span>`,
    },
    {
      name: "model",
      title: "Model",
      value: (row) => row.model,
      cell: (row) =>
        html`<span class="clip" title=${row.model}>${row.model}</span>
          ${row.alias && html`<span class="sub clip" title=${row.alias}>as ${row.alias}</span>`}`,
    },
    {
      name: "phase",
      title: "Where it is",
      value: (row) => row.phase,
      cell: (row) => html`<${Badge} tone=${PHASES[row.phase]?.[1]}>${PHASES[row.phase]?.[0] ?? row.phase}<//>
        <span class="sub why">${whyOf(row, models, workers)}</span>`,
    },
    {
      name: "worker",
      title: "Worker",
      value: (row) => row.worker,
      cell: (row) =>
        row.worker
          ? html`<a class="clip short" title=${row.worker} href=${hrefOf("workers", [row.worker])}>${row.worker}</a>`
          : "–",
    },
    {
      name: "who",
      title: "From",
      extra: true,
      value: (row) => row.key || row.client,
      cell: (row) => html`<span class="clip short" title=${row.key}>${row.key || "no key"}</span>
        <span class="sub clip short" title=${row.client}>${row.client}</span>`,
    },
    {
      name: "bytes",
      title: "In / out",
      align: "right",
      extra: true,
      value: (row) => row.bytes_out,
      cell: (row) => html`<span class="num">${bytes(row.bytes_in)} / ${bytes(row.bytes_out)}</span>`,
    },
    {
      name: "id",
      title: "Id",
      extra: true,
      value: (row) => row.id,
      cell: (row) => html`<a href=${hrefOf("requests", [row.own_id])}
        aria-label=${`Request ${row.id}`}><code class="nowrap" title=${row.id}>${shortId(row.id)}</code></a>`,
    },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) => html`<${Button} small tone="danger"
        aria-label=${`Cancel ${row.id}`} onClick=${() => cancel(row)}>Cancel<//>`,
    },
  ];
  const empty = all.length
    ? "No request is like that."
    : html`<${Empty} icon="requests" title="No request is in flight">
    <p>They appear here while the gateway works on them.</p><//>`;
  const more = inFlight && inFlight.total > all.length ? ` The ${all.length} oldest are shown.` : "";
  const lead = inFlight ? `${count(inFlight.total, "request")} now.${more}` : "Asking…";
  return html`<${Page} title="Requests in flight" lead=${lead} actions=${html`<input type="search"
      aria-label="Find requests" placeholder="Find ( / )" value=${text}
      onInput=${(event) => setText(event.target.value)} />`}>
    <${Card} flush><${Table} label="Requests in flight" columns=${columns} rows=${found} keyOf=${(
      /** @type {Api.RequestInFlight} */ row,
    ) => row.own_id}
      sort="-age" total=${text ? undefined : inFlight?.total} empty=${empty} /><//>
    <${Finished} query=${params.query} /><//>`;
}
