// How a worker of another machine joins: the settings that the gateway needs for that, and the command. Pure functions.

import { t } from "../../texts.js";

/** @import { Machine } from "../../store.js" */

/**
 * An engine, and the settings that decide how a worker of another machine joins.
 *
 * @typedef {Api.Engines["engines"][number]} Engine
 * @typedef {{ host: string }} Server
 * @typedef {{ join_token_env?: string | null }} Security
 * @typedef {{ server_settings: Server, security: Security & { keys: unknown[] },
 *   engines?: Record<string, unknown> }} Settings
 */

const LOOPBACK = /^(127\.|localhost$|::1$|\[::1\]$)/;
const EVERYWHERE = new Set(["", "0.0.0.0", "::"]);

/**
 * Return the settings that are missing until other machines reach the gateway, {why, toml}; null: nothing.
 *
 * @param {{ server_settings: Server, security: Security }} settings
 */
export function joinSettings({ server_settings: server, security }) {
  const isLocal = LOOPBACK.test(server.host);
  const hasToken = Boolean(security.join_token_env);
  if (!isLocal && hasToken) return null;
  const lines = [];
  if (isLocal) lines.push("[server_settings]", 'host = "0.0.0.0"');
  if (isLocal && !hasToken) lines.push("");
  if (!hasToken) lines.push("[security]", 'join_token_env = "ICHAT_JOIN_TOKEN"');
  const why = isLocal
    ? t("This gateway listens on {host}: no other machine reaches it.", { host: server.host })
    : t("This gateway has no token by which it knows workers of other machines.");
  return { why, toml: lines.join("\n") };
}

/**
 * Return an address of the gateway for other machines: `base` is the address of this page.
 *
 * @param {{ server_settings: Server }} settings
 * @param {Pick<Machine, "name"> | null | undefined} machine
 * @param {string} base
 */
export function addressOf({ server_settings: server }, machine, base) {
  const url = new URL(base);
  if (!LOOPBACK.test(url.hostname)) return base;
  const isNamed = !LOOPBACK.test(server.host) && !EVERYWHERE.has(server.host);
  const host = isNamed ? server.host : (machine?.name ?? "GATEWAY");
  return `${url.protocol}//${host.includes(":") ? `[${host}]` : host}${url.port && `:${url.port}`}`;
}

/** @param {string} text */
const shellWord = (text) => (/^[\w./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/**
 * Return the interpreter that has an engine on the gateway's machine, as far as that is known; null: it is not.
 *
 * @param {Engine | undefined} engine
 * @param {Pick<Settings, "engines">} settings
 */
export function interpreterOf(engine, { engines = {} }) {
  return engine && (engine.version !== null || engine.name in engines) ? engine.python : null;
}

/**
 * Return the command that starts a worker on another machine; `python` is the interpreter that has its engine.
 *
 * @param {Engine | undefined} engine
 * @param {string | null} python
 * @param {string} model
 * @param {string} address
 */
export function joinCommand(engine, python, model, address) {
  const program = python === null ? "PYTHON" : shellWord(python);
  return [
    `ICHAT_JOIN_TOKEN=… ${program} ichat.pyz worker -be ${engine?.name ?? "vllm"}`,
    `  --model ${shellWord(model)}`,
    `  --gateway-address ${address}`,
  ].join(" \\\n");
}
