// Launch: a form for a new worker, with the engine's arguments explained and what would keep it from starting.

import { api } from "../api.js";
import { go } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import {
  Button,
  bytes,
  Card,
  Code,
  Field,
  html,
  inWords,
  Notice,
  Page,
  toast,
  useCallback,
  useEffect,
  useKept,
  useMemo,
  useMounted,
  useState,
} from "../ui.js";
import { Arguments } from "./launch/arguments.js";
import { useCheck } from "./launch/check.js";
import { bodyOf, EMPTY, nameOf, tomlOf } from "./launch/draft.js";

/** @import { Route } from "../router.js" */
/** @import { FieldEvent } from "../ui/html.js" */
/** @import { Check as Answer } from "./launch/check.js" */
/** @import { Draft, TextField } from "./launch/draft.js" */

/**
 * @typedef {{ flags: Map<string, Api.EngineFlag>, isUnderWay: boolean, error: Error | null }} Flags
 * @typedef {{ draft: Draft, set: (change: Partial<Draft>) => void }} Form
 */

/**
 * The flags of an engine by their keys, and how the question for them stands.
 *
 * @param {string} backend
 */
function useFlags(backend) {
  const [answer, setAnswer] = useState(/** @type {Flags} */ ({ flags: new Map(), isUnderWay: true, error: null }));
  useEffect(() => {
    const control = new AbortController();
    setAnswer({ flags: new Map(), isUnderWay: true, error: null });
    api.get(`/v1/admin/engines/${encodeURIComponent(backend)}/flags`, { signal: control.signal }).then(
      ({ flags }) => {
        setAnswer({ flags: new Map(flags.map((flag) => [flag.key, flag])), isUnderWay: false, error: null });
      },
      (error) => {
        if (error.name !== "AbortError") setAnswer({ flags: new Map(), isUnderWay: false, error });
      },
    );
    return () => control.abort();
  }, [backend]);
  return answer;
}

/** @param {Form} props */
function Gpus({ draft, set }) {
  const machines = useStore((all) => all.machines);
  const machine = machines.find((one) => one.has_gateway);
  const gpus = machine?.gpus ?? [];
  if (!gpus.length) return html`<p class="hint">${t("The gateway sees no GPU on its machine.")}</p>`;
  const turn = (/** @type {number} */ index) => {
    const before = draft.gpu_ids ?? [];
    const after = before.includes(index) ? before.filter((one) => one !== index) : [...before, index];
    after.sort((a, b) => a - b);
    set({ gpu_ids: after });
  };
  return html`<fieldset class="gpus"><legend class="field-label">${t("GPUs")}</legend>
    <label class="check"><input type="checkbox" checked=${draft.gpu_ids === null}
      onChange=${(event) => set({ gpu_ids: event.target.checked ? null : [] })} /> ${t("All of them")}</label>
    ${gpus.map(
      (gpu) => html`<label key=${gpu.index} class="check"><input type="checkbox"
      disabled=${draft.gpu_ids === null} checked=${draft.gpu_ids?.includes(gpu.index) ?? true}
      onChange=${() => turn(gpu.index)} /> <b>${gpu.index}</b> ${gpu.name}
      <span class="hint">${
        gpu.failure || t("{free} free of {total}", { free: bytes(free(gpu)), total: bytes(gpu.memory_total_bytes) })
      }</span>
    </label>`,
    )}
    ${
      draft.gpu_ids?.length === 0 && html`<span class="hint">${t("None: the worker will see no GPU.")}</span>`
    }</fieldset>`;
}

/** @param {NonNullable<Api.Machine["gpus"]>[number]} gpu */
const free = ({ memory_total_bytes: total, memory_used_bytes: used }) =>
  total === null || used === null ? null : total - used;

