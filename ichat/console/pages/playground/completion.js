// The playground's part for models that go on with a text.

import { t } from "../../texts.js";
import { Button, Card, Field, html, useEffect, useRedraw, useState } from "../../ui.js";
import { ModelChoice } from "./access.js";
import { streamed } from "./chat.js";
import { useFirstModel } from "./chat_page.js";
import { Figures, Outcome, ReplyButtons } from "./figures.js";
import { ended, isOpen, newReply, withComment, withEvent, withHead } from "./reply.js";
import { completionBody, NO_SETTINGS } from "./request.js";
import { Settings } from "./settings.js";

const PATH = "/v1/completions";
const GATHER_MS = 40;

/** @import { Reply } from "./reply.js" */
/** @import { Body, Settings as Values } from "./request.js" */

/**
 * @typedef {{ model: string, prompt: string, settings: Values, reply: Reply | null, body: Body,
 *   control: AbortController | null, redraw: (() => void) | null, timer: number }} Kept
 */

/** @type {Kept} */
const kept = {
  model: "",
  prompt: "",
  settings: NO_SETTINGS,
  reply: null,
  body: {},
  control: null,
  redraw: null,
  timer: 0,
};

function changed() {
  kept.timer ||= setTimeout(() => {
    kept.timer = 0;
    kept.redraw?.();
  }, GATHER_MS);
}

async function run(/** @type {Body} */ body) {
  const control = new AbortController();
  const isMine = () => kept.control === control;
  let reply = newReply(performance.now());
  const show = (/** @type {Reply} */ next) => {
    reply = next;
    if (isMine()) kept.reply = reply;
    changed();
  };
  kept.control?.abort();
  Object.assign(kept, { control, body, reply });
  changed();
  try {
    await streamed(PATH, body, control.signal, {
      onOpen: (response) => show(withHead(reply, response.headers)),
      onComment: (text) => show(withComment(reply, text)),
      onEvent: (event) => show(withEvent(reply, event.data, performance.now())),
    });
    show(ended(reply, performance.now()));
  } catch (error) {
    show(ended(reply, performance.now(), { error, isStopped: error.name === "AbortError" }));
  }
}

/**
 * The form and the text.
 *
 * @param {{ model: string }} props
 */
export function Completion({ model: asked }) {
  const redraw = useRedraw();
  const first = useFirstModel();
  const [model, setModel] = useState(asked || kept.model);
  useEffect(() => {
    kept.redraw = redraw;
    return () => {
      kept.redraw = null;
    };
  }, []);
  const chosen = model || first;
  const put = (/** @type {Partial<Kept>} */ part) => {
    Object.assign(kept, part);
    redraw();
  };
  const { prompt, settings, reply } = kept;
  const isBusy = reply !== null && isOpen(reply);
  const go = async () => void run(completionBody(chosen, settings, prompt));
  const goOn = () => put({ prompt: `${kept.body.prompt}${reply?.text}`, reply: null });
  return html`<div class="play"><div class="play-main pile">
    <${Card}><div class="pile">
      <${Field} label=${t("Model")}><${ModelChoice} value=${chosen} onChange=${(/** @type {string} */ name) => {
        kept.model = name;
        setModel(name);
      }} /><//>
      <${Field} label=${t("Text to go on with")} hint=${t("The model gets it as it is, without a chat's template.")}>
        <textarea rows="6" value=${prompt} onInput=${(event) => put({ prompt: event.target.value })}></textarea><//>
      <div class="actions">${
        isBusy
          ? html`<${Button} icon="close" onClick=${() => kept.control?.abort()}>${t("Stop")}<//>`
          : html`<${Button} tone="primary" disabled=${!prompt || !chosen} onClick=${go}>${t("Go on")}<//>`
      }</div></div><//>
    ${
      reply &&
      html`<${Card}><div class="said by-model" data-state=${reply.state}>
      <div class="said-text"><span class="muted">${kept.body.prompt}</span>${reply.text}</div>
      <${Outcome} reply=${reply} model=${kept.body.model} />
      ${
        !isBusy &&
        html`<footer><${Figures} reply=${reply} />
        <${ReplyButtons} reply=${reply} text=${reply.text} body=${kept.body} path=${PATH} more=${
          reply.text &&
          html`
          <${Button} small tone="quiet" onClick=${goOn}>${t("Take it over")}<//>`
        } /></footer>`
      }</div><//>`
    }
  </div>
  <aside><${Settings} of="completion" settings=${settings}
    onChange=${(/** @type {Kept["settings"]} */ next) => put({ settings: next })} /></aside></div>`;
}
