// HTML in template literals.

import htm from "htm";
import { h } from "preact";

/** Return the nodes that a template describes: html`<p class="x">${text}</p>`. */
export const html = htm.bind(h);
