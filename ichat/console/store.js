// What the gateway says of itself, as the event stream tells it; pages read it with `useStore`.

import { useEffect, useReducer, useRef } from "preact/hooks";
import { ApiError, adminKey, api, setAdminKey, stream } from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = 10_000;
const SILENT_MS = 45_000;
const HISTORY_S = 3600;
const EMPTY_HISTORY = { sample_s: 5, columns: { at: [] }, models: {}, workers: {} };

let state = {
  /** connecting | live | lost | denied */
  connection: "connecting",
  /** Why there is no stream: an ApiError. */
  error: null,
  gateway: null,
  workers: [],
  models: [],
  machines: [],
  aliases: [],
  /** The last hour, oldest sample first: {sample_s, columns, models: {name: columns}, workers: {id: columns}}. */
  history: EMPTY_HISTORY,
  usageStorage: "ok",
  /** Counts the streams that have begun: what was asked for before the last one may be old. */
  begun: 0,
  /** Counts changes of keys, so that who shows them asks again. */
  keysVersion: 0,
  /** {at, summary} of the last reload. */
  reloaded: null,
  /** Requests in flight, while a page shows them: {requests, total}. */
  inFlight: null,
};
const listeners = new Set();
let wantsRequests = 0;
let current = null;

/** Return the state as it is now. */
export const getState = () => state;

/** Change the state and tell those who show it. */
export function setState(change) {
  state = { ...state, ...change };
  for (const listener of listeners) listener();
}

/** Return what `select` makes of the state; the component is drawn again when that changes. */
export function useStore(select = (all) => all) {
  const [, draw] = useReducer((value) => value + 1, 0);
  const value = select(state);
  const latest = useRef();
  latest.current = { select, value };
  useEffect(() => {
    const look = () => {
      if (latest.current.select(state) !== latest.current.value) draw();
    };
    listeners.add(look);
    look();
    return () => listeners.delete(look);
  }, []);
  return value;
}

/** Have the stream tell of requests in flight while a component is shown. */
export function useRequests() {
  useEffect(() => {
    wantsRequests += 1;
    if (wantsRequests === 1) reconnect();
    return () => {
      wantsRequests -= 1;
      if (wantsRequests === 0) {
        setState({ inFlight: null });
        reconnect();
      }
    };
  }, []);
  return useStore((all) => all.inFlight);
}

/** Take another operator's key, or none, and connect anew. */
export function login(key) {
  setAdminKey(key);
  reconnect();
}

/** End the stream, if there is one, and begin another one. */
export function reconnect() {
  current?.abort();
  const control = new AbortController();
  current = control;
  follow(control.signal);
}

async function follow(signal) {
  let wait = FIRST_MS;
  while (!signal.aborted) {
    const began = Date.now();
    try {
      await connect(signal);
      if (!signal.aborted) setState({ connection: "lost", error: new ApiError(0, "ended", "The gateway has ended.") });
    } catch (error) {
      if (signal.aborted) return;
      const isDenied = error.status === 401 || error.status === 403;
      setState({ connection: isDenied ? "denied" : "lost", error });
      if (isDenied) return;
    }
    if (Date.now() - began > LONGEST_MS) wait = FIRST_MS; // one that breaks off at once is not asked for ever faster
    await new Promise((resolve) => setTimeout(resolve, wait * (0.75 + Math.random() / 2)));
    wait = Math.min(LONGEST_MS, wait * 2);
  }
}

async function connect(signal) {
  const silence = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  const either = AbortSignal.any([signal, silence.signal]);
  heard();
  try {
    const options = { signal: either, onData: heard };
    await stream(`/v1/admin/events${wantsRequests ? "?requests=1" : ""}`, options, (event) => {
      take(event.name, JSON.parse(event.data));
    });
  } catch (error) {
    if (silence.signal.aborted && !signal.aborted) throw new ApiError(0, "silent", "The gateway has gone silent.");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Change the state as an event of the stream says. */
export function take(name, data) {
  const merge = {
    state: () => ({
      connection: "live",
      error: null,
      gateway: { ...data.gateway, seen_at: Date.now() },
      workers: merged([], data.workers, [], "worker_id"),
      models: merged([], data.models, [], "id"),
      machines: data.machines,
      aliases: data.aliases ?? [],
      history: data.history ?? EMPTY_HISTORY,
      usageStorage: data.usage_storage ?? "ok",
      begun: state.begun + 1,
    }),
    workers: () => ({ workers: merged(state.workers, data.changed, data.gone, "worker_id") }),
    models: () => ({ models: merged(state.models, data.models, data.gone, "id") }),
    machines: () => ({ machines: merged(state.machines, data.machines, data.gone, "id") }),
    sample: () => ({
      history: withSample(state.history, data),
      usageStorage: data.usage_storage ?? state.usageStorage,
    }),
    requests: () => ({ inFlight: data }),
    reloaded: () => ({ reloaded: data }),
    keys: () => ({ keysVersion: state.keysVersion + 1 }),
  }[name];
  if (merge) setState(merge());
  if (name === "reloaded") reconnect(); // the names may be others now
}

/** Return what is known with these changes, each with the time at which it came. */
function merged(known, changed = [], gone = [], key) {
  const found = new Map(known.map((one) => [one[key], one]));
  const now = Date.now();
  for (const one of changed) found.set(one[key], { ...one, seen_at: now });
  for (const id of gone) found.delete(id);
  return [...found.values()];
}

/** Take a worker's own history, which the stream leaves out, into the state. */
export async function loadHistory(worker, signal) {
  const history = await api.get(`/v1/admin/history?worker=${encodeURIComponent(worker)}`, { signal });
  setState({ history });
}

/** Return a history with one more sample; it stays as long as `seconds`. */
export function withSample(history, sample) {
  const length = Math.max(2, Math.round(HISTORY_S / history.sample_s));
  const count = history.columns.at.length;
  const grown = (columns, values) =>
    Object.fromEntries(
      Object.keys({ ...columns, ...values }).map((name) => {
        const known = columns[name] ?? Array(count).fill(null);
        return [name, [...known, values[name] ?? null].slice(-length)];
      }),
    );
  const isKnown = (columns = {}) => Object.values(columns).some((values) => values.some((value) => value !== null));
  const each = (known, values = {}) =>
    Object.fromEntries(
      Object.keys({ ...known, ...values })
        .filter((name) => name in values || isKnown(known[name])) // of those that are gone, the last hour stays
        .map((name) => [name, grown(known[name] ?? {}, values[name] ?? {})]),
    );
  const { models, workers, usage_storage: _, ...total } = sample;
  return {
    ...history,
    columns: grown(history.columns, total),
    models: each(history.models, models),
    workers: each(history.workers, workers),
  };
}

/** Whether an operator's key was given in this tab. */
export const hasKey = () => Boolean(adminKey());
