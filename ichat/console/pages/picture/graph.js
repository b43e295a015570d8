// The picture's graph: keys, names, models, workers and GPUs as nodes, and the lines between them. Pure functions.

import { hrefOf } from "../../router.js";
import { t } from "../../texts.js";
import { count, number } from "../../ui/format.js";
import { isLoading } from "../states.js";
import { cut, faceOf, faceOfGpu, faceOfWorkers, natural, OTHERS, waitsText, worstOf } from "./faces.js";

/** @import { Machine, Model, State, Worker } from "../../store.js" */
/** @import { Tone } from "../../ui/basics.js" */
/** @import { Lane } from "./lanes.js" */

/** The most nodes of a column: the less busy things share a node then. */
export const ROWS_MAX = 12;
const EXTERNAL = "external:";
/** @type {Kind[]} */
export const KINDS = ["key", "name", "model", "worker", "gpu"];
/** Which columns stay where there is no room for all, the most important first. @type {Kind[]} */
const BY_WORTH = ["model", "worker", "name", "gpu", "key"];
/** @type {Record<Kind, string>} */
export const TITLES = { key: t("Keys"), name: t("Names"), model: t("Models"), worker: t("Workers"), gpu: t("GPUs") };
/**
 * `cells`: the members of a group, by their tones, or a machine's GPUs by how busy they are (`use-0` to `use-4`).
 * `words`: the title for a screen reader, if that needs more words; `ended`: requests a second.
 * `load`: the share of a load that is done, 0 to 1; null: there is no load.
 *
 * @typedef {"key" | "name" | "model" | "worker" | "gpu"} Kind
 * @typedef {{ id: string, kind: Kind, title: string, words: string, note: string, tone: Tone, href: string,
 *   queued: number, load: number | null, cells: string[], tokens: number, ended: number, inFlight: number }} Node
 * @typedef {{ from: string, to: string, color: number, tokens: number, ended: number, inFlight: number }} Line
 * @typedef {{ columns: { kind: Kind, title: string, nodes: Node[] }[], lines: Line[] }} Graph
 * @typedef {Pick<State, "workers" | "models" | "machines" | "aliases">} Cluster
 */

/**
 * Return the kinds of nodes that have room in a width, in pixels.
 *
 * @param {number} width
 */
export function kindsFor(width) {
  const room = Math.max(2, Math.floor((width + 46) / 176));
  return KINDS.filter((kind) => BY_WORTH.indexOf(kind) < room);
}

/**
 * Return the name, of those that the configuration has, by which a request was for a model; "": by the model's own.
 *
 * @param {Lane} lane
 * @param {{ name: string }[]} aliases
 */
export function nameOf({ name, model }, aliases) {
  if (name === model || aliases.some((one) => one.name === name)) return name === model ? "" : name;
  const fits = aliases.find(({ name: pattern }) => {
    const at = pattern.indexOf("*");
    return at >= 0 && name.startsWith(pattern.slice(0, at)) && name.endsWith(pattern.slice(at + 1));
  });
  return fits ? fits.name : name;
}

/**
 * Return a function that gives each thing its node: its own, or that of all others beyond `most`.
 *
 * The busiest have their own; `shown` nodes keep theirs until others are a good deal busier.
 *
 * @param {Kind} kind
 * @param {Map<string, number>} weights
 * @param {Set<string>} shown
 */
function seats(kind, weights, shown, most = ROWS_MAX) {
  const idOf = (/** @type {string} */ name) => `${kind} ${name}`;
  if (weights.size <= most) return idOf;
  const worth = (/** @type {[string, number]} */ [name, weight]) =>
    shown.has(idOf(name)) ? weight * 1.5 + 1e-9 : weight;
  const order = [...weights].sort((one, other) => worth(other) - worth(one) || natural(one[0], other[0]));
  const own = new Set(order.slice(0, most - 1).map(([name]) => name));
  return (/** @type {string} */ name) => idOf(own.has(name) ? name : OTHERS);
}

/**
 * Return the sums of lanes by something of them.
 *
 * @param {Lane[]} lanes
 * @param {(lane: Lane) => string} by
 */
function weightsOf(lanes, by) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (const lane of lanes) found.set(by(lane), (found.get(by(lane)) ?? 0) + lane.tokens + lane.ended + lane.in_flight);
  return found;
}

