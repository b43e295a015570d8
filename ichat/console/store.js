// The gateway's state, as the event stream reports it; pages read it with `useStore`.

import { useEffect, useRef } from "preact/hooks";
import { ApiError, adminKey, api, setAdminKey, stream } from "./api.js";
import { NO_LANES, NO_RATES, withLanes } from "./pages/picture/lanes.js";
import { t } from "./texts.js";
import { useRedraw } from "./ui/hooks.js";

const FIRST_MS = 500;
const LONGEST_MS = 10_000;
const SILENT_MS = 45_000;
const HISTORY_S = 3600;
/** @type {any} */
const EMPTY_HISTORY = { sample_s: 5, columns: { at: [] }, models: {}, workers: {} };

/**
 * @typedef {Api.Seen<Api.WorkerSummary>} Worker
 * @typedef {Api.Seen<Api.EventState["models"][number]>} Model
 * @typedef {Api.Seen<Api.Machine>} Machine
 * @typedef {Api.EventState["aliases"][number]} Alias
 */

/**
 * @typedef {object} State
 * @property {"connecting" | "live" | "lost" | "denied"} connection
 * @property {ApiError | null} error why there is no stream
 * @property {number | null} lostAt when the stream's last event arrived, in milliseconds since 1970, while the
 *   connection is lost
 * @property {Api.Seen<Api.EventState["gateway"]> | null} gateway
 * @property {Api.ConfigState | null} config how the file of the configuration stands; null: not reported
 * @property {Worker[]} workers
 * @property {Model[]} models
 * @property {Machine[]} machines
 * @property {Alias[]} aliases
 * @property {Api.History} history the last hour, oldest sample first
 * @property {import("./pages/picture/lanes.js").Rates} lanes the rates of the last seconds, by lane
 * @property {string} usageStorage `ok`, or why usage cannot be kept
 * @property {number} begun counts the streams that have begun: answers from before the last stream may be old
 * @property {number} keysVersion counts changes of keys, so that a page that shows them asks again
 * @property {{ at: number, summary: string } | null} reloaded the last reload
 * @property {Api.RequestsInFlight | null} inFlight requests in flight, while a page shows them
 */

/** @type {State} */
let state = {
  connection: "connecting",
  error: null,
  lostAt: null,
  gateway: null,
  config: null,
  workers: [],
  models: [],
  machines: [],
  aliases: [],
  history: EMPTY_HISTORY,
  lanes: NO_RATES,
  usageStorage: "ok",
  begun: 0,
  keysVersion: 0,
  reloaded: null,
  inFlight: null,
};
/** @type {Set<() => void>} */
const listeners = new Set();
let wantsRequests = 0;
/** @type {AbortController | null} */
let current = null;
let heardAt = 0;

/** Return the state as it is now. */
export const getState = () => state;

/**
 * Change the state and draw the components that show it.
 *
 * @param {Partial<State>} change
 */
export function setState(change) {
  state = { ...state, ...change };
  for (const listener of listeners) listener();
}

/**
 * Return what `select` makes of the state; the component is drawn again when that changes.
 *
 * @template Part
 * @param {(all: State) => Part} select
 */
export function useStore(select) {
  const draw = useRedraw();
  const value = select(state);
  const latest = useRef({ select, value });
  latest.current = { select, value };
  useEffect(() => {
    const look = () => {
      if (latest.current.select(state) !== latest.current.value) draw();
    };
    listeners.add(look);
    look();
    return () => void listeners.delete(look);
  }, []);
  return value;
}

/** Have the stream report requests in flight while a component is shown. */
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

/**
 * Use another operator's key, or none, and connect again.
 *
 * @param {string} key
 */
export function login(key) {
  setAdminKey(key);
  reconnect();
}

/** End the stream, if there is any, and begin another. */
export function reconnect() {
  current?.abort();
  const control = new AbortController();
  current = control;
  follow(control.signal);
}

