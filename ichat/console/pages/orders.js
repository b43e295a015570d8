// Orders: workers for other machines, each started there by a line that is used once.

import { api } from "../api.js";
import { hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import {
  age,
  Badge,
  Button,
  Card,
  Code,
  confirm,
  Dialog,
  Empty,
  Field,
  html,
  Notice,
  Page,
  Table,
  toast,
  useCallback,
  useEffect,
  useState,
  when,
} from "../ui.js";
import { bodyOf, EMPTY, nameOf } from "./launch/draft.js";

/** @import { FieldEvent } from "../ui/html.js" */

/**
 * @typedef {"model_path" | "model_name" | "python" | "env" | "gpu_ids" | "ports" | "worker_id"} OrderField
 * @typedef {Record<OrderField, string> & { backend: string, valid_s: string }} Form
 */

const VALID = [
  ["600", t("Ten minutes")],
  ["3600", t("An hour")],
  ["86400", "A day"],
  ["604800", "A week"],
];

/** @type {Form} */
const BLANK = {
  backend: "vllm",
  model_path: "",
  model_name: "",
  worker_id: "",
  python: "",
  gpu_ids: "",
  ports: "",
  env: "",
  valid_s: "3600",
};

/**
 * Return the order as the API expects it. Throws an Error.
 *
 * @param {Form} form
 */
function orderOf({ gpu_ids, ports, worker_id, valid_s, ...table }) {
  const numbers = gpu_ids.split(/[\s,]+/).filter(Boolean);
  if (numbers.some((one) => !/^\d+$/.test(one)))
    throw new Error(t("GPUs are numbers such as 0,1, and not: {text}", { text: gpu_ids }));
  const given = Object.entries({ worker_id: worker_id.trim(), ports: ports.trim() }).filter(([, value]) => value);
  return {
    ...bodyOf({ ...EMPTY, ...table }, new Map()),
    ...(numbers.length ? { gpu_ids: numbers.map(Number) } : {}),
    ...Object.fromEntries(given),
    valid_s: Number(valid_s),
  };
}

/**
 * Return the line that starts the worker of an order on its machine.
 *
 * @param {Api.NewOrder} made
 */
export function lineOf(made) {
  const here = new URL("..", document.baseURI);
  const isHere = ["127.0.0.1", "localhost", "[::1]"].includes(here.hostname);
  const address = isHere && !made.is_local_only ? made.gateway_address : here.href.replace(/\/$/, "");
  return `python3 ichat.pyz worker --order ${made.code} --gateway-address ${address}`;
}

/** @param {{ of: Api.NewOrder, onClose: () => void }} props */
function Made({ of: made, onClose }) {
  return html`<${Dialog} stays title=${t("Worker {id} is ordered", { id: made.worker_id })} onClose=${onClose}
    actions=${html`
    <button type="button" class="button primary" onClick=${onClose}>${t("Done")}</button>`}>
    <p>${t(
      "Type this line on the other machine, until {at}. It starts the worker there, once, and is shown only here.",
      { at: when(made.expires_at) },
    )}</p>
    <div data-line><${Code} text=${lineOf(made)} label=${t("Copy")} /></div>
    ${
      made.is_local_only &&
      html`<${Notice} tone="warn">${t(
        "This gateway listens on loopback alone: set server_settings.host, or no other machine reaches it.",
      )}<//>`
    }<//>`;
}

/** @param {{ onClose: () => void, onDone: () => void }} props */
function NewOrder({ onClose, onDone }) {
  const [form, setForm] = useState(BLANK);
  const [made, setMade] = useState(/** @type {Api.NewOrder | null} */ (null));
  const [failure, setFailure] = useState("");
  const [isBusy, setBusy] = useState(false);
  const order = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setFailure("");
    setBusy(true);
    try {
      setMade(await api.post("/v1/admin/orders", orderOf(form)));
      onDone();
    } catch (error) {
      setFailure(error.message);
    } finally {
      setBusy(false);
    }
  };
  if (made) return html`<${Made} of=${made} onClose=${onClose} />`;
  const field = (/** @type {keyof Form} */ name) => ({
    value: form[name],
    spellcheck: false,
    onInput: (/** @type {FieldEvent} */ event) => setForm({ ...form, [name]: event.target.value }),
  });
  return html`<${Dialog} wide title=${t("Order a worker")} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>${t("Cancel")}</button>
    <button type="submit" form="order" class="button primary" disabled=${isBusy}>${t("Order")}</button>`}>
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    <form id="order" class="form" onSubmit=${order}>
      <${Field} label=${t("Model")} hint=${t("A directory on the other machine, or a name on the model hub.")}>
        <input type="text" class="mono" required placeholder="Qwen/Qwen3-0.6B" ...${field("model_path")} /><//>
      <${Field} label=${t("Name")} hint=${t("What requests call it.")}>
        <input type="text" class="mono" placeholder=${nameOf(form)} ...${field("model_name")} /><//>
      <${Field} label=${t("Engine")}><input type="text" required ...${field("backend")} /><//>
      <${Field} label=${t("Interpreter")} hint=${t("There. Empty: the first that has the engine.")}>
        <input type="text" class="mono" ...${field("python")} /><//>
      <${Field} label=${t("GPUs")} hint=${t("Numbers as 0,1. Empty: all of that machine.")}>
        <input type="text" ...${field("gpu_ids")} /><//>
      <${Field} label=${t("Ports")} hint=${t("A range such as 20000-20999. Empty: any free port.")}>
        <input type="text" ...${field("ports")} /><//>
      <${Field} label=${t("The line can be used for")}><select value=${form.valid_s}
        onChange=${(event) => setForm({ ...form, valid_s: event.target.value })}>
        ${VALID.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select><//>
      <${Field} label=${t("Instead of worker")} hint=${t("An earlier order's: its worker ends. Empty: a new worker.")}>
        <input type="text" class="mono" ...${field("worker_id")} /><//>
      <${Field} wide label=${t("Environment")} hint=${t("A variable on each line.")}>
        <textarea rows="2" class="mono" placeholder="NAME=value" ...${field("env")}></textarea><//>
    </form><//>`;
}

