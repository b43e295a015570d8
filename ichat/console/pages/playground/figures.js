// The figures of an answer, its worker, and the same request as a program.

import { BASE } from "../../api.js";
import { hrefOf } from "../../router.js";
import { useStore } from "../../store.js";
import { t, tParts } from "../../texts.js";
import {
  Button,
  Code,
  Copy,
  Dialog,
  duration,
  Facts,
  html,
  Notice,
  number,
  percent,
  Tabs,
  useState,
  useTick,
} from "../../ui.js";
import { FoldedPhases, LoadBar } from "../load_story.js";
import { Explained } from "../models.js";
import { comingOf, expectedOf, isLoading, isWords, loadWords, stateWords } from "../states.js";
import { clientKey, useTargets } from "./access.js";
import { endOf, figuresOf, isOpen, partsOf } from "./reply.js";
import { curlOf, pythonOf } from "./request.js";

/** @import { Worker } from "../../store.js" */
/** @import { ComponentChildren } from "preact" */
/** @import { Reply } from "./reply.js" */
/** @import { Body } from "./request.js" */

/**
 * Return how much of the prompt the gateway believed to be in the worker's cache, of a text like `6144/8190`.
 *
 * @param {string | undefined} text
 */
function cachedShare(text) {
  const [matched, length] = (text ?? "").split("/").map(Number);
  return length ? t("{share} of its beginning (by the gateway's memory)", { share: percent(matched / length) }) : null;
}

/**
 * A line of figures below an answer; what stands there is explained by `title`s.
 *
 * @param {{ reply: Reply }} props
 */
export function Figures({ reply }) {
  const found = figuresOf(reply, performance.now());
  const about = found.isEstimate ? "≈ " : "";
  const parts = [
    [
      found.tokens_s !== null && `${about}${t("{count} tokens/s", { count: number(found.tokens_s) })}`,
      t("After the first token"),
    ],
    [
      found.first_s !== null && t("first token {time}", { time: duration(found.first_s) }),
      t("From the request to the first token"),
    ],
    [
      found.out !== null && `${about}${t("{count} tokens", { count: number(found.out) })}`,
      found.isEstimate
        ? t("Events of the stream: the engine has not reported how many tokens they are")
        : t("As the engine counts them"),
    ],
    [
      found.in !== null &&
        (found.cached
          ? t("{count} in the prompt, {cached} cached", { count: number(found.in), cached: number(found.cached) })
          : t("{count} in the prompt", { count: number(found.in) })),
      t("Tokens of the request"),
    ],
    [t("{time} in all", { time: duration(found.total_s) }), t("From the request to the end of the answer")],
  ];
  return html`<span class="play-figures num">${parts
    .filter(([text]) => text)
    .map(([text, title]) => html`<span key=${title} title=${title}>${text}</span>`)}
    ${
      reply.told.worker &&
      html`<a href=${workerPage(reply.told.worker)}
      title=${t("Who has answered")}>${reply.told.worker}</a>`
    }
  </span>`;
}

/** @param {string} worker */
const workerPage = (worker) => (worker.startsWith("external:") ? hrefOf("models") : hrefOf("workers", [worker]));

/**
 * The reason why an answer is not there yet: during a load of its model, the load's progress.
 *
 * @param {{ reply: Reply, model: string }} props
 */
export function Waiting({ reply, model }) {
  useTick();
  const models = useStore((all) => all.models);
  const workers = useStore((all) => all.workers);
  const targetsOf = useTargets();
  const waited = `${Math.floor(figuresOf(reply, performance.now()).total_s)} s`;
  const line = (/** @type {string} */ text) => html`<span class="hint" role="status">${text} · ${waited}</span>`;
  const [thoughts, text] = partsOf(reply);
  if (reply.firstAt !== null) return line(thoughts && !text ? t("Thinking") : t("Answering"));
  if (reply.told.worker) return line(t("The model reads the prompt"));
  const targets = targetsOf(model);
  if (models.some((one) => one.workers > 0 && targets.includes(one.id))) return line(t("Waiting for a worker"));
  const coming = targets.map((one) => comingOf(workers, one)).find(Boolean);
  if (coming && isLoading(coming)) return html`<${Loading} worker=${coming} model=${model} waited=${waited} />`;
  if (reply.note) return line(`L${reply.note.slice(1)}`);
  if (coming) return line([isWords(coming), stateWords(coming)].filter(Boolean).join(t(", ")));
  const isCold = models.some((one) => one.loaded === false && targets.includes(one.id));
  return line(
    isCold ? t("{model} is not loaded yet: its worker is about to be started", { model }) : t("Waiting for a worker"),
  );
}

