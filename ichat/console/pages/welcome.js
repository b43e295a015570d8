// The page without workers: nothing runs yet, and how to change that.

import { api, BASE } from "../api.js";
import { go, hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import { Button, Card, Code, Field, html, Notice, Page, toast, useEffect, useState } from "../ui.js";
import { useCheck } from "./launch/check.js";
import { bodyOf, EMPTY, nameOf, tomlOf } from "./launch/draft.js";
import { addressOf, interpreterOf, joinCommand, joinSettings } from "./welcome/join.js";

/** @import { Machine } from "../store.js" */
/** @import { FieldEvent } from "../ui/html.js" */
/** @import { Draft } from "./launch/draft.js" */
/** @import { Engine, Settings } from "./welcome/join.js" */

const EXAMPLE = "Qwen/Qwen3-0.6B";

/** The page of a gateway without models. */
export function Welcome() {
  const [path, setPath] = useState("");
  const [backend, setBackend] = useState("");
  const [engines, setEngines] = useState(/** @type {Api.Engines["engines"]} */ ([]));
  const [settings, setSettings] = useState(/** @type {Api.Config["settings"] | null} */ (null));
  const machine = useStore((all) => all.machines.find((one) => one.has_gateway));
  useEffect(() => {
    const failed = (/** @type {Error} */ error) => toast(error.message, "bad");
    api.get("/v1/admin/engines").then((answer) => setEngines(answer.engines), failed);
    api.get("/v1/admin/config").then((answer) => setSettings(answer.settings), failed);
  }, []);
  const installed = engines.filter((one) => interpreterOf(one, settings ?? {}) !== null);
  const chosen = backend || (installed[0] ?? engines[0])?.name || EMPTY.backend;
  const draft = { ...EMPTY, model_path: path.trim() || EXAMPLE, backend: chosen };
  const sample = { ...draft, gpu_ids: machine?.gpus?.length ? [0] : null };
  const engine = engines.find((one) => one.name === chosen);
  return html`<${Page} title=${t("Welcome")} lead=${t("The gateway runs, and no model does yet.")}>
    <div class="grid two">
      <div class="pile">
        <${Start} path=${path} setPath=${setPath} draft=${draft} backend=${chosen} setBackend=${setBackend}
          engines=${installed.length ? installed : engines} />
        <${Card} title=${t("Or write it into ichat.toml")}><div class="pile">
          <p class="hint">${t("The gateway reads its file again as soon as it changes.")}</p>
          <${Code} text=${tomlOf(bodyOf(sample, new Map()))} /></div><//>
        <${Card} title=${t("Then ask it")}><div class="pile">
          <p class="hint">${tParts("Or chat with it in the {playground}.", {
            playground: html`<a href=${hrefOf("playground")}>${t("playground")}</a>`,
          })}</p>
          <${Code} text=${askOf(nameOf(draft))} /></div><//>
      </div>
      <div class="pile">
        ${
          settings &&
          html`<${Join} settings=${settings} machine=${machine} engine=${engine}
          model=${draft.model_path} />`
        }
      </div>
    </div>
    <${Notice} tone="busy">${tParts(
      "Something does not start? {command} examines this machine, its engines and its " +
        "configuration, and says what to type.",
      { command: html`<code>./ichat.pyz doctor</code>` },
    )}<//><//>`;
}

/** @param {string} name */
const askOf = (name) => `curl ${BASE}/v1/chat/completions \\\n  -H 'content-type: application/json' \\
  -d '{"model": ${JSON.stringify(name).replaceAll("'", "'\\''")},
    "messages": [{"role": "user", "content": "Hello!"}]}'`;

/**
 * @param {{ path: string, setPath: (path: string) => void, draft: Draft, backend: string,
 *   setBackend: (name: string) => void, engines: Api.Engines["engines"] }} props
 */
function Start({ path, setPath, draft, backend, setBackend, engines }) {
  const body = path.trim() ? bodyOf(draft, new Map()) : null;
  const answer = useCheck(body);
  const [failure, setFailure] = useState("");
  const launch = async () => {
    setFailure("");
    try {
      const { worker_id: id } = await api.post("/v1/admin/workers/launch", body);
      go("workers", [id]);
    } catch (error) {
      setFailure(error.message);
    }
  };
  const objections = (answer && !answer.isOld && answer.objections) || [];
  const type = (/** @type {FieldEvent} */ event) => {
    setFailure("");
    setPath(event.target.value);
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && body && !objections.length) launch();
  };
  const more = hrefOf("launch", [], { model_path: path.trim(), backend });
  return html`<${Card} title=${t("Start a model")}><div class="pile">
    <${Field} label=${t("Model")} hint=${t("A directory on the gateway's machine, or a name on the model hub.")}>
      <input type="text" class="mono" spellcheck=${false} placeholder=${EXAMPLE} value=${path} onInput=${type}
        onKeyDown=${press} /><//>
    ${
      engines.length > 0 &&
      html`<${Field} label=${t("Engine")}><select value=${backend}
      onChange=${(event) => setBackend(event.target.value)}>${engines.map(
        ({ name, version }) => html`
      <option key=${name} value=${name}>${name}${version ? ` ${version}` : ""}</option>`,
      )}</select><//>`
    }
    ${objections.map((text) => html`<${Notice} key=${text}>${text}<//>`)}
    ${failure && !objections.includes(failure) && html`<${Notice} tone="bad">${failure}<//>`}
    <div class="actions"><${Button} tone="primary" icon="play" disabled=${!body || objections.length > 0}
      onClick=${launch}>${t("Launch")}<//>
      <a class="button quiet" href=${more}>${t("All settings")}</a></div></div><//>`;
}

/** @param {{ settings: Settings, machine?: Machine, engine?: Engine, model: string }} props */
function Join({ settings, machine, engine, model }) {
  const missing = joinSettings(settings);
  const variable = settings.security.join_token_env ?? "ICHAT_JOIN_TOKEN";
  const address = addressOf(settings, machine, BASE);
  const python = interpreterOf(engine, settings);
  return html`<${Card} title=${t("Or let a worker of another machine join")}><div class="pile">
    ${
      missing &&
      html`<p class="hint">${missing.why}${" "}
      ${tParts("Write this into ichat.toml, and start the gateway anew with a long random word in " + "{variable}:", {
        variable: html`<code>${variable}</code>`,
      })}</p><${Code} text=${missing.toml} />`
    }
    ${
      missing &&
      !settings.security.keys.length &&
      html`<p class="hint">${tParts("Create {keys} first: without any, whoever reaches the port may use the models.", {
        keys: html`<a href=${hrefOf("keys")}>${t("keys")}</a>`,
      })}</p>`
    }
    <p class="hint">${startWords(python, engine)}</p>
    <${Code} text=${joinCommand(engine, python, model, address)} /></div><//>`;
}

/**
 * Return how a worker is started on another machine.
 *
 * @param {string | null} python
 * @param {Engine | undefined} engine
 */
function startWords(python, engine) {
  const variable = html`<code>ICHAT_JOIN_TOKEN</code>`;
  if (python === null)
    return tParts(
      "Start it there with the interpreter that has its engine ({command} makes one), and with " +
        "the same word in {variable}:",
      { command: html`<code>./build engine ${engine?.name ?? "vllm"}</code>`, variable },
    );
  return tParts(
    "Start it there with the interpreter that has its engine (on the gateway's machine it is " +
      "{python}), and with the same word in {variable}:",
    { python: html`<code>${python}</code>`, variable },
  );
}