/** @param {string} text */
const clipped = (text) => (text ? html`<span class="clip" title=${text}>${text}</span>` : "–");

/** @param {Api.Order} order */
const isLive = (order) => !order.ended && (order.fetched_at !== null || order.expires_at * 1000 > Date.now());

/** @param {Api.Order} order */
function stateOf(order) {
  if (order.ended) return html`<span class="long">${order.ended}</span>`;
  if (order.fetched_at) {
    return html`<${Badge} tone="ok">${t("fetched")}<//><span class="sub clip">${t("from {host}, {age}", {
      host: order.fetched_from || t("this machine"),
      age: age(order.fetched_at),
    })}</span>`;
  }
  if (!isLive(order)) return t("was not used in time");
  return html`<${Badge}>${t("waits")}<//><span class="sub">${t("until {at}", { at: when(order.expires_at) })}</span>`;
}

/** Orders for workers on other machines. */
export default function Orders() {
  const begun = useStore((all) => all.begun);
  const workers = useStore((all) => all.workers);
  const seen = workers.map((one) => `${one.worker_id} ${one.state}`).join();
  const [answer, setAnswer] = useState(/** @type {Api.Orders | null} */ (null));
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const [isOpen, setOpen] = useState(false);
  const read = useCallback(
    () =>
      api.get("/v1/admin/orders").then((found) => {
        setAnswer(found);
        setFailure(null);
      }, setFailure),
    [],
  );
  useEffect(() => void read(), [begun, seen]);
  const withdraw = async (/** @type {Api.Order} */ order) => {
    const id = order.worker_id;
    const text = order.fetched_at
      ? t("It gets no more requests, answers those that it has, and ends.")
      : t("Its line cannot be used any more.");
    const action = order.fetched_at ? t("Stop") : t("Withdraw");
    const title = order.fetched_at ? t("Stop {id}?", { id }) : t("Withdraw the order of {id}?", { id });
    if (!(await confirm({ title, text, action, danger: true }))) return;
    await api.del(`/v1/admin/workers/${encodeURIComponent(id)}`);
    toast(order.fetched_at ? t("{id} is stopped.", { id }) : t("The order of {id} is withdrawn.", { id }));
    await read();
  };
  /** @type {import("../ui/table.js").Column<Api.Order>[]} */
  const columns = [
    {
      name: "worker",
      title: t("Worker"),
      value: (row) => row.worker_id,
      cell: (row) =>
        workers.some((one) => one.worker_id === row.worker_id) && !row.ended
          ? html`<a class="clip" title=${row.worker_id} href=${hrefOf("workers", [row.worker_id])}>${row.worker_id}</a>`
          : clipped(row.worker_id),
    },
    { name: "model", title: t("Model"), value: (row) => row.model_name, cell: (row) => clipped(row.model_name) },
    { name: "state", title: t("State"), cell: stateOf },
    { name: "made", title: t("Ordered"), value: (row) => row.made_at, cell: (row) => age(row.made_at) },
    { name: "launch", title: t("Launch"), align: "right", value: (row) => row.launch, cell: (row) => row.launch },
    {
      name: "do",
      title: "",
      align: "right",
      cell: (row) =>
        isLive(row) &&
        html`<${Button} small tone="danger" onClick=${() => withdraw(row)}
          aria-label=${
            row.fetched_at ? t("Stop {id}", { id: row.worker_id }) : t("Withdraw {id}", { id: row.worker_id })
          }>
          ${row.fetched_at ? t("Stop") : t("Withdraw")}<//>`,
    },
  ];
  const make = html`<${Button} tone="primary" onClick=${() => setOpen(true)}>${t("New order")}<//>`;
  return html`<${Page} title=${t("Orders")} actions=${make}
    lead=${t("Workers on other machines. Each order has a line that starts its worker there, once.")}>
    ${failure && html`<${Notice} tone="bad">${failure.message}<//>`}
    ${
      answer &&
      html`<${Card} flush><${Table} label=${t("Orders")} columns=${columns} rows=${answer.orders}
      keyOf=${(/** @type {Api.Order} */ row) => String(row.launch)}
      empty=${html`<${Empty} icon="workers" title=${t("No orders")}><p>${t(
        "Order a worker, and type its line on another machine.",
      )}</p><//>`} /><//>`
    }
    ${isOpen && html`<${NewOrder} onClose=${() => setOpen(false)} onDone=${read} />`}<//>`;
}