/** @param {{ worker: Worker, model: string, waited: string }} props */
function Loading({ worker, model, waited }) {
  const expected = expectedOf(worker);
  const usual = expected === null ? "" : ` ${t("(the last loads took {time})", { time: duration(expected) })}`;
  return html`<div class="load-now wait" role="status"><span class="hint">${t("{model} is being loaded:", { model })}
    ${" "}${loadWords(worker)}${usual} · ${waited}
    ${" "}<a href=${hrefOf("workers", [worker.worker_id], { tab: "log" })}>${t("Log")}</a></span>
    <${LoadBar} worker=${worker} /><${FoldedPhases} worker=${worker} /></div>`;
}

/**
 * Why an answer is as it is: an error in its words, or that it was cut off.
 *
 * @param {{ reply: Reply, model: string }} props
 */
export function Outcome({ reply, model }) {
  const { error } = reply;
  if (isOpen(reply)) return html`<${Waiting} reply=${reply} model=${model} />`;
  if (!error) return html`${endOf(reply) && html`<p class="hint">${endOf(reply)}</p>`}`;
  const needsKey = error.status === 401 || error.status === 403;
  return html`<${Notice} tone="bad" title=${error.status ? `${error.status} ${error.code || ""}` : ""}>
    ${error.message}${needsKey && ` ${t("A client's key is given at the top of this page.")}`}<//>`;
}

const UNNAMED = tParts("The response did not name its worker ({setting} in {table}).", {
  setting: html`<code>worker_header</code>`,
  table: html`<code>[server_settings]</code>`,
});

/**
 * The worker of an answer, and why: by the response's headers, and where the same request would go now.
 *
 * @param {{ reply: Reply, body: Body, onClose: () => void }} props
 */
export function Who({ reply, body, onClose }) {
  const [isAsking, setAsking] = useState(false);
  const { told } = reply;
  if (isAsking) return html`<${Explained} model=${body.model} body=${body} onClose=${onClose} />`;
  const facts = [
    [t("Asked for"), body.model],
    [t("Model that answered"), told.model],
    [t("Worker or route"), told.worker],
    [
      t("Asked before it answered"),
      Number(told.attempts) > 1 ? t("{count} workers or models", { count: told.attempts }) : null,
    ],
    [t("Prompt in its cache"), cachedShare(told.prefix)],
    [
      t("Time within the gateway"),
      told.overhead_ms && t("{time} ms until the worker was asked", { time: told.overhead_ms }),
    ],
    [t("Parameters left out"), told.dropped],
    [t("Request"), told.request && html`<a href=${hrefOf("requests", [told.request])}>${told.request}</a>`],
    [t("Why it ended"), reply.finish],
  ];
  return html`<${Dialog} title=${t("Details")} onClose=${onClose} actions=${html`
    <${Button} onClick=${() => void setAsking(true)}>${t("Route of this request")}<//><span class="spring"></span>
    <button type="button" class="button" onClick=${onClose}>${t("Close")}</button>`}>
    <${Facts} facts=${facts} />
    ${
      !told.worker && html`<p class="hint">${reply.state === "failed" ? t("No worker has answered.") : UNNAMED}</p>`
    }<//>`;
}

/**
 * A request as a command and as a program.
 *
 * @param {{ path: string, body: Body, onClose: () => void }} props
 */
export function AsProgram({ path, body, onClose }) {
  const hasKey = Boolean(clientKey());
  /** @type {Record<string, string>} */
  const texts = { curl: curlOf(BASE, path, body, hasKey), python: pythonOf(BASE, path, body, hasKey) };
  const [current, setCurrent] = useState("curl");
  const tabs = [{ name: "curl", title: "curl" }, ...(texts.python ? [{ name: "python", title: "Python" }] : [])];
  return html`<${Dialog} wide title=${t("The same from a program")} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>${t("Close")}</button>`}>
    <${Tabs} label=${t("Language")} tabs=${tabs} current=${current} onSelect=${setCurrent} />
    <${Code} text=${texts[current]} />
    ${hasKey && html`<p class="hint">${t("The key is read from the variable ICHAT_KEY.")}</p>`}<//>`;
}

/**
 * The buttons below an answer: copy its text, the program, its worker. `more` are others.
 *
 * @param {{ reply: Reply, text: string, body: Body, path: string, more?: ComponentChildren }} props
 */
export function ReplyButtons({ reply, text, body, path, more }) {
  const [open, setOpen] = useState("");
  const close = () => setOpen("");
  return html`<span class="reply-buttons">
    ${text && html`<${Copy} text=${text} />`}
    ${more}
    <${Button} small tone="quiet" onClick=${() => setOpen("program")}>${t("Code")}<//>
    <${Button} small tone="quiet" onClick=${() => setOpen("who")}>${t("Details")}<//>
    ${open === "program" && html`<${AsProgram} path=${path} body=${body} onClose=${close} />`}
    ${open === "who" && html`<${Who} reply=${reply} body=${body} onClose=${close} />`}</span>`;
}
