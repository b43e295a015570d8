// Pages, cards, buttons, fields and badges.

import { Component } from "preact";
import { useEffect, useState } from "preact/hooks";
import { t } from "../texts.js";
import { inWords } from "./api_words.js";
import { useMounted } from "./hooks.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { toast } from "./overlays.js";

/** @import { ComponentChildren } from "preact" */

/**
 * A page: its title, a sentence about it, its actions, and the content.
 *
 * @param {{ title: string, lead?: ComponentChildren, actions?: ComponentChildren,
 *   back?: { href: string, title: string }, children?: ComponentChildren }} props
 */
export function Page({ title, lead, actions, back, children }) {
  useEffect(() => {
    document.title = `${title} · iChat`;
  }, [title]);
  return html`<div class="page">
    <header class="page-head">
      <div>
        ${back && html`<a class="back" href=${back.href}>← ${back.title}</a>`}
        <h1 tabindex="-1">${title}</h1>
        ${lead && html`<p class="lead">${lead}</p>`}
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </div>`;
}

/**
 * A part of a page with a heading.
 *
 * @param {{ title?: ComponentChildren, lead?: ComponentChildren, actions?: ComponentChildren,
 *   children?: ComponentChildren, tone?: string, flush?: boolean }} props
 */
export function Card({ title, lead, actions, children, tone = "", flush = false }) {
  return html`<section class=${`card ${tone} ${flush ? "flush" : ""}`}>
    ${
      (title || actions) &&
      html`<header class="card-head">
      <div>${title && html`<h2>${title}</h2>`}${lead && html`<p class="hint">${lead}</p>`}</div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>`
    }
    ${children}
  </section>`;
}

/**
 * A button; while what `onClick` returns is under way it cannot be pressed, and a failure is shown.
 *
 * tone: "" | "primary" | "danger" | "quiet".
 *
 * @param {{ onClick?: (event: MouseEvent) => unknown, tone?: string, icon?: string, children?: ComponentChildren,
 *   disabled?: boolean, small?: boolean, [attribute: string]: unknown }} props
 */
export function Button({ onClick, tone = "", icon, children, disabled, small, ...rest }) {
  const [isBusy, setBusy] = useState(false);
  const isMounted = useMounted();
  const press = async (/** @type {MouseEvent} */ event) => {
    const result = onClick?.(event);
    if (!(result instanceof Promise)) return;
    setBusy(true);
    try {
      await result;
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "bad");
    } finally {
      if (isMounted.current) setBusy(false);
    }
  };
  return html`<button type="button" class=${`button ${tone} ${small ? "small" : ""}`} onClick=${press}
    disabled=${disabled || isBusy} aria-busy=${isBusy} ...${rest}>
    ${icon && html`<${Icon} name=${icon} size=${16} />`}${children}</button>`;
}

/**
 * A small label. tone: "ok" | "busy" | "warn" | "bad" | "idle".
 *
 * @param {{ tone?: string, children?: ComponentChildren, title?: string }} props
 */
export function Badge({ tone = "idle", children, title }) {
  return html`<span class=${`badge ${tone}`} title=${title}>${children}</span>`;
}

/** @typedef {"ok" | "busy" | "warn" | "bad" | "idle"} Tone */

/** @type {Record<string, Tone>} */
const STATES = {
  ready: "ok",
  following: "ok",
  cold: "idle",
  asleep: "idle",
  stopped: "idle",
  stale: "warn",
  draining: "busy",
  ending: "busy",
  loading: "busy",
  starting: "busy",
  restarting: "warn",
  unhealthy: "bad",
  wedged: "bad",
  broken: "bad",
  failed: "bad",
};

/**
 * Return the tone of a worker's state.
 *
 * @param {string} state
 */
export const toneOfState = (state) => STATES[state] ?? "busy";

/**
 * The state of a worker; the API's word for it stands in the title.
 *
 * @param {{ state: string }} props
 */
export function StateBadge({ state }) {
  return html`<${Badge} tone=${toneOfState(state)} title=${state}>${inWords(state)}<//>`;
}

/**
 * A form's control with its label; `hint` explains, `error` has the mistake.
 *
 * @param {{ label: ComponentChildren, hint?: ComponentChildren, error?: string, children?: ComponentChildren,
 *   wide?: boolean }} props
 */
export function Field({ label, hint, error, children, wide }) {
  return html`<label class=${`field ${wide ? "wide" : ""} ${error ? "wrong" : ""}`}>
    <span class="field-label">${label}</span>
    ${children}
    ${error && html`<span class="field-error" role="alert">${error}</span>`}
    ${hint && !error && html`<span class="hint">${hint}</span>`}
  </label>`;
}

/**
 * Tabs: `tabs` are {name, title, count?}; arrow keys go to the next tab.
 *
 * @param {{ tabs: { name: string, title: string, count?: number }[], current: string, label: string,
 *   onSelect: (name: string) => void }} props
 */
