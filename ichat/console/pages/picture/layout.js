// Where the picture's nodes and lines are: pure functions of the graph and the width.

/** @import { Graph, Line, Node } from "./graph.js" */

const NODE_HEIGHT = 40;
const GAP = 8;
const GAP_MAX = 26;
const NODE_WIDTH_MAX = 190;
const SPACE_MIN = 46;
const CELL = 10;
const PADDING = 16;
/** A line without traffic, and the thinnest with traffic. */
const IDLE_PX = 1;
const LEAST_PX = 2;
const TOKENS_MIN = 20;

/**
 * @typedef {Node & { x: number, y: number, width: number, height: number }} PlacedNode
 * @typedef {Line & { x0: number, y0: number, x1: number, y1: number, px: number, isBusy: boolean }} PlacedLine
 * @typedef {{ width: number, height: number, nodes: PlacedNode[], lines: PlacedLine[], top: number,
 *   columns: { title: string, x: number, width: number, nodes: PlacedNode[] }[] }} Layout
 */

/**
 * Return the next of 1, 2, 5, 10, 20 … that is not below a value.
 *
 * @param {number} value
 */
export function roundedUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * /** @type {number} */ ([1, 2, 5, 10].find((step) => step * unit >= value * (1 - 1e-9)));
}

/**
 * Return the height of a node in pixels: its cells stand in rows below its words.
 *
 * @param {Pick<Node, "cells">} node
 * @param {number} width
 */
function heightOf({ cells }, width) {
  if (!cells.length) return NODE_HEIGHT;
  const inRow = Math.max(1, Math.floor((width - PADDING) / CELL));
  return NODE_HEIGHT + Math.ceil(cells.length / inRow) * CELL + 4;
}

/**
 * Return the places of a graph's nodes and lines in a width, in pixels.
 *
 * A line is as thick as its tokens a second: the height of a node stands for `top` of them. No place depends on
 * traffic, only the lines do, so that nothing jumps.
 *
 * @param {Graph} graph
 * @param {number} width
 * @returns {Layout}
 */
export function layoutOf({ columns, lines }, width) {
  const spaces = Math.max(1, columns.length - 1);
  const nodeWidth = Math.min(NODE_WIDTH_MAX, Math.floor((width - spaces * SPACE_MIN) / Math.max(1, columns.length)));
  const step = (width - nodeWidth) / spaces;
  const heights = columns.map(({ nodes }) => nodes.map((node) => heightOf(node, nodeWidth)));
  const sums = heights.map((each) => each.reduce((sum, one) => sum + one, 0));
  const height = Math.max(NODE_HEIGHT, ...sums.map((sum, at) => sum + GAP * (heights[at].length - 1)));
  const placed = columns.map(({ title, nodes }, at) => {
    const x = columns.length > 1 ? Math.round(at * step) : 0;
    const gap = nodes.length > 1 ? Math.min(GAP_MAX, (height - sums[at]) / (nodes.length - 1)) : 0;
    let y = (height - sums[at] - gap * (nodes.length - 1)) / 2;
    const own = nodes.map((node, row) => {
      const one = { ...node, x, y: Math.round(y), width: nodeWidth, height: heights[at][row] };
      y += one.height + gap;
      return one;
    });
    return { title, x, width: nodeWidth, nodes: own };
  });
  const nodes = placed.flatMap((column) => column.nodes);
  const top = roundedUp(Math.max(TOKENS_MIN, ...nodes.map((node) => node.tokens)));
  return { width, height, nodes, columns: placed, top, lines: placedLines(lines, nodes, (NODE_HEIGHT - 8) / top) };
}

/** @param {PlacedNode | undefined} node */
const middleOf = (node) => (node ? node.y + node.height / 2 : 0);

/**
 * @param {Line[]} lines
 * @param {PlacedNode[]} nodes
 * @param {number} scale
 */
