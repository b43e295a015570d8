// The requests that the playground sends, and the same as a program has them. Pure functions.

import { t } from "../../texts.js";
import { partsOf } from "./reply.js";

/** @import { Reply } from "./reply.js" */

/**
 * A message of a conversation: of the user, the model, or the tools that it has called.
 *
 * @typedef {{ kind: "user", text: string, pictures?: string[] }} UserTurn
 * @typedef {{ kind: "reply", reply: Pick<Reply, "text" | "thoughts" | "calls"> }} ReplyTurn
 * @typedef {{ kind: "results", results: { id: string, name?: string, content: string }[] }} ResultsTurn
 * @typedef {UserTurn | ReplyTurn | ResultsTurn} Turn
 */

/**
 * The form of parameters, the body of a request as JSON, and a reranker's result for a text.
 *
 * @typedef {typeof NO_SETTINGS} Settings
 * @typedef {Record<string, any>} Body
 * @typedef {{ index: number, relevance_score?: number, score?: number }} Score
 */

/** The values of an empty form of parameters; an empty field is not sent. */
export const NO_SETTINGS = {
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  max_tokens: "",
  seed: "",
  presence_penalty: "",
  frequency_penalty: "",
  stop: "",
  tools: "",
  tool_choice: "",
  more: "",
};
/** @type {(keyof Settings)[]} */
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);

/**
 * @param {string} name
 * @param {string} text
 */
function numberIn(name, text) {
  const value = Number(text);
  if (!Number.isFinite(value) || (WHOLE.has(name) && !Number.isInteger(value))) {
    throw new Error(
      WHOLE.has(name)
        ? t("{name} must be a whole number, and is not: {text}", { name, text })
        : t("{name} must be a number, and is not: {text}", { name, text }),
    );
  }
  return value;
}

/**
 * @param {string} name
 * @param {string} text
 */
function jsonIn(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(t("{name}: this is no JSON: {message}", { name, message: error.message }));
  }
}

/**
 * Return the tools that a text names, as the API expects them; a bare function gets its `type`. Throws an Error.
 *
 * @param {string} text
 */
export function toolsIn(text) {
  const found = jsonIn(t("Tools"), text);
  const tools = (Array.isArray(found) ? found : [found]).map((one) =>
    one && typeof one === "object" && !one.type && one.name ? { type: "function", function: one } : one,
  );
  for (const one of tools) {
    if (!one?.function?.name) throw new Error(t('Tools: each is {"type": "function", "function": {"name": …}}.'));
  }
  return tools;
}

/**
 * Return the members that the form adds to a request. Throws an Error with the mistake.
 *
 * @param {Settings} settings
 * @returns {Body}
 */
export function parametersOf(settings, { hasTools = true } = {}) {
  /** @type {Body} */
  const found = {};
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    if (text) found[name] = numberIn(name, text);
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) found.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  if (hasTools && settings.tools.trim()) {
    found.tools = toolsIn(settings.tools);
    if (settings.tool_choice) found.tool_choice = settings.tool_choice;
  }
  if (settings.more.trim()) {
    const more = jsonIn(t("More"), settings.more);
    if (more === null || typeof more !== "object" || Array.isArray(more))
      throw new Error(t("More: this is no object."));
    Object.assign(found, more);
  }
  return found;
}

/**
 * Return a conversation as the API expects it.
 *
 * `entries`: {kind: "user", text, pictures} | {kind: "reply", reply} | {kind: "results", results: [{id, content}]}. An
 * answer without content is left out, together with what it was to answer: models want the roles to take turns. So is a
 * call that was given no result.
 *
 * @param {string} system
 * @param {Turn[]} entries
 * @returns {Body[]}
 */
export function messagesOf(system, entries) {
  /** @type {Body[]} */
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  /** @type {Body[]} */
  let pending = [];
  for (const [at, entry] of entries.entries()) {
    if (entry.kind === "user") pending = [userMessage(entry)];
    else if (entry.kind === "results") {
      pending = entry.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
    } else {
      const [, text] = partsOf(entry.reply);
      const calls = entries[at + 1]?.kind === "results" ? entry.reply.calls : [];
      if (!text && !calls.length) continue;
      const called = calls.length ? { tool_calls: calls.map(callOf) } : {};
      messages.push(...pending, { role: "assistant", content: text, ...called });
      pending = [];
    }
  }
  return [...messages, ...pending];
}

/**
 * @param {UserTurn} turn
 * @returns {Body}
 */
function userMessage({ text, pictures = [] }) {
  if (!pictures.length) return { role: "user", content: text };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

/** @param {Reply["calls"][number]} call */
const callOf = ({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } });

/**
 * Return the body of a request for a chat's next answer.
 *
 * @param {string} model
 * @param {Settings} settings
 * @param {Turn[]} entries
 */
