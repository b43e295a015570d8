// The playground's parts for models that compare texts: embeddings, and reranking.

import { ApiError, BASE, send } from "../../api.js";
import { hrefOf } from "../../router.js";
import { t } from "../../texts.js";
import {
  Button,
  Card,
  Code,
  count,
  duration,
  Facts,
  Field,
  html,
  Notice,
  number,
  Table,
  useEffect,
  useState,
} from "../../ui.js";
import { clientKey, ModelChoice } from "./access.js";
import { useFirstModel } from "./chat_page.js";
import { toldBy } from "./reply.js";
import { cosine, curlOf, rankedIn } from "./request.js";

/** @import { ComponentChildren } from "preact" */
/** @import { Column } from "../../ui/table.js" */
/** @import { Body } from "./request.js" */

/**
 * An answer and its request; the answer's shape is checked where it is shown.
 *
 * @typedef {{ answer: any, body: Body, path: string, told: Record<string, string>, took_s: number }} Found
 * @typedef {ReturnType<typeof rankedIn>[number]} RankedText
 */

const TEXTS_MAX = 50;
const EMBEDDINGS = "/v1/embeddings";
const RERANK = "/v1/rerank";
const kept = {
  embed: {
    model: "",
    texts: "The cat sleeps.\nA kitten takes a nap.\nThe share price fell.",
    answer: /** @type {Found | null} */ (null),
  },
  rerank: {
    model: "",
    query: "What do cats eat?",
    answer: /** @type {Found | null} */ (null),
    texts: "Paris is the capital of France.\nCats eat mostly meat.\nDogs bark at night.",
  },
};

/** @param {string} text */
const linesOf = (text) =>
  text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

/**
 * Ask and return {answer, body, path, told, took_s}. Throws ApiError.
 *
 * @param {string} path
 * @param {Body} body
 * @returns {Promise<Found>}
 */
async function ask(path, body) {
  const began = performance.now();
  const response = await send(path, { method: "POST", body, key: clientKey() });
  const answer = await response.json();
  if (answer === null || typeof answer !== "object") throw new ApiError(0, "", t("The answer is none that is known."));
  return { answer, body, path, told: toldBy(response.headers), took_s: (performance.now() - began) / 1000 };
}

/**
 * The values of a part's form, kept when another page is shown; and a failure.
 *
 * @template {keyof typeof kept} Name
 * @param {Name} name
 * @param {string} asked
 */
function usePart(name, asked) {
  const [, redraw] = useState(0);
  const [failure, setFailure] = useState(/** @type {ApiError | null} */ (null));
  const first = useFirstModel();
  const part = kept[name];
  useEffect(() => {
    if (asked) put({ model: asked });
  }, [asked]);
  const put = (/** @type {Partial<(typeof kept)["rerank"]>} */ change) => {
    Object.assign(part, change);
    redraw((value) => value + 1);
  };
  const run = async (/** @type {string} */ path, /** @type {Body} */ body) => {
    setFailure(null);
    put({ answer: null });
    try {
      put({ answer: await ask(path, body) });
    } catch (error) {
      setFailure(error);
    }
  };
  return { part: { ...part, model: part.model || first }, put, run, failure };
}

/** @param {{ failure: ApiError | null, hint: string }} props */
function Failure({ failure, hint }) {
  if (!failure) return null;
  return html`<${Notice} tone="bad" title=${failure.status ? `${failure.status} ${failure.code}` : ""}>
    ${failure.message} <span class="muted">${hint}</span><//>`;
}

/** @param {{ found: Found, more?: [string, ComponentChildren][] }} props */
function Asked({ found, more = [] }) {
  const { told, took_s: took, answer } = found;
  const worker =
    told.worker &&
    (told.worker.startsWith("external:")
      ? told.worker
      : html`<a href=${hrefOf("workers", [told.worker])}>${told.worker}</a>`);
  return html`<${Card} title=${t("How it was answered")}><${Facts} facts=${[
    [t("Worker or route"), worker],
    [t("Took"), duration(took)],
    [t("Tokens"), answer.usage && number(answer.usage.prompt_tokens ?? answer.usage.total_tokens)],
    ...more,
  ]} /><details><summary>${t("The same with curl")}</summary>
    <${Code} text=${curlOf(BASE, found.path, found.body, Boolean(clientKey()))} /></details><//>`;
}

/**
 * Embeddings: how near texts are to each other.
 *
 * @param {{ model: string }} props
 */
