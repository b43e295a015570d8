// Addresses: `#/PAGE/more/parts?name=value`.

import { useEffect, useState } from "preact/hooks";

/**
 * A page's name, what follows it in the address, and the query.
 *
 * @typedef {{ name: string, rest: string[], query: Record<string, string> }} Route
 */

/**
 * Return the page's name, what follows it, and the query, of the address that is shown.
 *
 * @returns {Route}
 */
export function readRoute(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").filter(Boolean).map(decode);
  return { name: name ?? "", rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * Return the address of a page.
 *
 * @param {string} name
 * @param {string[]} rest
 * @param {Record<string, string>} query
 */
export function hrefOf(name, rest = [], query = {}) {
  const text = new URLSearchParams(query).toString();
  return `#/${[name, ...rest].map(encodeURIComponent).join("/")}${text && `?${text}`}`;
}

/**
 * Go to a page.
 *
 * @param {string} name
 * @param {string[]} [rest]
 * @param {Record<string, string>} [query]
 */
export function go(name, rest, query) {
  location.hash = hrefOf(name, rest, query);
}

/**
 * Change the address of the page that is shown, without an entry in the browser's history.
 *
 * @param {string} name
 * @param {string[]} [rest]
 * @param {Record<string, string>} [query]
 */
export function replace(name, rest, query) {
  history.replaceState(null, "", hrefOf(name, rest, query));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** The route that is shown; the component is drawn again when it changes. */
export function useRoute() {
  const [route, set] = useState(readRoute());
  useEffect(() => {
    const change = () => set(readRoute());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return route;
}