/** @param {Form & { engines: Api.Engines["engines"] }} props */
function Model({ draft, set, engines }) {
  const engine = engines.find((one) => one.name === draft.backend);
  const field = (/** @type {TextField} */ name) => ({
    value: draft[name],
    onInput: (/** @type {FieldEvent} */ event) => set({ [name]: event.target.value }),
  });
  const names = engines.length ? engines.map((one) => one.name) : [draft.backend];
  return html`<${Card} title=${t("Model")}><div class="form">
    <${Field} label=${t("Engine")} hint=${engine && `${engine.version ?? t("version not known")} · ${engine.python}`}>
      <select value=${draft.backend} onChange=${(event) => set({ backend: event.target.value })}>
        ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select><//>
    <${Field} label=${t("Model")} hint=${t("A directory on the gateway's machine, or a name on the model hub.")}>
      <input type="text" class="mono" required spellcheck=${false} placeholder="Qwen/Qwen3-0.6B"
        ...${field("model_path")} /><//>
    <${Field} label=${t("Name")} hint=${t("What requests call it.")}>
      <input type="text" class="mono" spellcheck=${false} placeholder=${nameOf(draft)} ...${field("model_name")} /><//>
    <${Field} label=${t("Load")}><select value=${draft.load} onChange=${(event) => set({ load: event.target.value })}>
      <option value="start">${t("At once, and stay")}</option><option value="on_demand">${t(
        "When it is wanted",
      )}</option></select><//>
    <${Field} label=${t("Replicas")} hint=${t("3, or a range such as 1-4: the load decides. Empty: a single worker.")}>
      <input type="text" placeholder="1" ...${field("replicas")} /><//>
    <${Field} label=${t("Number of GPUs")} hint=${t("2, a share such as 0.5, or auto: the gateway chooses them.")}>
      <input type="text" placeholder=${t("as below")} list="numbers-of-gpus" ...${field("gpus")} /><//>
    <datalist id="numbers-of-gpus">${["auto", "1", "2", "0.5"].map((one) => html`<option key=${one} value=${one} />`)}
    </datalist>
    ${!draft.gpus.trim() && html`<div class="wide"><${Gpus} draft=${draft} set=${set} /></div>`}
  </div><//>`;
}

