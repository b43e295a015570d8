// Actions on workers and models, as buttons that ask first where something ends.

import { api } from "../api.js";
import { t } from "../texts.js";
import { Button, confirm, Dialog, duration, Field, html, Notice, toast, useState } from "../ui.js";
import { copiesIn } from "./launch/draft.js";

/** @import { Worker } from "../store.js" */

/** @typedef {"load" | "unload" | "sleep" | "wake"} Verb */

/** @type {Record<Verb, { title: string, done: (holes: Record<string, string>) => string, on: string[] }>} */
const VERBS = {
  load: { title: t("Load"), done: (holes) => t("{model} is ready after {seconds}.", holes), on: ["cold", "asleep"] },
  unload: {
    title: t("Unload"),
    done: (holes) => t("{model} is unloaded after {seconds}.", holes),
    on: ["ready", "asleep", "loading", "unhealthy"],
  },
  sleep: { title: t("Sleep"), done: (holes) => t("{model} is asleep after {seconds}.", holes), on: ["ready"] },
  wake: { title: t("Wake"), done: (holes) => t("{model} is awake after {seconds}.", holes), on: ["asleep"] },
};

/**
 * Load, unload, put to sleep or wake the model of an on-demand worker; report the duration.
 *
 * @param {Verb} verb
 * @param {string} model
 */
export async function change(verb, model) {
  if (verb === "unload") {
    const text = t(
      "Its process ends once the requests that it has are answered. It is loaded again when it is wanted.",
    );
    if (!(await confirm({ title: t("Unload {model}?", { model }), text, action: t("Unload"), danger: true }))) return;
  }
  const { seconds } = await api.post(`/v1/admin/models/${verb}`, { model });
  toast(VERBS[verb].done({ model, seconds: duration(seconds) }));
}

/**
 * The buttons that make sense for a model in this state.
 *
 * @param {{ model: string, state: string, canSleep?: boolean, small?: boolean }} props
 */
export function ModelButtons({ model, state, canSleep, small }) {
  const verbs = /** @type {Verb[]} */ (Object.keys(VERBS)).filter((verb) => VERBS[verb].on.includes(state));
  const possible = verbs
    .filter((verb) => verb !== "sleep" || canSleep)
    .filter((verb) => verb !== "load" || state === "cold");
  return html`${possible.map(
    (verb) => html`<${Button} key=${verb} small=${small} tone=${verb === "unload" ? "danger" : ""}
    aria-label=${`${VERBS[verb].title} ${model}`} onClick=${() => change(verb, model)}>${VERBS[verb].title}<//>`,
  )}`;
}

/**
 * The dialog for the number of a model's replicas.
 *
 * @param {{ model: string, wanted: number, onClose: () => void }} props
 */
export function CopiesDialog({ model, wanted, onClose }) {
  const [text, setText] = useState(String(wanted));
  const [failure, setFailure] = useState("");
  const [isBusy, setBusy] = useState(false);
  const scale = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const name = model.split("/").map(encodeURIComponent).join("/");
      const path = /** @type {const} */ (`/v1/admin/models/${name}/replicas`);
      const { min, max, started, ending } = await api.post(path, copiesIn(text));
      const done = [
        started.length && t("{started} starts", { started: started.join(", ") }),
        ending.length && t("{ending} ends", { ending: ending.join(", ") }),
      ];
      toast(
        `${model}: ${
          done.filter(Boolean).join("; ") ||
          (min === max ? t("{min} replicas", { min }) : t("{min} to {max} replicas", { min, max }))
        }.`,
      );
      onClose();
    } catch (error) {
      setFailure(error.message);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${t("Replicas of {model}", { model })} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>${t("Cancel")}</button>
    <button type="submit" form="copies" class="button primary" disabled=${isBusy}>${t("Change")}</button>`}>
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    <form id="copies" class="form" onSubmit=${scale}>
      <${Field} wide label=${t("Replicas")} hint=${t(
        "3, or a range such as 1-4: then the load decides. A replica that ends answers its " +
          "requests first. A reload of another number ends this change.",
      )}>
        <input type="text" required value=${text} onInput=${(event) => setText(event.target.value)} /><//>
    </form><//>`;
}

/**
 * Stop a worker once the operator has agreed; return whether it was stopped.
 *
 * @param {Worker & { origin?: string }} worker
 */
export async function stop(worker) {
  const text =
    worker.origin === "configuration"
      ? t("The requests that it has may end first. It stays in the list, and can be started again there.")
      : t("The requests that it has may end first. The gateway forgets it.");
  if (
    !(await confirm({
      title: t("Stop {id}?", { id: worker.worker_id }),
      text,
      action: t("Stop"),
      danger: true,
    }))
  )
    return false;
  const { in_config: isOurs, stays } = await api.del(pathOf(worker));
  const returns = isOurs && !stays;
  toast(
    returns
      ? t("{id} is stopped; the next reload or start of the gateway starts it again.", { id: worker.worker_id })
      : t("{id} is stopped.", { id: worker.worker_id }),
  );
  return !stays;
}

/** @param {Worker} worker */
const pathOf = (worker) =>
  /** @type {"/v1/admin/workers/{id}"} */ (`/v1/admin/workers/${encodeURIComponent(worker.worker_id)}`);

/**
 * The buttons for a worker that the gateway has started, in its state; `onGone` is called when it is forgotten.
 *
 * @param {{ worker: Worker & { origin?: string }, onGone: () => void }} props
 */
export function WorkerButtons({ worker, onGone }) {
  const { state, on_demand: isOnDemand, worker_id: id } = worker;
  const ask = async (/** @type {"start" | "restart" | "drain" | "resume"} */ verb, /** @type {string} */ done) => {
    await api.post(`/v1/admin/workers/${encodeURIComponent(id)}/${verb}`);
    toast(done);
  };
  const restart = async () => {
    const text = t("Its process ends once the requests that it has are answered, and another is started.");
    if (await confirm({ title: t("Restart {id}?", { id }), text, action: t("Restart"), danger: true }))
      await ask("restart", t("{id} is being restarted.", { id }));
  };
  const end = async () => {
    if (await stop(worker)) onGone();
  };
  if (state === "stopped")
    return html`<${Button} tone="primary" onClick=${() => ask("start", t("{id} is being started.", { id }))}>${t(
      "Start",
    )}<//>`;
  const isDown = state === "failed" || state === "restarting";
  return html`${
    isDown &&
    html`<${Button} tone="primary" onClick=${() => ask("start", t("{id} is being started.", { id }))}>${t("Start")}<//>`
  }
    ${!isDown && state !== "cold" && html`<${Button} onClick=${restart}>${t("Restart")}<//>`}
    ${
      !isOnDemand &&
      (state === "draining"
        ? html`<${Button} onClick=${() => ask("resume", t("{id} gets requests again.", { id }))}>${t("Resume")}<//>`
        : state === "ready" &&
          html`<${Button} onClick=${() => ask("drain", t("{id} gets no new requests.", { id }))}>${t("Drain")}<//>`)
    }
    <${Button} tone="danger" onClick=${end}>${t("Stop")}<//>`;
}
