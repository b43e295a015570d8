// HTML in template literals.

import { h } from "preact";
import htm from "htm";

/** Return the nodes that a template describes: html`<p class="x">${text}</p>`. */
export const html = htm.bind(h);
