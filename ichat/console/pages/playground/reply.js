// A model's answer as it arrives: each event of the stream adds to it. Pure functions.

import { t } from "../../texts.js";

/**
 * @typedef {{ message: string, code?: string, status?: number }} ReplyError
 * @typedef {{ id: string, name: string, arguments: string }} Call
 */

/**
 * An answer; all times in milliseconds.
 *
 * @typedef {object} Reply
 * @property {"waiting" | "answering" | "done" | "stopped" | "failed"} state
 * @property {string} text
 * @property {string} thoughts
 * @property {Call[]} calls
 * @property {string | null} finish
 * @property {Record<string, any> | null} usage
 * @property {ReplyError | null} error
 * @property {Record<string, string>} told what the response's headers tell
 * @property {number} pieces
 * @property {boolean} isWhole
 * @property {string} note
 * @property {number} beganAt
 * @property {number | null} firstAt
 * @property {number | null} lastAt
 * @property {number | null} endedAt
 */

/**
 * Return an answer that was asked for at `now`.
 *
 * @param {number} now
 * @returns {Reply}
 */
export const newReply = (now) => ({
  state: "waiting",
  text: "",
  thoughts: "",
  calls: [],
  finish: null,
  usage: null,
  error: null,
  told: {},
  pieces: 0,
  isWhole: false,
  note: "",
  beganAt: now,
  firstAt: null,
  lastAt: null,
  endedAt: null,
});

/** Calls with a higher index are not shown: no model makes that many. */
const CALLS_MAX = 128;
/** Fewer tokens, or a shorter time, show no rate: a few tokens arrive together. */
const RATE_TOKENS_MIN = 20;
const RATE_S_MIN = 0.1;
const TOLD = {
  worker: "x-ichat-worker",
  model: "x-ichat-model",
  attempts: "x-ichat-attempts",
  prefix: "x-ichat-prefix",
  overhead_ms: "x-ichat-overhead-ms",
  dropped: "x-ichat-dropped",
  request: "x-request-id",
};

/**
 * Return the gateway's report in a response's headers: {worker, model, attempts, prefix, …}.
 *
 * @param {Headers} headers
 */
export function toldBy(headers) {
  const found = Object.entries(TOLD).map(([name, header]) => [name, headers.get(header)]);
  return Object.fromEntries(found.filter(([, value]) => value !== null));
}

/**
 * Return the answer with the report in the response's headers.
 *
 * @param {Reply} reply
 * @param {Headers} headers
 * @returns {Reply}
 */
export const withHead = (reply, headers) => ({ ...reply, state: "answering", told: toldBy(headers) });

/**
 * Return the answer with a comment of the stream: the gateway's report during a load of the model.
 *
 * @param {Reply} reply
 * @param {string} text
 */
export const withComment = (reply, text) => (text.startsWith("loading ") ? { ...reply, note: text } : reply);

/**
 * Return the answer with the data of the next event of the stream, or of a plain response.
 *
 * @param {Reply} reply
 * @param {string} data
 * @param {number} now
 * @returns {Reply}
 */
export function withEvent(reply, data, now) {
  if (data.trim() === "[DONE]") return { ...reply, isWhole: true };
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    return {
      ...reply,
      error: { message: t("The stream had an event that is no JSON: {data}", { data: data.slice(0, 200) }) },
    };
  }
  if (chunk?.error || chunk?.object === "error") return { ...reply, error: errorIn(chunk.error ?? chunk) };
  const next = { ...reply, usage: chunk?.usage ?? reply.usage };
  const choice = chunk?.choices?.find?.((/** @type {{ index?: number } | null} */ one) => one && !one.index);
  if (!choice) return next;
  if (choice.finish_reason) Object.assign(next, { finish: choice.finish_reason, isWhole: true });
  const delta = choice.delta ?? choice.message ?? {};
  const text = textOf(delta.content ?? choice.text) + textOf(delta.refusal);
  const thoughts = textOf(delta.reasoning_content ?? delta.reasoning);
  const calls = Array.isArray(delta.tool_calls) ? delta.tool_calls : [];
  if (!text && !thoughts && !calls.length) return next;
  next.text += text;
  next.thoughts += thoughts;
  next.calls = calls.reduce(withCall, reply.calls);
  next.pieces += 1;
  next.firstAt ??= now;
  next.lastAt = now;
  return next;
}

