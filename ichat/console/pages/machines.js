// Machines & GPUs: their resources, and the workers that hold them.

import { hrefOf } from "../router.js";
import { useStore } from "../store.js";
import { age, Badge, bytes, Card, count, duration, Empty, html, Meter, Page, Table } from "../ui.js";
/** @import { Machine as MachineView } from "../store.js" */

/** @typedef {NonNullable<Api.EventState["gateway"]["relays"]>[number]} Relay */

/** The page. */
export default function Machines() {
  const machines = useStore((all) => all.machines);
  const gpus = machines.flatMap((one) => one.gpus ?? []);
  const lead = `${count(machines.length, "machine")}, ${count(gpus.length, "GPU")}. A machine is here while a worker
    on it sends heartbeats, the gateway runs on it, or it is a node of Ray.`;
  return html`<${Page} title="Machines & GPUs" lead=${lead}>
    ${machines.map((one) => html`<${Machine} key=${one.id} machine=${one} />`)}
    ${!machines.length && html`<${Empty} icon="machines" title="No machine has reported yet" />`}
    <${Relays} /><//>`;
}

/** The processes that move bytes, and how processes of the gateway have ended; nothing if there are none. */
function Relays() {
  const gateway = useStore((all) => all.gateway);
  const relays = gateway?.relays ?? [];
  if (!gateway || !relays.length) return null;
  const { last_crash: crash, last_takeover: takeover, last_relay_crash: relay, retiring_pid: retiring } = gateway;
  const waited = (/** @type {number | null} */ seconds) =>
    seconds === null ? "no relay was left" : `requests waited ${duration(seconds)}`;
  const crashed = crash?.pid ? `process ${crash.pid}` : "an unknown process";
  const facts = [
    takeover && `Last takeover: ${age(takeover.at)}, from process ${takeover.pid}; ${waited(takeover.waited_s)}.`,
    retiring && `Process ${retiring} ends its connections.`,
    crash && `Last crash: ${crash.at === null ? "" : `${age(crash.at)}, `}${crashed}; ${waited(crash.waited_s)}.`,
    relay && `Last crash of a relay: ${age(relay.at)}, relay ${relay.number} (process ${relay.pid}) ${relay.how}.`,
  ].filter(Boolean);
  /** @type {import("../ui/table.js").Column<Relay>[]} */
  const columns = [
    { name: "number", title: "Relay", value: (row) => row.number, cell: (row) => row.number },
    { name: "pid", title: "Process", align: "right", value: (row) => row.pid, cell: (row) => row.pid },
    {
      name: "state",
      title: "State",
      value: (row) => row.state,
      cell: (row) => html`<${Badge} tone=${row.state === "accepting" ? "ok" : "busy"}>${row.state}<//>`,
    },
    {
      name: "connections",
      title: "Connections",
      align: "right",
      value: (row) => row.connections,
      cell: (row) => row.connections,
    },
    { name: "requests", title: "In flight", align: "right", value: (row) => row.requests, cell: (row) => row.requests },
    {
      name: "memory",
      title: "Memory",
      align: "right",
      value: (row) => row.rss_bytes,
      cell: (row) => bytes(row.rss_bytes || null),
    },
    { name: "restarts", title: "Restarts", align: "right", value: (row) => row.restarts, cell: (row) => row.restarts },
  ];
  return html`<${Card} title="Relays" flush actions=${html`<span class="muted">term ${gateway.term}</span>`}>
    <${Table} label="Relays" columns=${columns} rows=${relays} keyOf=${(/** @type {Relay} */ row) => row.pid}
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
  return html`<${Card} title=${html`${machine.name} ${machine.has_gateway && html`<${Badge}>gateway<//>`}`}
      actions=${html`<span class="muted">${machine.cpus ? count(machine.cpus, "CPU") : ""}</span>`}>
    <div class="machine">
      <div class="machine-use"><span>CPU</span><${Meter} value=${machine.cpu_use} label="CPU in use" /></div>
      <div class="machine-use"><span>Memory</span><${Meter} value=${used === null ? null : used / (total ?? used)}
        label="Memory in use" text=${`${bytes(used)} of ${bytes(total)}`} /></div>
      <div class="machine-use"><span>Workers</span><span class="badges">${here.map(
        (one) => html`<a
        key=${one.worker_id} href=${hrefOf("workers", [one.worker_id])}>${one.worker_id}</a>`,
      )}
        ${!here.length && html`<span class="muted">none</span>`}</span></div>
      ${machine.ray && html`<div class="machine-use"><span>Ray</span><span>${shareOfRay(machine.ray)}</span></div>`}
    </div>
    ${
      machine.gpus === null &&
      html`<p class="hint">Nothing is known of GPUs here: there is no NVIDIA driver, or it does not
      answer.</p>`
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
  const words = gpus ? `${free ?? "–"} of ${total} free` : "no GPUs for jobs";
  return since ? html`${words} <${Badge} tone="bad">last answer ${age(since)}<//>` : words;
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
    <header><b>GPU ${gpu.index}</b><span class="muted">${name}</span><span class="spring"></span>
      ${
        gpu.failure
          ? html`<${Badge} tone="bad">does not answer<//>`
          : html`<span class="num">${gpu.use === null ? "–" : `${Math.round(gpu.use * 100)} %`}</span>`
      }</header>
    ${
      gpu.failure
        ? html`<p class="field-error">${gpu.failure}</p>`
        : html`
    <div class="stack" role="img" aria-label=${`${bytes(gpu.memory_used_bytes)} of ${bytes(total)} in use`}>
      ${holders.map(
        (one, at) => html`<i key=${one.worker_id} class=${`chart-${(at % 4) + 1}`}
        style=${width(one.memory_bytes)} title=${`${one.worker_id}: ${bytes(one.memory_bytes)}`}></i>`,
      )}
      <i class="chart-5" style=${width(others)} title=${`others: ${bytes(others)}`}></i>
    </div>
    <p class="hint num">${bytes(gpu.memory_used_bytes)} of ${bytes(total)}</p>
    <ul class="holders">${holders.map(
      (one, at) => html`<li key=${one.worker_id}>
      <i class=${`dot chart-${(at % 4) + 1}`}></i><a href=${hrefOf("workers", [one.worker_id])}>${one.worker_id}</a>
      <span class="spring"></span><span class="num">${bytes(one.memory_bytes)}</span></li>`,
    )}
      ${
        others > (total ?? 0) / 100 &&
        html`<li><i class="dot chart-5"></i>others<span class="spring"></span>
        <span class="num">${bytes(others)}</span></li>`
      }</ul>`
    }
  </div>`;
}
