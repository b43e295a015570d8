// A worker before its launch: the form's values, as the API and as ichat.toml have them.

import { t } from "../../texts.js";

/** Arguments of engines that are asked for most, where an engine has them. */
export const USUAL = [
  "max_model_len",
  "context_length",
  "gpu_memory_utilization",
  "mem_fraction_static",
  "tensor_parallel_size",
  "dtype",
  "quantization",
  "kv_cache_dtype",
  "max_num_seqs",
  "max_running_requests",
  "reasoning_parser",
  "tool_call_parser",
  "enable_auto_tool_choice",
  "trust_remote_code",
  "device",
];

/**
 * The form's values: texts as they were typed, of the arguments as well.
 *
 * @typedef {"backend" | "model_path" | "model_name" | "load" | "when_idle" | "idle_s" | "port" | "host" |
 *   "max_in_flight" | "python" | "env" | "on_gateway_exit" | "gpus" | "replicas"} TextField
 * @typedef {Record<TextField, string> & { args: Record<string, string>, gpu_ids: number[] | null,
 *   share_gpus: boolean }} Draft
 */

/**
 * A form that nothing was put into.
 *
 * @type {Draft}
 */
export const EMPTY = {
  backend: "vllm",
  model_path: "",
  model_name: "",
  gpu_ids: null,
  gpus: "",
  replicas: "",
  load: "start",
  when_idle: "stop",
  idle_s: "",
  port: "",
  host: "",
  max_in_flight: "",
  python: "",
  env: "",
  share_gpus: false,
  on_gateway_exit: "stop",
  args: {},
};

/**
 * Return the name that requests use, where none was given: the directory's, or the model's name on the hub.
 *
 * @param {Pick<Draft, "model_name" | "model_path">} draft
 */
export function nameOf({ model_name, model_path }) {
  if (model_name.trim()) return model_name.trim();
  const path = model_path.trim();
  return /^[/.~]/.test(path) ? path.replace(/\/+$/, "").split("/").pop() || path : path;
}

/**
 * @param {string} text
 * @param {string} kind
 */
function read(text, kind) {
  if (kind === "switch") return text === "true";
  if ((kind === "integer" || kind === "number") && /^-?\d+$/.test(text)) return Number(text);
  if (kind === "number" && text !== "" && Number.isFinite(Number(text))) return Number(text);
  if (kind === "json" && /^[[{]/.test(text)) return JSON.parse(text);
  return text;
}

/**
 * Return an argument's value from the typed text: a number, a switch, a table or a text. Throws an Error.
 *
 * @param {string} text
 * @param {Pick<Api.EngineFlag, "kind"> & Partial<Api.EngineFlag> | undefined} flag
 */
export function argumentValue(text, flag) {
  const typed = text.trim();
  if (flag?.is_list) {
    const parts = typed
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean);
    return parts.map((part) => read(part, flag.kind));
  }
  try {
    return read(typed, flag?.kind ?? guess(typed));
  } catch (error) {
    throw new Error(t("{name} takes JSON: {message}", { name: flag?.name ?? t("This"), message: error.message }));
  }
}

/** @param {string} text */
function guess(text) {
  if (text === "true" || text === "false") return "switch";
  if (/^[[{]/.test(text)) return "json";
  return "number";
}

/**
 * Return the numbers of copies in a text such as `3` or `1-4`: the fewest and the most. Throws an Error.
 *
 * @param {string} text
 * @returns {{ min: number, max: number }}
 */
export function copiesIn(text) {
  const found = /^(\d+)(?:\s*[-–]\s*(\d+))?$/.exec(text.trim());
  if (!found) throw new Error(t("Replicas are a number such as 3, or a range such as 1-4, and not: {text}", { text }));
  return { min: Number(found[1]), max: Number(found[2] ?? found[1]) };
}

/**
 * Return the worker as the API expects it; `flags` are those of the engine, by their keys. Throws an Error.
 *
 * @param {Draft} draft
 * @param {Map<string, Api.EngineFlag>} flags
 * @returns {Api.Launch & Record<string, unknown>}
 */
export function bodyOf(draft, flags) {
  /** @type {Record<string, unknown>} */
  const body = { model_name: nameOf(draft), model_path: draft.model_path.trim(), backend: draft.backend };
  if (draft.gpus.trim()) body.gpus = argumentValue(draft.gpus, { kind: "number" });
  else if (draft.gpu_ids !== null) body.gpu_ids = draft.gpu_ids;
  if (draft.replicas.trim()) {
    const { min, max } = copiesIn(draft.replicas);
    body.replicas = min === max ? min : { min, max };
  }
  if (draft.share_gpus) body.share_gpus = true;
  for (const name of /** @type {const} */ (["port", "max_in_flight", "idle_s"])) {
    if (draft[name].trim()) body[name] = argumentValue(draft[name], { kind: "number" });
  }
  for (const name of /** @type {const} */ (["host", "python"])) if (draft[name].trim()) body[name] = draft[name].trim();
  for (const name of /** @type {const} */ (["load", "when_idle", "on_gateway_exit"])) {
    if (draft[name] !== EMPTY[name]) body[name] = draft[name];
  }
  const env = Object.fromEntries(
    draft.env
      .split("\n")
      .map((line) => line.trim())
      .filter(Boolean)
      .map((line) => {
        const at = line.indexOf("=");
        if (at < 1) throw new Error(t("A variable is NAME=value, and this is not: {line}", { line }));
        return [line.slice(0, at), line.slice(at + 1)];
      }),
  );
  if (Object.keys(env).length) body.env = env;
  for (const [key, text] of Object.entries(draft.args)) {
    if (text.trim()) body[key] = argumentValue(text, flags.get(key));
  }
  return /** @type {Api.Launch & Record<string, unknown>} */ (body);
}

/**
 * @param {unknown} value
 * @returns {string}
 */
function toml(value) {
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const inner = Object.entries(value).map(([name, one]) => `${nameIn(name)} = ${toml(one)}`);
    return inner.length ? `{ ${inner.join(", ")} }` : "{}";
  }
  return JSON.stringify(value).replace(/\u007f/g, "\\u007f");
}

/** @param {string} name */
const nameIn = (name) => (/^[A-Za-z0-9_-]+$/.test(name) ? name : JSON.stringify(name));

/**
 * Return a worker as a table of ichat.toml.
 *
 * @param {Record<string, unknown>} body
 */
export function tomlOf(body) {
  const lines = Object.entries(body).map(([name, value]) => `${nameIn(name)} = ${toml(value)}`);
  return ["[[managed_workers]]", ...lines].join("\n");
}
