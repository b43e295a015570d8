// Machines & GPUs: their resources, and the workers that hold them.

import { hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { t } from "../texts.js";
import { age, Badge, bytes, Card, count, duration, Empty, html, inWords, Meter, Page, Table } from "../ui.js";
/** @import { Machine as MachineView } from "../store.js" */

/** @typedef {NonNullable<Api.EventState["gateway"]["relays"]>[number]} Relay */

/** The page. */
export default function Machines() {
  const machines = useStore((all) => all.machines);
  const gpus = machines.flatMap((one) => one.gpus ?? []);
  const lead = `${count(machines.length, "{count} machine", "{count} machines")}${t(", ")}${count(
    gpus.length,
    "{count} GPU",
    "{count} GPUs",
  )}${t(". ")}${t(
    "A machine is here while a worker on it sends heartbeats, the gateway runs on it, or it is a node of Ray.",
  )}`;
  return html`<${Page} title=${t("Machines & GPUs")} lead=${lead}>
    ${machines.map((one) => html`<${Machine} key=${one.id} machine=${one} />`)}
    ${!machines.length && html`<${Empty} icon="machines" title=${t("No machine has reported yet")} />`}
    <${Relays} /><//>`;
}

/** The processes that move bytes, and how processes of the gateway have ended; nothing if there are none. */
function Relays() {
  const gateway = useStore((all) => all.gateway);
  const relays = gateway?.relays ?? [];
  if (!gateway || !relays.length) return null;
  const { last_crash: crash, last_takeover: takeover, last_relay_crash: relay, retiring_pid: retiring } = gateway;
  const waited = (/** @type {number | null} */ seconds) =>
    seconds === null ? t("no relay was left") : t("requests waited {seconds}", { seconds: duration(seconds) });
  const crashed = crash?.pid ? t("process {pid}", { pid: crash.pid }) : t("an unknown process");
  const facts = [
    takeover &&
      t("Last takeover: {at}, from process {pid}; {waited}.", {
        at: age(takeover.at),
        pid: takeover.pid,
        waited: waited(takeover.waited_s),
      }),
    retiring && t("Process {pid} ends its connections.", { pid: retiring }),
    crash &&
      (crash.at === null
        ? t("Last crash: {process}; {waited}.", { process: crashed, waited: waited(crash.waited_s) })
        : t("Last crash: {at}, {process}; {waited}.", {
            at: age(crash.at),
            process: crashed,
            waited: waited(crash.waited_s),
          })),
    relay &&
      t("Last crash of a relay: {at}, relay {number} (process {pid}) {how}.", {
        at: age(relay.at),
        number: relay.number,
        pid: relay.pid,
        how: relay.how,
      }),
  ].filter(Boolean);
  /** @type {import("../ui/table.js").Column<Relay>[]} */
  const columns = [
    { name: "number", title: t("Relay"), value: (row) => row.number, cell: (row) => row.number },
    { name: "pid", title: t("Process"), align: "right", value: (row) => row.pid, cell: (row) => row.pid },
    {
      name: "state",
      title: t("State"),
      value: (row) => row.state,
      cell: (row) => html`<${Badge} tone=${row.state === "accepting" ? "ok" : "busy"}>${inWords(row.state)}<//>`,
    },
    {
      name: "connections",
      title: t("Connections"),
      align: "right",
      value: (row) => row.connections,
      cell: (row) => row.connections,
    },
    {
      name: "requests",
      title: t("In flight"),
      align: "right",
      value: (row) => row.requests,
      cell: (row) => row.requests,
    },
    {
      name: "memory",
      title: t("Memory"),
      align: "right",
      value: (row) => row.rss_bytes,
      cell: (row) => bytes(row.rss_bytes || null),
    },
    {
      name: "restarts",
      title: t("Restarts"),
      align: "right",
      value: (row) => row.restarts,
      cell: (row) => row.restarts,
    },
  ];
  return html`<${Card} title=${t("Relays")} flush actions=${html`<span class="muted">${t("term {term}", {
    term: gateway.term,
  })}</span>`}>
    <${Table} label=${t("Relays")} columns=${columns} rows=${relays} keyOf=${(/** @type {Relay} */ row) => row.pid}
      sort="number" />
    ${facts.length > 0 && html`<p class="table-empty">${facts.join(" ")}</p>`}<//>`;
}

/** @param {{ machine: MachineView }} props */
function Machine({ machine }) {
  const workers = useStore((all) => all.workers);
  const total = machine.memory_total_bytes;
  const free = machine.memory_available_bytes;
  const used = total && free !== null ? total - free : null;
  const here = machine.workers.map((id) => workers.find((one) => one.worker_id === id) ?? { worker_id: id });
  return html`<${Card} title=${html`${machine.name} ${machine.has_gateway && html`<${Badge}>${t("gateway")}<//>`}`}
      actions=${html`<span class="muted">${
        machine.cpus ? count(machine.cpus, "{count} CPU", "{count} CPUs") : ""
      }</span>`}>
    <div class="machine">
      <div class="machine-use"><span>${t("CPU")}</span><${Meter} value=${machine.cpu_use} label=${t(
        "CPU in use",
      )} /></div>
      <div class="machine-use"><span>${t("Memory")}</span><${Meter} value=${
        used === null ? null : used / (total ?? used)
      }
        label=${t("Memory in use")} text=${t("{used} of {total}", { used: bytes(used), total: bytes(total) })} /></div>
      <div class="machine-use"><span>${t("Workers")}</span><span class="badges">${here.map(
        (one) => html`<a
        key=${one.worker_id} href=${hrefOf("workers", [one.worker_id])}>${one.worker_id}</a>`,
      )}
        ${!here.length && html`<span class="muted">${t("none")}</span>`}</span></div>
      ${machine.ray && html`<div class="machine-use"><span>Ray</span><span>${shareOfRay(machine.ray)}</span></div>`}
    </div>
    ${
      machine.gpus === null &&
      html`<p class="hint">${t("Nothing is known of GPUs here: there is no NVIDIA driver, or it does not answer.")}</p>`
    }
    ${
      machine.gpus !== null &&
      machine.gpus.length > 0 &&
      html`<div class="grid gpus">${machine.gpus.map(
        (gpu) => html`<${Gpu}
      key=${gpu.uuid || gpu.index} gpu=${gpu} />`,
      )}</div>`
    }<//>`;
}

/**
 * Return the GPUs that Ray gives to jobs there, in words.
 * @param {NonNullable<MachineView["ray"]>} share
 */
function shareOfRay({ gpus, gpus_free: free, kinds, unanswered_since: since }) {
  const total = `${gpus} ${[...kinds, gpus === 1 ? "GPU" : "GPUs"].join(" ")}`;
  const words = gpus ? t("{free} of {total} free", { free: free ?? "–", total }) : t("no GPUs for jobs");
  return since ? html`${words} <${Badge} tone="bad">${t("last answer {age}", { age: age(since) })}<//>` : words;
}

/** @param {{ gpu: NonNullable<MachineView["gpus"]>[number] }} props */
function Gpu({ gpu }) {
  const total = gpu.memory_total_bytes;
  const holders = [...gpu.held_by].sort((one, other) => other.memory_bytes - one.memory_bytes);
  const held = holders.reduce((sum, one) => sum + (one.memory_bytes ?? 0), 0);
  const others = Math.max(0, (gpu.memory_used_bytes ?? 0) - held);
  const width = (/** @type {number} */ size) => ({ width: `${total ? Math.min(100, (size / total) * 100) : 0}%` });
  const name = gpu.name.replace(/^NVIDIA /, "");
  return html`<div class=${`gpu ${gpu.failure ? "failed" : ""}`}>
    <header><b>${t("GPU {index}", { index: gpu.index })}</b><span class="muted">${name}</span><span
      class="spring"></span>
      ${
        gpu.failure
          ? html`<${Badge} tone="bad">${t("does not answer")}<//>`
          : html`<span class="num">${gpu.use === null ? "–" : `${Math.round(gpu.use * 100)} %`}</span>`
      }</header>
    ${
      gpu.failure
        ? html`<p class="field-error">${gpu.failure}</p>`
        : html`
    <div class="stack" role="img" aria-label=${t("{used} of {total} in use", {
      used: bytes(gpu.memory_used_bytes),
      total: bytes(total),
    })}>
      ${holders.map(
        (one, at) => html`<i key=${one.worker_id} class=${`chart-${(at % 4) + 1}`}
        style=${width(one.memory_bytes)} title=${`${one.worker_id}: ${bytes(one.memory_bytes)}`}></i>`,
      )}
      <i class="chart-5" style=${width(others)} title=${t("others: {size}", { size: bytes(others) })}></i>
    </div>
    <p class="hint num">${t("{used} of {total}", { used: bytes(gpu.memory_used_bytes), total: bytes(total) })}</p>
    <ul class="holders">${holders.map(
      (one, at) => html`<li key=${one.worker_id}>
      <i class=${`dot chart-${(at % 4) + 1}`}></i><a href=${hrefOf("workers", [one.worker_id])}>${one.worker_id}</a>
      <span class="spring"></span><span class="num">${bytes(one.memory_bytes)}</span></li>`,
    )}
      ${
        others > (total ?? 0) / 100 &&
        html`<li><i class="dot chart-5"></i>${t("others")}<span class="spring"></span>
        <span class="num">${bytes(others)}</span></li>`
      }</ul>`
    }
  </div>`;
}