function placedLines(lines, nodes, scale) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const found = lines.flatMap((line) => {
    const [from, to] = [byId.get(line.from), byId.get(line.to)];
    if (!from || !to) return [];
    const isBusy = line.tokens > 0 || line.ended > 0 || line.inFlight > 0;
    const px = isBusy ? Math.max(LEAST_PX, line.tokens * scale) : IDLE_PX;
    return [{ ...line, x0: from.x + from.width, y0: 0, x1: to.x, y1: 0, px, isBusy }];
  });
  /**
   * @param {"from" | "to"} end
   * @param {"from" | "to"} other
   * @param {"y0" | "y1"} at
   */
  const spread = (end, other, at) => {
    const middle = (/** @type {PlacedLine} */ line) => middleOf(byId.get(line[other]));
    /** @type {Map<string, PlacedLine[]>} */
    const groups = new Map();
    for (const line of found) groups.set(line[end], [...(groups.get(line[end]) ?? []), line]);
    for (const [id, own] of groups) {
      const node = byId.get(id);
      own.sort((one, two) => middle(one) - middle(two));
      const sum = own.reduce((total, line) => total + line.px + 1, 0);
      const squeeze = Math.min(1, ((node?.height ?? 0) - 6) / sum);
      let y = middleOf(node) - (sum * squeeze) / 2;
      for (const line of own) {
        line[at] = y + ((line.px + 1) * squeeze) / 2;
        y += (line.px + 1) * squeeze;
      }
    }
  };
  spread("from", "to", "y0");
  spread("to", "from", "y1");
  return found;
}

/**
 * Return a point of a line at `share` of its way, as [x, y]: it leaves and arrives horizontally.
 *
 * @param {PlacedLine} line
 * @param {number} share
 */
export function pointAt({ x0, y0, x1, y1 }, share) {
  const rest = 1 - share;
  const middle = (x0 + x1) / 2;
  const x = rest ** 3 * x0 + 3 * rest * share * middle + share ** 3 * x1;
  const y = (rest ** 3 + 3 * rest ** 2 * share) * y0 + (3 * rest * share ** 2 + share ** 3) * y1;
  return [x, y];
}

/**
 * Return the ids of the nodes that a node's requests have passed and will pass, with its own.
 *
 * Where some of its lines have traffic, only those count.
 *
 * @param {Pick<PlacedLine, "from" | "to" | "isBusy">[]} lines
 * @param {string} id
 */
export function wayOf(lines, id) {
  const isBusy = lines.some((line) => line.isBusy && (line.from === id || line.to === id));
  const usable = isBusy ? lines.filter((line) => line.isBusy) : lines;
  const found = new Set([id]);
  for (const [from, to] of /** @type {const} */ ([
    ["from", "to"],
    ["to", "from"],
  ])) {
    let edge = [id];
    while (edge.length) {
      edge = usable.filter((line) => edge.includes(line[from]) && !found.has(line[to])).map((line) => line[to]);
      for (const next of edge) found.add(next);
    }
  }
  return found;
}

/**
 * Return the node that an arrow key leads to: of the same column, or the nearest of the next, if any of those that
 * lines lead to; undefined: there is none.
 *
 * @param {Layout} layout
 * @param {string} id
 * @param {string} key
 */
export function neighbourOf({ columns, lines }, id, key) {
  const at = columns.findIndex((column) => column.nodes.some((node) => node.id === id));
  const own = columns[at]?.nodes.find((node) => node.id === id);
  if (!own) return undefined;
  const down = /** @type {Record<string, number>} */ ({ ArrowUp: -1, ArrowDown: 1 })[key];
  if (down) return columns[at].nodes[columns[at].nodes.indexOf(own) + down];
  const across = /** @type {Record<string, number>} */ ({ ArrowLeft: -1, ArrowRight: 1 })[key];
  const way = wayOf(lines, id);
  const others = (across && columns[at + across]?.nodes) || [];
  const linked = others.filter((node) => way.has(node.id));
  const far = (/** @type {PlacedNode} */ node) => Math.abs(middleOf(node) - middleOf(own));
  return (linked.length ? linked : others).toSorted((one, other) => far(one) - far(other))[0];
}
