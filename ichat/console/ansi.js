// The colours that programs write for terminals, as parts of a text; nothing else that a terminal would obey.

import { t } from "./texts.js";

/** @typedef {{ text: string, look: string }} Part a part of a line, and its classes */

/** Selections of colours, other sequences of a terminal, and characters that a page would obey or not show. */
const MARKS = new RegExp(
  [
    String.raw`\x1b\[([0-9;:]*)m`,
    String.raw`\x1b\[[0-9;?:<=>!]*[ -/]*[@-~]`,
    String.raw`\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?`,
    String.raw`[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]`,
  ].join("|"),
  "g",
);

/** Characters of a line that are shown; the file has the rest. */
export const SHOWN_MAX = 4000;

/**
 * Return a line as parts with the classes of their colours. Characters that control a terminal, or turn the direction
 * of the text, are written as escapes.
 *
 * @param {string} line
 * @returns {Part[]}
 */
export function partsOf(line) {
  const cut =
    line.length > SHOWN_MAX
      ? t("{line} … {count} characters more", { line: line.slice(0, SHOWN_MAX), count: line.length - SHOWN_MAX })
      : line;
  /** @type {Part[]} */
  const parts = [];
  const style = { color: "", isBold: false, isDim: false };
  let from = 0;
  let text = "";
  const close = () => {
    if (text) parts.push({ text, look: lookOf(style) });
    text = "";
  };
  for (const found of cut.matchAll(MARKS)) {
    text += cut.slice(from, found.index);
    from = found.index + found[0].length;
    if (found[1] !== undefined) {
      close();
      apply(style, found[1]);
    } else if (found[0][0] !== "\x1b") text += escaped(found[0]);
    else if (found[0].length === 1) text += "\\x1b";
  }
  text += cut.slice(from);
  close();
  return parts;
}

/** @typedef {{ color: string, isBold: boolean, isDim: boolean }} Style */

const COLORS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/**
 * @param {Style} style
 * @param {string} codes
 */
function apply(style, codes) {
  const numbers = codes.split(/[;:]/).map(Number);
  for (let at = 0; at < numbers.length; at += 1) {
    const code = numbers[at];
    if (code === 0) Object.assign(style, { color: "", isBold: false, isDim: false });
    else if (code === 1) style.isBold = true;
    else if (code === 2) style.isDim = true;
    else if (code === 22) Object.assign(style, { isBold: false, isDim: false });
    else if (code >= 30 && code <= 37) style.color = COLORS[code - 30];
    else if (code >= 90 && code <= 97) style.color = COLORS[code - 90];
    else if (code === 39) style.color = "";
    else if (code === 38 || code === 48) {
      const [kind, value] = numbers.slice(at + 1);
      if (code === 38 && kind === 5) style.color = COLORS[value < 16 ? value % 8 : -1] ?? "";
      at += kind === 5 ? 2 : 4;
    }
  }
}

/** @param {Style} style */
function lookOf({ color, isBold, isDim }) {
  return [color && `ansi-${color}`, isBold && "ansi-bold", isDim && "ansi-dim"].filter(Boolean).join(" ");
}

/** @param {string} character */
function escaped(character) {
  const code = character.charCodeAt(0);
  return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
}