/**
 * @param {string | { message?: unknown, code?: string, type?: string }} error
 * @returns {ReplyError}
 */
function errorIn(error) {
  if (typeof error === "string") return { message: error };
  return { message: String(error.message ?? t("The engine failed.")), code: error.code ?? error.type ?? "" };
}

/**
 * @param {unknown} content
 * @returns {string}
 */
function textOf(content) {
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => textOf(part?.text)).join("") : "";
}

/**
 * @param {Call[]} calls
 * @param {{ index?: number, id?: string, function?: { name?: string, arguments?: unknown } } | null} part
 * @param {number} position
 */
function withCall(calls, part, position) {
  const at = part?.index ?? position;
  if (typeof part !== "object" || !part || !Number.isInteger(at) || at < 0 || at >= CALLS_MAX) return calls;
  const before = calls[at] ?? { id: "", name: "", arguments: "" };
  const given = part.function?.arguments;
  const after = {
    id: part.id || before.id,
    name: before.name || part.function?.name || "",
    arguments: before.arguments + (typeof given === "string" ? given : given ? JSON.stringify(given) : ""),
  };
  const next = [...calls];
  next[at] = after;
  return next;
}

/**
 * Return the answer at its end: by itself, by the user (`isStopped`), or by an error.
 *
 * @param {Reply} reply
 * @param {number} now
 * @param {{ error?: ReplyError | null, isStopped?: boolean }} how
 * @returns {Reply}
 */
export function ended(reply, now, { error = null, isStopped = false } = {}) {
  const calls = reply.calls.filter(Boolean).map((call, at) => ({ ...call, id: call.id || `call_${at}` }));
  const found = error ?? reply.error;
  const cut = { message: t("The stream ended before the answer was whole.") };
  const why = isStopped ? null : (found ?? (reply.isWhole ? null : cut));
  return { ...reply, calls, error: why, state: isStopped ? "stopped" : why ? "failed" : "done", endedAt: now };
}

/**
 * Return whether an answer has not arrived as a whole yet.
 *
 * @param {Reply} reply
 */
export const isOpen = (reply) => reply.state === "waiting" || reply.state === "answering";

/**
 * Return [thoughts, text] of an answer.
 *
 * Without a reasoning parser, the engine's model writes its thoughts into the text, before `</think>`.
 *
 * @param {Pick<Reply, "text" | "thoughts">} reply
 */
export function partsOf({ text, thoughts }) {
  const begin = text.match(/^\s*<think>/);
  if (thoughts || !begin) return [thoughts, text];
  const end = text.indexOf("</think>");
  if (end < 0) return [text.slice(begin[0].length).trimStart(), ""];
  return [text.slice(begin[0].length, end).trim(), text.slice(end + "</think>".length).trimStart()];
}

/**
 * Return the figures: {first_s, tokens_s, total_s, in, out, cached, isEstimate}; null: not known.
 *
 * @param {Reply} reply
 * @param {number} now
 */
export function figuresOf(reply, now) {
  const end = reply.endedAt ?? now;
  const told = reply.usage?.completion_tokens;
  const out = told ?? (reply.pieces || null);
  const took = reply.firstAt === null ? 0 : ((reply.lastAt ?? reply.firstAt) - reply.firstAt) / 1000;
  return {
    first_s: reply.firstAt === null ? null : (reply.firstAt - reply.beganAt) / 1000,
    tokens_s: out >= RATE_TOKENS_MIN && took >= RATE_S_MIN ? (out - 1) / took : null,
    total_s: (end - reply.beganAt) / 1000,
    in: reply.usage?.prompt_tokens ?? null,
    out,
    cached: reply.usage?.prompt_tokens_details?.cached_tokens ?? null,
    isEstimate: told === undefined,
  };
}

/**
 * Return a sentence on why an answer ended that a reader may wonder about, or "".
 *
 * @param {Pick<Reply, "finish" | "state">} reply
 */
export function endOf({ finish, state }) {
  if (state === "stopped") return t("You have stopped it.");
  if (finish === "length") return t("It was cut off: max_tokens is reached, or the model's context is full.");
  if (finish === "content_filter") return t("A filter has cut it off.");
  return "";
}