/** @param {Form} props */
function More({ draft, set }) {
  const field = (/** @type {TextField} */ name) => ({
    value: draft[name],
    onInput: (/** @type {FieldEvent} */ event) => set({ [name]: event.target.value }),
  });
  const choice = (
    /** @type {TextField} */ name,
    /** @type {[string, string][]} */ words,
  ) => html`<select value=${draft[name]}
    onChange=${(event) => set({ [name]: event.target.value })}>
    ${words.map(([word, text]) => html`<option key=${word} value=${word}>${text}</option>`)}</select>`;
  return html`<details class="card"><summary><h2>${t("Advanced")}</h2></summary><div class="form">
    <${Field} label=${t("Port")} hint=${t("0: any free port. Empty: a unix socket is enough.")}>
      <input type="text" inputmode="numeric" ...${field("port")} /><//>
    <${Field} label=${t("Host")} hint=${t("Where it listens, if it has a port.")}>
      <input type="text" placeholder="127.0.0.1" ...${field("host")} /><//>
    <${Field} label=${t("Max concurrency")} hint=${t("Empty: routing.max_in_flight.")}>
      <input type="text" inputmode="numeric" ...${field("max_in_flight")} /><//>
    <${Field} label=${t("Interpreter")} hint=${t("Empty: the engine's own.")}>
      <input type="text" class="mono" spellcheck=${false} ...${field("python")} /><//>
    <${Field} label=${t("When the gateway ends")}>
      ${choice("on_gateway_exit", [
        ["stop", t("The worker ends, too")],
        ["keep", t("It goes on")],
      ])}<//>
    ${
      draft.load === "on_demand" &&
      html`<${Field} label=${t("When it is not needed")}>
      ${choice("when_idle", [
        ["stop", t("It ends")],
        ["sleep", t("It sleeps where its engine can")],
      ])}<//>
      <${Field} label=${t("Unload after seconds without a request")} hint=${t("Empty: when its room is needed.")}>
        <input type="text" inputmode="decimal" ...${field("idle_s")} /><//>`
    }
    <label class="check"><input type="checkbox" checked=${draft.share_gpus}
      onChange=${(event) => set({ share_gpus: event.target.checked })} /> ${t(
        "It may share GPUs with other workers",
      )}</label>
    <${Field} wide label=${t("Environment")} hint=${t("One variable a line.")}>
      <textarea rows="2" class="mono" spellcheck=${false} placeholder="NAME=value" ...${field("env")}></textarea><//>
  </div></details>`;
}

/**
 * @param {{ body: (Api.Launch & Record<string, unknown>) | null, wrong: string, answer: Answer | null,
 *   launch: () => Promise<void>, again: () => void }} props
 */
function Check({ body, wrong, answer, launch, again }) {
  const isReady = answer && !answer.isOld && !answer.objections.length;
  return html`<aside class="launch-check"><${Card} title=${t("Before it starts")} actions=${
    answer &&
    html`<${Button} small
    tone="quiet" onClick=${again}>${t("Check again")}<//>`
  }>
    <div aria-live="polite" class=${answer?.isOld ? "pile old" : "pile"} data-check=${
      wrong ? "wrong" : answer ? (answer.isOld ? "old" : answer.objections.length ? "objections" : "ready") : "empty"
    }>
      ${wrong && html`<${Notice} tone="bad">${wrong}<//>`}
      ${
        !wrong &&
        !answer &&
        html`<p class="hint">${t("Name a model: then this says what would keep its worker from starting.")}</p>`
      }
      ${answer?.objections.map((text) => html`<${Notice} key=${text} tone="warn">${text}<//>`)}
      ${
        isReady &&
        answer.unchecked &&
        html`<${Notice} tone="warn" title=${t("Its arguments could not be checked.")}>
        ${answer.unchecked}<//>`
      }
      ${
        isReady &&
        html`<p class="fine">${
          answer.unchecked
            ? t("Nothing that is known keeps it from starting now.")
            : t("Nothing keeps it from starting now.")
        }</p>`
      }
      <div class="actions"><${Button} tone="primary" icon="play" disabled=${!isReady || wrong} onClick=${launch}>
        ${body?.load === "on_demand" ? t("Add the worker") : t("Launch")}<//></div>
    </div><//>
    ${
      body?.model_path &&
      html`<${Card} title=${t("The same in ichat.toml")}
      lead=${t("A launched worker comes back with the next gateway; what is in the file is the same everywhere.")}>
      <${Code} text=${tomlOf(body)} /><//>`
    }
    ${
      answer?.command &&
      html`<details class="card"><summary><h2>${t("The command")}</h2></summary>
      <${Code} text=${answer.command} /></details>`
    }</aside>`;
}

/**
 * The form for a new worker.
 *
 * @param {{ params: Route }} props
 */
export default function Launch({ params }) {
  const [draft, setDraft, forgetDraft] = useKept("launch", (/** @type {Draft | undefined} */ kept) => ({
    ...EMPTY,
    ...kept,
    ...wanted(params.query),
  }));
  const [engines, setEngines] = useState(/** @type {Api.Engines["engines"]} */ ([]));
  const [round, setRound] = useState(0);
  const flags = useFlags(draft.backend);
  const isMounted = useMounted();
  useEffect(() => {
    api.get("/v1/admin/engines").then(
      (answer) => setEngines(answer.engines),
      (error) => toast(error.message, "bad"),
    );
  }, []);
  const set = useCallback(
    (/** @type {Partial<Draft>} */ change) => setDraft((before) => ({ ...before, ...change })),
    [],
  );
  const onArg = useCallback(
    (/** @type {string} */ key, /** @type {string | null} */ text) =>
      setDraft((before) => {
        const args = /** @type {Record<string, string>} */ ({ ...before.args, [key]: text });
        if (text === null || (text === "" && flags.flags.has(key))) delete args[key];
        return { ...before, args };
      }),
    [flags.flags],
  );
  const { body, wrong } = useMemo(() => {
    try {
      return { body: bodyOf(draft, flags.flags), wrong: "" };
    } catch (error) {
      return { body: null, wrong: error.message };
    }
  }, [draft, flags.flags]);
  const answer = useCheck(body, round);
  const launch = async () => {
    const started = await api.post("/v1/admin/workers/launch", body);
    forgetDraft();
    toast(t("Worker {id} is {state}.", { id: started.worker_id, state: inWords(started.state) }));
    if (isMounted.current) go("workers", [started.worker_id]);
  };
  const clear = html`<${Button} tone="quiet" onClick=${() => setDraft(() => EMPTY)}>${t("Clear")}<//>`;
  return html`<${Page} title=${t("Launch a worker")} actions=${clear} lead=${t(
    "The gateway starts it on its own machine, supervises it, and starts it again with its next start.",
  )}>
    <div class="launch"><div class="pile">
      <${Model} draft=${draft} set=${set} engines=${engines} />
      <${Card} title=${t("Arguments of {backend}", { backend: draft.backend })} lead=${t(
        "An empty field is the engine's default. vLLM's names are known to SGLang's workers, " +
          "too, and the other way round.",
      )}>
        <${Arguments} flags=${flags.flags} asked=${flags} args=${draft.args} onArg=${onArg} /><//>
      <${More} draft=${draft} set=${set} />
    </div>
    <${Check} body=${body} wrong=${wrong} answer=${answer} launch=${launch}
      again=${() => setRound(round + 1)} /></div><//>`;
}

/**
 * Return the worker's values in the address: `#/launch?model_path=…&backend=…`.
 *
 * @param {Record<string, string>} query
 * @returns {Partial<Draft>}
 */
function wanted({ model_path, model_name, backend }) {
  return Object.fromEntries(Object.entries({ model_path, model_name, backend }).filter(([, value]) => value));
}