export function Embeddings({ model: asked }) {
  const { part, put, run, failure } = usePart("embed", asked);
  const texts = linesOf(part.texts).slice(0, TEXTS_MAX);
  const go = () => run(EMBEDDINGS, { model: part.model, input: texts, encoding_format: "float" });
  return html`<div class="pile"><${Card}><div class="pile">
    <${Field} label=${t("Model")}><${ModelChoice} value=${part.model} onChange=${(/** @type {string} */ model) =>
      put({ model })} /><//>
    <${Field} label=${t("Texts")} hint=${t("One a line, {count} at most.", { count: TEXTS_MAX })}>
      <textarea rows="5" value=${part.texts} onInput=${(event) => put({ texts: event.target.value })}></textarea><//>
    <div class="actions"><${Button} tone="primary" disabled=${!texts.length || !part.model} onClick=${go}>
      ${count(texts.length, "Compare {count} text", "Compare {count} texts")}<//></div></div><//>
    <${Failure} failure=${failure} hint=${t("Embeddings need a model that is made for them.")} />
    ${part.answer && html`<${Nearness} found=${part.answer} />`}</div>`;
}

/** @param {{ found: Found }} props */
function Nearness({ found }) {
  const texts = /** @type {string[]} */ (found.body.input);
  const vectors = [...(found.answer.data ?? [])].sort((a, b) => a.index - b.index).map((one) => one.embedding);
  return html`<${Card} title=${t("How near they are")} flush
    lead=${t("The cosine of each pair: 1 is the same meaning to the model, 0 none in common.")}><div class="table-box">
    <table class="cosines" aria-label=${t("Cosines")}><thead><tr><th scope="col"></th>
      ${texts.map((_, at) => html`<th key=${at} scope="col" class="right">${at + 1}</th>`)}</tr></thead>
    <tbody>${vectors.map(
      (row, at) => html`<tr key=${at}><th scope="row"><b>${at + 1}</b> ${texts[at]}</th>
      ${vectors.map((column, other) => {
        const value = cosine(row, column);
        const strength = Math.round(Math.max(0, Math.min(1, value)) * 45);
        const style = { background: `color-mix(in srgb, var(--chart-2) ${strength}%, transparent)` };
        return html`<td key=${other} class="right num" style=${style} data-title=${other + 1}>${value.toFixed(3)}</td>`;
      })}</tr>`,
    )}</tbody></table></div><//>
    <${Asked} found=${found} more=${[[t("Dimensions"), number(vectors[0]?.length)]]} />`;
}

/**
 * Rerank: which of some texts answer a question best.
 *
 * @param {{ model: string }} props
 */
export function Rerank({ model: asked }) {
  const { part, put, run, failure } = usePart("rerank", asked);
  const documents = linesOf(part.texts).slice(0, TEXTS_MAX);
  const go = () => run(RERANK, { model: part.model, query: part.query, documents });
  return html`<div class="pile"><${Card}><div class="pile">
    <${Field} label=${t("Model")}><${ModelChoice} value=${part.model} onChange=${(/** @type {string} */ model) =>
      put({ model })} /><//>
    <${Field} label=${t("Question")}><input type="text" value=${part.query}
      onInput=${(event) => put({ query: event.target.value })} /><//>
    <${Field} label=${t("Texts")} hint=${t("One a line, {count} at most.", { count: TEXTS_MAX })}>
      <textarea rows="5" value=${part.texts} onInput=${(event) => put({ texts: event.target.value })}></textarea><//>
    <div class="actions"><${Button} tone="primary" disabled=${!documents.length || !part.query.trim() || !part.model}
      onClick=${go}>${count(documents.length, "Rank {count} text", "Rank {count} texts")}<//></div></div><//>
    <${Failure} failure=${failure} hint=${t("Reranking needs a model that is made for it.")} />
    ${part.answer && html`<${Ranked} found=${part.answer} />`}</div>`;
}

/** @param {{ found: Found }} props */
function Ranked({ found }) {
  const rows = rankedIn(found.answer, found.body.documents);
  const [low, high] = /** @type {number[]} */ ([rows.at(-1)?.score, rows[0]?.score]);
  const share = (/** @type {number} */ score) =>
    low >= 0 && high <= 1 ? score : high > low ? (score - low) / (high - low) : 1;
  /** @type {Column<RankedText>[]} */
  const columns = [
    { name: "place", title: "", cell: (row) => rows.indexOf(row) + 1 },
    { name: "text", title: t("Text"), cell: (row) => html`<span class="wrap">${row.text}</span>` },
    {
      name: "score",
      title: t("Score"),
      align: "right",
      cell: (row) => html`<span class="meter-line">
      <span class="meter"><i style=${{ width: `${share(row.score) * 100}%` }}></i></span>
      <span class="num">${row.score.toPrecision(3)}</span></span>`,
    },
  ];
  return html`<${Card} title=${t("Best first")} flush><${Table} label=${t("Ranked texts")} columns=${columns} rows=${
    rows
  }
    keyOf=${(/** @type {RankedText} */ row) => row.index} /><//><${Asked} found=${found} />`;
}
