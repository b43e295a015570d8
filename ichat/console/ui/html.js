// HTML in template literals.

import htm from "htm";
import { h } from "preact";

/**
 * An event of a form's control.
 *
 * @typedef {Event & { target: HTMLInputElement }} FieldEvent
 */

/**
 * A part of a template; a function without a type of its own gets the events of a form's control.
 *
 * @typedef {{} | null | undefined | ((event: FieldEvent) => unknown)} Value
 */

/**
 * Return the nodes that a template describes: html`<p class="x">${text}</p>`.
 *
 * @type {(strings: TemplateStringsArray, ...values: Value[]) => ReturnType<typeof h> | ReturnType<typeof h>[]}
 */
export const html = htm.bind(h);
