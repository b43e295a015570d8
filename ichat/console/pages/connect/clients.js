// What to write into known clients, so that they use a name of this gateway: pure functions.

import { t } from "../../texts.js";

/**
 * A text for a client: `where` it belongs, `notes` about it; `text` is copied.
 *
 * @typedef {{ name: string, title: string, where: string, text: string, notes: string[] }} Recipe
 * @typedef {{ base: string, model: string, key: string }} Access
 */

/** Characters that are not shown as they are: they would change the look or the effect of a command. */
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;
const ANSWER_TOKENS = 4096;
/** A key where clients need none: any text is accepted. */
export const NO_KEY = "none";
/** What stands for a key that is not made yet. */
export const KEY_TO_COME = "YOUR-KEY";

/** @param {string} text */
const escaped = (text) =>
  text.replace(HIDDEN, (found) =>
    [...Array(found.length).keys()].map((at) => `\\u${found.charCodeAt(at).toString(16).padStart(4, "0")}`).join(""),
  );

/**
 * Return a text as a literal of Python, JSON, TOML and YAML.
 *
 * @param {string} text
 */
export const literal = (text) => escaped(JSON.stringify(text));

/**
 * Return a text as a word of a shell.
 *
 * @param {string} text
 */
export function shellWord(text) {
  if (escaped(text) === text) return `'${text.replaceAll("'", "'\\''")}'`;
  return `$'${escaped(text.replace(/[\\']/g, "\\$&"))}'`;
}

/**
 * Return whether a name stands for every name that fits it.
 *
 * @param {string} name
 */
export const isPattern = (name) => name.includes("*");

/**
 * Return whether an address leads to the machine of the browser.
 *
 * @param {string} base
 */
export const isLocal = (base) => ["localhost", "127.0.0.1", "[::1]"].includes(new URL(base).hostname);

/**
 * Return what to write into each client.
 *
 * @param {Access} access
 * @returns {Recipe[]}
 */
export function recipesFor({ base, model: name, key }) {
  const model = name.replace("*", "NAME");
  const api = `${base}/v1`;
  const hello = `[{"role": "user", "content": "Hello!"}]`;
  return [
    {
      name: "openai",
      title: "OpenAI SDK",
      where: t("In Python, after pip install openai"),
      text: `from openai import OpenAI

client = OpenAI(base_url=${literal(api)}, api_key=${literal(key)})
answer = client.chat.completions.create(
    model=${literal(model)},
    messages=${hello},
)
print(answer.choices[0].message.content)`,
      notes: [],
    },
    {
      name: "claude",
      title: "Claude Code",
      where: t("In a terminal"),
      text: [
        `export ANTHROPIC_BASE_URL=${shellWord(base)} ANTHROPIC_AUTH_TOKEN=${shellWord(key)}`,
        `export CLAUDE_CODE_MAX_OUTPUT_TOKENS=${ANSWER_TOKENS} CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`,
        isPattern(name) && name.startsWith("claude") ? "claude" : `claude --model ${shellWord(model)}`,
      ].join("\n"),
      notes: [
        t("Its requests have tools and long prompts: the model's context needs room for them and for the answer."),
      ],
    },
    {
      name: "codex",
      title: "Codex",
      where: t("In ~/.codex/config.toml"),
      text: `model = ${literal(model)}
model_provider = "ichat"

[model_providers.ichat]
name = "iChat"
base_url = ${literal(api)}
wire_api = "responses"
env_key = "ICHAT_API_KEY"

# and in a terminal:
# export ICHAT_API_KEY=${shellWord(key)}; codex`,
      notes: [t("It warns that it has no metadata of the model, and continues.")],
    },
    {
      name: "webui",
      title: "Open WebUI",
      where: t("In a terminal"),
      text: `docker run -d -p 3000:8080 -v open-webui:/app/backend/data \\
  -e OPENAI_API_BASE_URL=${shellWord(api)} \\
  -e OPENAI_API_KEY=${shellWord(key)} \\
  ghcr.io/open-webui/open-webui:main`,
      notes: isLocal(base)
        ? [t("A container does not reach localhost: write the machine's name or address there.")]
        : [],
    },
    {
      name: "continue",
      title: "Continue",
      where: t("In ~/.continue/config.yaml"),
      text: `name: iChat
version: 0.0.1
schema: v1
models:
  - name: ${literal(model)}
    provider: openai
    model: ${literal(model)}
    apiBase: ${literal(api)}
    apiKey: ${literal(key)}`,
      notes: [],
    },
  ];
}
