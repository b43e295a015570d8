// A side of the chat: its messages, and the actions on them.

import { Markdown } from "../../markdown.js";
import { t, tParts } from "../../texts.js";
import { Button, Field, html, useState } from "../../ui.js";
import { edit, regenerate, sendResults } from "./chat.js";
import { Pictures } from "./composer.js";
import { Figures, Outcome, ReplyButtons } from "./figures.js";
import { isOpen, partsOf } from "./reply.js";

/** @import { ReplyEntry as ReplyOf, ResultsEntry as ResultsOf, Side, UserEntry as UserOf } from "./chat.js" */
/** @import { Call as ReplyCall } from "./reply.js" */

const PATH = "/v1/chat/completions";

/**
 * The entries of a side.
 *
 * @param {{ side: Side, label: string }} props
 */
export function Conversation({ side, label }) {
  return html`<div class="conversation" role="log" aria-label=${label}>${side.entries.map((entry, at) => {
    const isLast = at === side.entries.length - 1;
    if (entry.kind === "user") return html`<${UserEntry} key=${entry.id} entry=${entry} />`;
    if (entry.kind === "results") return html`<${ResultsEntry} key=${entry.id} entry=${entry} />`;
    return html`<${ReplyEntry} key=${entry.id} entry=${entry} side=${side} isLast=${isLast} />`;
  })}</div>`;
}

/** @param {{ entry: UserOf }} props */
function UserEntry({ entry }) {
  const [text, setText] = useState(/** @type {string | null} */ (null));
  if (text !== null) {
    const save = () => {
      edit(entry.id, text);
      setText(null);
    };
    return html`<article class="said by-user"><textarea aria-label=${t("Your message")} rows="4" value=${text}
      onInput=${(event) => setText(event.target.value)}></textarea>
      <div class="actions"><${Button} small onClick=${() => setText(null)}>${t("Cancel")}<//>
        <${Button} small tone="primary" disabled=${!text.trim() && !entry.pictures.length}
          onClick=${async () => save()}>${t("Send anew")}<//>
        <span class="hint">${t("The later messages are removed.")}</span></div></article>`;
  }
  return html`<article class="said by-user" data-by="user"><${Pictures} pictures=${entry.pictures} />
    <div class="said-text">${entry.text}</div>
    <span class="reply-buttons"><${Button} small tone="quiet" onClick=${() => setText(entry.text)}>${t(
      "Edit",
    )}<//></span>
  </article>`;
}

/** @param {{ entry: ResultsOf }} props */
function ResultsEntry({ entry }) {
  return html`<article class="said by-user">${entry.results.map(
    ({ id, name, content }) => html`<div key=${id}>
    <span class="hint">${tParts("{name} returned", { name: html`<code>${name}</code>` })}</span><pre class="lines">${
      content
    }</pre></div>`,
  )}</article>`;
}

/** @param {{ entry: ReplyOf, side: Side, isLast: boolean }} props */
function ReplyEntry({ entry, side, isLast }) {
  const { reply } = entry;
  const [thoughts, text] = partsOf(reply);
  const hasCalls = reply.calls.length > 0;
  const again =
    !isOpen(reply) &&
    html`<${Button} small tone="quiet"
    onClick=${async () => regenerate(side.id, entry.id)}>
    ${reply.state === "failed" ? t("Try again") : t("Regenerate")}<//>`;
  return html`<article class="said by-model" data-state=${reply.state}>
    ${thoughts && html`<${Thoughts} text=${thoughts} isOpen=${!text && isOpen(reply)} />`}
    ${text && html`<${Markdown} text=${text} />`}
    ${reply.calls.filter(Boolean).map((call, at) => html`<${Call} key=${at} call=${call} />`)}
    ${
      hasCalls &&
      isLast &&
      reply.state === "done" &&
      html`<${Results} side=${side}
      calls=${reply.calls} />`
    }
    ${
      !hasCalls &&
      reply.state === "done" &&
      !text &&
      html`<p class="hint">${t("The model has ended without an answer.")}</p>`
    }
    <${Outcome} reply=${reply} model=${entry.model} />
    ${
      !isOpen(reply) &&
      html`<footer><${Figures} reply=${reply} />
      <${ReplyButtons} reply=${reply} text=${text} body=${entry.body} path=${PATH}
        more=${again} /></footer>`
    }
  </article>`;
}

/** @param {{ text: string, isOpen: boolean }} props */
function Thoughts({ text, isOpen: isNow }) {
  return html`<details class="thoughts"><summary>${isNow ? t("Thinking…") : t("Thoughts")}</summary>
    <div class="said-text">${text}</div></details>`;
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {{ call: ReplyCall }} props */
function Call({ call }) {
  return html`<div class="call" data-call=${call.name}><span>${tParts("The model calls {name}", {
    name: html`<code>${call.name || "?"}</code>`,
  })}</span>
    <pre class="lines">${pretty(call.arguments) || t("(no arguments)")}</pre></div>`;
}

/** @param {{ side: Side, calls: ReplyCall[] }} props */
function Results({ side, calls }) {
  const [texts, setTexts] = useState(calls.map(() => ""));
  const put = (/** @type {number} */ at, /** @type {string} */ text) =>
    setTexts(texts.map((one, other) => (other === at ? text : one)));
  const send = async () =>
    sendResults(
      side.id,
      calls.map(({ id, name }, at) => ({ id, name, content: texts[at] })),
    );
  return html`<div class="results">${calls.map(
    (call, at) => html`<${Field} key=${call.id}
    label=${t("What {name} returns", { name: call.name })}><textarea rows="2" class="mono" value=${texts[at]}
      onInput=${(event) => put(at, event.target.value)}></textarea><//>`,
  )}
    <${Button} small tone="primary" disabled=${texts.some((text) => !text)} onClick=${send}>${t(
      "Send the result",
    )}<//></div>`;
}
