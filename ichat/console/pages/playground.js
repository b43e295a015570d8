// The playground: try the models as clients do, and see how fast they are and which worker answers.

import { go, hrefOf } from "../router.js";
import { t, tParts } from "../texts.js";
import { Empty, html, Page, Tabs } from "../ui.js";
import { Access, useNames } from "./playground/access.js";
import { Chat } from "./playground/chat_page.js";
import { Completion } from "./playground/completion.js";
import { Embeddings, Rerank } from "./playground/vectors.js";

/** @import { Route } from "../router.js" */

const PARTS = [
  { name: "chat", title: t("Chat"), part: Chat },
  { name: "completion", title: t("Completion"), part: Completion },
  { name: "embeddings", title: t("Embeddings"), part: Embeddings },
  { name: "rerank", title: t("Rerank"), part: Rerank },
];

/**
 * The page: `#/playground/PART?model=NAME`.
 *
 * @param {{ params: Route }} props
 */
export default function Playground({ params }) {
  const names = useNames();
  const current = PARTS.find((one) => one.name === params.rest[0]) ?? PARTS[0];
  const model = params.query.model ?? "";
  const content = html`<${current.part} model=${model} />`;
  const tabs = html`<${Tabs} label=${t("What to try")} tabs=${PARTS} current=${current.name}
    onSelect=${(/** @type {string} */ name) => go("playground", [name])} />`;
  return html`<${Page} title=${t("Playground")} actions=${tabs}>
    <${Access} />
    ${
      names.length
        ? content
        : html`<${Empty} icon="playground" title=${t("There is no model yet")}>
      <p>${tParts("{launch}, or start one from a terminal: its model appears here.", {
        launch: html`<a href=${hrefOf("launch")}>${t("Launch a worker")}</a>`,
      })}</p><//>`
    }<//>`;
}
