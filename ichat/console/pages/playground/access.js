// The model of the playground's requests, and a client's key where clients have keys.

import { api, asKey } from "../../api.js";
import { hrefOf } from "../../router.js";
import { useStore } from "../../store.js";
import { t, tParts } from "../../texts.js";
import { Button, Field, html, inWords, Notice, toast, useEffect, useState } from "../../ui.js";
import { comingOf, isLoading } from "../states.js";

const KEY = "ichat.client_key";
const HOUR_S = 3600;

/** Return the client's key that was given in this tab, or "". */
export const clientKey = () => sessionStorage.getItem(KEY) ?? "";

/** @param {string} key */
function setClientKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Return the names that can be asked for, sorted: models and the names that stand for models. */
export function useNames() {
  const models = useStore((all) => all.models);
  const aliases = useStore((all) => all.aliases);
  return [...new Set([...models.map((one) => one.id), ...aliases.map((one) => one.name)])].sort();
}

/** Return a function that returns whether a model, or a name that stands for models, can answer now. */
export function useIsReady() {
  const models = useStore((all) => all.models);
  const targetsOf = useTargets();
  return (/** @type {string} */ name) =>
    targetsOf(name).some((target) => models.some((one) => one.id === target && one.workers > 0));
}

/** Return a function that returns the models that answer a name. */
export function useTargets() {
  const aliases = useStore((all) => all.aliases);
  return (/** @type {string} */ name) => {
    const targets = aliases.find((one) => one.name === name)?.targets ?? [];
    return targets.length ? targets.map((one) => one.model) : [name];
  };
}

/**
 * A choice among the models; `value` is the chosen model, or "" for none.
 *
 * @param {{ value: string, onChange: (model: string) => void, label?: string }} props
 */
export function ModelChoice({ value, onChange, label = t("Model") }) {
  const names = useNames();
  const models = useStore((all) => all.models);
  const workers = useStore((all) => all.workers);
  const stateOf = (/** @type {string} */ name) => {
    const model = models.find((one) => one.id === name);
    if (!model) return names.includes(name) ? "" : ` (${t("gone")})`;
    if (model.workers) return "";
    const coming = comingOf(workers, name);
    if (coming) return isLoading(coming) ? ` (${t("loading")})` : ` (${inWords(coming.state)})`;
    return model.loaded === null ? ` (${t("not ready")})` : ` (${t("not loaded")})`;
  };
  const shown = value && !names.includes(value) ? [value, ...names] : names;
  return html`<select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${!value && html`<option value="">${t("No model")}</option>`}
    ${shown.map((name) => html`<option key=${name} value=${name}>${name}${stateOf(name)}</option>`)}</select>`;
}

/** Asks for a client's key if clients need a key, or makes a key that lasts an hour. */
export function Access() {
  const version = useStore((all) => all.keysVersion);
  const [isNeeded, setNeeded] = useState(false);
  const [key, setKey] = useState(clientKey());
  const [failure, setFailure] = useState("");
  useEffect(() => {
    api.get("/v1/admin/keys").then(
      (answer) => {
        setNeeded(answer.keys_needed);
      },
      (error) => setFailure(error.message),
    );
  }, [version]);
  const take = (/** @type {string} */ text) => {
    setClientKey(asKey(text));
    setKey(asKey(text));
  };
  const make = async () => {
    const name = `console-${Date.now().toString(36)}`;
    const made = await api.post("/v1/admin/keys", { name, expires_in_s: HOUR_S });
    take(made.key);
    toast(t("The key {name} is made, and used here. It expires in an hour.", { name }));
  };
  if (failure) return html`<${Notice}>${failure}<//>`;
  if (!isNeeded) return null;
  return html`<div class="card access"><${Field} label=${t("Client's key")}
    hint=${tParts(
      "Requests for models need one here. It stays in this tab; what it asks counts towards its limits ({keys}).",
      { keys: html`<a href=${hrefOf("keys")}>${t("Keys")}</a>` },
    )}>
    <input type="password" autocomplete="off" spellcheck=${false} value=${key}
      onInput=${(event) => take(event.target.value)} /><//>
    ${
      key
        ? html`<${Button} tone="quiet" onClick=${() => take("")}>${t("Forget it")}<//>`
        : html`<${Button} icon="keys" onClick=${make}>${t("Make one for an hour")}<//>`
    }</div>`;
}
