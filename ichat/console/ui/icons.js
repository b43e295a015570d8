// Icons: strokes on a grid of 24.

import { html } from "./html.js";

/** @type {Record<string, string>} */
const PATHS = {
  overview: "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-3H4zM14 7h6V4h-6z",
  workers: "M4 5h16v5H4zM4 14h16v5H4zM8 7.5h.01M8 16.5h.01",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM12 12l8-4.5M12 12v9M12 12L4 7.5",
  machines: "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
  requests: "M4 7h12M12 3l4 4-4 4M20 17H8M12 13l-4 4 4 4",
  log: "M5 4h14v16H5zM8 8h8M8 12h8M8 16h5",
  playground: "M4 5h16v11H10l-4 4v-4H4z",
  launch: "M12 4v16M4 12h16",
  orders: "M4 6h16v12H4zM4 7l8 6 8-6",
  config: "M4 7h10M18 7h2M14 5v4M4 17h2M10 17h10M6 15v4",
  keys: "M14 10a4 4 0 1 0-3.5 4L13 16.5h2.5V19H18v2h3v-3l-6.6-6.6z",
  usage: "M4 20V10M10 20V4M16 20v-7M22 20H2",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  theme: "M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9z",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l4 4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12l5 5 9-10",
  pause: "M9 5v14M15 5v14",
  play: "M7 5l12 7-12 7z",
  lock: "M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 7 0v3",
  info: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 11v5M12 8h.01",
  alert: "M12 4l9 16H3zM12 10v4M12 17h.01",
};

/**
 * An icon by its name; it says nothing to screen readers, what stands beside it does.
 *
 * @param {{ name: string, size?: number }} props
 */
export function Icon({ name, size = 18 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 24 24" fill="none" stroke="currentColor"
    stroke-width="1.75" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
    <path d=${PATHS[name] ?? ""} /></svg>`;
}
