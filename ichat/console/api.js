// The gateway's API: requests, streams of events, and the operator's key, which stays in this tab.

import { t } from "./texts.js";

/** The address of the gateway, which may be below a proxy's path. */
export const BASE = new URL("..", document.baseURI).href.replace(/\/$/, "");
const KEY = "ichat.admin_key";

/** A request that the gateway has refused, or that has not reached it (status 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** Return the operator's key that was given in this tab, or "". */
export const adminKey = () => sessionStorage.getItem(KEY) ?? "";

/** Return a text without characters that no header can hold: a key copied from a document has blanks, quotes, marks. */
export const asKey = (/** @type {string} */ text) => text.replace(/[^\x21-\x7e]/g, "");

/**
 * Keep the operator's key for this tab; "" forgets it.
 *
 * @param {string} key
 */
export function setAdminKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * @typedef {object} Options
 * @property {string} [method]
 * @property {unknown} [body] anything that JSON can hold
 * @property {string} [key] in place of the operator's
 * @property {Record<string, string>} [headers]
 * @property {AbortSignal} [signal]
 */

/**
 * Send a request and return its Response. Throws ApiError unless it went well.
 *
 * @param {string} path
 * @param {Options} options
 */
export async function send(path, { method = "GET", body, key = adminKey(), headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(BASE + path, {
      method,
      headers: sent,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", t("The gateway cannot be reached."));
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

async function errorOf(/** @type {Response} */ response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code ?? "", error.message);
  } catch {
    return new ApiError(
      response.status,
      "",
      t("The gateway answered with {status} {statusText}.", {
        status: response.status,
        statusText: response.statusText,
      }),
    );
  }
}

const asked =
  (/** @type {string} */ method) =>
  async (/** @type {string} */ path, /** @type {unknown} */ body = undefined, /** @type {Options} */ options = {}) => {
    const response = await send(path, { ...options, method, body });
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  };

/**
 * `api.get(path)`, `api.post(path, body)`, …: return the parsed JSON of the answer; throw ApiError.
 *
 * The gateway's OpenAPI document has the type of each path's answer.
 *
 * @type {{
 *   get: <Path extends string>(path: Path, options?: Options) => Promise<Api.Get<Api.Plain<Path>>>,
 *   post: <Path extends string>(path: Path, body?: unknown, options?: Options) => Promise<Api.Post<Api.Plain<Path>>>,
 *   patch: <Path extends string>(path: Path, body?: unknown, options?: Options) => Promise<Api.Patch<Api.Plain<Path>>>,
 *   del: <Path extends string>(path: Path, body?: unknown, options?: Options) => Promise<Api.Delete<Api.Plain<Path>>>,
 * }}
 */
export const api = {
  get: (path, options) => asked("GET")(path, undefined, options),
  post: asked("POST"),
  patch: asked("PATCH"),
  del: asked("DELETE"),
};

/** @typedef {{ name: string, data: string, id: string | null }} StreamEvent */

/**
 * @typedef {object} StreamOptions
 * @property {(response: Response) => void} [onOpen]
 * @property {() => void} [onData] called whenever data arrive
 * @property {(text: string) => void} [onComment]
 */

/**
 * Read a stream of server-sent events to its end. Throws ApiError; an AbortError once `signal` is aborted.
 *
 * @param {string} path
 * @param {Options & StreamOptions} options
 * @param {(event: StreamEvent) => void} onEvent
 */
export async function stream(path, options, onEvent) {
  const response = await send(path, options);
  options.onOpen?.(response);
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const feed = decoder(onEvent, options.onComment);
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      options.onData?.();
      feed(value);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    if (error instanceof TypeError) throw new ApiError(0, "broken_off", t("The stream from the gateway broke off."));
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Return a function that reads a stream's text, however it is cut, and passes its events and comments on.
 *
 * @param {(event: StreamEvent) => void} onEvent
 * @param {(text: string) => void} [onComment]
 */
export function decoder(onEvent, onComment) {
  let rest = "";
  /** @returns {{ name: string, data: string[], id: string | null }} */
  const fresh = () => ({ name: "message", data: [], id: null });
  let event = fresh();
  return (/** @type {string} */ text) => {
    const lines = (rest + text).split("\n");
    rest = lines.pop() ?? "";
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (!line) {
        if (event.data.length) onEvent({ ...event, data: event.data.join("\n") });
        event = fresh();
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (colon === 0) onComment?.(value);
      else if (field === "data") event.data.push(value);
      else if (field === "event") event.name = value || "message";
      else if (field === "id") event.id = value;
    }
  };
}
