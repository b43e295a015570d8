// The chat: a conversation for each side, and the requests under way. All of it is in this tab alone.

import { send, stream } from "../../api.js";
import { useEffect, useRedraw } from "../../ui.js";
import { clientKey } from "./access.js";
import { lastIdIn, packed, unpacked } from "./kept_chat.js";
import { ended, isOpen, newReply, withComment, withEvent, withHead } from "./reply.js";
import { chatBody, NO_SETTINGS } from "./request.js";

/** @import { StreamEvent, StreamOptions } from "../../api.js" */
/** @import { Reply } from "./reply.js" */
/** @import { Body, ResultsTurn, Settings, UserTurn } from "./request.js" */

const PATH = "/v1/chat/completions";
const KEPT = "ichat.chat";
const GATHER_MS = 40;
export const SIDES_MAX = 2;
let serial = 0;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer;
/** @type {Set<() => void>} */
const listeners = new Set();

/**
 * An entry of a conversation; see `messagesOf`.
 *
 * @typedef {{ id: number } & Required<UserTurn>} UserEntry
 * @typedef {{ id: number, kind: "reply", reply: Reply, model: string, body: Body }} ReplyEntry
 * @typedef {{ id: number } & ResultsTurn} ResultsEntry
 * @typedef {UserEntry | ReplyEntry | ResultsEntry} Entry
 * @typedef {{ id: number, model: string, entries: Entry[], control: AbortController | null }} Side
 * @typedef {{ sides: Side[], settings: Settings, draft: { text: string, pictures: string[] } }} Chat
 */

/**
 * How an answer is shown: at once, or together with the events that follow shortly.
 *
 * @typedef {(change: Partial<Chat>) => void} Apply
 * @typedef {(next: Reply, apply: Apply) => void} Show
 */

/** @type {Chat} */
let state = unpacked(sessionStorage.getItem(KEPT)) ?? {
  sides: [newSide("")],
  settings: NO_SETTINGS,
  draft: { text: "", pictures: [] },
};
serial = lastIdIn(state);
let isKept = true;
globalThis.addEventListener?.("pagehide", () => isKept && keep());

/** Keep the chat for the page that is loaded next in this tab. */
function keep() {
  try {
    sessionStorage.setItem(KEPT, packed(state));
  } catch {
    sessionStorage.removeItem(KEPT); // there is no room
  }
}

/** Have this page's end keep nothing of the chat. */
export function forgetChat() {
  isKept = false;
}

function nextId() {
  serial += 1;
  return serial;
}

/** @returns {Side} */
function newSide(/** @type {string} */ model) {
  return { id: nextId(), model, entries: [], control: null };
}

function set(/** @type {Partial<Chat>} */ change) {
  state = { ...state, ...change };
  timer ||= setTimeout(() => {
    timer = undefined;
    for (const listener of listeners) listener();
  }, GATHER_MS);
}

function setNow(/** @type {Partial<Chat>} */ change) {
  set(change);
  clearTimeout(timer);
  timer = undefined;
  for (const listener of listeners) listener();
}

/** Return the chat; the component is drawn again when it changes. */
export function useChat() {
  const redraw = useRedraw();
  useEffect(() => {
    listeners.add(redraw);
    redraw();
    return () => void listeners.delete(redraw);
  }, []);
  return state;
}

/** Change what will be sent: a part of {settings, draft}. */
export const change = (/** @type {Partial<Chat>} */ part) => setNow(part);

const sideOf = (/** @type {number} */ id) => state.sides.find((one) => one.id === id);

function setSide(/** @type {number} */ id, /** @type {Partial<Side>} */ part, apply = setNow) {
  apply({ sides: state.sides.map((one) => (one.id === id ? { ...one, ...part } : one)) });
}

/**
 * Have a side ask another model from now on.
 *
 * @param {number} id
 * @param {string} model
 */
export const chooseModel = (id, model) => setSide(id, { model });

/**
 * Put a second model beside the first, with a conversation of its own: later messages go to both.
 *
 * @param {string} model
 */
export function addSide(model) {
  if (state.sides.length >= SIDES_MAX) return;
  setNow({ sides: [...state.sides, newSide(model)] });
}

/**
 * Remove a side.
 *
 * @param {number} id
 */
export function removeSide(id) {
  sideOf(id)?.control?.abort();
  setNow({ sides: state.sides.filter((one) => one.id !== id) });
}

/**
 * Return whether an answer is under way.
 *
 * @param {Chat} chat
 */
export const isAnswering = (chat) => chat.sides.some((one) => one.control !== null);

/** End the answers that are under way; the received text stays. */
export function stop() {
  for (const side of state.sides) side.control?.abort();
}

/** Begin anew with the same models and parameters. */
export function clear() {
  stop();
  setNow({ sides: state.sides.map((one) => ({ ...one, entries: [] })) });
}

