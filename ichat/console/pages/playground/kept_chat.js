// The chat as a text that stays with the tab when its page is loaded again: pure functions.

import { t } from "../../texts.js";
import { ended, isOpen } from "./reply.js";

/** @import { Chat, Entry } from "./chat.js" */

const FORMAT = 1;
/** Browsers keep some five million characters of a tab; a longer chat is kept without its pictures, or not at all. */
const LENGTH_MAX = 2_000_000;
const CUT = { message: t("The page was loaded anew before the answer was whole.") };

/**
 * @param {Entry} entry
 * @returns {Entry}
 */
function closed(entry) {
  if (entry.kind !== "reply" || !isOpen(entry.reply)) return entry;
  const { reply } = entry;
  return { ...entry, reply: ended(reply, reply.lastAt ?? reply.beganAt, { error: CUT }) };
}

/**
 * Return a chat as a text; "" if it is too long. An answer under way ends there.
 *
 * @param {Chat} chat
 */
export function packed({ sides, settings, draft }) {
  const whole = {
    format: FORMAT,
    sides: sides.map(({ id, model, entries }) => ({ id, model, entries: entries.map(closed), control: null })),
    settings,
    draft,
  };
  const text = JSON.stringify(whole);
  if (text.length <= LENGTH_MAX) return text;
  const bare = JSON.stringify(whole, (name, value) => (name === "pictures" ? [] : value));
  return bare.length <= LENGTH_MAX ? bare : "";
}

/**
 * Return the chat that a text has; null: there is none that this console understands.
 *
 * @param {string | null} text
 * @returns {Chat | null}
 */
export function unpacked(text) {
  if (!text) return null;
  try {
    const { format, sides, settings, draft } = JSON.parse(text);
    const isWhole = format === FORMAT && sides.length > 0 && settings && typeof draft.text === "string";
    return isWhole ? { sides, settings, draft } : null;
  } catch {
    return null;
  }
}

/**
 * Return the highest id in a chat: new entries get higher ids.
 *
 * @param {Chat} chat
 */
export const lastIdIn = ({ sides }) =>
  Math.max(0, ...sides.flatMap(({ id, entries }) => [id, ...entries.map((one) => one.id)]));
