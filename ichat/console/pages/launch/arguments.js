// The arguments of an engine: those that are asked for most, those that are set, and all others by a search.

import { t } from "../../texts.js";
import { Button, Field, html, Notice, useMemo, useState } from "../../ui.js";
import { USUAL } from "./draft.js";

/** @import { FieldEvent } from "../../ui/html.js" */

/**
 * @typedef {{ flags: Map<string, Api.EngineFlag>, args: Record<string, string>,
 *   onArg: (key: string, text: string | null) => void }} Form
 */

const SHOWN = 25;

/** @param {Api.EngineFlag} flag */
const defaultOf = ({ default: value }) => {
  if (value === null || value === "") return t("the engine's choice");
  return typeof value === "string" ? value : JSON.stringify(value);
};

/** @param {{ flag: Api.EngineFlag, text: string, onInput: (text: string) => void }} props */
function Control({ flag, text, onInput }) {
  const set = (/** @type {FieldEvent} */ event) => onInput(event.target.value);
  if (flag.kind === "switch" || (flag.choices.length > 0 && !flag.is_list)) {
    const words = flag.kind === "switch" ? ["true", "false"] : flag.choices;
    return html`<select value=${text} onChange=${set}>
      <option value="">${t("Default: {value}", { value: defaultOf(flag) })}</option>
      ${words.map((word) => html`<option key=${word} value=${word}>${word}</option>`)}</select>`;
  }
  if (flag.is_list || flag.kind === "json") {
    const hint = flag.is_list ? t("One value a line") : '{"key": "value"}';
    return html`<textarea rows="2" class="mono" placeholder=${hint} value=${text} onInput=${set}
      spellcheck=${false}></textarea>`;
  }
  return html`<input type="text" class="mono" value=${text} placeholder=${defaultOf(flag)} onInput=${set}
    spellcheck=${false} inputmode=${flag.kind === "text" ? undefined : "decimal"} />`;
}

const KINDS = {
  integer: t("whole number"),
  number: t("number"),
  text: t("text"),
  json: "JSON",
  switch: t("on or off"),
};

/** @param {{ flag: Api.EngineFlag, text: string, onInput: (text: string) => void }} props */
function Argument({ flag, text, onInput }) {
  const aliases = flag.aliases.length ? ` · ${t("also {names}", { names: flag.aliases.join(", ") })}` : "";
  const kind = `${flag.is_list ? t("list of {kind}", { kind: KINDS[flag.kind] }) : KINDS[flag.kind]}${aliases}`;
  return html`<div class="argument" data-flag=${flag.key}>
    <div class="argument-text">
      <code>${flag.name}</code> <span class="hint">${kind}</span>
      <p class="hint">${flag.help}</p>
    </div>
    <div class="argument-value"><label><span class="only-read">${flag.name}</span>
      <${Control} flag=${flag} text=${text} onInput=${onInput} /></label></div>
  </div>`;
}

/** @param {Form} props */
function Usual({ flags, args, onArg }) {
  const shown = USUAL.map((key) => flags.get(key)).filter((flag) => flag !== undefined);
  return html`<div class="form">${shown.map(
    (flag) => html`<${Field} key=${flag.key} label=${flag.name}
    hint=${flag.help.split(/(?<=[.!?:])\s/)[0].slice(0, 110)}>
    <${Control} flag=${flag} text=${args[flag.key] ?? ""} onInput=${(/** @type {string} */ text) =>
      onArg(flag.key, text)} /><//>`,
  )}</div>`;
}

/**
 * Arguments that this engine's list does not have: names of the other engine, or of older releases.
 *
 * @param {Form} props
 */
function Others({ flags, args, onArg }) {
  const [name, setName] = useState("");
  const unknown = Object.keys(args).filter((key) => !flags.has(key));
  const add = (/** @type {Event} */ event) => {
    event.preventDefault();
    const key = name.trim().replace(/^--/, "").replaceAll("-", "_");
    if (key) onArg(key, args[key] ?? "true");
    setName("");
  };
  return html`<div class="others">
    ${unknown.map(
      (key) => html`<div key=${key} class="other" data-flag=${key}>
      <code>--${key.replaceAll("_", "-")}</code>
      <input type="text" class="mono" aria-label=${key} value=${args[key]}
        onInput=${(event) => onArg(key, event.target.value)} />
      <${Button} small tone="quiet" icon="close" onClick=${() => onArg(key, null)}>${t("Remove")}<//></div>`,
    )}
    <form class="other" onSubmit=${add}><input type="text" class="mono" aria-label=${t("Another argument")} value=${
      name
    }
      placeholder="--an-argument-that-is-not-listed" onInput=${(event) => setName(event.target.value)} />
      <button class="button small" type="submit" disabled=${!name.trim()}>${t("Add")}</button></form></div>`;
}

/**
 * @param {Api.EngineFlag} flag
 * @param {string[]} words
 */
function matches(flag, words) {
  const text = `${flag.name} ${flag.aliases.join(" ")} ${flag.help} ${flag.group}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