/** Send the written text to each side. Throws an Error if a parameter is wrong. */
export function sendDraft() {
  const { text, pictures } = state.draft;
  /** @type {Entry} */
  const entry = { id: nextId(), kind: "user", text, pictures };
  check([entry]);
  const sides = state.sides.map((one) => ({ ...one, entries: [...one.entries, entry] }));
  setNow({ draft: { text: "", pictures: [] }, sides });
  for (const side of state.sides) ask(side.id);
}

/**
 * Ask anew with another text in place of an earlier text; the later messages are removed.
 *
 * @param {number} entryId
 * @param {string} text
 */
export function edit(entryId, text) {
  check([]);
  stop();
  const has = (/** @type {Side} */ side) => side.entries.some((one) => one.id === entryId);
  const touched = state.sides.filter(has).map((side) => side.id);
  setNow({
    sides: state.sides.map((side) => {
      const at = side.entries.findIndex((one) => one.id === entryId);
      return at < 0 ? side : { ...side, entries: [...side.entries.slice(0, at), { ...side.entries[at], text }] };
    }),
  });
  for (const id of touched) ask(id);
}

/**
 * Have a side answer again.
 *
 * @param {number} sideId
 * @param {number} entryId
 */
export function regenerate(sideId, entryId) {
  check([]);
  const side = sideOf(sideId);
  if (!side) return;
  side.control?.abort();
  const at = side.entries.findIndex((one) => one.id === entryId);
  setSide(sideId, { entries: side.entries.slice(0, at) });
  ask(sideId);
}

/**
 * Give a side the results of its tools, [{id, content}], and have it go on.
 *
 * @param {number} sideId
 * @param {ResultsTurn["results"]} results
 */
export function sendResults(sideId, results) {
  check([]);
  setSide(sideId, { entries: [...(sideOf(sideId)?.entries ?? []), { id: nextId(), kind: "results", results }] });
  ask(sideId);
}

/**
 * Return the request that a side has sent for an answer, or would send now.
 *
 * @param {Side} side
 * @param {number} entryId
 */
export function bodyFor(side, entryId) {
  const at = side.entries.findIndex((one) => one.id === entryId);
  return chatBody(side.model, state.settings, at < 0 ? side.entries : side.entries.slice(0, at));
}

/** @param {Entry[]} entries */
function check(entries) {
  chatBody("", state.settings, entries);
}

/** Ask a side's model for the next answer, and show it as it arrives. */
async function ask(/** @type {number} */ sideId) {
  const side = sideOf(sideId);
  if (!side) return;
  const body = chatBody(side.model, state.settings, side.entries);
  const control = new AbortController();
  const id = nextId();
  let reply = newReply(performance.now());
  const show = (/** @type {Reply} */ next, /** @type {Apply} */ apply) => {
    reply = next;
    const now = sideOf(sideId);
    if (!now?.entries.some((one) => one.id === id)) return; // it was removed meanwhile
    const entries = now.entries.map((one) => (one.id === id ? { ...one, reply } : one));
    setSide(sideId, { entries, ...(!isOpen(reply) && now.control === control && { control: null }) }, apply);
  };
  setSide(sideId, { control, entries: [...side.entries, { id, kind: "reply", reply, model: side.model, body }] });
  try {
    await take(body, control.signal, () => reply, show);
    show(ended(reply, performance.now()), setNow);
  } catch (error) {
    show(ended(reply, performance.now(), { error, isStopped: error.name === "AbortError" }), setNow);
  }
  if (sideOf(sideId)?.control === control) setSide(sideId, { control: null });
}

/**
 * @param {Body} body
 * @param {AbortSignal} signal
 * @param {() => Reply} now
 * @param {Show} show
 */
function take(body, signal, now, show) {
  return streamed(PATH, body, signal, {
    onOpen: (response) => show(withHead(now(), response.headers), set),
    onComment: (text) => show(withComment(now(), text), set),
    onEvent: (event) => show(withEvent(now(), event.data, performance.now()), set),
  });
}

/**
 * Send a request and give the events and comments of its stream on; a plain answer is a single event.
 *
 * @param {string} path
 * @param {Body} body
 * @param {AbortSignal} signal
 * @param {Required<Pick<StreamOptions, "onOpen" | "onComment">>
 *   & { onEvent: (event: Pick<StreamEvent, "data">) => void }} on
 */
export async function streamed(path, body, signal, { onOpen, onEvent, onComment }) {
  const options = { method: "POST", body, key: clientKey(), signal };
  if (body.stream) {
    await stream(path, { ...options, onOpen, onComment }, onEvent);
    return;
  }
  const response = await send(path, options);
  onOpen(response);
  onEvent({ data: await response.text() });
}