export const chatBody = (model, settings, entries) =>
  streamed({ model, messages: messagesOf(settings.system, entries) }, parametersOf(settings));

/**
 * Return the body of a request to go on with a text.
 *
 * @param {string} model
 * @param {Settings} settings
 * @param {string} prompt
 */
export const completionBody = (model, settings, prompt) =>
  streamed({ model, prompt }, parametersOf(settings, { hasTools: false }));

/**
 * @param {Body} body
 * @param {Body} parameters
 * @returns {Body}
 */
function streamed(body, parameters) {
  if (parameters.stream === false) return { ...body, ...parameters };
  return { ...body, stream: true, stream_options: { include_usage: true }, ...parameters };
}

/**
 * Return a request as a command; the key is in a variable.
 *
 * @param {string} base
 * @param {string} path
 * @param {Body} body
 * @param {boolean} hasKey
 */
export function curlOf(base, path, body, hasKey) {
  const key = hasKey ? '  -H "authorization: Bearer $ICHAT_KEY" \\\n' : "";
  return (
    `curl ${body.stream ? "-N " : ""}'${base}${path}' \\\n  -H 'content-type: application/json' \\\n${key}` +
    `  -d @- <<'END'\n${JSON.stringify(body, null, 2)}\nEND`
  );
}

/** @type {Record<string, string>} */
const CALLS = {
  "/v1/chat/completions": "chat.completions.create",
  "/v1/completions": "completions.create",
  "/v1/embeddings": "embeddings.create",
};
const KNOWN = new Set([
  "model",
  "messages",
  "prompt",
  "input",
  "stream",
  "stream_options",
  "temperature",
  "top_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "stop",
  "tools",
  "tool_choice",
  "response_format",
  "logprobs",
  "top_logprobs",
  "n",
  "encoding_format",
  "dimensions",
  "reasoning_effort",
  "logit_bias",
]);

/**
 * @param {unknown} value
 * @returns {string}
 */
function python(value, indent = "    ") {
  const inner = `${indent}    `;
  const lines = (/** @type {string} */ open, /** @type {string[]} */ parts, /** @type {string} */ close) => {
    const all = parts.map((one) => `${inner}${one},\n`).join("");
    return all ? `${open}\n${all}${indent}${close}` : `${open}${close}`;
  };
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value))
    return lines(
      "[",
      value.map((one) => python(one, inner)),
      "]",
    );
  if (typeof value !== "object") return JSON.stringify(value);
  return lines(
    "{",
    Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, inner)}`),
    "}",
  );
}

/**
 * Return a request as a program with OpenAI's package, where that has a call for it; else "".
 *
 * @param {string} base
 * @param {string} path
 * @param {Body} body
 * @param {boolean} hasKey
 */
export function pythonOf(base, path, body, hasKey) {
  const call = CALLS[path];
  if (!call) return "";
  const entries = Object.entries(body);
  const own = entries.filter(([name]) => KNOWN.has(name)).map(([name, value]) => `    ${name}=${python(value)},\n`);
  const more = Object.fromEntries(entries.filter(([name]) => !KNOWN.has(name)));
  if (Object.keys(more).length) own.push(`    extra_body=${python(more)},\n`);
  const delta = path.includes("chat") ? "delta.content" : "text";
  const read = body.stream
    ? "for chunk in answer:\n    if chunk.choices:\n" +
      `        print(chunk.choices[0].${delta} or "", end="", flush=True)\n`
    : "print(answer)\n";
  const key = hasKey ? 'os.environ["ICHAT_KEY"]' : '"none"';
  return (
    `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${JSON.stringify(`${base}/v1`)}, api_key=${key})\n` +
    `answer = client.${call}(\n${own.join("")})\n${read}`
  );
}

/**
 * Return how near two vectors are: 1 for the same direction, 0 for none in common.
 *
 * @param {number[]} left
 * @param {number[]} right
 */
export function cosine(left, right) {
  let product = 0;
  let a = 0;
  let b = 0;
  for (let at = 0; at < left.length; at += 1) {
    product += left[at] * right[at];
    a += left[at] ** 2;
    b += right[at] ** 2;
  }
  return a && b ? product / Math.sqrt(a * b) : 0;
}

/**
 * Return a reranker's answer, best first: [{index, score, text}].
 *
 * @param {Score[] | { results?: Score[], data?: Score[] }} answer
 * @param {string[]} documents
 * @returns {{ index: number, score: number, text: string }[]}
 */
export function rankedIn(answer, documents) {
  const results = Array.isArray(answer) ? answer : (answer.results ?? answer.data ?? []);
  return results
    .map((one) => ({ index: one.index, score: Number(one.relevance_score ?? one.score), text: documents[one.index] }))
    .sort((a, b) => b.score - a.score);
}
