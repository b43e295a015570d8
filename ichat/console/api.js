// The gateway's API: requests, streams of events, and the operator's key, which stays in this tab.

/** The address of the gateway, which may be below a proxy's path. */
export const BASE = new URL("..", document.baseURI).href.replace(/\/$/, "");
const KEY = "ichat.admin_key";

/** What the gateway has refused, or what has kept a request from it (status 0). */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** Return the operator's key that was given in this tab, or "". */
export const adminKey = () => sessionStorage.getItem(KEY) ?? "";

/** Return a text without what no header can hold, as comes with a key from a document: blanks, quotes, marks. */
export const asKey = (text) => text.replace(/[^\x21-\x7e]/g, "");

/** Keep the operator's key for this tab; "" forgets it. */
export function setAdminKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * Send a request and return its Response. Throws ApiError unless it went well.
 *
 * `options`: method, body (anything JSON can hold), key (in place of the operator's), headers, signal.
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
    throw new ApiError(0, "unreachable", "The gateway cannot be reached.");
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code ?? "", error.message);
  } catch {
    return new ApiError(response.status, "", `The gateway answered with ${response.status} ${response.statusText}.`);
  }
}

const asked =
  (method) =>
  async (path, body, options = {}) => {
    const response = await send(path, { ...options, method, body });
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  };

/** `api.get(path)`, `api.post(path, body)`, …: return the parsed JSON of the answer; throw ApiError. */
export const api = {
  get: (path, options) => asked("GET")(path, undefined, options),
  post: asked("POST"),
  patch: asked("PATCH"),
  del: asked("DELETE"),
};

/**
 * Read a stream of server-sent events to its end: `onEvent({name, data, id})`, `data` as text.
 *
 * `options` are those of `send`, `onOpen(response)`, and `onData()` for whatever comes. Throws
 * ApiError; an AbortError once `signal` is aborted.
 */
export async function stream(path, options, onEvent) {
  const response = await send(path, options);
  options.onOpen?.(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const feed = decoder(onEvent);
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      options.onData?.();
      feed(value);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    if (error instanceof TypeError) throw new ApiError(0, "broken_off", "The stream from the gateway broke off.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return a function that takes a stream's text, however it is cut, and gives its events to `onEvent`. */
export function decoder(onEvent) {
  let rest = "";
  let event = { name: "message", data: [], id: null };
  return (text) => {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (!line) {
        if (event.data.length) onEvent({ ...event, data: event.data.join("\n") });
        event = { name: "message", data: [], id: null };
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") event.data.push(value);
      else if (field === "event") event.name = value || "message";
      else if (field === "id") event.id = value;
    }
  };
}
