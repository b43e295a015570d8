// HTML in template literals.

import htm from "htm";
import { h } from "preact";

/**
 * An event of a form's control.
 *
 * @typedef {Event & { target: HTMLInputElement }} FieldEvent
 */

/**
 * Return the nodes that a template describes: html`<p class="x">${text}</p>`.
 */
export const html = htm.bind(h);
