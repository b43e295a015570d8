// Requests in flight: their phase, the reason for a delay, and a way to end them; finished requests below.

import { api } from "../api.js";
import { hrefOf } from "../router.js";
import { useRequests, useStore } from "../store.js";
import { sentences, t } from "../texts.js";
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
  Table,
  toast,
  useState,
} from "../ui.js";
import { Finished, shortId } from "./requests/finished.js";
import { RequestPage } from "./requests/timeline.js";
import { comingOf, isLoading, isWords, loadWords, stateLine } from "./states.js";

/** @import { Route } from "../router.js" */
/** @import { Model, Worker } from "../store.js" */

/** @type {Record<string, [string, string]>} */
const PHASES = {
  begun: [t("read"), "idle"],
  queued: [t("queued"), "warn"],
  connecting: [t("connecting"), "busy"],
  waiting: [t("waiting for the head"), "busy"],
  first_token: [t("waiting for the first token"), "busy"],
  streaming: [t("streaming"), "ok"],
  plain: [t("answering"), "ok"],
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
    const line = model
      ? count(model.queued, "{count} request waits for {model}", "{count} requests wait for {model}", {
          model: request.model,
        })
      : t("It waits");
    const coming = isNone ? comingOf(workers, request.model) : undefined;
    if (coming && isLoading(coming))
      return t("{line}: the model is being loaded: {step}.", { line, step: loadWords(coming) });
    if (coming) return [line, isWords(coming), stateLine(coming)].filter(Boolean).join(t(": "));
    if (isNone) return t("{line}: nothing serves it now.", { line });
    return t("{line}: every worker has as many requests as it may have ({count} in flight).", {
      line,
      count: model?.in_flight ?? "?",
    });
  }
  if (request.phase === "waiting" || request.phase === "first_token") {
    const why = worker?.waiting
      ? count(worker.waiting, "{count} request waits inside its engine", "{count} requests wait inside its engine")
      : t("it works on the prompt");
    const holes = { worker: request.worker, why };
    return (worker?.kv_use ?? 0) >= 0.95
      ? t("{worker} has it and has said nothing yet: {why}; its KV cache is full.", holes)
      : t("{worker} has it and has said nothing yet: {why}.", holes);
  }
  if (request.phase === "connecting")
    return t("The gateway connects to {worker}.", { worker: request.worker || t("its worker") });
  if (request.phase === "begun") return t("The gateway reads it.");
  const holes = { worker: request.worker, time: duration(request.queued_s) };
  return request.queued_s >= 1
    ? t("{worker} answers; it was queued for {time} before.", holes)
    : t("{worker} answers.", holes);
}

/** @param {Api.RequestInFlight} request */
async function cancel(request) {
  const text = t("The client of {id} gets an error, and the engine stops working on it.", { id: request.id });
  if (!(await confirm({ title: t("Cancel this request?"), text, action: t("Cancel it"), danger: true }))) return;
  await api.del(`/v1/admin/requests/${encodeURIComponent(request.own_id)}`);
  toast(t("The request was cancelled."));
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
      title: t("Age"),
      align: "right",
      value: (row) => row.age_s,
      cell: (row) => html`<span class="num">${duration(row.age_s)}</span>`,
    },
    {
      name: "model",
      title: t("Model"),
      value: (row) => row.model,
      cell: (row) =>
        html`<span class="clip" title=${row.model}>${row.model}</span>
          ${
            row.alias && html`<span class="sub clip" title=${row.alias}>${t("as {alias}", { alias: row.alias })}</span>`
          }`,
    },
    {
      name: "phase",
      title: t("Where it is"),
      value: (row) => row.phase,
      cell: (row) => html`<${Badge} tone=${PHASES[row.phase]?.[1]}>${PHASES[row.phase]?.[0] ?? row.phase}<//>
        <span class="sub why">${whyOf(row, models, workers)}</span>`,
    },
    {
      name: "worker",
      title: t("Worker"),
      value: (row) => row.worker,
      cell: (row) =>
        row.worker
          ? html`<a class="clip short" title=${row.worker} href=${hrefOf("workers", [row.worker])}>${row.worker}</a>`
          : "–",
    },
    {
      name: "who",
      title: t("From"),
      extra: true,
      value: (row) => row.key || row.client,
      cell: (row) => html`<span class="clip short" title=${row.key}>${row.key || t("no key")}</span>
        <span class="sub clip short" title=${row.client}>${row.client}</span>`,
    },
    {
      name: "bytes",
      title: t("In / out"),
      align: "right",
      extra: true,
      value: (row) => row.bytes_out,
      cell: (row) => html`<span class="num">${bytes(row.bytes_in)} / ${bytes(row.bytes_out)}</span>`,
    },
    {
      name: "id",
      title: t("Id"),
      extra: true,
      value: (row) => row.id,
      cell: (row) => html`<a href=${hrefOf("requests", [row.own_id])}
        aria-label=${t("Request {id}", { id: row.id })}><code class="nowrap" title=${row.id}>${shortId(
          row.id,
        )}</code></a>`,
    },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) => html`<${Button} small tone="danger"
        aria-label=${t("Cancel {id}", { id: row.id })} onClick=${() => cancel(row)}>${t("Cancel")}<//>`,
    },
  ];
  const empty = all.length
    ? t("No request is like that.")
    : html`<${Empty} icon="requests" title=${t("No request is in flight")}>
    <p>${t("They appear here while the gateway works on them.")}</p><//>`;
  const more = inFlight && inFlight.total > all.length && t("The {count} oldest are shown.", { count: all.length });
  const lead = inFlight
    ? sentences(count(inFlight.total, "{count} request now.", "{count} requests now."), more)
    : t("Asking…");
  return html`<${Page} title=${t("Requests in flight")} lead=${lead} actions=${html`<input type="search"
      aria-label=${t("Find requests")} placeholder=${t("Find ( / )")} value=${text}
      onInput=${(event) => setText(event.target.value)} />`}>
    <${Card} flush><${Table} label=${t("Requests in flight")} columns=${columns} rows=${found} keyOf=${(
      /** @type {Api.RequestInFlight} */ row,
    ) => row.own_id}
      sort="-age" total=${text ? undefined : inFlight?.total} empty=${empty} /><//>
    <${Finished} query=${params.query} /><//>`;
}