const tokensText = (/** @type {number} */ value) =>
  value >= 0.05
    ? t("{count} tokens/s", { count: number(value >= 10 ? Math.round(value) : value, { short: true }) })
    : "";

/** @param {Node} node */
const trafficText = ({ tokens, ended, inFlight }) =>
  tokensText(tokens) ||
  (ended >= 0.05 && t("{count} requests/s", { count: number(ended) })) ||
  (inFlight ? t("{count} in flight", { count: number(inFlight) }) : t("idle"));

/**
 * Return a node's whole content in a sentence, for screen readers. It begins with the visible text, for speech control.
 *
 * @param {Node} node
 */
export const wordsOf = ({ title, words, note, tokens, queued }) =>
  [
    `${cut(title)} ${note}`.trim(),
    words,
    tokensText(tokens),
    queued > 0 && !note.startsWith(waitsText(queued)) && t("{count} waiting", { count: queued }),
  ]
    .filter((text, at, all) => text && all.indexOf(text) === at)
    .join(", ");

/**
 * @param {Kind} kind
 * @param {string} id
 * @param {Partial<Node>} more
 * @returns {Node}
 */
const newNode = (kind, id, more) => ({
  id,
  kind,
  title: "",
  words: "",
  note: "",
  tone: "ok",
  href: hrefOf("overview"),
  queued: 0,
  load: null,
  cells: [],
  tokens: 0,
  ended: 0,
  inFlight: 0,
  ...more,
});

/**
 * Return the GPUs as {machine, gpu} pairs.
 *
 * @param {Machine[]} machines
 */
const gpusOf = (machines) => machines.flatMap((machine) => (machine.gpus ?? []).map((gpu) => ({ machine, gpu })));

/**
 * Return the graph of a cluster with these lanes, and the nodes of these kinds; `shown`: the ids of nodes before.
 *
 * @param {Cluster} cluster
 * @param {Lane[]} lanes
 * @param {Kind[]} kinds
 * @param {Set<string>} shown
 * @returns {Graph}
 */