async function follow(/** @type {AbortSignal} */ signal) {
  let wait = FIRST_MS;
  while (!signal.aborted) {
    const began = Date.now();
    try {
      await connect(signal);
      if (!signal.aborted) lose(new ApiError(0, "ended", t("The gateway has ended.")));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        setState({ connection: "denied", error });
        return;
      }
      lose(error);
    }
    if (Date.now() - began > LONGEST_MS) wait = FIRST_MS; // a stream that ends at once is not requested ever faster
    await new Promise((resolve) => setTimeout(resolve, wait * (0.75 + Math.random() / 2)));
    wait = Math.min(LONGEST_MS, wait * 2);
  }
}

const lose = (/** @type {ApiError} */ error) => setState({ connection: "lost", error, lostAt: heardAt });

async function connect(/** @type {AbortSignal} */ signal) {
  const silence = new AbortController();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const watch = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  const heard = () => {
    heardAt = Date.now();
    watch();
  };
  const either = AbortSignal.any([signal, silence.signal]);
  watch();
  try {
    const options = { signal: either, onData: heard };
    await stream(`/v1/admin/events${wantsRequests ? "?requests=1" : ""}`, options, (event) => {
      take(event.name, JSON.parse(event.data));
    });
  } catch (error) {
    if (silence.signal.aborted && !signal.aborted) throw new ApiError(0, "silent", t("The gateway has gone silent."));
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Change the state as an event of the stream says.
 *
 * @param {string} name
 * @param {any} data
 */
export function take(name, data) {
  /** @type {Record<string, () => Partial<State>>} */
  const events = {
    state: () => ({
      connection: "live",
      error: null,
      lostAt: null,
      gateway: { ...data.gateway, seen_at: Date.now() },
      config: data.config ?? null,
      workers: merged(/** @type {Worker[]} */ ([]), data.workers, [], "worker_id"),
      models: merged(/** @type {Model[]} */ ([]), data.models, [], "id"),
      machines: data.machines,
      aliases: data.aliases ?? [],
      history: data.history ?? EMPTY_HISTORY,
      lanes: withLanes(state.lanes, NO_LANES, Date.now()),
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
    lanes: () => ({ lanes: withLanes(state.lanes, data, Date.now()) }),
    requests: () => ({ inFlight: data }),
    gateway: () => ({ gateway: { ...data, seen_at: Date.now() } }),
    config: () => ({ config: data }),
    reloaded: () => ({ reloaded: data }),
    keys: () => ({ keysVersion: state.keysVersion + 1 }),
  };
  if (Object.hasOwn(events, name)) setState(events[name]());
  if (name === "reloaded") reconnect(); // the names may be others now
}

/**
 * Return the state with these changes, each with the time of its arrival.
 *
 * @template {object} Thing
 * @param {Thing[]} known
 * @param {Thing[]} changed
 * @param {string[]} gone
 * @param {keyof Thing} key
 */
function merged(known, changed, gone, key) {
  /** @type {Map<unknown, Thing>} */
  const found = new Map(known.map((one) => [one[key], one]));
  const now = Date.now();
  for (const one of changed) found.set(one[key], { ...one, seen_at: now });
  for (const id of gone) found.delete(id);
  return [...found.values()];
}

/**
 * Add a worker's own history to the state: the stream leaves it out.
 *
 * @param {string} worker
 * @param {AbortSignal} signal
 */
export async function loadHistory(worker, signal) {
  const history = await api.get(`/v1/admin/history?worker=${encodeURIComponent(worker)}`, { signal });
  setState({ history });
}

/**
 * Return a history with another sample; samples older than an hour are left out.
 *
 * @param {any} history
 * @param {any} sample
 */
export function withSample(history, sample) {
  const length = Math.max(2, Math.round(HISTORY_S / history.sample_s));
  const count = history.columns.at.length;
  /**
   * @param {Record<string, (number | null)[]>} columns
   * @param {Record<string, number | null>} values
   */
  const grown = (columns, values) =>
    Object.fromEntries(
      Object.keys({ ...columns, ...values }).map((name) => {
        const known = columns[name] ?? Array(count).fill(null);
        return [name, [...known, values[name] ?? null].slice(-length)];
      }),
    );
  /** @param {Record<string, (number | null)[]>} columns */
  const isKnown = (columns = {}) => Object.values(columns).some((values) => values.some((value) => value !== null));
  /**
   * @param {Record<string, Record<string, (number | null)[]>>} known
   * @param {Record<string, Record<string, number | null>>} values
   */
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
