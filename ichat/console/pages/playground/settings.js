// The parameters of a request, each of which may be left to the model.

import { Field, html, useKept } from "../../ui.js";
import { toolsIn } from "./request.js";

/** @import { FieldEvent } from "../../ui/html.js" */
/** @import { Settings as Values } from "./request.js" */

/** @type {[keyof Values, string, string][]} */
const FIELDS = [
  ["temperature", "Temperature", "0: always the likeliest word; 1: as trained; more: wilder."],
  ["max_tokens", "Max tokens", "The answer is cut off there."],
  ["top_p", "top_p", "Only the likeliest words that make up this share."],
  ["top_k", "top_k", "Only this many of the likeliest words."],
  ["seed", "Seed", "The same number gives the same answer, mostly."],
  ["presence_penalty", "Presence penalty", "Above 0: rather new words."],
  ["frequency_penalty", "Frequency penalty", "Above 0: fewer repetitions."],
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
    <summary><h2>Parameters</h2> ${set.length > 0 && html`<span class="tab-count">${set.length}</span>`}</summary>
    <div class="pile">
    ${
      isChat &&
      html`<${Field} label="System prompt" hint="How the model should behave, told before all else.">
      <textarea rows="3" ...${field("system")}></textarea><//>`
    }
    <div class="form tight">${FIELDS.map(
      ([name, title, hint]) => html`<${Field} key=${name} label=${title}
      hint=${hint}><input type="text" inputmode="decimal" placeholder="the model's" ...${field(name)} /><//>`,
    )}</div>
    <${Field} label="Stop at" hint="One text a line; \\n in it is a new line.">
      <textarea rows="2" class="mono" spellcheck=${false} ...${field("stop")}></textarea><//>
    ${
      isChat &&
      html`<${Field} label="Tools" error=${wrongTools(settings.tools)}
      hint="Functions that the model may call, as JSON. It asks, and you type what they return.">
      <textarea rows=${settings.tools ? 8 : 2} class="mono" spellcheck=${false} ...${field("tools")}></textarea><//>
      <div class="actions">
        ${
          settings.tools.trim() &&
          html`<select aria-label="Whether it calls tools" value=${settings.tool_choice}
          onChange=${(event) => put("tool_choice", event.target.value)}>
          <option value="">It may call them</option><option value="required">It must call one</option>
          <option value="none">It must not call any</option></select>`
        }
        ${
          !settings.tools.trim() &&
          html`<button type="button" class="button small"
          onClick=${() => put("tools", JSON.stringify(EXAMPLE, null, 2))}>Put in an example</button>`
        }</div>`
    }
    <${Field} label="More" hint=${html`Other members of the request, as JSON, such as
      <code>${'{"chat_template_kwargs": {"enable_thinking": false}}'}</code>.`}>
      <textarea rows="2" class="mono" spellcheck=${false} ...${field("more")}></textarea><//>
    </div></details>`;
}
