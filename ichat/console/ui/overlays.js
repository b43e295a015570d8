// What lies over the page: dialogs, questions and short messages.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";

const TOAST_MS = 6000;
const listeners = new Set();
let shown = { toasts: [], question: null };
let serial = 0;

function show(change) {
  shown = { ...shown, ...change };
  for (const listener of listeners) listener(shown);
}

/** Show a message for some seconds. tone: "ok" | "bad". */
export function toast(message, tone = "ok") {
  serial += 1;
  const one = { id: serial, message, tone };
  show({ toasts: [...shown.toasts.slice(-3), one] });
  setTimeout(() => show({ toasts: shown.toasts.filter((other) => other.id !== one.id) }), TOAST_MS);
}

/** Ask a question and return (in a promise) whether the answer was `action`. */
export function confirm({ title, text, action = "OK", danger = false }) {
  return new Promise((resolve) => {
    show({ question: { title, text, action, danger, resolve } });
  });
}

/** Where dialogs and messages appear; the shell has it once. */
export function Overlays() {
  const [{ toasts, question }, set] = useState(shown);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  const answer = (is) => {
    question.resolve(is);
    show({ question: null });
  };
  return html`<div>
    <div class="toasts" role="status" aria-live="polite">
      ${toasts.map((one) => html`<div key=${one.id} class=${`toast ${one.tone}`}>${one.message}</div>`)}
    </div>
    ${
      question &&
      html`<${Dialog} title=${question.title} onClose=${() => answer(false)} actions=${html`
      <button type="button" class="button" onClick=${() => answer(false)}>Cancel</button>
      <button type="button" class=${`button ${question.danger ? "danger" : "primary"}`}
        onClick=${() => answer(true)}>${question.action}</button>`}><p>${question.text}</p><//>`
    }
  </div>`;
}

/**
 * A dialog over the page; Escape closes it, and the focus goes back to where it was.
 *
 * With `stays` only its buttons close it: what it shows is not shown again.
 */
export function Dialog({ title, onClose, children, actions, wide, stays }) {
  const place = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement;
    place.current.showModal();
    return () => before?.focus?.();
  }, []);
  const close = (event) => {
    event.preventDefault();
    if (!stays) onClose();
  };
  const press = (event) => {
    if (event.target === place.current && !stays) onClose();
  };
  const closed = () => place.current?.showModal(); // browsers close it at a second Escape
  return html`<dialog ref=${place} class=${wide ? "wide" : ""} aria-label=${title} onCancel=${close}
    onClose=${closed} onMouseDown=${press}>
    <div class="dialog"><h2>${title}</h2><div class="dialog-body">${children}</div>
      ${actions && html`<footer class="actions">${actions}</footer>`}</div>
  </dialog>`;
}
