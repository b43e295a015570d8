// How a worker of another machine joins: what the gateway lacks for that, and the command. Pure functions.

const LOOPBACK = /^(127\.|localhost$|::1$|\[::1\]$)/;
const EVERYWHERE = new Set(["", "0.0.0.0", "::"]);

/** Return what the configuration lacks until other machines reach the gateway, {why, toml}; null: nothing. */
export function joinSettings({ server_settings: server, security }) {
  const isLocal = LOOPBACK.test(server.host);
  const hasToken = Boolean(security.join_token_env);
  if (!isLocal && hasToken) return null;
  const lines = [];
  if (isLocal) lines.push("[server_settings]", 'host = "0.0.0.0"');
  if (isLocal && !hasToken) lines.push("");
  if (!hasToken) lines.push("[security]", 'join_token_env = "ICHAT_JOIN_TOKEN"');
  const why = isLocal
    ? `This gateway listens on ${server.host}: no other machine reaches it.`
    : "This gateway has no token by which it knows workers of other machines.";
  return { why, toml: lines.join("\n") };
}

/** Return an address of the gateway for other machines: `base` is the one that this page has come from. */
export function addressOf({ server_settings: server }, machine, base) {
  const url = new URL(base);
  if (!LOOPBACK.test(url.hostname)) return base;
  const isNamed = !LOOPBACK.test(server.host) && !EVERYWHERE.has(server.host);
  const host = isNamed ? server.host : (machine?.name ?? "GATEWAY");
  return `${url.protocol}//${host.includes(":") ? `[${host}]` : host}${url.port && `:${url.port}`}`;
}

const shellWord = (text) => (/^[\w./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Return the interpreter that has an engine on the gateway's machine, as far as that is known; null: it is not. */
export function interpreterOf(engine, { engines = {} }) {
  return engine && (engine.version !== null || engine.name in engines) ? engine.python : null;
}

/** Return the command that starts a worker on another machine; `python` is the interpreter that has its engine. */
export function joinCommand(engine, python, model, address) {
  const program = python === null ? "PYTHON" : shellWord(python);
  return [
    `ICHAT_JOIN_TOKEN=… ${program} ichat.pyz worker -be ${engine?.name ?? "vllm"}`,
    `  --model ${shellWord(model)}`,
    `  --gateway-address ${address}`,
  ].join(" \\\n");
}