/**
 * Matching names stand before matching texts.
 *
 * @param {Map<string, Api.EngineFlag>} flags
 * @param {string} search
 */
function found(flags, search) {
  const words = search.toLowerCase().replaceAll("_", "-").split(/\s+/).filter(Boolean);
  const all = [...flags.values()].filter((flag) => matches(flag, words));
  const isNamed = (/** @type {Api.EngineFlag} */ flag) => words.every((word) => flag.name.includes(word));
  return words.length ? [...all.filter(isNamed), ...all.filter((flag) => !isNamed(flag))] : all;
}

/**
 * The engine's arguments. `flags`: a map by key, empty while they are not known; `asked`: {isUnderWay, error} of the
 * question for them; `onArg(key, text)`: an argument was changed, or removed by null.
 *
 * @param {Form & { asked: { isUnderWay: boolean, error: Error | null } }} props
 */
export function Arguments({ flags, asked, args, onArg }) {
  const [search, setSearch] = useState("");
  const [onlySet, setOnlySet] = useState(false);
  const [limit, setLimit] = useState(SHOWN);
  const matching = useMemo(() => found(flags, search), [flags, search]);
  const shown = onlySet ? matching.filter((flag) => (args[flag.key] ?? "") !== "") : matching;
  return html`<div class="arguments">
    ${
      asked.isUnderWay &&
      html`<${Notice} tone="busy">${t(
        "The engine is asked for its arguments; the first time it takes up to a minute, since " +
          "its interpreter imports it.",
      )}<//>`
    }
    ${asked.error && html`<${Notice} title=${t("The engine's arguments are not known.")}>${asked.error.message}<//>`}
    ${
      flags.size > 0 &&
      html`<${Usual} flags=${flags} args=${args} onArg=${onArg} />
      <h3>${t("All {count} arguments", { count: flags.size })}</h3>
      <div class="actions">
        <input type="search" aria-label=${t("Find an argument")} placeholder=${t("Find by name or help")} value=${
          search
        }
          onInput=${(event) => {
            setSearch(event.target.value);
            setLimit(SHOWN);
          }} />
        <label class="check"><input type="checkbox" checked=${onlySet}
          onChange=${(event) => setOnlySet(event.target.checked)} /> ${t("Only those that are set")}</label>
        <span class="hint" role="status">${t("{count} found", { count: shown.length })}</span>
      </div>
      <div class="argument-list">${shown.slice(0, limit).map(
        (flag) => html`<${Argument} key=${flag.key} flag=${flag}
        text=${args[flag.key] ?? ""} onInput=${(/** @type {string} */ text) => onArg(flag.key, text)} />`,
      )}</div>
      ${
        shown.length > limit &&
        html`<div class="actions"><${Button} onClick=${() => setLimit(limit + 4 * SHOWN)}>
        ${t("Show more")}<//></div>`
      }`
    }
    <${Others} flags=${flags} args=${args} onArg=${onArg} />
  </div>`;
}
