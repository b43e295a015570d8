// The parameters of a request, each of which may be left to the model.

import { t, tParts } from "../../texts.js";
import { Field, html, useKept } from "../../ui.js";
import { toolsIn } from "./request.js";

/** @import { FieldEvent } from "../../ui/html.js" */
/** @import { Settings as Values } from "./request.js" */

/** @type {[keyof Values, string, string][]} */
const FIELDS = [
  ["temperature", t("Temperature"), t("0: always the likeliest word; 1: as trained; more: wilder.")],
  ["max_tokens", t("Max tokens"), t("The answer is cut off there.")],
  ["top_p", "top_p", t("Only the likeliest words that make up this share.")],
  ["top_k", "top_k", t("Only this many of the likeliest words.")],
  ["seed", t("Seed"), t("The same number gives the same answer, mostly.")],
  ["presence_penalty", t("Presence penalty"), t("Above 0: rather new words.")],
  ["frequency_penalty", t("Frequency penalty"), t("Above 0: fewer repetitions.")],
];
const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** @param {string} text */
function wrongTools(text) {
  try {
    if (text.trim()) toolsIn(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

/**
 * The form. `of`: the kind of request: "chat" | "completion".
 *
 * @param {{ settings: Values, onChange: (settings: Values) => void, of?: "chat" | "completion" }} props
 */
export function Settings({ settings, onChange, of = "chat" }) {
  const isChat = of === "chat";
  const put = (/** @type {keyof Values} */ name, /** @type {string} */ value) =>
    onChange({ ...settings, [name]: value });
  const field = (/** @type {keyof Values} */ name) => ({
    value: settings[name],
    onInput: (/** @type {FieldEvent} */ event) => put(name, event.target.value),
  });
  const names = /** @type {(keyof Values)[]} */ (Object.keys(settings)).filter(
    (name) => isChat || !["system", "tools", "tool_choice"].includes(name),
  );
  const set = names.filter((name) => settings[name]);
  const [isOpen, setOpen] = useKept(
    "playground.parameters",
    (/** @type {boolean | undefined} */ kept) => kept ?? false,
  );
  return html`<details class="card settings-card" open=${isOpen}
    onToggle=${(/** @type {Event & { currentTarget: HTMLDetailsElement }} */ event) => {
      const { open } = event.currentTarget;
      setOpen(() => open);
    }}>
    <summary><h2>${t("Parameters")}</h2> ${
      set.length > 0 && html`<span class="tab-count">${set.length}</span>`
    }</summary>
    <div class="pile">
    ${
      isChat &&
      html`<${Field} label=${t("System prompt")} hint=${t("How the model should behave, told before all else.")}>
      <textarea rows="3" ...${field("system")}></textarea><//>`
    }
    <div class="form tight">${FIELDS.map(
      ([name, title, hint]) => html`<${Field} key=${name} label=${title}
      hint=${hint}><input type="text" inputmode="decimal" placeholder=${t("the model's")} ...${field(name)} /><//>`,
    )}</div>
    <${Field} label=${t("Stop at")} hint=${t("One text a line; \\n in it is a new line.")}>
      <textarea rows="2" class="mono" spellcheck=${false} ...${field("stop")}></textarea><//>
    ${
      isChat &&
      html`<${Field} label=${t("Tools")} error=${wrongTools(settings.tools)}
      hint=${t("Functions that the model may call, as JSON. It asks, and you type what they return.")}>
      <textarea rows=${settings.tools ? 8 : 2} class="mono" spellcheck=${false} ...${field("tools")}></textarea><//>
      <div class="actions">
        ${
          settings.tools.trim() &&
          html`<select aria-label=${t("Whether it calls tools")} value=${settings.tool_choice}
          onChange=${(event) => put("tool_choice", event.target.value)}>
          <option value="">${t("It may call them")}</option><option value="required">${t("It must call one")}</option>
          <option value="none">${t("It must not call any")}</option></select>`
        }
        ${
          !settings.tools.trim() &&
          html`<button type="button" class="button small"
          onClick=${() => put("tools", JSON.stringify(EXAMPLE, null, 2))}>${t("Put in an example")}</button>`
        }</div>`
    }
    <${Field} label=${t("More")} hint=${tParts("Other members of the request, as JSON, such as {example}.", {
      example: html`<code>${'{"chat_template_kwargs": {"enable_thinking": false}}'}</code>`,
    })}>
      <textarea rows="2" class="mono" spellcheck=${false} ...${field("more")}></textarea><//>
    </div></details>`;
}
