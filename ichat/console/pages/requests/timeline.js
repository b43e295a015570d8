// The page of a request: its timeline, and everything that is known about it.

import { hrefOf } from "../../router.js";
import { sentences, t } from "../../texts.js";
import {
  Badge,
  bytes,
  Card,
  count,
  duration,
  Empty,
  Facts,
  html,
  inWords,
  Meter,
  Notice,
  number,
  Page,
  percent,
  Table,
  when,
} from "../../ui.js";
import { leadOf, useAnswer } from "./finished.js";
import { cachedOf, partsOf, speedOf, toneOf } from "./phases.js";

/** @import { ComponentChildren } from "preact" */
/** @import { Column } from "../../ui/table.js" */
/** @import { Part } from "./phases.js" */

const AGAIN_MS = 2000;

/** @type {Column<Part & { share: number }>[]} */
const COLUMNS = [
  {
    name: "phase",
    title: t("Phase"),
    cell: (row) => html`<span class=${`phase-mark ${row.name}`} aria-hidden="true"></span> ${row.title}`,
  },
  { name: "begun", title: t("Begins after"), align: "right", cell: (row) => duration(row.begun) },
  { name: "seconds", title: t("Takes"), align: "right", cell: (row) => duration(row.seconds) },
  { name: "share", title: t("Share"), align: "right", cell: (row) => percent(row.share) },
];

/**
 * The phases of a request, drawn in proportion and as a table.
 *
 * @param {{ request: Api.FinishedRequest }} props
 */
function Timeline({ request }) {
  const total = request.duration_s;
  const rows = partsOf(request).map((part) => ({ ...part, share: total ? part.seconds / total : 0 }));
  const cached = cachedOf(request);
  const { head_s, first_s } = request.phases;
  const prefill = (first_s ?? 0) >= (head_s ?? 0) ? "first_s" : "head_s";
  const took = t("{took} in all.", { took: duration(total) });
  const lead = sentences(
    took,
    Boolean(cached) && t("Hatched: the part of the prompt that the engine had in its cache."),
  );
  return html`<${Card} title=${t("Timeline")} lead=${lead} flush>
    <div class="timeline" aria-hidden="true">${rows
      .filter((row) => row.seconds > 0)
      .map(
        (row) => html`<span key=${row.name} class=${`phase ${row.name}`} style=${{ flexGrow: row.share }}
        title=${`${row.title}: ${duration(row.seconds)}`}>
        ${row.name === prefill && cached ? html`<i style=${{ width: `${cached * 100}%` }}></i>` : ""}</span>`,
      )}</div>
    <${Table} label=${t("Phases")} columns=${COLUMNS} rows=${rows} empty=${t("It ended at once.")}
      keyOf=${(/** @type {Part} */ row) => row.name} /><//>`;
}

/** @param {{ request: Api.FinishedRequest }} props */
function Known({ request }) {
  const { tokens } = request;
  const cached = cachedOf(request);
  const speed = speedOf(request);
  const passed = request.passed.map((one) => `${one.model} (${one.reason})`).join(", ");
  /** @type {[string, ComponentChildren][]} */
  const facts = [
    [t("Id"), html`<code class="wrap">${request.id}</code>`],
    [t("Own id"), request.own_id === request.id ? null : html`<code class="wrap">${request.own_id}</code>`],
    [t("Model"), request.model && html`<span class="long">${request.model}</span>`],
    [t("Asked for"), request.alias && html`<span class="long">${request.alias}</span>`],
    [t("Could not answer"), passed],
    [t("Worker"), request.worker && html`<a href=${hrefOf("workers", [request.worker])}>${request.worker}</a>`],
    [t("Key"), request.key || t("no key")],
    [t("Client"), request.client],
    [t("Route"), html`<span class="long">${`${request.method} ${request.path}`}</span>`],
    [t("Trace"), request.trace_id && html`<code class="wrap">${request.trace_id}</code>`],
  ];
  /** @type {[string, ComponentChildren][]} */
  const figures = [
    [t("Began"), when(request.started_at)],
    [t("Ended"), when(request.ended_at)],
    [t("Cut off while"), request.phase && inWords(request.phase)],
    [t("Tokens in"), tokens && `${number(tokens.input)}${tokens.is_estimate ? ` ${t("(estimated)")}` : ""}`],
    [t("Tokens out"), tokens && number(tokens.output)],
    [
      t("Cached part of the prompt"),
      cached === null ? null : html`<${Meter} value=${cached} label=${t("Cached part")} />`,
    ],
    [t("Tokens/s after the first"), speed === null ? null : number(speed)],
    [t("Bytes in / out"), `${bytes(request.bytes_in)} / ${bytes(request.bytes_out)}`],
    [t("Pieces"), number(request.chunks)],
  ];
  return html`<div class="grid two"><${Card} title=${t("Facts")}><${Facts} facts=${facts} /><//>
    <${Card} title=${t("Figures")}><${Facts} facts=${figures} /><//></div>`;
}

/**
 * The page of the request with this id, the gateway's or the client's.
 *
 * @param {{ id: string }} props
 */
export function RequestPage({ id }) {
  const query = encodeURIComponent(id);
  const done = useAnswer(`/v1/admin/requests/finished?id=${query}`, AGAIN_MS);
  const running = useAnswer(`/v1/admin/requests?id=${query}`, AGAIN_MS);
  const found = done.answer?.requests ?? [];
  const request = found.find((one) => one.own_id === id) ?? found[0];
  const now = running.answer?.requests[0];
  const error = done.error ?? running.error;
  const others = found.filter((one) => one !== request);
  const back = { href: hrefOf("requests"), title: t("Requests") };
  const lead = request
    ? html`<${Badge} tone=${toneOf(request)}>${request.status}<//> ${request.error || t("It went well.")}`
    : now &&
      html`<${Badge} tone="busy">${inWords(now.phase)}<//> ${t("for {time} until now", { time: duration(now.age_s) })}`;
  return html`<${Page} title=${t("A request")} lead=${lead} back=${back}>
    ${error && html`<${Notice}>${error}<//>`}
    ${request && html`<${Timeline} request=${request} /><${Known} request=${request} />`}
    ${
      !request &&
      now &&
      html`<${Card} title=${t("In flight")} lead=${t("Its timeline is here when it has ended.")}>
      <${Facts} facts=${[
        [t("Id"), html`<code class="wrap">${now.id}</code>`],
        [t("Model"), now.model],
        [t("Worker"), now.worker],
        [t("Queued"), duration(now.queued_s)],
        [t("Key"), now.key || t("no key")],
        [t("Client"), now.client],
      ]} /><//>`
    }
    ${
      !request &&
      !now &&
      done.answer &&
      html`<${Empty} icon="requests" title=${t("No request with this id is known.")}>
      <p>${leadOf(done.answer)}</p><//>`
    }
    ${
      others.length > 0 &&
      html`<${Card} title=${t("The same id")} lead=${count(
        others.length,
        "{count} other request with this id of its client.",
        "{count} other requests with this id of its client.",
      )}>
      <ul>${others.map(
        (one) => html`<li key=${one.own_id}><a href=${hrefOf("requests", [one.own_id])}>${one.own_id}</a>,
        ${when(one.ended_at)}</li>`,
      )}</ul><//>`
    }<//>`;
}
