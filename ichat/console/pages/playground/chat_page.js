// The chat's part of the playground: a single model, or two side by side.

import { t, tParts } from "../../texts.js";
import { Button, html, Icon, useEffect, useRef } from "../../ui.js";
import { ModelChoice, useIsReady, useNames } from "./access.js";
import {
  addSide,
  change,
  chooseModel,
  clear,
  isAnswering,
  removeSide,
  SIDES_MAX,
  sendDraft,
  stop,
  useChat,
} from "./chat.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { parametersOf } from "./request.js";
import { Scoreboard } from "./scoreboard.js";
import { Settings } from "./settings.js";

/** @import { Chat as ChatState } from "./chat.js" */

const NEAR_PX = 120;
/** How long after its end an answer may still grow, as it is drawn. */
const SETTLES_MS = 1500;

/** Return the model that is chosen where none is: the first that can answer now. */
export function useFirstModel() {
  const names = useNames();
  const isReady = useIsReady();
  return names.find(isReady) ?? names[0] ?? "";
}

/**
 * Keep the end of the conversation in sight while it grows, unless the reader has scrolled up from it.
 *
 * @param {boolean} isBusy whether an answer is under way
 */
function useFollow(isBusy) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const busyUntil = useRef(0);
  busyUntil.current = isBusy ? Number.POSITIVE_INFINITY : Math.min(busyUntil.current, performance.now() + SETTLES_MS);
  useEffect(() => {
    let follows = true;
    let before = scrollY;
    const look = () => {
      const isNear = document.documentElement.scrollHeight - innerHeight - scrollY < NEAR_PX;
      if (isNear) follows = true;
      else if (scrollY < before - 1) follows = false; // what grows moves nothing up: the reader does
      before = scrollY;
    };
    const observer = new ResizeObserver(() => {
      if (follows && performance.now() < busyUntil.current) scrollTo(0, document.documentElement.scrollHeight);
    });
    addEventListener("scroll", look, { passive: true });
    if (place.current) observer.observe(place.current);
    return () => {
      removeEventListener("scroll", look);
      observer.disconnect();
    };
  }, []);
  return place;
}

/** @param {ChatState["settings"]} settings */
function wrongIn(settings) {
  try {
    parametersOf(settings);
    return "";
  } catch (error) {
    return error.message;
  }
}

/**
 * The chat; `model` is asked for by the address.
 *
 * @param {{ model: string }} props
 */
export function Chat({ model }) {
  const chat = useChat();
  const names = useNames();
  const first = useFirstModel();
  const isReady = useIsReady();
  useEffect(() => {
    if (model) chooseModel(chat.sides[0].id, model);
  }, [model]);
  useEffect(() => {
    if (!model && !chat.sides[0].model && first) chooseModel(chat.sides[0].id, first);
  }, [first]);
  const isBusy = isAnswering(chat);
  const place = useFollow(isBusy);
  const wrong = wrongIn(chat.settings);
  const why = chat.sides.some((side) => !side.model) ? t("Choose a model.") : wrong;
  const others = names.filter((name) => !chat.sides.some((side) => side.model === name));
  const other = others.find(isReady) ?? others[0] ?? chat.sides[0].model;
  const isEmpty = chat.sides.every((side) => !side.entries.length);
  return html`<div class="play"><div class="play-main" ref=${place}>
    <div class=${`sides ${chat.sides.length > 1 ? "two" : ""}`}>${chat.sides.map(
      (side, at) => html`
      <section key=${side.id} class="side" aria-label=${t("Side {count}", { count: at + 1 })}>
        <header class="side-head"><${ModelChoice} value=${side.model} label=${t("Model {count}", { count: at + 1 })}
          onChange=${(/** @type {string} */ name) => chooseModel(side.id, name)} />
          ${
            chat.sides.length > 1 &&
            html`<button type="button" class="icon-button"
            aria-label=${t("Take side {count} away", { count: at + 1 })} onClick=${() => removeSide(side.id)}>
            <${Icon} name="close" /></button>`
          }
          ${
            chat.sides.length < SIDES_MAX &&
            html`<${Button} small tone="quiet" onClick=${() => addSide(other)}>
            ${t("Compare with another")}<//>`
          }
          ${at === 0 && !isEmpty && html`<${Button} small tone="quiet" onClick=${clear}>${t("New chat")}<//>`}
        </header>
        <${Conversation} side=${side} label=${t("Conversation with {model}", { model: side.model })} />
        ${
          !side.entries.length &&
          html`<p class="play-empty muted">${tParts(
            "Nothing is said yet. What you write goes to {model} as clients send it: it waits in the " +
              "same queues, and counts as any other request. The conversation is in this tab alone, " +
              "and ends with it.",
            {
              model: html`<b>${side.model || t("a model")}</b>`,
            },
          )}</p>`
        }
      </section>`,
    )}</div>
    ${chat.sides.length > 1 && html`<${Scoreboard} sides=${chat.sides} />`}
    <${Composer} draft=${chat.draft} onChange=${(/** @type {ChatState["draft"]} */ draft) =>
      change({ draft })} isBusy=${isBusy} why=${why}
      onSend=${sendDraft} onStop=${stop} />
  </div>
  <aside><${Settings} settings=${chat.settings} onChange=${(/** @type {ChatState["settings"]} */ settings) =>
    change({ settings })} /></aside></div>`;
}
