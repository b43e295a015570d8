// The list of finished requests.

import { api } from "../../api.js";
import { go, hrefOf } from "../../router.js";
import { sentences, t } from "../../texts.js";
import {
  Badge,
  Button,
  Card,
  duration,
  Empty,
  html,
  NONE,
  Notice,
  number,
  Table,
  useEffect,
  useState,
  when,
} from "../../ui.js";
import { firstTokenOf, toneOf } from "./phases.js";

/** @import { Column } from "../../ui/table.js" */

const LIMIT = 500;
const AGAIN_MS = 10_000;
const ID_CHARACTERS = 8;

/**
 * Return the end of an id, which differs: its beginning is the gateway's own.
 *
 * @param {string} id
 */
export const shortId = (id) => (id.length > ID_CHARACTERS ? `…${id.slice(-ID_CHARACTERS)}` : id);

/**
 * Return the answer of a path, asked again every `everyMs` while the page is visible, or when `version` changes.
 *
 * @template {string} Path
 * @param {Path} path
 * @param {number} everyMs 0: asked once
 * @param {number} version
 */
export function useAnswer(path, everyMs, version = 0) {
  const [found, setFound] = useState(
    /** @type {{ path?: Path, answer?: Api.Get<Api.Plain<Path>>, error?: string }} */ ({}),
  );
  useEffect(() => {
    const control = new AbortController();
    const ask = async () => {
      if (document.hidden) return;
      try {
        const answer = await api.get(path, { signal: control.signal });
        setFound({ path, answer });
      } catch (error) {
        if (!control.signal.aborted) setFound((before) => ({ ...before, error: error.message }));
      }
    };
    ask();
    const timer = everyMs ? setInterval(ask, everyMs) : undefined;
    return () => {
      control.abort();
      clearInterval(timer);
    };
  }, [path, everyMs, version]);
  return found.path === path ? found : { error: found.error };
}

/** @type {Column<Api.FinishedRequest>[]} */
const COLUMNS = [
  {
    name: "ended",
    title: t("Ended"),
    value: (row) => row.ended_at,
    cell: (row) => html`<span class="num nowrap">${when(row.ended_at)}</span>
      <code class="sub nowrap" title=${row.id}>${shortId(row.id)}</code>`,
  },
  {
    name: "status",
    title: t("Status"),
    value: (row) => row.status,
    cell: (row) => html`<${Badge} tone=${toneOf(row)}>${row.status}<//>
      ${row.error && html`<span class="sub clip" title=${row.error}>${row.error}</span>`}`,
  },
  {
    name: "model",
    title: t("Model"),
    value: (row) => row.model,
    cell: (row) => html`<span class="clip" title=${row.model}>${row.model || NONE}</span>
      ${row.alias && html`<span class="sub clip" title=${row.alias}>${t("as {alias}", { alias: row.alias })}</span>`}`,
  },
  {
    name: "time",
    title: t("Time"),
    align: "right",
    value: (row) => row.duration_s,
    cell: (row) => html`<span class="num">${duration(row.duration_s)}</span>
      ${
        row.phases.queued_s >= 0.1 &&
        html`<span class="sub">${t("{time} queued", { time: duration(row.phases.queued_s) })}</span>`
      }`,
  },
  {
    name: "first",
    title: t("First token"),
    align: "right",
    extra: true,
    value: firstTokenOf,
    cell: (row) => html`<span class="num">${duration(firstTokenOf(row))}</span>`,
  },
  {
    name: "tokens",
    title: t("Tokens in / out"),
    align: "right",
    extra: true,
    value: (row) => row.tokens?.output,
    cell: (row) => html`<span class="num">${number(row.tokens?.input)} / ${number(row.tokens?.output)}</span>`,
  },
  {
    name: "worker",
    title: t("Worker"),
    extra: true,
    value: (row) => row.worker,
    cell: (row) => html`<span class="clip short" title=${row.worker}>${row.worker || NONE}</span>`,
  },
  {
    name: "who",
    title: t("From"),
    extra: true,
    value: (row) => row.key || row.client,
    cell: (row) => html`<span class="clip short" title=${row.key}>${row.key || t("no key")}</span>
      <span class="sub clip short" title=${row.client}>${row.client}</span>`,
  },
];

/** @param {Api.FinishedRequest} row */
const wordsOf = (row) => [row.id, row.own_id, row.key, row.client, row.model, row.alias, row.worker, row.error];

/**
 * The newest finished requests, with filters that stand in the address.
 *
 * @param {{ query: Record<string, string> }} props
 */
export function Finished({ query }) {
  const [text, setText] = useState(query.done ?? "");
  const [onlyFailed, setOnlyFailed] = useState(query.failed === "1");
  const [version, setVersion] = useState(0);
  const failed = onlyFailed ? "&failed=1" : "";
  const { answer, error } = useAnswer(`/v1/admin/requests/finished?limit=${LIMIT}${failed}`, AGAIN_MS, version);
  useEffect(() => {
    const { done, failed: _, ...others } = query;
    const wanted = { ...others, ...(text && { done: text }), ...(onlyFailed && { failed: "1" }) };
    history.replaceState(null, "", hrefOf("requests", [], wanted));
  }, [text, onlyFailed]);
  const wanted = text.toLowerCase();
  const rows = (answer?.requests ?? []).filter((row) =>
    wordsOf(row).some((word) => word.toLowerCase().includes(wanted)),
  );
  const lead = answer && leadOf(answer);
  const none = text || onlyFailed ? t("No request is like that.") : t("No request has ended.");
  const empty = answer ? html`<${Empty} icon="requests" title=${none} />` : t("Asking…");
  return html`<${Card} flush title=${t("Finished")} lead=${lead} actions=${html`
      <input type="search" aria-label=${t("Filter by id, key, model, worker or error")} placeholder=${t("Filter")}
        value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${onlyFailed}
        onChange=${(event) => setOnlyFailed(event.target.checked)} />${t("only failures")}</label>
      <${Button} small onClick=${() => setVersion(version + 1)}>${t("Refresh")}<//>`}>
    ${error && html`<${Notice}>${t("The list may be old: {error}", { error })}<//>`}
    <${Table} label=${t("Finished requests")} columns=${COLUMNS} rows=${rows} sort="-ended" empty=${empty}
      keyOf=${(/** @type {Api.FinishedRequest} */ row) => `${row.own_id} ${row.ended_at}`}
      hrefOf=${(/** @type {Api.FinishedRequest} */ row) => hrefOf("requests", [row.own_id])}
      onOpen=${(/** @type {Api.FinishedRequest} */ row) => go("requests", [row.own_id])} /><//>`;
}

/**
 * Return which requests a gateway has kept, and where there are more.
 *
 * @param {Pick<Api.FinishedRequests, "kept_max" | "since">} kept
 */
export function leadOf({ kept_max, since }) {
  if (kept_max === 0) return t("This gateway keeps none (logs.finished_requests_max = 0).");
  const kept = t("The last {count} since {since}, when this process of the gateway began.", {
    count: number(kept_max),
    since: when(since),
  });
  return sentences(kept, t("The access log has earlier requests."));
}