export function Tabs({ tabs, current, onSelect, label }) {
  const move = (
    /** @type {KeyboardEvent & { currentTarget: { children: HTMLCollectionOf<HTMLElement> } }} */ event,
  ) => {
    const step = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1 })[event.key];
    if (!step) return;
    const at = tabs.findIndex((tab) => tab.name === current);
    const next = tabs[(at + step + tabs.length) % tabs.length];
    onSelect(next.name);
    event.currentTarget.children[tabs.indexOf(next)].focus();
    event.preventDefault();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${tabs.map(
      (tab) => html`<button type="button" role="tab" key=${tab.name} aria-selected=${tab.name === current}
      tabindex=${tab.name === current ? 0 : -1} onClick=${() => onSelect(tab.name)}>
      ${tab.title}${tab.count !== undefined && html` <span class="tab-count">${tab.count}</span>`}</button>`,
    )}
  </div>`;
}

/**
 * What stands where there is nothing to show: why, and what to do.
 *
 * @param {{ title: string, icon?: string, children?: ComponentChildren }} props
 */
export function Empty({ title, icon, children }) {
  return html`<div class="empty">${icon && html`<${Icon} name=${icon} size=${28} />`}
    <h2>${title}</h2>${children}</div>`;
}

/**
 * A sentence that matters. tone: "warn" | "bad" | "busy".
 *
 * @param {{ tone?: string, title?: ComponentChildren, children?: ComponentChildren,
 *   actions?: ComponentChildren }} props
 */
export function Notice({ tone = "warn", title, children, actions }) {
  return html`<div class=${`notice ${tone}`} role=${tone === "bad" ? "alert" : "status"}>
    <${Icon} name=${tone === "busy" ? "info" : "alert"} />
    <div>${title && html`<strong>${title}</strong>`}<div>${children}</div></div>
    ${actions && html`<div class="actions">${actions}</div>`}
  </div>`;
}

/**
 * A share of 0 to 1 as a bar, with its words beside it.
 *
 * @param {{ value: number | null | undefined, text?: string, label: string }} props
 */
export function Meter({ value, text, label }) {
  if (value === null || value === undefined) return html`<span class="muted">–</span>`;
  const tone = value >= 0.95 ? "bad" : value >= 0.8 ? "warn" : "";
  const percent = Math.round(Math.min(1, Math.max(0, value)) * 100);
  return html`<span class="meter-line"><span class=${`meter ${tone}`} role="meter" aria-label=${label} aria-valuemin="0"
    aria-valuemax="100" aria-valuenow=${percent}><i style=${{ width: `${percent}%` }}></i></span>
    <span class="num">${text ?? `${percent} %`}</span></span>`;
}

/**
 * Facts as a list: `facts` are [name, value] pairs; pairs with null or undefined are left out.
 *
 * @param {{ facts: [string, ComponentChildren][] }} props
 */
export function Facts({ facts }) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts">${known.map(
    ([name, value]) => html`<div key=${name}><dt>${name}</dt>
    <dd>${value}</dd></div>`,
  )}</dl>`;
}

/**
 * A button that copies a text.
 *
 * @param {{ text: string, label?: string }} props
 */
export function Copy({ text, label = t("Copy") }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await copyText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Button} small tone="quiet" icon=${isDone ? "check" : "copy"} onClick=${copy}>
    ${isDone ? t("Copied") : label}<//>`;
}

/**
 * Put a text on the clipboard; also where the page was loaded over plain http from another machine. Throws on failure.
 *
 * @param {string} text
 */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  const dialogs = document.querySelectorAll("dialog[open]"); // nothing behind a dialog can be selected
  (dialogs[dialogs.length - 1] ?? document.body).append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error(t("The browser lets nothing be copied: select the text, and copy it by hand."));
}

/**
 * A text in a box, with a button that copies it.
 *
 * @param {{ text: string, label?: string }} props
 */
export function Code({ text, label }) {
  return html`<div class="code"><pre tabindex="0">${text}</pre><${Copy} text=${text} label=${label} /></div>`;
}

/**
 * Its content; if drawing fails, the reason and a button that draws it again. The rest of the page stays.
 *
 * @extends {Component<{ children: ComponentChildren }, { error?: Error | null }>}
 */
export class Guard extends Component {
  componentDidCatch(/** @type {Error} */ error) {
    this.setState({ error });
  }

  /**
   * @param {{ children: ComponentChildren }} props
   * @param {{ error?: Error | null }} state
   */
  render({ children }, { error }) {
    if (!error) return children;
    const again = html`<${Button} small onClick=${() => this.setState({ error: null })}>${t("Try again")}<//>`;
    return html`<${Notice} tone="bad" title=${t("This page cannot be shown.")} actions=${again}>${error.message}<//>`;
  }
}
