// The picture's lines and the dots that run along them, on two canvases: lines change with the state, dots each frame.

import { pointAt, wayOf } from "./layout.js";

/** @import { Layout, PlacedLine } from "./layout.js" */

/** A dot's way in a second, in pixels. */
const SPEED = 110;
const DOTS_MAX = 260;
/** The most dots of a queue that are drawn; its node has the number. */
const QUEUE_MAX = 60;
const COLORS = 5;

/**
 * `lines`: the colours of lines, by their `color`.
 *
 * @typedef {{ lines: string[], idle: string, queue: string }} Colors
 * @typedef {{ line: PlacedLine, count: number, offset: number, seconds: number, radius: number }} Stream
 */

/**
 * Return the dots of each busy line: the more tokens, the more dots; all of them are bounded.
 *
 * @param {PlacedLine[]} lines
 * @returns {Stream[]}
 */
export function streamsOf(lines) {
  const busy = lines.filter((line) => line.isBusy);
  const wanted = busy.map((line) => {
    const length = Math.hypot(line.x1 - line.x0, line.y1 - line.y0);
    const each = Math.min(6, 1 + Math.log10(1 + line.tokens + line.ended));
    return { length, count: Math.max(1, (length / 110) * each) };
  });
  const factor = Math.min(1, DOTS_MAX / wanted.reduce((sum, one) => sum + one.count, 0));
  return busy.map((line, at) => ({
    line,
    count: Math.round(wanted[at].count * factor),
    offset: ((at * 37) % 100) / 100,
    seconds: Math.max(0.5, wanted[at].length / SPEED),
    radius: Math.min(3.2, 1.4 + line.px / 12),
  }));
}

/**
 * Draw the lines and the queues.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Colors} colors
 * @param {string | null} chosen the id of the node that is pointed at: lines that have nothing to do with it are pale
 */
export function paintLines(context, layout, colors, chosen) {
  context.clearRect(0, 0, layout.width, layout.height);
  const way = chosen === null ? null : wayOf(layout.lines, chosen);
  const isOn = (/** @type {PlacedLine} */ line) => !way || (way.has(line.from) && way.has(line.to));
  for (const line of [...layout.lines].sort((one, other) => Number(one.isBusy) - Number(other.isBusy))) {
    const middle = (line.x0 + line.x1) / 2;
    context.beginPath();
    context.moveTo(line.x0, line.y0);
    context.bezierCurveTo(middle, line.y0, middle, line.y1, line.x1, line.y1);
    context.lineWidth = line.px;
    context.globalAlpha = (line.isBusy ? 0.34 : 1) * (isOn(line) ? 1 : 0.2) * (way && isOn(line) ? 1.6 : 1);
    context.strokeStyle = line.isBusy ? colors.lines[line.color % COLORS] : colors.idle;
    context.stroke();
  }
  context.globalAlpha = 1;
  context.fillStyle = colors.queue;
  for (const { x, y, height, queued } of layout.nodes) {
    const rows = Math.max(3, Math.floor((height - 10) / 6));
    for (let at = 0; at < Math.min(queued, QUEUE_MAX); at += 1) {
      const [column, row] = [Math.floor(at / rows), at % rows];
      context.beginPath();
      context.arc(x - 6 - column * 6, y + height / 2 + (row - (Math.min(queued, rows) - 1) / 2) * 6, 2.2, 0, 7);
      context.fill();
    }
  }
}

/**
 * Draw the dots as they are at a time.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {Stream[]} streams
 * @param {Colors} colors
 * @param {number} seconds
 */
export function paintDots(context, layout, streams, colors, seconds) {
  context.clearRect(0, 0, layout.width, layout.height);
  for (const { line, count, offset, seconds: whole, radius } of streams) {
    context.fillStyle = colors.lines[line.color % COLORS];
    context.beginPath();
    for (let at = 0; at < count; at += 1) {
      const [x, y] = pointAt(line, (seconds / whole + offset + at / count) % 1);
      context.moveTo(x + radius, y);
      context.arc(x, y, radius, 0, 7);
    }
    context.fill();
  }
}
