// The scoreboard of two answers: their speed side by side, live, and as a picture to pass on.

import { sentences, t } from "../../texts.js";
import { Button, Card, colorOf, html, toast, useTick } from "../../ui.js";
import { roundsOf, scoreOf, winnerOf } from "./score.js";

/** @import { Side } from "./chat.js" */
/** @import { Line } from "./score.js" */

const WIDTH = 960;
const ROW = 46;
const TOP = 96;
const NAME_PX = 360;
const DENSITY = 2;
const FONT = "system-ui, sans-serif";

/**
 * Return a picture of a score as a canvas.
 *
 * @param {[string, string]} models
 * @param {Line[]} lines
 * @param {-1 | 0 | 1} winner
 */
function drawn(models, lines, winner) {
  const canvas = document.createElement("canvas");
  const height = TOP + lines.length * ROW + 24;
  Object.assign(canvas, { width: WIDTH * DENSITY, height: height * DENSITY });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(DENSITY, DENSITY);
  context.fillStyle = colorOf("surface");
  context.fillRect(0, 0, WIDTH, height);
  const [middle, half] = [WIDTH / 2, WIDTH / 2 - 150];
  const write = (/** @type {string} */ text, /** @type {number} */ x, /** @type {number} */ y, how = {}) => {
    const { align = "center", color = "text", weight = 400, size = 17, most = NAME_PX } = /** @type {any} */ (how);
    Object.assign(context, { textAlign: align, fillStyle: colorOf(color), font: `${weight} ${size}px ${FONT}` });
    context.fillText(text.replace(/[\p{Cc}\p{Cf}]/gu, "").slice(0, 60), x, y, most);
  };
  models.forEach((model, at) => {
    const isWinner = winner === (at ? 1 : -1);
    const color = isWinner ? "ok" : "text";
    const x = at ? WIDTH - 28 : 28;
    write(`${model}${isWinner ? " ✓" : ""}`, x, 46, { align: at ? "right" : "left", weight: 650, size: 22, color });
  });
  write("iChat", middle, 46, { color: "muted", size: 15 });
  lines.forEach((line, row) => {
    const y = TOP + row * ROW;
    write(line.title, middle, y - 6, { color: "muted", size: 13 });
    for (const at of [0, 1]) {
      const isWinner = line.winner === (at ? 1 : -1);
      const length = line.shares[at] * half;
      context.fillStyle = colorOf(isWinner ? "ok" : "chart-5");
      context.fillRect(at ? middle + 2 : middle - 2 - length, y, length, 14);
      const align = at ? "right" : "left";
      write(line.texts[at], at ? WIDTH - 28 : 28, y + 13, {
        align,
        weight: isWinner ? 650 : 400,
        color: isWinner ? "ok" : "text",
      });
    }
  });
  return canvas;
}

/**
 * Put a picture on the clipboard, or save it where the browser does not let a page do that.
 *
 * @param {HTMLCanvasElement} canvas
 */
async function pass(canvas) {
  const blob = await new Promise((/** @type {(blob: Blob | null) => void} */ resolve) => canvas.toBlob(resolve));
  if (!blob) throw new Error(t("The browser could not make the picture."));
  if (navigator.clipboard?.write && globalThis.ClipboardItem) {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    toast(t("The picture is on the clipboard."));
    return;
  }
  const link = Object.assign(document.createElement("a"), {
    href: URL.createObjectURL(blob),
    download: "scoreboard.png",
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/**
 * The scoreboard of the newest answers of two sides; nothing before both have begun.
 *
 * @param {{ sides: Side[] }} props
 */
export function Scoreboard({ sides }) {
  useTick();
  const rounds = roundsOf(sides);
  const last = rounds.at(-1);
  if (!last) return null;
  const { models, replies } = last;
  const now = performance.now();
  const lines = scoreOf(replies, now);
  const winner = winnerOf(replies, now);
  const won = (/** @type {number} */ who) => rounds.filter((one) => winnerOf(one.replies, now) === who).length;
  const sums = rounds.length > 1 ? t("Messages won: {left} to {right}.", { left: won(-1), right: won(1) }) : "";
  const lead = sentences(winner !== 0 && t("{model} wins.", { model: models[winner > 0 ? 1 : 0] }), sums);
  const side = (/** @type {Line} */ line, /** @type {0 | 1} */ at) => {
    const isWinner = line.winner === (at ? 1 : -1);
    return html`<span role="cell" class=${`score-side ${at ? "right-side" : ""} ${isWinner ? "won" : ""}`}>
      <b class="num">${line.texts[at]}${isWinner && html`<span class="only-read"> ${t("(better)")}</span>`}</b>
      <span class="score-bar"><i style=${{ width: `${Math.round(line.shares[at] * 100)}%` }}></i></span></span>`;
  };
  return html`<${Card} title=${t("Scoreboard")} lead=${lead} actions=${html`<${Button} small tone="quiet" icon="copy"
      onClick=${() => pass(drawn(models, lines, winner))}>${t("Copy as a picture")}<//>`}>
    <div class="score" role="table" aria-label=${t("Scoreboard")}>
      <div role="row"><b role="columnheader" class="clip" title=${models[0]}>${models[0]}</b>
        <span role="columnheader" class="only-read">${t("Figure")}</span>
        <b role="columnheader" class="clip right" title=${models[1]}>${models[1]}</b></div>
      ${lines.map(
        (line) => html`<div role="row" key=${line.title}>${side(line, 0)}
        <span role="rowheader" class="muted">${line.title}</span>${side(line, 1)}</div>`,
      )}
    </div><//>`;
}