export function graphOf({ workers, models, machines, aliases }, lanes, kinds = KINDS, shown = new Set()) {
  /** @type {Map<string, Node>} */
  const nodes = new Map();
  /** @type {Map<string, Line & { by: Map<string, number> }>} */
  const lines = new Map();
  const put = (/** @type {Kind} */ kind, /** @type {string} */ id, /** @type {() => Partial<Node>} */ face) => {
    if (!nodes.has(id)) nodes.set(id, newNode(kind, id, face()));
    return /** @type {Node} */ (nodes.get(id));
  };
  const join = (
    /** @type {string} */ from,
    /** @type {string} */ to,
    /** @type {string} */ model,
    /** @type {Lane | undefined} */ lane,
    share = 1,
  ) => {
    const known = lines.get(`${from}\n${to}`);
    const line = known ?? { from, to, color: 0, tokens: 0, ended: 0, inFlight: 0, by: new Map() };
    if (!known) lines.set(`${from}\n${to}`, line);
    line.by.set(model, (line.by.get(model) ?? 0) + (lane?.tokens ?? 0));
    if (!lane) return;
    line.tokens += lane.tokens * share;
    line.ended += lane.ended * share;
    line.inFlight += lane.in_flight * share;
  };

  // Which node each thing has.
  const names = weightsOf(lanes, (lane) => nameOf(lane, aliases));
  names.delete("");
  for (const alias of aliases) names.set(alias.name, names.get(alias.name) ?? 0);
  const busy = weightsOf(lanes, (lane) => lane.model);
  const modelWeights = new Map(
    models.map((one) => [one.id, (busy.get(one.id) ?? 0) + 20 * one.queued + one.in_flight + (one.workers ? 0.1 : 0)]),
  );
  for (const worker of workers.filter(isLoading)) {
    for (const name of worker.model_names) modelWeights.set(name, (modelWeights.get(name) ?? 0) + 1e6);
  }
  for (const [name, weight] of busy) if (!modelWeights.has(name)) modelWeights.set(name, weight);
  const modelSeat = seats("model", modelWeights, shown);
  const nameSeat = seats("name", names, shown);
  const keySeat = seats(
    "key",
    weightsOf(lanes, (lane) => lane.key),
    shown,
  );
  const externals = new Set(lanes.map((lane) => lane.worker).filter((one) => one.startsWith(EXTERNAL)));
  const isGrouped = workers.length + externals.size > ROWS_MAX;
  const ownModel = (/** @type {Worker} */ worker) => worker.model_names[0] ?? worker.model_name;
  const byId = new Map(workers.map((worker) => [worker.worker_id, worker]));
  /** @type {Map<string, Worker[]>} */
  const members = new Map();
  const workerSeat = (/** @type {string} */ id) => {
    const worker = byId.get(id);
    if (!worker) return externals.has(id) && isGrouped ? "worker externals" : `worker ${id}`;
    return isGrouped ? `workers of ${modelSeat(ownModel(worker))}` : `worker ${id}`;
  };
  for (const worker of workers) {
    const seat = workerSeat(worker.worker_id);
    const known = members.get(seat);
    if (known) known.push(worker);
    else members.set(seat, [worker]);
  }
  const gpus = gpusOf(machines);
  const isByMachine = gpus.length > ROWS_MAX;
  const machineSeat = seats(
    "gpu",
    new Map(machines.filter((one) => one.gpus?.length).map((one) => [one.id, 0])),
    shown,
  );
  const gpuSeat = (/** @type {(typeof gpus)[number]} */ { machine, gpu }) =>
    isByMachine ? machineSeat(machine.id) : `gpu ${machine.id} ${gpu.index}`;
  /** @type {Map<string, Set<string>>} */
  const gpusOfWorker = new Map();
  for (const one of gpus) {
    for (const { worker_id: id } of one.gpu.held_by) {
      gpusOfWorker.set(id, (gpusOfWorker.get(id) ?? new Set()).add(gpuSeat(one)));
    }
  }

  // The nodes.
  const has = new Set(kinds);
  const putModel = (/** @type {string} */ name) =>
    put("model", modelSeat(name), () => {
      const id = modelSeat(name);
      if (id.endsWith(OTHERS)) {
        const own = models.filter((one) => modelSeat(one.id) === id);
        const sum = (/** @type {"queued" | "in_flight"} */ of) => own.reduce((total, one) => total + one[of], 0);
        const faces = own.map((one) => faceOf(one, workers).tone ?? "idle");
        const note = sum("in_flight") ? t("{count} in flight", { count: number(sum("in_flight")) }) : t("less busy");
        const title = count(own.length, "{count} other model", "{count} other models");
        return { title, note, queued: sum("queued"), tone: worstOf(faces), href: hrefOf("models") };
      }
      const model = models.find((one) => one.id === name);
      return model ? faceOf(model, workers) : { title: name, note: t("gone"), tone: "idle", href: hrefOf("models") };
    });
  const putWorker = (/** @type {string} */ id, /** @type {string} */ model) =>
    put("worker", workerSeat(id), () => {
      const own = members.get(workerSeat(id));
      if (own) return faceOfWorkers(own, modelSeat(model).endsWith(OTHERS) ? "" : model);
      const title = isGrouped
        ? count(externals.size, "{count} external route", "{count} external routes")
        : id.replace(EXTERNAL, "");
      const note = id.startsWith(EXTERNAL) ? t("external route") : t("gone");
      return { title, note, tone: id.startsWith(EXTERNAL) ? "ok" : "idle", href: hrefOf("models") };
    });
  const putName = (/** @type {string} */ name) =>
    put("name", nameSeat(name), () => {
      const isOthers = nameSeat(name).endsWith(OTHERS);
      const title = isOthers ? count(names.size - ROWS_MAX + 1, "{count} other name", "{count} other names") : name;
      return { title, href: hrefOf("models", [], isOthers ? {} : { find: name }) };
    });
  for (const { id } of models) putModel(id);
  for (const worker of workers) putWorker(worker.worker_id, ownModel(worker));
  if (has.has("name")) for (const { name } of aliases) putName(name);
  if (has.has("gpu"))
    for (const one of gpus) put("gpu", gpuSeat(one), () => faceOfGpu(one, isByMachine, machineSeat, machines));

  // The lines: those of the configuration, and the lanes.
  if (has.has("name")) {
    for (const { name, targets } of aliases) {
      for (const { model } of targets ?? [])
        if (modelWeights.has(model)) join(nameSeat(name), modelSeat(model), model, undefined);
    }
  }
  for (const worker of workers) {
    for (const name of worker.model_names.filter((one) => modelWeights.has(one))) {
      join(modelSeat(name), workerSeat(worker.worker_id), name, undefined);
    }
    if (has.has("gpu") && !isByMachine) {
      for (const seat of gpusOfWorker.get(worker.worker_id) ?? []) {
        join(workerSeat(worker.worker_id), seat, ownModel(worker), undefined);
      }
    }
  }
  for (const lane of lanes) {
    const name = has.has("name") ? nameOf(lane, aliases) : "";
    const model = putModel(lane.model);
    const worker = putWorker(lane.worker, lane.model);
    const way = [model, worker];
    if (name) way.unshift(putName(name));
    if (has.has("key")) {
      const isOthers = keySeat(lane.key).endsWith(OTHERS);
      way.unshift(
        put("key", keySeat(lane.key), () => ({
          title: isOthers ? t("other keys") : lane.key || t("no key"),
          tone: lane.key ? "ok" : "idle",
          href: hrefOf("keys"),
        })),
      );
    }
    for (const node of way) {
      node.tokens += lane.tokens;
      node.ended += lane.ended;
      node.inFlight += lane.in_flight;
    }
    for (let at = 1; at < way.length; at += 1) join(way[at - 1].id, way[at].id, lane.model, lane);
    const held = has.has("gpu") ? [...(gpusOfWorker.get(lane.worker) ?? [])] : [];
    for (const seat of held) {
      join(worker.id, seat, lane.model, lane, 1 / held.length);
      const gpu = nodes.get(seat);
      if (gpu) gpu.tokens += lane.tokens / held.length;
    }
  }
  const isSomeones = [...nodes.values()].some((node) => node.kind === "key" && node.title !== t("no key"));
  const columns = kinds
    .filter((kind) => kind !== "key" || isSomeones)
    .map((kind) => ({ kind, title: TITLES[kind], nodes: [...nodes.values()].filter((node) => node.kind === kind) }))
    .filter((column) => column.nodes.length);
  for (const { kind, nodes: own } of columns) {
    if (kind === "key" || kind === "name") for (const node of own) node.note = trafficText(node);
  }
  const drawn = new Set(columns.flatMap((column) => column.nodes.map((node) => node.id)));
  const colors = new Map([...modelWeights.keys()].sort(natural).map((name, at) => [name, at]));
  return {
    columns: sorted(columns, [...lines.values()]),
    lines: [...lines.values()]
      .filter((line) => drawn.has(line.from) && drawn.has(line.to))
      .map(({ by, ...line }) => {
        const [[first] = [""]] = [...by].sort((one, other) => other[1] - one[1] || natural(one[0], other[0]));
        return { ...line, color: colors.get(first) ?? 0 };
      }),
  };
}

