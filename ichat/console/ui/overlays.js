// What lies over the page: dialogs, questions and short messages.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { t } from "../texts.js";
import { html } from "./html.js";

/** @import { ComponentChildren } from "preact" */

const TOAST_MS = 6000;

/**
 * @typedef {{ id: number, message: string, tone: string }} Toast
 * @typedef {{ title: string, text: string, action: string, danger: boolean, resolve: (is: boolean) => void }} Question
 * @typedef {{ toasts: Toast[], question: Question | null }} Shown
 */

/** @type {Set<(shown: Shown) => void>} */
const listeners = new Set();
/** @type {Shown} */
let shown = { toasts: [], question: null };
let serial = 0;

function show(/** @type {Partial<Shown>} */ change) {
  shown = { ...shown, ...change };
  for (const listener of listeners) listener(shown);
}

/**
 * Show a message for some seconds.
 *
 * @param {string} message
 * @param {"ok" | "bad"} tone
 */
export function toast(message, tone = "ok") {
  serial += 1;
  const one = { id: serial, message, tone };
  show({ toasts: [...shown.toasts.slice(-3), one] });
  setTimeout(() => show({ toasts: shown.toasts.filter((other) => other.id !== one.id) }), TOAST_MS);
}

/**
 * Ask a question and return (in a promise) whether the answer was `action`.
 *
 * @param {{ title: string, text: string, action?: string, danger?: boolean }} question
 * @returns {Promise<boolean>}
 */
export function confirm({ title, text, action = t("OK"), danger = false }) {
  return new Promise((resolve) => {
    show({ question: { title, text, action, danger, resolve } });
  });
}

/** Where dialogs and messages appear; the shell has it once. */
export function Overlays() {
  const [{ toasts, question }, set] = useState(shown);
  useEffect(() => {
    listeners.add(set);
    return () => void listeners.delete(set);
  }, []);
  const answer = (/** @type {boolean} */ is) => {
    question?.resolve(is);
    show({ question: null });
  };
  return html`<div>
    <div class="toasts" role="status" aria-live="polite">
      ${toasts.map((one) => html`<div key=${one.id} class=${`toast ${one.tone}`}>${one.message}</div>`)}
    </div>
    ${
      question &&
      html`<${Dialog} title=${question.title} onClose=${() => answer(false)} actions=${html`
      <button type="button" class="button" onClick=${() => answer(false)}>${t("Cancel")}</button>
      <button type="button" class=${`button ${question.danger ? "danger" : "primary"}`}
        onClick=${() => answer(true)}>${question.action}</button>`}><p>${question.text}</p><//>`
    }
  </div>`;
}

/**
 * A dialog over the page; Escape closes it, and the focus goes back to where it was.
 *
 * With `stays` only its buttons close it: its content is not shown again.
 *
 * @param {{ title: string, onClose: () => void, children?: ComponentChildren, actions?: ComponentChildren,
 *   wide?: boolean, stays?: boolean }} props
 */
export function Dialog({ title, onClose, children, actions, wide, stays }) {
  const place = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const isGone = useRef(false);
  useLayoutEffect(() => {
    const before = /** @type {HTMLElement | null} */ (document.activeElement);
    const dialog = place.current;
    if (!dialog) return undefined;
    dialog.showModal();
    return () => {
      isGone.current = true;
      dialog.close(); // while it is modal, nothing behind it can get the focus
      before?.focus?.();
    };
  }, []);
  const close = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!stays) onClose();
  };
  const press = (/** @type {MouseEvent} */ event) => {
    if (event.target === place.current && !stays) onClose();
  };
  const closed = () => void (isGone.current || place.current?.showModal()); // browsers close it at a second Escape
  return html`<dialog ref=${place} class=${wide ? "wide" : ""} aria-label=${title} onCancel=${close}
    onClose=${closed} onMouseDown=${press}>
    <div class="dialog"><h2>${title}</h2><div class="dialog-body">${children}</div>
      ${actions && html`<footer class="actions">${actions}</footer>`}</div>
  </dialog>`;
}
