// The score of two answers to the same message: pure functions.

import { t } from "../../texts.js";
import { duration, number } from "../../ui/format.js";
import { figuresOf, isOpen } from "./reply.js";

/** @import { Entry, ReplyEntry, Side } from "./chat.js" */
/** @import { Reply } from "./reply.js" */

/** Values that differ by less have no winner. */
const EQUAL = 0.02;

/**
 * A line of the score: both values in words, both shares of a bar, and the better answer: -1: the left answer, 1: the
 * right answer, 0: neither.
 *
 * @typedef {{ title: string, texts: [string, string], shares: [number, number], winner: -1 | 0 | 1 }} Line
 * @typedef {[Reply, Reply]} Pair
 * @typedef {{ models: [string, string], replies: Pair }} Round
 * @typedef {ReturnType<typeof figuresOf>} Figures
 */

/** @type {{ title: string, of: (figures: Figures) => number | null, words: (value: number) => string,
 *   better: -1 | 0 | 1, isOfWhole?: boolean }[]} */
const LINES = [
  { title: t("First token"), of: (one) => one.first_s, words: duration, better: -1 },
  { title: t("Tokens/s"), of: (one) => one.tokens_s, words: (value) => number(value), better: 1 },
  { title: t("Whole answer"), of: (one) => one.total_s, words: duration, better: -1, isOfWhole: true },
  { title: t("Tokens"), of: (one) => one.out, words: (value) => number(value), better: 0 },
];

/**
 * Return the lines of the score of two answers, as far as they have arrived.
 *
 * @param {Pair} pair
 * @param {number} now
 * @returns {Line[]}
 */
export function scoreOf(pair, now) {
  return LINES.map(({ title, of, words, better, isOfWhole }) => {
    const values = pair.map((reply) => of(figuresOf(reply, now)));
    const counts = pair.map((reply, at) => values[at] !== null && !(isOfWhole ? reply.state !== "done" : reply.error));
    const [left, right] = values.map((value) => value ?? 0);
    const most = Math.max(left, right);
    const isClear = counts[0] && counts[1] && Math.abs(left - right) > EQUAL * most;
    const winner = isClear && better ? (left > right === better > 0 ? -1 : 1) : 0;
    const text = (/** @type {number} */ at) => (values[at] === null ? "–" : words(/** @type {number} */ (values[at])));
    const share = (/** @type {number} */ value) => (most ? value / most : 0);
    return { title, texts: [text(0), text(1)], shares: [share(left), share(right)], winner };
  });
}

/**
 * Return which answer is better in more lines: -1: the left, 1: the right, 0: neither, or not known yet.
 *
 * An answer that failed has lost against an answer that has not.
 *
 * @param {Pair} pair
 * @param {number} now
 * @returns {-1 | 0 | 1}
 */
export function winnerOf(pair, now) {
  if (pair.some(isOpen)) return 0;
  const [left, right] = pair.map((reply) => reply.state === "failed");
  if (left !== right) return left ? 1 : -1;
  return /** @type {-1 | 0 | 1} */ (Math.sign(scoreOf(pair, now).reduce((sum, line) => sum + line.winner, 0)));
}

/**
 * Return the newest answer of a side to each message, by the message's id.
 *
 * @param {Entry[]} entries
 */
function repliesIn(entries) {
  /** @type {Map<number, ReplyEntry>} */
  const found = new Map();
  let asked = 0;
  for (const entry of entries) {
    if (entry.kind === "user") asked = entry.id;
    if (entry.kind === "reply" && asked) found.set(asked, entry);
  }
  return found;
}

/**
 * Return the answers of two sides to the same messages, with the models that gave them, oldest first.
 *
 * @param {Pick<Side, "entries">[]} sides
 * @returns {Round[]}
 */
export function roundsOf([left, right]) {
  if (!left || !right) return [];
  const others = repliesIn(right.entries);
  return [...repliesIn(left.entries)].flatMap(([id, one]) => {
    const other = others.get(id);
    return other ? [{ models: [one.model, other.model], replies: [one.reply, other.reply] }] : [];
  });
}