/**
 * Return columns with an order of nodes that has few crossings, which traffic does not change: models, keys and
 * machines by their names, names, workers and single GPUs by the models that they belong to.
 *
 * @param {Graph["columns"]} columns
 * @param {Pick<Line, "from" | "to">[]} lines
 */
function sorted(columns, lines) {
  /** @type {Map<string, number>} */
  const places = new Map();
  const isLast = (/** @type {Node} */ node) => Number(node.id.endsWith(OTHERS));
  const byTitle = (/** @type {Node} */ one, /** @type {Node} */ other) =>
    isLast(one) - isLast(other) || natural(one.title, other.title);
  const placeOf = (/** @type {Node} */ node) => {
    const found = lines
      .filter((line) => line.from === node.id || line.to === node.id)
      .map((line) => places.get(line.from === node.id ? line.to : line.from))
      .filter((place) => place !== undefined);
    return found.length ? found.reduce((sum, place) => sum + place, 0) / found.length : Number.POSITIVE_INFINITY;
  };
  /** @type {Kind[]} */
  const order = ["model", "worker", "name", "gpu", "key"];
  for (const kind of order) {
    const column = columns.find((one) => one.kind === kind);
    if (!column) continue;
    const isFree =
      kind === "model" || kind === "key" || column.nodes.some((node) => kind === "gpu" && node.cells.length);
    const at = new Map(column.nodes.map((node) => [node.id, isFree ? 0 : placeOf(node)]));
    column.nodes.sort((one, other) => {
      const [first, second] = [at.get(one.id) ?? 0, at.get(other.id) ?? 0];
      return isLast(one) - isLast(other) || (first === second ? byTitle(one, other) : first - second);
    });
    column.nodes.forEach((node, place) => void places.set(node.id, place));
  }
  return columns;
}
