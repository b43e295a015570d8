// Connect a client: what to write into known clients for a name, with this gateway's address and a fresh key.

import { api, BASE } from "../api.js";
import { hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import { Button, Code, Dialog, Field, html, Notice, Tabs, useEffect, useState } from "../ui.js";
import { isLocal, isPattern, KEY_TO_COME, NO_KEY, recipesFor } from "./connect/clients.js";
import { EXPIRIES } from "./keys.js";

/** @param {{ model: string, onMade: (secret: string) => void }} props */
function FreshKey({ model, onMade }) {
  const [name, setName] = useState(() => `client-${Date.now().toString(36)}`);
  const [expires, setExpires] = useState("2592000");
  const [isBound, setBound] = useState(!isPattern(model));
  const make = async () => {
    const body = { name: name.trim(), ...(expires && { expires_in_s: Number(expires) }) };
    const made = await api.post("/v1/admin/keys", { ...body, ...(isBound && { models: [model] }) });
    onMade(made.key);
  };
  return html`<div class="form">
    <${Field} label=${t("Name of the key")} hint=${tParts("As it stands in usage and limits ({keys}).", {
      keys: html`<a href=${hrefOf("keys")}>${t("Keys")}</a>`,
    })}><input type="text" autocomplete="off" spellcheck=${false} value=${name}
        onInput=${(event) => setName(event.target.value)} /><//>
    <${Field} label=${t("Expires")}><select value=${expires} onChange=${(event) => setExpires(event.target.value)}>
      ${EXPIRIES.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select><//>
    <div class="wide actions"><${Button} tone="primary" icon="keys" disabled=${!name.trim()} onClick=${make}>
        ${t("Create a key")}<//>
      ${
        !isPattern(model) &&
        html`<label class="check"><input type="checkbox" checked=${isBound}
        onChange=${(event) => setBound(event.target.checked)} /> ${t("only for this name")}</label>`
      }</div>
  </div>`;
}

/**
 * The dialog for a name: a tab for each client, and a key that is made here.
 *
 * @param {{ model: string, onClose: () => void }} props
 */
export function Connect({ model, onClose }) {
  const version = useStore((all) => all.keysVersion);
  const [isNeeded, setNeeded] = useState(/** @type {boolean | null} */ (null));
  const [failure, setFailure] = useState("");
  const [secret, setSecret] = useState("");
  const [client, setClient] = useState("openai");
  useEffect(() => {
    api.get("/v1/admin/keys").then(
      (answer) => setNeeded(answer.keys_needed),
      (error) => setFailure(error.message),
    );
  }, [version]);
  const key = secret || (isNeeded === false ? NO_KEY : KEY_TO_COME);
  const recipes = recipesFor({ base: BASE, model, key });
  const recipe = recipes.find((one) => one.name === client) ?? recipes[0];
  return html`<${Dialog} wide stays=${Boolean(secret)} title=${t("Connect a client to {model}", { model })} onClose=${
    onClose
  }
      actions=${html`<button type="button" class="button" onClick=${onClose}>${
        secret ? t("Done") : t("Close")
      }</button>`}>
    <${Tabs} label=${t("Client")} tabs=${recipes} current=${recipe.name} onSelect=${setClient} />
    ${
      isPattern(model) &&
      html`<p class="hint">
      ${t("Every name that fits {model} is answered: write it in place of NAME.", { model })}
    </p>`
    }
    <p class="hint">${t("{where}:", { where: recipe.where })}</p>
    <div data-recipe=${recipe.name}><${Code} text=${recipe.text} /></div>
    ${recipe.notes.map((note) => html`<p key=${note} class="hint">${note}</p>`)}
    ${isLocal(BASE) && html`<p class="hint">${t("On another machine, write this machine's name in the address.")}</p>`}
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    ${
      isNeeded === false && !secret && html`<p class="hint">${t("Clients need no key here: any text is accepted.")}</p>`
    }
    ${isNeeded && !secret && html`<${FreshKey} model=${model} onMade=${setSecret} />`}
    ${
      secret &&
      html`<${Notice} tone="busy">${t("The key is in the texts above. It is shown only here: copy it now.")}<//>`
    }
    <//>`;
}
